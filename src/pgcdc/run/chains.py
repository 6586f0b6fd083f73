"""What each adapter of a run receives from the stream, and how that changes while it runs.

A reload applies all transforms and routes of the configuration, or none. `targets.json` records where each adapter
delivers to, and what transforms changed there.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pgcdc.core.counters import CONFIG_RELOAD_ERRORS, CONFIG_RELOADS, counters
from pgcdc.core.errors import ConfigError, PgcdcError, StateError
from pgcdc.core.moment import show_time
from pgcdc.core.state import StateDir, read_json, write_json_durably
from pgcdc.run.settings import PipelineSettings
from pgcdc.sink.spec import AdapterSpec
from pgcdc.transform import check_chains
from pgcdc.transform.specs import Chain, from_spec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RELOADABLE = ("transforms", "routes", "drop_columns", "filter_operations", "debezium_envelope", "cloudevents_envelope")
"""The settings that a reload applies."""

Own = Mapping[str, tuple[Sequence[Any], Sequence[str]]]  # By adapter name: its own transforms, and its routes


@dataclass(frozen=True)
class Chains:
    """The adapters of a run, and the transforms that all of them share."""

    specs: Sequence[AdapterSpec]
    transforms: tuple[Any, ...]
    is_typed: bool = False  # Rows of one table, which have no chains

    def of(self, spec: AdapterSpec) -> Chain:
        """An adapter's chain; also for an adapter that is not added yet."""
        form = "lines" if self.is_typed else spec.options.form()  # typed rows are lines for every adapter
        return Chain((*self.transforms, *spec.transforms), spec.routes, form)

    def by_spec(self, specs: Sequence[AdapterSpec] | None = None) -> list[tuple[AdapterSpec, Chain]]:
        """The chains of all adapters, or of these."""
        return [(spec, self.of(spec)) for spec in (self.specs if specs is None else specs)]

    @property
    def all(self) -> list[Chain]:
        return [self.of(spec) for spec in self.specs]

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self.specs]

    @property
    def have_sql(self) -> bool:
        """Whether only Spark can check them."""
        return any(from_spec(one).sql for chain in self.all for one in chain.transforms)

    @property
    def are_simple(self) -> bool:
        """Whether the source can apply all of them, without Spark."""
        return all(chain.made().is_simple for chain in self.all)

    def having(self, specs: Sequence[AdapterSpec], transforms: tuple[Any, ...] | None = None) -> Chains:
        """A copy with other adapters and shared transforms."""
        return replace(self, specs=tuple(specs), transforms=self.transforms if transforms is None else transforms)

    def check(self, spark: SparkSession | None, specs: Sequence[AdapterSpec] | None = None) -> None:
        """Raise ConfigError for an invalid chain; SQL is checked only with Spark."""
        chains = self.by_spec(specs)
        if self.is_typed and any(chain != Chain() for _, chain in chains):
            raise ConfigError("typed rows (--table) cannot have transforms and routes", "Remove them, or --table")
        for spec, chain in chains:
            try:
                check_chains(spark, [chain])
            except ConfigError as error:
                count = f" (the first {len(self.transforms)} are for all)" if self.transforms else ""
                raise ConfigError(f"adapter {spec.name}, {error.message}{count}", error.advice) from error


def as_many(given: Any) -> tuple[Any, ...]:
    """A list, or a single item as a list."""
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


class Reloads:
    """Requested reloads and their outcomes. `ask` is safe in a signal handler; the pipeline calls `take`."""

    def __init__(
        self, config: PipelineSettings, read_again: Callable[[], PipelineSettings] | None, say: Callable[[str], None]
    ) -> None:
        self._config = config
        self._read_again = read_again
        self._say = say
        self._asked = threading.Event()
        self._ends: dict[str, dict[str, Any]] = {}  # By command id; empty while pending
        self._done = self._refused = 0
        self._error: str | None = None
        self._ended_at: str | None = None

    def ask(self) -> None:
        """Request a reload as soon as possible."""
        self._asked.set()

    def answer(self, name: str) -> dict[str, Any]:
        """The outcome of a command's reload; None while it is pending. A reload runs only once per command."""
        if name not in self._ends:
            self._ends[name] = {}
            self.ask()
        return self._ends[name]

    def take(self, change: Callable[[Sequence[Any], Own], None], adapters: Sequence[str]) -> bool:
        """Run the requested reload: `change` receives the new transforms and routes. False: none was requested."""
        if not self._asked.is_set():
            return False
        self._asked.clear()
        waiting = [name for name, end in list(self._ends.items()) if not end]
        try:
            said = self._reload(change, adapters)
            self._done += 1
            self._error = None
            counters.add(CONFIG_RELOADS)
            self._say(said)
        except Exception as error:  # whatever happens, a wrong file must not stop a running pipeline
            self._refused += 1
            self._error = str(error) if isinstance(error, PgcdcError) else f"{type(error).__name__}: {error}"
            counters.add(CONFIG_RELOAD_ERRORS)
            self._say(f"the configuration was not reloaded; the previous one stays in effect: {self._error}")
        self._ended_at = show_time()
        self._ends |= {name: {"refused": self._error} for name in waiting}
        return True

    def _reload(self, change: Callable[[Sequence[Any], Own], None], adapters: Sequence[str]) -> str:
        if self._read_again is None:
            raise ConfigError("this pipeline has no configuration to reload", "Use Pipeline.reload")
        config = self._read_again()
        mine = {one.name: (one.transforms, one.routes) for one in config.adapter_specs if one.name in adapters}
        change(config.global_transforms, mine)
        said = "the configuration was reloaded: its transforms and routes apply from the next batch on"
        later = [
            name
            for name in type(config).model_fields
            if name not in RELOADABLE and getattr(config, name) != getattr(self._config, name)
        ]
        return f"{said}; these need a restart: {', '.join(later)}" if later else said

    def status(self) -> dict[str, Any]:
        """The reloads, for `pgcdc status`."""
        counts = {"reloads": self._done, "reload_errors": self._refused}
        return {**counts, "last_reload_at": self._ended_at, "last_reload_error": self._error}


def change_specs(specs: Sequence[AdapterSpec], own: Own) -> tuple[AdapterSpec, ...]:
    """The adapters with these transforms and routes; adapters without an entry keep theirs."""
    unknown = sorted(set(own) - {spec.name for spec in specs})
    if unknown:
        raise ConfigError(
            f"adapter {unknown[0]!r} does not exist", f"Known adapters: {', '.join(one.name for one in specs)}"
        )
    return tuple(
        replace(spec, transforms=tuple(own[spec.name][0]), routes=tuple(own[spec.name][1]))
        if spec.name in own
        else spec
        for spec in specs
    )


# --- targets.json: where an adapter delivers to, because replaying dead letters without its run must use the same
# place. Also what transforms did to the lines there, which decides whether `pgcdc resync` can read them back. Kept
# until the adapter gets another target, because older lines stay when a chain changes.


def note_targets(state: StateDir, chains: Iterable[tuple[AdapterSpec, Chain]]) -> None:
    """Record these adapters, keeping known ones. Durable when this returns, so call it before they write."""
    before: dict[str, Any] = read_json(state.targets_file) or {}
    after = dict(before)
    for spec, chain in chains:
        digest = _digest(spec)
        known = before.get(spec.name, {})
        if known.get("target") != digest:
            known = {}
        columns, others = set(known.get("columns", ())), set(known.get("others", ()))
        for one in map(from_spec, chain.transforms):
            columns.update(one.named, one.added)
            if one.is_envelope or one.type == "python":
                others.add(one.type)
        after[spec.name] = {"target": digest, "columns": sorted(columns), "others": sorted(others)}
    if after != before:
        write_json_durably(state.targets_file, after)


def check_target(state: StateDir, spec: AdapterSpec) -> None:
    """StateError: the run delivered to another target than these settings name, so a letter would be settled in the
    wrong place."""
    known = (read_json(state.targets_file) or {}).get(spec.name)
    if known is not None and known["target"] != _digest(spec):
        raise StateError(
            f"adapter {spec.name} has delivered to another target than these settings name",
            "Use the configuration of the pipeline: its --config file, or all of its flags and variables. To "
            "deliver to another target, add its flags to the file that has the adapter",
        )


def why_unreadable(state: StateDir, adapter: str, keys: Iterable[str]) -> str:
    """Why an adapter's output cannot be searched by these columns; "" if it can."""
    noted = (read_json(state.targets_file) or {}).get(adapter, {})
    if noted.get("others"):
        return f"lines that the transform {', '.join(noted['others'])} has made"
    changed = sorted(set(noted.get("columns", ())) & set(keys))
    return f"lines in which transforms change the key ({', '.join(changed)})" if changed else ""


def _digest(spec: AdapterSpec) -> str:
    """A one-way digest of a target, which may be a secret."""
    return hashlib.sha256(f"{spec.type}\0{spec.options.place()}".encode()).hexdigest()[:16]
