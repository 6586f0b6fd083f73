"""The catalog on TOAST: which values may be stored out of line, and whether a table is still the known one.

PostgreSQL toasts a row that is longer than about a quarter of a page, or that already has out-of-line values. All sizes
here are upper bounds, computed from the text we get. So a value may be kept for nothing, but every value that can come
as "unchanged" is kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pgcdc.core.errors import SourceError
from pgcdc.core.relation import Relation
from pgcdc.postgres.database import Connection, name_table, quote_qualified
from pgcdc.source.postgres.setup.guard import lost_on_error

POINTER_BYTES = 24  # A value no longer than a pointer stays in place
LONGER_IN_BINARY = 8  # The most binary bytes per byte of text (an array of int8: `1,`)
VARLENA_BYTES = 32  # Headers and alignment of a variable-length value, also in nested types

_FAMILY = """
WITH asked AS (SELECT unnest(%(oids)s::oid[]) AS oid),
family AS (
    SELECT oid AS root, oid FROM asked
    UNION SELECT a.oid, t.relid::oid FROM asked a CROSS JOIN LATERAL pg_partition_tree(a.oid::regclass) t)
"""
_COLUMNS = (
    _FAMILY
    + """
SELECT f.root::bigint, a.attname::text, max(a.attlen), bool_or(a.attstorage <> 'p'), bool_or(a.attstorage IN ('e', 'x')),
       bool_and(b.typcategory = 'S' OR b.typname IN ('bytea', 'json', 'xml')),
       min((SELECT o.option_value::int FROM pg_options_to_table(c.reloptions) o WHERE o.option_name = 'toast_tuple_target'))
FROM family f
JOIN pg_class c ON c.oid = f.oid
JOIN pg_attribute a ON a.attrelid = f.oid AND a.attnum > 0 AND NOT a.attisdropped
JOIN pg_type t ON t.oid = a.atttypid
JOIN pg_type b ON b.oid = CASE WHEN t.typbasetype <> 0 THEN t.typbasetype ELSE t.oid END
GROUP BY 1, 2
"""
)
# Everything that changes values without the stream showing it leaves a trace here: a rewrite of the table (ALTER COLUMN
# ... TYPE ... USING ...), and a period in which the table was unpublished.
_STAMPS = (
    _FAMILY
    + """
SELECT f.root::bigint, string_agg(
    f.oid || ':' || c.relfilenode || ':'
    || coalesce((SELECT string_agg(a.attnum || '.' || a.xmin, ',' ORDER BY a.attnum) FROM pg_attribute a
                 WHERE a.attrelid = f.oid AND a.attnum > 0), '')
    || ':' || coalesce((SELECT string_agg(r.oid::text, ',' ORDER BY r.oid) FROM pg_publication_rel r
                        WHERE r.prrelid = f.oid OR r.prrelid IN (SELECT pg_partition_ancestors(f.oid::regclass))), '')
    {namespace}, ';' ORDER BY f.oid)
FROM family f JOIN pg_class c ON c.oid = f.oid GROUP BY 1
"""
)
_NAMESPACE = """
    || ':' || coalesce((SELECT string_agg(s.oid::text, ',' ORDER BY s.oid) FROM pg_publication_namespace s
                        WHERE s.pnnspid = c.relnamespace), '')
"""
_PUBLICATIONS = """
SELECT coalesce(string_agg(oid || '.' || xmin, ',' ORDER BY oid), ''),
       coalesce(bool_and(NOT pubupdate OR (pubinsert AND pubdelete)), false)
FROM pg_publication WHERE pubname = ANY (%s)
"""
_SERVER = "SELECT current_setting('block_size')::int, current_setting('server_encoding') IN ('UTF8', 'SQL_ASCII')"
_PUBLISHED = """
SELECT c.oid::bigint FROM pg_publication_tables t JOIN pg_namespace n ON n.nspname = t.schemaname
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename WHERE t.pubname = ANY (%s)
"""
_NOT_FULL = """
WITH RECURSIVE published AS (
    SELECT DISTINCT c.oid FROM pg_publication_tables t
    JOIN pg_publication p ON p.pubname = t.pubname AND p.pubupdate
    JOIN pg_namespace n ON n.nspname = t.schemaname
    JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
    WHERE t.pubname = ANY (%s)),
family AS (SELECT oid FROM published UNION SELECT i.inhrelid FROM family f
           JOIN pg_inherits i ON i.inhparent = f.oid JOIN pg_class c ON c.oid = i.inhrelid AND c.relispartition)
SELECT n.nspname::text, c.relname::text, string_agg(a.attname, ', ' ORDER BY a.attnum)::text
FROM family f JOIN pg_class c ON c.oid = f.oid AND c.relkind = 'r' AND c.relreplident <> 'f'
JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attlen = -1 AND a.attstorage <> 'p'
GROUP BY 1, 2 ORDER BY 1, 2
"""


def alter_to_full(schema: str, table: str) -> str:
    """The statement that makes PostgreSQL send complete old rows."""
    return f"ALTER TABLE {quote_qualified(schema, table)} REPLICA IDENTITY FULL;"


def check_full(conn: Connection, publications: Sequence[str]) -> None:
    """Raise unless every published table with possible out-of-line values sends its complete old rows."""
    rows = conn.execute(_NOT_FULL, [list(publications)]).fetchall()
    if rows:
        shown = ", ".join(f"{name_table(schema, table)} ({columns})" for schema, table, columns in rows[:5])
        more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
        raise SourceError(
            
            "--toast full needs REPLICA IDENTITY FULL for tables with values that may be stored out of line: "
            f"{shown}{more}",
            "Run " + " ".join(alter_to_full(schema, table) for schema, table, _ in rows)
            + " Or use --toast cache or --toast mark",
        )  # fmt: skip


def check_cacheable(conn: Connection, publications: Sequence[str]) -> None:
    """Raise if rows may come back without the stream showing it: a publication of updates without inserts or deletes."""
    row = conn.execute(_PUBLICATIONS, [list(publications)]).fetchone()
    if row is not None and row[0] and not row[1]:
        names = ", ".join(publications)
        raise SourceError(
            f"--toast cache needs publications that publish inserts and deletes wherever they publish updates: {names}",
            "Run ALTER PUBLICATION ... SET (publish = 'insert, update, delete, truncate'), or use --toast mark",
        )


@dataclass(frozen=True, slots=True)
class TableFacts:
    """The catalog's current facts about one table (with its partitions)."""

    stamp: str
    columns: Mapping[str, tuple[int, bool, bool, bool]] = field(default_factory=dict)
    """attlen; whether it is TOASTable; whether it is moved out of line before MAIN columns; whether its text is as long
    as the binary form."""
    tuple_target: int | None = None


class ToastCatalog:
    """Reads the facts. On ConnectionLost nothing has happened, and they can be read again."""

    def __init__(self, publications: Sequence[str]) -> None:
        self._publications = list(publications)
        self.block_bytes = 8192
        self.is_utf8 = False

    def read_all(self, sql: Connection) -> tuple[dict[int, TableFacts], int]:
        """The facts about every published table, and an LSN taken after reading them."""
        with lost_on_error():
            oids = [row[0] for row in sql.execute(_PUBLISHED, [self._publications]).fetchall()]
            row = sql.execute(_SERVER).fetchone()
        assert row is not None
        self.block_bytes, self.is_utf8 = row
        return self.read(sql, oids)

    @lost_on_error()
    def read(self, sql: Connection, oids: Sequence[int]) -> tuple[dict[int, TableFacts], int]:
        asked: dict[str, Any] = {"oids": list(oids)}
        publications = sql.execute(_PUBLICATIONS, [self._publications]).fetchone()
        if not oids or publications is None or not publications[1]:
            return {}, 0
        namespace = _NAMESPACE if sql.info.server_version >= 150000 else ""
        stamps = sql.execute(_STAMPS.replace("{namespace}", namespace).encode(), asked).fetchall()
        columns: dict[int, dict[str, tuple[int, bool, bool, bool]]] = {}
        targets: dict[int, int] = {}
        for oid, name, length, toastable, first, as_text, target in sql.execute(_COLUMNS.encode(), asked).fetchall():
            columns.setdefault(oid, {})[name] = (length, toastable, first, as_text)
            if target is not None:
                targets[oid] = min(target, targets.get(oid, target))
        facts = {
            oid: TableFacts(_digest(f"{publications[0]}|{stamp}"), columns.get(oid, {}), targets.get(oid))
            for oid, stamp in stamps
        }
        row = sql.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone()
        assert row is not None
        return facts, int(row[0])


@dataclass(frozen=True, slots=True)
class TableRules:
    """Which values of one shape of a table are worth keeping."""

    keys: tuple[int, ...]  # Columns of the replica identity; empty: rows cannot be identified, so nothing is kept
    factors: npt.NDArray[np.int64]
    constant: int
    toastable: npt.NDArray[np.bool_]
    main: npt.NDArray[np.bool_]  # TOASTable only in a row that does not fit into a page
    row_bytes: int  # Rows shorter than this keep their values in place
    page_bytes: int

    @classmethod
    def make(cls, relation: Relation, facts: TableFacts, *, block_bytes: int, is_utf8: bool) -> TableRules:
        unknown = (-1, True, True, False)
        known = [facts.columns.get(column.name, unknown) for column in relation.columns]
        lengths, toastable, first, as_text = np.array(known, np.int64).reshape(-1, 4).T
        is_open = lengths == -1
        text = 1 if is_utf8 else 2  # some encodings need more bytes than UTF-8
        sizes = np.where(is_open, VARLENA_BYTES, np.maximum(lengths, 8) + 8)
        quarter = (block_bytes - 40) // 4 // 8 * 8
        keys = tuple(number for number, column in enumerate(relation.columns) if column.is_key)
        return cls(
            keys if relation.replica_identity in ("d", "i") else (),
            np.where(is_open, np.where(as_text, text, LONGER_IN_BINARY), 0),
            24 + len(known) // 8 + 8 + int(sizes.sum()),
            is_open & (toastable != 0),
            first == 0,
            min(quarter, facts.tuple_target or quarter),
            block_bytes - 64,
        )

    def is_long(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which rows may have out-of-line values, by the lengths of their texts."""
        found: npt.NDArray[np.bool_] = lengths @ self.factors + self.constant > self.row_bytes
        return found

    def worth_keeping(self, lengths: npt.NDArray[np.int64], is_long: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Which values of these rows may be out of line."""
        fits = lengths @ self.factors + self.constant <= self.page_bytes
        found: npt.NDArray[np.bool_] = self.toastable & (lengths * self.factors + 4 > POINTER_BYTES) & is_long[:, None]
        return found & ~(self.main & fits[:, None])


def shape_of(relation: Relation) -> str:
    """A name for a shape, the same in every run."""
    return _digest(json.dumps(relation.to_json()))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
