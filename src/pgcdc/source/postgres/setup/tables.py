"""Which tables can be published, and whether with updates and deletes.

Publishing updates of a table without replica identity makes the application's UPDATE fail. So a table counts as
identified only if that cannot happen: it has a primary key that is not deferrable, an identity index, or REPLICA
IDENTITY FULL. A partitioned table is judged by its primary key, which later partitions inherit, and by its current
partitions; identity settings of the root are not inherited.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from pgcdc.core.errors import SourceError
from pgcdc.core.relation import Column, Relation
from pgcdc.postgres.database import (
    Connection,
    explain_errors,
    name_table,
    quote_qualified,
    split_table,
)  # fmt: skip
from pgcdc.postgres.selection import Selection

RULES_SINCE = 150000
GENERATED_SINCE = 180000

_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table", "S": "a sequence"}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the source database, as needed for publishing."""

    oid: int
    schema: str
    table: str
    kind: str  # r (ordinary) or p (partitioned); others cannot be published
    persistence: str  # p (permanent), u (unlogged) or t (temporary)
    is_partition: bool
    # Updates and deletes may be published: because of its own identity, or for a root its primary key
    is_identified: bool
    is_owned: bool  # We have the owner's rights, which publishing requires
    of_extension: bool  # An extension created it
    parents: tuple[int, ...]  # The tables it inherits from, directly or indirectly

    @property
    def name(self) -> str:
        return name_table(self.schema, self.table)

    @property
    def sql(self) -> str:
        return quote_qualified(self.schema, self.table)


_EVERY = """
WITH RECURSIVE ancestry AS (
    SELECT inhrelid, inhparent FROM pg_inherits
    UNION SELECT a.inhrelid, i.inhparent FROM ancestry a JOIN pg_inherits i ON i.inhrelid = a.inhparent)
SELECT c.oid, n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text, c.relispartition,
       (c.relreplident = 'f' AND c.relkind = 'r') OR EXISTS (
           SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate
           AND CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident AND c.relkind = 'r' END),
       pg_has_role(c.relowner, 'USAGE'),
       EXISTS (SELECT FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'e'),
       ARRAY(SELECT a.inhparent::int8 FROM ancestry a WHERE a.inhrelid = c.oid)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S') AND n.nspname !~ '^pg_toast'
ORDER BY n.nspname, c.relname
"""


def read_tables(conn: Connection) -> list[Table]:
    """All table-like objects of the database, by name; also those that cannot be published."""
    return [Table(*(*fields, tuple(parents))) for *fields, parents in conn.execute(_EVERY).fetchall()]


def choose_tables(everything: Sequence[Table], selection: Selection, *, roots: bool = True) -> list[Table]:
    """The tables to publish: those named, with inheriting ones, or all the user's (in some schemas). A partitioned
    table stands for its partitions; without `roots` (PostgreSQL 12) its partitions are listed instead."""
    if selection.is_open:
        schemas = selection.schema_names
        chosen = [t for t in everything if _belongs_to_all(t) and (selection.all_tables or t.schema in schemas)]
    else:
        chosen = [find_table(everything, name) for name in selection.tables]
    chosen += [find_table(everything, name, "--signal-table") for name in selection.also]
    oids = {table.oid for table in chosen}
    kinds = ("r", "p") if roots else ("r",)

    def is_wanted(table: Table) -> bool:
        inherits = bool(oids.intersection(table.parents)) and not (table.is_partition and roots)
        return table.kind in kinds and _why_not(table) is None and (table.oid in oids or inherits)

    return [table for table in everything if is_wanted(table)]


def split_by_identity(
    chosen: Sequence[Table], everything: Sequence[Table], *, via_root: bool
) -> tuple[list[Table], list[Table], list[Table]]:
    """Three lists: tables to publish in full, tables to publish for inserts only, and those of the second list whose
    updates will really be missing. An unidentified root goes to the second, since later partitions may have no
    identity. Without `via_root` its identified partitions go to the first: the server sends what any of the
    publications allows. With it there is one table, and either all its rows have a key or none do."""
    full: dict[int, Table] = {}
    inserts: list[Table] = []
    incomplete: list[Table] = []
    leaves = [leaf for leaf in everything if leaf.is_partition and leaf.kind == "r"]
    oids = {table.oid for table in chosen} if via_root else set()
    for table in chosen:
        if table.is_partition and oids.intersection(table.parents):
            continue  # its changes are sent as the root's
        partitions = [leaf for leaf in leaves if table.oid in leaf.parents] if table.kind == "p" else []
        if table.is_identified and all(leaf.is_identified for leaf in partitions):
            full[table.oid] = table
            continue
        inserts.append(table)
        if not via_root:
            full.update({leaf.oid: leaf for leaf in partitions if leaf.is_identified})
        if via_root or not partitions or not all(leaf.is_identified for leaf in partitions):
            incomplete.append(table)
    return list(full.values()), [table for table in inserts if table.oid not in full], incomplete


def _belongs_to_all(table: Table) -> bool:
    """Whether a table counts when all tables are wanted: not ours, and not an extension's (often owned by a superuser,
    who alone could publish it)."""
    ours = table.table.startswith("pgcdc_")
    return not (ours or table.of_extension or table.is_partition) and _why_not(table) is None


def find_table(everything: Sequence[Table], name: str, flag: str = "--tables") -> Table:
    """The table that `name`, given with `flag`, refers to. Raises SourceError if it cannot be captured."""
    wanted = split_table(name)
    found = next((table for table in everything if (table.schema, table.table) == wanted), None)
    if found is None:
        hint = _suggest([table for table in everything if _why_not(table) is None], wanted[1], flag)
        raise SourceError(f"table {name_table(*wanted)} does not exist", hint)
    reason = _why_not(found)
    if reason is not None:
        raise SourceError(f"{found.name} is {reason}, so its changes cannot be captured", f"Remove it from {flag}")
    return found


def _suggest(tables: Sequence[Table], name: str, flag: str) -> str:
    """The same name in another schema or case, or the closest match."""
    for table in tables:
        if table.table.lower() == name.lower():
            return f"Did you mean {table.name}?"
    by_text = {table.table.lower(): table for table in tables}
    close = difflib.get_close_matches(name.lower(), by_text, n=1)
    return f"Did you mean {by_text[close[0]].name}?" if close else f"Check {flag}: write table or schema.table"


def _why_not(table: Table) -> str | None:
    """Why we do not get its changes from the WAL, or None."""
    if table.schema in ("pg_catalog", "information_schema"):
        return "a system table"
    if table.kind not in ("r", "p"):
        return _KINDS.get(table.kind, "not a table")
    return {"u": "an unlogged table", "t": "a temporary table"}.get(table.persistence)


# --- as the stream describes them
#
# Rows read from a table must match the stream: the publications' columns and rows, under the same name (for a
# partitioned table the root's or the partitions', as published), in the same shape.


@dataclass(frozen=True, slots=True)
class PublishedTable:
    relation: Relation  # As the stream's Relation message describes it
    kind: str  # r, or p for the root of partitions
    key: tuple[str, ...]
    """Columns that identify its rows, in index order; the stream includes them in every old row. () if there are none."""
    row_filter: str | None  # Which rows are published, as an SQL condition; None: all

    @property
    def title(self) -> str:
        return name_table(self.relation.namespace, self.relation.name)

    @property
    def sql(self) -> str:
        return quote_qualified(self.relation.namespace, self.relation.name)

    @property
    def source(self) -> str:
        """The FROM clause: excludes rows of inheriting tables, which belong to those tables."""
        return self.sql if self.kind == "p" else f"ONLY {self.sql}"

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.relation.columns)


@explain_errors("read the published tables")
def read_published(conn: Connection, publications: Sequence[str], only: int = 0) -> list[PublishedTable]:
    """Every table of these publications, by name; or only the one with this oid."""
    version = conn.info.server_version
    query = _PUBLISHED.format(
        rules="p.attnames::text[], p.rowfilter" if version >= RULES_SINCE else "NULL::text[], NULL::text",
        generated="true" if version >= GENERATED_SINCE else "a.attgenerated = ''",
    )
    if only:
        query += _ONLY
    found: dict[int, PublishedTable] = {}
    for oid, schema, name, kind, identity, listed, row_filter, columns, key, keys in conn.execute(
        query.encode(), [list(publications), *([only, only] if only else [])]
    ).fetchall():
        names = set(listed) if listed is not None else None
        relation = Relation(
            oid,
            schema,
            name,
            identity,
            tuple(
                Column(column, type_oid, typmod, identity == "f" or column in keys)
                for column, type_oid, typmod in columns
                if names is None or column in names
            ),
        )
        has_key = bool(key) and set(key) <= {column.name for column in relation.columns}
        # The server sends a row that any of the publications includes.
        filters = [row_filter, *([found[oid].row_filter] if oid in found else [])]
        either = None if None in filters else " OR ".join(f"({one})" for one in filters)
        found[oid] = PublishedTable(relation, kind, tuple(key) if has_key else (), either)
    return sorted(found.values(), key=lambda one: (one.relation.namespace, one.relation.name))


def find_published(conn: Connection, publications: Sequence[str], oid: int) -> PublishedTable | None:
    return next(iter(read_published(conn, publications, oid)), None)


# The identity's columns are in every old row. If the identity is no index (FULL), those of the primary key are.
_PUBLISHED = """
SELECT c.oid::int8, n.nspname::text, c.relname::text, c.relkind::text, c.relreplident::text, {rules},
       (SELECT coalesce(json_agg(json_build_array(a.attname, a.atttypid::int8, a.atttypmod) ORDER BY a.attnum), '[]')
        FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND {generated}),
       ARRAY(SELECT a.attname::text FROM unnest(i.indkey::int2[]) WITH ORDINALITY k (number, place)
             JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.number
             WHERE k.place <= i.indnkeyatts ORDER BY k.place),
       ARRAY(SELECT a.attname::text FROM unnest(i.indkey::int2[]) WITH ORDINALITY k (number, place)
             JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.number WHERE k.place <= i.indnkeyatts)
FROM pg_publication_tables p
JOIN pg_namespace n ON n.nspname = p.schemaname
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = p.tablename
LEFT JOIN pg_index i ON i.indrelid = c.oid AND i.indisvalid AND CASE c.relreplident
    WHEN 'd' THEN i.indisprimary AND i.indimmediate WHEN 'f' THEN i.indisprimary WHEN 'i' THEN i.indisreplident END
WHERE p.pubname = ANY (%s)
"""
# Also filter by name: otherwise the server first computes the columns of all other tables.
_ONLY = """AND c.oid = %s AND p.tablename = (SELECT relname FROM pg_class WHERE oid = %s)"""


# --- their columns


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column in the current catalog."""

    name: str
    type_oid: int
    typmod: int
    ndims: int
    """Declared dimensions of an array. PostgreSQL does not enforce them, and some ways to create a table lose them:
    then 0."""
    number: int
    pg_type: str  # As in CREATE TABLE: `numeric(12,2)`
    not_null: bool
    is_key: bool  # Part of the replica identity, and so sent for deleted rows
    key_place: int | None  # Its index in the primary key, if any
    is_deferrable: bool  # Part of a deferrable primary key, which cannot be a replica identity
    generated: str
    """`s` (stored), `v` (virtual) or empty. Virtual columns are never in the stream; stored ones are optional."""
    is_readable: bool  # We have the right to read it
    missing: str | None = None
    """Its value in older rows, as text: the column was added with this constant as default."""
    since: str = ""  # The last transaction that changed its catalog entry

    @property
    def is_primary_key(self) -> bool:
        return self.key_place is not None


def read_columns(conn: Connection, oids: Sequence[int]) -> dict[int, list[TableColumn]]:
    """The live columns of these tables, in order."""
    found: dict[int, list[TableColumn]] = {}
    for oid, *fields in conn.execute(_COLUMNS, [list(oids)]).fetchall():
        found.setdefault(oid, []).append(TableColumn(*fields))
    return found


# Columns that an index merely includes belong to no key. A missing value is an array of one element. In the array's
# text form it would be quoted, and a box would look like several elements.
_COLUMNS = """
SELECT a.attrelid::int8, a.attname::text, a.atttypid::int8, a.atttypmod, a.attndims::int4, a.attnum::int4,
       format_type(a.atttypid, a.atttypmod), a.attnotnull,
       c.relreplident = 'f' OR coalesce(bool_or(i.indimmediate AND i.indisvalid AND CASE c.relreplident
           WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident END), false),
       max(array_position(i.indkey::int2[], a.attnum)) FILTER (WHERE i.indisprimary),
       coalesce(bool_or(NOT i.indimmediate) FILTER (WHERE i.indisprimary), false),
       a.attgenerated::text, has_column_privilege(a.attrelid, a.attnum, 'SELECT'),
       max(CASE WHEN a.atthasmissing THEN array_to_string(a.attmissingval, '') END), max(a.xmin::text)
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
LEFT JOIN pg_index i ON i.indrelid = c.oid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
WHERE c.oid = ANY (%s::int8[]::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
GROUP BY c.oid, a.attrelid, a.attname, a.atttypid, a.atttypmod, a.attndims, a.attnum, a.attnotnull, a.attgenerated
ORDER BY a.attrelid, a.attnum
"""
