"""Writes folded changes to the target's tables in few statements.

Rows go by COPY to a temporary table with the target's types, from which a statement writes them. Rows that should be
new go straight to the target's table.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.postgres.database import Connection, quote_identifier, quote_literal
from pgcdc.sink.pg_table.fold import Folded, Rows
from pgcdc.sink.pg_table.tables import SourceTable, Targets, TargetTable
from pgcdc.sink.pg_table.target import RowFault

MERGE_TELLS_SINCE = 170000  # The first version whose MERGE reports what it did
MOST_TABLES = 32  # The most staging tables of a session: each commit empties all of them, at 0.4 ms each
PIECE_BYTES = 1 << 19  # Small enough that the server reads the first rows while we write the last
_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
_REFERRED = (psycopg.errors.ForeignKeyViolation, psycopg.errors.RestrictViolation)


class Writer:
    """Writes to the target's tables through one session."""

    def __init__(self, conn: Connection, targets: Targets) -> None:
        self._conn, self.targets = conn, targets
        self._staging: set[str] = set()  # The temporary tables of this session that we know
        self._used: set[str] = set()  # The ones with rows of this transaction
        self._met: set[tuple[str, str]] = set()
        """Tables where rows that should have been new already existed. They get no plain COPY again."""
        self.missed: Counter[str] = Counter()  # By table: missing rows that were to be updated or deleted

    def begin(self) -> None:
        """Start a transaction, in which temporary tables are empty."""
        self._used.clear()

    def forget(self, source: SourceTable) -> None:
        """The table was emptied, so its rows are new again."""
        self._met.discard(self.targets.name_of(source.name))

    def truncate(self, sources: Iterable[SourceTable]) -> None:
        """Empty all these tables together, since they may reference each other."""
        targets = [target for source in sources if (target := self.targets.of(source)) is not None]
        if not targets:
            return
        try:
            self.targets.truncate(targets)
        except psycopg.errors.FeatureNotSupported:  # a table that refers to one of these stays
            self._empty(targets)

    def _empty(self, targets: list[TargetTable]) -> None:
        """Delete all rows, referencing tables first."""
        for tries_left in range(len(targets) - 1, -1, -1):
            for target in list(targets):
                try:
                    with self._conn.transaction():
                        self._run(f"DELETE FROM {target.sql}")
                    targets.remove(target)
                except _REFERRED:
                    if not tries_left:
                        raise

    def write(self, source: SourceTable, folded: Folded, key: tuple[str, ...]) -> None:
        """Apply the fold to the target's table."""
        gone = [rows for rows in (folded.gone, folded.undone) if rows is not None]
        if not folded.columns and self.targets.of(source) is None:
            self._miss(source, len(folded.gone or ()))
            return  # a missing table has nothing to delete
        columns = dict.fromkeys([*folded.columns, *(name for rows in gone for name in rows.columns)])
        target = self.targets.prepare(source, list(columns), key)
        if folded.gone is not None:
            self._miss(source, len(folded.gone) - self._delete(target, folded.gone, key))
        if folded.undone is not None:
            self._delete(target, folded.undone, key)
        if folded.puts is not None:
            self._miss(source, folded.expected - self._put(target, folded.puts, key))
        for rows in folded.patches:
            stage, names = self._stage(target, rows)
            if self._run(_patch(target, stage, names, key)) < len(rows):
                raise self.missing_row(source)
        if folded.fresh is not None:
            self._insert(target, folded.fresh, key)

    def resize(self, source: SourceTable, more: int) -> None:
        """Add rows to a table without columns, or delete that many of its rows."""
        table = self.targets.prepare(source, [], ()).sql
        if more > 0:
            self._run(f"INSERT INTO {table} SELECT FROM generate_series(1, {more})")
        elif more < 0:
            some = f"SELECT tableoid, ctid FROM {table} LIMIT {-more}"
            self._miss(source, -more - self._run(f"DELETE FROM {table} WHERE (tableoid, ctid) IN ({some})"))

    def _miss(self, source: SourceTable, count: int) -> None:
        # A row with a deferrable key may have been replaced in an earlier part of its transaction.
        if count > 0 and not source.is_key_deferrable:
            self.missed[source.title] += count

    def _delete(self, target: TargetTable, rows: Rows, key: tuple[str, ...]) -> int:
        stage, columns = self._stage(target, rows)
        return self._run(_delete(target, stage, columns, key) if key else _delete_rows(target, stage, columns))

    def _put(self, target: TargetTable, rows: Rows, key: tuple[str, ...]) -> int:
        """Update rows and insert the missing ones. Returns how many existed."""
        stage, columns = self._stage(target, rows)
        made_way = self._run(_make_way(target, stage, columns, key)) if _fixed(target, columns, key) else 0
        if self._conn.info.server_version >= MERGE_TELLS_SINCE:
            merge = f"WITH m AS ({_merge(target, stage, columns, key)} RETURNING merge_action() AS did)"
            counted = f"{merge} SELECT count(*) FILTER (WHERE did = 'INSERT') FROM m"
            found = self._conn.execute(counted.encode(), prepare=False).fetchone()
            return len(rows) - int(found[0] if found else 0) + made_way
        sets, updated = _sets(target, columns, key), 0
        if sets:
            updated = self._run(f"UPDATE {target.sql} AS t SET {sets} FROM {stage} AS s WHERE {_matches(key)}")
        if updated < len(rows):
            inserted = self._run(_insert_missing(target, stage, columns, key))
            updated = updated if sets else len(rows) - inserted
        return updated + made_way

    def _merge(self, target: TargetTable, rows: Rows, key: tuple[str, ...]) -> None:
        stage, columns = self._stage(target, rows)
        if _fixed(target, columns, key):
            self._run(_make_way(target, stage, columns, key))
        self._run(_merge(target, stage, columns, key))

    def _insert(self, target: TargetTable, rows: Rows, key: tuple[str, ...]) -> None:
        """Insert rows that should be new. If some already exist, merge all of them."""
        new = rows.only(target.writable(rows.columns))
        if not new.columns:
            raise RowFault("no_columns", f"rows of table {target.title} have no column that could be written")
        if not key:
            copy_rows(self._conn, target.sql, new)
            return
        if target.name not in self._met and target.is_unique(key):
            try:
                with self._conn.transaction():
                    copy_rows(self._conn, target.sql, new)
                return
            except (psycopg.errors.UniqueViolation, psycopg.errors.FeatureNotSupported):
                self._met.add(target.name)
        self._merge(target, rows, key)

    def move(self, source: SourceTable, old: dict[str, str | None], row: dict[str, str | None]) -> bool:
        """Give a target row another key and its other new values. Returns whether the row existed."""
        target = self.targets.prepare(source, row, tuple(old))

        def terms(values: dict[str, str | None], names: Iterable[str]) -> list[str]:
            texts = {name: "NULL" if (one := values[name]) is None else quote_literal(one) for name in names}
            return [f"{quote_identifier(name)} = {text}::{target.columns[name].type}" for name, text in texts.items()]

        sets, where = ", ".join(terms(row, target.writable(row))), " AND ".join(terms(old, old))
        return self._run(f"UPDATE {target.sql} SET {sets} WHERE {where}") > 0

    def missing_row(self, source: SourceTable) -> RowFault:
        """The fault of an update that needs an existing row."""
        target = self.targets.of(source)
        return RowFault(
            "missing_row",
            f"an update of table {source.title} does not bring its long values (unchanged TOAST), and "
            f"{target.title if target else 'the target'} does not have the row; take a snapshot of the table, or use "
            "--toast cache",
        )

    def _run(self, statement: str) -> int:
        """Run a statement without a prepared plan: tables grow, and a plan made for a small one would be kept."""
        return self._conn.execute(statement.encode(), prepare=False).rowcount

    def _stage(self, target: TargetTable, rows: Rows) -> tuple[str, tuple[str, ...]]:
        """Put rows into a temporary table that has only the target's types. Returns its SQL name and columns.

        The name is derived from the columns, because after a rollback we do not know which tables exist.
        """
        rows = rows.only(target.writable(rows.columns))
        columns = ", ".join(f"{quote_identifier(name)} {target.columns[name].type}" for name in rows.columns)
        name = f"pgcdc_stage_{hashlib.sha256(columns.encode()).hexdigest()[:16]}"
        is_known = name in self._staging
        if not is_known:
            # Includes those that an earlier writer left in the session.
            query = "SELECT count(*) FROM pg_class WHERE relnamespace = pg_my_temp_schema() AND relkind = 'r'"
            found = self._conn.execute(query).fetchone()
            if found is not None and found[0] >= MOST_TABLES:
                self._conn.execute("DISCARD TEMP")
                self._staging.clear()
                self._used.clear()
            self._conn.execute(f"CREATE TEMP TABLE IF NOT EXISTS {name} ({columns}) ON COMMIT DELETE ROWS".encode())
            self._staging.add(name)
        if not is_known or name in self._used:
            self._conn.execute(f"TRUNCATE pg_temp.{name}".encode())
        self._used.add(name)
        copy_rows(self._conn, f"pg_temp.{name}", rows)
        return f"pg_temp.{name}", rows.columns


# --- COPY


def copy_rows(conn: Connection, table: str, rows: Rows) -> None:
    """COPY rows to a table; `table` is quoted for SQL."""
    listed = ", ".join(map(quote_identifier, rows.columns))
    with conn.cursor().copy(f"COPY {table} ({listed}) FROM STDIN".encode()) as copy:
        for piece in copy_texts(rows):
            copy.write(piece)


def copy_texts(rows: Rows) -> Iterator[memoryview]:
    """The rows in COPY's text format, some megabytes at a time."""
    values = list(map(_escaped, rows.values))
    if not values:
        return
    step = max(1, len(rows) * PIECE_BYTES // max(1, sum(one.nbytes for one in values)))
    for begin in range(0, len(rows), step):
        *most, last = (one.slice(begin, step) for one in values)
        lines = pc.binary_join_element_wise(*most, pc.binary_join_element_wise(last, "", "\n"), "\t")
        ends = np.frombuffer(lines.buffers()[1], np.int32)
        yield memoryview(lines.buffers()[2])[ends[lines.offset] : ends[lines.offset + len(lines)]]


def _escaped(values: pa.Array) -> pa.Array:
    """Texts as COPY writes them; columns without special characters are unchanged."""
    data = values.buffers()[2] if len(values) else None
    raw = data.to_pybytes() if data is not None else b""
    for letter, written in _ESCAPES.items():
        if letter.encode() in raw:
            values = pc.replace_substring(values, letter, written)
    return pc.fill_null(values, "\\N") if values.null_count else values


# --- statements: `t` is the target's table, `s` the temporary one


def _listed(columns: Iterable[str], side: str = "") -> str:
    return ", ".join(f"{side}{quote_identifier(column)}" for column in columns)


def _matches(key: Iterable[str]) -> str:
    return " AND ".join(f"t.{quote_identifier(column)} = s.{quote_identifier(column)}" for column in key)


def _fixed(target: TargetTable, columns: Iterable[str], key: Sequence[str]) -> list[str]:
    """Columns outside the key that can be inserted but never updated."""
    return [column for column in columns if target.columns[column].identity == "a" and column not in key]


def _sets(target: TargetTable, columns: Iterable[str], key: Sequence[str]) -> str:
    fixed = {*key, *_fixed(target, columns, key)}
    return ", ".join(f"{quote_identifier(one)} = s.{quote_identifier(one)}" for one in columns if one not in fixed)


def _merge(target: TargetTable, stage: str, columns: Sequence[str], key: Sequence[str]) -> str:
    """Update existing rows from the staging table, and insert the others."""
    sets = _sets(target, columns, key)
    return (
        f"MERGE INTO {target.sql} AS t USING {stage} AS s ON {_matches(key)} "
        f"WHEN MATCHED THEN {f'UPDATE SET {sets}' if sets else 'DO NOTHING'} "
        f"WHEN NOT MATCHED THEN INSERT ({_listed(columns)}) {_overriding(target, columns)}VALUES ({_listed(columns, 's.')})"
    )


def _insert_missing(target: TargetTable, stage: str, columns: Sequence[str], key: Sequence[str]) -> str:
    return (
        f"INSERT INTO {target.sql} ({_listed(columns)}) {_overriding(target, columns)}SELECT {_listed(columns, 's.')} "
        f"FROM {stage} AS s WHERE NOT EXISTS (SELECT FROM {target.sql} AS t WHERE {_matches(key)})"
    )


def _overriding(target: TargetTable, columns: Iterable[str]) -> str:
    return "OVERRIDING SYSTEM VALUE " if any(target.columns[column].identity for column in columns) else ""


def _make_way(target: TargetTable, stage: str, columns: Sequence[str], key: Sequence[str]) -> str:
    """Delete rows whose fixed columns would change, so that they can be inserted again."""
    fixed = map(quote_identifier, _fixed(target, columns, key))
    differs = " OR ".join(f"t.{one} IS DISTINCT FROM s.{one}" for one in fixed)
    return f"DELETE FROM {target.sql} AS t USING {stage} AS s WHERE {_matches(key)} AND ({differs})"


def _patch(target: TargetTable, stage: str, columns: Sequence[str], key: Sequence[str]) -> str:
    """Update rows with the staging table's values. A row whose fixed column differs does not match, so it is refused
    like a missing one."""
    sets = _sets(target, columns, key) or f"{quote_identifier(key[0])} = s.{quote_identifier(key[0])}"
    where = _matches([*key, *_fixed(target, columns, key)])
    return f"UPDATE {target.sql} AS t SET {sets} FROM {stage} AS s WHERE {where}"


def _row(columns: Iterable[str], side: str) -> str:
    return f"ROW({_listed(columns, side)})::text"


def _delete(target: TargetTable, stage: str, columns: Sequence[str], key: Sequence[str]) -> str:
    """Delete the rows with the staging table's keys; other columns must be equal, too."""
    where = _matches(key)
    if len(columns) > len(key):
        where += f" AND {_row(columns, 't.')} = {_row(columns, 's.')}"
    return f"DELETE FROM {target.sql} AS t USING {stage} AS s WHERE {where}"


def _delete_rows(target: TargetTable, stage: str, columns: Sequence[str]) -> str:
    """Delete one equal row for each row of the staging table. Compares texts as PostgreSQL writes them, so it handles
    NaN and json, and 1.0 differs from 1.00."""
    there, here = _row(columns, "t."), _row(columns, "s.")
    number = "row_number() OVER (PARTITION BY {})".format
    return (
        f"DELETE FROM {target.sql} AS d USING (SELECT t.tableoid AS home, t.ctid AS place, {there} AS content, "
        f"{number(there)} AS number FROM {target.sql} AS t "
        f"WHERE {there} IN (SELECT {here} FROM {stage} AS s)) AS f "
        f"JOIN (SELECT {here} AS content, {number(here)} AS number FROM {stage} AS s) AS w "
        "ON f.content = w.content AND f.number = w.number WHERE d.tableoid = f.home AND d.ctid = f.place"
    )
