"""The tables of a copy, all in one snapshot.

A session of this process exports the snapshot, which ends with it: no slot, no publication, and nothing left on the
server, whatever happens to us. No table is locked before its turn, so that no ALTER TABLE waits for the whole copy. A
table truncated or rewritten before it was read is detected by its files, and ends the copy.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pgcdc.core.errors import ConfigError, ConnectionLost, SourceError
from pgcdc.core.relation import Column, Relation
from pgcdc.postgres.database import Connection, connect, explain_errors, quote_identifier
from pgcdc.postgres.lsn import parse_lsn
from pgcdc.postgres.selection import Rule, Selection
from pgcdc.source.postgres.setup.tables import Table, choose_tables, find_table, read_published, read_tables
from pgcdc.source.postgres.single_table import read_table_columns
from pgcdc.source.postgres.snapshot.chunks import Chunk, files_text, plan_chunks
from pgcdc.source.postgres.snapshot.copy import check_condition, select_statement
from pgcdc.source.postgres.snapshot.held import HeldSnapshot

ATTEMPTS = 3

Say = Callable[[str], None]
Progress = Callable[[str, int, int, bool], None]
"""Receives a table's name, its rows read so far, the estimated total, and whether it is complete."""


@dataclass(frozen=True, slots=True)
class Wanted:
    url: str
    selection: Selection = Selection()  # noqa: RUF009 - frozen
    publication: str = ""  # Given by the user instead of the selection
    where: str = ""

    def check(self) -> None:
        chosen = self.selection
        ways = {"--table": chosen.tables, "--schemas": chosen.schemas, "--all-tables": chosen.all_tables}
        given = [flag for flag, is_given in {**ways, "--publication": self.publication}.items() if is_given]
        if not given:
            raise ConfigError("no table is named", "Use --table NAME (repeatable), --schemas or --all-tables")
        if len(given) > 1:
            raise ConfigError(f"{given[0]} and {given[1]} cannot be combined", "Use one of them")
        if self.where and (given != ["--table"] or len(chosen.tables) != 1):
            raise ConfigError("--where applies to one table", "Name only that table, with --table")
        if not self.url:
            raise ConfigError("no database is set", "Use the variable PGCDC_DB, or --db")
        chosen.check()


@dataclass(frozen=True, slots=True)
class CopiedTable:
    table: Table
    relation: Relation  # As the stream would describe it
    conditions: tuple[str, ...]  # SQL conditions that select its rows
    chunks: tuple[Chunk, ...]
    files: str  # The files that hold its rows, for comparison: `chunks.files_text`
    estimated_rows: int

    @property
    def name(self) -> str:
        return self.table.name


@dataclass(frozen=True, slots=True)
class Copy:
    conn: Connection  # In the transaction that holds the snapshot
    catalog: Connection  # Sees the current state instead
    tables: tuple[CopiedTable, ...]
    held: HeldSnapshot
    lsn: int  # Approximate position of the stream when the snapshot was taken
    time_us: int  # The time of the snapshot, in microseconds since 1970


@contextmanager
def open_copy(wanted: Wanted, say: Say = lambda text: None) -> Iterator[Copy]:
    """Find the tables, check that they are readable, and take the snapshot. It is held until the block ends."""
    wanted.check()
    name = f"pgcdc snapshot {uuid.uuid4().hex[:12]}"
    with (
        connect(wanted.url, application_name="pgcdc snapshot", may_retry=False) as catalog,
        connect(wanted.url, application_name="pgcdc snapshot", may_retry=False) as conn,
    ):
        for _ in range(ATTEMPTS):
            tables = _find(catalog, wanted, say)
            made = _export(catalog, conn, tables, name)
            changed = [one.name for one in tables if files_text(catalog, one.table) != one.files]
            if not changed:
                break
            conn.rollback()
        else:
            raise SourceError(f"table {changed[0]} was truncated or altered each time it was read", "Try again later")
        yield made


@explain_errors("find the tables")
def _find(conn: Connection, wanted: Wanted, say: Say) -> tuple[CopiedTable, ...]:
    chosen = list(_choose(conn, wanted))
    if not chosen:
        raise SourceError("there are no tables to copy", "Check --schemas, and that --db is the right database")
    _check_rights(conn, [table for table, _, _ in chosen])
    copied = []
    for table, relation, row_filter in chosen:
        conditions = tuple(one for one in (row_filter, wanted.where) if one)
        if not relation.columns:
            if wanted.selection.tables:
                raise SourceError(
                    f"table {table.name} has no columns, so there is nothing to copy",
                    "Remove it from the tables to copy",
                )
            say(f"table {table.name} has no columns; skipping it")
            continue
        files = files_text(conn, table)
        chunks = tuple(plan_chunks(conn, table, count=1))
        rows = _estimate(conn, table, relation, conditions, bool(wanted.where))
        copied.append(CopiedTable(table, relation, conditions, chunks, files, rows))
    return tuple(copied)


def _choose(conn: Connection, wanted: Wanted) -> Iterator[tuple[Table, Relation, str | None]]:
    """The tables, with the columns and rows that their stream would have."""
    everything, rules = read_tables(conn), wanted.selection.rules()
    if wanted.publication:
        known = {table.oid: table for table in everything}
        for one in read_published(conn, [wanted.publication]):
            yield known[one.relation.oid], one.relation, one.row_filter
        return
    if wanted.selection.tables:
        found = list(dict.fromkeys(find_table(everything, name, "--table") for name in wanted.selection.tables))
    else:
        found = choose_tables(everything, wanted.selection)
    for table in found:
        rule = rules.get((table.schema, table.table), Rule())
        # The key's columns are in `old`, which snapshot rows do not have.
        columns = [
            Column(one.name, one.type_oid, one.typmod, one.is_key)
            for one in read_table_columns(conn, table)
            if not one.generated and (not rule.columns or one.name in rule.columns)
        ]
        yield table, Relation(table.oid, table.schema, table.table, "d", tuple(columns)), rule.row_filter


def _check_rights(conn: Connection, tables: Sequence[Table]) -> None:
    user, role = conn.info.user, quote_identifier(conn.info.user)
    found = conn.execute(
        "SELECT nspname::text FROM pg_namespace WHERE nspname = ANY (%s) AND NOT has_schema_privilege(oid, 'USAGE')",
        [sorted({table.schema for table in tables})],
    ).fetchall()
    if found:
        names = ", ".join(quote_identifier(name) for (name,) in found)
        raise SourceError(
            f"role {user} has no USAGE right on schema {names}", f"Run: GRANT USAGE ON SCHEMA {names} TO {role}"
        )
    found = conn.execute(
        "SELECT oid::int8 FROM unnest(%s::oid[]) oid WHERE NOT has_table_privilege(oid, 'SELECT')",
        [[table.oid for table in tables]],
    ).fetchall()
    refused = [table for table in tables if (table.oid,) in found]
    if refused:
        some = ", ".join(table.name for table in refused[:5]) + (" and others" if len(refused) > 5 else "")
        raise SourceError(
            f"role {user} has no SELECT right on table{'s' if len(refused) > 1 else ''} {some}",
            f"Run: GRANT SELECT ON {', '.join(table.sql for table in refused[:5])} TO {role}",
        )


def _estimate(conn: Connection, table: Table, relation: Relation, conditions: Sequence[str], has_where: bool) -> int:
    """The approximate number of rows. Refuses an invalid condition."""
    source = table.sql if table.kind == "p" else f"ONLY {table.sql}"
    wrong = f"--where is not a valid condition on table {table.name}" if has_where else ""
    check_condition(conn, [column.name for column in relation.columns], source, conditions, wrong)
    row = conn.execute(f"EXPLAIN (FORMAT JSON) {select_statement((), source, conditions)}".encode()).fetchone()
    return int(row[0][0]["Plan"]["Plan Rows"]) if row else 0


@explain_errors("take a snapshot")
def _export(catalog: Connection, conn: Connection, tables: tuple[CopiedTable, ...], session: str) -> Copy:
    # Read first: the copy includes everything before this position, and maybe more.
    where = catalog.execute(
        "SELECT (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END)::text"
    ).fetchone()
    conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    row = conn.execute(
        "SELECT pg_export_snapshot(), (extract(epoch FROM clock_timestamp()) * 1000000)::int8"
    ).fetchone()
    assert where is not None and row is not None
    snapshot, time_us = row
    return Copy(conn, catalog, tables, HeldSnapshot(snapshot, session, 0), parse_lsn(where[0]), time_us)


@contextmanager
def explain_reading(table: str) -> Iterator[None]:
    """Turn errors while reading a table into one line with advice."""
    try:
        with explain_errors(f"read table {table}"):
            yield
    except ConnectionLost as error:
        raise SourceError(error.message.rstrip("."), "Run it again when the server is reachable") from error
    except SourceError as error:
        state = getattr(error.__cause__, "sqlstate", None)
        if state in ("42P01", "42703"):
            raise SourceError(f"table {table} was dropped or altered before it was read", "Run it again") from error
        if error.advice == "Load it again":  # advice for users who read a DataFrame
            raise SourceError(error.message, "Run it again") from error
        raise
