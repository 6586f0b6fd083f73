"""The tables that the stream has, as the stream describes them: for rows that are read from the tables themselves.

What is read must be what the stream would send: the columns and rows that the publications have, under the same name (of
a partitioned table the root's or the partitions', as the publication says), in the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pgcdc.core.relation import Column, Relation
from pgcdc.postgres.database import Connection, explain_errors, name_table, quote_qualified
from pgcdc.source.postgres.setup.rules import GENERATED_SINCE, RULES_SINCE

__all__ = ["PublishedTable", "find_published", "read_published"]


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """One table of the stream."""

    relation: Relation
    """As the stream's Relation message describes it."""
    kind: str
    """r, or p for the root of partitions."""
    key: tuple[str, ...]
    """Columns that tell its rows apart, in the order of their index: the stream has them in every old row. () if none do."""
    row_filter: str | None
    """Which rows are published, in SQL; None: all."""

    @property
    def title(self) -> str:
        """As the user writes it."""
        return name_table(self.relation.namespace, self.relation.name)

    @property
    def sql(self) -> str:
        """As SQL takes it."""
        return quote_qualified(self.relation.namespace, self.relation.name)

    @property
    def source(self) -> str:
        """What stands behind FROM: rows of tables that inherit from it are rows of those."""
        return self.sql if self.kind == "p" else f"ONLY {self.sql}"

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of its columns."""
        return tuple(column.name for column in self.relation.columns)


@explain_errors("read the published tables")
def read_published(conn: Connection, publications: Sequence[str], only: int = 0) -> list[PublishedTable]:
    """Every table that these publications have, by name; or only the one with this oid."""
    version = conn.info.server_version
    query = _TABLES.format(
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
        # The server sends what any of the publications has.
        filters = [row_filter, *([found[oid].row_filter] if oid in found else [])]
        either = None if None in filters else " OR ".join(f"({one})" for one in filters)
        found[oid] = PublishedTable(relation, kind, tuple(key) if has_key else (), either)
    return sorted(found.values(), key=lambda one: (one.relation.namespace, one.relation.name))


def find_published(conn: Connection, publications: Sequence[str], oid: int) -> PublishedTable | None:
    """One of them, by its oid."""
    return next(iter(read_published(conn, publications, oid)), None)


# The identity's columns come in every old row. Without one that is an index (full), those of the primary key do.
_TABLES = """
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
# By name, too: else the server makes the columns of all the other tables first.
_ONLY = """AND c.oid = %s AND p.tablename = (SELECT relname FROM pg_class WHERE oid = %s)"""
