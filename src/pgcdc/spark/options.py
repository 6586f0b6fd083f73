"""The options of the Spark source: the settings of the PostgreSQL source, of the capture and of events by their names, and
those of a reader."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import ConfigDict, Field, ValidationError

from pgcdc.capture.spec import CaptureOptions
from pgcdc.core.errors import ConfigError
from pgcdc.core.settings import REFUSED, Options, is_switch, setting, setting_of, unit_of
from pgcdc.core.state import StateDir
from pgcdc.core.units import Seconds
from pgcdc.event.options import EventSettings, RowOptions, TypedSettings
from pgcdc.postgres.database import parse_url, split_table
from pgcdc.postgres.types.column import CHOICES, TypeOptions
from pgcdc.source.postgres.options import PostgresOptions

__all__ = ["BatchOptions", "ReaderSettings", "StreamOptions", "check_kind", "parse_options", "write_options"]

_RENAMED = {"url": "db", "slot": "slot_name"}
"""Names of options that are others than those of the settings."""


class ReaderSettings(Options):
    """What every query of events is told."""

    max_batch_rows: int = setting(100_000, "At most about this many events a batch.", "Running", metavar="N", ge=1)


class TypedReaderSettings(TypedSettings):
    """Further options of typed rows."""

    json_: Literal["string", "variant"] = Field("string", alias="json")
    schema_change: Literal["stop", "ignore"] = "stop"
    heartbeats: bool = False
    heartbeat_interval: Seconds = Field(10.0, gt=0)
    start: str = Field("", alias="_start")
    """Where the query goes on, if its driver knows better than the consumer's ack."""


class BatchOptions(Options):
    """What a batch read says about its source, besides the table and its types."""

    model_config = ConfigDict(populate_by_name=True)

    partitions: int | None = Field(None, ge=1)
    """How many tasks read; None: by the size of the table."""
    where: str = ""
    """Only rows for which this is true, in SQL."""
    snapshot_keep: Seconds = Field(300.0, gt=0)
    """How long the snapshot is held after the last read."""
    metadata: bool = True
    """With the columns of typed changes (`_op` and the others), so that both have the same schema."""
    held: str = Field("", alias="_held")
    """Read in this snapshot (`HeldSnapshot.to_text`), which who gives it holds (`pgcdc snapshot`)."""
    files: str = Field("", alias="_files")
    """With `held`: `chunks.files_text` of the table when the snapshot was taken."""


class StreamOptions(PostgresOptions, CaptureOptions, EventSettings, ReaderSettings, TypedReaderSettings, BatchOptions):
    """What a query says about its source."""

    consumer: str = "default"
    run: str = Field("", alias="_run")
    """The control socket of the run that this query is a lane of: it acknowledges for the consumer, not the query."""
    spool: str = Field("", alias="_spool")
    """Read this spool and no other: no capture (used to warm up)."""
    chains: str = Field("", alias="_chains")
    """Chains of simple transforms that the source does itself (`event.edits`)."""
    other_source: str = Field("", alias="_source")
    """Another source than PostgreSQL, which the run has prepared: its kind and its options, as JSON."""
    url: str = Field("", alias="_url")
    """What the option says: it has no password, and may travel to the executors."""

    @property
    def source(self) -> PostgresOptions:
        """The part that concerns the source."""
        return self.part(PostgresOptions)

    @property
    def rows(self) -> RowOptions:
        """How changes become typed rows."""
        return RowOptions(self.changelog == "zset", self.truncate, self.schema_change == "ignore", self.events)

    @property
    def types(self) -> TypeOptions:
        """Which Spark types the columns get."""
        return TypeOptions(**{name: getattr(self, _FIELDS[name]) for name in CHOICES})

    @property
    def heartbeat_s(self) -> float:
        """How often a typed query hears how far time has come, at most; 0: never."""
        return self.heartbeat_interval if self.heartbeats else 0.0


_SYNONYMS = ("url", "persistent_slot", "snapshot_first", "snapshot_table", "toast_cache")
_FIELDS = {field.alias or name: name for name, field in StreamOptions.model_fields.items() if name not in _SYNONYMS}
"""The fields by the names of the settings; other words for one of them are for the command line."""
OPTION_NAMES = sorted({*_FIELDS, *_RENAMED} - set(_RENAMED.values()))
"""The options by the names that users know; those that begin with `_` are ours."""
_BATCH = {field.alias or name for name, field in BatchOptions.model_fields.items()}
_TYPED = {*_BATCH, *(field.alias or name for name, field in TypedReaderSettings.model_fields.items())} - {"table"}


def parse_options(raw: Mapping[str, str]) -> StreamOptions:
    """Spark's option map (keys in any case). Raises ConfigError for what is unknown or does not fit."""
    given = {key.lower().replace("-", "_"): value for key, value in raw.items()}
    options = {_RENAMED.get(key, key): value for key, value in given.items()}
    unknown = sorted(set(options) - set(_FIELDS))
    if unknown:
        names = [name for name in OPTION_NAMES if not name.startswith("_")]
        close, known = difflib.get_close_matches(unknown[0], names, n=1), ", ".join(names)
        raise ConfigError(
            f"unknown option {unknown[0]!r}", f"Did you mean {close[0]}?" if close else f"Known options: {known}"
        )
    url = options.get("db", "")
    if url and any("password" in key and value for key, value in parse_url(url).items()):
        raise ConfigError(
            "the option url holds a password, and Spark keeps options in plans and logs",
            "Put the whole URL into the variable PGCDC_DB and leave the option out, or the password into PGPASSWORD "
            "or ~/.pgpass",
        )
    values = {name: read for name, text in options.items() if (read := _read(name, text)) is not None}
    try:
        found = StreamOptions.model_validate({**values, "db": url or os.environ.get("PGCDC_DB", ""), "_url": url})
    except ValidationError as error:
        raise _explain(error, options) from None
    _check_typed(found, set(options))
    for conflict in found.conflicts():
        if conflict.path:  # what is missing is said by who needs it
            raise conflict
    return found


def write_options(settings: Options) -> dict[str, str]:
    """What the source of a pipeline's query is told of these settings: never a secret, because Spark shows it."""
    options = {}
    for name, field in type(settings).model_fields.items():
        if name not in _FIELDS or setting_of(name, field).secret or not settings.is_given(name):
            continue
        value = getattr(settings, name)
        if isinstance(value, bool):
            options[name] = str(value).lower()
        else:
            options[name] = json.dumps(value) if isinstance(value, tuple) else str(value)
    if isinstance(settings, CaptureOptions):
        options["state_dir"] = str(StateDir(settings.state_dir).path)
    return options


def _read(name: str, text: str) -> Any:
    """A value of the option map for the model; None: it says nothing."""
    field = StreamOptions.model_fields[_FIELDS[name]]
    if is_switch(field.annotation):
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"option {name} is {text.lower()!r}", "Give true or false")
        return text.lower() == "true"
    if _choices(field.annotation):
        return text.lower() or None
    if text == "" and field.annotation not in (int, float):
        return None
    if text.startswith("[") and "tuple" in str(field.annotation):  # as `write_options` has it
        return tuple(json.loads(text))
    return text


def _choices(annotation: Any) -> list[str]:
    parts = (annotation, *get_args(annotation))
    return [one for part in parts if getattr(part, "__origin__", None) is Literal for one in get_args(part)]


def _explain(error: ValidationError, options: Mapping[str, str]) -> ConfigError:
    first = error.errors(include_url=False, include_input=False)[0]
    name, context = str(first["loc"][0]), first.get("ctx", {})
    field = StreamOptions.model_fields[_FIELDS[name]]
    shown = {"db": "url", "slot_name": "slot"}.get(name, name)
    if first["type"] == REFUSED:
        return ConfigError(f"option {shown}: {context['message']}", context["advice"])
    if choices := _choices(field.annotation):
        return ConfigError(f"option {shown} is {options[name].lower()!r}", f"Give one of: {', '.join(choices)}")
    unit = unit_of(field)
    wanted = {"seconds": "a time like 100ms, 30s or 5m", "bytes": "a size like 512MB"}.get(unit.kind) if unit else ""
    reason = str(first["msg"]).removeprefix("Input should be ")
    return ConfigError(f"option {shown} is {options.get(name, '')!r}", f"Give {wanted or 'a number'}: {reason}")


def _check_typed(found: StreamOptions, given: set[str]) -> None:
    """What concerns typed rows is not for events, and the other way round."""
    if not found.table:
        wrong = sorted(_TYPED.intersection(given))
        if wrong:
            raise ConfigError(f"option {wrong[0]} is for typed rows", "Name the table with option('table', ...)")
        return
    if found.tables and split_table(found.table) not in {split_table(name) for name in found.tables}:
        raise ConfigError(
            f"table {found.table} is not among the tables to capture", "Add it to option tables, or leave that out"
        )
    for name in ("tx_metadata", "tx_markers", "schema_events"):
        if getattr(found, name):
            raise ConfigError(f"option {name} is for events", "Typed rows have the columns _xid, _ts and _ordinal")
    if found.rows.zset and found.rows.other_shapes:
        raise ConfigError(
            "a Z-set cannot go on with other columns: old rows would not be taken back as they were added",
            "Leave option schema_change out",
        )


def check_kind(raw: Mapping[str, str], *, is_batch: bool) -> None:
    """Raise ConfigError for an option of spark.read at a stream, or the other way round."""
    given = {key.lower().replace("-", "_") for key in raw}
    wrong = sorted(given - _BATCH - {"url", "table", *CHOICES} if is_batch else given & _BATCH)
    if wrong:
        kinds = ("spark.readStream", "spark.read") if is_batch else ("spark.read", "spark.readStream")
        raise ConfigError(f"option {wrong[0]} is for {kinds[0]}, not for {kinds[1]}", "Leave it out")
