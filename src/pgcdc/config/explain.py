"""Turns pydantic's errors into one line each: place, key, reason, value, and advice."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from pgcdc.config.adapters import ENTRIES
from pgcdc.config.model import Config, Transforms
from pgcdc.core.errors import ConfigError
from pgcdc.core.secrets import describe_value
from pgcdc.core.settings import REFUSED, KeyPath, suggest
from pgcdc.sink.spec import ADAPTERS
from pgcdc.transform.specs import TransformSpec

TRANSFORMS: dict[str, type[BaseModel]] = {
    model.model_fields["type"].default: model for model in get_args(get_args(TransformSpec)[0])
}


def explain(
    error: ValidationError,
    place: Callable[[KeyPath], str],
    raw: Callable[[KeyPath], Any],
    known: Collection[KeyPath] = (),
) -> Iterator[ConfigError]:
    """Every error, one per place. Misspelt keys come first: they are often why another key is missing. Skips `known`
    places, which already have an error."""
    found = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    misspelt = {_path(one["loc"], raw)[:-1] for one in found if one["type"] == "extra_forbidden"}
    seen: set[KeyPath] = set(known)
    for one in found:
        path = _path(one["loc"], raw)
        is_said = any(path[: len(other)] == other or other[: len(path)] == path for other in seen)
        if not is_said and not (one["type"] == "missing" and path[:-1] in misspelt):
            where, message, advice = _explain(one, path, raw(path))
            yield ConfigError(f"{place(where)}: {message}", advice)
        seen.add(path)


def _explain(error: Any, path: KeyPath, value: Any) -> tuple[KeyPath, str, str]:
    """The key, its problem, and the advice."""
    kind, context, loc = error["type"], error.get("ctx", {}), error["loc"]
    if kind == "extra_forbidden":
        name = str(loc[-1])
        if len(loc) == 1:
            otherwise = "See the keys in docs/configuration.md, or with: pgcdc config schema"
            return path, "unknown key", advise(name) or suggest(name, Config.model_fields, otherwise)
        model: type[BaseModel] = {**TRANSFORMS, **ENTRIES}.get(str(loc[-2]), Transforms)
        names = [field.alias or key for key, field in model.model_fields.items()]
        return path, "unknown key", suggest(name, names)
    if kind == "missing":
        return path[:-1], f"{path[-1]} is missing", f"Add {path[-1]}: ..."
    if kind in ("union_tag_invalid", "union_tag_not_found"):  # a mapping in a list
        types = list(ENTRIES if path[0] == "adapters" and len(path) <= 2 else TRANSFORMS)
        given = value.get("type") if isinstance(value, dict) else None
        if given is None:
            return path, "type is missing", f"Use one of: {', '.join(types)}"
        return (*path, "type"), f"{str(given)!r:.60} is unknown", suggest(str(given), types)
    field = Config.model_fields.get(str(path[0]))
    advice = f"{path[0]}: {field.description}" if field and field.description else "See docs/configuration.md"
    if kind == REFUSED:
        advice = context["advice"] or advice
        is_planned = path == ("detector",) and str(value).replace("-", "_") in _DETECTORS
        return path, context["message"], f"This detector is not built yet. {advice}" if is_planned else advice
    reason = str(error["msg"]).removeprefix("Value error, ")
    if kind == "value_error" and "; " in reason:  # the problem; the advice
        reason, _, advice = reason.partition("; ")
        return path, reason, advice[:1].upper() + advice[1:]
    if kind == "literal_error" and isinstance(value, str):
        advice = suggest(value, re.findall(r"'([^']*)'", str(context.get("expected", ""))), advice)
    return path, reason + describe_value(str(path[0]), value), advice


def _path(loc: tuple[str | int, ...], raw: Callable[[KeyPath], Any]) -> KeyPath:
    """The path in the file: pydantic's path without the names of union members."""
    path: KeyPath = loc[:1]
    for number, part in enumerate(loc[1:], 1):
        is_last = number == len(loc) - 1
        value = raw(path)
        if isinstance(value, dict):
            if part in value or (is_last and isinstance(part, str)):
                path = (*path, part)
        elif isinstance(value, (list, tuple)) and isinstance(part, int) and part < len(value):
            path = (*path, part)
    return path


# --- names from the manual that pgcdc does not have: our replacement, or a note that it is not built yet

_STATE = "Remove it: progress is kept in the state directory (state_dir), not in a database"
_NO_METRICS = "Metrics are not served yet. For figures of a run: pgcdc status --json"

NAMES = {
    "channel": "LISTEN/NOTIFY is not built yet. Use the detector wal with tables, or messages for what an application sends",
    "heartbeat_interval": "Remove it: an idle database is confirmed every 10 s without writing to it",
    "slot_lag_warn": "Not built yet. See the lag with: pgcdc status, pgcdc slot list",
    "backpressure": "Remove it: the capture pauses reading at spool_limit",
    "dlq_plugin": "Plugins are not built yet. Use dlq: file, pg_table, stderr or none",
    "skip_validation": "Remove it: every start checks what it needs. To check only: pgcdc validate",
    "skip_migrations": "Remove it: pgcdc creates its own tables when they are missing, and changes nothing else",
    "schema_registry_url": "The adapter kafka and its schema registry are not built yet",
    "view_query": "Views are not built yet. Use your own query on spark.readStream.format('pgcdc')",
    "snapshot_progress_db": _STATE,
    "checkpoint_path": "Use state_dir: it holds checkpoints, spool and acks",
    "password": "Use password_file, or ${NAME} in db: this file must not contain a password",
}
"""Settings of the manual, with underscores, and other names that people try."""

_PREFIXES = {
    "bp_": "Use spool_limit: the capture pauses reading when this much is undelivered",
    "plugin_": "Plugins are not built yet. Use a python transform, the adapter exec, or pgcdc in Python",
    "checkpoint_": _STATE,
    "metrics_": _NO_METRICS,
    "otel_": _NO_METRICS,
    "outbox_": "The detector outbox is not built yet. Capture its table with tables, and delete its rows yourself",
    "mysql_": "MySQL is not built yet; use the detector wal, for PostgreSQL",
    "mongodb_": "MongoDB is not built yet; use the detector wal, for PostgreSQL",
    "kafka_": "The adapter kafka is not built yet. Use webhook, or exec with a Kafka client",
    "kafkaserver_": "The Kafka server is not built yet",
    "s3_": "The adapter s3 is not built yet. Use file with a folder and file_max_size, and copy the files",
    **{
        f"{name}_": f"The adapter {name} is not built yet. Use webhook or exec"
        for name in ("nats", "embedding", "search")
    },
    **{f"{name}_": f"Endpoints ({name}) are not built yet" for name in ("ws", "sse", "grpc")},
}
_DETECTORS = ("listen_notify", "outbox", "mysql", "mongodb")


def advise(name: str) -> str:
    """What to use instead of a setting with this name; empty if the manual has no such setting."""
    name = name.replace("-", "_")
    missing = {prefix: text for prefix, text in _PREFIXES.items() if prefix.removesuffix("_") not in ADAPTERS}
    return NAMES.get(name) or next((text for prefix, text in missing.items() if name.startswith(prefix)), "")
