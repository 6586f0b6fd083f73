"""Signals that end the process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType


def on_end_signals(handle: Callable[[int, FrameType | None], None]) -> None:
    """Call `handle` at Ctrl-C and SIGTERM. Ctrl-C reaches a child that was forked and not yet replaced, too: it must not
    act as if it were this process, which ends it."""
    owner = os.getpid()

    def handle_here(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            handle(number, frame)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle_here)
