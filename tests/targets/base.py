"""What a target can tell the contract suite: docs/contract.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pgcdc.core.position import Position
from pgcdc.core.settings import make_options
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.sink.attempts import DeliveryHooks
from pgcdc.sink.contract import Sink
from pgcdc.sink.letters.record import DeadLetters
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import ADAPTERS, AdapterSpec, DeliveryOptions, make_sink

ONE_TRY = DeliveryOptions(max_retries=0, cb_max_failures=0)


class BaseTarget:
    """Where a sink writes to, seen from its other end. It outlives the sink, as the real one outlives a crash.

    A target says at least `acks`, `type`, `before_ack`, `options` and `lines`.
    """

    acks: Path
    """The folder of acks. Its parent is the state directory, for a sink that wants more of it. A test may change it
    before it asks for a sink."""
    type: str
    """The adapter's type in the registry."""
    name: str = ""
    """The adapter's name, and so that of its ack: its type, unless a test sets another one before it asks for a sink."""
    is_reference: bool = False
    """Every case of the suite is run: one target for each way of writing. Others run each story once."""
    is_made_by_options: bool = True
    """`make` is what `options` say; else a test makes it, and no pipeline could."""
    before_ack: str
    """The failpoint between durable and acknowledged."""
    kill_points: Sequence[str] = ()
    """Failpoints in the middle of a write, where the suite kills -9. None: `before_ack`."""
    repeats: bool = False
    """What was written before a crash cannot be taken back."""
    large: int = 40_000
    """Events of a large batch."""
    keeps: bool = True
    """What was written can be looked at."""
    keeps_history: bool = True
    """Every event can be seen, not only the last one of each key."""
    stdout: str = ""
    """The path that is standard output of a process with this sink; empty: its own."""
    can_break: bool = False
    """Whether the target can be made unreachable by `break_target`."""
    secret: str = ""
    """A text in the options that must not be seen anywhere; empty: there is none."""

    def __init__(self, folder: Path) -> None:
        """`folder` is empty, and for this target alone."""
        raise NotImplementedError

    def options(self) -> Mapping[str, Any]:
        """The adapter's options, as the configuration has them."""
        return {}

    def spec(self) -> AdapterSpec:
        """The adapter as a pipeline has it."""
        kind = ADAPTERS[self.type]
        return AdapterSpec(self.name or self.type, self.type, make_options(kind, self.options(), self.type))

    def make(self) -> Sink:
        """The sink of `options()`, as a pipeline makes it."""
        return make_sink(self.spec())

    def sink(
        self,
        options: DeliveryOptions = ONE_TRY,
        hooks: DeliveryHooks | None = None,
        dead_letters: DeadLetters | None = None,
    ) -> Runner:
        """A new process's sink for this target, in its runner."""
        return Runner(self.make(), self.acks, self.name or self.type, options, hooks, dead_letters)

    def lines(self) -> list[str]:
        """Everything that arrived, as the lines that were sent, in order (sorted, where order is only kept by key)."""
        raise NotImplementedError

    def arrived(self) -> list[str]:
        """Like `lines`, in the order of arrival. If not `keeps_history`: what is there now, one line for each key."""
        return self.lines()

    def expect_many(self) -> None:
        """100,000 events will come: asked before the sink is made."""

    def break_target(self) -> None:
        """From now on the target cannot be reached: what is tried is SinkUnavailable."""
        raise NotImplementedError

    def break_after(self, events: int) -> None:
        """Like `break_target`, in the middle of a batch: so many events are taken before."""
        raise NotImplementedError

    def heal_target(self) -> None:
        """It can be reached again, and has everything that it acknowledged."""
        raise NotImplementedError

    def bad_line(self, position: Position) -> str | None:
        """An event of `items` that the target refuses, whatever is tried. None: it takes everything."""
        return None

    def accept_bad(self) -> None:
        """From now on the target takes it: somebody has put it right."""

    def wrong_options(self) -> Sequence[tuple[Mapping[str, Any], str]]:
        """Options that must be refused before anything starts, and what the error says then (a regular expression)."""
        return ()

    def close(self) -> None:
        """Clean up."""


Target = BaseTarget


class _Servers:
    """Servers that targets may use; they start when one is asked for. Set by tests/contract/conftest.py."""

    start: Callable[[], EmbeddedPostgres]

    @property
    def postgres(self) -> EmbeddedPostgres:
        return self.start()


SERVERS = _Servers()
