"""HTTP clients of Python, measured against one receiver: the figures of docs/decisions/0018-http-client.md.

    python benchmarks/http_clients.py                    those that are installed
    python benchmarks/http_clients.py aiohttp urllib3    some of them; --requests 20000, --workers 16, --rounds 3

Each client posts a JSON event of about 500 bytes again and again, from a process of its own, with as many requests under way
as there are workers, and then arrays of 100 such events. The receiver (asyncio, no HTTP library) is another process. The
clients take turns, the figures are medians. niquests brings a package that takes the place of urllib3: measure these two in
environments of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.metadata
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

__all__ = ["CLIENTS", "Receiver", "main", "receive"]

EVENT = json.dumps({
    "id": "01a1e1d1-81b2-7e0a-8c3e-1f2c5d6a7b80", "channel": "pgcdc:orders", "operation": "INSERT",
    "payload": {"op": "INSERT", "table": "orders", "row": {"id": "1", "note": "x" * 260}, "old": None},
    "source": "wal_replication", "created_at": "2026-11-16T00:46:06.258000Z", "position": "0000000001B12860/0000000000001",
}).encode()  # fmt: skip
HEADERS = {
    "Content-Type": "application/json",
    "User-Agent": "pgcdc",
    "X-PGCDC-Event-ID": "1",
    "X-PGCDC-Signature": "0" * 71,
}
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
BATCH = 100


# --- the receiver


class Receiver(asyncio.Protocol):
    """Reads requests with a Content-Length and says 200 to each; `on_body` gets headers and body."""

    on_body: Callable[[bytes, bytes], None] | None = None

    def __init__(self) -> None:
        self._data = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._data) < end + 4 + size:
                return
            if self.on_body is not None:
                self.on_body(self._data[:end], self._data[end + 4 : end + 4 + size])
            self._data = self._data[end + 4 + size :]
            assert self._transport is not None
            self._transport.write(ANSWER)


async def receive(kind: type[asyncio.Protocol], say_port: Callable[[int], object]) -> None:
    """Serve on a free port of this machine for ever."""
    server = await asyncio.get_running_loop().create_server(kind, "127.0.0.1", 0, backlog=512)
    say_port(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def _serve(pipe: Connection) -> None:
    asyncio.run(receive(Receiver, pipe.send))


# --- the clients: each posts `body` `count` times with `workers` requests under way


async def _gather(post: Callable[[], Any], count: int, workers: int) -> None:
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            await post()

    await asyncio.gather(*(work() for _ in range(workers)))


def _in_threads(make_post: Callable[[], Callable[[], Any]], count: int, workers: int) -> None:
    left, lock = iter(range(count)), threading.Lock()

    def work() -> None:
        post = make_post()
        while True:
            with lock:
                if next(left, None) is None:
                    return
            post()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _check(status: int) -> None:
    if status != 200:
        raise RuntimeError(f"answer {status}")


def run_aiohttp(url: str, body: bytes, count: int, workers: int) -> None:
    """asyncio; its parser is C."""
    import aiohttp

    async def run() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=workers)) as session:

            async def post() -> None:
                async with session.post(url, data=body, headers=HEADERS, allow_redirects=False) as answer:
                    await answer.read()
                    _check(answer.status)

            await _gather(post, count, workers)

    asyncio.run(run())


def _run_httpx(module: str, url: str, body: bytes, count: int, workers: int) -> None:
    httpx = importlib.import_module(module)

    async def run() -> None:
        limits = httpx.Limits(max_connections=workers, max_keepalive_connections=workers)
        async with httpx.AsyncClient(limits=limits, trust_env=False) as client:

            async def post() -> None:
                _check((await client.post(url, content=body, headers=HEADERS)).status_code)

            await _gather(post, count, workers)

    asyncio.run(run())


def run_httpx(url: str, body: bytes, count: int, workers: int) -> None:
    """asyncio; its parser is h11, in Python."""
    _run_httpx("httpx", url, body, count, workers)


def run_httpx2(url: str, body: bytes, count: int, workers: int) -> None:
    """asyncio; the successor of httpx."""
    _run_httpx("httpx2", url, body, count, workers)


def run_niquests(url: str, body: bytes, count: int, workers: int) -> None:
    """asyncio; the successor of requests."""
    niquests = importlib.import_module("niquests")

    async def run() -> None:
        async with niquests.AsyncSession(pool_connections=workers, pool_maxsize=workers) as session:
            session.trust_env = False

            async def post() -> None:
                _check((await session.post(url, data=body, headers=HEADERS)).status_code)

            await _gather(post, count, workers)

    asyncio.run(run())


def run_urllib3(url: str, body: bytes, count: int, workers: int) -> None:
    """Threads."""
    urllib3: Any = importlib.import_module("urllib3")
    pool = urllib3.PoolManager(num_pools=1, maxsize=workers, retries=False)

    def make() -> Callable[[], None]:
        return lambda: _check(pool.request("POST", url, body=body, headers=HEADERS).status)

    _in_threads(make, count, workers)


def run_stdlib(url: str, body: bytes, count: int, workers: int) -> None:
    """Threads; http.client of the standard library."""
    import http.client

    parts = urlsplit(url)

    def make() -> Callable[[], None]:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port)

        def post() -> None:
            connection.request("POST", parts.path, body, HEADERS)
            answer = connection.getresponse()
            answer.read()
            _check(answer.status)

        return post

    _in_threads(make, count, workers)


CLIENTS: dict[str, Callable[[str, bytes, int, int], None]] = {
    "aiohttp": run_aiohttp,
    "httpx": run_httpx,
    "httpx2": run_httpx2,
    "niquests": run_niquests,
    "urllib3": run_urllib3,
    "http.client": run_stdlib,
}


# --- measuring


def _measure(pipe: Connection, name: str, url: str, body: bytes, count: int, workers: int) -> None:
    CLIENTS[name](url, body, min(count, 200), workers)  # imports, and the first connections
    began, cpu = time.perf_counter(), time.process_time()
    CLIENTS[name](url, body, count, workers)
    pipe.send((time.perf_counter() - began, time.process_time() - cpu))


def _run_one(name: str, url: str, body: bytes, count: int, workers: int) -> tuple[float, float]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_measure, args=(theirs, name, url, body, count, workers)
    )
    process.start()
    theirs.close()
    taken: tuple[float, float] = ours.recv()
    process.join()
    return taken


def _version(name: str) -> str | None:
    """None: it is not installed."""
    if name == "http.client":
        return "standard library"
    try:
        if name == "urllib3" and importlib.import_module("urllib3").__version__ != importlib.metadata.version(name):
            return None  # urllib3-future is in its place
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, ImportError):
        return None


def main() -> None:
    """Measure, and print the table of the decision."""
    parser = argparse.ArgumentParser(description="Measure HTTP clients.")
    parser.add_argument("clients", nargs="*", help=f"some of {', '.join(CLIENTS)}")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
    receiver.start()
    url = f"http://127.0.0.1:{ours.recv()}/hook"
    array = b"[" + b",".join([EVENT] * BATCH) + b"]"
    found: dict[str, list[tuple[float, ...]]] = {}
    names = [name for name in arguments.clients or CLIENTS if _version(name)]
    for _ in range(arguments.rounds):
        for name in names:
            single = _run_one(name, url, EVENT, arguments.requests, arguments.workers)
            batched = _run_one(name, url, array, arguments.requests // 20, arguments.workers)
            found.setdefault(name, []).append((*single, *batched))
    receiver.kill()
    print("| client | requests/s | CPU a request | events/s in arrays of 100 | CPU an event |")
    print("| --- | --- | --- | --- | --- |")
    for name in names:
        took, cpu, took_batched, cpu_batched = (statistics.median(column) for column in zip(*found[name], strict=True))
        count, events = arguments.requests, arguments.requests // 20 * BATCH
        print(
            f"| {name} {_version(name)} | {count / took:,.0f} | {cpu / count * 1e6:.0f} µs "
            f"| {events / took_batched:,.0f} | {cpu_batched / events * 1e6:.1f} µs |"
        )


if __name__ == "__main__":
    main()
