"""Flags, then `PGCDC_*` variables, then `pgcdc.yaml`, then defaults: merged and checked, with the origin of each value.

Everything is checked here, before anything starts; an error names the place (flag, variable, or file with line) and the key.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from pgcdc.config.adapters import ALIASES, FLAT_KEYS, parse_priorities, parse_routes, rename_key
from pgcdc.config.explain import explain
from pgcdc.config.model import FIELDS, Config
from pgcdc.config.secrets import check_literals, find_secrets, take_urls
from pgcdc.config.yaml_file import YamlFile, name_key, value_at
from pgcdc.core.errors import ConfigError, ConfigErrors, PgcdcError
from pgcdc.core.secrets import hide
from pgcdc.core.settings import KeyPath, conflicts_of, make_options
from pgcdc.run.letter_service import Destination
from pgcdc.sink.spec import ADAPTERS, AdapterSpec, DeliveryOptions, check_options, keep_secrets

DEFAULT_FILE = "pgcdc.yaml"
PREFIX = "PGCDC_"
_ALTERNATIVES = (
    ("db", "db_file"),
    ("dlq_db", "dlq_db_file"),
    ("snapshot_mode", "snapshot_first"),
    ("toast", "toast_cache"),
)
"""Two settings with one meaning: the one of the higher layer wins."""
_MERGED: dict[str, Callable[[Any], Any]] = {"routes": parse_routes, "adapter_priority": parse_priorities}
"""Settings by the name of an adapter: a flag for one adapter leaves the others as the file has them."""


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
        """Where it was set, for people."""
        said = dict.fromkeys(text for path, text in self.origins.items() if path[0] == key)
        return ", ".join(text or self.place((key,)).rpartition(":")[0] for text in said) or "default"

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
        """Raise ConfigError, with its place, for settings that contradict each other."""
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


def load_config(flags: Mapping[str, Any], environ: Mapping[str, str], path: Path | None) -> Config:
    """Merge the layers and check every value. `flags` holds only what was given; `path` None means pgcdc.yaml, if there."""
    loaded = load(flags, environ, path)
    loaded.check()
    return loaded.config


def load(flags: Mapping[str, Any], environ: Mapping[str, str], path: Path | None) -> Loaded:
    """The same with the origin of each value; contradictions are not checked yet."""
    loaded = Loaded()
    file = path or (Path(DEFAULT_FILE) if Path(DEFAULT_FILE).exists() else None)
    if file is not None:
        loaded.file = YamlFile(file, environ, rename_key)
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
    """Our variables by key: values and names. Others may begin with PGCDC_ too (a cluster makes some).

    One that is nearly ours is a slip, and refused.
    """
    known = {PREFIX + key.upper(): key for key, _, said in FIELDS if said.flag}
    known |= {PREFIX + alias.upper(): key for alias, key in ALIASES.items()}
    given = [name for name, value in environ.items() if name.startswith(PREFIX) and value]
    wrong: list[PgcdcError] = []
    for name in given:
        if name in known:
            continue
        if name.removeprefix(PREFIX).lower() in Config.model_fields:
            wrong.append(ConfigError(f"{name}: this stands in the YAML file only", "Remove the variable"))
        elif close := difflib.get_close_matches(name, known, n=1, cutoff=0.92):
            wrong.append(ConfigError(f"{name}: this variable is not known", f"Did you mean {close[0]}?"))
    ours = {known[name]: name for name in given if name in known}
    return {key: environ[name] for key, name in ours.items()}, ours, wrong


def _add(loaded: Loaded, values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Put a layer on top of the others."""
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
    """Both layers, name by name; None if one of them is wrong, which is reported later."""
    try:
        below, above = (_MERGED[key](one) for one in (loaded.values.get(key), value))
    except PydanticCustomError:
        return None
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return None
    for name in above:
        loaded.origins[key, name] = origin
    return {**below, **above}


# --- where replayed dead letters go


def own_options(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that say where an adapter delivers to."""
    own = [key for key, (_, name) in FLAT_KEYS.items() if name not in DeliveryOptions.model_fields]
    return {key: flags[key] for key in own if key in flags}


def plan_destinations(flags: Mapping[str, Any], file: Path | None, adapters: list[str]) -> dict[str, Destination]:
    """Where the letters of each adapter go. A flag names another target than the one in the configuration."""
    others = own_options(flags)
    base = load({key: value for key, value in flags.items() if key not in others}, os.environ, file)
    specs = {spec.name: spec for spec in base.config.adapter_specs} if ("adapters",) in base.origins else {}
    shared = base.config.global_transforms
    keep_secrets([base.config.db, base.config.dlq_db], list(specs.values()), shared)
    found: dict[str, Destination] = {}
    for name in adapters:
        given: dict[str, Any] = {}
        if spec := specs.get(name):
            given = {FLAT_KEYS[key][1]: one for key, one in others.items() if FLAT_KEYS[key][0] == spec.type}
        elif name in ADAPTERS:  # there is no file: the flags are the configuration
            spec = load({**flags, "adapters": [name]}, os.environ, file).config.adapter_specs[0]
        else:
            raise ConfigError(
                f"the configuration has no adapter {name}", "Give the file of its pipeline with --config, or --adapter"
            )
        chain = [*shared, *spec.transforms]
        found[name] = Destination(_change(spec, given) if given else spec, chain, is_other=bool(given))
    return found


def _change(spec: AdapterSpec, given: Mapping[str, Any]) -> AdapterSpec:
    """The same adapter with another target."""
    replaced = {key for name in given for key in (name, f"{name}_file", name.removesuffix("_file"))}
    kept = {name: one for name, one in spec.options if name in spec.options.model_fields_set - replaced}
    what = f"adapter {spec.name}"
    options = make_options(type(spec.options), {**kept, **given}, what, "See the documentation of the adapter")
    changed = replace(spec, options=options)
    check_options(changed)
    return changed
