"""What cannot go together, with advice. Each rule raises Misfit with the key that it is about."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgcdc.config.adapters import FLAT_KEYS, Entry, option_path
from pgcdc.config.conflict import KeyPath, Misfit
from pgcdc.core.errors import ConfigError
from pgcdc.core.operation import Op
from pgcdc.core.secrets import read_secret
from pgcdc.postgres.database import split_table
from pgcdc.postgres.selection import Selection
from pgcdc.sink.registry import ADAPTERS, check_options
from pgcdc.transform.specs import CloudEventsSpec, DebeziumSpec, FilterSpec, MaskSpec

if TYPE_CHECKING:
    from pgcdc.config.model import Config

__all__ = ["check_together", "suggest"]

RESERVED = "main"
"""The lane that adapters share: an adapter's own lane has the adapter's name."""


def suggest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """`Did you mean ...?` if there is a name like it; else all of them, or `otherwise`."""
    names = list(known)
    close = difflib.get_close_matches(name.lower(), names, n=1) or [one for one in names if name and name in one][:1]
    return f"Did you mean {close[0]}?" if close else otherwise or f"Known: {', '.join(names) or 'none'}"


def check_together(config: Config) -> None:
    """Raise Misfit for the first rule that is broken."""
    _check_slot(config)
    _check_snapshot(config)
    _check_toast(config)
    _check_adapters(config)
    _check_dead_letters(config)
    _check_names(config)
    _check_transforms(config)
    _check_typed(config)
    _check_source(config)


def _is_given(config: Config, key: str) -> bool:
    """Whether it is said, and says something: a default that is written down changes nothing."""
    return bool(getattr(config, key) != type(config).model_fields[key].default)


def _check_slot(config: Config) -> None:
    """The manual's flags for what we always do: they may be given, but not denied."""
    if config.persistent_slot is False and not config.temporary_slot:
        raise Misfit(
            ("persistent_slot",), "a slot that does not persist loses its place", "For a trial, use --temporary-slot"
        )
    if config.persistent_slot and config.temporary_slot:
        raise Misfit(("temporary_slot",), "--temporary-slot and --persistent-slot are given", "Leave one of them out")
    if config.cooperative_checkpoint is False:
        raise Misfit(
            ("cooperative_checkpoint",),
            "PostgreSQL hears of an event when every adapter has it: that cannot be switched off",
            "Leave it out. For adapters that may lose events, see --bus-mode fast",
        )
    if config.cooperative_checkpoint and config.temporary_slot:
        raise Misfit(
            ("cooperative_checkpoint",),
            "--cooperative-checkpoint needs a slot that stays",
            "Leave --temporary-slot or --cooperative-checkpoint out",
        )
    if config.temporary_slot and any(_type(item) not in ("stdout", "noop") for item in config.adapters):
        raise Misfit(
            ("temporary_slot",),
            "--temporary-slot is for trials with stdout: it loses its place when the connection ends",
            "Leave --temporary-slot out to deliver to other adapters",
        )


def _check_snapshot(config: Config) -> None:
    if config.snapshot_first and config.snapshot_mode not in (None, "initial"):
        raise Misfit(
            ("snapshot_first",),
            f"--snapshot-first does not go with --snapshot-mode {config.snapshot_mode}",
            "Leave one of them out",
        )
    if config.snapshot_first is False and config.snapshot_mode == "initial":
        raise Misfit(
            ("snapshot_first",), "snapshot_first is off and --snapshot-mode is initial", "Leave one of them out"
        )
    if config.snapshot_table is not None:
        if not config.snapshot_first:
            raise Misfit(
                ("snapshot_table",),
                "--snapshot-table is for --snapshot-first",
                "Add --snapshot-first. For rows of a table without a stream: pgcdc snapshot --table",
            )
        if config.tables != (config.snapshot_table,):
            raise Misfit(
                ("snapshot_table",),
                "a new slot begins with the rows of every table that is captured, not of one of them",
                "Leave --snapshot-table out, or name this table alone in --tables",
            )
    key = "snapshot_mode" if config.snapshot_mode else "snapshot_first"
    _place((key,), lambda: config.effective_snapshot_mode)


def _check_toast(config: Config) -> None:
    if config.toast_cache and "toast" in config.model_fields_set and config.toast != "cache":
        raise Misfit(
            ("toast_cache",), f"--toast-cache does not go with --toast {config.toast}", "Leave one of them out"
        )
    if config.toast_cache is False and config.toast == "cache":
        raise Misfit(("toast_cache",), "toast_cache is off and --toast is cache", "Leave one of them out")
    if _is_given(config, "toast_cache_max_entries") and config.effective_toast != "cache":
        raise Misfit(
            ("toast_cache_max_entries",), "--toast-cache-max-entries is for --toast cache", "Add --toast cache"
        )


# --- adapters


def _type(item: str | Entry) -> str:
    return item if isinstance(item, str) else item.type  # type: ignore[attr-defined]


def _check_adapters(config: Config) -> None:
    if not config.adapters:
        raise Misfit(("adapters",), "no adapter is given", f"Use --adapter with one of: {', '.join(ADAPTERS)}")
    names = config.adapter_names
    for number, name in enumerate(names):
        if name in names[:number]:
            raise Misfit(
                ("adapters", number),
                f"adapter {name} is given twice",
                "Name each --adapter once; two of one type need names: {name: audit, type: file, path: ...}",
            )
        if name == RESERVED:
            raise Misfit(("adapters", number, "name"), f"the name {RESERVED} is taken", "Give it another name")
    for key, (kind, _) in FLAT_KEYS.items():
        if getattr(config, key) is not None and kind not in config.adapters:
            flag = key.replace("_", "-")
            raise Misfit(
                (key,),
                f"--{flag} is given without --adapter {kind}",
                f"Add --adapter {kind}; for an adapter with a name, put it into its mapping",
            )
    if _is_given(config, "bus_buffer") and config.bus_mode != "fast":
        raise Misfit(("bus_buffer",), "--bus-buffer is for --bus-mode fast", "Add --bus-mode fast, or leave it out")
    targets: dict[str, str] = {}
    for number, spec in enumerate(config.adapter_specs):
        known = ADAPTERS[spec.type]
        path = option_path(config, number, next(iter(known.options.model_fields), "type"))
        _place(path, partial(check_options, spec))
        target = known.target(spec.options)
        if target and target in targets:
            raise Misfit(
                ("adapters", number),
                f"adapters {targets[target]} and {spec.name} write to the same target: {target}",
                "Give each a target of its own",
            )
        targets[target] = spec.name


def _check_dead_letters(config: Config) -> None:
    needs = {"dlq_file": "file", "dlq_db": "pg_table", "dlq_db_file": "pg_table", "dlq_table": "pg_table"}
    for key, store in needs.items():
        if _is_given(config, key) and config.dlq != store:
            flag = key.replace("_", "-")
            raise Misfit((key,), f"--{flag} is for --dlq {store}", f"Add --dlq {store}, or leave it out")
    if config.dlq_file is not None and not config.dlq_file.absolute().parent.is_dir():
        raise Misfit(("dlq_file",), f"the folder of the file {config.dlq_file} does not exist", "Create it first")
    if config.dlq == "pg_table" and split_table(config.dlq_table) in map(split_table, config.tables):
        raise Misfit(
            ("tables",),
            f"table {config.dlq_table} is to be captured, and dead letters are written to it: each one would be an event",
            "Leave it out of tables, or give another --dlq-table",
        )
    name = split_table(config.dlq_table)[1]
    is_source = not config.dlq_db or config.dlq_db == config.db
    if config.dlq == "pg_table" and is_source and (config.all_tables or config.schemas) and name[:6] != "pgcdc_":
        raise Misfit(
            ("dlq_table",),
            "all tables are captured, and dead letters are written to one of them: each one would be an event",
            "Give it a name that begins with pgcdc_: such tables are left out; or another database with --dlq-db",
        )


def _check_names(config: Config) -> None:
    """What is said of an adapter by its name needs that adapter, and is said once."""
    entries = {item.name: item for item in config.adapters if isinstance(item, Entry)}
    own: Sequence[tuple[KeyPath, Iterable[str], str]] = (
        (("routes",), config.routes, "routes"),
        (("adapter_priority",), config.adapter_priority, "priority"),
        (("transforms", "adapter"), config.transforms.adapter, "transforms"),
    )
    for path, names, field in own:
        for name in names:
            if name not in config.adapter_names:
                raise Misfit((*path, name), f"there is no adapter {name}", suggest(name, config.adapter_names))
            if name in entries and field in entries[name].model_fields_set and field == "transforms":
                raise Misfit(
                    (*path, name), f"the transforms of adapter {name} are given twice", "Put them into one place"
                )


# --- transforms


def _check_transforms(config: Config) -> None:
    for number, spec in enumerate(config.transforms.global_):
        _check_transform(("transforms", "global", number), spec)
    for name, specs in config.transforms.adapter.items():
        for number, spec in enumerate(specs):
            _check_transform(("transforms", "adapter", name, number), spec)
    for place, item in enumerate(config.adapters):
        for number, spec in enumerate(item.transforms if isinstance(item, Entry) else ()):
            _check_transform(("adapters", place, "transforms", number), spec)
    if config.debezium_envelope and config.cloudevents_envelope:
        raise Misfit(
            ("cloudevents_envelope",),
            "--debezium-envelope and --cloudevents-envelope are given",
            "Leave one of them out",
        )
    for adapter in config.adapter_specs:
        chain = (*config.global_transforms, *adapter.transforms)
        _check_chain(config, adapter.name, chain)
        envelope = next((one for one in chain if isinstance(one, (DebeziumSpec, CloudEventsSpec))), None)
        if envelope is not None and adapter.type == "pg_table" and getattr(adapter.options, "mode", "") == "apply":
            raise Misfit(
                ("adapters",),
                f"adapter {adapter.name} applies pgcdc's own events to tables, and {envelope.type} makes others of them",
                f"Leave {envelope.type} out, or use --pg-table-mode append",
            )


def _check_chain(config: Config, name: str, chain: Sequence[Any]) -> None:
    """An envelope is the whole text of an event: behind it there are no columns any more."""
    for number, spec in enumerate(chain):
        if not isinstance(spec, (DebeziumSpec, CloudEventsSpec)):
            continue
        behind = next((one for one in chain[number + 1 :] if not _is_plain_filter(one)), None)
        if behind is not None:
            is_global = spec in config.transforms.global_
            path: KeyPath = ("transforms", "global") if is_global else ("transforms", "adapter", name)
            raise Misfit(
                path if is_global or name in config.transforms.adapter else ("adapters",),
                f"for adapter {name}, {behind.type} comes behind {spec.type}, which ends the columns of an event",
                f"Put {spec.type} last: behind all transforms, global ones and the adapter's own",
            )


def _is_plain_filter(spec: Any) -> bool:
    return isinstance(spec, FilterSpec) and spec.where is None


def _check_transform(path: KeyPath, spec: Any) -> None:
    if isinstance(spec, FilterSpec):
        known = [op.name for op in Op]
        if not spec.operations and not spec.where:
            raise Misfit(path, "this filter keeps everything", "Give operations, or where")
        for number, name in enumerate(spec.operations):
            if name.upper() not in known:
                raise Misfit((*path, "operations", number), f"{name!r} is not known", suggest(name.upper(), known))
    if isinstance(spec, MaskSpec):
        given = [key for key in ("key_env", "key_file") if getattr(spec, key)]
        if spec.mode != "hash":
            for key in given:
                raise Misfit(
                    (*path, key), f"{key} is for mode hash, not for {spec.mode}", "Leave it out, or use mode: hash"
                )
            return
        if len(given) != 1:
            raise Misfit(path, "mode hash needs its key in one place", "Give key_env or key_file")
        if spec.key_env and not os.environ.get(spec.key_env):
            raise Misfit((*path, "key_env"), f"the variable {spec.key_env} is not set", "It holds the key of the hash")
        if spec.key_file:
            _place((*path, "key_file"), partial(read_secret, Path(spec.key_file), "the key of the hash"))


# --- the source


def _check_typed(config: Config) -> None:
    from pgcdc.config.model import TYPED_KEYS

    if config.table:
        for name in ("tx_metadata", "tx_markers", "schema_events"):
            if getattr(config, name):
                flag = name.replace("_", "-")
                raise Misfit(
                    (name,),
                    f"--{flag} is for events, not for typed rows",
                    f"Leave --table or --{flag} out; rows have _xid and _ts",
                )
        chains = (*config.global_transforms, *(one for spec in config.adapter_specs for one in spec.transforms))
        if chains or config.routes or any(spec.routes for spec in config.adapter_specs):
            raise Misfit(
                ("table",),
                "transforms and routes are for events, not for typed rows",
                "Leave --table out, or use a query of your own: docs/tables.md",
            )
        return
    for name in TYPED_KEYS:
        if _is_given(config, name):
            flag = name.replace("_", "-")
            raise Misfit((name,), f"--{flag} is for typed rows", "Add --table, or leave it out")


def _check_source(config: Config) -> None:
    for key in ("row_filters", "columns"):
        _place((key,), Selection(**{key: getattr(config, key)}).check)
    ways = [key for key in ("tables", "schemas", "all_tables") if getattr(config, key)]
    if len(ways) > 1:
        raise Misfit(
            (ways[1],),
            f"say which tables to capture, in one way: {ways[0]} and {ways[1]} are given",
            "Leave one of them out",
        )
    options = config.source_options()
    _place(("toast_cache" if config.toast_cache else "toast",), lambda: options.toast.check(config.origin))
    rules = [key for key in ("row_filters", "columns", "generated_columns") if getattr(config, key)]
    if options.uses_existing and rules and config.db:
        _place((rules[0],), options.check)
    options.check()


def _place(path: KeyPath, check: Callable[[], object]) -> None:
    """What a check of another module refuses is about this key."""
    try:
        check()
    except ConfigError as error:
        raise Misfit(path, error.message, error.advice) from None
