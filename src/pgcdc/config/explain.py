"""What pydantic says of a wrong value, as one line: place, key, reason, value, and what to do instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from pgcdc.config.adapters import ENTRIES
from pgcdc.config.model import Config, Transforms, suggest
from pgcdc.core.errors import ConfigError
from pgcdc.core.secrets import describe_value
from pgcdc.core.settings import REFUSED, UNKNOWN, KeyPath
from pgcdc.sink.registry import ADAPTERS
from pgcdc.transform.specs import TransformSpec

_TRANSFORMS: dict[str, type[BaseModel]] = {
    model.model_fields["type"].default: model for model in get_args(get_args(TransformSpec)[0])
}


def explain(
    error: ValidationError,
    place: Callable[[KeyPath], str],
    raw: Callable[[KeyPath], Any],
    known: Collection[KeyPath] = (),
) -> Iterator[ConfigError]:
    """All that is wrong, once for each place: what is misspelt first, since it is why another key is missing.

    `known` are places of which something is said already.
    """
    found = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    misspelt = {_path(one["loc"], raw)[:-1] for one in found if one["type"] == "extra_forbidden"}
    seen: set[KeyPath] = set(known)
    for one in found:
        path = _path(one["loc"], raw)
        is_said = any(path[: len(other)] == other or other[: len(path)] == path for other in seen)
        if not is_said and not (one["type"] == "missing" and path[:-1] in misspelt):
            yield _explain(one, path, place, raw)
        seen.add(path)


def _explain(first: Any, path: KeyPath, place: Callable[[KeyPath], str], raw: Callable[[KeyPath], Any]) -> ConfigError:
    kind, context, loc = first["type"], first.get("ctx", {}), first["loc"]
    if kind == "extra_forbidden":
        return _unknown_key(loc, path, place)
    if kind == "missing":
        return ConfigError(f"{place(path[:-1])}: {path[-1]} is missing", f"Add {path[-1]}: ...")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _unknown_type(path, context, place, raw)
    value = raw(path)
    shown = describe_value(str(path[0]), value)
    where = place(path)
    if kind == REFUSED and path == ("detector",) and str(value).replace("-", "_") in _DETECTORS:
        return ConfigError(f"{where}: {context['message']}", f"This detector is not built yet. {context['advice']}")
    if kind == REFUSED:
        return ConfigError(f"{where}: {context['message']}", context["advice"] or _help(path))
    if kind == UNKNOWN:
        return ConfigError(
            f"{where}: {context['name']} is not known", suggest(_inner(context["name"]), context["known"])
        )
    reason = str(first["msg"]).removeprefix("Value error, ")
    if kind == "value_error" and "; " in reason:  # what is wrong; what to do
        reason, _, advice = reason.partition("; ")
        return ConfigError(f"{where}: {reason}", advice[:1].upper() + advice[1:])
    if kind == "literal_error":
        known = re.findall(r"'([^']*)'", str(context.get("expected", "")))
        advice = suggest(str(value), known, _help(path)) if isinstance(value, str) else _help(path)
        return ConfigError(f"{where}: {reason}{shown}", advice)
    return ConfigError(f"{where}: {reason}{shown}", _help(path))


def _inner(quoted: str) -> str:
    return quoted.strip("'\"")


def _path(loc: tuple[str | int, ...], raw: Callable[[KeyPath], Any]) -> KeyPath:
    """The way in the file: pydantic's without what it says of unions, which have a place for each of their parts."""
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


def _help(path: KeyPath) -> str:
    field = Config.model_fields.get(str(path[0]))
    text = field.description if field is not None else ""
    return f"{path[0]}: {text}" if text else "See docs/configuration.md"


def _unknown_key(loc: tuple[str | int, ...], path: KeyPath, place: Callable[[KeyPath], str]) -> ConfigError:
    name = str(loc[-1])
    if len(loc) == 1:
        known = list(Config.model_fields)
        advice = advise(name) or suggest(
            name, known, "The keys stand in docs/configuration.md, or: pgcdc config schema"
        )
        return ConfigError(f"{place(path)}: this key is not known", advice)
    model: type[BaseModel] = {**_TRANSFORMS, **ENTRIES}.get(str(loc[-2]), Transforms)
    known = [field.alias or key for key, field in model.model_fields.items()]
    return ConfigError(f"{place(path)}: this key is not known", suggest(name, known))


def _unknown_type(
    path: KeyPath, context: dict[str, Any], place: Callable[[KeyPath], str], raw: Callable[[KeyPath], Any]
) -> ConfigError:
    """A mapping in a list whose `type` is missing or unknown."""
    known = list(ENTRIES if path[0] == "adapters" and len(path) <= 2 else _TRANSFORMS)
    value = raw(path)
    given = value.get("type") if isinstance(value, dict) else None
    if given is None:
        return ConfigError(f"{place(path)}: type is missing", f"Give one of: {', '.join(known)}")
    where = place((*path, "type"))
    return ConfigError(f"{where}: {str(given)!r:.60} is not known", suggest(str(given), known))


# --- names that the manual has and we do not: what is here instead, or that it is not built yet

_STATE = "Leave it out: progress stands in the state directory (state_dir), not in a database"
_PAUSE = "Use spool_limit: the capture stops reading when this much is undelivered"
_NO_PLUGINS = (
    "Plugins are not built yet. For code of your own, use a python transform, the adapter exec, or pgcdc in Python"
)
_NO_METRICS = "Metrics are not served yet. Numbers of a run: pgcdc status --json"

NAMES = {
    "channel": "LISTEN/NOTIFY is not built yet. Use the detector wal with tables, or messages for what an application sends",
    "heartbeat_interval": "Leave it out: an idle database is confirmed every 10 s without writing to it",
    "slot_lag_warn": "Not built yet. See the lag with: pgcdc status, pgcdc slot list",
    "backpressure": "Leave it out: the capture stops reading when spool_limit is undelivered",
    "bp_warn_threshold": _PAUSE,
    "bp_critical_threshold": _PAUSE,
    "bp_max_throttle": _PAUSE,
    "bp_poll_interval": _PAUSE,
    "plugin_transform": _NO_PLUGINS,
    "plugin_adapter": _NO_PLUGINS,
    "dlq_plugin": "Plugins are not built yet. Use dlq: file, pg_table, stderr or none",
    "checkpoint_plugin": _STATE,
    "skip_validation": "Leave it out: a start checks everything that it needs. To check only: pgcdc validate",
    "skip_migrations": "Leave it out: tables of ours are created when they are missing, and nothing else is changed",
    "schema_registry_url": "The adapter kafka and its schema registry are not built yet",
    "view_query": "Views are not built yet. Use a query of your own on spark.readStream.format('pgcdc')",
    "checkpoint_db": _STATE,
    "snapshot_progress_db": _STATE,
    "checkpoint_path": "Use state_dir: it has checkpoints, spool and acks",
    "metrics_addr": _NO_METRICS,
    "password": "Use password_file, or ${NAME} inside of db: a password does not stand in this file",
}
"""Settings of the manual, with underscores, and of others that people try."""

_PREFIXES = {
    "outbox_": "The detector outbox is not built yet. Capture its table with tables, and delete rows yourself",
    "mysql_": "MySQL is not built yet; there is the detector wal, for PostgreSQL",
    "mongodb_": "MongoDB is not built yet; there is the detector wal, for PostgreSQL",
    "kafka_": "The adapter kafka is not built yet. Use webhook, or exec with a Kafka client",
    "kafkaserver_": "The Kafka server is not built yet",
    "nats_": "The adapter nats is not built yet. Use webhook or exec",
    "s3_": "The adapter s3 is not built yet. Use file with a folder and file_max_size, and copy the files",
    "embedding_": "The adapter embedding is not built yet. Use webhook or exec",
    "search_": "The adapter search is not built yet. Use webhook or exec",
    "ws_": "WebSocket endpoints are not built yet",
    "sse_": "SSE endpoints are not built yet",
    "grpc_": "gRPC endpoints are not built yet",
    "otel_": _NO_METRICS,
}
_DETECTORS = ("listen_notify", "outbox", "mysql", "mongodb")


def advise(name: str) -> str:
    """What to do instead of a setting with this name; empty: the manual does not have it."""
    name = name.replace("-", "_")
    missing = {prefix: text for prefix, text in _PREFIXES.items() if prefix.removesuffix("_") not in ADAPTERS}
    return NAMES.get(name) or next((text for prefix, text in missing.items() if name.startswith(prefix)), "")
