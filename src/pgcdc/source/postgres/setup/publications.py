"""Publications: what the server sends to us.

Ours come in pairs: `<base>` with every operation for tables with a replica identity, `<base>_inserts` with inserts and
truncates for the others (see `tables`). Both are created at the start, even if one stays empty, because a publication
created after the slot cannot be used to read what the slot still holds. We never use FOR ALL TABLES: if a table without
a key were created later, the server would refuse its updates.

Ours carry a comment with the name of their slot. We never alter other publications of the same name, nor use one of
another slot: its pipeline would remove tables that this one needs. If somebody changed the operations of one of ours,
we do not repair it: that would hide missed changes (see `fingerprint`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from pgcdc.core.errors import SourceError
from pgcdc.postgres.database import Connection, execute_one, explain_errors, name_table, quote_identifier, quote_literal
from pgcdc.postgres.selection import Rule, Selection
from pgcdc.source.postgres.options import pair_of
from pgcdc.source.postgres.setup.fingerprint import OPERATIONS, OWNED, Fingerprint, read_fingerprint
from pgcdc.source.postgres.setup.tables import (
    GENERATED_SINCE,
    RULES_SINCE,
    Table,
    choose_tables,
    read_tables,
    split_by_identity,
)  # fmt: skip

INSERTS_ONLY = ("insert", "truncate")
_GENERATED = {"n": "none", "s": "stored"}

Rules = Mapping[tuple[str, str], Rule]


@dataclass(frozen=True, slots=True)
class PublicationInfo:
    """One publication and the tables it covers."""

    found: dict[str, Any]  # Its fingerprint
    tables: tuple[str, ...]
    """The tables as they appear in the stream (partitions rather than their root, unless `via_root`)."""
    inserts_only: tuple[str, ...] = ()  # Tables without updates and deletes, as the user names them: for the report
    changed: tuple[str, ...] = ()  # Changes just made to it other than its tables: for the report
    kept: tuple[str, ...] = ()  # Properties that remain different from what is wanted: for the report

    @property
    def name(self) -> str:
        return str(self.found["name"])


@explain_errors("read the publication")
def use_existing(conn: Connection, name: str, *, slot: str) -> PublicationInfo:
    """The publication that the user created. It is only read."""
    found = read_fingerprint(conn, [name])
    if not found:
        advice = f"Run CREATE PUBLICATION {quote_identifier(name)} FOR TABLE ...; or use --tables or --all-tables"
        raise SourceError(f"publication {name} does not exist in this database", advice)
    _check_owner(found[0], slot)
    tables = _sent(conn, name)
    return PublicationInfo(found[0], tables, () if {"update", "delete"} <= set(found[0]["publish"]) else tables)


def _sent(conn: Connection, name: str) -> tuple[str, ...]:
    query = "SELECT schemaname::text, tablename::text FROM pg_publication_tables WHERE pubname = %s ORDER BY 1, 2"
    return tuple(name_table(*row) for row in conn.execute(query, [name]).fetchall())


@explain_errors("create or change the publication")
def ensure(
    conn: Connection,
    base_name: str,
    selection: Selection,
    *,
    slot: str,
    review: bool = True,
    check: Callable[[], None] = lambda: None,
    before_commit: Callable[[Fingerprint], None] = lambda made: None,
) -> tuple[PublicationInfo, ...]:
    """Create our pair of publications for these tables, or alter what differs.

    They belong to the pipeline of this slot. Call this before the slot is created. A table that has gained a primary key
    since then moves to the first publication. Without `review` (while the pipeline runs) the row filters and columns of
    existing members are left alone. `check` runs on this connection after the changes, and may refuse: then nothing is
    changed. If something is altered, `before_commit` gets the new fingerprint while it can still be rolled back.
    """
    names = pair_of(base_name)
    if len(names[1].encode()) > 63:
        raise SourceError(f"publication name {base_name} is too long", "Use up to 55 bytes")
    rules, version = selection.rules(), conn.info.server_version
    check_version(version, has_rules=bool(rules), generated_columns=selection.generated_columns)
    changed: list[str] = []
    statements: list[str] = []
    with conn.transaction():
        # otherwise two of our processes would both create them
        conn.execute("SELECT pg_advisory_xact_lock(hashtext('pgcdc'), hashtext(%s))", [base_name])
        everything = read_tables(conn)
        _check_schemas(conn, selection)
        chosen = choose_tables(everything, selection, roots=version >= 130000)
        existing = {item["name"]: item for item in read_fingerprint(conn, names)}
        # A slot keeps the setting it started with.
        via_root = next(
            (item["via_root"] for item in existing.values()), selection.partition_root and version >= 130000
        )
        full, inserts, incomplete = split_by_identity(chosen, everything, via_root=via_root)
        if review:
            _check_rules(rules, [*full, *inserts])
        members = {name: read_meanings(conn, name) for name in names}
        if not review:
            # A table that has a rule and has gained a key stays: the next start checks whether the rule fits the key.
            stay = [one for one in full if one.oid in members[names[1]] and (one.schema, one.table) in rules]
            full, inserts = [one for one in full if one not in stay], inserts + stay
        for name, operations, wanted in zip(names, (OPERATIONS, INSERTS_ONLY), (full, inserts), strict=True):
            sql, found, now = quote_identifier(name), existing.get(name), members[name]
            generated = ("s" if selection.generated_columns else "n") if version >= GENERATED_SINCE else None
            if found is None:
                statements += _creation(sql, operations, slot, version, generated, via_root)
            else:
                _check_ours(found, operations, slot)
                if review and generated and found["generated"] != generated:
                    statements.append(
                        f"ALTER PUBLICATION {sql} SET (publish_generated_columns = {_GENERATED[generated]})"
                    )
                    changed.append(f"publication {name} sends generated columns: {_GENERATED[generated]}")
            meant = {
                one.oid: _meaning(conn, one, rules, operations, via_root)
                if review or one.oid not in now
                else now[one.oid]
                for one in wanted
            }
            replaced = [one for one in wanted if one.oid in now and now[one.oid] != meant[one.oid]]
            changed += [f"the row filter or columns of table {table.name} changed" for table in replaced]
            dropped = [one for one in everything if one.oid in now and one.oid not in meant]
            added = [one for one in wanted if one.oid not in now or one in replaced]
            if dropped or replaced:
                statements.append(f"ALTER PUBLICATION {sql} DROP TABLE {_list([*dropped, *replaced], {})}")
            if added:
                statements.append(f"ALTER PUBLICATION {sql} ADD TABLE {_list(added, rules)}")
        if statements:
            _execute(conn, statements, [*full, *inserts])
        check()
        made = read_fingerprint(conn, names)
        if statements:
            before_commit(made)
        sent = [_sent(conn, name) for name in names]
    told = tuple(table.name for table in incomplete)
    roots = [table.name for table in chosen if table.kind == "p"] if via_root != selection.partition_root else []
    names_of = "that of their root" if via_root else "their own names"
    kept = tuple(f"partitions of table {name} keep {names_of}, as when the slot was created" for name in roots)
    return PublicationInfo(made[0], sent[0], (), tuple(changed), kept), PublicationInfo(made[1], sent[1], told)


@explain_errors("drop the publication")
def drop_ours(conn: Connection, names: Sequence[str], *, slot: str) -> None:
    """Drop those of the named publications that belong to this slot's pipeline."""
    for found in read_fingerprint(conn, names):
        if found["owner"] == slot:
            conn.execute(f"DROP PUBLICATION IF EXISTS {quote_identifier(found['name'])}".encode())


def _check_owner(found: dict[str, Any], slot: str) -> None:
    name, owner = found["name"], found["owner"]
    if owner is not None and owner != slot:
        raise SourceError(
            f"publication {name} belongs to the pipeline of slot {owner}",
            f"Use another name with --publication. If that pipeline is gone: DROP PUBLICATION {quote_identifier(name)}",
        )


def _check_ours(found: dict[str, Any], operations: tuple[str, ...], slot: str) -> None:
    name, sql = found["name"], quote_identifier(found["name"])
    _check_owner(found, slot)
    if found["owner"] is None or found["all_tables"]:
        advice = f"Use it as it is with --publication {name}, or drop it: DROP PUBLICATION {sql}"
        raise SourceError(f"publication {name} exists and is not managed by pgcdc", advice)
    if found["publish"] != list(operations):
        advice = f"If the missed changes do not matter: DROP PUBLICATION {sql}, and start with a new slot"
        raise SourceError(f"publication {name} was changed: it publishes {', '.join(found['publish'])}", advice)


def _check_schemas(conn: Connection, selection: Selection) -> None:
    if not selection.schemas:
        return
    rows = conn.execute("SELECT nspname::text FROM pg_namespace WHERE nspname !~ '^pg_'").fetchall()
    known = sorted(row[0] for row in rows)
    for name in selection.schema_names:
        if name not in known:
            raise SourceError(f"schema {name} does not exist", f"Check --schemas. Existing schemas: {', '.join(known)}")


def _check_rules(rules: Rules, tables: Sequence[Table]) -> None:
    names = {(table.schema, table.table) for table in tables}
    for schema, table in rules:
        if (schema, table) not in names:
            raise SourceError(
                f"a row filter or columns are set for table {name_table(schema, table)}, which is not captured",
                "Check --row-filter and --columns: write table=... or schema.table=...",
            )


def _meaning(
    conn: Connection, table: Table, rules: Rules, operations: tuple[str, ...], via_root: bool = False
) -> Meaning:
    rule = rules.get((table.schema, table.table))
    with_updates = operations == OPERATIONS
    return resolve(conn, table, rule, with_updates=with_updates, via_root=via_root) if rule else Meaning()


def _creation(
    sql: str, operations: tuple[str, ...], slot: str, version: int, generated: str | None, via_root: bool
) -> Iterator[str]:
    options = f"publish = '{', '.join(operations)}'"
    if version >= 130000:
        options += f", publish_via_partition_root = {str(via_root).lower()}"
    if generated == "s":
        options += ", publish_generated_columns = stored"
    yield f"CREATE PUBLICATION {sql} WITH ({options})"
    yield f"COMMENT ON PUBLICATION {sql} IS {quote_literal(OWNED + slot)}"


def _list(tables: Sequence[Table], rules: Rules) -> str:
    # ONLY: inheriting tables are decided separately (they inherit no key)
    none = Rule()
    return ", ".join(f"ONLY {one.sql}{rules.get((one.schema, one.table), none).to_sql()}" for one in tables)


def _execute(conn: Connection, statements: Sequence[str], tables: Sequence[Table]) -> None:
    try:
        with conn.transaction():
            for statement in statements:
                execute_one(conn, statement)
    except psycopg.errors.InsufficientPrivilege as exc:
        raise _explain_rights(conn, str(exc.diag.message_primary), statements, tables) from None
    except psycopg.errors.ReadOnlySqlTransaction:
        raise SourceError(
            "this database is read-only: publications cannot be created or changed here",
            "Set default_transaction_read_only to off for this role, or create the publication and use --publication",
        ) from None


def _explain_rights(conn: Connection, text: str, statements: Sequence[str], tables: Sequence[Table]) -> SourceError:
    foreign = [table.name for table in tables if not table.is_owned]
    names = ", ".join(foreign[:5]) + (f" and {len(foreign) - 5} more" if len(foreign) > 5 else "")
    reason = f"the role does not own {names}" if foreign else text
    script = "; ".join(statement if len(statement) < 400 else statement[:400] + " ..." for statement in statements)
    grant = f"GRANT CREATE ON DATABASE {quote_identifier(conn.info.dbname)} TO {quote_identifier(conn.info.user)}"
    advice = (
        f"Run as a superuser: {script}; and use --publication" if foreign else f"Run as the database's owner: {grant}"
    )
    return SourceError(f"the role may not publish the tables: {reason}", advice)


# --- row filters and column lists, as the server understands them
#
# The server itself says what a rule means: we create a publication with only this table and roll it back. So a wrong
# rule is found before anything is altered, and equivalent rules are recognised.
#
# A filter that uses a column outside the table's replica identity, or a list that omits one of its columns, makes the
# *application's* UPDATE and DELETE fail. PostgreSQL does not refuse such a publication; we do.

_PROBE = f"pgcdc_probe_{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a membership publishes of its table, as the server states it."""

    row_filter: str | None = None
    columns: str | None = None


_MEANINGS = """
SELECT r.prrelid::int8, {} FROM pg_publication_rel r
JOIN pg_publication p ON p.oid = r.prpubid WHERE p.pubname = %s
"""

# The columns that the replica identity needs (none: all of them), those in the list, and those that the filter uses.
# The server checks the partition that contains the row.
_FIT = """
SELECT c.relreplident = 'f',
       ARRAY(SELECT a.attname::text FROM pg_index i, unnest(i.indkey) k JOIN pg_attribute a ON a.attrelid = c.oid
             AND a.attnum = k WHERE i.indrelid = c.oid AND CASE c.relreplident WHEN 'd' THEN i.indisprimary
             WHEN 'i' THEN i.indisreplident ELSE false END),
       ARRAY(SELECT a.attname::text FROM pg_depend d JOIN pg_attribute a ON a.attrelid = %(oid)s AND a.attnum = d.refobjsubid
             WHERE d.classid = 'pg_publication_rel'::regclass AND d.refobjid = %(oid)s AND d.refobjsubid > 0
             AND d.objid = (SELECT r.oid FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
                            WHERE p.pubname = %(probe)s AND r.prrelid = %(oid)s)),
       ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = %(oid)s AND a.attnum > 0
             AND NOT a.attisdropped AND a.attgenerated = '' ORDER BY a.attnum)
FROM pg_class c WHERE c.oid = %(oid)s OR c.relkind = 'r' AND c.oid IN (SELECT relid FROM pg_partition_tree(%(oid)s))
"""


def check_version(version: int, *, has_rules: bool, generated_columns: bool) -> None:
    """Raise SourceError if this server does not support what is needed."""
    major = version // 10000
    if has_rules and version < RULES_SINCE:
        raise SourceError(
            f"row filters and column lists need PostgreSQL 15, but this is {major}",
            "Remove --row-filter and --columns, and filter where the events are used",
        )
    if generated_columns and version < GENERATED_SINCE:
        raise SourceError(
            f"generated columns are published since PostgreSQL 18, but this is {major}",
            "Remove --generated-columns, and compute them where the events are used",
        )


def read_meanings(conn: Connection, publication: str) -> dict[int, Meaning]:
    """What a publication covers of each table, by oid."""
    meaning = "pg_get_expr(r.prqual, r.prrelid), r.prattrs::text"
    query = _MEANINGS.format(meaning if conn.info.server_version >= RULES_SINCE else "NULL, NULL")
    rows = conn.execute(query.encode(), [publication]).fetchall()
    return {oid: Meaning(row_filter, columns) for oid, row_filter, columns in rows}


def resolve(conn: Connection, table: Table, rule: Rule, *, with_updates: bool, via_root: bool = False) -> Meaning:
    """A rule's meaning. Raises SourceError if the server refuses it, or would refuse the application's updates."""
    with conn.transaction(force_rollback=True):
        _probe(conn, table, rule, via_root)
        meaning = read_meanings(conn, _PROBE)
    if set(meaning) != {table.oid}:
        raise SourceError(f"the row filter of table {table.name} is more than one expression", _FILTER_ADVICE)
    if with_updates:
        with conn.transaction(force_rollback=True):
            _probe(conn, table, Rule(rule.row_filter), via_root)
            rows = conn.execute(_FIT, {"oid": table.oid, "probe": _PROBE}).fetchall()
        for row in rows:
            _check_fit(table, rule, *row)
    return meaning[table.oid]


_FILTER_ADVICE = "Write an expression over the columns of the table: --row-filter 'orders=total > 100'"


def _probe(conn: Connection, table: Table, rule: Rule, via_root: bool) -> None:
    options = " WITH (publish_via_partition_root)" if via_root else ""
    statement = f"CREATE PUBLICATION {_PROBE} FOR TABLE ONLY {table.sql}{rule.to_sql()}{options}"
    try:
        execute_one(conn, statement)
    except psycopg.errors.InsufficientPrivilege as error:
        text = " ".join(str(error.diag.message_primary).split())
        grant = f"GRANT CREATE ON DATABASE {quote_identifier(conn.info.dbname)} TO {quote_identifier(conn.info.user)}"
        message = f"the role may not publish table {table.name} with a row filter or columns: {text}"
        raise SourceError(message, f"Run as the owner of table and database: {grant}; or use --publication") from None
    except (psycopg.ProgrammingError, psycopg.NotSupportedError, psycopg.DataError) as error:
        text = " ".join(str(error.diag.message_primary or error).split())
        detail = " ".join(str(error.diag.message_detail or "").split())
        reason = f"{text} ({detail.rstrip('.')})" if detail else text
        advice = _advise(table, rule, via_root)
        raise SourceError(
            f"PostgreSQL refuses the row filter or columns of table {table.name}: {reason}", advice
        ) from None


def _advise(table: Table, rule: Rule, via_root: bool) -> str:
    if table.kind == "p" and not via_root:
        return "Name its partitions in --tables, and give each of them its own --row-filter and --columns"
    return "Check --columns" if rule.columns and not rule.row_filter else _FILTER_ADVICE


def _check_fit(table: Table, rule: Rule, is_full: bool, keys: list[str], used: list[str], every: list[str]) -> None:
    if rule.row_filter and not is_full and (outside := [name for name in used if name not in keys]):
        raise SourceError(
            f"the row filter of table {table.name} uses {', '.join(outside)}, which the replica identity "
            "lacks: PostgreSQL would refuse the application's UPDATE and DELETE",
            f"Use only {', '.join(keys)}, or run ALTER TABLE {table.sql} REPLICA IDENTITY FULL",
        )
    needed = every if is_full else keys
    if rule.columns and (missing := [name for name in needed if name not in rule.columns]):
        raise SourceError(
            f"the columns of table {table.name} leave out {', '.join(missing)}, which the replica identity "
            "has: PostgreSQL would refuse the application's UPDATE and DELETE",
            f"Add {', '.join(missing)} to --columns",
        )
