"""For tests of deliveries: a sink that does what a script says, made-up time, and hooks that write down what they hear."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pgcdc.core.errors import SinkUnavailable
from pgcdc.core.position import Position
from pgcdc.event.batch import Batch
from pgcdc.sink.attempts import BreakerState, Clock, DeliveryHooks
from pgcdc.sink.contract import Sink, SinkContext
from pgcdc.sink.letters.record import DeadLetter, DeadLetters
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import DeliveryOptions

START = Position.end(100)
END = Position.end(110)
REAL_TIMEOUT_S = 10.0


class FakeClock(Clock):
    """Moves on by itself. While the sink works, it waits for it; a sink that hangs is not waited for."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.is_working: Callable[[], bool] = lambda: False
        self.at: list[tuple[float, Callable[[], None]]] = []
        """What happens when, while somebody waits."""

    def now(self) -> float:
        return self.time

    def wait(self, condition: threading.Condition, done: Callable[[], bool], timeout_s: float) -> bool:
        end = self.time + timeout_s
        while True:
            while not done() and self.is_working():
                condition.wait(0.001)
            if done() or self.time >= end:
                return done()
            if self.at and self.at[0][0] <= end:
                self.time, action = self.at.pop(0)
                action()
            else:
                self.time = end


class ScriptedSink(Sink):
    """Does in each write what the script says: an error to raise, "hang", or None to succeed. At its end it succeeds."""

    def __init__(self, *script: Exception | str | None) -> None:
        self.script = list(script)
        self.written: list[str] = []
        self.sizes: list[int] = []
        self.writers = 0
        self.most_writers = 0
        self.is_hanging = False
        self.is_closed = False
        self._gate = threading.Event()
        self.fails_late: Exception | None = None

    def let_go(self) -> None:
        """A write that hangs goes on."""
        self.is_hanging = False
        self._gate.set()

    def open(self, context: SinkContext) -> Position | None:
        return None

    def close(self) -> None:
        self.is_closed = True

    def write(self, batch: Batch) -> None:
        self.writers += 1
        self.most_writers = max(self.most_writers, self.writers)
        try:
            self._write(batch)
        finally:
            self.writers -= 1

    def _write(self, batch: Batch) -> None:
        self.sizes.append(batch.events.num_rows)
        step = self.script.pop(0) if self.script else None
        if isinstance(step, Exception):
            raise step
        if step == "hang":
            self.is_hanging = True
            assert self._gate.wait(REAL_TIMEOUT_S)
            if self.fails_late:
                raise self.fails_late
        self.written += batch.events.column("line").to_pylist()


def make_runner(
    sink: ScriptedSink,
    options: DeliveryOptions | None = None,
    hooks: DeliveryHooks | None = None,
    letters: DeadLetters | None = None,
    clock: FakeClock | None = None,
) -> Runner:
    """The runner of a sink, open at START; every random number is the largest."""
    acks = Path(tempfile.mkdtemp(prefix="pgcdc-acks-"))
    atexit.register(shutil.rmtree, acks, ignore_errors=True)
    made = Runner(
        sink, acks, "scripted", options or DeliveryOptions(), hooks, letters, clock=clock, uniform=lambda _, high: high
    )
    if clock is not None:
        clock.is_working = lambda: made.attempts.is_calling and not sink.is_hanging
    made.open(START)
    return made


class Diary(DeliveryHooks):
    """Hooks that write down what they are told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def on_write(self, events: int, seconds: float) -> None:
        self.told.append(("write", events, seconds))

    def on_retry(self, attempt: int, delay_s: float, error: BaseException) -> None:
        self.told.append(("retry", attempt, delay_s))

    def on_failure(self, error: BaseException) -> None:
        self.told.append(("failure", type(error)))

    def on_breaker(self, state: BreakerState) -> None:
        self.told.append(("breaker", state))

    def on_dead_letters(self, letters: Sequence[DeadLetter]) -> None:
        self.told.append(("dead", [one.position for one in letters]))


def down() -> SinkUnavailable:
    return SinkUnavailable("it is down", "start it")


def batch(count: int = 3, start: Position = START, end: Position = END) -> Batch:
    positions = [str(Position.at(start.commit + 1, number)) for number in range(1, count + 1)]
    return Batch(start, end, pa.table({"position": positions, "line": [f"{one}\n" for one in positions]}))
