"""PostgreSQL as a source. Code that needs only its settings does not load this module."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from pgcdc.core.errors import ConfigError, PgcdcError
from pgcdc.core.relation import Relation
from pgcdc.core.state import Identity, StateDir
from pgcdc.event.typed import TypedColumn
from pgcdc.postgres.database import connect, explain_errors
from pgcdc.postgres.types.column import TypeOptions
from pgcdc.source.postgres import single_table
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.postgres.setup import prepare
from pgcdc.source.postgres.setup.fingerprint import SlotDetails
from pgcdc.source.postgres.setup.slots import check, get_slot
from pgcdc.source.postgres.setup.tables import read_published
from pgcdc.source.postgres.slot_stream import PostgresStream
from pgcdc.source.protocol import ColumnsQuery, Finding, Prepared, SourceOptions
from pgcdc.spool.consumers import Consumers
from pgcdc.spool.index import Token
from pgcdc.spool.writer import SpoolWriter

CONFIRM_TIMEOUT_S = 5.0


class PostgresSource:
    """A slot of a PostgreSQL database; implements `source.protocol.Source`."""

    options_type: ClassVar[type[SourceOptions]] = PostgresOptions
    no_requests: ClassVar[tuple[str, str] | None] = None

    def __init__(self, options: SourceOptions) -> None:
        assert isinstance(options, PostgresOptions)
        self._given = options
        self.options: PostgresOptions = options.resolved()

    def check(self, state: StateDir, consumer: str) -> Iterator[Finding]:
        options = self.options
        steps = ["database", "slot", "tables"]
        try:
            server = check(options.db, options.slot_name)
            options.check_server(server.version_num)
            version = f"{server.version_num // 10000}.{server.version_num % 10000}"
            place = f"PostgreSQL {version}, database {server.database}, role {server.user} may replicate"
            yield Finding(steps.pop(0), "ok", place)
            state.check_whole()
            prepare.check_others(options, state, consumer)
            known = prepare.check_slot(options, state, server)
            fate = "exists" if server.slot is not None else "will be created"
            fate = "will be temporary" if options.temporary_slot else fate
            yield Finding(steps.pop(0), "ok", f"{options.slot_name} {fate}")
            reads_rows = known is None and options.effective_snapshot_mode != "never"
            publications, _, unreadable = prepare.try_publications(options, state, reads_rows=reads_rows)
            tables = [table for one in publications for table in one.tables]
            inserts = [table for one in publications for table in one.inserts_only]
            only = f"; only inserts of {', '.join(inserts)} (no replica identity)" if inserts else ""
            named = f"{len(tables)} ({', '.join(tables[:10])}{', ...' if len(tables) > 10 else ''}){only}"
            yield Finding(steps.pop(0), "ok", named)
        except PgcdcError as error:
            name, *rest = steps
            yield Finding(name, "failed", error.message.removeprefix(f"{name}: "), error.advice)
            yield from (Finding(one, "skipped", f"the {name} cannot be used") for one in rest)
            return
        if unreadable is not None:
            yield Finding("rows", "failed", unreadable.message, unreadable.advice)
        elif reads_rows:
            yield Finding("rows", "ok", "can be read for the initial snapshot")

    def tables(self, state: StateDir) -> list[Relation]:
        return [one.relation for one in prepare.try_publications(self.options, state)[1]]

    def captured(self, identity: Identity) -> list[Relation]:
        names = SlotDetails.of(identity).names
        with explain_errors("read the columns"), connect(self.options.db, may_retry=False) as sql:
            return [one.relation for one in read_published(sql, names)]

    def prepare(self, state: StateDir, *, consumer: str, say: Callable[[str], object] = lambda text: None) -> Prepared:
        say(f"checking the database and slot {self.options.slot_name}")
        return prepare.prepare(self.options, state, consumer=consumer, say=say)

    def follow_tables(self, state: StateDir) -> tuple[frozenset[str], tuple[str, ...]]:
        if not self.options.is_open:
            return frozenset(), ()
        found = prepare.follow_tables(self.options, state)
        return frozenset(table for one in found for table in one.tables), prepare.partly_captured(found)

    def has_confirmed(self, commit: int) -> bool:
        deadline = time.monotonic() + CONFIRM_TIMEOUT_S
        with contextlib.suppress(PgcdcError), connect(self.options.db, may_retry=False) as sql:
            while time.monotonic() < deadline:
                slot = get_slot(sql, self.options.slot_name)
                if slot is not None and (slot.confirmed_flush_lsn or 0) >= commit:
                    return True
                time.sleep(0.02)
        return False

    def join(self, identity: Identity, status: Mapping[str, Any], *, is_typed: bool) -> None:
        source, details = self.options, SlotDetails.of(identity)
        names = details.names
        said = [f"{name}={value}" for name, value in details.asked.items()]
        different = []
        if source.slot_name != identity.stream:
            different.append(f"slot={source.slot_name}")
        if source.uses_existing:
            different += [f"publication={source.publication}"] if (source.publication,) != names else []
        elif source.has_selection:
            asked = details.selection
            different += [] if asked.covers(source) and source.covers(asked) else ["other tables, rows or columns"]
        wire = status.get("wire", {})
        for name in ("two_phase", "origin") if is_typed else ("two_phase", "origin", "messages"):
            mine = getattr(source, name)
            if wire.get(name, mine) != mine:
                said.append(f"{name}={wire[name]}")
                different.append(f"{name}={mine}")
        if different:
            raise ConfigError(
                f"the capture of slot {identity.stream!r} is running with {', '.join(said) or names[0]}, but "
                f"this query sets {', '.join(different)}",
                "Use the same options in every query of a slot (a typed query may set only its table), stop "
                "the other queries first, or use another slot and state_dir",
            )

    def open(self, token: Token, state: StateDir, spool: SpoolWriter, consumers: Consumers) -> PostgresStream:
        return PostgresStream(self.options, state, spool, consumers)

    # --- single tables

    def of_table(self, table: str, identity: Identity | None) -> PostgresSource:
        if self.options.has_selection:
            return self
        if identity is None:
            return PostgresSource(self.options.but(tables=(table,)))
        return PostgresSource(SlotDetails.of(identity).as_before(self.options))

    def typed_columns(self, state: StateDir, wanted: ColumnsQuery) -> tuple[TypedColumn, ...]:
        return single_table.typed_columns(self.options, state.identity(), wanted)

    def check_captured(self, identity: Identity, table: str, *, zset: bool) -> None:
        single_table.check_captured(self.options.db, identity, table, zset=zset)

    def snapshot(self, table: str, types: TypeOptions) -> single_table.PostgresRows:
        return single_table.find_rows(self._given, table, types)
