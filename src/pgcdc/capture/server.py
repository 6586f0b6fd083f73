"""Both sides of the control socket, through which queries follow the spool, send acks and ask for confirmation.

Requests and answers are JSON, one per line, over a Unix socket in a folder that only its owner can enter. Two requests
wait: `wait` until the spool has grown, and `confirm` until the acked position is confirmed to the source. Clients that
`follow` also get pushes: the status once a second, and messages for people.
"""

from __future__ import annotations

import contextlib
import json
import math
import selectors
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pgcdc.core.errors import ConfigError, ConnectionLost, PgcdcError
from pgcdc.core.position import Position


def remove_socket(holder: dict[str, Any]) -> None:
    """Remove the socket that a killed holder of the capture's lock left behind."""
    if "address" in holder:
        shutil.rmtree(Path(holder["address"]).parent, ignore_errors=True)


_PUSH = b'{"push":'  # Lines that start with this are pushes, not answers


@dataclass(slots=True)
class _Client:
    socket: socket.socket
    buffer: bytes = b""
    waits_until: float = math.inf  # On the monotonic clock; infinite: not waiting
    wants_confirmation: bool = False
    follows: bool = False
    seen: int = field(default=0)
    consumer: str | None = None  # The consumer that this client exclusively reads for


class ControlServer:
    """Runs inside the capture's loop, so no callback may block."""

    def __init__(
        self, selector: selectors.BaseSelector, answer: Callable[[dict[str, Any]], dict[str, Any] | None]
    ) -> None:
        self._selector = selector
        self._answer = answer
        self._folder = tempfile.mkdtemp(prefix="pgcdc-")
        self.address = str(Path(self._folder) / "control")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen()
        self._listener.setblocking(False)
        self._clients: dict[int, _Client] = {}
        self._version = 0
        self.confirm_requested = False
        self.needed = Position.at(0, 0)
        """Some client needs the spool to reach this position before anything can be delivered and released."""
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def has_clients(self) -> bool:
        return bool(self._clients)

    @property
    def has_waiters(self) -> bool:
        return self.due_s() < math.inf

    def wake(self) -> None:
        """The spool has grown: answer the clients that wait for it."""
        self._version += 1
        self._end_waits(sys.float_info.max)

    def due_s(self) -> float:
        """Seconds until the first waiter's timeout; infinite without waiters."""
        return max(0.0, min((one.waits_until for one in self._clients.values()), default=math.inf) - time.monotonic())

    def expire(self) -> None:
        """Answer the clients whose wait has timed out."""
        self._end_waits(time.monotonic())

    def _end_waits(self, until: float) -> None:
        for client in [one for one in self._clients.values() if one.waits_until <= until]:
            self._end_wait(client)

    def confirmed(self, lsn: int) -> None:
        """A status update with `lsn` was sent: answer the clients that wait for it."""
        self.confirm_requested = False
        for client in list(self._clients.values()):
            if client.wants_confirmation:
                client.wants_confirmation = False
                self._send(client, {"lsn": lsn})

    def push(self, content: dict[str, Any]) -> None:
        """Send to all followers. Drops a follower that does not read."""
        line = json.dumps({"push": content}).encode() + b"\n"
        for client in [one for one in self._clients.values() if one.follows]:
            try:
                is_sent = client.socket.send(line, socket.MSG_DONTWAIT) == len(line)
            except OSError:
                is_sent = False
            if not is_sent:
                self._drop(client)

    def close(self, error: PgcdcError | None = None) -> None:
        """Close all connections; with an error, tell the waiters."""
        for client in list(self._clients.values()):
            if error is not None:
                self._send(client, {"error": error.to_json()})
        for client in list(self._clients.values()):
            self._drop(client)
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self, _: selectors.SelectorKey) -> None:
        connection, _address = self._listener.accept()
        client = _Client(connection)
        self._clients[connection.fileno()] = client
        self._selector.register(connection, selectors.EVENT_READ, self._receive)

    def _receive(self, key: selectors.SelectorKey) -> None:
        client = self._clients[key.fd]
        try:
            data = client.socket.recv(65_536)
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        client.buffer += data
        while b"\n" in client.buffer:
            line, _, client.buffer = client.buffer.partition(b"\n")
            try:
                request = json.loads(line)
            except ValueError:
                self._drop(client)
                return
            self._handle(client, request)

    def _handle(self, client: _Client, request: dict[str, Any]) -> None:
        if request.get("do") == "wait":
            client.waits_until = time.monotonic() + float(request["timeout_s"])
            self.needed = max(self.needed, Position.parse(request.get("until", str(self.needed))))
            if client.seen != self._version:
                self._end_wait(client)
        elif request.get("do") == "confirm":
            client.wants_confirmation = True
            self.confirm_requested = True
        elif request.get("do") == "follow":
            client.follows = True
            self._send(client, {})
        else:
            try:
                if request.get("exclusive"):
                    self._claim(client, request["consumer"])
                reply = self._answer(request)
            except PgcdcError as error:
                reply = {"error": error.to_json()}
            except (KeyError, TypeError, ValueError) as error:
                reply = {"error": PgcdcError(f"not a request: {error!r}").to_json()}
            if reply is not None:
                self._send(client, reply)

    def _claim(self, client: _Client, consumer: str) -> None:
        """Allow one connection per consumer: two queries would acknowledge for each other."""
        if any(other.consumer == consumer for other in self._clients.values() if other is not client):
            raise ConfigError(
                f"another query already reads consumer {consumer!r}",
                "Give each query its own name: option('consumer', ...)",
            )
        client.consumer = consumer

    def _end_wait(self, client: _Client) -> None:
        client.waits_until = math.inf
        moved = client.seen != self._version
        client.seen = self._version
        self._send(client, {"moved": moved})

    def _send(self, client: _Client, reply: dict[str, Any]) -> None:
        try:
            client.socket.sendall(json.dumps(reply).encode() + b"\n")
        except OSError:
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        descriptor = client.socket.fileno()
        if descriptor in self._clients:
            del self._clients[descriptor]
            self._selector.unregister(client.socket)
            client.socket.close()


# --- the client's side


class CaptureGone(ConnectionLost):
    """The capture process ended; restart it or join a new one."""


class Channel:
    """One connection to a control socket: requests, answers, and the pushes between them. Not thread-safe."""

    who = "the run"

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(address)
        except OSError as error:
            self._socket.close()
            raise CaptureGone(f"{self.who} does not answer") from error
        self._buffer = b""
        self.pushed: dict[str, Any] = {}  # The latest pushed status
        self.said: list[str] = []  # Pushed messages for people, not yet shown
        self._is_ended = False

    def request(self, content: dict[str, Any], timeout_s: float = 120.0) -> dict[str, Any]:
        """Send one request and wait for its answer. Raises the error that the other process reports."""
        is_sent = False
        try:
            self._socket.settimeout(timeout_s)
            with contextlib.suppress(BrokenPipeError):  # the other side may have ended, but sent the reason first
                self._socket.sendall(json.dumps(content).encode() + b"\n")
                is_sent = True
            while not (line := self._take_line()) and (data := self._socket.recv(65_536)):
                self._buffer += data
        except OSError as error:
            raise CaptureGone(f"{self.who} does not answer") from error
        reply: dict[str, Any] = json.loads(line) if line else {}
        if "error" in reply:
            raise PgcdcError.from_json(reply["error"])
        if not line or not is_sent:
            raise CaptureGone(f"{self.who} ended")
        return reply

    def close(self) -> None:
        """Close the connection; the other side keeps running."""
        self._socket.close()

    def take_pushed(self) -> None:
        """Read the pushes that have arrived, without waiting."""
        with contextlib.suppress(OSError):  # no more data; or disconnected, which the next request will notice
            self._socket.settimeout(0)
            while data := self._socket.recv(65_536):
                self._buffer += data
            self._is_ended = True
        while self._buffer.startswith(_PUSH) and b"\n" in self._buffer:
            line, _, self._buffer = self._buffer.partition(b"\n")
            self._note(line)

    @property
    def is_cut(self) -> bool:
        """Whether the connection has ended without a last word."""
        return self._is_ended and not self._buffer

    def _take_line(self) -> bytes:
        """The next complete answer. Keeps the pushes that come before it."""
        while b"\n" in self._buffer:
            line, _, self._buffer = self._buffer.partition(b"\n")
            if not line.startswith(_PUSH):
                return line
            self._note(line)
        return b""

    def _note(self, line: bytes) -> None:
        pushed = json.loads(line)["push"]
        self.pushed = pushed.get("status", self.pushed)
        self.said += pushed.get("say", ())
