"""The options of the Spark source: the settings of its source, the capture, events and readers, by name.

`detector` names the kind of source.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, ValidationError
from pydantic.fields import FieldInfo

from pgcdc.capture.control import CaptureOptions
from pgcdc.core.errors import ConfigError
from pgcdc.core.settings import REFUSED, Conflict, Options, Seconds, checked, is_switch, setting, setting_of, unit_of
from pgcdc.core.state import StateDir
from pgcdc.event.frame import EventOptions
from pgcdc.event.typed import RowOptions
from pgcdc.postgres.selection import TableName
from pgcdc.postgres.types.column import CHOICES, TypeOptions
from pgcdc.source.protocol import RowsOptions, SourceOptions, check_detector, find_options

__all__ = [
    "ReaderSettings",
    "RowsOptions",
    "StreamOptions",
    "check_kind",
    "option_names",
    "parse_options",
    "write_options",
]


EVENTS, TYPED = "Events", "Typed rows"
_NOT_TYPED = ("tx_metadata", "tx_markers", "schema_events", "sentinel_events")  # Settings that typed rows refuse


class EventSettings(Options):
    """What events contain."""

    tx_metadata: bool = setting(False, "Add the transaction to every event: xid, commit time, number.", EVENTS)
    tx_markers: bool = setting(False, "Add BEGIN and COMMIT events, on pgcdc:_txn.", EVENTS)
    schema_events: bool = setting(False, "Add an event when a table is altered, on pgcdc:_schema.", EVENTS)
    sentinel_events: bool = setting(False, "Add an event for each `pgcdc sentinel`, on pgcdc:_sentinel.", EVENTS)
    invalid_utf8: Literal["error", "replace", "base64"] = setting(
        "error", "Bytes that are not UTF-8: error, replace or base64.", EVENTS, metavar="POLICY"
    )

    @property
    def events(self) -> EventOptions:
        """These settings for the event maker. Markers always name their transaction."""
        transaction = self.tx_markers or self.tx_metadata
        switches = (transaction, self.tx_markers, self.invalid_utf8, self.schema_events)
        return EventOptions(*switches, sentinels=self.sentinel_events)


class TypedSettings(Options):
    """Typed rows of one table instead of events."""

    table: TableName | None = setting(
        None, "Deliver typed rows of this table instead of events: its own columns. See docs/types.md.", TYPED,
        metavar="NAME", example="orders",
    )  # fmt: skip
    changelog: Literal["changes", "zset"] = setting(
        "changes", "With --table: changes, or zset (rows with weights).", TYPED, metavar="KIND"
    )
    truncate: Literal["error", "mark"] = setting(
        "error", "With --changelog zset: error, or mark (a row for it).", TYPED, metavar="POLICY"
    )
    numeric: Literal["decimal", "string", "double"] = setting(
        "decimal", "With --table: numeric as decimal, string or double.", TYPED, metavar="KIND"
    )
    out_of_range: Literal["error", "clamp", "string"] = setting(
        "error", "With --table: infinity, BC: error, clamp, or dates as string.", TYPED, metavar="POLICY"
    )
    arrays: Literal["array", "string"] = setting("array", "With --table: array or string.", TYPED, metavar="KIND")
    composites: Literal["struct", "string"] = setting(
        "struct", "With --table: struct or string.", TYPED, metavar="KIND"
    )

    def typed_conflicts(self, events: EventSettings) -> Iterator[Conflict]:
        """Options that apply only to events, or only to typed rows."""
        for name in _NOT_TYPED if self.table else ():
            if getattr(events, name):
                flag = name.replace("_", "-")
                yield Conflict(
                    (name,),
                    f"--{flag} cannot be combined with typed rows (--table)",
                    f"Remove --table or --{flag}; typed rows have _xid and _ts",
                )
        for name in TypedSettings.model_fields if not self.table else ():
            if self.is_given(name):
                flag = name.replace("_", "-")
                yield Conflict((name,), f"--{flag} needs typed rows (--table)", "Add --table, or remove it")


class ReaderSettings(Options):
    """The settings that every query of events receives."""

    detector: Annotated[str, AfterValidator(partial(checked, check_detector))] = setting(
        "wal", "Where changes come from: wal, or rate for generated ones without a database.", "Database"
    )
    max_batch_rows: int = setting(
        100_000, "Read at most about this many events per batch.", "Running", metavar="N", ge=1
    )


class TypedReaderSettings(TypedSettings):
    """Further options of typed rows."""

    json_: Literal["string", "variant"] = Field("string", alias="json")
    schema_change: Literal["stop", "ignore"] = "stop"
    heartbeats: bool = False
    heartbeat_interval: Seconds = Field(10.0, gt=0)
    start: str = Field("", alias="_start")
    """Where the query resumes, if its driver knows more than the consumer's ack."""


class StreamOptions(CaptureOptions, EventSettings, ReaderSettings, TypedReaderSettings, RowsOptions):
    """All options of a query."""

    source: SourceOptions  # The source's own settings, without secrets
    consumer: str = "default"
    run: str = Field("", alias="_run")
    """Control socket of the run that this query is a lane of. The run acknowledges for the consumer."""
    spool: str = Field("", alias="_spool")  # Read only this spool, without a capture (for warm-up)
    chains: str = Field("", alias="_chains")
    """Chains of simple transforms that the source applies itself (`event.edits`)."""

    @property
    def rows(self) -> RowOptions:
        """The options for converting changes to typed rows."""
        return RowOptions(self.changelog == "zset", self.truncate, self.schema_change == "ignore", self.events)

    @property
    def types(self) -> TypeOptions:
        """The options for choosing the columns' Spark types."""
        return TypeOptions(**{name: getattr(self, "json_" if name == "json" else name) for name in CHOICES})

    @property
    def heartbeat_s(self) -> float:
        """The shortest interval between a typed query's heartbeats; 0 for none."""
        return self.heartbeat_interval if self.heartbeats else 0.0


def _names(model: type[Options]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items() if name != "source"}


_OURS = _names(StreamOptions)
_BATCH = set(_names(RowsOptions))
_TYPED = {*_BATCH, *_names(TypedReaderSettings)} - {"table"}


def _fields(model: type[SourceOptions]) -> dict[str, FieldInfo]:
    """All options of a query on such a source, by the names of the settings."""
    theirs = {name: field for name, field in _names(model).items() if name not in model.spark_hidden}
    return {**theirs, **_OURS}


def option_names(detector: str) -> list[str]:
    """The options of a query that users may set. Names that begin with `_` are internal."""
    model = find_options(detector)
    shown = {name: option for option, name in model.spark_names.items()}
    return sorted(shown.get(name, name) for name in _fields(model))


def parse_options(raw: Mapping[str, str]) -> StreamOptions:
    """Parse Spark's option map (keys in any case). Raises ConfigError for unknown options and invalid values."""
    given = {key.lower().replace("-", "_"): value for key, value in raw.items()}
    detector = given.get("detector", "").lower() or "wal"
    check_detector(detector)
    given |= {"detector": detector} if "detector" in given else {}
    model = find_options(detector)
    fields, shown = _fields(model), {name: option for option, name in model.spark_names.items()}
    options = {model.spark_names.get(key, key): value for key, value in given.items()}
    if unknown := sorted(set(options) - set(fields)):
        names = [name for name in option_names(model.kind) if not name.startswith("_")]
        close, known = difflib.get_close_matches(unknown[0], names, n=1), ", ".join(names)
        raise ConfigError(
            f"unknown option {unknown[0]!r}", f"Did you mean {close[0]}?" if close else f"Known options: {known}"
        )
    values = {name: read for name, text in options.items() if (read := _read(name, text, fields[name])) is not None}
    try:
        source = model.model_validate({name: value for name, value in values.items() if name not in _OURS})
        source.check_visible()
        ours = {name: value for name, value in values.items() if name in _OURS}
        found = StreamOptions.model_validate({**ours, "source": source})
    except ValidationError as error:
        raise _explain(error, options, fields, shown) from None
    _check_typed(found, set(options))
    for conflict in (*source.conflicts(), *found.conflicts()):
        if conflict.path:  # missing options are reported where they are needed
            raise conflict
    return found


def write_options(settings: ReaderSettings) -> dict[str, str]:
    """The options of a pipeline's query. Never contains a secret, because Spark shows options."""
    model = find_options(settings.detector)
    options, known = {}, _fields(model)
    for name, meaning in model.spark_hidden.items():
        settings = settings.but(**meaning) if getattr(settings, name) else settings
    for name, field in type(settings).model_fields.items():
        if name not in known or setting_of(name, field).secret or not settings.is_given(name):
            continue
        value = getattr(settings, name)
        if isinstance(value, bool):
            options[name] = str(value).lower()
        else:
            options[name] = json.dumps(value) if isinstance(value, tuple) else str(value)
    if isinstance(settings, CaptureOptions):
        options["state_dir"] = str(StateDir(settings.state_dir).path)
    return options


def _read(name: str, text: str, field: FieldInfo) -> Any:
    """Convert a value of the option map for the model; None if it is unset."""
    if is_switch(field.annotation):
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"option {name} is {text.lower()!r}, not true or false", "Set it to true or false")
        return text.lower() == "true"
    if _choices(field.annotation):
        return text.lower() or None
    if text == "" and field.annotation not in (int, float):
        return None
    if text.startswith("[") and "tuple" in str(field.annotation):  # as `write_options` wrote it
        return tuple(json.loads(text))
    return text


def _choices(annotation: Any) -> list[str]:
    parts = (annotation, *get_args(annotation))
    return [one for part in parts if getattr(part, "__origin__", None) is Literal for one in get_args(part)]


def _explain(
    error: ValidationError, options: Mapping[str, str], fields: Mapping[str, FieldInfo], names: Mapping[str, str]
) -> ConfigError:
    first = error.errors(include_url=False, include_input=False)[0]
    name, context = str(first["loc"][0]), first.get("ctx", {})
    field, shown = fields[name], names.get(name, name)
    if first["type"] == REFUSED:
        return ConfigError(f"option {shown}: {context['message']}", context["advice"])
    if choices := _choices(field.annotation):
        return ConfigError(f"option {shown} is {options[name].lower()!r}", f"Use one of: {', '.join(choices)}")
    unit = unit_of(field)
    wanted = {"seconds": "a time like 100ms, 30s or 5m", "bytes": "a size like 512MB"}.get(unit.kind) if unit else ""
    reason = str(first["msg"]).removeprefix("Input should be ")
    return ConfigError(f"option {shown} is {options.get(name, '')!r}", f"Set it to {wanted or 'a number'}: {reason}")


def _check_typed(found: StreamOptions, given: set[str]) -> None:
    """Refuse options for typed rows on events, and the other way round."""
    if not found.table:
        wrong = sorted(_TYPED.intersection(given))
        if wrong:
            raise ConfigError(f"option {wrong[0]} needs typed rows", "Name a table with option('table', ...)")
        return
    found.source.check_table(found.table)
    for name in _NOT_TYPED:
        if getattr(found, name):
            raise ConfigError(
                f"option {name} cannot be combined with typed rows",
                "Remove it: typed rows have the columns _xid, _ts and _ordinal",
            )
    if found.rows.zset and found.rows.other_shapes:
        raise ConfigError(
            "a Z-set cannot continue with other columns: old rows could not be taken back as they were added",
            "Remove option schema_change",
        )


def check_kind(raw: Mapping[str, str], *, is_batch: bool) -> None:
    """Raise ConfigError for an option of spark.read on a stream, or the other way round."""
    given = {key.lower().replace("-", "_") for key in raw}
    wrong = sorted(given - _BATCH - {"url", "table", "detector", *CHOICES} if is_batch else given & _BATCH)
    if wrong:
        kinds = ("spark.readStream", "spark.read") if is_batch else ("spark.read", "spark.readStream")
        raise ConfigError(f"option {wrong[0]} is for {kinds[0]}, not for {kinds[1]}", "Remove it")
