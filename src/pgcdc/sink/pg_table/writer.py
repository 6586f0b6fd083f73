"""Puts folded changes into the target's tables: in few statements, whatever their number."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import psycopg

from pgcdc.core.errors import SinkError
from pgcdc.postgres.database import Connection, quote_identifier
from pgcdc.sink.pg_table import statements
from pgcdc.sink.pg_table.fold import Folded, Rows
from pgcdc.sink.pg_table.sqlstate import RowFault
from pgcdc.sink.pg_table.tables import SourceTable, TargetTable
from pgcdc.sink.pg_table.targets import Targets

__all__ = ["MOST_TABLES", "Writer"]

STEADY_FLUSHES = 16
"""So many times a table is not tried with a plain COPY after one that met rows that were there."""
MOST_TABLES = 32
"""So many staging tables a session keeps: at each commit all of them are emptied, which takes 0.4 ms each."""


class Writer:
    """One session's way to the target's tables."""

    def __init__(self, conn: Connection, targets: Targets) -> None:
        self._conn = conn
        self._targets = targets
        self._staging = _Staging(conn)
        self._met: dict[tuple[str, str], int] = {}
        """How many times more a table is not tried with a plain COPY."""
        self.missed: dict[str, int] = {}
        """By table: rows that should have been deleted and were not there, since the transaction began."""

    def begin(self) -> None:
        """A transaction begins."""
        self._staging.begin()
        self.missed = {}

    def truncate(self, sources: Iterable[SourceTable]) -> None:
        """Empty tables, all at once: they may refer to each other."""
        targets = [target for source in sources if (target := self._targets.of(source)) is not None]
        if not targets:
            return
        listed = ", ".join(target.sql for target in targets)
        try:
            with self._conn.transaction():
                self._conn.execute(f"TRUNCATE {listed}".encode())
        except psycopg.errors.FeatureNotSupported:  # a table that refers to one of these stays
            self._empty(targets)

    def _empty(self, targets: list[TargetTable]) -> None:
        """Delete all rows: those that refer to others first, in whatever order that is."""
        while targets:
            left, fault = [], None
            for target in targets:
                try:
                    with self._conn.transaction():
                        self._conn.execute(f"DELETE FROM {target.sql}".encode())
                except (psycopg.errors.ForeignKeyViolation, psycopg.errors.RestrictViolation) as error:
                    left.append(target)
                    fault = error
            if fault is not None and len(left) == len(targets):
                raise fault
            targets = left

    def write(self, source: SourceTable, folded: Folded, key: tuple[str, ...]) -> None:
        """Make the target's table what the fold says, as far as it says something."""
        gone = [rows for rows in (folded.gone, folded.undone) if rows is not None]
        if not folded.columns and self._targets.of(source) is None:
            self._miss(source, len(folded.gone or ()))
            return  # a table that is not there has nothing to delete
        columns = dict.fromkeys([*folded.columns, *(name for rows in gone for name in rows.columns)])
        target = self._targets.prepare(source, list(columns), key)
        if folded.gone is not None:
            self._miss(source, len(folded.gone) - self._delete(target, folded.gone, key))
        if folded.undone is not None:
            self._delete(target, folded.undone, key)
        if folded.puts is not None:
            self._merge(target, folded.puts, key)
        for rows in folded.patches:
            self._patch(source, target, rows, key)
        if folded.fresh is not None:
            self._insert(target, folded.fresh, key)

    def _miss(self, source: SourceTable, count: int) -> None:
        # Under a key that is checked late a row may have been replaced in an earlier part of its transaction.
        if count > 0 and not source.is_key_deferrable:
            self.missed[source.title] = self.missed.get(source.title, 0) + count

    def _stage(self, target: TargetTable, rows: Rows) -> tuple[str, tuple[str, ...]]:
        rows = rows.only(target.writable(rows.columns))
        return self._staging.fill(target, rows), rows.columns

    def _delete(self, target: TargetTable, rows: Rows, key: tuple[str, ...]) -> int:
        name, columns = self._stage(target, rows)
        if key:
            return self._run(statements.delete_statement(target, name, columns, key))
        return self._run(statements.delete_rows_statement(target, name, columns))

    def _merge(self, target: TargetTable, rows: Rows, key: tuple[str, ...]) -> None:
        name, columns = self._stage(target, rows)
        if statements.fixed_columns(target, columns, key):
            self._run(statements.make_way_statement(target, name, columns, key))
        self._run(statements.merge_statement(target, name, columns, key))

    def _insert(self, target: TargetTable, rows: Rows, key: tuple[str, ...]) -> None:
        """Rows that should be new: if some are not, all of them are merged."""
        new = rows.only(target.writable(rows.columns))
        if not new.columns:
            raise RowFault("no_columns", f"rows of table {target.title} have no column that could be written")
        if key and (self._met.get(target.name, 0) or not target.is_unique(key)):
            self._met[target.name] = max(0, self._met.get(target.name, 0) - 1)
            self._merge(target, rows, key)
            return
        if not key:
            _copy(self._conn, target.sql, new)
            return
        try:
            with self._conn.transaction():
                _copy(self._conn, target.sql, new)
        except (psycopg.errors.UniqueViolation, psycopg.errors.FeatureNotSupported):
            self._met[target.name] = STEADY_FLUSHES
            self._merge(target, rows, key)

    def _patch(self, source: SourceTable, target: TargetTable, rows: Rows, key: tuple[str, ...]) -> None:
        name, columns = self._stage(target, rows)
        if self._run(statements.patch_statement(target, name, columns, key)) < len(rows):
            raise _missing_row(source, target)

    def move(self, source: SourceTable, old: dict[str, str | None], row: dict[str, str | None]) -> bool:
        """Give a row of the target another key, and its other new values; whether the row was there."""
        target = self._targets.prepare(source, row, tuple(old))
        columns = target.writable(row)
        sets = ", ".join(f"{quote_identifier(name)} = %s::{target.columns[name].type}" for name in columns)
        where = " AND ".join(f"{quote_identifier(name)} = %s::{target.columns[name].type}" for name in old)
        values = [row[name] for name in columns] + list(old.values())
        statement = f"UPDATE {target.sql} SET {sets} WHERE {where}"
        return self._conn.execute(_keep_percent(statement, len(values)).encode(), values).rowcount > 0

    def missing_row(self, source: SourceTable) -> RowFault:
        """The fault of an update that can only be applied to a row that is there."""
        target = self._targets.of(source)
        assert target is not None
        return _missing_row(source, target)

    def _run(self, statement: str) -> int:
        """Planned each time: tables grow, and a plan for a small one would be kept."""
        return self._conn.execute(statement.encode(), prepare=False).rowcount


class _Staging:
    """The staging tables of one session: temporary, with the target's types, and used again."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._known: set[str] = set()
        self._used: set[str] = set()

    def begin(self) -> None:
        """A transaction begins: what the last one left is gone."""
        self._used.clear()

    def fill(self, target: TargetTable, rows: Rows) -> str:
        """Put rows into a staging table, and nothing else; its name in SQL."""
        columns = (f"{quote_identifier(name)} {target.columns[name].type}" for name in rows.columns)
        name = self._open(", ".join(columns))
        _copy(self._conn, name, rows)
        return name

    def _open(self, columns: str) -> str:
        """The table for these columns. Its name follows from them: after a rollback nobody knows which ones are left."""
        name = f"pgcdc_stage_{hashlib.sha256(columns.encode()).hexdigest()[:16]}"
        is_known = name in self._known
        if not is_known:
            self._make_room()
            self._conn.execute(f"CREATE TEMP TABLE IF NOT EXISTS {name} ({columns}) ON COMMIT DELETE ROWS".encode())
            self._known.add(name)
        if not is_known or name in self._used:
            self._conn.execute(f"TRUNCATE pg_temp.{name}".encode())
        self._used.add(name)
        return f"pg_temp.{name}"

    def _make_room(self) -> None:
        """Drop all staging tables if they are many; also those that a writer before us has left in the session."""
        query = "SELECT count(*) FROM pg_class WHERE relnamespace = pg_my_temp_schema() AND relkind = 'r'"
        found = self._conn.execute(query).fetchone()
        if found is not None and found[0] >= MOST_TABLES:
            self._conn.execute("DISCARD TEMP")
            self._known.clear()
            self._used.clear()


def _copy(conn: Connection, table: str, rows: Rows) -> None:
    """COPY rows to a table; `table` is as SQL takes it."""
    listed = ", ".join(map(quote_identifier, rows.columns))
    with conn.cursor().copy(f"COPY {table} ({listed}) FROM STDIN".encode()) as copy:
        for piece in statements.copy_texts(rows):
            copy.write(piece)


def _keep_percent(statement: str, count: int) -> str:
    """Names may have a percent sign, which stands for a parameter otherwise."""
    parts = statement.split("%s::")
    if len(parts) != count + 1:
        raise SinkError("a table or column of the target has %s:: in its name", "Map it to another name")
    return "%s::".join(part.replace("%", "%%") for part in parts)


def _missing_row(source: SourceTable, target: TargetTable) -> RowFault:
    return RowFault(
        "missing_row",
        f"an update of table {source.title} does not bring its long values (unchanged TOAST), and {target.title} does "
        "not have the row; take a snapshot of the table, or use --toast cache",
    )
