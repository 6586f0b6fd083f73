"""What a source is to everybody else: all that capture, spool, Spark, sinks and acks know of a database.

A `Source` is one database with its settings. The capture process opens its `ChangeStream`, moves what `poll` gives into the
spool, and confirms what every consumer has made durable. Rows of snapshots come out of the same stream, at their positions.
Queries of single tables ask the source for their columns, and `snapshot` for the rows that they have.
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

if TYPE_CHECKING:  # whoever reads settings needs none of these
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
    spark_names: ClassVar[Mapping[str, str]] = {}  # Options of Spark whose name differs from their setting's
    spark_hidden: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """Switches that are no options of Spark: other words, and what they say of other settings."""

    def resolved(self) -> Self:
        """With what the environment of this host says in place of what was not given: a secret, above all."""
        return self

    def check_visible(self) -> None:
        """Raise ConfigError for a secret in what is given: others will see it."""

    def check_table(self, table: str) -> None:
        """Raise ConfigError if the settings say that the changes of this table are not captured."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at (`pgcdc validate`)."""

    name: str
    status: Literal["ok", "failed", "skipped"]
    detail: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A source that can be read."""

    identity: Identity
    tables: frozenset[str] = frozenset()  # Those that are captured
    notes: tuple[str, ...] = ()  # For people: what was changed, and what is captured only in part
    undo: Callable[[], object] = lambda: None
    """Takes back what was made in the database and outlives its slot: for a trial."""


@dataclass(frozen=True, slots=True)
class ColumnsQuery:
    """Which columns a query asks for: those since `change`, else as they were `noted`, else as they are now."""

    table: tuple[str, str]
    types: TypeOptions
    change: ShapeChange | None = None
    noted: list[tuple[str, int, int]] | None = None  # Name, type and modifier of each
    zset: bool = False


class RowsOptions(Options):
    """How the rows of a table are read."""

    model_config = ConfigDict(populate_by_name=True)

    partitions: int | None = Field(None, ge=1)  # How many tasks read; None: by the size of the table
    where: str = ""  # Only rows for which this is true, in SQL
    snapshot_keep: Seconds = Field(300.0, gt=0)  # How long the snapshot is held after the last read
    metadata: bool = True  # With the columns of typed changes (`_op` and the others), so that both have the same schema
    held: str = Field("", alias="_held")
    """Read in this snapshot (`HeldSnapshot.to_text`), which who gives it holds (`pgcdc snapshot`)."""
    files: str = Field("", alias="_files")  # With `held`: `chunks.files_text` of the table when the snapshot was taken


class TableRows(Protocol):
    """The rows that a table has, all of one moment. Picklable: it travels to the executors, without a secret."""

    title: str
    columns: tuple[TypedColumn, ...]
    key: tuple[str, ...]  # Its primary key, as far as we may read it

    def plan(self, names: list[str], wanted: RowsOptions, watch_pid: int) -> list[Any]:
        """What each task reads, to be given to `read`. In the driver, which is the process `watch_pid`: a snapshot ends
        with it. What cannot be read is refused here."""

    def read(self, part: Any, names: list[str], where: str) -> Iterator[pa.Array]:
        """The values of these columns, row by row. On any host."""


class Settled(NamedTuple):
    """What has become of the rows that were asked for, by snapshots of any kind."""

    end: Position | None  # Where all of them have been put; None while some are still to be read
    initial_end: Position | None  # Where those of the initial snapshot end; None while it is under way
    only: bool = False  # Nothing but the initial snapshot is wanted


class ChangeStream(Protocol):
    """Changes in their order, from one database. Whatever may wait for the database raises ConnectionLost."""

    phase: str  # What it does, for people
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
        Without `may_read` the spool is full: nothing is read. Without `drain` nobody waits: small ones may gather."""

    def tend(self, needed: int, *, may_work: bool) -> float:
        """Do what is due beside the changes; the seconds until the next time. Somebody waits for the commit `needed`."""

    def target(self) -> int:
        """The commit that stands for now: a run that delivers everything up to now ends behind it."""

    def clock(self) -> tuple[int, int]:
        """A commit, and a moment (microseconds since 1970) before which nothing is committed behind it; (0, 0): none."""

    def confirm(self, token: Token) -> None:
        """Everything up to this transaction is durable at every consumer and never needed again. If batches of this source
        have tokens, it is a saved one: with it the stream can be opened again."""

    def release(self, base: Position) -> None:
        """Nobody needs anything up to `base` again."""

    def settled(self, end: Position | None) -> Settled:
        """What has become of snapshots. `end`: where the spool ends, None if that is inside of a transaction."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what only this source understands: `do: snapshot`, and `do: sentinel`, whose answer has the `position` behind
        everything that was committed when its `id` was first asked for; None while that is not known."""

    def status(self, confirmed: int) -> dict[str, Any]:
        """For `pgcdc status`."""

    def close(self) -> None:
        """Close everything."""


class Source(Protocol):
    """One database, with the settings of its capture, and what the environment adds. To make one touches nothing."""

    options_type: ClassVar[type[SourceOptions]]
    no_requests: ClassVar[tuple[str, str] | None]
    """Why nobody can ask for snapshots beside the stream, and what to do instead; None: everybody can (`do: snapshot`)."""
    options: SourceOptions

    def __init__(self, options: SourceOptions) -> None: ...

    # --- the capture

    def check(self, state: StateDir, consumer: str) -> Iterator[Finding]:
        """Whether `prepare` would do, step by step. Nothing is left behind."""

    def tables(self, state: StateDir) -> list[Relation]:
        """The tables that are captured, or would be."""

    def captured(self, identity: Identity) -> list[Relation]:
        """The tables that are captured, as they are now."""

    def prepare(self, state: StateDir, *, consumer: str, say: Callable[[str], object] = lambda text: None) -> Prepared:
        """Make what a capture needs, in the database and in the state directory, unless it is there. Raises with advice for
        whatever cannot be, and then nothing new is left behind. `consumer` is who asks. What has to wait for others says so
        with `say`, again and again; `say` may raise to end that."""

    def follow_tables(self, state: StateDir) -> tuple[frozenset[str], tuple[str, ...]]:
        """Capture tables that were created meanwhile, if the settings want that. Returns all that are captured then, and for
        people what is captured only in part."""

    def has_confirmed(self, commit: int) -> bool:
        """Whether the database has taken the confirmation of this commit; it gets a moment for it."""

    def join(self, identity: Identity, status: Mapping[str, Any], *, is_typed: bool) -> None:
        """Raise ConfigError if the capture of `identity`, which runs and says `status`, captures something else."""

    def open(self, token: Token, state: StateDir, spool: SpoolWriter, consumers: Consumers) -> ChangeStream:
        """The changes behind what the spool has (`spool.resume_lsn`); not connected yet. `token` is what the source itself
        said of the last transaction there, or of one before: then it reads again, and leaves out, what lies between. It is
        empty if the batches of this source have no tokens."""

    # --- single tables

    def of_table(self, table: str, identity: Identity | None) -> Source:
        """The same for a query that names nothing but its table: it captures that, or what is captured already."""

    def typed_columns(self, state: StateDir, wanted: ColumnsQuery) -> tuple[TypedColumn, ...]:
        """The columns in which changes of a table come. Raises with advice if there is no such table, or if its changes
        cannot be had in that form."""

    def check_captured(self, identity: Identity, table: str, *, zset: bool) -> None:
        """Raise if the changes of the table do not come: a query for it would wait forever."""

    def snapshot(self, table: str, types: TypeOptions) -> TableRows:
        """The rows that a table has."""


# --- the sources that there are, by their names; each is imported when it is asked for
#
# A package of somebody else adds one with an entry point of the group `pgcdc.sources`.

_OURS = {
    "postgres": ("pgcdc.source.postgres.source:PostgresSource", "pgcdc.source.postgres.options:PostgresOptions"),
    "rate": ("pgcdc.source.rate.source:RateSource", "pgcdc.source.rate.options:RateOptions"),
}
"""The class, and its options: whoever reads settings loads no more than these."""
_DETECTORS = {"wal": "postgres", "rate": "rate"}
"""What the manual calls them; those of other packages have their own names."""


def _others() -> dict[str, EntryPoint]:
    return {one.name: one for one in entry_points(group="pgcdc.sources") if one.name not in _OURS}


def source_names() -> list[str]:
    return sorted({*_OURS, *_others()})


def find_source(name: str) -> type[Source]:
    """The source of that name. ConfigError names what is nearest if there is none."""
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
    """Raise ConfigError, with what is nearest, if the setting `detector` names no source."""
    if name not in _DETECTORS and name not in _others():
        raise _unknown("detector", name, [*_DETECTORS, *sorted(_others())])


def _unknown(what: str, name: str, names: list[str]) -> ConfigError:
    near = difflib.get_close_matches(name.lower(), names, 1)
    known = f"Known {what}s: {', '.join(names)}"
    return ConfigError(f"{what} {name!r} does not exist", f"Did you mean {near[0]}? {known}" if near else known)


def make_source(options: SourceOptions | dict[str, Any], kind: str = "") -> Source:
    """The source of these settings; if they are JSON, of that kind."""
    if isinstance(options, dict):
        found = find_source(kind)
        return found(found.options_type.model_validate(options))
    return find_source(options.kind)(options)
