"""What is said of captured tables must not end what runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest

from pgcdc import sources, transform
from pgcdc.core.position import Position
from pgcdc.core.relation import Column, Relation
from pgcdc.core.shapes import ShapeChange, append_shapes
from pgcdc.run import progress
from pgcdc.run.progress import TableWatch
from pgcdc.source.postgres.setup.prepare import Prepared
from pgcdc.transform.program import Chain


def test_columns_that_no_table_has_are_told_if_the_server_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    watch = TableWatch(sources.postgres("postgresql://h/x", tables=["a"]), tmp_path / "shapes.jsonl", said.append)
    prepared = cast(Prepared, SimpleNamespace(identity=SimpleNamespace(publications=[{"name": "p"}])))
    table = SimpleNamespace(relation=Relation(1, "public", "a", "d", (Column("email", 25, -1, False),)))
    monkeypatch.setattr(progress, "connect", lambda *_, **__: cast(Any, memoryview(b"")))  # a context manager

    def gone(*_: Any) -> Any:
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(progress, "read_published", gone)
    watch.tell_missing(prepared, [Chain((transform.mask("Email"),))])
    assert said == []
    monkeypatch.setattr(progress, "read_published", lambda *_: [table])
    watch.tell_missing(prepared, [Chain((transform.mask("Email"),))])
    assert said == ["warning: mask: no captured table has a column Email; did you mean email?"]


def test_column_that_was_renamed_is_told_at_once_to_be_no_longer_masked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    shapes = tmp_path / "shapes.jsonl"
    watch = TableWatch(sources.postgres("postgresql://h/x", tables=["a"]), shapes, said.append)
    prepared = cast(Prepared, SimpleNamespace(identity=SimpleNamespace(publications=[{"name": "p"}])))
    before, after = (Relation(1, "public", "a", "d", (Column(name, 25, -1, False),)) for name in ("email", "mail"))
    monkeypatch.setattr(progress, "connect", lambda *_, **__: cast(Any, memoryview(b"")))
    monkeypatch.setattr(progress, "read_published", lambda *_: [SimpleNamespace(relation=after)])
    chains = [Chain((transform.mask("email"),))]
    append_shapes(shapes, [ShapeChange(Position.at(100, 1), before)])
    watch.tell_changes(prepared, chains)
    assert said == []  # a table that is seen for the first time was looked at before
    append_shapes(shapes, [ShapeChange(Position.at(200, 1), after, before)])
    watch.tell_changes(prepared, chains)
    assert said[-1] == "warning: mask: no captured table has a column email; did you mean mail?"
