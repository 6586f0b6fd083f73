"""What a source is to the capture process: everything that it knows of a database.

A `Source` is one kind of database, by name. The capture process opens its `ChangeStream`, moves what `poll` gives into the
spool, and confirms what every consumer has made durable. Rows of snapshots come out of the same stream, at their positions.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

from pgcdc.core.position import Position
from pgcdc.core.settings import Options
from pgcdc.core.state import StateDir
from pgcdc.spool.batch import CaptureBatch
from pgcdc.spool.consumers import Consumers
from pgcdc.spool.writer import SpoolWriter

__all__ = ["ChangeStream", "Settled", "Source", "SourceOptions"]


class SourceOptions(Options):
    """Every setting of one kind of source."""

    kind: ClassVar[str]
    """Its name in `source.registry`."""


class Settled(NamedTuple):
    """What has become of the rows that were asked for, by snapshots of any kind."""

    is_pending: bool
    """Whether some are still to be read."""
    initial_end: str | None
    """The position where those of the initial snapshot end; None while it is under way."""
    only: bool
    """Nothing but the initial snapshot is wanted."""


class ChangeStream(Protocol):
    """Changes in their order, from one database. Whatever may wait for the database raises ConnectionLost."""

    phase: str
    """What it does, for people."""
    is_drained: bool
    """Whether the last `poll` has taken everything that was here: if not, poll again instead of waiting."""

    @property
    def is_connected(self) -> bool:
        """Whether there is something to poll; else `connect`."""

    @property
    def can_reconnect(self) -> bool:
        """Whether a lost connection may be made again: not if what it read from has gone with it."""

    @property
    def reached(self) -> int:
        """The last commit that was handed out."""

    @property
    def confirmed(self) -> int:
        """The last commit that the database need not send again; less than what was confirmed if it may not know yet."""

    def fileno(self) -> int:
        """Readable when `poll` or `tend` may have something to do."""

    def connect(self) -> float:
        """Connect; how many seconds to wait before the next attempt if that cannot be now, else 0."""

    def lose(self) -> None:
        """The connection is lost: close what is left of it, at once. What was read stays to be handed out."""

    def poll(self, *, may_read: bool, drain: bool) -> CaptureBatch | None:
        """The next changes that are here; None if there are none. Each is appended to the spool before the next call.

        Without `may_read` the spool is full: nothing is read. Without `drain` nobody waits: small ones may gather.
        """

    def tend(self, needed: int, *, may_work: bool) -> float:
        """Do what is due beside the changes; the seconds until the next time. Somebody waits for the commit `needed`."""

    def target(self) -> int:
        """The commit that stands for now: a run that delivers everything up to now ends behind it."""

    def clock(self) -> tuple[int, int]:
        """A commit, and a moment (microseconds since 1970) before which nothing is committed behind it; (0, 0): none."""

    def confirm(self, commit: int) -> None:
        """Everything up to `commit` is durable at every consumer and never needed again."""

    def release(self, base: Position) -> None:
        """Nobody needs anything up to `base` again."""

    def settled(self) -> Settled:
        """What has become of snapshots."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what only this source understands (`do: snapshot`)."""

    def status(self, confirmed: int) -> dict[str, Any]:
        """For `pgcdc status`."""

    def close(self) -> None:
        """Close everything."""


class Source(Protocol):
    """One kind of database."""

    def open(
        self,
        options: dict[str, Any],
        publications: tuple[str, ...],
        state: StateDir,
        spool: SpoolWriter,
        consumers: Consumers,
    ) -> ChangeStream:
        """The changes behind what the spool has; not connected yet.

        `options` are the settings of the source, as JSON; `publications` what was prepared for it on the server.
        """
