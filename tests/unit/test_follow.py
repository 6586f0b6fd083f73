"""What a copy can follow, and what makes it read the table again: decided by the two descriptions of the catalog alone."""

from __future__ import annotations

from typing import Any

import pytest

from pgcdc.core.position import Position
from pgcdc.core.relation import Column, Relation, ShapeChange
from pgcdc.event.edits import SimpleChain
from pgcdc.event.follow import follow_shape

INT, BIGINT, TEXT, VARCHAR = (23, "integer"), (20, "bigint"), (25, "text"), (1043, "varchar")


def side(*columns: tuple[str, int, tuple[int, str]], **facts: Any) -> tuple[Relation, dict[str, Any]]:
    shape = Relation(7, "public", "t", "d", tuple(Column(name, kind[0], -1, name == "id") for name, _, kind in columns))
    described: list[dict[str, Any]] = [
        {"name": name, "attnum": number, "type": kind[1], "ndims": 0, "not_null": False, "since": "1"}
        for name, number, kind in columns
    ]
    natts = max(number for _, number, _ in columns)
    found = {"columns": described, "primary_key": ["id"], "types": None, "natts": natts, "filenode": 100}
    return shape, {**found, **facts}


BEFORE = side(("id", 1, INT), ("a", 2, TEXT))


def reason(after: tuple[Relation, dict[str, Any] | None], chain: SimpleChain | None = None, **more: Any) -> str:
    position = more.pop("position", Position.at(5, 0))
    before = more.pop("before", BEFORE)
    change = ShapeChange(position, after[0], before[0], after[1], before[1])
    return follow_shape(change, chain or SimpleChain((), ()))[1]


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (side(("id", 1, INT), ("a", 2, TEXT), ("b", 3, INT)), ""),
        (side(("id", 1, INT), ("a", 2, TEXT), ("b", 3, INT), filenode=101), "rewritten"),
        (side(("id", 1, INT), ("a", 2, TEXT), ("b", 4, INT)), "added and dropped in between"),
        (side(("id", 1, INT), ("renamed", 2, TEXT)), ""),
        (side(("id", 1, INT), ("renamed", 2, TEXT), filenode=101), ""),
        (side(("id", 1, BIGINT), ("a", 2, TEXT)), ""),
        (side(("id", 1, BIGINT), ("a", 2, TEXT), filenode=101), "rewritten"),
        (side(("id", 1, INT), natts=2), ""),
        ((side(("id", 1, INT), ("b", 2, TEXT))[0], None), "altered again"),
        (side(("id", 1, INT), ("a", 3, TEXT)), "rows arrived before"),
        (side(("id", 1, INT), ("a", 3, BIGINT)), ""),
        (side(("id", 1, INT), ("b", 3, TEXT)), "may have either"),
        (side(("id", 1, INT), ("a", 3, VARCHAR)), "may have either"),
        (side(("id", 1, INT), ("b", 3, INT)), ""),
        (side(("id", 1, INT), natts=3), "added and dropped in between"),
    ],
    ids=[
        "added", "computed", "added twice", "renamed", "vacuum too", "wider", "retyped", "dropped", "late", "replaced",
        "replaced by another type", "replaced and renamed", "replaced and retyped", "another one instead",
        "replaced and dropped",
    ],
)  # fmt: skip
def test_only_what_the_catalog_proves_is_followed(after: tuple[Relation, dict[str, Any] | None], why: str) -> None:
    found = reason(after)
    assert why in found and bool(found) == bool(why)


def test_a_column_that_only_a_mark_tells_to_be_another_is_read_again() -> None:
    after = side(("id", 1, INT), ("a", 3, TEXT))
    assert "rows arrived before" in reason(after, position=Position.of_chunk(5, 0, 0))


def test_rows_that_were_rewritten_in_the_same_shape_are_read_again_unless_no_column_was_touched() -> None:
    shape, details = side(("id", 1, INT), ("a", 2, TEXT), filenode=101)
    assert reason((shape, details)) == ""
    details["columns"][1]["since"] = "2"
    assert "rewritten" in reason((shape, details))


def test_transforms_that_nobody_knows_here_are_a_reason() -> None:
    after = side(("id", 1, INT), ("a", 2, TEXT), ("b", 3, INT))
    assert "only the transforms know" in reason(after, SimpleChain((), (), is_partial=True))


def test_partitions_with_rows_are_a_reason_and_new_ones_are_not() -> None:
    before = side(("id", 1, INT), ("a", 2, TEXT), leaves={"10": 1}, attached=[])
    for leaves, attached, is_reason in (
        ({"10": 1, "11": 11}, [], False), ({"10": 1, "11": 11}, ["11"], True), ({}, [], True), ({"10": 9}, [], True),
        ({"10": 1, "11": 12}, [], True),
    ):  # fmt: skip
        after = side(("id", 1, INT), ("a", 2, TEXT), leaves=leaves, attached=attached)
        assert bool(reason(after, before=before)) == is_reason, leaves


def test_columns_that_moved_up_before_a_new_one_are_read_again() -> None:
    before = side(("id", 1, INT), ("a", 2, TEXT), ("b", 3, TEXT))
    assert "may have either" in reason(side(("id", 1, INT), ("a", 3, TEXT), ("b", 4, TEXT)), before=before)
    renamed = side(("id", 1, INT), ("a", 3, TEXT))
    assert reason(renamed, before=before) == ""
    assert "in between" in reason((renamed[0], {**renamed[1], "natts": 4}), before=before)


def test_a_column_that_stood_where_the_new_one_is_now_is_read_again() -> None:
    before = side(("id", 1, INT), ("a", 2, TEXT), ("c", 3, INT))
    assert "may have either" in reason(side(("id", 1, INT), ("b", 4, TEXT)), before=before)
    assert reason(side(("id", 1, INT), ("b", 4, BIGINT)), before=before) == ""


def test_columns_that_came_and_went_before_a_proven_shape_are_noticed_when_the_catalog_is_read() -> None:
    proven = side(("id", 1, INT), ("a", 2, TEXT), is_proven=True)
    assert reason(side(("id", 1, INT), ("a", 2, TEXT)), before=proven) == ""
    assert "rewritten" in reason(side(("id", 1, INT), ("a", 2, TEXT), natts=3), before=proven)
    assert reason(side(("id", 1, INT), ("a", 2, TEXT), ("b", 3, INT)), before=proven) == ""
    assert reason(side(("id", 1, INT), ("a", 2, TEXT), natts=3, is_proven=True), before=proven) == ""
