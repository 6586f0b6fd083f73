"""What a table looks like, and how that changed. The differences between two shapes are computed from the record in the
history alone, so every replay gives the same result."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from pgcdc.core.relation import Column, Relation, ShapeChange
from pgcdc.postgres.types.catalog import BUILT_IN, TypeCatalog, TypeInfo, type_name


@dataclass(frozen=True, slots=True)
class TableShape:
    """What a table looks like after a chain."""

    relation: Relation
    details: Mapping[str, Any] | None = None  # The catalog's description of it

    def to_json(self) -> dict[str, Any]:
        return {"relation": self.relation.to_json(), "details": self.details}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> TableShape:
        return cls(Relation.from_json(raw["relation"]), raw["details"])

    @property
    def key(self) -> list[str]:
        """The columns of the primary key, in the key's order; without one, those of the replica identity."""
        names = [column.name for column in self.relation.columns]
        primary = self.details["primary_key"] if self.details is not None else []
        if primary and set(names).issuperset(primary):
            return list(primary)
        # With REPLICA IDENTITY FULL every column identifies the row. That says nothing about its key.
        is_full = self.relation.replica_identity == "f"
        return [column.name for column in self.relation.columns if column.is_key and not is_full]

    def type_of(self, column: Column) -> str:
        """The name of a column's type, for messages."""
        described = self.details["columns"] if self.details is not None else ()
        found = (str(one["type"]) for one in described if one["name"] == column.name)
        return next(found, None) or type_name(column.type_oid, column.typmod)


def is_late(details: Mapping[str, Any] | None) -> bool:
    """Whether the catalog was read after the table had been altered again: its rows may have been rewritten in between."""
    return details is None or bool(details.get("is_late"))


@dataclass(frozen=True, slots=True)
class Described:
    """What is known beyond the stream."""

    database: str = ""  # The database's name
    changes: tuple[ShapeChange, ...] = ()  # The catalog's descriptions of tables' shapes when they first appeared


class Family(Enum):
    """How to read the text of a value."""

    TEXT, INTEGER, BOOLEAN, DOUBLE, FLOAT, NUMERIC, TIMESTAMPTZ, TIMESTAMP, DATE, TIME = range(10)
    BYTES, NUMBER, UUID, INTERVAL, TIMETZ, BIT, BITS, MONEY, HSTORE, POINT = range(10, 20)
    VECTOR, HALFVEC, SPARSEVEC, OTHER = range(20, 24)
    # NUMERIC has a scale, NUMBER does not; BIT is one bit.


class ValueType(NamedTuple):
    """What Debezium needs to know about a column's type."""

    family: Family
    is_array: bool = False
    digits: int = 6  # Fractional digits of the seconds
    is_required: bool = False  # NOT NULL


IDENTITIES = {"d": "default", "n": "nothing", "f": "full", "i": "index"}
_BY_OUTPUT = {
    "boolout": Family.BOOLEAN, "int2out": Family.INTEGER, "int4out": Family.INTEGER, "int8out": Family.INTEGER,
    "oidout": Family.INTEGER, "float4out": Family.FLOAT, "float8out": Family.DOUBLE, "numeric_out": Family.NUMERIC,
    "byteaout": Family.BYTES, "date_out": Family.DATE, "time_out": Family.TIME, "timetz_out": Family.TIMETZ,
    "timestamp_out": Family.TIMESTAMP, "timestamptz_out": Family.TIMESTAMPTZ, "interval_out": Family.INTERVAL,
    "uuid_out": Family.UUID, "bit_out": Family.BITS, "varbit_out": Family.BITS, "cash_out": Family.MONEY,
    "point_out": Family.POINT,
    **dict.fromkeys(
        ("textout", "varcharout", "bpcharout", "charout", "nameout", "inet_out", "cidr_out", "macaddr_out",
         "macaddr8_out", "json_out", "jsonb_out", "xml_out", "tsvectorout"),
        Family.TEXT,
    ),
}  # fmt: skip
_ARRAYS = {
    Family.TEXT, Family.INTEGER, Family.BOOLEAN, Family.DOUBLE, Family.FLOAT, Family.NUMERIC, Family.TIMESTAMPTZ,
    Family.TIMESTAMP, Family.DATE, Family.TIME, Family.BYTES, Family.NUMBER, Family.UUID, Family.TIMETZ, Family.HSTORE,
}  # fmt: skip
_TIMES = {Family.TIME, Family.TIMETZ, Family.TIMESTAMP, Family.TIMESTAMPTZ}
_NO_ARRAYS = {"nameout", "xml_out", "tsvectorout"}  # Text types whose arrays nobody reads
_BY_NAME = {
    "hstore": Family.HSTORE, "vector": Family.VECTOR, "halfvec": Family.HALFVEC, "sparsevec": Family.SPARSEVEC,
    "citext": Family.TEXT, "ltree": Family.TEXT, "isbn": Family.TEXT, "refcursor": Family.OTHER,
    **dict.fromkeys(("int4range", "int8range", "numrange", "tsrange", "tstzrange", "daterange"), Family.TEXT),
}  # fmt: skip
"""Types known by name: types of extensions, whose functions can have any name, and ranges, which share theirs."""


def column_types(shape: Relation, details: Mapping[str, Any] | None) -> list[ValueType]:
    """The type of each column."""
    catalog = BUILT_IN
    required: set[str] = set()
    if details is not None:
        required = {column["name"] for column in details["columns"] if column["not_null"]}
        if details["types"] is not None:
            own = TypeCatalog.from_json(details["types"])
            catalog = TypeCatalog({**BUILT_IN.types, **own.types}, own.server_version)
    return [_type(catalog, column, column.name in required) for column in shape.columns]


def _type(catalog: TypeCatalog, column: Column, is_required: bool) -> ValueType:
    info, typmod = _base(catalog, catalog.types.get(column.type_oid), column.typmod)
    is_array = info is not None and info.kind == "array"
    if info is not None and is_array:
        element = catalog.types.get(info.inner)
        # Readers that know types by oid do not treat an array of a domain as an array of its base type.
        info = None if element is None or element.is_domain else element
    family = _family(info, typmod)
    if is_array and info is not None and (family not in _ARRAYS or info.output in _NO_ARRAYS):
        family = Family.OTHER
    return ValueType(family, is_array, typmod if family in _TIMES and typmod >= 0 else 6, is_required)


def _base(catalog: TypeCatalog, info: TypeInfo | None, typmod: int) -> tuple[TypeInfo | None, int]:
    while info is not None and info.is_domain:
        typmod = info.typmod
        info = catalog.types.get(info.inner)
    return info, typmod


def _family(info: TypeInfo | None, typmod: int) -> Family:
    if info is None:
        return Family.OTHER
    if info.kind == "enum":
        return Family.TEXT
    name = info.name.rpartition(".")[2]
    family = _BY_NAME.get(name)
    if family is None:
        is_own = info.oid not in BUILT_IN.types
        family = Family.OTHER if info.kind != "base" or is_own else _BY_OUTPUT.get(info.output, Family.OTHER)
    if family is Family.NUMERIC and typmod < 0:
        return Family.NUMBER
    if family is Family.BITS and (typmod == 1 or (typmod < 0 and name == "bit")):
        return Family.BIT
    return family


# --- from one shape to the next


def diff_shapes(change: ShapeChange) -> list[dict[str, Any]]:
    """The differences, one by one; empty for a table seen for the first time. Never empty if the two shapes differ; for
    equal shapes, the differences are in what the catalog says. Columns are matched by their number in the catalog.
    Where it is not known for both shapes they are matched by name, and then a rename is reported as a removal and an
    addition: order and type never prove a rename (docs/decisions/0010-shapes.md)."""
    if change.before is None:
        return []
    before, after = TableShape(change.before, change.before_details), TableShape(change.after, change.details)
    known = [one.details["columns"] for one in (before, after) if one.details is not None]
    ids = (
        [{column["name"]: column["attnum"] for column in columns} for columns in known] if len(known) == 2 else [{}, {}]
    )
    names = [f"{one.relation.namespace}.{one.relation.name}" for one in (before, after)]
    found: list[dict[str, Any]] = []
    if names[0] != names[1]:
        found.append({"type": "table_renamed", "from": names[0], "to": names[1]})
    found += [*_diff_columns(before, after, *ids), *_diff_keys(before, after, *ids)]
    if before.details is not None and after.details is not None:
        found += [*_diff_types(before.details, after.details), *_diff_rows(before.details, after.details, *ids)]
    if is_late(before.details) and after.details is not None and before.relation == after.relation:
        found.append({"type": "rewritten", "columns": []})
    if any(one["type"] in NEW_VALUES for one in found):  # already covered by that one
        found = [one for one in found if one["type"] != "rewritten"]
    return found


NEW_VALUES = ("column_added", "column_replaced", "column_type_changed")


_Ids = Mapping[str, int]
"""Column numbers by name; empty if they are not known for both shapes. A number is never reused for another column."""


def _diff_columns(before: TableShape, after: TableShape, old_ids: _Ids, new_ids: _Ids) -> Iterator[dict[str, Any]]:
    olds = {old_ids.get(one.name, one.name): one for one in before.relation.columns}
    news = {new_ids.get(one.name, one.name): one for one in after.relation.columns}
    removed = {one.name: one for identity, one in olds.items() if identity not in news}
    added = {one.name: one for identity, one in news.items() if identity not in olds}
    for name, old in removed.items():
        if name not in added:
            yield {"type": "column_removed", "column": name, "old_type": before.type_of(old)}
    for identity, new in news.items():
        if identity not in olds:
            continue
        old = olds[identity]
        if old.name != new.name:
            yield {"type": "column_renamed", "from": old.name, "to": new.name}
        if (old.type_oid, old.typmod) != (new.type_oid, new.typmod):
            types = {"old_type": before.type_of(old), "new_type": after.type_of(new)}
            yield {"type": "column_type_changed", "column": new.name, **types}
    missing = {one["name"]: one.get("missing") for one in after.details["columns"]} if after.details is not None else {}
    for name, new in added.items():
        types = {"new_type": after.type_of(new)}
        if name in removed:
            types = {"old_type": before.type_of(removed[name]), **types}
        default = {} if missing.get(name) is None else {"default": missing[name]}
        yield {"type": "column_replaced" if name in removed else "column_added", "column": name, **types, **default}
    if [one for one in olds if one in news] != [one for one in news if one in olds]:
        yield {"type": "columns_reordered", "columns": [column.name for column in after.relation.columns]}


def _diff_keys(before: TableShape, after: TableShape, old_ids: _Ids, new_ids: _Ids) -> Iterator[dict[str, Any]]:
    def is_same(olds: list[str], news: list[str]) -> bool:
        """Whether these are the same columns in the same order."""
        return [old_ids.get(name, name) for name in olds] == [new_ids.get(name, name) for name in news]

    old, new = before.relation.replica_identity, after.relation.replica_identity
    if old != new:
        yield {
            "type": "replica_identity_changed",
            "old": IDENTITIES.get(old, old), "new": IDENTITIES.get(new, new),
        }  # fmt: skip
    primary = [one.details["primary_key"] for one in (before, after) if one.details is not None]
    deferrable = [bool((one.details or {}).get("is_key_deferrable")) for one in (before, after)]
    if len(primary) == 2 and (not is_same(*primary) or (primary[0] and deferrable[0] != deferrable[1])):
        flag = {} if deferrable[0] == deferrable[1] else {"deferrable": deferrable[1]}
        yield {"type": "primary_key_changed", "old": primary[0], "new": primary[1], **flag}
        if old == "d":
            return  # the change of the identity follows from it
    keys = [[column.name for column in one.relation.columns if column.is_key] for one in (before, after)]
    if old == new != "f" and not is_same(*keys):  # with FULL, every column is part of it
        yield {"type": "key_columns_changed", "old": keys[0], "new": keys[1]}


def _diff_types(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Types of both shapes whose definition has changed: an enum with another label, for example."""
    olds, news = ({row[0]: row for row in (one["types"] or {"types": []})["types"]} for one in (before, after))
    # A list is still a tuple until it has been through the file.
    changed = {news[oid][1] for oid in news if oid in olds and _to_json([olds[oid]]) != _to_json([news[oid]])}
    old_labels, new_labels = (one.get("enums", {}) for one in (before, after))
    changed |= {name for name in new_labels if name in old_labels and old_labels[name] != new_labels[name]}
    gone = any(not set(labels) <= set(new_labels.get(name, labels)) for name, labels in old_labels.items())
    olds, news = (one.get("attributes", {}) for one in (before, after))
    reshaped = {name for name in news if name in olds and olds[name] != news[name]}
    if changed | reshaped:
        rewriting = {"is_rewriting": True} if gone or reshaped else {}
        yield {"type": "types_changed", "types": sorted(changed | reshaped), **rewriting}


def _diff_rows(
    before: Mapping[str, Any], after: Mapping[str, Any], old_ids: _Ids, new_ids: _Ids
) -> Iterator[dict[str, Any]]:
    """Changes that give the table other rows without any change in the stream."""
    files = [one.get("filenode") for one in (before, after)]
    if None not in files and files[0] != files[1]:
        olds, news = ({one["attnum"]: one for one in details["columns"]} for details in (before, after))
        # VACUUM FULL and TRUNCATE also rewrite the table, but touch no column (unless it has a missing value).
        altered = [
            news[number]["name"]
            for number in olds.keys() & news.keys()
            if {"since"} <= olds[number].keys() & news[number].keys() and olds[number]["since"] != news[number]["since"]
        ]
        if altered or after.get("hides_truncate"):
            yield {"type": "rewritten", "columns": sorted(altered)}
    # The proven shape may have had an additional column that was never seen.
    added = len(set(new_ids.values()) - set(old_ids.values()))
    is_read = before.get("is_proven") and not after.get("is_proven")
    if is_read and "natts" in after and after["natts"] - before["natts"] != added:
        yield {"type": "rewritten", "columns": []}
    if "leaves" in before and "leaves" in after:
        olds, news = before["leaves"], after["leaves"]
        links = [one.get("joined", {}) for one in (before, after)]
        found = {
            "added": [oid for oid in news if oid not in olds],
            "removed": [
                *(oid for oid in olds if oid not in news),
                *after.get("lost", ()),
                # The last rows that nobody sees have been sent now.
                *(oid for oid in before.get("detaching", ()) if oid not in after.get("detaching", ())),
            ],
            # A partition created as such has a file with its own number. If the number differs, rows that were sent are
            # gone.
            "rewritten": [
                oid
                for oid, file in news.items()
                if (
                    (olds[oid], links[0].get(oid)) != (file, links[1].get(oid))
                    if oid in olds
                    else oid not in links[1] and file != int(oid)
                )
            ],
        }
        if any(found.values()):
            attached = [oid for oid in found["added"] if oid in after.get("attached", ())]
            yield {"type": "partitions_changed", **found, "attached": attached}
    if "natts" in before and "natts" in after:  # older records do not have it
        rules = [one.get("published") for one in (before, after)]
        meant = [
            rule and (rule["row_filter"], rule["columns"] and [ids.get(name, name) for name in rule["columns"]])
            for rule, ids in zip(rules, (old_ids, new_ids), strict=True)
        ]
        if meant[0] != meant[1]:
            yield {"type": "published_changed", "old": rules[0], "new": rules[1]}
    # A different entry, or one altered since: the table may have had none for a while, even if we did not look then.
    is_altered = after.get("member_since") != before.get("member_since", after.get("member_since"))
    if "member" in before and after.get("member", 0) != 0 and (is_altered or after["member"] != before["member"]):
        yield {"type": "updates_published"}


def event_values(change: ShapeChange) -> list[bytes]:
    """The values of a SCHEMA_CHANGE event: schema, table, changes and columns."""
    after = TableShape(change.after, change.details)
    columns = [{"name": one.name, "type": after.type_of(one), "key": one.is_key} for one in change.after.columns]
    texts = (change.after.namespace, change.after.name, _to_json(diff_shapes(change)), _to_json(columns))
    return [text.encode() for text in texts]


def _to_json(value: list[Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def describe_change(change: ShapeChange) -> list[str]:
    """For messages: `table public.orders: column note (text) added`, one line for each difference."""
    table = f"{change.after.namespace}.{change.after.name}"
    return [f"table {table}: {_say(one)}" for one in diff_shapes(change)]


_SAID = {
    "table_renamed": "renamed from {from}",
    "column_added": "column {column} ({new_type}) added",
    "column_removed": "column {column} ({old_type}) removed",
    "column_replaced": "column {column} ({old_type}) dropped and added again ({new_type})",
    "column_renamed": "column {from} renamed to {to}",
    "column_type_changed": "column {column} changed from {old_type} to {new_type}",
    "columns_reordered": "column order changed to {columns}",
    "replica_identity_changed": "replica identity changed from {old} to {new}",
    "primary_key_changed": "primary key changed from ({old}) to ({new})",
    "key_columns_changed": "key changed from ({old}) to ({new})",
    "types_changed": "types changed: {types}",
    "partitions_changed": "partitions changed: {added} added, {removed} removed, {rewritten} rewritten",
    "rewritten": "rows rewritten (columns altered: {columns})",
    "published_changed": "row filter or columns of the publication changed",
    "updates_published": "updates and deletes are published from now on",
}


def _say(one: dict[str, Any]) -> str:
    if one["type"] == "partitions_changed":
        one = {key: len(value) if isinstance(value, list) else value for key, value in one.items()}
    if one["type"] == "rewritten" and not one["columns"]:
        return "rows may have been rewritten before they were first seen"
    return _SAID[one["type"]].format_map(
        {key: ", ".join(value) if isinstance(value, list) else value for key, value in one.items()}
    )
