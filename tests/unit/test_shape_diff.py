"""What changed between two shapes, in words for machines and for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgcdc.core.position import SCHEMA_SUB, Position
from pgcdc.core.relation import Column, Relation, ShapeChange
from pgcdc.event.shape import describe_change, diff_shapes, event_values
from pgcdc.postgres.types.catalog import type_name

INT, BIG, TEXT, NUMERIC = 23, 20, 25, 1700


def columns(*names: str, types: dict[str, tuple[int, int]] | None = None, keys: tuple[str, ...] = ("id",)) -> Relation:
    made = tuple(Column(name, *(types or {}).get(name, (TEXT, -1)), name in keys) for name in names)
    return Relation(1, "public", "orders", "d", made)


def details(
    shape: Relation,
    attnums: tuple[int, ...],
    primary_key: tuple[str, ...] = ("id",),
    missing: Mapping[str, str] = MappingProxyType({}),
    **more: Any,
) -> dict[str, Any]:
    described = [
        {"name": one.name, "attnum": number, "type": f"type of {one.name}", "ndims": 0, "not_null": False}
        | ({"missing": missing[one.name]} if one.name in missing else {})
        for one, number in zip(shape.columns, attnums, strict=True)
    ]
    return {"columns": described, "primary_key": list(primary_key), "types": None, **more}


def change(before: Relation | None, after: Relation, *attnums: tuple[int, ...], **more: Any) -> ShapeChange:
    """`attnums` of both, if the catalog was asked in time."""
    position = Position.at(110, 0, SCHEMA_SUB)
    if not attnums or before is None:
        return ShapeChange(position, after, before)
    old = details(before, attnums[0], **more.get("old", {}))
    return ShapeChange(position, after, before, details(after, attnums[1], **more.get("new", {})), old)


THREE = columns("id", "a", "b")
KINDS: dict[str, tuple[ShapeChange, list[dict[str, Any]]]] = {
    "table_first_seen": (change(None, THREE), []),
    "column_added": (
        change(THREE, columns("id", "a", "b", "c")),
        [{"type": "column_added", "column": "c", "new_type": "text"}],
    ),
    "column_removed": (
        change(THREE, columns("id", "b")),
        [{"type": "column_removed", "column": "a", "old_type": "text"}],
    ),
    "column_retyped": (
        change(columns("id", "n", types={"n": (INT, -1)}), columns("id", "n", types={"n": (BIG, -1)})),
        [{"type": "column_type_changed", "column": "n", "old_type": "integer", "new_type": "bigint"}],
    ),
    "modifier_changed": (
        change(columns("id", "n", types={"n": (NUMERIC, 655366)}), columns("id", "n", types={"n": (NUMERIC, -1)})),
        [{"type": "column_type_changed", "column": "n", "old_type": "numeric(10,2)", "new_type": "numeric"}],
    ),
    "renamed_by_its_number": (
        change(THREE, columns("id", "x", "b"), (1, 2, 3), (1, 2, 3)),
        [{"type": "column_renamed", "from": "a", "to": "x"}],
    ),
    "last_column_renamed_by_its_number": (
        change(THREE, columns("id", "a", "x"), (1, 2, 3), (1, 2, 3)),
        [{"type": "column_renamed", "from": "b", "to": "x"}],
    ),
    "names_exchanged": (
        change(THREE, columns("id", "b", "a"), (1, 2, 3), (1, 2, 3)),
        [{"type": "column_renamed", "from": "a", "to": "b"}, {"type": "column_renamed", "from": "b", "to": "a"}],
    ),
    "renamed_and_retyped": (
        change(THREE, columns("id", "x", "b", types={"x": (INT, -1)}), (1, 2, 3), (1, 2, 3)),
        [
            {"type": "column_renamed", "from": "a", "to": "x"},
            {"type": "column_type_changed", "column": "x", "old_type": "type of a", "new_type": "type of x"},
        ],
    ),
    "the_same_name_is_another_column": (
        change(THREE, columns("id", "a", "b"), (1, 2, 3), (1, 2, 4)),
        [{"type": "column_replaced", "column": "b", "old_type": "type of b", "new_type": "type of b"}],
    ),
    # A column list, or DROP a, DROP b, ADD x, ADD b, gives this as well: order and type prove nothing.
    "no_rename_is_guessed_from_the_order": (
        change(THREE, columns("id", "x", "b")),
        [
            {"type": "column_removed", "column": "a", "old_type": "text"},
            {"type": "column_added", "column": "x", "new_type": "text"},
        ],
    ),
    "no_rename_is_guessed_for_the_last_column": (
        change(THREE, columns("id", "a", "x")),
        [
            {"type": "column_removed", "column": "b", "old_type": "text"},
            {"type": "column_added", "column": "x", "new_type": "text"},
        ],
    ),
    "column_list_replaced": (
        change(THREE, columns("id", "x", "b"), (1, 2, 4), (1, 3, 4)),
        [
            {"type": "column_removed", "column": "a", "old_type": "type of a"},
            {"type": "column_added", "column": "x", "new_type": "type of x"},
        ],
    ),
    "other_order_of_the_same_names": (
        change(THREE, columns("id", "b", "a")),
        [{"type": "columns_reordered", "columns": ["id", "b", "a"]}],
    ),
    "replica_identity": (
        change(THREE, replace(columns("id", "a", "b", keys=("id", "a", "b")), replica_identity="f")),
        [{"type": "replica_identity_changed", "old": "default", "new": "full"}],
    ),
    "primary_key": (
        change(
            THREE, columns("id", "a", "b", keys=("id", "a")), (1, 2, 3), (1, 2, 3), new={"primary_key": ("a", "id")}
        ),
        [{"type": "primary_key_changed", "old": ["id"], "new": ["a", "id"]}],
    ),
    "primary_key_not_known": (
        change(THREE, columns("id", "a", "b", keys=("id", "a"))),
        [{"type": "key_columns_changed", "old": ["id"], "new": ["id", "a"]}],
    ),
    "primary_key_dropped_beside_a_full_identity": (
        change(
            replace(columns("id", "a", keys=("id", "a")), replica_identity="f"),
            replace(columns("id", "a", "c", keys=("id", "a", "c")), replica_identity="f"),
            (1, 2), (1, 2, 3), new={"primary_key": ()},
        ),
        [
            {"type": "column_added", "column": "c", "new_type": "type of c"},
            {"type": "primary_key_changed", "old": ["id"], "new": []},
        ],
    ),
    "index_of_the_identity": (
        change(
            replace(columns("id", "a", keys=("id",)), replica_identity="i"),
            replace(columns("id", "a", keys=("a",)), replica_identity="i"),
            (1, 2), (1, 2),
        ),
        [{"type": "key_columns_changed", "old": ["id"], "new": ["a"]}],
    ),
    "key_column_renamed_is_no_other_key": (
        change(
            THREE, columns("nr", "a", "b", keys=("nr",)), (1, 2, 3), (1, 2, 3), new={"primary_key": ("nr",)}
        ),
        [{"type": "column_renamed", "from": "id", "to": "nr"}],
    ),
    "default_that_old_rows_have": (
        change(columns("id"), columns("id", "a"), (1,), (1, 2), new={"missing": {"a": "7"}}),
        [{"type": "column_added", "column": "a", "new_type": "type of a", "default": "7"}],
    ),
    "replaced_with_a_default": (
        change(columns("id", "a"), columns("id", "a"), (1, 2), (1, 3), new={"missing": {"a": ""}}),
        [{"type": "column_replaced", "column": "a", "old_type": "type of a", "new_type": "type of a", "default": ""}],
    ),
    "default_that_was_there_is_no_change": (
        change(columns("id", "a"), columns("id", "a"), (1, 2), (1, 2), new={"missing": {"a": "7"}, "filenode": 9}), [],
    ),
    "partitions": (
        change(
            THREE, THREE, (1, 2, 3), (1, 2, 3),
            old={"leaves": {"7": 70, "8": 80, "9": 90, "6": 60}, "joined": {"6": "500"}},
            new={"leaves": {"7": 71, "9": 90, "6": 60, "10": 10, "11": 12}, "attached": ["9", "11"], "joined": {"6": "501"}},
        ),
        [{"type": "partitions_changed", "added": ["10", "11"], "removed": ["8"], "rewritten": ["7", "6", "11"],
          "attached": ["11"]}],
    ),
    "rows_that_came_to_an_attached_partition_are_no_change": (
        change(THREE, THREE, (1, 2, 3), (1, 2, 3), old={"leaves": {"7": 70}}, new={"leaves": {"7": 70}, "attached": ["7"]}),
        [],
    ),
    "partitions_not_known_before": (change(THREE, THREE, (1, 2, 3), (1, 2, 3), new={"leaves": {"7": 70}}), []),
    "publication": (
        change(
            THREE, THREE, (1, 2, 3), (1, 2, 3), old={"natts": 3},
            new={"natts": 3, "published": {"row_filter": "(id > 5)", "columns": None}},
        ),
        [{"type": "published_changed", "old": None, "new": {"row_filter": "(id > 5)", "columns": None}}],
    ),
    "column_list_with_a_renamed_column": (
        change(
            columns("id", "a"), columns("id", "x"), (1, 2), (1, 2),
            old={"natts": 2, "published": {"row_filter": None, "columns": ["id", "a"]}},
            new={"natts": 2, "published": {"row_filter": None, "columns": ["id", "x"]}},
        ),
        [{"type": "column_renamed", "from": "a", "to": "x"}],
    ),
    "labels": (
        change(THREE, THREE, (1, 2, 3), (1, 2, 3), old={"enums": {"mood": ["a"]}}, new={"enums": {"mood": ["a", "b"]}}),
        [{"type": "types_changed", "types": ["mood"]}],
    ),
    "deferrable": (
        change(THREE, THREE, (1, 2, 3), (1, 2, 3), new={"is_key_deferrable": True}),
        [{"type": "primary_key_changed", "old": ["id"], "new": ["id"], "deferrable": True}],
    ),
    "table_renamed": (
        change(THREE, replace(THREE, name="sales")),
        [{"type": "table_renamed", "from": "public.orders", "to": "public.sales"}],
    ),
    "table_moved": (
        change(THREE, replace(THREE, namespace="archive")),
        [{"type": "table_renamed", "from": "public.orders", "to": "archive.orders"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("one", "expected"), KINDS.values(), ids=KINDS.keys())
def test_difference(one: ShapeChange, expected: list[dict[str, Any]]) -> None:
    assert diff_shapes(one) == expected
    assert len(describe_change(one)) == len(expected)
    assert diff_shapes(ShapeChange.from_json(one.to_json())) == expected


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("column_added", ["table public.orders: column c (text) added"]),
        ("column_removed", ["table public.orders: column a (text) removed"]),
        ("column_retyped", ["table public.orders: column n changed from integer to bigint"]),
        ("renamed_by_its_number", ["table public.orders: column a renamed to x"]),
        ("other_order_of_the_same_names", ["table public.orders: column order changed to id, b, a"]),
        ("replica_identity", ["table public.orders: replica identity changed from default to full"]),
        ("primary_key", ["table public.orders: primary key changed from (id) to (a, id)"]),
        ("primary_key_not_known", ["table public.orders: key changed from (id) to (id, a)"]),
        ("partitions", ["table public.orders: partitions changed: 2 added, 1 removed, 3 rewritten"]),
        ("publication", ["table public.orders: row filter or columns of the publication changed"]),
        ("replaced_with_a_default", ["table public.orders: column a (type of a) dropped and added again (type of a)"]),
        ("table_moved", ["table archive.orders: renamed from public.orders"]),
    ],
)
def test_words_for_people(kind: str, lines: list[str]) -> None:
    assert describe_change(KINDS[kind][0]) == lines


names = st.lists(st.sampled_from("abcd"), max_size=4, unique=True)


@st.composite
def shapes(draw: st.DrawFn) -> Relation:
    made = tuple(
        Column(name, draw(st.sampled_from([INT, TEXT])), draw(st.sampled_from([-1, 6])), draw(st.booleans()))
        for name in draw(names)
    )
    return Relation(1, "public", draw(st.sampled_from(["t", "u"])), draw(st.sampled_from("din")), made)


@given(shapes(), shapes())
def test_two_shapes_differ_in_something_unless_they_are_the_same(before: Relation, after: Relation) -> None:
    assert bool(diff_shapes(change(before, after))) == (before != after)


def test_values_of_the_event_take_names_from_the_catalog() -> None:
    one = change(THREE, columns("id", "é"), (1, 2, 3), (1, 4))
    schema, table, _, shown = event_values(one)
    assert (schema, table) == (b"public", b"orders")
    assert shown.decode() == (
        '[{"name":"id","type":"type of id","key":true},{"name":"é","type":"type of é","key":false}]'
    )


def test_type_that_nobody_knows_is_called_by_its_number() -> None:
    assert type_name(987654) == "oid 987654"
