"""A real HTTP server in a thread that can be told how to answer: what a webhook meets, and what it must survive."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["How", "Receiver", "Request", "answer", "raw", "receiver"]


@dataclass(frozen=True)
class Request:
    """What arrived."""

    path: str
    headers: Message
    body: bytes

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events in it, one or several."""
        body = gzip.decompress(self.body) if self.headers.get("Content-Encoding") == "gzip" else self.body
        content = json.loads(body)
        return content if isinstance(content, list) else [content]

    @property
    def lines(self) -> list[str]:
        """The same as they were sent."""
        return [json.dumps(one, ensure_ascii=False, separators=(",", ":")) + "\n" for one in self.events]


How = Callable[[BaseHTTPRequestHandler, Request], None]
"""Answers a request, in any way."""


def answer(status: int, body: bytes = b"", **headers: str) -> How:
    """An answer with this status."""

    def how(handler: BaseHTTPRequestHandler, request: Request) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return how


def raw(*pieces: bytes, pause_s: float = 0.0) -> How:
    """These bytes, whatever they are, and the end of the connection."""

    def how(handler: BaseHTTPRequestHandler, request: Request) -> None:
        handler.close_connection = True
        with contextlib.suppress(OSError):
            for piece in pieces:
                handler.wfile.write(piece)
                handler.wfile.flush()
                time.sleep(pause_s)

    return how


@dataclass
class Receiver:
    """Remembers what it has accepted. `how` decides on each request; None: 200."""

    url: str = ""
    how: Callable[[Request], How | None] = lambda request: None
    delay_s: float = 0.0
    """Up to so long, at random, before it answers."""
    accepted: list[Request] = field(default_factory=list)
    seen: list[Request] = field(default_factory=list)
    """Also those that were not accepted."""
    is_broken: bool = False
    """It closes every connection without a word."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    under_way: int = 0
    most_under_way: int = 0

    @property
    def lines(self) -> list[str]:
        """All events that were accepted, in the order of arrival."""
        with self.lock:
            return [line for request in self.accepted for line in request.lines]

    @property
    def events(self) -> list[dict[str, Any]]:
        with self.lock:
            return [event for request in self.accepted for event in request.events]

    def always(self, how: How) -> None:
        self.how = lambda request: how


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512
    receiver: Receiver

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nothing to tell."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    disable_nagle_algorithm = True
    wbufsize = -1

    def do_POST(self) -> None:
        one = self.server.receiver
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.path, self.headers, body)
        if one.is_broken:
            self.close_connection = True
            return
        with one.lock:
            one.seen.append(request)
            one.under_way += 1
            one.most_under_way = max(one.most_under_way, one.under_way)
        try:
            how = one.how(request)
            if how is None:  # it has it, and then takes its time
                with one.lock:
                    one.accepted.append(request)
            if one.delay_s:
                time.sleep(random.uniform(0, one.delay_s))
            (how or answer(200))(self, request)
        finally:
            with one.lock:
                one.under_way -= 1

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def receiver(tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> Iterator[Receiver]:
    """A receiver on a free port."""
    server = _Server((host, 0), _Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    scheme = "https" if tls is not None else "http"
    server.receiver = Receiver(
        f"{scheme}://{'localhost' if tls else host}:{server.server_address[1]}/hook?token=s3cr3t-in-query"
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
