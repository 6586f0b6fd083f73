"""Merges flags, `PGCDC_*` variables, `pgcdc.yaml` and defaults, in this order, and checks every value.

All checks run before anything starts. An error names the key and the place of the value: flag, variable, or file with
line.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from psycopg.conninfo import make_conninfo
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from pgcdc.config.adapters import ALIASES, ENTRIES, kind_of, parse_priorities, parse_routes, rename_key
from pgcdc.config.explain import TRANSFORMS, explain
from pgcdc.config.model import FIELDS, Config, Transforms, at
from pgcdc.config.yaml_file import YamlFile, name_key, value_at
from pgcdc.core.errors import ConfigError, ConfigErrors, PgcdcError
from pgcdc.core.secrets import hide, is_secret_name, literal_part, read_secret, redact_text
from pgcdc.core.settings import Conflict, KeyPath, Setting, conflicts_of, setting_of
from pgcdc.postgres.database import parse_url
from pgcdc.sink.http import is_secret_header, parse_headers
from pgcdc.sink.spec import hide_value

DEFAULT_FILE = "pgcdc.yaml"
PREFIX = "PGCDC_"
_BEFORE_VARIABLE = re.compile(r"^[A-Za-z-]{1,20} +(?=\S)|[\w.-]+=(?=[\"']?\$\{)")
_ALTERNATIVES = (
    ("db", "db_file"),
    ("dlq_db", "dlq_db_file"),
    ("snapshot_mode", "snapshot_first"),
    ("toast", "toast_cache"),
)
"""Pairs of settings with the same meaning: the one from the higher layer wins."""
_MERGED: dict[str, Callable[[Any], Any]] = {"routes": parse_routes, "adapter_priority": parse_priorities}
"""Settings by adapter name: a flag for one adapter keeps the file's values for the others."""


@dataclass
class Loaded:
    config: Config = field(default_factory=Config)
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    """`--slot-name`, `PGCDC_SLOT_NAME`, or `` for the file. A missing key has its default."""
    file: YamlFile | None = None
    secrets: set[str] = field(default_factory=set)

    def origin(self, key: str) -> str:
        """Where the value was set, for people."""
        said = dict.fromkeys(text for path, text in self.origins.items() if path[0] == key)
        return ", ".join(text or self.place((key,)).rpartition(":")[0] for text in said) or "default"

    def _said(self, path: KeyPath) -> str | None:
        return self.origins.get(path[:2], self.origins.get(path[:1]))

    def place(self, path: KeyPath) -> str:
        """The place and key of a value, for the start of an error message."""
        said = self._said(path)
        if said == "" and self.file is not None:
            return self.file.place(path)
        if said:
            return said if len(path) == 1 else f"{said}: {name_key(path)}"
        return name_key(path)

    def raw(self, path: KeyPath) -> Any:
        """The value exactly as written."""
        return value_at(self.file.raw if self._said(path) == "" and self.file is not None else self.values, path)

    def check(self) -> None:
        """Raise ConfigError, with its place, if settings contradict each other."""
        found = []
        for error in self.config.conflicts():
            where = f"{self.place(error.path)}: " if error.path[:1] in self.origins else ""
            if where and error.message.startswith(where.replace(": ", " ", 1)):  # it already starts with the flag
                where = ""
            found.append(self.safe(ConfigError(where + error.message, error.advice)))
        if found:
            raise ConfigErrors.of(found)

    def safe(self, error: PgcdcError) -> ConfigError:
        made = ConfigError(hide(error.message, self.secrets), hide(error.advice, self.secrets))
        made.excerpt = hide(self.file.excerpt(error.message), self.secrets) if self.file is not None else ""
        return made


def load_config(flags: Mapping[str, Any], environ: Mapping[str, str], path: Path | None) -> Config:
    """Merge the layers and check every value. `flags` holds only the flags that were given; `path` None means
    pgcdc.yaml, if it exists."""
    loaded = load(flags, environ, path)
    loaded.check()
    return loaded.config


def read_state_dir(path: Path | None) -> Path | None:
    """That of the file, for commands that need nothing else: variables of other keys may be missing, and values wrong."""
    found = YamlFile(path or Path(DEFAULT_FILE), os.environ, rename_key, may_show, only="state_dir").values.get(
        "state_dir"
    )
    return Path(str(found)) if found else None


def load(flags: Mapping[str, Any], environ: Mapping[str, str], path: Path | None) -> Loaded:
    """The merged configuration with the origin of each value. Does not check for contradictions yet."""
    loaded = Loaded()
    file = path or (Path(DEFAULT_FILE) if Path(DEFAULT_FILE).exists() else None)
    if file is not None:
        loaded.file = YamlFile(file, environ, rename_key, may_show)
        loaded.secrets |= loaded.file.secrets
        _add(loaded, loaded.file.values, dict.fromkeys(loaded.file.values, ""))
    variables, names, wrong = _read_variables(environ)
    _add(loaded, variables, names)
    names = {key: f"--{said.flag}" for key, _, said in FIELDS if said.flag}
    _add(loaded, flags, {key: names.get(key, f"--{key.replace('_', '-')}") for key in flags})
    loaded.secrets |= find_secrets(loaded.values)
    conflicts = list(take_urls(loaded))
    if loaded.file is not None:
        conflicts += conflicts_of((), partial(check_literals, loaded.file.raw))
    wrong += [ConfigError(f"{loaded.place(one.path)}: {one.message}", one.advice) for one in conflicts]
    about = {path for one in conflicts if one.path for path in (one.path, (str(one.path[0]).removesuffix("_file"),))}
    try:
        loaded.config = Config.model_validate(loaded.values)
    except ValidationError as error:
        wrong += explain(error, loaded.place, loaded.raw, about)
    if wrong:
        raise ConfigErrors.of([loaded.safe(one) for one in wrong])
    return loaded


def _read_variables(environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str], list[PgcdcError]]:
    """Our variables by key: values and names. Other variables may also start with PGCDC_ (a cluster makes some), but
    one that nearly matches ours is refused as a typo."""
    known = {PREFIX + key.upper(): key for key, _, said in FIELDS if said.flag}
    known |= {PREFIX + alias.upper(): key for alias, key in ALIASES.items()}
    ours: dict[str, str] = {}
    wrong: list[PgcdcError] = []
    for name in [name for name, value in environ.items() if name.startswith(PREFIX) and value]:
        if name in known and (other := ours.setdefault(known[name], name)) != name:
            wrong.append(ConfigError(f"{name} is another name of {other}, which is also set", "Remove one of them"))
        elif name not in known and name.removeprefix(PREFIX).lower() in Config.model_fields:
            wrong.append(ConfigError(f"{name} can be set only in the YAML file", "Remove the variable"))
        elif name not in known and (close := difflib.get_close_matches(name, known, n=1, cutoff=0.92)):
            wrong.append(ConfigError(f"{name} is not a setting of pgcdc", f"Did you mean {close[0]}?"))
    return {key: environ[name] for key, name in ours.items()}, ours, wrong


def _add(loaded: Loaded, values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    for group in _ALTERNATIVES:
        if any(key in values for key in group):
            for key in group:
                loaded.values.pop(key, None)
                loaded.origins.pop((key,), None)
    for key, value in values.items():
        merged = _merge(loaded, key, value, origins[key]) if key in _MERGED else None
        if merged is None:
            for path in [path for path in loaded.origins if path[0] == key]:
                del loaded.origins[path]
            loaded.origins[key,] = origins[key]
        loaded.values[key] = value if merged is None else merged


def _merge(loaded: Loaded, key: str, value: Any, origin: str) -> dict[str, Any] | None:
    """Both layers merged by name; None if one is invalid, which is reported later."""
    try:
        below, above = (_MERGED[key](one) for one in (loaded.values.get(key), value))
    except PydanticCustomError:
        return None
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return None
    for name in above:
        loaded.origins[key, name] = origin
    return {**below, **above}


# --- secrets. `setting(..., secret=True)` holds a secret, or may (a URL), and is never shown. With `literal=False` the
# file must use `${NAME}` instead of plain text


def _secret(model: type[BaseModel], name: object) -> Setting | None:
    """The setting with that name if it holds a secret, else None."""
    known = model.model_fields.get(name) if isinstance(name, str) else None
    found = setting_of(str(name), known) if known is not None else None
    return found if found is not None and found.secret else None


def may_show(key: str) -> bool:
    """Whether no setting with this name holds a secret, and there is one; or it is an adapter's name."""
    name = rename_key((), key)
    every: tuple[type[BaseModel], ...] = (Config, Transforms, *ENTRIES.values(), *TRANSFORMS.values())
    models = [one for one in every if name in one.model_fields]
    is_known = bool(models) or name in ("global", *ENTRIES)
    return is_known and not is_secret_name(name) and not any(_secret(model, name) for model in models)


def _given(values: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Setting, Any]]:
    """Every secret that was set: its path, setting and value."""
    owners: list[tuple[KeyPath, type[BaseModel], Mapping[Any, Any]]] = [((), Config, values)]
    items = values.get("adapters")
    for number, item in enumerate(items if isinstance(items, (list, tuple)) else ()):
        if isinstance(item, Mapping) and (kind := kind_of(item)) in ENTRIES:
            owners.append((("adapters", number), ENTRIES[str(kind)], item))
    for path, model, given in owners:
        for name, value in given.items():
            if said := _secret(model, name):
                yield (*path, name), said, value


def find_secrets(values: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    for _, said, value in _given(values):
        if isinstance(value, Mapping):
            found.update(one for key, one in value.items() if isinstance(one, str) and is_secret_header(str(key)))
        elif isinstance(value, str) and (not said.literal or "://" not in value or hide_value(value) != value):
            found.add(value)
    return found


def check_literals(raw: Mapping[str, Any]) -> None:
    """Raise Conflict if the file contains a secret in plain text. `raw` is the file's content before `${NAME}` is
    replaced."""
    for path, said, given in _given(raw):
        if said.literal:
            continue
        value = given
        if isinstance(given, str) and str(path[-1]).endswith("headers"):
            with contextlib.suppress(ValueError):  # reported later
                value = parse_headers(given)
        is_header = isinstance(value, Mapping)
        texts = [text for name, text in value.items() if is_secret_header(str(name))] if is_header else [value]
        if any(isinstance(text, str) and _has_literal(text, is_header=is_header) for text in texts):
            advice = f"Write ${{NAME}} instead and set that variable, or use {path[-1]}_file"
            raise Conflict(path, "this file contains a secret", advice)


def _has_literal(text: str, *, is_header: bool) -> bool:
    """Whether part of the secret is plain text. A header may name its scheme: `Bearer ${TOKEN}`, `id=${ID};
    key=${KEY}`."""
    if is_header and "${" in text:
        text = _BEFORE_VARIABLE.sub("", text)
    return bool(literal_part(text).strip(" ;,\"'"))


def hide_secrets(name: str, value: Any) -> Any:
    """The value of a setting as JSON, without its secrets."""
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
    """Read the database URLs, also from files. Their passwords are hidden, and must not appear in a shared file."""
    given = [path for path, said, _ in _given(loaded.values) if said.cascade == "db"]
    for path in (("db",), ("dlq_db",), *given):
        yield from conflicts_of(path, partial(_take_url, loaded, path))


def _take_url(loaded: Loaded, path: KeyPath) -> None:
    values, key = loaded.values, str(path[0])
    file = values.get(f"{key}_file") if key in ("db", "dlq_db") else None
    where = (f"{key}_file",) if file else path
    if file and values.get(key):
        raise Conflict(where, f"{key} and {key}_file cannot be combined", "Remove one of them")
    if isinstance(file, (str, Path)) and file:
        if "://" in str(file):  # a URL here by mistake must not be shown as a missing file
            advice = "Name the file that contains the URL; the URL itself goes into `db`"
            raise Conflict(where, "this is a URL, not the path of a file", advice)
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
            message = "the URL has a password, and password_file is set"
            raise Conflict(("password_file",), message, "Remove one of them")
        password = at(("password_file",), partial(read_secret, Path(given), "the password"))
        loaded.secrets.add(password)
        values["db"] = make_conninfo("", **{**params, "password": password})


def _check_no_literal(loaded: Loaded, path: KeyPath) -> None:
    """A password may come from the environment or its own file, but not from a shared file."""
    raw = loaded.raw(path) if loaded.file is not None and loaded.origins.get(path[:1]) == "" else None
    try:
        params = parse_url(literal_part(raw)) if isinstance(raw, str) else {}
    except PgcdcError:
        return  # it consists of variables
    if any("password" in key and value for key, value in params.items()):
        other = "password_file, or put the whole URL into PGCDC_DB" if path == ("db",) else f"{path[-1]}_file"
        advice = f"Write ${{NAME}} instead and set that variable, or use {other}"
        raise Conflict(path, "this file contains the password", advice)
