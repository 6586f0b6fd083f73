"""The options of the Spark source, checked in one place."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from pgcdc.core.errors import ConfigError
from pgcdc.core.position import Position
from pgcdc.core.settings import split_outside_quotes
from pgcdc.core.units import parse_bytes, parse_seconds
from pgcdc.event.frame import INVALID_TEXT, EventOptions
from pgcdc.postgres.database import parse_url, split_table
from pgcdc.postgres.types.column import CHOICES, TypeOptions
from pgcdc.source.postgres.setup.prepare import DEFAULT_SPOOL_LIMIT_BYTES, SourceOptions
from pgcdc.source.postgres.snapshot.held import DEFAULT_HOLD_LIMIT_S
from pgcdc.source.postgres.snapshot.mode import SNAPSHOT_MODES, choose_snapshot_mode
from pgcdc.source.postgres.toast.resolver import DEFAULT_CACHE_ENTRIES, ToastOptions
from pgcdc.source.postgres.wire.protocol import WireOptions

__all__ = [
    "BatchOptions",
    "RowOptions",
    "StreamOptions",
    "check_kind",
    "parse_options",
]

DEFAULT_MAX_BATCH_ROWS = 100_000
DEFAULT_HEARTBEAT_S = 10.0
DEFAULT_SNAPSHOT_KEEP_S = 300.0

_N = TypeVar("_N", int, float)


@dataclass(frozen=True, slots=True)
class RowOptions:
    """How changes become rows."""

    zset: bool = False
    """Rows with weights: an UPDATE takes the old row back (-1) and adds the new one (+1)."""
    truncate: str = "error"
    """What a TRUNCATE is for a Z-set, which was not told of the rows that are gone: `error`, or a row to `mark` it."""
    other_shapes: bool = False
    """Changes whose table has other columns by then are read as far as they go; else they are refused."""
    events: EventOptions = EventOptions()  # noqa: RUF009 - frozen
    snapshot_end: Position = Position.at(0, 0)  # noqa: RUF009 - frozen
    """Up to where rows of snapshots are those of the initial one: only these are new to a Z-set."""


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What a batch read says about its source, besides the table and its types."""

    partitions: int = 0
    """How many tasks read; 0: by the size of the table."""
    where: str = ""
    """Only rows for which this is true, in SQL."""
    keep_s: float = DEFAULT_SNAPSHOT_KEEP_S
    """How long the snapshot is held after the last read."""
    metadata: bool = True
    """With the columns of typed changes (`_op` and the others), so that both have the same schema."""
    held: str = ""
    """Read in this snapshot (`HeldSnapshot.to_text`), which who gives it holds (`pgcdc snapshot`)."""
    files: str = ""
    """With `held`: `chunks.files_text` of the table when the snapshot was taken."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What a query says about its source."""

    source: SourceOptions
    consumer: str
    max_batch_rows: int
    run: str
    """The control socket of the run that this query is a lane of: it acknowledges for the consumer, not the query."""
    events: EventOptions
    spool: str
    """Read this spool and no other: no capture (used to warm up)."""
    table: str | None = None
    """Typed rows of this table; else events."""
    rows: RowOptions = RowOptions()
    types: TypeOptions = TypeOptions()  # noqa: RUF009 - frozen
    heartbeat_s: float = 0.0
    """How often a typed query hears how far time has come, at most; 0: never."""
    start: str = ""
    """Where the query goes on, if its driver knows better than the consumer's ack."""
    batch: BatchOptions = BatchOptions()
    chains: str = ""
    """Chains of simple transforms that the source does itself (`event.edits`)."""
    url: str = ""
    """What the option says: it has no password, and may travel to the executors."""


def parse_options(raw: Mapping[str, str]) -> StreamOptions:
    """Spark's option map (keys in any case). Raises ConfigError for what is unknown or does not fit."""
    options = {key.lower().replace("-", "_"): value for key, value in raw.items()}
    unknown = sorted(set(options) - _KNOWN)
    if unknown:
        close = difflib.get_close_matches(unknown[0], _KNOWN, n=1)
        known = ", ".join(sorted(name for name in _KNOWN if not name.startswith("_")))
        raise ConfigError(
            f"unknown option {unknown[0]!r}", f"Did you mean {close[0]}?" if close else f"Known options: {known}"
        )
    url = options.get("url", "") or os.environ.get("PGCDC_DB", "")
    if options.get("url") and any("password" in key and value for key, value in parse_url(options["url"]).items()):
        raise ConfigError(
            "the option url holds a password, and Spark keeps options in plans and logs",
            "Put the whole URL into the variable PGCDC_DB and leave the option out, or the password into PGPASSWORD "
            "or ~/.pgpass",
        )
    source = SourceOptions(
        url=url,
        slot=options.get("slot", "pgcdc"),
        publication=options.get("publication"),
        tables=tuple(split_outside_quotes(options.get("tables", ""), ",")),
        all_tables=_flag(options, "all_tables"),
        schemas=tuple(split_outside_quotes(options.get("schemas", ""), ",")),
        row_filters=tuple(split_outside_quotes(options.get("row_filters", ""), ";")),
        columns=tuple(split_outside_quotes(options.get("columns", ""), ";")),
        generated_columns=_flag(options, "generated_columns"),
        state_dir=options.get("state_dir", ".pgcdc"),
        spool_limit_bytes=_number(options, "spool_limit", DEFAULT_SPOOL_LIMIT_BYTES, parse_bytes),
        start_from=options.get("start_from"),
        fail_fast=_flag(options, "fail_fast"),
        temporary_slot=_flag(options, "temporary_slot"),
        accept_publication=_flag(options, "accept_publication"),
        wire=WireOptions(
            streaming=_flag(options, "streaming") if "streaming" in options else None,
            messages=_flag(options, "messages"),
            two_phase=_flag(options, "two_phase"),
            origin=options.get("origin", "any"),
            binary=_flag(options, "binary"),
        ),
        toast=ToastOptions(
            options.get("toast", "mark"), _number(options, "toast_cache_max_entries", DEFAULT_CACHE_ENTRIES, int)
        ),
        snapshot_mode=_snapshot_mode(options),
        snapshot_hold_limit_s=_number(options, "snapshot_hold_limit", DEFAULT_HOLD_LIMIT_S, parse_seconds),
        incremental_snapshot=_flag(options, "incremental_snapshot"),
        signal_table=options.get("signal_table", "pgcdc_signals"),
        snapshot_chunk_size=_number(options, "snapshot_chunk_size", 0, int),
        snapshot_chunk_delay_s=_number(options, "snapshot_chunk_delay", 0.0, parse_seconds),
    )
    source.toast.check(source.wire.origin)
    rows = _number(options, "max_batch_rows", DEFAULT_MAX_BATCH_ROWS, int)
    if rows < 1:
        raise ConfigError("max_batch_rows must be at least 1", "Leave it out for the default")
    events = _event_options(options)
    plain = StreamOptions(
        source,
        options.get("consumer", "default"),
        rows,
        options.get("_run", ""),
        events,
        options.get("_spool", ""),
        chains=options.get("_chains", ""),
        url=options.get("url", ""),
    )
    return _typed(plain, options)


def _snapshot_mode(options: Mapping[str, str]) -> str:
    given = _choice(options, "snapshot_mode", SNAPSHOT_MODES) if "snapshot_mode" in options else None
    return choose_snapshot_mode(
        given, temporary_slot=_flag(options, "temporary_slot"), start_from=options.get("start_from")
    )


def _typed(plain: StreamOptions, options: Mapping[str, str]) -> StreamOptions:
    """The same with what concerns typed rows, which events have none of."""
    table = options.get("table")
    if not table:
        given = sorted(_TYPED.intersection(options))
        if given:
            raise ConfigError(f"option {given[0]} is for typed rows", "Name the table with option('table', ...)")
        return plain
    named = {split_table(name) for name in plain.source.tables}
    if named and split_table(table) not in named:
        raise ConfigError(
            f"table {table} is not among the tables to capture", "Add it to option tables, or leave that out"
        )
    for name in ("tx_metadata", "tx_markers", "schema_events"):
        if _flag(options, name):
            raise ConfigError(f"option {name} is for events", "Typed rows have the columns _xid, _ts and _ordinal")
    interval = _number(options, "heartbeat_interval", DEFAULT_HEARTBEAT_S, parse_seconds)
    if not 0 < interval < math.inf:
        raise ConfigError(f"option heartbeat_interval is {interval}", "Give a number of seconds above 0")
    rows = RowOptions(
        zset=_choice(options, "changelog", ("changes", "zset")) == "zset",
        truncate=_choice(options, "truncate", ("error", "mark")),
        other_shapes=_choice(options, "schema_change", ("stop", "ignore")) == "ignore",
        events=plain.events,
    )
    if rows.zset and rows.other_shapes:
        raise ConfigError(
            "a Z-set cannot go on with other columns: old rows would not be taken back as they were added",
            "Leave option schema_change out",
        )
    return replace(
        plain,
        table=table,
        rows=rows,
        types=TypeOptions(**{name: _choice(options, name, choices) for name, choices in CHOICES.items()}),
        heartbeat_s=interval if _flag(options, "heartbeats") else 0.0,
        start=options.get("_start", ""),
        batch=_batch_options(options),
    )


def _batch_options(options: Mapping[str, str]) -> BatchOptions:
    partitions = _number(options, "partitions", 0, int)
    keep_s = _number(options, "snapshot_keep", DEFAULT_SNAPSHOT_KEEP_S, parse_seconds)
    if ("partitions" in options and partitions < 1) or keep_s <= 0:
        name = "snapshot_keep" if keep_s <= 0 else "partitions"
        raise ConfigError(f"option {name} is {options[name]}", "Give a number above 0, or leave it out")
    metadata = _flag(options, "metadata", default="true")
    held, files = options.get("_held", ""), options.get("_files", "")
    return BatchOptions(partitions, options.get("where", ""), keep_s, metadata, held, files)


def check_kind(raw: Mapping[str, str], *, is_batch: bool) -> None:
    """Raise ConfigError for an option of spark.read at a stream, or the other way round."""
    given = {key.lower().replace("-", "_") for key in raw}
    wrong = sorted(given - _BATCH - {"url", "table", *CHOICES} if is_batch else given & _BATCH)
    if wrong:
        kinds = ("spark.readStream", "spark.read") if is_batch else ("spark.read", "spark.readStream")
        raise ConfigError(f"option {wrong[0]} is for {kinds[0]}, not for {kinds[1]}", "Leave it out")


def _choice(options: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    """One of the choices; the first is the default."""
    value = options.get(name, choices[0]).lower()
    if value not in choices:
        raise ConfigError(f"option {name} is {value!r}", f"Give one of: {', '.join(choices)}")
    return value


def _event_options(options: Mapping[str, str]) -> EventOptions:
    markers = _flag(options, "tx_markers")
    invalid = options.get("invalid_utf8", "error")
    if invalid not in INVALID_TEXT:
        raise ConfigError(f"option invalid_utf8 is {invalid!r}", f"Give one of: {', '.join(INVALID_TEXT)}")
    return EventOptions(markers or _flag(options, "tx_metadata"), markers, invalid, _flag(options, "schema_events"))


_BATCH = {"partitions", "where", "snapshot_keep", "metadata", "_held", "_files"}
_TYPED = {*_BATCH, "changelog", "truncate", "schema_change", "heartbeats", "heartbeat_interval", "_start", *CHOICES}
_KNOWN = {
    *_TYPED, "table",
    "url", "slot", "publication", "tables", "all_tables", "schemas", "row_filters", "columns",
    "generated_columns", "state_dir", "spool_limit", "start_from", "fail_fast",
    "temporary_slot", "accept_publication", "consumer", "max_batch_rows", "tx_metadata", "tx_markers", "invalid_utf8",
    "schema_events",
    "snapshot_mode", "snapshot_hold_limit",
    "streaming", "messages", "two_phase", "origin", "binary", "toast", "toast_cache_max_entries",
    "incremental_snapshot", "signal_table", "snapshot_chunk_size", "snapshot_chunk_delay",
    "_spool", "_run", "_chains",
}  # fmt: skip


def _flag(options: Mapping[str, str], name: str, default: str = "false") -> bool:
    value = options.get(name, default).lower()
    if value not in ("true", "false"):
        raise ConfigError(f"option {name} is {value!r}", "Give true or false")
    return value == "true"


def _number(options: Mapping[str, str], name: str, default: _N, parse: Callable[[str], _N]) -> _N:
    if name not in options:
        return default
    try:
        return parse(options[name])
    except ValueError as error:
        raise ConfigError(f"option {name} is {options[name]!r}", "Give a number") from error
