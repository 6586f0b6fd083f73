"""Publications: what the server sends to us.

Ours come in pairs: `<base>` with every operation for tables that have a replica identity, `<base>_inserts` with inserts
and truncates for those that have none (see `tables`). Both are created at once, even if one stays empty, because a
publication created after the slot cannot be used to read what the slot still holds. Never FOR ALL TABLES: a table
without a key, created later, would have its updates refused.

Ours carry a comment with the name of their slot; others of the same name are never altered, nor used by another slot: its
pipeline would take tables out that this one needs. Nor is one of ours whose operations somebody changed
repaired: that would hide that changes were missed (see `fingerprint`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import psycopg

from pgcdc.core.errors import SourceError
from pgcdc.postgres.database import Connection, execute_one, explain_errors, name_table, quote_identifier, quote_literal
from pgcdc.postgres.selection import Rule, Selection
from pgcdc.source.postgres.setup.fingerprint import OPERATIONS, Fingerprint, read_fingerprint
from pgcdc.source.postgres.setup.tables import (
    GENERATED_SINCE,
    Meaning,
    Table,
    check_version,
    choose_tables,
    read_meanings,
    read_tables,
    resolve,
    split_by_identity,
)  # fmt: skip

COMMENT = "managed by pgcdc"
_OWNED = f"{COMMENT} for slot "
INSERTS_ONLY = ("insert", "truncate")


@dataclass(frozen=True, slots=True)
class PublicationInfo:
    """One publication and what it covers."""

    name: str
    oid: int
    operations: tuple[str, ...]
    """Those of insert, update, delete, truncate that it publishes."""
    via_root: bool
    """Changes of partitions come under the name of the partitioned table."""
    all_tables: bool
    owner: str | None
    """The slot whose pipeline made it and may alter it; empty for one of an older version, None if it is not ours."""
    tables: tuple[str, ...]
    """The tables as they will appear in the stream (partitions rather than their root, unless `via_root`)."""
    inserts_only: tuple[str, ...] = ()
    """Tables whose updates and deletes we do not get, as the user names them: to be said."""
    changed: tuple[str, ...] = ()
    """What we have just changed in it besides its tables: to be said."""
    generated: str = "none"
    """Which generated columns it publishes: none or stored."""


@explain_errors("read the publication")
def use_existing(conn: Connection, name: str, *, slot: str) -> PublicationInfo:
    """The publication that the user made. It is only read."""
    info = _read(conn, [name]).get(name)
    if info is None:
        advice = f"Run CREATE PUBLICATION {quote_identifier(name)} FOR TABLE ...; or use --tables or --all-tables"
        raise SourceError(f"publication {name} does not exist in this database", advice)
    _check_owner(info, slot)
    complete = {"update", "delete"} <= set(info.operations)
    return replace(info, inserts_only=() if complete else info.tables)


def pair_of(base_name: str) -> tuple[str, str]:
    """The names of our two publications."""
    return base_name, f"{base_name}_inserts"


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
    """Create our pair of publications, or bring them up to date, for these tables. Alters what differs.

    They belong to the pipeline of this slot. Call it before the slot is created. A table that has got a primary key
    since then moves to the first publication.
    Without `review` (while the pipeline runs) the row filters and columns of those that are there already are left alone.
    `check` is called on this connection when they are as they will be, and may refuse: then nothing is changed.
    If something is altered, `before_commit` hears what the fingerprint will be, while it can still be given up.
    """
    names = pair_of(base_name)
    if len(names[1].encode()) > 63:
        raise SourceError(f"publication name {base_name} is too long", "Use up to 55 bytes")
    rules, version = selection.rules(), conn.info.server_version
    check_version(version, has_rules=bool(rules), generated_columns=selection.generated_columns)
    changed: list[str] = []
    with conn.transaction():
        # two of us at the same time would both create them
        conn.execute("SELECT pg_advisory_xact_lock(hashtext('pgcdc'), hashtext(%s))", [base_name])
        everything = read_tables(conn)
        _check_schemas(conn, selection)
        chosen = choose_tables(everything, selection, roots=version >= 130000)
        full, inserts, incomplete = split_by_identity(chosen, everything)
        if review:
            _check_rules(rules, [*full, *inserts])
        existing = _read(conn, names)
        if not review and names[1] in existing:
            full, inserts = _keep_ruled(full, inserts, _members(conn, existing[names[1]].oid), rules)
        statements: list[str] = []
        for name, operations, wanted in zip(names, (OPERATIONS, INSERTS_ONLY), (full, inserts), strict=True):
            info = existing.get(name)
            generated = ("stored" if selection.generated_columns else "none") if version >= GENERATED_SINCE else None
            if info is None:
                for table in wanted:
                    _meaning(conn, table, rules, operations)
                statements += _creation(name, operations, wanted, rules, slot, version, generated)
                continue
            _check_ours(info, operations, slot)
            if not info.owner:
                statements.append(_comment(name, slot))
            if review and generated and info.generated != generated:
                statements.append(_set_generated(name, generated))
                changed.append(f"publication {name} sends generated columns: {generated}")
            members = _members(conn, info.oid)
            replaced = _review(conn, name, operations, wanted, members, rules) if review else []
            changed += [f"the row filter or columns of table {table.name} were changed" for table in replaced]
            for table in wanted:
                if table.oid not in members:
                    _meaning(conn, table, rules, operations)
            statements += _changes(
                name, wanted, members - {table.oid for table in replaced}, rules, everything, replaced
            )
        if statements:
            _execute(conn, statements, [*full, *inserts])
        check()
        if statements:
            before_commit(read_fingerprint(conn, names))
        result = _read(conn, names)
    told = tuple(table.name for table in incomplete)
    return replace(result[names[0]], changed=tuple(changed)), replace(result[names[1]], inserts_only=told)


@explain_errors("drop the publication")
def drop_ours(conn: Connection, names: Sequence[str], *, slot: str) -> None:
    """Drop those of these publications that belong to the pipeline of this slot."""
    for name, info in _read(conn, names).items():
        if info.owner == slot:
            conn.execute(f"DROP PUBLICATION IF EXISTS {quote_identifier(name)}".encode())


_READ = """
SELECT p.pubname::text, p.oid::int8, to_jsonb(p), COALESCE(obj_description(p.oid, 'pg_publication'), ''),
       ARRAY(SELECT ARRAY[t.schemaname::text, t.tablename::text] FROM pg_publication_tables t
             WHERE t.pubname = p.pubname ORDER BY t.schemaname, t.tablename)
FROM pg_publication p WHERE p.pubname = ANY (%s::text[])
"""


def _read(conn: Connection, names: Sequence[str]) -> dict[str, PublicationInfo]:
    return {
        name: PublicationInfo(
            name=name,
            oid=oid,
            operations=tuple(operation for operation in OPERATIONS if raw[f"pub{operation}"]),
            via_root=raw.get("pubviaroot") or False,
            all_tables=raw["puballtables"],
            owner=_owner(comment),
            tables=tuple(name_table(*table) for table in tables),
            generated="stored" if raw.get("pubgencols") == "s" else "none",
        )
        for name, oid, raw, comment, tables in conn.execute(_READ, [list(names)]).fetchall()
    }


def _owner(comment: str) -> str | None:
    if comment.startswith(_OWNED):
        return comment.removeprefix(_OWNED)
    return "" if comment == COMMENT else None


def _comment(name: str, slot: str) -> str:
    return f"COMMENT ON PUBLICATION {quote_identifier(name)} IS {quote_literal(_OWNED + slot)}"


def _check_owner(info: PublicationInfo, slot: str) -> None:
    if info.owner and info.owner != slot:
        raise SourceError(
            f"publication {info.name} belongs to the pipeline of slot {info.owner}, which changes it as it needs",
            f"Use another name with --publication. If that pipeline is gone: DROP PUBLICATION {quote_identifier(info.name)}",
        )


def _members(conn: Connection, oid: int) -> set[int]:
    rows = conn.execute("SELECT prrelid::int8 FROM pg_publication_rel WHERE prpubid = %s", [oid]).fetchall()
    return {row[0] for row in rows}


def _check_ours(info: PublicationInfo, operations: tuple[str, ...], slot: str) -> None:
    sql = quote_identifier(info.name)
    _check_owner(info, slot)
    if info.owner is None or info.all_tables:
        advice = f"Use it as it is with --publication {info.name}, or drop it: DROP PUBLICATION {sql}"
        raise SourceError(f"publication {info.name} exists and is not managed by pgcdc", advice)
    if info.operations != operations or info.via_root:
        advice = f"If the changes missed do not matter: DROP PUBLICATION {sql}, and start with a new slot"
        raise SourceError(f"publication {info.name} was changed: it publishes {', '.join(info.operations)}", advice)


def _check_schemas(conn: Connection, selection: Selection) -> None:
    if not selection.schemas:
        return
    rows = conn.execute("SELECT nspname::text FROM pg_namespace WHERE nspname !~ '^pg_'").fetchall()
    known = sorted(row[0] for row in rows)
    for name in selection.schema_names:
        if name not in known:
            raise SourceError(f"schema {name} does not exist", f"Check --schemas. There are: {', '.join(known)}")


Rules = Mapping[tuple[str, str], Rule]


def _check_rules(rules: Rules, tables: Sequence[Table]) -> None:
    names = {(table.schema, table.table) for table in tables}
    for schema, table in rules:
        if (schema, table) not in names:
            raise SourceError(
                f"a row filter or columns are given for table {name_table(schema, table)}, which is not captured",
                "Check --row-filter and --columns: write table=... or schema.table=...",
            )


def _keep_ruled(
    full: list[Table], inserts: list[Table], members: set[int], rules: Rules
) -> tuple[list[Table], list[Table]]:
    """A table with a rule that has got a key stays where it is: whether the rule fits to the key is for the next start."""
    stay = [table for table in full if table.oid in members and (table.schema, table.table) in rules]
    return [table for table in full if table not in stay], inserts + stay


def _meaning(conn: Connection, table: Table, rules: Rules, operations: tuple[str, ...]) -> Meaning:
    rule = rules.get((table.schema, table.table))
    return resolve(conn, table, rule, with_updates=operations == OPERATIONS) if rule else Meaning()


def _review(
    conn: Connection,
    name: str,
    operations: tuple[str, ...],
    wanted: Sequence[Table],
    members: set[int],
    rules: Rules,
) -> list[Table]:
    """Those tables that the publication has otherwise than is wanted now."""
    now = read_meanings(conn, name)
    both = [table for table in wanted if table.oid in members]
    return [table for table in both if now.get(table.oid, Meaning()) != _meaning(conn, table, rules, operations)]


def _set_generated(name: str, generated: str) -> str:
    return f"ALTER PUBLICATION {quote_identifier(name)} SET (publish_generated_columns = {generated})"


def _creation(
    name: str,
    operations: tuple[str, ...],
    tables: Sequence[Table],
    rules: Rules,
    slot: str,
    version: int,
    generated: str | None,
) -> list[str]:
    sql = quote_identifier(name)
    options = f"publish = '{', '.join(operations)}'"
    if version >= 130000:
        options += ", publish_via_partition_root = false"
    if generated == "stored":
        options += ", publish_generated_columns = stored"
    target = f" FOR TABLE {_list(tables, rules)}" if tables else ""
    return [
        f"CREATE PUBLICATION {sql}{target} WITH ({options})",
        _comment(name, slot),
    ]


def _changes(
    name: str,
    wanted: Sequence[Table],
    members: set[int],
    rules: Rules,
    everything: Sequence[Table],
    replaced: Sequence[Table],
) -> list[str]:
    oids = {table.oid for table in wanted}
    added = [table for table in wanted if table.oid not in members]
    dropped = [table for table in everything if table.oid in members and table.oid not in oids]
    alter = f"ALTER PUBLICATION {quote_identifier(name)}"
    statements = [f"{alter} DROP TABLE {_list([*dropped, *replaced], {})}"] if dropped or replaced else []
    return statements + ([f"{alter} ADD TABLE {_list(added, rules)}"] if added else [])


def _list(tables: Sequence[Table], rules: Rules) -> str:
    # ONLY: what inherits is judged by itself (it inherits no key)
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
        if conn.execute("SELECT pg_is_in_recovery()").fetchone() == (False,):
            raise SourceError(
                "this database is read-only: publications cannot be created or changed here",
                "Set default_transaction_read_only to off for this role, or create the publication and use --publication",
            ) from None
        advice = "Create the publication on the primary and use --publication"
        raise SourceError("this server is a standby: publications cannot be created or changed here", advice) from None


def _explain_rights(conn: Connection, text: str, statements: Sequence[str], tables: Sequence[Table]) -> SourceError:
    foreign = [table.name for table in tables if not table.is_owned]
    names = ", ".join(foreign[:5]) + (f" and {len(foreign) - 5} more" if len(foreign) > 5 else "")
    reason = f"the role does not own {names}" if foreign else text
    script = "; ".join(statement if len(statement) < 400 else statement[:400] + " ..." for statement in statements)
    grant = f"GRANT CREATE ON DATABASE {quote_identifier(conn.info.dbname)} TO {quote_identifier(conn.info.user)}"
    advice = (
        f"Run as a superuser: {script}; and use --publication" if foreign else f"Run as the database's owner: {grant}"
    )
    return SourceError(f"no right to publish the tables: {reason}", advice)
