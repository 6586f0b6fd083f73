"""Moments as people read them."""

from __future__ import annotations

from datetime import datetime


def show_time(seconds: float | None = None) -> str:
    """Local time, to the second; now if none is given."""
    moment = datetime.now() if seconds is None else datetime.fromtimestamp(seconds)
    return f"{moment:%Y-%m-%d %H:%M:%S}"
