"""Relations: channel names, version numbers that stay, and a form on disk that keeps every identifier."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc.core.relation import Column, Relation, Relations

ID = Column("id", 23, -1, True)
ORDERS = Relation(16384, "public", "orders", "d", (ID, Column("note", 25, -1, False)))

# PostgreSQL allows anything but NUL in a quoted identifier; the wire is UTF-8, so there are no surrogates.
identifiers = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=12)
columns = st.builds(Column, identifiers, st.integers(0, 2**32 - 1), st.integers(-1, 2**31 - 1), st.booleans())
relations = st.builds(
    Relation,
    st.integers(0, 2**32 - 1),
    identifiers,
    identifiers,
    st.sampled_from("dnfi"),
    st.lists(columns, max_size=3).map(tuple),
)


@pytest.mark.parametrize(
    ("namespace", "name", "channel"),
    [
        ("public", "orders", "pgcdc:orders"),
        ("sales", "orders", "pgcdc:sales.orders"),
        ("Public", "orders", "pgcdc:Public.orders"),
        ("public", "Order Lines", "pgcdc:Order Lines"),
        ("pg_catalog", "pg_class", "pgcdc:pg_catalog.pg_class"),
    ],
)
def test_channel_names_the_table_and_its_schema_outside_of_public(namespace: str, name: str, channel: str) -> None:
    assert replace(ORDERS, namespace=namespace, name=name).channel == channel


@settings(max_examples=50)
@given(relations)
def test_json_round_trips_with_any_identifier_on_one_line(relation: Relation) -> None:
    line = json.dumps(relation.to_json()).encode()
    assert len(line.splitlines()) == 1
    assert Relation.from_json(json.loads(line)) == relation


@pytest.mark.parametrize("name", ['"', "\n", "\r", "\u2028", "\u0085", "'; DROP TABLE x; --", "a.b", "\\", "🐘", " "])
def test_json_round_trips_with_odd_names(name: str) -> None:
    odd = Relation(1, name, name, "f", (Column(name, 25, -1, False),))
    line = json.dumps(odd.to_json()).encode()
    assert len(line.splitlines()) == 1
    assert Relation.from_json(json.loads(line)) == odd


@settings(max_examples=30)
@given(st.lists(relations, max_size=5), st.data())
def test_same_shape_always_gets_the_same_number(shapes: list[Relation], data: st.DataObject) -> None:
    known = Relations()
    numbers = [known.intern(shape) for shape in shapes]
    for index in data.draw(st.permutations(range(len(shapes)))):
        assert known.intern(shapes[index]) == numbers[index]
    assert [known[number] for number in numbers] == shapes
    assert len(known) == len(set(shapes))


CHANGED_SHAPES = {
    "column_added": replace(ORDERS, columns=(*ORDERS.columns, Column("total", 1700, 655366, False))),
    "column_dropped": replace(ORDERS, columns=(ID,)),
    "column_renamed": replace(ORDERS, columns=(ID, Column("remark", 25, -1, False))),
    "type_changed": replace(ORDERS, columns=(ID, Column("note", 1043, -1, False))),
    "typmod_changed": replace(ORDERS, columns=(ID, Column("note", 25, 14, False))),
    "key_changed": replace(ORDERS, columns=(ID, Column("note", 25, -1, True))),
    "identity_changed": replace(ORDERS, replica_identity="f"),
    "table_renamed": replace(ORDERS, name="orders_old"),
    "schema_changed": replace(ORDERS, namespace="archive"),
    "created_again": replace(ORDERS, oid=16385),
}


@pytest.mark.parametrize("changed", CHANGED_SHAPES.values(), ids=CHANGED_SHAPES.keys())
def test_every_change_of_shape_is_a_new_version_and_going_back_is_the_old_one(changed: Relation) -> None:
    known = Relations()
    assert [known.intern(ORDERS), known.intern(changed), known.intern(ORDERS)] == [0, 1, 0]


def test_relations_that_were_loaded_keep_their_numbers() -> None:
    known = Relations([ORDERS, CHANGED_SHAPES["column_added"]])
    assert known.intern(CHANGED_SHAPES["column_added"]) == 1
    assert known.intern(CHANGED_SHAPES["column_dropped"]) == 2
