"""A sink in its runner, which tries once: for tests that look at the sink."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pgcdc.core.position import Position
from pgcdc.sink.contract import Sink
from pgcdc.sink.noop import NoopSink
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import DeliveryOptions

__all__ = ["FakeRunner", "run"]


def run(sink: Sink, acks: Path, name: str = "file", **options: Any) -> Runner:
    """The runner, not opened yet."""
    return Runner(sink, acks, name, DeliveryOptions(**{"max_retries": 0, "cb_max_failures": 0, **options}))


class FakeRunner(Runner):
    """What lanes see of a runner, without one."""

    dead_letters = 0
    attempts: Any
    ack = Position.end(0)

    def __init__(self, name: str, ack: Position) -> None:
        self.name, self.ack = name, ack
        self.sink = NoopSink()
        self.attempts = SimpleNamespace(is_busy=False, failing=None)
        self.progress: Any = SimpleNamespace(holds={})

    def check(self) -> None:
        pass

    def open(self, start: Position) -> None:
        pass

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass
