"""Where a reader's spool comes from: the capture of its slot (started or joined), or a folder that does not change."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Protocol

import psutil

from pgcdc.capture.control import CaptureLink, ControlClient
from pgcdc.capture.prepare import prepare
from pgcdc.errors import ConfigError
from pgcdc.position import Position
from pgcdc.spool.reader import SpoolReader
from pgcdc.state import Lock, StateDir
from pgcdc.stream.options import StreamOptions
from pgcdc.stream.texts import IdSeed

__all__ = ["CaptureFeed", "Feed", "StaticFeed"]

JOIN_TIMEOUT_S = 5.0


class Feed(Protocol):
    """What a reader needs besides the spool itself."""

    spool: Path
    shapes: Path
    """The history of the tables' shapes."""
    seed: IdSeed

    def join(self) -> tuple[Position, Position]:
        """Where this consumer begins, and what it has acknowledged."""

    def wait(self, timeout_s: float, until: Position | None = None) -> None:
        """Wait until the spool has grown, at most `timeout_s`; `until` is needed even if the spool is full."""

    def ack(self, position: Position) -> None:
        """Everything up to `position` is durable."""

    def target(self) -> int:
        """What "everything up to now" means: an LSN."""

    def close(self) -> None:
        """The reader is done; the capture may go on for others."""


class CaptureFeed:
    """The capture of a slot: started if nobody has, joined if somebody has, started again if it dies."""

    def __init__(self, options: StreamOptions) -> None:
        self._consumer = options.consumer
        state = StateDir(Path(options.source.state_dir))
        identity = state.identity()
        watch_pid = int(os.environ.get("PGCDC_WATCH_PID", "0")) or _driver_pid()
        began = identity is not None and identity.created_lsn > 0
        if not began or (Lock.holder(state.capture_lock) is None and not options.driver_acks):
            prepared = prepare(options.source, watch_pid=watch_pid)
            spec, identity = prepared.spec, prepared.identity
        else:
            assert identity is not None
            spec = options.source.spec((item["name"] for item in identity.publications), watch_pid)
        self._link = CaptureLink(spec, is_restart=began, on_restart=self._claim)
        self.spool = state.spool
        self.shapes = state.shapes_file
        self.seed = IdSeed.of(identity.system_identifier, identity.slot)

    def join(self) -> tuple[Position, Position]:
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while True:
            try:
                return self._link.call(self._claim)
            except ConfigError:  # the query that was stopped just now may still be connected
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def wait(self, timeout_s: float, until: Position | None = None) -> None:
        self._link.call(lambda client: client.wait(timeout_s, until))

    def ack(self, position: Position) -> None:
        self._link.call(lambda client: client.ack(self._consumer, position))

    def target(self) -> int:
        return self._link.call(lambda client: client.target())

    def close(self) -> None:
        self._link.close()

    def _claim(self, client: ControlClient) -> tuple[Position, Position]:
        return client.join(self._consumer, exclusive=True)


class StaticFeed:
    """A spool that nobody writes: for warming up and for tests."""

    def __init__(self, spool: Path) -> None:
        self.spool = spool
        self.shapes = StateDir(spool.parent).shapes_file
        self.seed = IdSeed.of("static", "static")
        reader = SpoolReader(spool)
        reader.refresh()
        self._base, self._end = reader.base, reader.end

    def join(self) -> tuple[Position, Position]:
        return self._base, self._base

    def wait(self, timeout_s: float, until: Position | None = None) -> None:
        time.sleep(timeout_s)

    def ack(self, position: Position) -> None:
        pass

    def target(self) -> int:
        return self._end.lsn

    def close(self) -> None:
        pass


def _driver_pid() -> int:
    """The Spark driver: the JVM that started this Python process. Its end is the end of the capture."""
    process = psutil.Process()
    for ancestor in process.parents():
        if ancestor.name() == "java":
            return ancestor.pid
    return process.pid
