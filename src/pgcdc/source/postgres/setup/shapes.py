"""What the catalog says about the shapes of tables and the stream does not: column numbers, the values of old rows in a
new column, the primary key, the partitions, the rules of the publication."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pgcdc.core.relation import Relation
from pgcdc.postgres.database import Connection
from pgcdc.postgres.types.catalog import BUILT_IN, TypeCatalog, type_name
from pgcdc.source.postgres.setup.tables import RULES_SINCE, TableColumn, read_columns

_MAX_GUESSES = 10_000
_KEPT = (
    "filenode",
    "leaves",
    "attached",
    "joined",
    "detaching",
    "published",
    "member",
    "member_since",
    "hides_truncate",
)

# The catalog as the transaction's snapshot sees it, not as it is now. Taken without locks: somebody may be altering a
# partition. A partition that was created as one has a column that was never touched since: ATTACH would have counted
# its parent. Rolled back DDL writes its own command number over cmin and leaves xmax set, so this proves nothing then.
# The size is read only for attached partitions. A partition whose DETACH CONCURRENTLY was interrupted does not count:
# queries of the root omit it (the column is new in PostgreSQL 14).
_TABLES = """
SELECT c.oid::int8, c.relkind = 'p', c.relnatts::int4, c.relfilenode::int8
FROM pg_class c WHERE c.oid = ANY (%s::int8[]::oid[])
"""
_LEAVES = """
WITH RECURSIVE link AS (
    SELECT i.inhparent, i.inhrelid, i.xmin::text AS since, EXISTS (
        SELECT FROM pg_attribute s JOIN pg_attribute a ON a.attrelid = s.attrelid AND a.attnum > 0 AND a.attinhcount > 0
            AND a.xmin = s.xmin AND a.cmin = s.cmin AND a.xmax = '0'::xid AND s.xmax = '0'::xid
        WHERE s.attrelid = i.inhrelid AND s.attnum = -1) AS is_made
    FROM pg_inherits i WHERE to_jsonb(i) ->> 'inhdetachpending' IS DISTINCT FROM 'true'),
tree AS (
    SELECT inhparent AS root, inhrelid, since, is_made FROM link WHERE inhparent = ANY (%s::int8[]::oid[])
    UNION ALL SELECT t.root, l.inhrelid, t.since || ' ' || l.since, t.is_made AND l.is_made
    FROM tree t JOIN link l ON l.inhparent = t.inhrelid)
SELECT t.root::int8, t.inhrelid::int8::text, c.relfilenode::int8, CASE WHEN NOT t.is_made THEN t.since END,
       CASE WHEN NOT t.is_made THEN pg_relation_size(c.oid) > 0 ELSE false END, t.since || ' ' || c.xmin::text
FROM tree t JOIN pg_class c ON c.oid = t.inhrelid AND c.relkind = 'r' ORDER BY c.oid
"""
# Partitions whose DETACH CONCURRENTLY was interrupted while older transactions run: rows that these wrote before are
# sent when they commit, though no query sees them.
IS_DETACHING = """(to_jsonb(i) ->> 'inhdetachpending' = 'true'
    AND age(i.xmin) <= age(mod(txid_snapshot_xmin(txid_current_snapshot()), 4294967296)::text::xid))"""
_DETACHING = f"""
WITH RECURSIVE tree AS (
    SELECT i.inhparent AS root, i.inhrelid, {IS_DETACHING} AS is_detaching
    FROM pg_inherits i WHERE i.inhparent = ANY (%s::int8[]::oid[])
    UNION ALL SELECT t.root, i.inhrelid, {IS_DETACHING}
    FROM tree t JOIN pg_inherits i ON i.inhparent = t.inhrelid)
SELECT root::int8, inhrelid::int8::text FROM tree WHERE is_detaching ORDER BY inhrelid
"""
_MISSING = """
SELECT a.attrelid::int8::text, a.attname::text, CASE WHEN a.atthasmissing THEN array_to_string(a.attmissingval, '') END
FROM pg_attribute a WHERE a.attrelid = ANY (%s::text[]::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
"""
_RULES = """
SELECT r.prrelid::int8, pg_get_expr(r.prqual, r.prrelid),
       (SELECT array_agg(a.attname::text ORDER BY a.attnum) FROM pg_attribute a
        WHERE a.attrelid = r.prrelid AND a.attnum = ANY (r.prattrs::int2[]))
FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
WHERE p.pubname = ANY (%s) AND r.prrelid = ANY (%s::int8[]::oid[]) ORDER BY r.oid
"""
# A table is a member by its own entry, by its schema's (the dependency on the schema shows when it joined), or because
# the publication covers all tables.
_MEMBERS = """
SELECT m.oid::int8, coalesce(min(m.entry::int8) FILTER (WHERE p.pubupdate AND p.pubdelete), 0),
       string_agg(concat(p.xmin::text, ' ', m.since), ',' ORDER BY p.oid, m.entry, m.since), bool_or(p.pubtruncate)
FROM (
    SELECT prpubid AS publication, prrelid AS oid, oid AS entry, '' AS since FROM pg_publication_rel
    {schemas} UNION ALL SELECT p.oid, c.oid, p.oid, '' FROM pg_publication p, pg_class c WHERE p.puballtables
) m JOIN pg_publication p ON p.oid = m.publication
WHERE p.pubname = ANY (%s) AND m.oid = ANY (%s::int8[]::oid[]) GROUP BY 1
"""
_SCHEMA_MEMBERS = """
    UNION ALL SELECT s.pnpubid, c.oid, s.oid, d.xmin::text FROM pg_publication_namespace s
    JOIN pg_class c ON c.relnamespace = s.pnnspid
    LEFT JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.objsubid = 0
        AND d.refclassid = 'pg_namespace'::regclass
"""
_LABELS = """
SELECT enumtypid::int8, array_agg(enumlabel::text ORDER BY enumsortorder), array_agg(xmin::text) FROM pg_enum GROUP BY 1
"""
_ATTRIBUTES = """
SELECT t.oid::int8, array_agg(a.attnum::int4 ORDER BY a.attnum) FILTER (WHERE NOT a.attisdropped),
       array_agg(a.xmin::text)
FROM pg_type t JOIN pg_attribute a ON a.attrelid = t.typrelid AND a.attnum > 0
WHERE t.oid = ANY (%s::int8[]::oid[]) GROUP BY 1
"""


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A table in the current catalog."""

    columns: list[TableColumn]
    facts: dict[str, Any]
    """As in the details of a shape: `natts`, `filenode`, `leaves`, `attached`, `joined`, `published`, `member`."""
    altered: tuple[int, ...] = ()  # The last transactions that altered it and its partitions
    next_xid: int = 0  # The server's next transaction number at the same moment

    def is_newer(self, xid: int, altered: Iterable[int] | None = None) -> bool:
        """Whether it was altered by a transaction with a later number (numbers wrap around at 2^32). This misses a
        transaction that began before `xid` and altered the table afterwards. `altered`: the transactions of another
        catalog object."""
        first = (
            1 if altered is None else 0
        )  # for types, it is unknown whether the same transaction used them before or after altering them
        altered = self.altered if altered is None else altered
        return any(first <= (one - xid) % (1 << 32) < (self.next_xid - xid) % (1 << 32) for one in altered)


@dataclass(frozen=True, slots=True)
class CatalogLook:
    """The catalog at one moment."""

    entries: Mapping[int, CatalogEntry] = field(default_factory=dict)  # By oid
    types: TypeCatalog = BUILT_IN
    labels: Mapping[int, list[str]] = field(default_factory=dict)  # Labels of enums, by the type's oid
    attributes: Mapping[int, list[int]] = field(default_factory=dict)  # Column numbers of composite types
    types_altered: Mapping[int, list[int]] = field(default_factory=dict)  # The transactions that altered these types

    def describe(self, shape: Relation, before: Mapping[str, Any] | None = None, xid: int = 0) -> dict[str, Any] | None:
        """The details of a shape. They are known if its table still has it, or if `before` (the details of the previous
        shape) proves which columns it has; otherwise None. `xid`: the transaction in which the shape was seen.

        `columns` in order, each with name, attnum, type (as in SQL, with its schema unless built in), ndims, not_null,
        `since` (the last transaction that altered it), and `missing` if older rows have a constant there; `primary_key`
        with its columns in order; `types`: the definitions of types that are not built in, as in TypeCatalog.to_json()
        (None if there are none). Where applicable:

        - `is_key_deferrable`; `enums`, the labels of each by name; `attributes` of composite types, their numbers by
          name
        - `natts`, the largest column number ever used; `hidden`, the numbers of columns that are not in the shape
        - `filenode` of an ordinary table, which a rewrite changes
        - for a root: `leaves` with their filenodes by oid; `attached`, those leaves that were attached with existing
          rows; and `joined`, when each leaf that was not created as a partition became one
        - `detaching`, partitions that a query no longer sees, but whose rows may still be sent
        - `lost`: partitions that had rows and were dropped or detached before we knew them
        - `mixed`, columns in which old rows have different constants
        - `published`, the row filter and column list of the publications
        - `member`: the catalog entry through which updates and deletes are published; 0: only inserts are
        - `member_since`: when that entry and the publication were last altered
        - `hides_truncate`: no publication sends TRUNCATE
        - `is_proven`: the table had changed again; files, partitions and publications are those of the previous shape
        - `is_late`: it was altered since it was seen, and there is no previous shape to compare with; or one of its
          types was altered
        """
        entry = self.entries.get(shape.oid)
        if entry is None:
            return None
        if _is_live(shape, entry.columns):
            facts = {name: one for name, one in entry.facts.items() if name != "missing"}
            details = {**_details(shape, entry.columns, entry.facts.get("missing", {})), **facts}
            # A new table's file has the table's oid as its number, until the table is rewritten.
            is_rewritten = xid in entry.altered and facts.get("filenode", shape.oid) != shape.oid
            if before is None and xid and (is_rewritten or entry.is_newer(xid)):
                details["is_late"] = True
        else:
            numbers = None if before is None else prove_numbers(before, [one.name for one in shape.columns], entry)
            if before is None or numbers is None:
                return None
            details = self._proven(shape, numbers, before, entry)
        own = _own_types([shape])
        if not own:
            return {**details, "types": None}
        types = self.types.subset(own)
        if xid and any(entry.is_newer(xid, self.types_altered.get(oid, ())) for oid in types.types):
            details["is_late"] = True
        made_of = {
            name: {one.name: known[one.oid] for one in types.types.values() if one.oid in known}
            for name, known in (("enums", self.labels), ("attributes", self.attributes))
        }
        return {**details, "types": types.to_json(), **{name: known for name, known in made_of.items() if known}}

    def _proven(
        self, shape: Relation, numbers: list[int], before: Mapping[str, Any], entry: CatalogEntry
    ) -> dict[str, Any]:
        live = {(one.number, one.type_oid, one.typmod): one for one in entry.columns}
        lasts = {one["attnum"]: one for one in before["columns"]}
        columns = []
        for one, number in zip(shape.columns, numbers, strict=True):
            now = live.get((number, one.type_oid, one.typmod))
            name = (
                type_name(one.type_oid, one.typmod) if one.type_oid in BUILT_IN.types else self.types.name(one.type_oid)
            )
            told = (now.pg_type, now.ndims) if now is not None else (name, 0)
            last = {key: value for key, value in lasts.get(number, {}).items() if key in ("since", "missing")}
            shown = {"name": one.name, "attnum": number, "type": told[0], "ndims": told[1], "not_null": False}
            columns.append({**shown, **last})
        names = {one["attnum"]: one["name"] for one in columns}
        old = {one["name"]: one["attnum"] for one in before["columns"]}
        identity = {one.name for one in shape.columns if one.is_key}
        keys: list[list[Any]] = [
            [names.get(old.get(name, 0)) for name in before["primary_key"]],
            [names.get(one.number) for one in _primary_key(entry.columns)],
            [one.name for one in shape.columns if one.is_key],
        ]
        if shape.replica_identity == "d":  # the stream says which columns, the catalog in which order
            key = next(one for one in keys if set(one) == identity)
        else:
            key = [] if None in keys[0] else keys[0]
        natts = max(before["natts"], *numbers)
        # The last known facts are kept: the next look must detect any change since then.
        kept = {name: before[name] for name in _KEPT if name in before}
        return {"columns": columns, "primary_key": key, "types": None, **kept, "natts": natts, "is_proven": True}


def read_catalog(sql: Connection, shapes: Iterable[Relation], publications: Sequence[str]) -> CatalogLook:
    """The current catalog entries for the tables of these shapes. Passes psycopg's errors on."""
    wanted = list(shapes)
    oids = list({shape.oid for shape in wanted})
    if not oids:
        return CatalogLook()
    with sql.transaction():
        sql.execute("SET LOCAL search_path = ''")
        columns = read_columns(sql, oids)
        facts = _read_facts(sql, oids, publications)
        row = sql.execute("SELECT txid_snapshot_xmax(txid_current_snapshot())").fetchone()
    assert row is not None
    entries = {}
    for oid, known in facts.items():
        mine = columns.get(oid, [])
        altered = {int(xid) for text in (*(one.since for one in mine), *known.pop("altered")) for xid in text.split()}
        entries[oid] = CatalogEntry(mine, known, tuple(altered), int(row[0]))
    own = _own_types(wanted)
    if not own:
        return CatalogLook(entries)
    types = TypeCatalog.load(sql)
    composites = [one.oid for one in types.subset(own).types.values() if one.kind == "composite"]
    labels, attributes = sql.execute(_LABELS).fetchall(), sql.execute(_ATTRIBUTES, [composites]).fetchall()
    since = {row[0]: list(map(int, row[2])) for row in (*labels, *attributes)}
    return CatalogLook(
        entries, types, {row[0]: row[1] for row in labels}, {row[0]: row[1] for row in attributes}, since
    )


def _read_facts(sql: Connection, oids: list[int], publications: Sequence[str]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for oid, is_root, natts, filenode in sql.execute(_TABLES, [oids]).fetchall():
        rest = {"leaves": {}, "attached": []} if is_root else {"filenode": filenode}
        found[oid] = {"natts": natts, "altered": [], **rest}
    if roots := [oid for oid, facts in found.items() if "leaves" in facts]:
        for root, leaf, filenode, since, has_rows, altered in sql.execute(_LEAVES, [roots]).fetchall():
            found[root]["leaves"][leaf] = filenode
            found[root]["altered"].append(altered)
            if since is not None:
                found[root].setdefault("joined", {})[leaf] = since
            if has_rows:
                found[root]["attached"].append(leaf)
        for root, leaf in sql.execute(_DETACHING, [roots]).fetchall():
            found[root].setdefault("detaching", []).append(leaf)
        _read_missing(sql, [found[root] for root in roots])
    has_rules = sql.info.server_version >= RULES_SINCE
    members = _MEMBERS.format(schemas=_SCHEMA_MEMBERS if has_rules else "").encode()
    for oid, member, since, sends_truncate in sql.execute(members, [list(publications), oids]).fetchall():
        if oid in found:
            found[oid] |= {"member": member, "member_since": since}
            found[oid] |= {} if sends_truncate else {"hides_truncate": True}
    if has_rules:
        rules: dict[int, list[tuple[str | None, list[str] | None]]] = {}
        for oid, *rule in sql.execute(_RULES, [list(publications), oids]).fetchall():
            rules.setdefault(oid, []).append((rule[0], rule[1]))
        for oid, several in rules.items():
            # The server sends a row that any of the publications includes.
            filters = [row_filter for row_filter, _ in several if row_filter is not None]
            lists = [columns for _, columns in several if columns is not None]
            row_filter = " OR ".join(filters) if len(filters) == len(several) else None
            listed = lists[0] if len(lists) == len(several) else None
            if oid in found and (row_filter is not None or listed is not None):
                found[oid]["published"] = {"row_filter": row_filter, "columns": listed}
    return found


def _read_missing(sql: Connection, roots: Sequence[dict[str, Any]]) -> None:
    """The values of old rows in new columns of partitioned tables, taken from their partitions. `mixed`: not all the
    same."""
    leaves = [leaf for facts in roots for leaf in facts["leaves"]]
    found: dict[str, dict[str, str | None]] = {}
    for leaf, name, missing in sql.execute(_MISSING, [leaves]).fetchall():
        found.setdefault(leaf, {})[name] = missing
    for facts in roots:
        mine = [found[leaf] for leaf in facts["leaves"] if leaf in found]
        values = {name: {one.get(name) for one in mine} for name in mine[0]} if mine else {}
        facts["missing"] = {name: next(iter(one)) for name, one in values.items() if len(one) == 1}
        if mixed := sorted(name for name, one in values.items() if len(one) > 1):
            facts["mixed"] = mixed


def _own_types(shapes: Iterable[Relation]) -> set[int]:
    return {one.type_oid for shape in shapes for one in shape.columns if one.type_oid not in BUILT_IN.types}


def _is_live(shape: Relation, columns: list[TableColumn]) -> bool:
    """Whether the catalog still has this shape. It may have more columns: some may be unpublished."""
    names = {column.name for column in shape.columns}
    there = [column for column in columns if column.name in names]  # both in order of column number
    if [(one.name, one.type_oid, one.typmod) for one in shape.columns] != [
        (one.name, one.type_oid, one.typmod) for one in there
    ]:
        return False
    identity = {one.name for one in there if one.is_primary_key and not one.is_deferrable}
    return shape.replica_identity != "d" or {one.name for one in shape.columns if one.is_key} == identity


def _details(shape: Relation, columns: list[TableColumn], missing: Mapping[str, str | None]) -> dict[str, Any]:
    named = {one.name: replace(one, missing=missing.get(one.name, one.missing)) for one in columns}
    described = [
        {
            "name": one.name, "attnum": one.number, "type": one.pg_type, "ndims": one.ndims, "not_null": one.not_null,
            "since": one.since, **({} if one.missing is None else {"missing": one.missing}),
        }
        for one in (named[column.name] for column in shape.columns)
    ]  # fmt: skip
    shown = {one["attnum"] for one in described}
    hidden = [one.number for one in columns if one.number not in shown]
    return {
        "columns": described,
        "primary_key": [one.name for one in _primary_key(columns)],
        **({"is_key_deferrable": True} if any(one.is_deferrable for one in columns) else {}),
        **({"hidden": hidden} if hidden else {}),
    }


def _primary_key(columns: Iterable[TableColumn]) -> list[TableColumn]:
    return sorted((one for one in columns if one.key_place is not None), key=lambda one: one.key_place or 0)


def prove_numbers(before: Mapping[str, Any], names: Sequence[str], now: CatalogEntry) -> list[int] | None:
    """The column numbers of the columns `names`, for a shape that came after `before` and that the table no longer has;
    None if they are ambiguous. Columns are in the order of their numbers. A column that exists both before and now
    existed in between. A new column gets a larger number than any before it, and numbers are never reused.

    One step is very likely rather than certain: of two new columns that exist now, the one with the larger number came
    later, unless the other was a generated column that was not published then. So the names must match, too.
    """
    if "natts" not in before or "hidden" in before or before.get("published", {}).get("columns"):
        return None  # an unpublished column may have been published later
    live = {one.number: one.name for one in now.columns if not one.generated}
    old = {one["attnum"] for one in before["columns"]}
    new = set(range(before["natts"] + 1, now.facts["natts"] + 1))
    stayed = old & live.keys()
    free = sorted((old | new) - stayed)
    count = len(names) - len(stayed)
    if not 0 <= count <= len(free) or math.comb(len(free), count) > _MAX_GUESSES:
        return None
    ways = [sorted({*stayed, *chosen}) for chosen in itertools.combinations(free, count)]
    if len(ways) > 1:
        arrived = sorted(new & live.keys())
        ways = [way for way in ways if all(one in way for one in arrived if one < way[-1])]
        said = [dict(zip(way, names, strict=True)) for way in ways]
        if any(live[one] != way[one] for way in said for one in arrived if one in way):
            return None
    return ways[0] if len(ways) == 1 else None
