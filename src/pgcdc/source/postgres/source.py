"""PostgreSQL as a source. What it needs is imported when it is asked for: each process of Spark loads this module."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pgcdc.core.errors import ConfigError, PgcdcError
from pgcdc.core.relation import Relation, ShapeChange
from pgcdc.core.state import Identity, StateDir
from pgcdc.event.typed import TypedColumn
from pgcdc.postgres.selection import Selection
from pgcdc.postgres.types.column import TypeOptions
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.protocol import ColumnDescription, Finding, Prepared, SourceOptions
from pgcdc.spool.consumers import Consumers
from pgcdc.spool.index import Token
from pgcdc.spool.writer import SpoolWriter

if TYPE_CHECKING:
    import pyarrow as pa

    from pgcdc.source.postgres.slot_stream import PostgresStream
    from pgcdc.source.postgres.table_rows import PostgresRows

CONFIRM_TIMEOUT_S = 5.0


class PostgresSource:
    """A slot of a PostgreSQL database, as `source.protocol.Source` says."""

    options_type: ClassVar[type[SourceOptions]] = PostgresOptions
    no_requests: ClassVar[tuple[str, str] | None] = None

    def __init__(self, options: SourceOptions) -> None:
        assert isinstance(options, PostgresOptions)
        self._given = options
        self.options: PostgresOptions = options.resolved()

    def check(self, state: StateDir, consumer: str) -> Iterator[Finding]:
        from pgcdc.source.postgres.setup import preflight
        from pgcdc.source.postgres.setup.prepare import Rehearsal, rehearse

        options = self.options
        found: list[Any] = []

        def look_at_server() -> str:
            server = preflight.check(options.db, options.slot_name)
            options.check_server(server.version_num)
            found.append(server)
            version = f"{server.version_num // 10000}.{server.version_num % 10000}"
            return f"PostgreSQL {version}, database {server.database}, role {server.user} may replicate"

        def look_at_slot() -> str:
            state.check_whole()
            preflight.check_others(options, state, consumer)
            known = preflight.check_known(options, state, found[0])
            if known is not None and known.created > 0:
                preflight.check_rejoin(options, state, known, found[0])
            else:
                preflight.check_begin(options, state, found[0])
            if options.temporary_slot:
                return f"{options.slot_name} will be temporary"
            return f"{options.slot_name} {'exists' if found[0].slot is not None else 'will be created'}"

        def look_at_tables() -> str:
            made = rehearse(options, state)
            found.append(made)
            tables = [table for one in made.publications for table in one.tables]
            inserts = [table for one in made.publications for table in one.inserts_only]
            only = f"; only inserts of {', '.join(inserts)} (no replica identity)" if inserts else ""
            return f"{len(tables)} ({', '.join(tables[:10])}{', ...' if len(tables) > 10 else ''}){only}"

        steps = {"database": look_at_server, "slot": look_at_slot, "tables": look_at_tables}
        for number, (name, step) in enumerate(steps.items()):
            try:
                yield Finding(name, "ok", step())
            except PgcdcError as error:
                yield Finding(name, "failed", error.message.removeprefix(f"{name}: "), error.advice)
                yield from (Finding(one, "skipped", f"the {name} cannot be used") for one in list(steps)[number + 1 :])
                return
        rehearsal: Rehearsal = found[1]
        if rehearsal.unreadable is not None:
            yield Finding("rows", "failed", rehearsal.unreadable.message, rehearsal.unreadable.advice)
        elif rehearsal.is_new and options.effective_snapshot_mode != "never":
            yield Finding("rows", "ok", "can be read for the initial snapshot")

    def tables(self, state: StateDir) -> list[Relation]:
        from pgcdc.source.postgres.setup.prepare import rehearse

        return [one.relation for one in rehearse(self.options, state, reads_rows=False).published]

    def captured(self, identity: Identity) -> list[Relation]:
        from pgcdc.postgres.database import connect, explain_errors
        from pgcdc.source.postgres.setup.fingerprint import SlotDetails
        from pgcdc.source.postgres.setup.tables import read_published

        names = SlotDetails.of(identity).names
        with explain_errors("look at the columns"), connect(self.options.db, may_retry=False) as sql:
            return [one.relation for one in read_published(sql, names)]

    def prepare(
        self,
        state: StateDir,
        *,
        consumer: str,
        say: Callable[[str], object] = lambda text: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Prepared:
        from pgcdc.source.postgres.setup.prepare import prepare
        from pgcdc.source.postgres.setup.slots import OpenTransaction, describe_wait

        def wait(transactions: list[OpenTransaction]) -> None:
            say(describe_wait(transactions))
            if is_stopped():
                raise KeyboardInterrupt

        say(f"checking the database and slot {self.options.slot_name}")
        return prepare(self.options, state, consumer=consumer, on_wait=wait)

    def follow_tables(self, state: StateDir) -> frozenset[str]:
        from pgcdc.source.postgres.setup.prepare import follow_tables

        if not self.options.selection.is_open:
            return frozenset()
        return frozenset(table for one in follow_tables(self.options, state) for table in one.tables)

    def has_confirmed(self, commit: int) -> bool:
        from pgcdc.postgres.database import connect
        from pgcdc.source.postgres.setup.slots import get_slot

        deadline = time.monotonic() + CONFIRM_TIMEOUT_S
        with contextlib.suppress(PgcdcError), connect(self.options.db, may_retry=False) as sql:
            while time.monotonic() < deadline:
                slot = get_slot(sql, self.options.slot_name)
                if slot is not None and (slot.confirmed_flush_lsn or 0) >= commit:
                    return True
                time.sleep(0.02)
        return False

    def join(self, identity: Identity, status: Mapping[str, Any], *, is_typed: bool) -> None:
        from pgcdc.source.postgres.setup.fingerprint import SlotDetails

        source, details = self.options, SlotDetails.of(identity)
        running, names = details.asked or {}, details.names
        said = [f"{name}={value}" for name, value in running.items() if value]
        different = []
        if source.slot_name != identity.stream:
            different.append(f"slot={source.slot_name}")
        if source.uses_existing:
            different += [f"publication={source.publication}"] if (source.publication,) != names else []
        elif source.has_selection and details.asked is not None:
            asked, wanted = Selection.from_json(running), source.selection
            different += [] if asked.covers(wanted) and wanted.covers(asked) else ["other tables, rows or columns"]
        wire = status.get("wire", {})
        for name in ("two_phase", "origin") if is_typed else ("two_phase", "origin", "messages"):
            mine = getattr(source, name)
            if wire.get(name, mine) != mine:
                said.append(f"{name}={wire[name]}")
                different.append(f"{name}={mine}")
        if different:
            raise ConfigError(
                f"the capture of slot {identity.stream!r} is running with {', '.join(said) or names[0]}; this query asks "
                f"for {', '.join(different)}",
                "Give the same options in every query of a slot (a typed query may name nothing but its table), stop the "
                "other queries first, or use another slot and state_dir",
            )

    def open(self, token: Token, state: StateDir, spool: SpoolWriter, consumers: Consumers) -> PostgresStream:
        from pgcdc.source.postgres.slot_stream import PostgresStream

        return PostgresStream(self.options, state, spool, consumers)

    # --- single tables

    def of_table(self, table: str, identity: Identity | None) -> PostgresSource:
        if self.options.has_selection:
            return self
        if identity is None:
            return PostgresSource(self.options.but(tables=(table,)))
        from pgcdc.source.postgres.setup.fingerprint import SlotDetails

        return PostgresSource(SlotDetails.of(identity).as_before(self.options))

    def describe(
        self, table: str, types: TypeOptions, spark_name: Callable[[pa.DataType], str]
    ) -> list[ColumnDescription]:
        from pgcdc.postgres.database import connect
        from pgcdc.postgres.types.catalog import TypeCatalog
        from pgcdc.source.postgres.table_columns import describe, read_table_columns

        with connect(self.options.db, application_name="pgcdc describe", may_retry=False) as conn:
            return describe(read_table_columns(conn, table), TypeCatalog.load(conn), types, spark_name)

    def typed_columns(
        self,
        state: StateDir,
        table: tuple[str, str],
        types: TypeOptions,
        *,
        change: ShapeChange | None,
        noted: list[tuple[str, int, int]] | None,
        zset: bool,
    ) -> tuple[TypedColumn, ...]:
        from pgcdc.postgres.database import connect
        from pgcdc.source.postgres.table_columns import typed_columns

        with connect(self.options.require_db(), may_retry=False) as sql:
            return typed_columns(
                sql, self.options, state.identity(), table, types, change=change, noted=noted, zset=zset
            )

    def check_captured(self, identity: Identity, table: str, *, zset: bool) -> None:
        from pgcdc.source.postgres.table_columns import check_captured

        check_captured(self.options.db, identity, table, zset=zset)

    def snapshot(self, table: str, types: TypeOptions) -> PostgresRows:
        from pgcdc.source.postgres.table_rows import find_rows

        return find_rows(self._given, table, types)


SOURCE = PostgresSource
