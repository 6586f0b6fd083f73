"""Row filters and column lists, as the server understands them.

What a rule means is asked of the server itself: a publication with nothing but this table is created and taken back at
once. So a wrong rule is found before anything is altered, and two texts that mean the same are known to be the same.

A filter that uses a column which is not in the table's replica identity, or a list that leaves one out, makes the
*application's* UPDATE and DELETE fail. PostgreSQL does not refuse such a publication; we do.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import psycopg

from pgcdc.core.errors import SourceError
from pgcdc.postgres.database import Connection, execute_one, quote_identifier
from pgcdc.postgres.selection import Rule
from pgcdc.source.postgres.setup.tables import Table

__all__ = ["GENERATED_SINCE", "RULES_SINCE", "Meaning", "check_version", "read_meanings", "resolve"]

RULES_SINCE = 150000
GENERATED_SINCE = 180000
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
