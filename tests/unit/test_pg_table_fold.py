"""The fold of pg_table's apply mode against one that takes the changes row by row."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from table_changes import Change, relation, table_changes

from pgcdc.core.relation import OldKind, Op
from pgcdc.sink.pg_table.fold import Folded, MissingKey, Rows, find_moves, fold_bag, fold_keyed, fold_late, number_rows

COLUMNS = ("id", "sub", "a", "b")
Row = dict[str, str | None]
Key = tuple[str | None, ...]


def dicts(rows: Rows | None) -> list[Row]:
    if rows is None:
        return []
    return [
        dict(zip(rows.columns, one, strict=True)) for one in zip(*(v.to_pylist() for v in rows.values), strict=True)
    ]


def is_whole(row: Row) -> bool:
    return set(row) == set(COLUMNS)


class World:
    """A source that changes rows at random, as PostgreSQL tells of it, and the target before all of that."""

    def __init__(self, key: tuple[str, ...], identity: str) -> None:
        self.key, self.identity = key, identity
        self.rows: dict[Key, Row] = {}
        self.changes: list[Change] = []

    def of(self, row: Row) -> Key:
        return tuple(row[name] for name in self.key)

    def insert(self, row: Row, op: Op = Op.INSERT) -> None:
        if self.of(row) not in self.rows:
            self.rows[self.of(row)] = row
            self.changes.append(Change(op, row))

    def delete(self, number: int) -> None:
        if self.rows:
            row = self.rows.pop(sorted(self.rows)[number % len(self.rows)])
            self.changes.append(Change(Op.DELETE, None, *self.old(row)))

    def update(self, number: int, values: Row, lacks: set[str]) -> None:
        if not self.rows:
            return
        before = self.rows[sorted(self.rows)[number % len(self.rows)]]
        after = {**before, **{name: value for name, value in values.items() if name not in lacks}}
        if self.of(after) != self.of(before) and self.of(after) in self.rows:
            return
        del self.rows[self.of(before)]
        self.rows[self.of(after)] = after
        told = {name: value for name, value in after.items() if name not in lacks}
        is_old = self.identity == "f" or self.of(after) != self.of(before)
        self.changes.append(Change(Op.UPDATE, told, *(self.old(before) if is_old else ())))

    def old(self, row: Row) -> tuple[Row, OldKind]:
        if self.identity == "f":
            return row, OldKind.FULL
        return {name: row[name] for name in self.key}, OldKind.KEY


letters = st.sampled_from(["1", "2", "3", ""])
rows = st.fixed_dictionaries({"id": letters, "sub": letters, "a": st.none() | letters, "b": st.none() | letters})
steps = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), rows, st.sampled_from([Op.INSERT, Op.SNAPSHOT])),
        st.tuples(st.just("delete"), st.integers(0, 9)),
        st.tuples(st.just("update"), st.integers(0, 9), rows, st.sets(st.sampled_from(["a", "b"]))),
    ),
    max_size=25,
)


def play(world: World, before: list[tuple[Any, ...]], after: list[tuple[Any, ...]]) -> dict[Key, Row]:
    """What the target has, and then the changes that are folded."""
    for name, *arguments in before:
        getattr(world, name)(*arguments)
    there = dict(world.rows)
    world.changes = []
    for name, *arguments in after:
        getattr(world, name)(*arguments)
    return there


def apply(there: dict[Key, Row], folded: Folded, key: tuple[str, ...]) -> dict[Key, Row]:
    """What the target makes of it; whatever the fold promises about its rows is checked."""
    target = dict(there)

    def of(row: Row) -> Key:
        return tuple(row[name] for name in key)

    for row in dicts(folded.gone):
        del target[of(row)]  # a row that is not there was lost
    for row in dicts(folded.undone):
        assert of(row) not in target
    for row in dicts(folded.puts):
        assert is_whole(row)
        target[of(row)] = row
    for rows in folded.patches:
        for row in dicts(rows):
            assert not is_whole(row)
            target[of(row)] = target[of(row)] | row
    for row in dicts(folded.fresh):
        assert is_whole(row) and of(row) not in target
        target[of(row)] = row
    return target


@pytest.mark.parametrize("key", [("id",), ("sub", "id")])
@pytest.mark.parametrize("identity", ["d", "f"])
@given(before=steps, after=steps)
def test_a_keyed_fold_leaves_what_row_by_row_would(
    key: tuple[str, ...], identity: str, before: list[Any], after: list[Any]
) -> None:
    world = World(key, identity)
    target = play(world, before, after)
    shape = relation(COLUMNS, key, identity)
    places = [COLUMNS.index(name) for name in key]
    changes = table_changes(shape, world.changes)
    begin = 0
    for place in [*find_moves(changes, places, keeps_more=False), len(changes)]:
        part = table_changes(shape, world.changes[begin:place])
        if len(part):
            target = apply(target, fold_keyed(part, places), key)
        if place < len(changes):  # only the target can do it
            move = world.changes[place]
            assert move.old is not None and move.new is not None
            row = {**target.pop(tuple(move.old[name] for name in key)), **move.new}
            target[tuple(row[name] for name in key)] = row
        begin = place + 1
    assert target == world.rows


@given(before=steps, after=steps)
def test_a_bag_leaves_what_row_by_row_would(before: list[Any], after: list[Any]) -> None:
    world = World(("id", "sub"), "f")
    there = play(world, before, after)
    if not world.changes:
        return
    names = ("a", "b")  # of which there may be many equal ones

    def cut(row: Any) -> Row | None:
        return None if row is None else {name: row[name] for name in names if name in row}

    changes = [Change(one.op, cut(one.new), cut(one.old), one.old_kind) for one in world.changes]
    folded = fold_bag(table_changes(relation(names, (), "f"), changes))
    assert folded.puts is None and not folded.patches and folded.undone is None

    def count(found: Any) -> collections.Counter[tuple[str | None, ...]]:
        return collections.Counter(tuple(row[name] for name in names) for row in found)

    bag = count(there.values())
    gone = count(dicts(folded.gone))
    assert gone <= bag
    assert bag - gone + count(dicts(folded.fresh)) == count(world.rows.values())


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=12), st.integers(1, 5))
def test_rows_that_pass_through_the_keys_of_others_are_all_kept(moves: list[tuple[int, int]], count: int) -> None:
    there: dict[str | None, Row] = {str(number): {"id": str(number), "a": f"row {number}"} for number in range(count)}
    now = [dict(row) for row in there.values()]
    changes = []
    for number, step in moves:
        one = now[number % count]
        old = dict(one)
        one["id"] = str((int(str(one["id"])) + step) % 9)
        changes.append(Change(Op.UPDATE, dict(one), old, OldKind.FULL))
    if len({row["id"] for row in now}) < count or not changes:  # the source would not commit that
        return
    folded = fold_late(table_changes(relation(("id", "a"), ("id",), "f"), changes), [0])
    target = dict(there)
    for row in dicts(folded.gone):
        if target.get(row["id"]) == row:
            del target[row["id"]]
    for row in dicts(folded.puts) + dicts(folded.fresh):
        target[row["id"]] = row
    assert sorted(target.values(), key=str) == sorted(now, key=str)


def keyed(*changes: Change, key: tuple[str, ...] = ("id",), columns: tuple[str, ...] = ("id", "a", "b")) -> Folded:
    shape = relation(columns, key)
    return fold_keyed(table_changes(shape, changes), [columns.index(name) for name in key])


def test_rows_are_told_apart_by_what_the_target_has_of_them() -> None:
    folded = keyed(
        Change(Op.INSERT, {"id": "1", "a": "x", "b": None}),
        Change(Op.UPDATE, {"id": "1", "a": "y", "b": None}),
        Change(Op.UPDATE, {"id": "2", "a": "z", "b": None}),
        Change(Op.DELETE, None, {"id": "3"}),
        Change(Op.INSERT, {"id": "4", "a": "x", "b": None}),
        Change(Op.DELETE, None, {"id": "4"}),
        Change(Op.DELETE, None, {"id": "5"}),
        Change(Op.INSERT, {"id": "5", "a": "again", "b": None}),
    )
    assert dicts(folded.fresh) == [{"id": "1", "a": "y", "b": None}]
    assert [row["id"] for row in dicts(folded.puts)] == ["2", "5"]
    assert dicts(folded.gone) == [{"id": "3"}] and dicts(folded.undone) == [{"id": "4"}]


def test_a_value_that_did_not_come_is_taken_from_the_row_before_or_left_to_the_target() -> None:
    folded = keyed(
        Change(Op.INSERT, {"id": "1", "a": "long", "b": "x"}),
        Change(Op.UPDATE, {"id": "1", "b": "y"}),
        Change(Op.UPDATE, {"id": "2", "b": "y"}),
        Change(Op.UPDATE, {"id": "2", "b": "z"}),
        Change(Op.UPDATE, {"id": "3", "a": None}),
        Change(Op.UPDATE, {"id": "4", "b": "z"}),
        Change(Op.UPDATE, {"id": "4", "a": None, "b": "w"}),
    )
    assert dicts(folded.fresh) == [{"id": "1", "a": "long", "b": "y"}]
    assert [dicts(rows) for rows in folded.patches] == [[{"id": "3", "a": None}], [{"id": "2", "b": "z"}]]
    assert dicts(folded.puts) == [{"id": "4", "a": None, "b": "w"}]  # NULL is not what was unchanged


def test_a_change_that_names_no_row_is_refused() -> None:
    with pytest.raises(MissingKey, match="id"):
        keyed(Change(Op.UPDATE, {"a": "1", "b": "2"}))
    with pytest.raises(MissingKey):
        fold_bag(table_changes(relation(("a",), (), "f"), [Change(Op.UPDATE, {"a": "1"})]))


def test_a_key_that_moves_is_left_to_a_target_with_more_columns() -> None:
    changes = [
        Change(Op.UPDATE, {"id": "9", "a": "x"}, {"id": "8"}),
        Change(Op.UPDATE, {"id": "1", "a": "y"}),
        Change(Op.UPDATE, {"id": "7"}, {"id": "6"}),
    ]
    made = table_changes(relation(("id", "a"), ("id",)), changes)
    assert find_moves(made, [0], keeps_more=True) == [0, 2]
    assert find_moves(made, [0], keeps_more=False) == [2]


def test_numbers_tell_null_from_the_empty_text() -> None:
    codes, count = number_rows([pa.array(["", None, "", None]), pa.array(["a", "a", "a", "b"])])
    assert count == 3 and codes[0] == codes[2] and len(np.unique(codes)) == 3
