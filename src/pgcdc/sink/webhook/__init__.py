"""The adapter `webhook`: events as HTTP requests."""
