"""Puts folded changes into the target's tables: in few statements, whatever their number."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import psycopg

from pgcdc.capture.database import Connection, quote_identifier
from pgcdc.errors import SinkError
from pgcdc.sink.pg_table import staging
from pgcdc.sink.pg_table.fold import Bag, Fold, Keyed, Move, Patch, Row
from pgcdc.sink.pg_table.tables import SourceTable, TargetTable
from pgcdc.sink.pg_table.targets import Targets

__all__ = ["Groups", "RowFault", "Writer", "group_rows"]

STEADY_FLUSHES = 16
"""So many times a table is not tried with a plain COPY after one that met rows that were there."""


class RowFault(psycopg.DataError):
    """A row that cannot be applied, by our own judgement. The target was not asked, or had nothing against it."""

    sqlstate = "22000"

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Groups:
    """Rows by what becomes of them, and by their columns: each group is one statement."""

    def __init__(self) -> None:
        self.deletes: list[Collection[str | None]] = []
        """Keys; of a table without one, rows."""
        self.fresh: dict[tuple[str, ...], list[Row]] = {}
        """Rows that the target should not have."""
        self.puts: dict[tuple[str, ...], list[Row]] = {}
        self.patches: dict[tuple[str, ...], list[Row]] = {}
        self.delete_columns: tuple[str, ...] = ()

    @property
    def columns(self) -> dict[str, None]:
        """All columns that rows bring, in their order."""
        return dict.fromkeys(
            column for group in (self.fresh, self.puts, self.patches) for columns in group for column in columns
        )


def group_rows(fold: Fold) -> Iterable[Groups]:
    """The rows of a fold. More than one group of groups only for rows without a key, of which deletes have other columns."""
    groups = Groups()
    if isinstance(fold, Bag):
        for one in fold.inserted:
            groups.fresh.setdefault(tuple(one), []).append(one)
        by_columns: dict[tuple[str, ...], list[Collection[str | None]]] = {}
        for one in fold.deleted:
            by_columns.setdefault(tuple(one), []).append(one.values())
        for columns, rows in by_columns.items():
            gone = Groups()
            gone.delete_columns, gone.deletes = columns, rows
            yield gone
        yield groups
        return
    groups.delete_columns = fold.key
    is_single, stale = len(fold.key) == 1, fold.stale
    for key, row in fold.rows.items():
        if row is None:
            groups.deletes.append((key,) if is_single else key)
        elif type(row) is Patch:
            groups.patches.setdefault(tuple(row), []).append(row)
        else:
            kind = groups.puts if key in stale else groups.fresh
            columns = tuple(row)
            if columns in kind:
                kind[columns].append(row)
            else:
                kind[columns] = [row]
    yield groups


class Writer:
    """One session's way to the target's tables."""

    def __init__(self, conn: Connection, targets: Targets) -> None:
        self._conn = conn
        self._targets = targets
        self._staging = staging.Staging(conn)
        self._met: dict[tuple[str, str], int] = {}
        """How many times more a table is not tried with a plain COPY."""

    def begin(self) -> None:
        """A transaction begins."""
        self._staging.begin()

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
            for target in targets:
                self._conn.execute(f"DELETE FROM {target.sql}".encode())

    def write(self, source: SourceTable, fold: Fold) -> None:
        """Make the target's table what the fold says, as far as it says something."""
        for groups in group_rows(fold):
            columns = groups.columns
            target = self._find(source, list(columns), fold.key)
            if target is None:
                continue
            if groups.deletes:
                self._delete(target, groups, has_key=bool(fold.key))
            for names, rows in groups.puts.items():
                self._merge(target, names, rows, fold.key)
            for names, rows in groups.patches.items():
                self._patch(source, target, names, rows, fold.key)
            for names, rows in groups.fresh.items():
                self._insert(target, names, rows, fold.key)

    def _find(self, source: SourceTable, columns: list[str], key: tuple[str, ...]) -> TargetTable | None:
        """Where to write. A table that is not there has nothing to delete."""
        if columns:
            return self._targets.prepare(source, columns, key)
        return self._targets.of(source)

    def _delete(self, target: TargetTable, groups: Groups, *, has_key: bool) -> None:
        columns = target.writable(groups.delete_columns) if not has_key else groups.delete_columns
        rows = groups.deletes
        if len(columns) != len(groups.delete_columns):
            places = [groups.delete_columns.index(column) for column in columns]
            rows = [[list(row)[place] for place in places] for row in rows]
        name = self._staging.fill(target, columns, rows)
        write = staging.delete_statement if has_key else staging.delete_rows_statement
        self._conn.execute(write(target, name, columns).encode())

    def _merge(self, target: TargetTable, names: Sequence[str], rows: list[Row], key: Sequence[str]) -> None:
        columns = target.writable(names)
        name = self._staging.fill(target, columns, _values(rows, names, columns))
        self._conn.execute(staging.merge_statement(target, name, columns, key).encode())

    def _insert(self, target: TargetTable, names: Sequence[str], rows: list[Row], key: Sequence[str]) -> None:
        """Rows that should be new: if some are not, all of them are merged."""
        columns = target.writable(names)
        if not columns:
            raise RowFault("no_columns", f"rows of table {target.title} have no column that could be written")
        if key and (self._met.get(target.name, 0) or not target.is_unique(key)):
            self._met[target.name] = max(0, self._met.get(target.name, 0) - 1)
            self._merge(target, names, rows, key)
            return
        values = _values(rows, names, columns)
        if not key:
            staging.copy_rows(self._conn, target.sql, columns, values)
            return
        try:
            with self._conn.transaction():
                staging.copy_rows(self._conn, target.sql, columns, values)
        except (psycopg.errors.UniqueViolation, psycopg.errors.FeatureNotSupported):
            self._met[target.name] = STEADY_FLUSHES
            self._merge(target, names, rows, key)

    def _patch(
        self, source: SourceTable, target: TargetTable, names: Sequence[str], rows: list[Row], key: Sequence[str]
    ) -> None:
        columns = target.writable(names)
        name = self._staging.fill(target, columns, _values(rows, names, columns))
        done = self._conn.execute(staging.patch_statement(target, name, columns, key).encode())
        if done.rowcount < len(rows):
            raise missing_row(source, target)

    def take(
        self,
        source: SourceTable,
        kind: str,
        name: str,
        columns: Sequence[str],
        key: tuple[str, ...],
        rows: int,
    ) -> None:
        """Do with a staging table of an executor what its kind says, and drop it."""
        is_gone = kind in ("delete", "gone")
        target = self._find(source, [] if is_gone else list(columns), key)
        if target is not None:
            writable = target.writable(columns)
            done = self._take(target, kind, name, writable, key)
            if kind == "patch" and done < rows:
                raise missing_row(source, target)
        self._conn.execute(f"DROP TABLE {name}".encode())

    def _take(self, target: TargetTable, kind: str, name: str, columns: Sequence[str], key: tuple[str, ...]) -> int:
        if kind == "delete":
            statement = staging.delete_statement(target, name, key, cast=True)
        elif kind == "gone":
            statement = staging.delete_rows_statement(target, name, columns, cast=True)
        elif kind == "patch":
            statement = staging.patch_statement(target, name, columns, key, cast=True)
        else:
            statement = staging.merge_statement(target, name, columns, key, cast=True) if key else ""
        if kind == "fresh" and (not key or target.is_unique(key)):
            insert = staging.insert_statement(target, name, columns, cast=True)
            try:
                with self._conn.transaction():
                    return self._conn.execute(insert.encode()).rowcount
            except psycopg.errors.UniqueViolation:
                if not key:
                    raise
        return self._conn.execute(statement.encode()).rowcount

    def move(self, source: SourceTable, fold: Keyed, move: Move) -> None:
        """Give a row of the target another key, and its other new values."""
        target = self._targets.prepare(source, move.row, fold.key)
        columns = target.writable(move.row)
        sets = ", ".join(f"{quote_identifier(name)} = %s::{target.columns[name].type}" for name in columns)
        where = " AND ".join(f"{quote_identifier(name)} = %s::{target.columns[name].type}" for name in fold.key)
        values: list[Any] = [move.row[name] for name in columns] + [move.old[name] for name in fold.key]
        statement = f"UPDATE {target.sql} SET {sets} WHERE {where}"
        done = self._conn.execute(_keep_percent(statement, len(values)).encode(), values)
        if done.rowcount:
            return
        if move.is_partial:
            raise missing_row(source, target)
        fold.insert(move.row)


def _keep_percent(statement: str, count: int) -> str:
    """Names may have a percent sign, which stands for a parameter otherwise."""
    parts = statement.split("%s::")
    if len(parts) != count + 1:
        raise SinkError("a table or column of the target has %s:: in its name", "Map it to another name")
    return "%s::".join(part.replace("%", "%%") for part in parts)


def _values(rows: list[Row], names: Sequence[str], columns: Sequence[str]) -> Iterable[Collection[str | None]]:
    """The values of these columns; `names` are those that the rows have."""
    if len(names) == len(columns):
        return (row.values() for row in rows)
    return ([row[column] for column in columns] for row in rows)


def missing_row(source: SourceTable, target: TargetTable) -> RowFault:
    """The fault of an update that can only be applied to a row that is there."""
    return RowFault(
        "missing_row",
        f"an update of table {source.title} does not bring its long values (unchanged TOAST), and {target.title} does "
        "not have the row; take a snapshot of the table, or use --toast cache",
    )
