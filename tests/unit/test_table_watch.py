"""What is said of captured tables must not end what runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest

from pgcdc import transform
from pgcdc.core.errors import GapError, SourceError
from pgcdc.core.position import Position
from pgcdc.core.relation import Column, Relation, ShapeChange, append_shapes
from pgcdc.core.state import Identity, StateDir
from pgcdc.run import progress
from pgcdc.run.progress import TableWatch
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.protocol import Prepared, Source, make_source
from pgcdc.transform.specs import Chain

DETAILS = {"timeline": 1, "publications": [{"name": "p", "tables": []}], "asked": {}}
IDENTITY = Identity("postgres", "7", "shop", "s1", "i", 800, DETAILS)


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    made = StateDir(tmp_path)
    made.create()
    made.save_identity(IDENTITY)
    return made


def test_columns_that_no_table_has_are_told_if_the_server_answers(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    watch = TableWatch(make_source(PostgresOptions(db="postgresql://h/x", tables=("a",))), state, said.append)
    table = SimpleNamespace(relation=Relation(1, "public", "a", "d", (Column("email", 25, -1, False),)))
    monkeypatch.setattr(
        "pgcdc.source.postgres.source.connect", lambda *_, **__: cast(Any, memoryview(b""))
    )  # opens and closes

    def gone(*_: Any) -> Any:
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr("pgcdc.source.postgres.source.read_published", gone)
    watch.tell_missing([Chain((transform.mask("Email"),))])
    assert said == []
    monkeypatch.setattr("pgcdc.source.postgres.source.read_published", lambda *_: [table])
    watch.tell_missing([Chain((transform.mask("Email"),))])
    assert said == ["warning: mask: no captured table has a column Email; did you mean email?"]


def test_column_that_was_renamed_is_told_at_once_to_be_no_longer_masked(state: StateDir) -> None:
    said: list[str] = []
    before, after = (Relation(1, "public", "a", "d", (Column(name, 25, -1, False),)) for name in ("email", "mail"))
    watch = TableWatch(cast(Source, SimpleNamespace(captured=lambda identity: [after])), state, said.append)
    chains = [Chain((transform.mask("email"),))]
    append_shapes(state.shapes_file, [ShapeChange(Position.at(100, 1), before)])
    watch.tell_changes(chains)
    assert said == []  # a table that is seen for the first time was looked at before
    append_shapes(state.shapes_file, [ShapeChange(Position.at(200, 1), after, before)])
    watch.tell_changes(chains)
    assert said[-1] == "warning: mask: no captured table has a column email; did you mean mail?"


def test_tables_that_are_new_are_told_once_and_a_gap_ends_the_run(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "TABLES_INTERVAL_S", 0.0)
    said: list[str] = []
    answers: list[Any] = [{"a"}, SourceError("a lock"), {"a", "c", "b"}, {"a", "b", "c"}, GapError("it was dropped")]

    def follow(_: StateDir) -> tuple[frozenset[str], tuple[str, ...]]:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return frozenset(found), (() if len(found) == 1 else ("table b has no key",))

    watch = TableWatch(cast(Source, SimpleNamespace(follow_tables=follow)), state, said.append)
    watch.begin(Prepared(IDENTITY, frozenset({"a"}), ("table x is no longer captured",)), [])
    for _ in range(4):
        watch.follow()
    assert said == [
        "table x is no longer captured",
        "new tables cannot be published: a lock",
        "new tables captured from now on: b, c",
        "warning: table b has no key",
    ]
    with pytest.raises(GapError):
        watch.follow()
