"""Where a reader's spool comes from: the capture of its slot (started or joined), or a fixed folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from pgcdc.capture.control import CaptureLink, CaptureRequests, ask, make_spec
from pgcdc.core.errors import ConfigError
from pgcdc.core.position import Position
from pgcdc.core.relation import ShapeHistory
from pgcdc.core.state import Lock, StateDir
from pgcdc.event.lines import IdSeed
from pgcdc.source.protocol import Settled, make_source
from pgcdc.spark.options import StreamOptions
from pgcdc.spool.reader import SpoolReader

JOIN_TIMEOUT_S = 5.0


class Feed(CaptureLink):
    """Everything a reader needs: the spool, the history of shapes, and the capture, which is started, joined, or
    restarted after it dies."""

    def __init__(self, options: StreamOptions) -> None:
        self._consumer = options.consumer
        state = StateDir(options.state_dir)
        identity = state.identity()
        began = identity is not None and identity.created > 0
        source = make_source(options.source)
        if options.table is not None:
            source = source.of_table(options.table, identity if began else None)
        if not began or (Lock.holder(state.capture_lock) is None and not options.run):
            identity = source.prepare(state, consumer=options.consumer).identity
        elif not options.run:
            assert identity is not None
            source.join(identity, ask(state.capture_lock, {"do": "status"}), is_typed=options.table is not None)
        assert identity is not None
        if options.table is not None:
            source.check_captured(identity, options.table, zset=options.rows.zset)
        spec = make_spec(source.options, options, driver_pid())
        super().__init__(spec, is_restart=began, on_restart=self._claim)
        self.spool = SpoolReader(state.spool)
        self.shapes = ShapeHistory(state.shapes_file)
        self.database = identity.database
        self.seed = IdSeed.of(identity.system, identity.stream)
        self.created = identity.created  # Snapshot rows come after this commit

    def claim(self) -> tuple[Position, Position]:
        """The position where this consumer begins, and its ack."""
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while True:
            try:
                return self._claim(self)
            except ConfigError:  # a query that was just stopped may still be connected
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def acknowledge(self, position: Position) -> None:
        self.ack(self._consumer, position)

    def _claim(self, client: CaptureRequests) -> tuple[Position, Position]:
        return client.join(self._consumer, exclusive=True)


class StaticFeed(Feed):
    """A spool that nobody writes, for warming up and for tests."""

    def __init__(self, spool: Path) -> None:
        self.spool = SpoolReader(spool)
        self.shapes = ShapeHistory(StateDir(spool.parent).shapes_file)
        self.database = ""
        self.seed = IdSeed.of("static", "static")
        self.created = 0
        self.spool.refresh()
        self._end = self.spool.end

    def claim(self) -> tuple[Position, Position]:
        return self.spool.base, self.spool.base

    def wait(self, timeout_s: float, until: Position | None = None) -> bool:
        time.sleep(timeout_s)
        return False

    def target(self) -> int:
        return self._end.commit

    def settled(self) -> Settled:
        return Settled(self._end, Position.at(0, 0))

    def acknowledge(self, position: Position) -> None: ...

    def clock(self) -> None: ...

    def close(self) -> None: ...


def driver_pid() -> int:
    """The Spark driver's pid: as configured, or the JVM that started this Python process. Processes started for it end
    with it."""
    said = int(os.environ.get("PGCDC_WATCH_PID", "0"))
    if said:
        return said
    process = psutil.Process()
    return next((ancestor.pid for ancestor in process.parents() if ancestor.name() == "java"), process.pid)
