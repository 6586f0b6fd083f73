"""The control socket of a run: its sources say which batches they plan, and other processes ask how it is doing."""

from __future__ import annotations

import contextlib
import selectors
import threading
from collections.abc import Callable
from typing import Any

from pgcdc.capture.control import Channel
from pgcdc.capture.server import ControlServer
from pgcdc.core.errors import PgcdcError

__all__ = ["RunServer"]


class RunServer:
    """Serves requests in a thread of its own, one after the other: every answer is given at once."""

    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._selector = selectors.DefaultSelector()
        self._server = ControlServer(self._selector, answer)
        self.address = self._server.address
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and remove the socket."""
        self._is_closed.set()
        with contextlib.suppress(PgcdcError):
            Channel(self.address).close()  # so that it looks up
        self._thread.join()

    def _serve(self) -> None:
        while not self._is_closed.is_set():
            for key, _ in self._selector.select():
                key.data(key)
        self._server.close()
        self._selector.close()
