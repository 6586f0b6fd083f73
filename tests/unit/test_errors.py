"""The error tree: what is drawn at the top of the file is what the classes are, and every kind crosses processes."""

from __future__ import annotations

import inspect
import json
import pickle
import re
from pathlib import Path

import pytest

from pgcdc.core import errors
from pgcdc.core.errors import GapError, PgcdcError, Policy

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, PgcdcError) and kind.__module__ == errors.__name__
]
_LINE = re.compile(
    r"^    (?P<branch>[│├└─ ]*)(?P<name>[A-Z]\w+)(?:\s{2,}(?P<fate>[a-z]+(?: [a-z]+)?)(?:, exit (?P<exit>\d))?\s{2})?"
)


def drawn_tree() -> dict[str, tuple[str | None, str | None, int | None]]:
    """name -> (parent, what becomes of it, exit code), from the drawing in the docstring."""
    tree: dict[str, tuple[str | None, str | None, int | None]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        depth = len(match["branch"]) // 4
        path[depth:] = [match["name"]]
        fate = match["fate"].replace(" ", "_") if match["fate"] else None
        exit_code = int(match["exit"]) if match["exit"] else None
        tree[match["name"]] = (path[depth - 1] if depth else None, fate, exit_code)
    return tree


def test_drawing_names_exactly_the_classes() -> None:
    assert set(drawn_tree()) == {kind.__name__ for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_class_is_as_drawn(kind: type[PgcdcError]) -> None:
    parent, fate, exit_code = drawn_tree()[kind.__name__]
    assert kind.__bases__[0].__name__ == (parent or "Exception")
    if fate is not None:
        assert kind.policy is Policy(fate)
    if exit_code is not None:
        assert kind.exit_code == exit_code


def test_drawing_has_a_policy_for_every_leaf() -> None:
    tree = drawn_tree()
    parents = {parent for parent, _, _ in tree.values()}
    assert all(fate for name, (_, fate, _) in tree.items() if name not in parents)


@pytest.mark.parametrize("kind", KINDS)
def test_kind_survives_json(kind: type[PgcdcError]) -> None:
    error = kind("it broke: ä \n", "mend it")
    back = PgcdcError.from_json(json.loads(json.dumps(error.to_json())))
    assert type(back) is kind
    assert (back.message, back.advice, str(back)) == (error.message, error.advice, str(error))


@pytest.mark.parametrize("kind", KINDS)
def test_kind_that_is_not_in_the_tree_travels_as_its_parent(kind: type[PgcdcError]) -> None:
    special: type[PgcdcError] = type("Special", (kind,), {})
    back = PgcdcError.from_json(special("it broke", "mend it").to_json())
    assert (type(back), back.exit_code, back.policy) == (kind, special.exit_code, special.policy)


@pytest.mark.parametrize("kind", KINDS)
def test_kind_survives_pickle(kind: type[PgcdcError]) -> None:
    back = pickle.loads(pickle.dumps(kind("it broke", "mend it")))
    assert (type(back), back.message, back.advice) == (kind, "it broke", "mend it")


@pytest.mark.parametrize("raw", [{"kind": "OfANewerVersion", "message": "it broke"}, {"message": "it broke"}])
def test_unknown_kind_becomes_an_error_that_stops(raw: dict[str, str]) -> None:
    error = PgcdcError.from_json(raw)
    assert (type(error), error.message, error.advice, error.policy) == (PgcdcError, "it broke", "", Policy.STOP)


def test_text_is_what_happened_and_then_what_to_do() -> None:
    assert str(PgcdcError("it broke", "Mend it")) == "it broke. Mend it"
    assert str(PgcdcError("it broke")) == "it broke"


def test_public_names_are_sorted_and_complete() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == errors.__name__
        and not name.startswith("_")
    }
    assert errors.__all__ == sorted(defined)


def test_advice_to_resync_names_the_state_directory_that_was_given() -> None:
    advice = "Begin again: pgcdc resync --new-slot"
    for given, expected in ((".pgcdc", advice), ("/a b", "Begin again: pgcdc resync --state-dir '/a b' --new-slot")):
        error = GapError("the slot is gone", advice)
        for _ in range(2):
            error.name_state_dir(Path(given))
            assert error.advice == expected
