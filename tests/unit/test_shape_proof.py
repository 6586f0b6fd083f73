"""Which columns a shape had that its table has no more: proven from what was before and what is now, or not said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from pgcdc.core.relation import Column, Relation
from pgcdc.source.postgres.setup.shapes import CatalogEntry, CatalogLook, prove_numbers
from pgcdc.source.postgres.setup.tables import TableColumn

INT, TEXT = 23, 25


@dataclass
class Table:
    """ALTER TABLE as the server does it: live columns by number, with name and type."""

    live: dict[int, tuple[str, int]] = field(default_factory=lambda: {1: ("id", INT), 2: ("a", TEXT), 3: ("b", TEXT)})
    natts: int = 3

    def run(self, *steps: str) -> Table:
        for step in steps:
            kind, *names = step.split()
            numbers = {name: number for number, (name, _) in self.live.items()}
            if kind == "add" and names[0] not in numbers:
                self.natts += 1
                self.live[self.natts] = (names[0], TEXT)
            elif kind == "drop" and names[0] in numbers:
                del self.live[numbers[names[0]]]
            elif kind == "rename" and names[0] in numbers and names[1] not in numbers:
                self.live[numbers[names[0]]] = (names[1], self.live[numbers[names[0]]][1])
            elif kind == "type" and names[0] in numbers:
                number = numbers[names[0]]
                self.live[number] = (names[0], INT if self.live[number][1] == TEXT else TEXT)
        return self

    @property
    def numbers(self) -> list[int]:
        return sorted(self.live)

    @property
    def names(self) -> list[str]:
        return [self.live[number][0] for number in self.numbers]

    def entry(self) -> CatalogEntry:
        columns = [
            TableColumn(name, kind, -1, 0, number, f"type {kind}", False, name == "id", 1 if number == 1 else None,
                        False, "", True)
            for number, (name, kind) in sorted(self.live.items())
        ]  # fmt: skip
        return CatalogEntry(columns, {"natts": self.natts, "filenode": 7})

    def relation(self) -> Relation:
        made = tuple(Column(*self.live[number], -1, number == 1) for number in self.numbers)
        return Relation(9, "public", "t", "d", made)

    def details(self) -> dict[str, Any]:
        found = CatalogLook({9: self.entry()}).describe(self.relation())
        assert found is not None
        return found


@pytest.mark.parametrize(
    ("between", "later"),
    [
        (["rename a x"], ["type x"]),
        (["rename a x"], ["rename x y"]),
        (["rename a x", "rename b a"], ["type a", "rename x b"]),
        (["drop a", "rename b x"], ["type x"]),
        (["add c", "rename a x"], ["type x"]),
        (["rename a x"], ["drop x", "type b"]),
        (["add c", "rename a x"], ["add d", "type x"]),
    ],
)
def test_a_shape_in_between_is_proven(between: list[str], later: list[str]) -> None:
    table = Table()
    before = table.details()
    numbers, names, shape = (made := table.run(*between)).numbers, made.names, table.relation()
    details = CatalogLook({9: table.run(*later).entry()}).describe(shape, before)
    assert details is not None
    assert details["is_proven"]
    assert [one["name"] for one in details["columns"]] == names
    assert [one["attnum"] for one in details["columns"]] == numbers
    assert details["primary_key"] == ["id"]
    assert "missing" not in details["columns"][0]
    assert details["filenode"] == before["filenode"]  # what has changed since is told by the next shape


@pytest.mark.parametrize(
    ("between", "later"),
    [
        (["rename a x"], ["drop b", "add c", "add d"]),  # b was there, or c was already
        (["drop b", "add c"], ["drop c", "rename a x"]),
        (["drop b", "add b", "type b"], ["type a"]),  # the old b, or the new one
    ],
)
def test_where_two_ways_are_possible_nothing_is_proven(between: list[str], later: list[str]) -> None:
    table = Table()
    before = table.details()
    shape = table.run(*between).relation()
    assert CatalogLook({9: table.run(*later).entry()}).describe(shape, before) is None


@pytest.mark.parametrize(
    "more", [{"hidden": [4]}, {"published": {"row_filter": None, "columns": ["id", "a", "b"]}}, {"natts": None}]
)
def test_nothing_is_proven_of_a_table_whose_columns_are_not_all_known(more: dict[str, Any]) -> None:
    table = Table()
    before = {name: value for name, value in {**table.details(), **more}.items() if value is not None}
    names = table.run("rename a x").names
    assert prove_numbers(before, names, table.run("type x").entry()) is None


names = st.sampled_from(["a", "b", "c", "d", "e"])
steps = st.one_of(
    names.map("add {}".format), names.map("drop {}".format), names.map("type {}".format),
    st.tuples(names, names).map(lambda pair: f"rename {pair[0]} {pair[1]}"),
)  # fmt: skip
scripts = st.lists(steps, max_size=6)


@settings(max_examples=400)
@given(scripts, scripts, scripts, scripts)
def test_what_is_proven_is_right(first: list[str], second: list[str], third: list[str], last: list[str]) -> None:
    table = Table().run(*first)
    before = table.details()
    shapes = [(table.run(*second).relation(), table.numbers), (table.run(*third).relation(), table.numbers)]
    entry = table.run(*last).entry()
    known: dict[str, Any] | None = before
    for shape, numbers in shapes:  # the second is proven from the first
        found = None
        if known is not None and (proven := prove_numbers(known, [one.name for one in shape.columns], entry)):
            assert proven == numbers
            found = CatalogLook({9: entry})._proven(shape, proven, known, entry)
        event(f"proven: {found is not None}")
        known = found
