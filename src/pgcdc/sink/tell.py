"""What an adapter has to say beside its events, for the person at the terminal or in the log of the service."""

from __future__ import annotations

import sys

__all__ = ["tell"]


def tell(adapter: str, text: str) -> None:
    """One line on standard error."""
    print(f"pgcdc: adapter {adapter}: {text}", file=sys.stderr, flush=True)
