"""The control socket of a capture without a capture behind it."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any

from pgcdc.capture.server import ControlServer
from pgcdc.core.errors import PgcdcError

__all__ = ["Loop"]


class Loop:
    """A capture's loop with nothing but the control socket in it; `call` runs something inside of it."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.replies: dict[str, dict[str, Any] | PgcdcError | None] = {}
        self._selector = selectors.DefaultSelector()
        self.server = ControlServer(self._selector, self._answer)
        self._calls: list[Callable[[], None]] = []
        self._wake, waker = socket.socketpair()
        self._waker = waker
        self._selector.register(self._wake, selectors.EVENT_READ, lambda _: self._wake.recv(100))
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any] | None:
        self.requests.append(request)
        reply = self.replies.get(request["do"], {})
        if isinstance(reply, PgcdcError):
            raise reply
        return reply

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(0.02):
                key.data(key)
            while self._calls:
                self._calls.pop(0)()
            self.server.expire()

    def call(self, what: Callable[[], None]) -> None:
        done = threading.Event()
        self._calls += [what, done.set]
        self._waker.send(b"x")
        assert done.wait(5)

    def stop(self) -> None:
        self._stopping = True
        self._waker.send(b"x")
        self._thread.join(5)
        self.server.close()
        self._wake.close()
        self._waker.close()
        self._selector.close()
