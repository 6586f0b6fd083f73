"""Which tables there are to publish, and whether their updates and deletes can be.

Publishing updates of a table without replica identity makes the application's UPDATE fail. So a table counts as
identified only if that cannot happen: a primary key that is not deferrable, an identity index, or REPLICA IDENTITY
FULL. A partitioned table is judged by its primary key, which every later partition inherits, and by its present
partitions; identity settings of the root itself are not inherited.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from pgcdc.core.errors import SourceError
from pgcdc.postgres.database import Connection, name_table, quote_qualified, split_table
from pgcdc.postgres.selection import Selection

__all__ = ["Table", "choose_tables", "find_table", "read_tables", "split_by_identity"]

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


_TABLES = """
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
    return [Table(*(*fields, tuple(parents))) for *fields, parents in conn.execute(_TABLES).fetchall()]


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
