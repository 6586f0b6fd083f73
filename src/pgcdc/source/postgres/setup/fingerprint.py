"""What must stay the same in the publications so that the stream has no gap.

A row of `pg_publication_rel` is never updated: a table that is removed and added again, or gets another row filter or
column list, has a new row with a new oid. So these oids show whether a table has been a member all along, with the same
settings (`pg_publication_namespace` does the same for schemas). Reading them takes one cheap query.

A dropped table has no changes to miss. But if another table now has its name, the user means that one. So we also keep
the names of members; those of dropped tables are kept until a table with that name is a member again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pgcdc.core.errors import GapError
from pgcdc.core.state import Identity
from pgcdc.postgres.database import Connection, explain_errors, name_table, quote_identifier
from pgcdc.postgres.selection import Selection
from pgcdc.source.postgres.options import PostgresOptions

Fingerprint = list[dict[str, Any]]  # One entry for each publication, as JSON

OWNED = "managed by pgcdc for slot "
"""The start of the comment on our publications; the slot's name follows. Only that slot's pipeline may alter them."""
OPERATIONS = ("insert", "update", "delete", "truncate")
SCHEMAS_SINCE = 150000


@dataclass(frozen=True, slots=True)
class SlotDetails:
    """The slot's details in an identity. Only this source reads them."""

    timeline: int
    publications: Fingerprint  # As of our last look, to notice when they are dropped or narrowed
    asked: dict[str, Any]  # The selection at the last start; it names no tables if the publication belongs to the user
    planned: Fingerprint | None = None
    """The change we are about to make: after a crash, the publications match either `publications` or this."""

    @classmethod
    def of(cls, identity: Identity) -> SlotDetails:
        """The details in this identity. Raises GapError if it belongs to another source."""
        if identity.kind != PostgresOptions.kind:
            raise GapError(
                f"this state directory belongs to a source of kind {identity.kind}, not {PostgresOptions.kind}",
                "Use its original settings, or another --state-dir",
            )
        return cls(**identity.details)

    def put_into(self, identity: Identity, **changes: Any) -> Identity:
        """The identity with these details, with some changes."""
        return replace(identity, details=asdict(replace(self, **changes)))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(item["name"] for item in self.publications)

    def as_before(self, options: PostgresOptions) -> PostgresOptions:
        """The options with what the slot already captures, for joining its capture."""
        asked = self.selection
        return options.but(**(dict(asked) if asked.names_tables else {"publication": self.names[0]}))

    @property
    def selection(self) -> Selection:
        """The last selection. If it is open, one table replacing another is normal."""
        return Selection.model_validate(self.asked)


def check_identity(known: Identity, system: str, timeline: int, database: str, slot: str) -> None:
    """Raise GapError if this state directory belongs to another server, database or slot."""
    if known.stream != slot:
        raise GapError(
            f"this state directory belongs to slot {known.stream!r}, not to {slot!r}",
            "Use a separate --state-dir for every slot",
        )
    if known.system != system:
        raise GapError(
            f"this is another server: its system identifier is {system}, but this state directory belongs to "
            f"{known.system}",
            "Check --db. If the database was restored or moved on purpose, let the targets follow it: pgcdc "
            "resync --new-slot",
        )
    if (before := SlotDetails.of(known).timeline) != timeline:
        raise GapError(
            f"the server is on timeline {timeline}, but this state directory was written on timeline "
            f"{before}: after a failover or point-in-time recovery, changes may be missing",
            "Bring the targets back to this server's state: pgcdc resync --new-slot",
        )
    if known.database != database:
        raise GapError(
            f"this state directory belongs to database {known.database!r}, not to {database!r}",
            "Check --db, or use another --state-dir",
        )


class Narrowed(GapError):
    """A publication sends less than before, or something different. The user may accept that."""


_ADVICE = (
    "If that was intended, continue with --accept-publication: changes not sent meanwhile are not delivered. "
    "Otherwise repair the targets with a new slot: pgcdc resync --new-slot"
)

_READ = """
SELECT p.pubname::text, p.oid::int8, to_jsonb(p), COALESCE(obj_description(p.oid, 'pg_publication'), ''),
       ARRAY(SELECT ARRAY[r.prrelid::int8, r.oid::int8] FROM pg_publication_rel r WHERE r.prpubid = p.oid ORDER BY r.oid),
       (SELECT COALESCE(jsonb_object_agg(c.oid::int8::text, jsonb_build_array(n.nspname, c.relname)), '{{}}')
        FROM pg_publication_rel r JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE r.prpubid = p.oid),
       {schemas}
FROM pg_publication p WHERE p.pubname = ANY (%s::text[])
"""
_SCHEMAS = (
    "ARRAY(SELECT ARRAY[n.pnnspid::int8, n.oid::int8] FROM pg_publication_namespace n WHERE n.pnpubid = p.oid "
    "ORDER BY n.oid)"
)
_EXISTING = """
SELECT 'tables', c.oid::int8, n.nspname::text, c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid::int8 = ANY (%(tables)s)
UNION ALL SELECT 'schemas', oid::int8, nspname::text, NULL FROM pg_namespace WHERE oid::int8 = ANY (%(schemas)s)
"""
_NAMED = """
SELECT n.nspname::text, c.relname::text, n.oid::int8, c.oid::int8 ||
       ARRAY(SELECT a.relid::oid::int8 FROM pg_partition_ancestors(c.oid) a)
FROM unnest(%s::text[], %s::text[]) w (schema, name)
JOIN pg_namespace n ON n.nspname = w.schema
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = w.name AND c.relkind IN ('r', 'p')
"""

Existing = Mapping[tuple[str, int], str]
"""Names of existing tables and schemas whose membership has ended, by kind and oid."""


@explain_errors("read the publications")
def read_fingerprint(conn: Connection, names: Sequence[str]) -> Fingerprint:
    """The current publications with these names; missing ones are omitted."""
    query = _READ.format(schemas=_SCHEMAS if conn.info.server_version >= SCHEMAS_SINCE else "'{}'::int8[]")
    found = {
        name: {
            "name": name,
            "oid": oid,
            "owner": comment.removeprefix(OWNED) if comment.startswith(OWNED) else None,
            "publish": [operation for operation in OPERATIONS if raw[f"pub{operation}"]],
            "via_root": raw.get("pubviaroot") or False,
            "all_tables": raw["puballtables"],
            "generated": raw.get("pubgencols", "n"),
            "tables": tables,
            "names": names_of,
            "schemas": schemas,
        }
        for name, oid, raw, comment, tables, names_of, schemas in conn.execute(query.encode(), [list(names)]).fetchall()
    }
    return [found[name] for name in names if name in found]


def check_unchanged(
    conn: Connection, known: Fingerprint, planned: Fingerprint | None = None, *, is_open: bool = False
) -> Fingerprint:
    """The current fingerprint, which may contain more than the known one. Raises GapError if it contains less.
    `planned` is an interrupted change of ours, which may or may not have been applied. With `is_open` new tables are
    added anyway: one table replacing another is no gap."""
    now = read_fingerprint(conn, [item["name"] for item in known])
    for expected in (planned, known):
        if expected is None:
            continue
        gap = compare(expected, now, _existing(conn, expected, now))
        if gap is None and not is_open:
            gap = _follow_names(conn, expected, now)
        if gap is None:
            return now
    assert gap is not None
    raise gap


@explain_errors("read the tables")
def _existing(conn: Connection, old: Fingerprint, now: Fingerprint) -> Existing:
    lost: dict[str, list[int]] = {}
    for kind in ("tables", "schemas"):
        rows = {row for item in now for _, row in item[kind]}
        lost[kind] = [member for item in old for member, row in item[kind] if row not in rows]
    found = conn.execute(_EXISTING, lost).fetchall() if any(lost.values()) else []
    return {(kind, oid): name_table(schema, table) if table else schema for kind, oid, schema, table in found}


@explain_errors("read the tables")
def _follow_names(conn: Connection, old: Fingerprint, now: Fingerprint) -> Narrowed | None:
    """The gap, if a table that is not published has the name of a member. Otherwise keeps the names of dropped tables
    in `now`."""
    current = {item["name"]: item for item in now}
    moved = {
        (schema, table): (item["name"], oid)
        for item in old
        for oid, (schema, table) in item["names"].items()
        if current[item["name"]]["names"].get(oid) != [schema, table]
    }
    if not moved:
        return None
    found = conn.execute(_NAMED, [[name[0] for name in moved], [name[1] for name in moved]]).fetchall()
    members = {oid for item in now for oid, _ in item["tables"]}
    schemas = {oid for item in now for oid, _ in item["schemas"]}
    for schema, table, schema_oid, oids in found:
        publication, oid = moved.pop((schema, table))
        if int(oid) == oids[0] or members.intersection(oids) or schema_oid in schemas:
            continue
        name = name_table(schema, table)
        return Narrowed(
            f"another table has the name {name} now and is not in publication {publication}: its changes are not sent",
            "The previous table was dropped or renamed. To capture the new one from now on, start with "
            "--accept-publication (add it to your own publication first; pgcdc adds it to its own): what was "
            "written to it until then is not delivered. Otherwise repair the targets with a new slot: pgcdc "
            "resync --new-slot",
        )
    for (schema, table), (publication, oid) in moved.items():
        current[publication]["names"].setdefault(oid, [schema, table])
    return None


def forget_dropped(known: Fingerprint) -> Fingerprint:
    """Without the names of dropped tables: after a new choice of tables they are not missed."""
    members = [{str(oid) for oid, _ in item["tables"]} for item in known]
    return [
        {**item, "names": {oid: name for oid, name in item["names"].items() if oid in kept}}
        for item, kept in zip(known, members, strict=True)
    ]


def compare(old: Fingerprint, now: Fingerprint, existing: Existing) -> GapError | None:
    """The gap between two fingerprints, if any. Added tables and dropped tables are no gap."""
    current = {item["name"]: item for item in now}
    for before in old:
        name, after = before["name"], current.get(before["name"])
        if after is None:
            advice = "Start with a new state directory and slot: changes made since then can no longer be read"
            return GapError(f"publication {name} was dropped or is no longer used", advice)
        if after["oid"] != before["oid"]:
            message = f"publication {name} was dropped and created again: changes between were not sent"
            return GapError(message, "Start with a new state directory and slot, and reload the targets")
        for message, undo in _narrowed(before, after, existing):
            command = f"To undo it, run ALTER PUBLICATION {quote_identifier(name)} SET ({undo}). " if undo else ""
            return Narrowed(message, command + _ADVICE)
    return None


def _narrowed(before: dict[str, Any], after: dict[str, Any], existing: Existing) -> Iterator[tuple[str, str]]:
    """What a publication no longer sends as it did, and the setting that restores it."""
    name = before["name"]
    if lost := [operation for operation in before["publish"] if operation not in after["publish"]]:
        message = f"publication {name} no longer publishes {', '.join(lost)}: such changes were not sent since then"
        yield message, f"publish = '{', '.join(before['publish'])}'"
    if after["via_root"] != before["via_root"]:
        message = f"publication {name} sends partitions under other table names than before"
        yield message, f"publish_via_partition_root = {str(before['via_root']).lower()}"
    if before["generated"] != "n" and after["generated"] == "n":
        yield f"publication {name} no longer publishes generated columns", ""
    for kind in ("tables", "schemas"):
        members, rows = ({pair[place] for pair in after[kind]} for place in (0, 1))
        for member, row in before[kind]:
            if row in rows or (kind, member) not in existing:
                continue
            title = f"{kind[:-1]} {existing[kind, member]}"
            if member in members:
                yield (
                    (
                        f"publication {name} has another row filter or column list for {title}, or lacked it "
                        "for a while: not everything was sent since then"
                    ),
                    "",
                )
            yield f"{title} was removed from publication {name}: its changes were not sent since then", ""
