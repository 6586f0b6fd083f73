"""The model of a pipeline's configuration, the same for flags, `PGCDC_*` variables, `pgcdc.yaml` and Python.

The flags and their help, the file of `pgcdc config init` and the JSON schema are generated from it, so each setting is
defined only here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from pgcdc.config.adapters import (
    FLAT_KEYS,
    AdapterItem,
    AdapterKeys,
    Entry,
    Priorities,
    Routes,
    adapter_specs,
    kind_of,
    option_path,
)
from pgcdc.core.errors import ConfigErrors, PgcdcError
from pgcdc.core.relation import Op
from pgcdc.core.secrets import read_secret
from pgcdc.core.settings import (
    Conflict,
    KeyPath,
    Names,
    Options,
    check_known,
    conflicts_of,
    setting,
    setting_of,
    split_names,
    suggest,
    text_or_list,
)
from pgcdc.postgres.database import split_table
from pgcdc.postgres.selection import SNAPSHOTS, TABLES
from pgcdc.run.settings import PipelineSettings
from pgcdc.sink.spec import ADAPTERS as TYPES
from pgcdc.sink.spec import AdapterSpec, check_options
from pgcdc.source.rate.options import RATE, RateOptions
from pgcdc.transform.specs import CloudEventsSpec, DebeziumSpec, DropColumnsSpec, FilterSpec, MaskSpec, TransformSpec

DATABASE, ADAPTERS, DEAD, TRANSFORMS = "Database", "Adapters", "Dead letters", "Transforms"
EVENTS, TYPED, RUNNING = "Events", "Typed rows", "Running"
GROUPS = (DATABASE, TABLES, ADAPTERS, DEAD, TRANSFORMS, SNAPSHOTS, EVENTS, TYPED, RATE, RUNNING)
"""In display order."""


_OPERATIONS = [op.name for op in Op]
_Operation = Annotated[
    str,
    BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value),
    AfterValidator(partial(check_known, _OPERATIONS)),
]
Operations = Annotated[tuple[_Operation, ...], BeforeValidator(split_names), text_or_list({"enum": _OPERATIONS})]


class Transforms(Options):
    """Transforms of events: for all adapters, then for one of them."""

    global_: tuple[TransformSpec, ...] = Field(
        default=(), alias="global", description="for all adapters, in this order"
    )
    adapter: dict[str, tuple[TransformSpec, ...]] = Field(
        default={}, description="by the adapter's name, after the global ones"
    )


class Config(PipelineSettings, AdapterKeys):
    """The settings of a pipeline. The names are those of the flags, with underscores."""

    db_file: Path | None = setting(
        None, "The file that contains the database URL.", DATABASE, metavar="PATH", example="/run/secrets/pgcdc_db"
    )
    password_file: Path | None = setting(
        None, "The file that contains the password, if the URL has none.", DATABASE, metavar="PATH",
        example="/run/secrets/pgcdc_password",
    )  # fmt: skip

    # --- adapters: where events go

    adapters: tuple[AdapterItem, ...] = setting(
        ("stdout",), f"Where events go: {', '.join(TYPES)}. Repeatable.", ADAPTERS, flag="adapter", metavar="NAME",
        is_repeated=True, example="[stdout]",
    )  # fmt: skip
    routes: Routes = setting(
        {}, "Deliver only matching channels to an adapter: file=orders,sales.*. Repeatable.", ADAPTERS, flag="route",
        metavar="NAME=PATTERN,...", is_repeated=True, example="{file: [orders, sales.*]}",
    )  # fmt: skip
    adapter_priority: Priorities = setting(
        {}, "critical, normal or best-effort: file=critical. Repeatable.", ADAPTERS, metavar="NAME=PRIORITY",
        is_repeated=True, example="{file: critical}",
    )  # fmt: skip
    cooperative_checkpoint: bool | None = setting(
        None, "Always on; the setting is accepted, but cannot be turned off.", ADAPTERS, example="true"
    )

    # --- dead letters: events that a target refuses

    dlq_db_file: Path | None = setting(
        None,
        "The file that contains the URL of that database.",
        DEAD,
        metavar="PATH",
        example="/run/secrets/pgcdc_dlq_db",
    )

    # --- transforms

    drop_columns: Names = setting(
        (), "Remove these columns from every event: a,b.", TRANSFORMS, metavar="A,B", example="[password]"
    )
    filter_operations: Operations = setting(
        (), "Deliver only these operations: INSERT,UPDATE.", TRANSFORMS, metavar="A,B", example="[INSERT, UPDATE]"
    )
    debezium_envelope: bool = setting(False, "Write events as Debezium's PostgreSQL connector does.", TRANSFORMS)
    cloudevents_envelope: bool = setting(False, "Write events as CloudEvents 1.0 in structured JSON.", TRANSFORMS)
    transforms: Transforms = setting(
        Transforms.model_validate({}), "Transforms for all adapters and for single ones.", TRANSFORMS, flag=None
    )

    @field_validator("adapters", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(item.strip() for item in value.split(",") if item.strip()) if isinstance(value, str) else value

    def conflicts(self) -> Iterator[Conflict]:
        """Contradictions: all of the source's, and the first one of every other rule."""
        found = list(self.source.conflicts())
        found += [conflict for rule in _RULES for conflict in conflicts_of((), partial(rule, self))]
        found.sort(key=lambda one: not one.path)  # missing settings come last
        yield from {(one.path, one.message): one for one in found}.values()

    def check(self) -> None:
        """Raise ConfigError with all contradictions."""
        if found := list(self.conflicts()):
            raise ConfigErrors.of(found)

    # --- what the pipeline reads

    @property
    def adapter_specs(self) -> tuple[AdapterSpec, ...]:
        """The adapters, each with its options, own transforms, routes, priority and delivery."""
        return adapter_specs(self)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(item if isinstance(item, str) else item.name for item in self.adapters)

    @property
    def global_transforms(self) -> tuple[Any, ...]:
        """The transforms applied first to every event: those of the flags, then the global ones of the file."""
        drop = (DropColumnsSpec.model_validate({"columns": self.drop_columns}),) if self.drop_columns else ()
        keep = (FilterSpec.model_validate({"operations": self.filter_operations}),) if self.filter_operations else ()
        return (*drop, *keep, *self.transforms.global_)


FIELDS = [(name, field, setting_of(name, field)) for name, field in Config.model_fields.items()]
"""Every setting: name, field, and metadata for the command line and documents."""


# --- contradictions: each rule raises Conflict with its key and advice

RESERVED = "main"  # The lane that adapters share. A lane for one adapter has the adapter's name


_T = TypeVar("_T")


def at(path: KeyPath, check: Callable[[], _T]) -> _T:
    """Run another module's check; its error is reported for this key."""
    try:
        return check()
    except PgcdcError as error:
        raise Conflict(path, error.message, error.advice) from None


def _needs(config: Config) -> Iterator[tuple[str, str, bool]]:
    """Settings that require another one: the key, the required key, and whether that is set."""
    yield "bus_buffer", "--bus-mode fast", config.bus_mode == "fast"
    yield "dlq_file", "--dlq file", config.dlq == "file"
    for key in ("dlq_db", "dlq_db_file", "dlq_table"):
        yield key, "--dlq pg_table", config.dlq == "pg_table"
    for key, (kind, _) in FLAT_KEYS.items():
        yield key, f"--adapter {kind}", kind in config.adapters
    for key in RateOptions.model_fields:
        yield key, "--detector rate", key in type(config.source).model_fields


def _check_needs(config: Config) -> None:
    for key, other, is_there in _needs(config):
        if not is_there and config.is_given(key):
            where = (
                ", or set it in the mapping of the adapter, if that has a name"
                if key in FLAT_KEYS
                else ", or remove it"
            )
            raise Conflict((key,), f"--{key.replace('_', '-')} needs {other}", f"Add {other}{where}")


def _check_trial(config: Config) -> None:
    """Flags of the manual for things pgcdc always does: they may be true, but not false."""
    if config.cooperative_checkpoint is False:
        raise Conflict(
            ("cooperative_checkpoint",),
            "cooperative_checkpoint is always on",
            "Remove it. For adapters that may lose events, see --bus-mode fast",
        )
    if config.cooperative_checkpoint and config.temporary_slot:
        raise Conflict(
            ("cooperative_checkpoint",),
            "--cooperative-checkpoint needs a persistent slot",
            "Remove --temporary-slot or --cooperative-checkpoint",
        )
    if config.temporary_slot and any(kind_of(item) not in ("stdout", "noop") for item in config.adapters):
        raise Conflict(
            ("temporary_slot",),
            "--temporary-slot is for trials with stdout: its place is lost when the connection ends",
            "Remove --temporary-slot to deliver to other adapters",
        )


# --- adapters


def _check_adapters(config: Config) -> None:
    if not config.adapters:
        raise Conflict(("adapters",), "no adapter is configured", f"Use --adapter with one of: {', '.join(TYPES)}")
    names = config.adapter_names
    for number, name in enumerate(names):
        if name in names[:number]:
            raise Conflict(
                ("adapters", number),
                f"adapter {name} is named twice",
                "Name each --adapter once; two of the same type need names: {name: audit, type: file, path: ...}",
            )
        if name == RESERVED:
            raise Conflict(
                ("adapters", number, "name"), f"the adapter name {RESERVED} is reserved", "Choose another name"
            )
    for number, spec in enumerate(config.adapter_specs):
        path = option_path(config, number, next(iter(type(spec.options).model_fields), "type"))
        at(path, partial(check_options, spec))
        at(("adapters", number), partial(spec.check_beside, config.adapter_specs[:number]))


def _check_dead_letters(config: Config) -> None:
    if config.dlq_file is not None and not config.dlq_file.absolute().parent.is_dir():
        raise Conflict(("dlq_file",), f"the folder of the file {config.dlq_file} does not exist", "Create it first")
    is_all = (config.all_tables or config.schemas) and config.dlq_db in ("", None, config.db)
    is_captured = is_all and split_table(config.dlq_table)[1][:6] != "pgcdc_"
    is_captured = is_captured or split_table(config.dlq_table) in map(split_table, config.tables)
    if config.dlq == "pg_table" and is_captured:
        raise Conflict(
            ("dlq_table",),
            f"dead letters would be written to table {config.dlq_table}, which is captured: each one would "
            "become an event",
            "Choose another --dlq-table (its name must begin with pgcdc_ if all tables are captured), or "
            "another --dlq-db",
        )


def _check_names(config: Config) -> None:
    """A setting by adapter name needs that adapter, and may be given only once."""
    own: dict[KeyPath, Iterable[str]] = {
        ("routes",): config.routes,
        ("adapter_priority",): config.adapter_priority,
        ("transforms", "adapter"): config.transforms.adapter,
    }
    for path, names in own.items():
        for name in names:
            if name not in config.adapter_names:
                raise Conflict((*path, name), f"adapter {name} does not exist", suggest(name, config.adapter_names))
    for item in config.adapters:
        if isinstance(item, Entry) and item.transforms and item.name in config.transforms.adapter:
            where = ("transforms", "adapter", item.name)
            raise Conflict(where, f"the transforms of adapter {item.name} are set twice", "Set them in one place")


# --- transforms


def _check_transforms(config: Config) -> None:
    chains: dict[KeyPath, Sequence[Any]] = {("transforms", "global"): config.transforms.global_}
    chains |= {("transforms", "adapter", name): specs for name, specs in config.transforms.adapter.items()}
    entries = {number: item for number, item in enumerate(config.adapters) if isinstance(item, Entry)}
    chains |= {("adapters", number, "transforms"): item.transforms for number, item in entries.items()}
    for path, specs in chains.items():
        for number, spec in enumerate(specs):
            _check_transform((*path, number), spec)
    if config.debezium_envelope and config.cloudevents_envelope:
        raise Conflict(
            ("cloudevents_envelope",),
            "--debezium-envelope and --cloudevents-envelope cannot be combined",
            "Remove one of them",
        )
    for adapter in config.adapter_specs:
        _check_chain(config, adapter, (*config.global_transforms, *adapter.transforms))


def _check_chain(config: Config, adapter: AdapterSpec, chain: Sequence[Any]) -> None:
    """An envelope turns an event into text, so no transform of columns can follow it."""
    numbers = [number for number, one in enumerate(chain) if isinstance(one, (DebeziumSpec, CloudEventsSpec))]
    if not numbers:
        return
    envelope = chain[numbers[0]]
    if adapter.type == "pg_table" and getattr(adapter.options, "mode", "") == "apply":
        raise Conflict(
            ("adapters",),
            f"adapter {adapter.name} applies pgcdc's own events to tables, but {envelope.type} changes their form",
            f"Remove {envelope.type}, or use --pg-table-mode append",
        )
    for behind in chain[numbers[0] + 1 :]:
        if isinstance(behind, FilterSpec) and behind.where is None:
            continue
        own: KeyPath = (
            ("transforms", "adapter", adapter.name) if adapter.name in config.transforms.adapter else ("adapters",)
        )
        raise Conflict(
            ("transforms", "global") if envelope in config.transforms.global_ else own,
            f"adapter {adapter.name}: {behind.type} comes after {envelope.type}, and an enveloped event has no columns",
            f"Move {envelope.type} to the end, after all global transforms and the adapter's own",
        )


def _check_transform(path: KeyPath, spec: Any) -> None:
    """Check whether the key file of a hash is readable, which the transform's model cannot tell."""
    if not isinstance(spec, MaskSpec) or spec.mode != "hash":
        return
    if not spec.key_env and not spec.key_file:
        raise Conflict(path, "mode hash needs a key", "Set key_env or key_file")
    if spec.key_env and not os.environ.get(spec.key_env):
        raise Conflict((*path, "key_env"), f"the variable {spec.key_env} is not set", "Set it to the key of the hash")
    if spec.key_file:
        at((*path, "key_file"), partial(read_secret, Path(spec.key_file), "the key of the hash"))


# --- the source


def _check_tables(config: Config) -> None:
    """Only PostgreSQL has tables to choose from."""
    for name, _, said in FIELDS:
        if said.group == TABLES and config.is_given(name) and name not in type(config.source).model_fields:
            raise Conflict(
                (name,),
                f"--{said.flag} is for PostgreSQL, but --detector {config.detector} makes its own tables",
                "Remove it. With --detector rate, --rate-tables N sets the number of tables, and --route "
                "ADAPTER=rate_1 delivers only some of them",
            )


def _check_typed(config: Config) -> None:
    for conflict in config.typed_conflicts(config):
        raise conflict
    if config.table:
        chains = (*config.global_transforms, *(one for spec in config.adapter_specs for one in spec.transforms))
        if chains or config.routes or any(spec.routes for spec in config.adapter_specs):
            raise Conflict(
                ("table",),
                "transforms and routes cannot be combined with typed rows (--table)",
                "Remove --table, or use your own query: docs/tables.md",
            )


_RULES = (
    _check_trial,
    _check_needs,
    _check_adapters,
    _check_dead_letters,
    _check_names,
    _check_transforms,
    _check_typed,
    _check_tables,
)
