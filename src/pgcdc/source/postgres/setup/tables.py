"""Which tables there are to publish, and whether their updates and deletes can be.

Publishing updates of a table without replica identity makes the application's UPDATE fail. So a table counts as
identified only if that cannot happen: a primary key that is not deferrable, an identity index, or REPLICA IDENTITY
FULL. A partitioned table is judged by its primary key, which every later partition inherits, and by its present
partitions; identity settings of the root itself are not inherited.
"""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg

from pgcdc.core.errors import SourceError
from pgcdc.core.relation import Column, Relation
from pgcdc.postgres.database import (
    Connection,
    execute_one,
    explain_errors,
    name_table,
    quote_identifier,
    quote_qualified,
    split_table,
)  # fmt: skip
from pgcdc.postgres.selection import Rule, Selection

RULES_SINCE = 150000
GENERATED_SINCE = 180000

_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table", "S": "a sequence"}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the source database, as far as publishing it is concerned."""

    oid: int
    schema: str
    table: str
    kind: str
    """r (ordinary) or p (partitioned); others cannot be published."""
    persistence: str
    """p (permanent), u (unlogged) or t (temporary)."""
    is_partition: bool
    is_identified: bool
    """Updates and deletes may be published: by its own identity, and for a root by its primary key."""
    is_owned: bool
    """We have the rights of its owner, who alone may publish it."""
    of_extension: bool
    """An extension created it."""
    parents: tuple[int, ...]
    """The tables it inherits from, at any distance."""

    @property
    def name(self) -> str:
        """As the user writes it."""
        return name_table(self.schema, self.table)

    @property
    def sql(self) -> str:
        """As SQL takes it."""
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
    """Everything in the database that looks like a table, by name; not only what can be published."""
    return [Table(*(*fields, tuple(parents))) for *fields, parents in conn.execute(_EVERY).fetchall()]


def choose_tables(everything: Sequence[Table], selection: Selection, *, roots: bool = True) -> list[Table]:
    """The tables to publish: those named, with what inherits from them, or all (of some schemas) that are the user's.

    A partitioned table stands for its partitions; without `roots` (PostgreSQL 12) its partitions stand for it.
    """
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
    chosen: Sequence[Table], everything: Sequence[Table]
) -> tuple[list[Table], list[Table], list[Table]]:
    """Tables to publish in full; for inserts only; and those of the second whose updates will really be missing.

    A root that is not identified goes to the second, since the partitions to come may have no identity, but those of
    its partitions that have one go to the first: the server sends what any of the publications allows.
    """
    full: dict[int, Table] = {}
    inserts: list[Table] = []
    incomplete: list[Table] = []
    leaves = [leaf for leaf in everything if leaf.is_partition and leaf.kind == "r"]
    for table in chosen:
        partitions = [leaf for leaf in leaves if table.oid in leaf.parents] if table.kind == "p" else []
        if table.is_identified and all(leaf.is_identified for leaf in partitions):
            full[table.oid] = table
            continue
        inserts.append(table)
        full.update({leaf.oid: leaf for leaf in partitions if leaf.is_identified})
        if not partitions or not all(leaf.is_identified for leaf in partitions):
            incomplete.append(table)
    return list(full.values()), [table for table in inserts if table.oid not in full], incomplete


def _belongs_to_all(table: Table) -> bool:
    """Not ours, nor an extension's (which are often a superuser's, who alone could publish them)."""
    ours = table.table.startswith("pgcdc_")
    return not (ours or table.of_extension or table.is_partition) and _why_not(table) is None


def find_table(everything: Sequence[Table], name: str, flag: str = "--tables") -> Table:
    """The table that the user means by `name`, who gave it with `flag`; SourceError if it cannot be captured."""
    wanted = split_table(name)
    found = next((table for table in everything if (table.schema, table.table) == wanted), None)
    if found is None:
        hint = _suggest([table for table in everything if _why_not(table) is None], wanted[1], flag)
        raise SourceError(f"table {name_table(*wanted)} does not exist", hint)
    reason = _why_not(found)
    if reason is not None:
        raise SourceError(f"{found.name} is {reason}: its changes cannot be captured", f"Remove it from {flag}")
    return found


def _suggest(tables: Sequence[Table], name: str, flag: str) -> str:
    """The same name in another schema or other case, or the one most alike."""
    for table in tables:
        if table.table.lower() == name.lower():
            return f"Did you mean {table.name}?"
    by_text = {table.table.lower(): table for table in tables}
    close = difflib.get_close_matches(name.lower(), by_text, n=1)
    return f"Did you mean {by_text[close[0]].name}?" if close else f"Check {flag}: write table or schema.table"


def _why_not(table: Table) -> str | None:
    """Why its changes are not in the WAL for us, or None."""
    if table.schema in ("pg_catalog", "information_schema"):
        return "a system table"
    if table.kind not in ("r", "p"):
        return _KINDS.get(table.kind, "not a table")
    return {"u": "an unlogged table", "t": "a temporary table"}.get(table.persistence)


# --- as the stream describes them
#
# What is read of a table must be what the stream would send: the columns and rows that the publications have, under the
# same name (of a partitioned table the root's or the partitions', as the publication says), in the same shape.


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
        # The server sends what any of the publications has.
        filters = [row_filter, *([found[oid].row_filter] if oid in found else [])]
        either = None if None in filters else " OR ".join(f"({one})" for one in filters)
        found[oid] = PublishedTable(relation, kind, tuple(key) if has_key else (), either)
    return sorted(found.values(), key=lambda one: (one.relation.namespace, one.relation.name))


def find_published(conn: Connection, publications: Sequence[str], oid: int) -> PublishedTable | None:
    """One of them, by its oid."""
    return next(iter(read_published(conn, publications, oid)), None)


# The identity's columns come in every old row. Without one that is an index (full), those of the primary key do.
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
# By name, too: else the server makes the columns of all the other tables first.
_ONLY = """AND c.oid = %s AND p.tablename = (SELECT relname FROM pg_class WHERE oid = %s)"""


# --- row filters and column lists, as the server understands them
#
# What a rule means is asked of the server itself: a publication with nothing but this table is created and taken back at
# once. So a wrong rule is found before anything is altered, and two texts that mean the same are known to be the same.
#
# A filter that uses a column which is not in the table's replica identity, or a list that leaves one out, makes the
# *application's* UPDATE and DELETE fail. PostgreSQL does not refuse such a publication; we do.

_PROBE = f"pgcdc_probe_{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a membership publishes of its table, in the server's own words."""

    row_filter: str | None = None
    columns: str | None = None


_MEANINGS = """
SELECT r.prrelid::int8, pg_get_expr(r.prqual, r.prrelid), r.prattrs::text FROM pg_publication_rel r
JOIN pg_publication p ON p.oid = r.prpubid WHERE p.pubname = %s
"""

# The columns that the replica identity needs (none: all of them), those that the list has, and those that the filter uses.
_FIT = """
SELECT c.relreplident = 'f',
       ARRAY(SELECT a.attname::text FROM pg_index i, unnest(i.indkey) k JOIN pg_attribute a ON a.attrelid = %(oid)s
             AND a.attnum = k WHERE i.indrelid = %(oid)s AND CASE c.relreplident WHEN 'd' THEN i.indisprimary
             WHEN 'i' THEN i.indisreplident ELSE false END),
       ARRAY(SELECT a.attname::text FROM pg_depend d JOIN pg_attribute a ON a.attrelid = %(oid)s AND a.attnum = d.refobjsubid
             WHERE d.classid = 'pg_publication_rel'::regclass AND d.refobjid = %(oid)s AND d.refobjsubid > 0
             AND d.objid = (SELECT r.oid FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
                            WHERE p.pubname = %(probe)s AND r.prrelid = %(oid)s)),
       ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = %(oid)s AND a.attnum > 0
             AND NOT a.attisdropped AND a.attgenerated = '' ORDER BY a.attnum)
FROM pg_class c WHERE c.oid = %(oid)s
"""


def check_version(version: int, *, has_rules: bool, generated_columns: bool) -> None:
    """Raise SourceError for what this server does not have."""
    major = version // 10000
    if has_rules and version < RULES_SINCE:
        raise SourceError(
            f"row filters and column lists need PostgreSQL 15, and this is {major}",
            "Leave --row-filter and --columns out, and filter where the events are used",
        )
    if generated_columns and version < GENERATED_SINCE:
        raise SourceError(
            f"generated columns are published since PostgreSQL 18, and this is {major}",
            "Leave --generated-columns out, and compute them where the events are used",
        )


def read_meanings(conn: Connection, publication: str) -> dict[int, Meaning]:
    """What a publication has of each table, by the table's oid."""
    if conn.info.server_version < RULES_SINCE:
        return {}
    rows = conn.execute(_MEANINGS, [publication]).fetchall()
    return {oid: Meaning(row_filter, columns) for oid, row_filter, columns in rows}


def resolve(conn: Connection, table: Table, rule: Rule, *, with_updates: bool) -> Meaning:
    """What the rule means. Raises SourceError if the server refuses it, or would refuse the application's updates."""
    with conn.transaction(force_rollback=True):
        _probe(conn, table, rule)
        meaning = read_meanings(conn, _PROBE)
    if set(meaning) != {table.oid}:
        raise SourceError(f"the row filter of table {table.name} is more than one expression", _FILTER_ADVICE)
    if with_updates:
        with conn.transaction(force_rollback=True):
            _probe(conn, table, Rule(rule.row_filter))
            row = conn.execute(_FIT, {"oid": table.oid, "probe": _PROBE}).fetchone()
        assert row is not None
        _check_fit(table, rule, *row)
    return meaning[table.oid]


_FILTER_ADVICE = "Write an expression over the columns of the table: --row-filter 'orders=total > 100'"


def _probe(conn: Connection, table: Table, rule: Rule) -> None:
    statement = f"CREATE PUBLICATION {_PROBE} FOR TABLE ONLY {table.sql}{rule.to_sql()}"
    try:
        execute_one(conn, statement)
    except psycopg.errors.InsufficientPrivilege as error:
        text = " ".join(str(error.diag.message_primary).split())
        grant = f"GRANT CREATE ON DATABASE {quote_identifier(conn.info.dbname)} TO {quote_identifier(conn.info.user)}"
        message = f"no right to publish table {table.name} with a row filter or columns: {text}"
        raise SourceError(message, f"Run as the owner of table and database: {grant}; or use --publication") from None
    except (psycopg.ProgrammingError, psycopg.NotSupportedError, psycopg.DataError) as error:
        text = " ".join(str(error.diag.message_primary or error).split())
        detail = " ".join(str(error.diag.message_detail or "").split())
        reason = f"{text} ({detail.rstrip('.')})" if detail else text
        raise SourceError(f"what is wanted of table {table.name} is refused: {reason}", _advise(table, rule)) from None


def _advise(table: Table, rule: Rule) -> str:
    if table.kind == "p":
        return "Name its partitions in --tables, and give each of them its own --row-filter and --columns"
    return "Check --columns" if rule.columns and not rule.row_filter else _FILTER_ADVICE


def _check_fit(table: Table, rule: Rule, is_full: bool, keys: list[str], used: list[str], every: list[str]) -> None:
    if rule.row_filter and not is_full and (outside := [name for name in used if name not in keys]):
        raise SourceError(
            f"the row filter of table {table.name} uses {', '.join(outside)}, which the replica identity does not have: "
            "PostgreSQL would refuse the application's UPDATE and DELETE",
            f"Use only {', '.join(keys)}, or run ALTER TABLE {table.sql} REPLICA IDENTITY FULL",
        )
    needed = every if is_full else keys
    if rule.columns and (missing := [name for name in needed if name not in rule.columns]):
        raise SourceError(
            f"the columns of table {table.name} leave out {', '.join(missing)}, which the replica identity has: "
            "PostgreSQL would refuse the application's UPDATE and DELETE",
            f"Add {', '.join(missing)} to --columns",
        )
