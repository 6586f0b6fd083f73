"""The one model of a pipeline's configuration: flags, `PGCDC_*` variables, `pgcdc.yaml` and Python all become this.

Flags with their help, the file of `pgcdc config init` and the JSON schema are made from it: a setting is written once, here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from pgcdc.config.adapters import AdapterItem, AdapterKeys, adapter_specs
from pgcdc.config.fields import (
    DatabaseUrl,
    Identifiers,
    Operations,
    Priorities,
    Routes,
    SlotName,
    TableName,
    TableNames,
)
from pgcdc.core.settings import Names, Options, Rules, setting
from pgcdc.core.units import Bytes, Seconds
from pgcdc.sink.spec import AdapterSpec
from pgcdc.source.postgres.setup.prepare import DEFAULT_SPOOL_LIMIT_BYTES, SourceOptions
from pgcdc.source.postgres.snapshot.held import DEFAULT_HOLD_LIMIT_S
from pgcdc.source.postgres.snapshot.mode import choose_snapshot_mode
from pgcdc.source.postgres.toast.resolver import DEFAULT_CACHE_ENTRIES, ToastOptions
from pgcdc.source.postgres.wire.protocol import WireOptions
from pgcdc.spark.options import DEFAULT_MAX_BATCH_ROWS
from pgcdc.transform.specs import DropColumnsSpec, FilterSpec, TransformSpec

__all__ = ["GROUPS", "TYPED_KEYS", "Config", "Transforms"]

TYPED_KEYS = ("changelog", "truncate", "numeric", "out_of_range", "arrays", "composites")
"""What only typed rows (`table`) have; the same names are options of the Spark source."""

DATABASE, TABLES, SNAPSHOTS = "Database", "Tables", "Rows that are there"
EVENTS, TYPED, ADAPTERS, TRANSFORMS, RUNNING = "Events", "Typed rows", "Adapters", "Transforms", "Running"
DEAD = "Dead letters"
GROUPS = (DATABASE, TABLES, ADAPTERS, DEAD, TRANSFORMS, SNAPSHOTS, EVENTS, TYPED, RUNNING)
"""In the order in which they are shown."""


class Transforms(Options):
    """What is done to events: by all adapters, then by one of them."""

    global_: tuple[TransformSpec, ...] = Field(
        default=(), alias="global", description="for all adapters, in this order"
    )
    adapter: dict[str, tuple[TransformSpec, ...]] = Field(
        default={}, description="by the adapter's name, behind the global ones"
    )


class Config(AdapterKeys):
    """What a pipeline is told. The names are those of the flags, with underscores."""

    # --- the database and our place in it

    db: DatabaseUrl = setting(
        "", "Database URL. Better in PGCDC_DB: arguments are visible to others.", DATABASE, metavar="URL",
        example="postgresql://app@localhost:5432/shop",
    )  # fmt: skip
    db_file: Path | None = setting(
        None, "The file that holds the database URL.", DATABASE, metavar="PATH", example="/run/secrets/pgcdc_db"
    )
    password_file: Path | None = setting(
        None, "The file that holds the password; the URL then has none.", DATABASE, metavar="PATH",
        example="/run/secrets/pgcdc_password",
    )  # fmt: skip
    detector: Literal["wal"] = setting("wal", "Where changes come from: wal.", DATABASE)
    slot_name: SlotName = setting("pgcdc", "Replication slot; created if it does not exist.", DATABASE, metavar="NAME")
    persistent_slot: bool | None = setting(None, "Accepted; slots are persistent.", DATABASE, example="true")
    temporary_slot: bool = setting(False, "For trials with stdout: no state, ends with the connection.", DATABASE)
    start_from: Literal["slot"] | None = setting(
        None, "slot: begin with what an existing slot still has.", DATABASE, example="slot"
    )
    streaming: bool | None = setting(
        None,
        "Read large transactions while they run. (default: yes, but not with --messages)",
        DATABASE,
        example="true",
    )
    two_phase: bool = setting(False, "Decode prepared transactions at PREPARE. PostgreSQL 15, new slots.", DATABASE)
    origin: Literal["any", "none"] = setting(
        "any", "none: leave out what was replicated to the server. PostgreSQL 16.", DATABASE
    )
    binary: bool = setting(False, "Values travel in binary form; events are the same. PostgreSQL 14.", DATABASE)
    fail_fast: bool = setting(False, "Exit 1 when the connection is lost, for supervisors.", DATABASE)

    # --- what is captured

    tables: TableNames = setting(
        (), "Capture these tables: a,b,schema.c. Creates our publication.", TABLES, metavar="A,B", example="[orders]"
    )
    all_tables: bool = setting(False, "Capture all tables. Creates our publication.", TABLES)
    schemas: Identifiers = setting(
        (), "Capture all tables of these schemas: a,b. Creates our publication.", TABLES, metavar="A,B",
        example="[sales]",
    )  # fmt: skip
    publication: str | None = setting(
        None, "Use this existing publication.", TABLES, metavar="NAME", example="shop", min_length=1, max_length=63
    )
    row_filters: Rules = setting(
        (), "Only these rows: 'orders=total > 100'. Repeatable. PostgreSQL 15.", TABLES, flag="row-filter",
        metavar="TABLE=EXPR", is_repeated=True, example="{orders: total > 100}",
    )  # fmt: skip
    columns: Rules = setting(
        (), "Only these columns: orders=id,total. Repeatable. PostgreSQL 15.", TABLES, metavar="TABLE=A,B",
        is_repeated=True, example="{orders: [id, total]}",
    )  # fmt: skip
    generated_columns: bool = setting(False, "Also stored generated columns. PostgreSQL 18.", TABLES)
    accept_publication: bool = setting(False, "Go on with a publication that was narrowed on purpose.", TABLES)

    # --- where events go

    adapters: tuple[AdapterItem, ...] = setting(
        ("stdout",), "Where events go: stdout, file, exec, pg_table, webhook, noop. Repeatable.", ADAPTERS, flag="adapter",
        metavar="NAME",
        is_repeated=True, example="[stdout]",
    )  # fmt: skip
    routes: Routes = setting(
        {}, "Only channels that match, for an adapter: file=orders,sales.*. Repeatable.", ADAPTERS, flag="route",
        metavar="NAME=PATTERN,...", is_repeated=True, example="{file: [orders, sales.*]}",
    )  # fmt: skip
    adapter_priority: Priorities = setting(
        {}, "critical, normal or best-effort: file=critical. Repeatable.", ADAPTERS, metavar="NAME=PRIORITY",
        is_repeated=True, example="{file: critical}",
    )  # fmt: skip
    bus_mode: Literal["reliable", "fast"] = setting(
        "reliable", "fast: an adapter that falls behind by --bus-buffer events skips ahead, and loses them.", ADAPTERS
    )
    bus_buffer: int = setting(
        100_000, "With --bus-mode fast: how many events an adapter may be behind.", ADAPTERS, metavar="N", ge=1
    )
    cooperative_checkpoint: bool | None = setting(
        None, "Accepted; PostgreSQL hears of an event when every adapter has it.", ADAPTERS, example="true"
    )

    # --- what becomes of events that a target refuses

    dlq: Literal["file", "pg_table", "stderr", "none"] = setting(
        "file", "Where refused events go: file, pg_table, stderr, or none (they are lost).", DEAD, metavar="STORE"
    )
    dlq_file: Path | None = setting(
        None, "With --dlq file: this one. (default: dead_letters.jsonl in the state directory)", DEAD, metavar="PATH",
        example="dead_letters.jsonl",
    )  # fmt: skip
    dlq_db: DatabaseUrl = setting(
        "", "With --dlq pg_table: the database. Better in PGCDC_DLQ_DB. (default: the source)", DEAD, metavar="URL",
        example="postgresql://app@localhost:5432/ops",
    )  # fmt: skip
    dlq_db_file: Path | None = setting(
        None, "The file that holds the URL of that database.", DEAD, metavar="PATH", example="/run/secrets/pgcdc_dlq_db"
    )
    dlq_table: TableName = setting(
        "pgcdc_dead_letters", "With --dlq pg_table: the table; created if it is missing.", DEAD, metavar="NAME"
    )

    # --- what is done to them

    drop_columns: Names = setting(
        (), "Leave these columns out of every event: a,b.", TRANSFORMS, metavar="A,B", example="[password]"
    )
    filter_operations: Operations = setting(
        (), "Deliver only these operations: INSERT,UPDATE.", TRANSFORMS, metavar="A,B", example="[INSERT, UPDATE]"
    )
    debezium_envelope: bool = setting(False, "Events as Debezium's PostgreSQL connector writes them.", TRANSFORMS)
    cloudevents_envelope: bool = setting(False, "Events as CloudEvents 1.0 in structured JSON.", TRANSFORMS)
    transforms: Transforms = setting(
        Transforms.model_validate({}), "Transforms, for all adapters and for one.", TRANSFORMS, flag=None
    )

    # --- the rows that are there

    snapshot_mode: Literal["initial", "never", "always", "initial_only"] | None = setting(
        None, "Rows that are there: initial, never, always or initial_only. (default: initial, new slots)", SNAPSHOTS,
        metavar="MODE", example="initial",
    )  # fmt: skip
    snapshot_first: bool | None = setting(None, "The same as --snapshot-mode initial.", SNAPSHOTS, example="true")
    snapshot_table: TableName | None = setting(
        None, "With --snapshot-first: accepted if it is the one table that is captured.", SNAPSHOTS, metavar="NAME",
        example="orders",
    )  # fmt: skip
    snapshot_hold_limit: Seconds = setting(
        DEFAULT_HOLD_LIMIT_S, "Give the initial snapshot up after this time: 30m, 6h.", SNAPSHOTS, ge=1
    )  # fmt: skip
    incremental_snapshot: bool = setting(False, "Capture the table of signals; created if it is missing.", SNAPSHOTS)
    signal_table: TableName = setting(
        "pgcdc_signals", "Rows inserted there ask for snapshots.", SNAPSHOTS, metavar="NAME"
    )
    snapshot_chunk_size: int = setting(
        0, "Rows that incremental snapshots read at a time; 0: by time and size.", SNAPSHOTS, metavar="N", ge=0
    )
    snapshot_chunk_delay: Seconds = setting(0.0, "How long they rest between chunks: 100ms, 2s.", SNAPSHOTS, ge=0)

    # --- what stands in events

    toast: Literal["full", "cache", "mark"] = setting(
        "mark", "Long values that an update left alone: full (old row), cache, or mark.", EVENTS, metavar="MODE"
    )
    toast_cache: bool | None = setting(None, "The same as --toast cache.", EVENTS, example="true")
    toast_cache_max_entries: int = setting(
        DEFAULT_CACHE_ENTRIES, "Rows that --toast cache remembers.", EVENTS, metavar="N", ge=1
    )
    messages: bool = setting(False, "Also what pg_logical_emit_message writes. PostgreSQL 14.", EVENTS)
    tx_metadata: bool = setting(False, "Events name their transaction: xid, commit time, number.", EVENTS)
    tx_markers: bool = setting(False, "Also BEGIN and COMMIT events, on pgcdc:_txn.", EVENTS)
    schema_events: bool = setting(False, "Also an event when a table is altered, on pgcdc:_schema.", EVENTS)
    invalid_utf8: Literal["error", "replace", "base64"] = setting(
        "error", "Bytes that are not UTF-8: error, replace or base64.", EVENTS, metavar="POLICY"
    )

    # --- typed rows instead of events

    table: TableName | None = setting(
        None, "Typed rows of this table instead of events: its own columns. See docs/types.md.", TYPED,
        metavar="NAME", example="orders",
    )  # fmt: skip
    changelog: Literal["changes", "zset"] = setting(
        "changes", "With --table: changes, or zset (rows with weights).", TYPED, metavar="KIND"
    )
    truncate: Literal["error", "mark"] = setting(
        "error", "With --changelog zset: error, or mark (a row for it).", TYPED, metavar="POLICY"
    )
    numeric: Literal["decimal", "string", "double"] = setting(
        "decimal", "With --table: numeric as decimal, string or double.", TYPED, metavar="KIND"
    )
    out_of_range: Literal["error", "clamp", "string"] = setting(
        "error", "With --table: infinity, BC: error, clamp, or dates as string.", TYPED, metavar="POLICY"
    )
    arrays: Literal["array", "string"] = setting("array", "With --table: array or string.", TYPED, metavar="KIND")
    composites: Literal["struct", "string"] = setting(
        "struct", "With --table: struct or string.", TYPED, metavar="KIND"
    )

    # --- running

    state_dir: Path = setting(Path(".pgcdc"), "Spool, acks and checkpoints.", RUNNING, metavar="PATH")
    spool_limit: Bytes = setting(
        DEFAULT_SPOOL_LIMIT_BYTES, "Stop reading when this much is undelivered.", RUNNING, ge=1 << 20
    )  # fmt: skip
    max_batch_rows: int = setting(
        DEFAULT_MAX_BATCH_ROWS, "At most about this many events a batch.", RUNNING, metavar="N", ge=1
    )
    spark_master: str | None = setting(
        None, "Spark cluster: spark://host:7077, yarn, k8s://... (default: local)", RUNNING, metavar="URL",
        example="spark://10.0.0.5:7077", pattern=r"^(local(\[.+\])?|spark://.+|yarn|k8s://.+)$",
    )  # fmt: skip
    once: bool = setting(False, "Deliver everything committed up to now, confirm, exit.", RUNNING)
    warm_up: bool = setting(True, "Warm Spark up before saying ready; --once does not.", RUNNING)

    @field_validator("adapters", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(item.strip() for item in value.split(",") if item.strip()) if isinstance(value, str) else value

    def check(self) -> None:
        """Raise ConfigError for what cannot go together."""
        from pgcdc.config.rules import check_together

        check_together(self)

    # --- for the pipeline

    @property
    def adapter_specs(self) -> tuple[AdapterSpec, ...]:
        """The adapters, each with its options, own transforms, routes, priority and delivery."""
        return adapter_specs(self)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of the adapters."""
        return tuple(item if isinstance(item, str) else item.name for item in self.adapters)

    @property
    def global_transforms(self) -> tuple[Any, ...]:
        """What every event goes through first: the flags' transforms, then the global ones of the file."""
        drop = (DropColumnsSpec.model_validate({"columns": self.drop_columns}),) if self.drop_columns else ()
        keep = (FilterSpec.model_validate({"operations": self.filter_operations}),) if self.filter_operations else ()
        return (*drop, *keep, *self.transforms.global_)

    @property
    def effective_snapshot_mode(self) -> str:
        """What was said, or the default for such a slot."""
        given = self.snapshot_mode or ("initial" if self.snapshot_first else None)
        return choose_snapshot_mode(given, temporary_slot=self.temporary_slot, start_from=self.start_from)

    @property
    def effective_toast(self) -> str:
        """What becomes of long values, said in either way."""
        return "cache" if self.toast_cache else self.toast

    def source_options(self) -> SourceOptions:
        """The part that concerns the source."""
        options = SourceOptions(
            url=self.db,
            slot=self.slot_name,
            publication=self.publication,
            tables=self.tables,
            all_tables=self.all_tables,
            schemas=self.schemas,
            row_filters=self.row_filters,
            columns=self.columns,
            generated_columns=self.generated_columns,
            state_dir=str(self.state_dir),
            spool_limit_bytes=self.spool_limit,
            temporary_slot=self.temporary_slot,
            start_from=self.start_from,
            fail_fast=self.fail_fast,
            accept_publication=self.accept_publication,
            wire=WireOptions(self.streaming, self.messages, self.two_phase, self.origin, self.binary),
            toast=ToastOptions(self.effective_toast, self.toast_cache_max_entries),
            snapshot_mode=self.effective_snapshot_mode,
            snapshot_hold_limit_s=self.snapshot_hold_limit,
            incremental_snapshot=self.incremental_snapshot,
            signal_table=self.signal_table,
            snapshot_chunk_size=self.snapshot_chunk_size,
            snapshot_chunk_delay_s=self.snapshot_chunk_delay,
        )
        return replace(options, tables=(self.table,)) if self.table and not options.has_selection else options
