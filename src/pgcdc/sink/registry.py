"""Which types of adapters there are, by the entry points of the group `pgcdc.sinks`: ours, and those of other packages.

An entry point names the options of a type (`SinkOptions`), which make its sink. Each is loaded when it is asked for; one
that does not keep the contract is refused then, by name.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from pgcdc.core.errors import ConfigError, PgcdcError
from pgcdc.core.secrets import remember_secrets
from pgcdc.event.forms import FORMS
from pgcdc.postgres.database import url_passwords
from pgcdc.sink.contract import Sink
from pgcdc.sink.spec import AdapterSpec, SinkOptions

GROUP = "pgcdc.sinks"
_OPTIONS = ("make", "target", "place", "secrets", "check", "check_delivery", "check_source", "model_fields")
_SINK = ("check", "open", "write", "redeliver", "close")
_DATA = ("form", "whole_batches", "keeps_position", "finds_by_halves", "takes_executors", "part_events")


class Adapters(Mapping[str, type[SinkOptions]]):
    """The options of each type, by its name. ConfigError: what is registered under a name cannot be used."""

    def __init__(self) -> None:
        self._loaded: dict[str, type[SinkOptions]] = {}

    @cached_property
    def _points(self) -> dict[str, EntryPoint]:
        found = {one.name: one for one in (*entry_points(group=GROUP), *_of_checkout())}
        return dict(sorted(found.items()))

    def __getitem__(self, name: str) -> type[SinkOptions]:
        if name not in self._loaded:
            self._loaded[name] = _load(self._points[name])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)

    def usable(self) -> dict[str, type[SinkOptions]]:
        """Without those that cannot be used: whoever asks for one of them by name hears why."""
        found = {}
        for name in self:
            with contextlib.suppress(ConfigError):
                found[name] = self[name]
        return found

    def find(self, name: str) -> type[SinkOptions]:
        """Like `[]`. ConfigError: there is no such type; it says which there are, and which is nearest."""
        if name in self._points:
            return self[name]
        near = difflib.get_close_matches(name, self._points, 1)
        meant = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(f"there is no adapter {name!r}", f"{meant}Known: {', '.join(self._points)}")


def own_adapters() -> dict[str, type[SinkOptions]]:
    """Those of this source tree, without other packages: for its documents and tests."""
    return {one.name: ADAPTERS[one.name] for one in sorted(_of_checkout(), key=lambda one: one.name)}


def _of_checkout() -> list[EntryPoint]:
    """Those of a source tree, which may be newer than what was installed from it."""
    import tomllib

    project = Path(__file__).parents[3] / "pyproject.toml"
    try:
        raw = tomllib.loads(project.read_text())["project"]
    except (OSError, ValueError, KeyError):
        return []
    points = raw.get("entry-points", {}).get(GROUP, {}) if raw.get("name") == "pgcdc" else {}
    return [EntryPoint(name, value, GROUP) for name, value in points.items()]


def _load(point: EntryPoint) -> type[SinkOptions]:
    whose = f" of the package {point.dist.name} {point.dist.version}" if point.dist is not None else ""
    title = f"the adapter {point.name}{whose} ({point.value})"
    try:
        found: Any = point.load()
    except Exception as error:  # of somebody else's module: anything
        raise ConfigError(
            f"{title} cannot be loaded: {type(error).__name__}: {error}", "Install another version of it, or remove it"
        ) from error
    missing = [name for name in _OPTIONS if not hasattr(found, name)]
    if missing or not isinstance(found, type):
        what = f"its options lack {', '.join(missing)}" if missing else "its entry point is no class"
        raise ConfigError(
            f"{title} does not keep the contract: {what}", "See docs/contract.md: options derive from SinkOptions"
        )
    return found


def make_sink(spec: AdapterSpec) -> Sink:
    """The sink of one adapter. ConfigError: it does not keep the contract."""
    keep_secrets([], [spec])
    sink = spec.options.make()
    missing = [name for name in _SINK if not callable(getattr(sink, name, None))]
    missing += [name for name in _DATA if not hasattr(sink, name)]
    if missing or sink.form not in FORMS:
        what = f"{type(sink).__name__} lacks {', '.join(missing)}" if missing else f"there is no form {sink.form!r}"
        raise ConfigError(
            f"the adapter {spec.type} does not keep the contract: {what}",
            "See docs/contract.md: sinks derive from Sink",
        )
    return sink


def keep_secrets(urls: Iterable[str | None], specs: Sequence[AdapterSpec], transforms: Iterable[Any] = ()) -> None:
    """Remember the passwords of database URLs, and the secrets of adapters and transforms; those in files are read."""
    for url in urls:
        remember_secrets(url_passwords(url))
    for spec in specs:
        with contextlib.suppress(PgcdcError):  # which is told elsewhere
            remember_secrets(spec.options.secrets())
    for one in (*transforms, *(one for spec in specs for one in spec.transforms)):
        name = getattr(one, "key_env", None)
        if name and os.environ.get(name):
            remember_secrets([os.environ[name]])


def check_options(spec: AdapterSpec) -> None:
    """Raise ConfigError for an adapter that cannot work, without asking its target."""
    spec.options.check()
    spec.options.check_delivery(spec.delivery)


def check_adapters(specs: Sequence[AdapterSpec]) -> None:
    """Raise ConfigError for adapters that cannot be in one pipeline."""
    if not specs:
        raise ConfigError("no adapter is given", "Name one of pgcdc.adapters")
    for spec in specs:
        if not isinstance(spec, AdapterSpec):
            raise ConfigError(f"{spec!r} is no adapter", "Make one with pgcdc.adapters, such as adapters.file(path)")
    for number, spec in enumerate(specs):
        if any(spec.name == other.name for other in specs[:number]):
            raise ConfigError(f"there are two adapters {spec.name}", "Give each a name of its own: name=...")
        check_options(spec)
        spec.check_beside(specs[:number])


ADAPTERS = Adapters()
"""The types by name."""
