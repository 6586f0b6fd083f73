"""Every setting of the PostgreSQL source. Flags, YAML, Python, Spark's options and the capture process use it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator

from pgcdc.core.errors import ConfigError, SourceError
from pgcdc.core.settings import Conflict, Options, Seconds, checked, setting
from pgcdc.postgres.database import parse_url, split_table
from pgcdc.postgres.selection import SNAPSHOTS, TABLES, DatabaseUrl, Selection, TableName
from pgcdc.source.protocol import SourceOptions

DATABASE, EVENTS = "Database", "Events"

MIN_SERVER = 12
_SINCE = {"messages": 14, "binary": 14, "two_phase": 15, "origin": 16}


def check_slot_name(name: str) -> None:
    """Raise ConfigError unless PostgreSQL accepts this name."""
    if not re.fullmatch(r"[a-z0-9_]{1,63}", name):
        raise ConfigError(f"{name!r} is not a slot name", "Use up to 63 lower-case letters, digits and underscores")


def check_age(server_version: int) -> None:
    """Raise SourceError for a server (its `server_version_num`) that is too old."""
    if server_version // 10000 < MIN_SERVER:
        raise SourceError(f"PostgreSQL {server_version // 10000} is too old", f"Use PostgreSQL {MIN_SERVER} or later")


def pair_of(base_name: str) -> tuple[str, str]:
    """The names of the two publications we create (`setup/publications.py`)."""
    return base_name, f"{base_name}_inserts"


SlotName = Annotated[str, AfterValidator(partial(checked, check_slot_name))]
SnapshotMode = Literal["initial", "never", "always", "initial_only"]


class WireOptions(Options):
    """What to request from the server besides the rows of committed transactions."""

    streaming: bool | None = setting(
        None,
        "Decode large transactions while they run. (default: yes, but not with --messages)",
        DATABASE,
        example="true",
    )
    two_phase: bool = setting(False, "Decode prepared transactions at PREPARE. PostgreSQL 15, new slots.", DATABASE)
    origin: Literal["any", "none"] = setting(
        "any", "none: skip changes that were replicated to the server. PostgreSQL 16.", DATABASE
    )
    binary: bool = setting(False, "Receive values in binary form; events are the same. PostgreSQL 14.", DATABASE)
    messages: bool = setting(False, "Include what pg_logical_emit_message writes. PostgreSQL 14.", EVENTS)

    @property
    def streams(self) -> bool:
        """Whether to request large transactions while they run. Off by default with `messages`: the server does not say
        which subtransaction a message in such a transaction belongs to, so messages of a rolled-back savepoint look
        committed."""
        return not self.messages if self.streaming is None else self.streaming

    def check_server(self, server_version: int) -> None:
        """Raise unless a server of this version (`server_version_num`) supports these options."""
        check_age(server_version)
        major = server_version // 10000
        for name, since in _SINCE.items():
            if getattr(self, name) not in (False, "any") and major < since:
                raise SourceError(
                    f"the option {name} needs PostgreSQL {since}, but this server is {major}",
                    f"Remove {name}, or upgrade the server",
                )

    def check_slot(self, name: str, two_phase: bool) -> None:
        """Raise unless an existing slot (`two_phase`: it decodes prepared transactions) supports these options."""
        if self.two_phase and not two_phase:
            raise SourceError(
                f"slot {name!r} was created without two-phase decoding (pg_replication_slots.two_phase)",
                "Remove two_phase, or use a new slot that is created with two_phase",
            )


class ToastOptions(Options):
    """How to handle long values that PostgreSQL does not send because an update did not change them."""

    toast: Literal["full", "cache", "mark"] = setting(
        "mark",
        "Long values that an update did not change: full (from the old row), cache, or mark.",
        EVENTS,
        metavar="MODE",
    )
    toast_cache: bool | None = setting(None, "The same as --toast cache.", EVENTS, example="true")
    toast_cache_max_entries: int = setting(100_000, "How many rows --toast cache remembers.", EVENTS, metavar="N", ge=1)

    @property
    def effective_toast(self) -> str:
        """How long values are handled, from either setting."""
        return "cache" if self.toast_cache else self.toast


class PostgresOptions(SourceOptions, Selection, WireOptions, ToastOptions):
    """A PostgreSQL database: how to reach it, our slot in it, and what to capture."""

    kind: ClassVar[str] = "postgres"
    spark_names: ClassVar[Mapping[str, str]] = {"url": "db", "slot": "slot_name"}
    spark_hidden: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "persistent_slot": {},
        "snapshot_first": {"snapshot_mode": "initial"},
        "snapshot_table": {},
        "toast_cache": {"toast": "cache"},
    }

    # --- the database and our place in it

    db: DatabaseUrl = setting(
        "", "Database URL. Better in PGCDC_DB: arguments are visible to others.", DATABASE, metavar="URL",
        example="postgresql://app@localhost:5432/shop", secret=True,
    )  # fmt: skip
    slot_name: SlotName = setting("pgcdc", "Replication slot; created if it does not exist.", DATABASE, metavar="NAME")
    persistent_slot: bool | None = setting(
        None, "Always on; the setting is accepted, as slots are persistent.", DATABASE, example="true"
    )
    temporary_slot: bool = setting(False, "For trials with stdout: no state, ends with the connection.", DATABASE)
    start_from: Literal["slot"] | None = setting(
        None, "slot: start with what an existing slot still has.", DATABASE, example="slot"
    )

    # --- what is captured

    publication: str | None = setting(
        None, "Use this existing publication.", TABLES, metavar="NAME", example="shop", min_length=1, max_length=63
    )
    accept_publication: bool = setting(False, "Continue with a publication that was narrowed on purpose.", TABLES)

    # --- existing rows

    snapshot_mode: SnapshotMode | None = setting(
        None, "Existing rows: initial, never, always or initial_only. (default: initial, new slots)", SNAPSHOTS,
        metavar="MODE", example="initial",
    )  # fmt: skip
    snapshot_first: bool | None = setting(None, "The same as --snapshot-mode initial.", SNAPSHOTS, example="true")
    snapshot_table: TableName | None = setting(
        None, "With --snapshot-first: accepted if it is the only captured table.", SNAPSHOTS, metavar="NAME",
        example="orders",
    )  # fmt: skip
    snapshot_hold_limit: Seconds = setting(
        6 * 3600.0, "Abandon the initial snapshot after this time: 30m, 6h.", SNAPSHOTS, ge=1
    )
    snapshot_chunk_size: int = setting(
        0, "Rows that incremental snapshots read at a time; 0: by time and size.", SNAPSHOTS, metavar="N", ge=0
    )
    snapshot_chunk_delay: Seconds = setting(
        0.0, "Pause of incremental snapshots between chunks: 100ms, 2s.", SNAPSHOTS, ge=0
    )

    def resolved(self) -> Self:
        return self if self.db else self.but(db=os.environ.get("PGCDC_DB", ""))

    def require_db(self) -> str:
        """The database URL, which must be set by now."""
        if not self.db:
            raise ConfigError(
                "no database is set on this host",
                "Use option('url', ...) or the variable PGCDC_DB, which executors need as well",
            )
        return self.db

    def check_visible(self) -> None:
        if self.db and any("password" in key and value for key, value in parse_url(self.db).items()):
            raise ConfigError(
                "the option url contains a password, and Spark keeps options in plans and logs",
                "Put the whole URL into the variable PGCDC_DB and remove the option, or the password into "
                "PGPASSWORD or ~/.pgpass",
            )

    def check_table(self, table: str) -> None:
        if self.tables and split_table(table) not in {split_table(name) for name in self.tables}:
            raise ConfigError(
                f"table {table} is not among the tables to capture", "Add it to option tables, or remove that option"
            )

    @property
    def uses_existing(self) -> bool:
        """The publication belongs to the user: we only read it."""
        return bool(self.publication) and not self.names_tables

    @property
    def publications(self) -> tuple[str, ...]:
        """The names of a new slot's publications."""
        if self.publication and self.uses_existing:
            return (self.publication,)
        return pair_of(self.publication or self.slot_name)

    @property
    def has_selection(self) -> bool:
        """Whether these options select any tables."""
        return bool(self.publication) or self.names_tables

    @property
    def effective_snapshot_mode(self) -> str:
        """The given mode. By default a new slot gets the existing rows, unless it is temporary or `start_from` is given."""
        given = self.snapshot_mode or ("initial" if self.snapshot_first else None)
        return given or ("never" if self.temporary_slot or self.start_from else "initial")

    @property
    def is_snapshot_only(self) -> bool:
        """The stream is never read: the user wants only the rows of the initial snapshot."""
        return self.effective_snapshot_mode == "initial_only"

    def conflicts(self) -> Iterator[Conflict]:
        yield from self._alias_conflicts()
        yield from self._slot_conflicts()
        yield from self._snapshot_conflicts()
        yield from self._toast_conflicts()
        yield from Selection.conflicts(self)
        ways = [key for key in ("tables", "schemas", "all_tables") if getattr(self, key)]
        if len(ways) > 1:
            yield Conflict(
                (ways[1],),
                f"{ways[0]} and {ways[1]} cannot be combined: both select the tables to capture",
                "Remove one of them",
            )
        if not self.db:
            yield Conflict((), "no database is set", "Use --db, the variable PGCDC_DB, or `db:` in pgcdc.yaml")
        if not self.has_selection:
            yield Conflict(
                (),
                "no tables are selected",
                "Use one of --tables a,b, --schemas a,b, --all-tables, or --publication with an existing one",
            )
        rules = [key for key in ("row_filters", "columns", "generated_columns") if getattr(self, key)]
        if self.uses_existing and rules:
            yield Conflict(
                (rules[0],),
                f"publication {self.publication} is yours and is not changed, so filters and columns cannot "
                "be set for it",
                "Put them into the publication, or use --tables, --schemas or --all-tables and let pgcdc "
                "create the publication named by --publication",
            )

    def _alias_conflicts(self) -> Iterator[Conflict]:
        """A flag and its alias that were both given."""
        for alias, meaning in self.spark_hidden.items():
            for name, value in meaning.items():
                said, given, flag = getattr(self, alias), getattr(self, name), f"--{name.replace('_', '-')}"
                if said and name in self.model_fields_set and given not in (None, value):
                    text = f"--{alias.replace('_', '-')} cannot be combined with {flag} {given}"
                    yield Conflict((alias,), text, "Remove one of them")
                if said is False and given == value:
                    yield Conflict((alias,), f"{alias} is off, but {flag} is {value}", "Remove one of them")

    def _slot_conflicts(self) -> Iterator[Conflict]:
        """The manual has flags for things we always do: we accept them, but they cannot be false."""
        if self.persistent_slot is False and not self.temporary_slot:
            yield Conflict(
                ("persistent_slot",),
                "a slot must be persistent to keep its place",
                "For a trial, use --temporary-slot",
            )
        if self.persistent_slot and self.temporary_slot:
            yield Conflict(
                ("temporary_slot",), "--temporary-slot and --persistent-slot cannot be combined", "Remove one of them"
            )

    def _snapshot_conflicts(self) -> Iterator[Conflict]:
        if self.snapshot_table is not None and not self.snapshot_first:
            yield Conflict(
                ("snapshot_table",),
                "--snapshot-table needs --snapshot-first",
                "Add --snapshot-first. To copy rows of a table without a stream: pgcdc snapshot --table",
            )
        elif self.snapshot_table is not None and self.tables != (self.snapshot_table,):
            yield Conflict(
                ("snapshot_table",),
                "a new slot starts with the rows of every captured table, not of one of them",
                "Remove --snapshot-table, or name only this table in --tables",
            )
        mode, key = self.effective_snapshot_mode, "snapshot_mode" if self.snapshot_mode else "snapshot_first"
        if mode != "never" and self.temporary_slot:
            yield Conflict(
                (key,),
                f"snapshot mode {mode} needs a persistent slot: a temporary one loses its place with its connection",
                "Remove --temporary-slot, or use --snapshot-mode never",
            )
        elif mode != "never" and self.start_from:
            yield Conflict(
                (key,),
                f"snapshot mode {mode} needs a new slot: it is unknown which rows an existing one started with",
                "Remove --start-from and use a new --slot-name, or use --snapshot-mode never",
            )

    def _toast_conflicts(self) -> Iterator[Conflict]:
        if self.is_given("toast_cache_max_entries") and self.effective_toast != "cache":
            yield Conflict(
                ("toast_cache_max_entries",), "--toast-cache-max-entries needs --toast cache", "Add --toast cache"
            )
        if self.effective_toast == "cache" and self.origin != "any":
            yield Conflict(
                ("toast_cache" if self.toast_cache else "toast",),
                "--toast cache cannot be combined with --origin none: skipped changes would make its values stale",
                "Use --toast full or --toast mark",
            )
