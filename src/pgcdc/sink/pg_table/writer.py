"""Puts folded changes into the target's tables: in few statements, whatever their number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import psycopg

from pgcdc.core.errors import SinkError
from pgcdc.postgres.database import Connection, quote_identifier
from pgcdc.sink.pg_table import staging
from pgcdc.sink.pg_table.copy_text import read_value
from pgcdc.sink.pg_table.fold import Bag, Fold, Keyed, Late, Move, Patch, Row, values_of
from pgcdc.sink.pg_table.lines import Columns
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
        self.delete_columns: Columns = ()
        self.deletes: list[bytes] = []
        """Keys; of a table without one, or with one that is checked late, rows."""
        self.fresh: dict[Columns, list[bytes]] = {}
        """Rows that the target should not have."""
        self.puts: dict[Columns, list[bytes]] = {}
        self.patches: dict[Columns, list[bytes]] = {}

    @property
    def columns(self) -> list[str]:
        """All columns that rows bring, in their order."""
        groups = (self.fresh, self.puts, self.patches)
        return list(dict.fromkeys(column for group in groups for columns in group for column in columns))


def group_rows(fold: Fold) -> Iterable[Groups]:
    """The rows of a fold. Several of them only where whole rows are deleted, which may have different columns."""
    if isinstance(fold, Bag):
        return _group_bag(fold)
    return _group_late(fold) if isinstance(fold, Late) else [_group_keyed(fold)]


def _group_gone(rows: Iterable[Row]) -> Iterator[Groups]:
    gone: dict[Columns, list[bytes]] = {}
    for columns, line in rows:
        gone.setdefault(columns, []).append(line)
    for columns, lines in gone.items():
        groups = Groups()
        groups.delete_columns, groups.deletes = columns, lines
        yield groups


def _group_late(fold: Late) -> Iterator[Groups]:
    yield from _group_gone(gone for key, row in fold.rows.items() if row is None for gone in fold.gone[key])
    groups = _group_keyed(fold)
    groups.deletes = []
    yield groups


def _group_bag(fold: Bag) -> Iterator[Groups]:
    yield from _group_gone(fold.deleted)
    groups = Groups()
    for columns, line in fold.inserted:
        groups.fresh.setdefault(columns, []).append(line)
    yield groups


def _group_keyed(fold: Keyed) -> Groups:
    groups, stale = Groups(), fold.stale
    groups.delete_columns = fold.key
    kinds = groups.puts, groups.fresh
    last: Columns | None = None
    last_kind: dict[Columns, list[bytes]] = {}
    lines: list[bytes] = []
    for key, row in fold.rows.items():
        if row is None:
            groups.deletes.append(key)
            continue
        kind = groups.patches if type(row) is Patch else kinds[key not in stale]
        columns, line = row
        if columns is not last or kind is not last_kind:
            lines = kind.setdefault(columns, [])
            last, last_kind = columns, kind
        lines.append(line)
    return groups


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

    def write(self, source: SourceTable, fold: Fold) -> None:
        """Make the target's table what the fold says, as far as it says something."""
        for groups in group_rows(fold):
            target = self._find(source, groups.columns, fold.key, groups.delete_columns if groups.deletes else ())
            if target is None:
                continue
            if groups.deletes:
                self._delete(target, groups, fold.key)
            for columns, lines in groups.puts.items():
                self._merge(target, columns, lines, fold.key)
            for columns, lines in groups.patches.items():
                self._patch(source, target, columns, lines, fold.key)
            for columns, lines in groups.fresh.items():
                self._insert(target, columns, lines, fold.key)

    def _find(
        self, source: SourceTable, columns: Sequence[str], key: Columns, gone: Sequence[str]
    ) -> TargetTable | None:
        """Where to write. A table that is not there has nothing to delete; one that is has the columns of what goes."""
        if columns or self._targets.of(source) is not None:
            return self._targets.prepare(source, list(dict.fromkeys((*columns, *gone))), key)
        return None

    def _delete(self, target: TargetTable, groups: Groups, key: Columns) -> None:
        columns, lines = _writable(target, groups.delete_columns, groups.deletes)
        name = self._staging.fill(target, columns, lines)
        if key:
            self._run(staging.delete_statement(target, name, columns, key))
        else:
            self._run(staging.delete_rows_statement(target, name, columns))

    def _merge(self, target: TargetTable, names: Columns, rows: list[bytes], key: Columns) -> None:
        columns, lines = _writable(target, names, rows)
        name = self._staging.fill(target, columns, lines)
        if staging.fixed_columns(target, columns, key):
            self._run(staging.make_way_statement(target, name, columns, key))
        self._run(staging.merge_statement(target, name, columns, key))

    def _insert(self, target: TargetTable, names: Columns, rows: list[bytes], key: Columns) -> None:
        """Rows that should be new: if some are not, all of them are merged."""
        columns, lines = _writable(target, names, rows)
        if not columns:
            raise RowFault("no_columns", f"rows of table {target.title} have no column that could be written")
        if key and (self._met.get(target.name, 0) or not target.is_unique(key)):
            self._met[target.name] = max(0, self._met.get(target.name, 0) - 1)
            self._merge(target, names, rows, key)
            return
        if not key:
            staging.copy_rows(self._conn, target.sql, columns, lines)
            return
        try:
            with self._conn.transaction():
                staging.copy_rows(self._conn, target.sql, columns, lines)
        except (psycopg.errors.UniqueViolation, psycopg.errors.FeatureNotSupported):
            self._met[target.name] = STEADY_FLUSHES
            self._merge(target, names, rows, key)

    def _patch(self, source: SourceTable, target: TargetTable, names: Columns, rows: list[bytes], key: Columns) -> None:
        columns, lines = _writable(target, names, rows)
        name = self._staging.fill(target, columns, lines)
        if self._run(staging.patch_statement(target, name, columns, key)) < len(rows):
            raise missing_row(source, target)

    def _run(self, statement: str) -> int:
        """Planned each time: tables grow, and a plan for a small one would be kept."""
        return self._conn.execute(statement.encode(), prepare=False).rowcount

    def move(self, source: SourceTable, fold: Keyed, move: Move) -> None:
        """Give a row of the target another key, and its other new values."""
        row = values_of(*move.row)
        target = self._targets.prepare(source, row, fold.key)
        columns = target.writable(row)
        sets = ", ".join(f"{quote_identifier(name)} = %s::{target.columns[name].type}" for name in columns)
        where = " AND ".join(f"{quote_identifier(name)} = %s::{target.columns[name].type}" for name in fold.key)
        values = [read_value(row[name]) for name in columns] + [move.old[name] for name in fold.key]
        statement = f"UPDATE {target.sql} SET {sets} WHERE {where}"
        done = self._conn.execute(_keep_percent(statement, len(values)).encode(), values)
        if done.rowcount:
            return
        if move.is_partial:
            raise missing_row(source, target)
        fold.insert(*move.row)


def _keep_percent(statement: str, count: int) -> str:
    """Names may have a percent sign, which stands for a parameter otherwise."""
    parts = statement.split("%s::")
    if len(parts) != count + 1:
        raise SinkError("a table or column of the target has %s:: in its name", "Map it to another name")
    return "%s::".join(part.replace("%", "%%") for part in parts)


def _writable(target: TargetTable, names: Columns, lines: list[bytes]) -> tuple[list[str], list[bytes]]:
    """Columns and lines without what the target computes itself."""
    columns = target.writable(names)
    if len(columns) == len(names):
        return columns, lines
    places = [names.index(column) for column in columns]
    split = (line.split(b"\t") for line in lines)
    return columns, [b"\t".join([values[place] for place in places]) for values in split]


def missing_row(source: SourceTable, target: TargetTable) -> RowFault:
    """The fault of an update that can only be applied to a row that is there."""
    return RowFault(
        "missing_row",
        f"an update of table {source.title} does not bring its long values (unchanged TOAST), and {target.title} does "
        "not have the row; take a snapshot of the table, or use --toast cache",
    )
