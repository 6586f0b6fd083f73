"""What a source is to the rest of the product: all that capture, spool, Spark, sinks and acks know about a database.

A `Source` is one database with its settings. The capture process opens its `ChangeStream`, moves the batches from
`poll` to the spool, and confirms what every consumer has made durable. Snapshot rows come out of the same stream, at
their positions. Queries of single tables ask the source for their columns, and `snapshot` for their existing rows.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Self

from pydantic import ConfigDict, Field

from pgcdc.core.errors import ConfigError
from pgcdc.core.settings import Options, Seconds

if TYPE_CHECKING:  # code that only reads settings needs none of these
    import pyarrow as pa

    from pgcdc.core.position import Position
    from pgcdc.core.relation import Relation, ShapeChange
    from pgcdc.core.state import Identity, StateDir
    from pgcdc.event.typed import TypedColumn
    from pgcdc.postgres.types.column import TypeOptions
    from pgcdc.spool.consumers import Consumers
    from pgcdc.spool.index import Token
    from pgcdc.spool.segment import CaptureBatch
    from pgcdc.spool.writer import SpoolWriter


class SourceOptions(Options):
    """Every setting of one kind of source."""

    kind: ClassVar[str]  # The name of its source
    spark_names: ClassVar[Mapping[str, str]] = {}  # Spark options whose name differs from the setting's
    spark_hidden: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """Aliases that Spark does not offer as options, and the settings that each stands for."""

    def resolved(self) -> Self:
        """These options with values from this host's environment for those not given, especially secrets."""
        return self

    def check_visible(self) -> None:
        """Raise ConfigError if a given value contains a secret: others would see it."""

    def check_table(self, table: str) -> None:
        """Raise ConfigError if these settings do not capture changes of this table."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check (`pgcdc validate`)."""

    name: str
    status: Literal["ok", "failed", "skipped"]
    detail: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A source that can be read."""

    identity: Identity
    tables: frozenset[str] = frozenset()  # The captured tables
    notes: tuple[str, ...] = ()  # For the user: what was changed, and what is captured only in part
    undo: Callable[[], object] = lambda: None
    """Removes what was created in the database and outlives the slot: for a trial run."""


@dataclass(frozen=True, slots=True)
class ColumnsQuery:
    """Which columns a query asks for: those since `change`, else as they were `noted`, else the current ones."""

    table: tuple[str, str]
    types: TypeOptions
    change: ShapeChange | None = None
    noted: list[tuple[str, int, int]] | None = None  # Name, type and modifier of each
    zset: bool = False


class RowsOptions(Options):
    """How to read the rows of a table."""

    model_config = ConfigDict(populate_by_name=True)

    partitions: int | None = Field(None, ge=1)  # The number of tasks that read; None: depends on the table's size
    where: str = ""  # Only rows for which this is true, in SQL
    snapshot_keep: Seconds = Field(300.0, gt=0)  # How long the snapshot is held after the last read
    metadata: bool = True  # Add the columns of typed changes (`_op` and the others), so that both have the same schema
    held: str = Field("", alias="_held")
    """Read in this snapshot (`HeldSnapshot.to_text`), which the caller holds (`pgcdc snapshot`)."""
    files: str = Field("", alias="_files")  # With `held`: `chunks.files_text` of the table when the snapshot was taken


class TableRows(Protocol):
    """The rows of a table, all as of one moment. Picklable: it is sent to the executors, without a secret."""

    title: str
    columns: tuple[TypedColumn, ...]
    key: tuple[str, ...]  # Its primary key, limited to columns that we may read

    def plan(self, names: list[str], wanted: RowsOptions, watch_pid: int) -> list[Any]:
        """What each task reads, as input for `read`. Runs in the driver, which is the process `watch_pid`: the snapshot
        is released when it ends. Raises for anything that cannot be read."""

    def read(self, part: Any, names: list[str], where: str) -> Iterator[pa.Array]:
        """The values of these columns, row by row. Runs on any host."""


class Settled(NamedTuple):
    """The progress of requested snapshots of any kind."""

    end: Position | None  # The position after all their rows; None while some are still to be read
    initial_end: Position | None  # The position after the initial snapshot's rows; None while it is running
    only: bool = False  # Only the initial snapshot is wanted


class ChangeStream(Protocol):
    """The changes of one database, in order. Every method that may wait for the database raises ConnectionLost."""

    phase: str  # Its current activity, for the status
    is_drained: bool
    """Whether the last `poll` took everything available; if not, poll again instead of waiting."""

    @property
    def is_connected(self) -> bool:
        """Whether there is something to poll; otherwise call `connect`."""

    @property
    def can_reconnect(self) -> bool:
        """Whether a lost connection can be restored: not if the thing it read from is gone as well."""

    @property
    def reached(self) -> int:
        """The last commit that was returned."""

    @property
    def confirmed(self) -> int:
        """The last commit that the database need not send again; less than the confirmed one if it may not know that
        yet."""

    def fileno(self) -> int:
        """A file descriptor that is readable when `poll` or `tend` may have something to do."""

    def connect(self) -> float:
        """Connect. Returns 0, or if that is impossible now the number of seconds to wait before the next attempt."""

    def lose(self) -> None:
        """The connection is lost: close the rest of it immediately. Changes already read are still returned."""

    def poll(self, *, may_read: bool, drain: bool) -> CaptureBatch | None:
        """The next available changes, or None. Each batch is appended to the spool before the next call. Without
        `may_read` the spool is full: nothing is read. Without `drain` nobody is waiting, and small transactions may be
        combined."""

    def tend(self, needed: int, *, may_work: bool) -> float:
        """Do the work that is due besides the changes; returns the seconds until the next call. Somebody is waiting for
        the commit `needed`."""

    def target(self) -> int:
        """The commit that represents the present: a run that delivers everything up to now ends once it is past this
        commit."""

    def clock(self) -> tuple[int, int]:
        """A commit, and a time (microseconds since 1970) before which no later commit was made; (0, 0): none."""

    def confirm(self, token: Token) -> None:
        """Everything up to this transaction is durable at every consumer and never needed again. If batches of this
        source have tokens, this is a saved one, with which the stream can be opened again."""

    def release(self, base: Position) -> None:
        """Nothing up to `base` is needed again."""

    def settled(self, end: Position | None) -> Settled:
        """The progress of snapshots. `end`: the spool's end, None if that is inside a transaction."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Handle requests that only this source understands: `do: snapshot` and `do: sentinel`. The answer to a
        sentinel has the `position` after everything that was committed when its `id` was first requested; None while
        that is unknown."""

    def status(self, confirmed: int) -> dict[str, Any]:
        """For `pgcdc status`."""

    def close(self) -> None:
        """Close everything."""


class Source(Protocol):
    """One database, with the settings of its capture and the values from the environment. Creating one has no effect on
    the database."""

    options_type: ClassVar[type[SourceOptions]]
    no_requests: ClassVar[tuple[str, str] | None]
    """Why snapshots cannot be requested beside the stream, and what to do instead; None: they can (`do: snapshot`)."""
    options: SourceOptions

    def __init__(self, options: SourceOptions) -> None: ...

    # --- the capture

    def check(self, state: StateDir, consumer: str) -> Iterator[Finding]:
        """Whether `prepare` would succeed, step by step. Leaves nothing behind."""

    def tables(self, state: StateDir) -> list[Relation]:
        """The tables that are captured, or would be."""

    def captured(self, identity: Identity) -> list[Relation]:
        """The captured tables in their current shape."""

    def prepare(self, state: StateDir, *, consumer: str, say: Callable[[str], object] = lambda text: None) -> Prepared:
        """Create what a capture needs, in the database and in the state directory, unless it exists. Raises with advice
        if that is impossible, and then leaves nothing new behind. `consumer` is the caller. Anything that has to wait
        for others reports it repeatedly through `say`, which may raise to stop the wait."""

    def follow_tables(self, state: StateDir) -> tuple[frozenset[str], tuple[str, ...]]:
        """Capture tables that were created meanwhile, if the settings ask for it. Returns all tables captured then, and
        notes for the user about those captured only in part."""

    def has_confirmed(self, commit: int) -> bool:
        """Whether the database has accepted the confirmation of this commit; waits briefly for it."""

    def join(self, identity: Identity, status: Mapping[str, Any], *, is_typed: bool) -> None:
        """Raise ConfigError if the running capture of `identity`, which reports `status`, captures something else."""

    def open(self, token: Token, state: StateDir, spool: SpoolWriter, consumers: Consumers) -> ChangeStream:
        """The changes after those in the spool (`spool.resume_lsn`); not connected yet. `token` is the source's own
        token of the last transaction there, or of an earlier one; then it reads the transactions in between again and
        omits them. It is empty if the batches of this source have no tokens."""

    # --- single tables

    def of_table(self, table: str, identity: Identity | None) -> Source:
        """The same source for a query that names only its table: it captures that table, or what is already captured."""

    def typed_columns(self, state: StateDir, wanted: ColumnsQuery) -> tuple[TypedColumn, ...]:
        """The columns that changes of a table have. Raises with advice if there is no such table, or if its changes are
        not available in that form."""

    def check_captured(self, identity: Identity, table: str, *, zset: bool) -> None:
        """Raise if the changes of the table are not captured: a query for it would wait forever."""

    def snapshot(self, table: str, types: TypeOptions) -> TableRows:
        """The existing rows of a table."""


# --- the available sources, by name; each is imported only when requested
#
# Another package can add one with an entry point of the group `pgcdc.sources`.

_OURS = {
    "postgres": ("pgcdc.source.postgres.source:PostgresSource", "pgcdc.source.postgres.options:PostgresOptions"),
    "rate": ("pgcdc.source.rate.source:RateSource", "pgcdc.source.rate.options:RateOptions"),
}
"""Each source's class and its options class: code that reads settings loads only the latter."""
_DETECTORS = {"wal": "postgres", "rate": "rate"}
"""Their names in the manual; sources of other packages have their own names."""


def _others() -> dict[str, EntryPoint]:
    return {one.name: one for one in entry_points(group="pgcdc.sources") if one.name not in _OURS}


def source_names() -> list[str]:
    return sorted({*_OURS, *_others()})


def find_source(name: str) -> type[Source]:
    """The source with this name. If there is none, raises ConfigError with the closest name."""
    name = _DETECTORS.get(name, name)
    found = _OURS.get(name)
    if found is None and name not in (others := _others()):
        raise _unknown("source", name, source_names())
    source: type[Source] = resolve_name(found[0]) if found else others[name].load()
    return source


def find_options(name: str) -> type[SourceOptions]:
    found = _OURS.get(_DETECTORS.get(name, name))
    options: type[SourceOptions] = resolve_name(found[1]) if found else find_source(name).options_type
    return options


def check_detector(name: str) -> None:
    """Raise ConfigError, with the closest name, if the setting `detector` names no source."""
    if name not in _DETECTORS and name not in _others():
        raise _unknown("detector", name, [*_DETECTORS, *sorted(_others())])


def _unknown(what: str, name: str, names: list[str]) -> ConfigError:
    near = difflib.get_close_matches(name.lower(), names, 1)
    known = f"Known {what}s: {', '.join(names)}"
    return ConfigError(f"{what} {name!r} does not exist", f"Did you mean {near[0]}? {known}" if near else known)


def make_source(options: SourceOptions | dict[str, Any], kind: str = "") -> Source:
    """The source for these settings; `kind` names it if they are JSON."""
    if isinstance(options, dict):
        found = find_source(kind)
        return found(found.options_type.model_validate(options))
    return find_source(options.kind)(options)
