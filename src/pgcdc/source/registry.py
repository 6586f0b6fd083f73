"""The sources that there are, by their names; each is imported when it is asked for.

A package of somebody else adds one with an entry point of the group `pgcdc.sources`.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pgcdc.core.errors import ConfigError
from pgcdc.source.protocol import Source, SourceOptions

_OURS = {
    "postgres": "pgcdc.source.postgres.source",
    "rate": "pgcdc.source.rate.source",
}
"""Modules with a `SOURCE`, which is a class."""
_DETECTORS = {"wal": "postgres", "rate": "rate"}
"""What the manual calls them; those of other packages have their own names."""


def _others() -> dict[str, EntryPoint]:
    return {one.name: one for one in entry_points(group="pgcdc.sources") if one.name not in _OURS}


def source_names() -> list[str]:
    """All that are known."""
    return sorted({*_OURS, *_others()})


def find_source(name: str) -> type[Source]:
    """The source of that name. ConfigError names what is nearest if there is none."""
    name = _DETECTORS.get(name, name)
    if name in _OURS:
        found: type[Source] = import_module(_OURS[name]).SOURCE
        return found
    others = _others()
    if name in others:
        loaded: type[Source] = others[name].load()
        return loaded
    raise _unknown("source", name, source_names())


def check_detector(name: str) -> None:
    """Raise ConfigError, with what is nearest, if the setting `detector` names no source."""
    if name not in _DETECTORS and name not in _others():
        raise _unknown("detector", name, [*_DETECTORS, *sorted(_others())])


def _unknown(what: str, name: str, names: list[str]) -> ConfigError:
    near = difflib.get_close_matches(name.lower(), names, 1)
    known = f"Known {what}s: {', '.join(names)}"
    return ConfigError(f"there is no {what} {name!r}", f"Did you mean {near[0]}? {known}" if near else known)


def make_source(options: SourceOptions | dict[str, Any], kind: str = "") -> Source:
    """The source of these settings; if they are JSON, of that kind."""
    if isinstance(options, dict):
        found = find_source(kind)
        return found(found.options_type.model_validate(options))
    return find_source(options.kind)(options)
