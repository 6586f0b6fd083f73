"""The sources that there are, by their names; each is imported when it is asked for.

A package of somebody else adds one with an entry point of the group `pgcdc.sources`.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from pgcdc.core.errors import ConfigError
from pgcdc.source.protocol import Source

__all__ = ["find_source", "source_names"]

_OURS = {
    "postgres": "pgcdc.source.postgres.source",
    "rate": "pgcdc.source.rate.source",
}
"""Modules with a `SOURCE`."""


def _others() -> dict[str, EntryPoint]:
    return {one.name: one for one in entry_points(group="pgcdc.sources") if one.name not in _OURS}


def source_names() -> list[str]:
    """All that are known."""
    return sorted({*_OURS, *_others()})


def find_source(name: str) -> Source:
    """The source of that name. ConfigError names what is nearest if there is none."""
    if name in _OURS:
        found: Source = import_module(_OURS[name]).SOURCE
        return found
    others = _others()
    if name in others:
        loaded: Source = others[name].load()
        return loaded
    names = source_names()
    near = difflib.get_close_matches(name, names, 1)
    raise ConfigError(
        f"there is no source {name!r}",
        f"{f'Did you mean {near[0]}? ' if near else ''}Known sources: {', '.join(names)}",
    )
