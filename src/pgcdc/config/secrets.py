"""Secrets among the settings: database URLs, and options of adapters. They stand in no shared file, and are never shown.

A field that is `setting(..., secret=True)` holds one, or may (a URL); with `literal=False` the file may not have it in plain
text, only `${NAME}`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psycopg.conninfo import make_conninfo
from pydantic import BaseModel

from pgcdc.config.adapters import ENTRIES, kind_of
from pgcdc.config.model import Config, at
from pgcdc.config.yaml_file import value_at
from pgcdc.core.errors import PgcdcError
from pgcdc.core.secrets import literal_part, read_secret, redact_text
from pgcdc.core.settings import Conflict, KeyPath, Setting, conflicts_of, setting_of
from pgcdc.postgres.database import parse_url
from pgcdc.sink.http import is_secret_header, parse_headers
from pgcdc.sink.spec import hide_value

if TYPE_CHECKING:
    from pgcdc.config.layers import Loaded

_BEFORE_VARIABLE = re.compile(r"^[A-Za-z-]{1,20} +(?=\S)|[\w.-]+=(?=[\"']?\$\{)")


def _secret(model: type[BaseModel], field: object) -> Setting | None:
    """The setting of a field, if it holds a secret."""
    known = model.model_fields.get(field) if isinstance(field, str) else None
    found = setting_of(str(field), known) if known is not None else None
    return found if found is not None and found.secret else None


def _given(values: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Setting, Any]]:
    """Every secret that is given: where it stands, its setting, and its value."""
    owners: list[tuple[KeyPath, type[BaseModel], Mapping[Any, Any]]] = [((), Config, values)]
    items = values.get("adapters")
    for number, item in enumerate(items if isinstance(items, (list, tuple)) else ()):
        if isinstance(item, Mapping) and (kind := kind_of(item)) in ENTRIES:
            owners.append((("adapters", number), ENTRIES[str(kind)], item))
    for path, model, given in owners:
        for field, value in given.items():
            if said := _secret(model, field):
                yield (*path, field), said, value


def find_secrets(values: Mapping[str, Any]) -> set[str]:
    """Texts that must not appear in a message."""
    found: set[str] = set()
    for _, said, value in _given(values):
        if isinstance(value, Mapping):
            found.update(one for key, one in value.items() if isinstance(one, str) and is_secret_header(str(key)))
        elif isinstance(value, str) and (not said.literal or "://" not in value or hide_value(value) != value):
            found.add(value)
    return found


def check_literals(raw: Mapping[str, Any]) -> None:
    """Raise Conflict for a secret that stands in the file itself. `raw` is the file's content, with its `${NAME}`."""
    for path, said, given in _given(raw):
        if said.literal:
            continue
        value = given
        if isinstance(given, str) and str(path[-1]).endswith("headers"):
            with contextlib.suppress(ValueError):  # which is told later
                value = parse_headers(given)
        is_header = isinstance(value, Mapping)
        texts = [text for name, text in value.items() if is_secret_header(str(name))] if is_header else [value]
        if any(isinstance(text, str) and _has_literal(text, is_header=is_header) for text in texts):
            advice = f"Write ${{NAME}} for it and set that variable, or use {path[-1]}_file"
            raise Conflict(path, "a secret stands in this file", advice)


def _has_literal(text: str, *, is_header: bool) -> bool:
    """Whether a part of the secret is plain text.

    A header may name its scheme: `Bearer ${TOKEN}`, `id=${ID}; key=${KEY}`.
    """
    if is_header and "${" in text:
        text = _BEFORE_VARIABLE.sub("", text)
    return bool(literal_part(text).strip(" ;,\"'"))


def hide_secrets(name: str, value: Any) -> Any:
    """The value of a setting without its secrets, as JSON has it."""
    if name == "adapters" and isinstance(value, list):
        return [_hide(ENTRIES[str(kind_of(item))], item) if isinstance(item, dict) else item for item in value]
    return _hide(Config, {name: value})[name]


def _hide(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: hide_value(one) if _secret(model, key) else _redact(one) for key, one in values.items()}


def _redact(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _redact(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_redact(one) for one in value]
    return redact_text(value) if isinstance(value, str) else value


# --- database URLs


def take_urls(loaded: Loaded) -> Iterator[Conflict]:
    """Read the URLs of databases, from files too. Their passwords are hidden, and may not stand in a shared file."""
    given = [path for path, said, _ in _given(loaded.values) if said.cascade == "db"]
    for path in (("db",), ("dlq_db",), *given):
        yield from conflicts_of(path, partial(_take_url, loaded, path))


def _take_url(loaded: Loaded, path: KeyPath) -> None:
    values, key = loaded.values, str(path[0])
    file = values.get(f"{key}_file") if key in ("db", "dlq_db") else None
    where = (f"{key}_file",) if file else path
    if file and values.get(key):
        raise Conflict(where, f"{key} and {key}_file are given", "Leave one of them out")
    if isinstance(file, (str, Path)) and file:
        if "://" in str(file):  # it must not be shown as the name of a missing file
            advice = "Give the file that holds the URL; the URL itself is `db`"
            raise Conflict(where, "this is not the path of a file", advice)
        values[key] = at(where, partial(read_secret, Path(file), "the database URL")).strip()
        loaded.secrets.add(values[key])
        loaded.origins[key,] = f"{key}_file"
    url = value_at(values, path)
    if not isinstance(url, str) or not url:
        return
    params = at(where, partial(parse_url, url))
    loaded.secrets.update(str(value) for name, value in params.items() if "password" in name and value)
    _check_no_literal(loaded, path)
    given = values.get("password_file") if key == "db" else None
    if isinstance(given, (str, Path)) and given:
        if params.get("password"):
            message = "the URL has a password, and password_file is given"
            raise Conflict(("password_file",), message, "Leave one of them out")
        password = at(("password_file",), partial(read_secret, Path(given), "the password"))
        loaded.secrets.add(password)
        values["db"] = make_conninfo("", **{**params, "password": password})


def _check_no_literal(loaded: Loaded, path: KeyPath) -> None:
    """A password may come from the environment or a file of its own, but not stand in a file that people share."""
    raw = loaded.raw(path) if loaded.file is not None and loaded.origins.get(path[:1]) == "" else None
    try:
        params = parse_url(literal_part(raw)) if isinstance(raw, str) else {}
    except PgcdcError:
        return  # it is made of variables
    if any("password" in key and value for key, value in params.items()):
        other = "password_file, or put the whole URL into PGCDC_DB" if path == ("db",) else f"{path[-1]}_file"
        advice = f"Write ${{NAME}} for it and set that variable, or use {other}"
        raise Conflict(path, "the password stands in this file", advice)
