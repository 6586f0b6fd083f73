"""Flags, then `PGCDC_*` variables, then `pgcdc.yaml`, then defaults: merged, checked, and who said what.

Everything is checked here, before anything starts; an error names the place (flag, variable, or file with line) and the key.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from psycopg.conninfo import make_conninfo
from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from pgcdc.config.adapters import ALIASES, ENTRY_ALIASES
from pgcdc.config.explain import explain
from pgcdc.config.fields import parse_priorities, parse_routes
from pgcdc.config.model import Config
from pgcdc.config.option_secrets import check_literals, option_secrets
from pgcdc.config.yaml_file import YamlFile, name_key, read_yaml, value_at
from pgcdc.core.errors import ConfigError, ConfigErrors, PgcdcError
from pgcdc.core.secrets import hide, literal_part, read_secret
from pgcdc.core.settings import Conflict, KeyPath, conflicts_of, setting_of
from pgcdc.postgres.database import parse_url
from pgcdc.sink.registry import ADAPTERS

DEFAULT_FILE = "pgcdc.yaml"
PREFIX = "PGCDC_"
_ALTERNATIVES = (
    ("db", "db_file"),
    ("dlq_db", "dlq_db_file"),
    ("snapshot_mode", "snapshot_first"),
    ("toast", "toast_cache"),
)
"""Two ways to say one thing: the one of the higher layer holds."""
_MERGED: dict[str, Callable[[Any], Any]] = {"routes": parse_routes, "adapter_priority": parse_priorities}
"""What is said by the names of adapters: a flag for one of them leaves the others as the file has them."""


@dataclass
class Loaded:
    """The configuration, and where each value comes from."""

    config: Config = field(default_factory=Config)
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    """`--slot-name`, `PGCDC_SLOT_NAME`, or `` for the file; a key that is not here has its default."""
    file: YamlFile | None = None
    secrets: set[str] = field(default_factory=set)

    def origin(self, key: str) -> str:
        """Who said it, for people."""
        if (key,) not in self.origins:
            return "default"
        said = [self.origins[key,], *(text for path, text in self.origins.items() if path[0] == key and len(path) > 1)]
        places = [text or self._line((key,)) for text in dict.fromkeys(said)]
        return ", ".join(places)

    def _said(self, path: KeyPath) -> str | None:
        return self.origins.get(path[:2], self.origins.get(path[:1]))

    def place(self, path: KeyPath) -> str:
        """Where a value stands, and its key: the beginning of an error."""
        said = self._said(path)
        if said == "" and self.file is not None:
            return self.file.place(path)
        if said:
            return said if len(path) == 1 else f"{said}: {name_key(path)}"
        return name_key(path)

    def raw(self, path: KeyPath) -> Any:
        """The value as it was written."""
        return value_at(self.file.raw if self._said(path) == "" and self.file is not None else self.values, path)

    def check(self) -> None:
        """Raise ConfigError, with its place, for what cannot go together."""
        found = []
        for error in self.config.conflicts():
            where = f"{self.place(error.path)}: " if error.path[:1] in self.origins else ""
            if where and error.message.startswith(where.replace(": ", " ", 1)):  # a flag, which it begins with
                where = ""
            found.append(self.safe(ConfigError(where + error.message, error.advice)))
        if found:
            raise ConfigErrors.of(found)

    def safe(self, error: PgcdcError) -> ConfigError:
        """The same without any secret in it."""
        return ConfigError(hide(error.message, self.secrets), hide(error.advice, self.secrets))

    def _line(self, path: KeyPath) -> str:
        return self.file.place(path).rpartition(":")[0] if self.file is not None else ""


def load_config(flags: Mapping[str, Any], environ: Mapping[str, str], path: Path | None) -> Config:
    """Merge the layers and check every value. `flags` holds only what was given; `path` None means pgcdc.yaml, if there."""
    loaded = load(flags, environ, path)
    loaded.check()
    return loaded.config


def load(flags: Mapping[str, Any], environ: Mapping[str, str], path: Path | None) -> Loaded:
    """The same, with the origin of each value, and before it is checked what goes together."""
    loaded = Loaded()
    file = path or (Path(DEFAULT_FILE) if Path(DEFAULT_FILE).exists() else None)
    if file is not None:
        loaded.file = read_yaml(file, environ)
        loaded.secrets |= loaded.file.secrets
        _add(loaded, loaded.file.values, dict.fromkeys(loaded.file.values, ""))
    variables, wrong = _read_variables(environ)
    _add(loaded, variables, {key: PREFIX + key.upper() for key in variables})
    _add(loaded, flags, {key: f"--{_flag(key)}" for key in flags})
    loaded.secrets |= option_secrets(loaded.values)
    conflicts = [*conflicts_of((), partial(_rename, loaded)), *_take_urls(loaded)]
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


def _rename(loaded: Loaded) -> None:
    """Other names of settings, those of the manual, become ours."""
    for alias, key in ALIASES.items():
        if alias in loaded.values:
            _move(loaded, loaded.values, (alias,), key)
    items = loaded.values.get("adapters")
    for number, item in enumerate(items if isinstance(items, list) else ()):
        for alias, name in ENTRY_ALIASES.items():
            if isinstance(item, dict) and alias in item:
                _move(loaded, item, ("adapters", number, alias), name)


def _move(loaded: Loaded, values: dict[str, Any], path: KeyPath, name: str) -> None:
    if name in values:
        raise Conflict(path, f"this is another name of {name}, which is given, too", "Leave one of them out")
    values[name] = values.pop(str(path[-1]))
    new = (*path[:-1], name)
    if path in loaded.origins:
        loaded.origins[new] = loaded.origins.pop(path)
    if loaded.file is not None and path in loaded.file.lines:
        loaded.file.lines[new] = loaded.file.lines[path]
        raw = value_at(loaded.file.raw, path[:-1])
        raw[name] = raw.pop(path[-1])


def _flag(key: str) -> str:
    info = Config.model_fields.get(key)
    return (setting_of(key, info).flag if info is not None else None) or key.replace("_", "-")


def _read_variables(environ: Mapping[str, str]) -> tuple[dict[str, str], list[PgcdcError]]:
    """Our variables. Others may begin with PGCDC_ too (a cluster makes some), but one that is nearly ours is a slip."""
    known = {PREFIX + key.upper(): key for key, info in Config.model_fields.items() if setting_of(key, info).flag}
    known |= {PREFIX + alias.upper(): alias for alias in ALIASES}
    found, wrong = {}, list[PgcdcError]()
    for name, value in environ.items():
        if not name.startswith(PREFIX) or not value:
            continue
        if name in known:
            found[known[name]] = value
        elif name.removeprefix(PREFIX).lower() in Config.model_fields:
            wrong.append(ConfigError(f"{name}: this stands in the YAML file only", "Remove the variable"))
        else:
            keys = [one.removeprefix(PREFIX) for one in known]
            close = difflib.get_close_matches(name.removeprefix(PREFIX), keys, n=1, cutoff=0.87)
            if close:
                wrong.append(ConfigError(f"{name}: this variable is not known", f"Did you mean {PREFIX}{close[0]}?"))
    return found, wrong


def _add(loaded: Loaded, values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Put a layer over those that are there."""
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
    """What is there already with this on top, name by name; None if one of them is wrong (which is found later)."""
    try:
        below, above = (_MERGED[key](one) for one in (loaded.values.get(key), value))
    except PydanticCustomError:
        return None
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return None
    for name in above:
        loaded.origins[key, name] = origin
    return {**below, **above}


# --- database URLs


def _take_urls(loaded: Loaded) -> Iterator[Conflict]:
    """The URLs of databases, from where they are said to be: their passwords are hidden, and stand in no shared file."""
    for path in (("db",), ("dlq_db",), *_target_urls(loaded)):
        yield from conflicts_of(path, partial(_take_url, loaded, path))


def _target_urls(loaded: Loaded) -> Iterator[KeyPath]:
    """Where database URLs of adapters may stand."""
    fields = {
        kind: [name for name, info in options.model_fields.items() if setting_of(name, info).cascade == "db"]
        for kind, options in ADAPTERS.usable().items()
    }
    yield from ((f"{kind}_{name}",) for kind, names in fields.items() for name in names)
    items = loaded.values.get("adapters")
    for number, item in enumerate(items if isinstance(items, (list, tuple)) else ()):
        kind = str(item.get("type", item.get("name"))) if isinstance(item, Mapping) else ""
        yield from (("adapters", number, name) for name in fields.get(kind, []))


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
        values[key] = _read(where, file, "the database URL").strip()
        loaded.secrets.add(values[key])
        loaded.origins[key,] = f"{key}_file"
    url = value_at(values, path)
    if not isinstance(url, str) or not url:
        return
    try:
        params = parse_url(url)
    except PgcdcError as error:
        raise Conflict(where, error.message, error.advice) from None
    loaded.secrets.update(str(value) for name, value in params.items() if "password" in name and value)
    _check_no_literal(loaded, path)
    given = values.get("password_file") if key == "db" else None
    if isinstance(given, (str, Path)) and given:
        if params.get("password"):
            message = "the URL has a password, and password_file is given"
            raise Conflict(("password_file",), message, "Leave one of them out")
        password = _read(("password_file",), given, "the password")
        loaded.secrets.add(password)
        values["db"] = make_conninfo("", **{**params, "password": password})


def _read(path: KeyPath, file: str | Path, what: str) -> str:
    try:
        return read_secret(Path(file), what)
    except ConfigError as error:
        raise Conflict(path, error.message, error.advice) from None


def _check_no_literal(loaded: Loaded, path: KeyPath) -> None:
    """A password may come from the environment or a file of its own, but not stand in a file that people share."""
    raw = loaded.raw(path) if loaded.file is not None and loaded.origins.get(path[:1]) == "" else None
    try:
        params = parse_url(literal_part(raw)) if isinstance(raw, str) else {}
    except PgcdcError:
        return  # it is made of variables
    if any("password" in key and value for key, value in params.items()):
        other = "password_file, or put the whole URL into PGCDC_DB" if path == ("db",) else f"{path[-1]}_file"
        raise Conflict(
            path, "the password stands in this file", f"Write ${{NAME}} for it and set that variable, or use {other}"
        )
