"""`pgcdc playground`."""

from __future__ import annotations

__all__ = ["playground"]


def playground() -> None:
    """Placeholder."""
