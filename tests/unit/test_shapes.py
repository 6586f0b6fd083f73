"""The history of shapes: written where it counts, once, whatever crashes; and the events made of it."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyspark.sql.types import StructType
from wire import encode_begin, encode_commit, encode_insert, encode_message, encode_relation, encode_truncate

from pgcdc.core.errors import ConnectionLost, StateError
from pgcdc.core.position import SCHEMA_SUB, Kind, Position
from pgcdc.core.relation import Column, Relation, ShapeChange, ShapeHistory, append_shapes, cut_tail
from pgcdc.source.postgres.setup import guard as capture_shapes
from pgcdc.source.postgres.setup.guard import ShapeObserver
from pgcdc.source.postgres.setup.shapes import CatalogLook
from pgcdc.source.postgres.wire.assemble import Assembler
from pgcdc.spark.options import parse_options
from pgcdc.spark.source import ChangeReader
from pgcdc.spool.segment import CaptureBatch
from pgcdc.spool.writer import SpoolWriter

START = Position.end(100)
NO_SQL: Any = None


def shape(oid: int, *names: str, table: str = "") -> Relation:
    return Relation(oid, "public", table or f"t{oid}", "d", tuple(Column(name, 25, -1, name == "id") for name in names))


A, B, C = shape(1, "id"), shape(1, "id", "note"), shape(1, "id", "other")
X, Y = shape(2, "id"), shape(2, "id", "more")


@dataclass(frozen=True)
class Transaction:
    """What it does, one by one: a row in this shape, or (a text) a message; with `truncate` the last row is a TRUNCATE."""

    lsn: int
    steps: tuple[Relation | str, ...]
    truncate: bool = False

    def encode(self) -> Iterator[bytes]:
        yield encode_begin(self.lsn - 1, 0, 7)
        for number, step in enumerate(self.steps, 1):
            if isinstance(step, str):
                yield encode_message("m", step.encode(), self.lsn - 2)
                continue
            yield encode_relation(step)
            is_last = number == len(self.steps)
            values = tuple("v" for _ in step.columns)
            yield encode_truncate([step.oid]) if self.truncate and is_last else encode_insert(step.oid, values)
        yield encode_commit(self.lsn - 1, self.lsn, 0)


def expected_history(transactions: list[Transaction]) -> list[ShapeChange]:
    """The obvious implementation."""
    current: dict[int, Relation] = {}
    found = []
    for one in transactions:
        rows = [step for step in one.steps if isinstance(step, Relation)]
        for ordinal, after in enumerate(rows, 1):
            if current.get(after.oid) != after:
                position = Position.at(one.lsn, ordinal - 1, SCHEMA_SUB)
                found.append(ShapeChange(position, after, current.get(after.oid)))
            current[after.oid] = after
    return found


class Crash(Exception):
    """Ends a run at a chosen step."""


class Pipe:
    """A state directory with spool and history; every run reads the stream again from where the last one was."""

    def __init__(self, folder: Path, seal_rows: int = 65_536, spill_bytes: int = 1 << 24) -> None:
        self.folder = folder
        self.seal_rows = seal_rows
        self.spill_bytes = spill_bytes

    @property
    def file(self) -> Path:
        return self.folder / "shapes.jsonl"

    @property
    def history(self) -> list[ShapeChange]:
        history = ShapeHistory(self.file)
        history.refresh()
        return history.changes

    def run(self, transactions: list[Transaction], crash_at: int = -1) -> int:
        """The number of changes that the observer counts. Every batch is two steps: observed, appended."""
        writer = SpoolWriter(self.folder / "spool", START)
        observer = ShapeObserver(self.file, Position.end(writer.resume_lsn))
        assembler = Assembler(
            writer.relations, start_lsn=writer.resume_lsn, seal_rows=self.seal_rows, spill_bytes=self.spill_bytes,
            spill_dir=self.folder / "spool",
        )  # fmt: skip
        step = itertools.count()
        try:
            for one in transactions:
                if one.lsn <= writer.resume_lsn:
                    continue
                for message in one.encode():
                    assembler.feed(message, one.lsn)
                    while batch := assembler.pop(drain=False):
                        self._take(batch, observer, writer, step, crash_at)
            while batch := assembler.pop():
                self._take(batch, observer, writer, step, crash_at)
        finally:
            writer.close()
        return observer.changes

    @staticmethod
    def _take(
        batch: CaptureBatch, observer: ShapeObserver, writer: SpoolWriter, step: Iterator[int], crash_at: int
    ) -> None:
        if next(step) == crash_at:
            raise Crash
        observer.observe(batch, NO_SQL)
        if next(step) == crash_at:
            raise Crash
        writer.append(batch)


@contextmanager
def no_catalog() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture_shapes, "read_catalog", lambda sql, shapes, publications: CatalogLook())
        yield


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    with no_catalog():
        yield Pipe(tmp_path)


@st.composite
def streams(draw: st.DrawFn) -> list[Transaction]:
    choices: list[Relation | str] = [A, B, C, X, Y, "a message"]
    steps = st.lists(st.sampled_from(choices), min_size=1, max_size=8).map(tuple)
    count = draw(st.integers(1, 5))
    return [Transaction(100 + 10 * number, draw(steps), draw(st.booleans())) for number in range(1, count + 1)]


@settings(max_examples=30)
@given(streams(), st.integers(1, 7), st.sampled_from([1, 1 << 24]), st.integers(0, 20), st.booleans())
def test_history_is_that_of_the_obvious_implementation_whatever_the_cuts_and_crashes(
    transactions: list[Transaction], seal_rows: int, spill_bytes: int, crash_at: int, spool_is_lost: bool
) -> None:
    expected = expected_history(transactions)
    with tempfile.TemporaryDirectory() as folder, no_catalog():
        pipe = Pipe(Path(folder), seal_rows, spill_bytes)
        try:
            pipe.run(transactions, crash_at)
        except Crash:
            assert pipe.history == expected[: len(pipe.history)], "never something that is not so"
            if spool_is_lost:
                shutil.rmtree(Path(folder) / "spool")
        counted = pipe.run(transactions)
        assert pipe.history == expected
        assert counted == sum(change.before is not None for change in expected)
        assert pipe.run(transactions) == counted
        assert pipe.history == expected, "nothing is written twice"


@pytest.mark.parametrize("seal_rows", [1, 100])
def test_shape_that_comes_back_is_a_change_again(pipe: Pipe, seal_rows: int) -> None:
    pipe.seal_rows = seal_rows  # each row a batch, or all in one
    assert pipe.run([Transaction(110, (A, B)), Transaction(120, (A,))]) == 2
    assert [(str(one.position), one.before, one.after) for one in pipe.history] == [
        ("000000000000006E/0000000000000.7FFFFFFE", None, A),
        ("000000000000006E/0000000000001.7FFFFFFE", A, B),
        ("0000000000000078/0000000000000.7FFFFFFE", B, A),
    ]


def test_history_goes_on_after_a_restart_with_the_shape_in_force(pipe: Pipe) -> None:
    pipe.run([Transaction(110, (A, X))])
    pipe.run([Transaction(110, (A, X)), Transaction(120, (X,)), Transaction(130, (B,))])
    assert [(one.before, one.after) for one in pipe.history] == [(None, A), (None, X), (A, B)]


def test_history_is_durable_before_the_rows_are_visible(pipe: Pipe) -> None:
    with pytest.raises(Crash):
        pipe.run([Transaction(110, (A,))], crash_at=1)
    assert [one.after for one in pipe.history] == [A]
    assert not list((pipe.folder / "spool").glob("seg-*"))


def test_capture_cuts_off_what_a_crash_left_of_a_line_and_goes_on(pipe: Pipe) -> None:
    pipe.run([Transaction(110, (A,))])
    whole = pipe.file.read_bytes()
    pipe.file.write_bytes(whole + whole[: len(whole) // 2])
    assert pipe.run([Transaction(110, (A,)), Transaction(120, (B,))]) == 1
    assert [one.after for one in pipe.history] == [A, B]


def test_state_of_an_older_version_begins_with_what_is_seen_and_takes_in_what_is_read_again(pipe: Pipe) -> None:
    transactions = [Transaction(110, (A,)), Transaction(120, (B,)), Transaction(130, (B, X))]
    pipe.run(transactions[:2])
    pipe.file.unlink()  # the older version wrote none
    pipe.run(transactions)
    assert [(one.before, one.after) for one in pipe.history] == [(None, B), (None, X)]
    shutil.rmtree(pipe.folder / "spool")
    pipe.run(transactions)
    assert [(one.position.commit, one.before, one.after) for one in pipe.history] == [
        (110, None, A), (120, A, B), (130, None, B), (130, None, X),
    ]  # fmt: skip


def test_history_that_says_otherwise_stops_the_capture(pipe: Pipe) -> None:
    pipe.run([Transaction(110, (A,))])
    shutil.rmtree(pipe.folder / "spool")
    with pytest.raises(StateError, match=r"public\.t1 has another shape at 000000000000006E/0000000000000\.7FFFFFFE"):
        pipe.run([Transaction(110, (B,))])


def test_nothing_has_happened_when_the_catalog_could_not_be_asked(tmp_path: Path) -> None:
    pipe = Pipe(tmp_path)
    asked: list[list[Relation]] = []

    class Look:
        def describe(self, one: Relation, *_: object) -> dict[str, Any]:
            return {"columns": [], "primary_key": [], "types": None, "of": one.name}

    def look(sql: Any, shapes: list[Relation], publications: object) -> Look:
        asked.append(list(shapes))
        if len(asked) == 1:
            raise ConnectionLost("the server is gone")
        return Look()

    writer = SpoolWriter(tmp_path / "spool", START)
    observer = ShapeObserver(pipe.file, START)
    assembler = Assembler(writer.relations, start_lsn=START.commit)
    for message in Transaction(110, (A, X, B)).encode():
        assembler.feed(message, 110)
    batch = assembler.pop()
    assert batch is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture_shapes, "read_catalog", look)
        with pytest.raises(ConnectionLost):
            observer.observe(batch, NO_SQL)
        assert not pipe.file.exists()
        observer.observe(batch, NO_SQL)
        observer.observe(batch, NO_SQL)
    writer.close()
    assert asked[0] == asked[1] == [A, X, B]
    assert [one.details and one.details["of"] for one in pipe.history] == ["t1", "t2", "t1"]
    assert pipe.history[2].before_details == pipe.history[0].details


# --- the file


def test_record_survives_its_way_through_the_file(tmp_path: Path) -> None:
    details = {"columns": [{"name": "id", "attnum": 1}], "primary_key": ["id"], "types": None}
    change = ShapeChange(
        Position.at(110, 3, SCHEMA_SUB), B, A, details, {"columns": [], "primary_key": [], "types": None}
    )
    append_shapes(tmp_path / "shapes.jsonl", [change])
    history = ShapeHistory(tmp_path / "shapes.jsonl")
    assert history.refresh() == history.changes == [change]
    assert history.refresh() == []


def test_half_written_line_is_left_alone_by_readers_and_cut_off_by_the_writer(tmp_path: Path) -> None:
    file = tmp_path / "shapes.jsonl"
    changes = [ShapeChange(Position.at(110, number, SCHEMA_SUB), one) for number, one in enumerate((A, X))]
    append_shapes(file, changes)
    whole = file.read_bytes()
    first = whole.index(b"\n") + 1
    for size in {*range(first, len(whole), 29), len(whole) - 1}:
        file.write_bytes(whole[:size])
        history = ShapeHistory(file)
        assert history.refresh() == changes[:1]
        cut_tail(file)
        assert file.read_bytes() == whole[:first]
        append_shapes(file, changes[1:])
        assert history.refresh() == changes[1:]


def test_records_are_found_by_their_positions(tmp_path: Path) -> None:
    file = tmp_path / "shapes.jsonl"
    first, second, third = (ShapeChange(Position.at(lsn, 0, SCHEMA_SUB), A) for lsn in (110, 120, 130))
    append_shapes(file, [second, third])
    append_shapes(file, [first])  # read again, see above
    history = ShapeHistory(file)
    history.refresh()
    assert history.changes == [first, second, third]
    assert history.at(second.position) == second
    assert history.at(Position.at(120, 0)) is None and history.at(Position.end(130)) is None
    assert history.between(first.position, second.position) == [second]
    assert history.between(Position.at(110, 0), Position.end(120)) == [first, second]
    assert history.in_force("public", "t1", Position.at(120, 0)) == first
    assert history.next("public", "t1", Position.at(120, 0)) == second


# --- events


class Delivered:
    """What Spark gets from a state directory, as it asks for it."""

    def __init__(self, folder: Path, **options: str) -> None:
        schema = StructType().add("position", "string").add("json", "string")
        raw = {"_spool": str(folder / "spool"), "schema_events": "true", **options}
        self._reader = ChangeReader(parse_options(raw), schema)
        spool = self._reader._open().spool
        spool.refresh()
        self.end = spool.end

    def between(self, start: Position, end: Position) -> list[str]:
        found: list[str] = []
        for partition in self._reader.partitions(start.to_offset(), end.to_offset()):
            for batch in self._reader.read(partition):
                pa.Table.from_batches([batch]).validate(full=True)
                found += batch.column("json").to_pylist()
        return found

    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.between(START, self.end)]


def test_event_stands_directly_before_the_first_row_in_the_new_shape(pipe: Pipe) -> None:
    pipe.run([Transaction(110, (A, "m", B, X, B)), Transaction(120, ("m", A))])
    events = Delivered(pipe.folder, tx_markers="true").all()
    assert [one["operation"] for one in events] == [
        "BEGIN", "INSERT", "MESSAGE", "SCHEMA_CHANGE", "INSERT", "INSERT", "INSERT", "COMMIT",
        "BEGIN", "MESSAGE", "SCHEMA_CHANGE", "INSERT", "COMMIT",
    ]  # fmt: skip
    found = events[3]
    assert found["channel"] == "pgcdc:_schema"
    assert found["position"] == "000000000000006E/0000000000001.7FFFFFFE"
    assert found["transaction"]["seq"] == 1
    row = found["payload"].pop("row")
    assert found["payload"] == {"op": "SCHEMA_CHANGE", "schema": None, "table": None, "old": None}
    assert list(row) == ["schema", "table", "changes", "columns"]
    assert (row["schema"], row["table"]) == ("public", "t1")
    assert json.loads(row["changes"]) == [{"type": "column_added", "column": "note", "new_type": "text"}]
    assert json.loads(row["columns"]) == [
        {"name": "id", "type": "text", "key": True},
        {"name": "note", "type": "text", "key": False},
    ]


def test_switching_schema_events_on_moves_nothing_else(pipe: Pipe) -> None:
    pipe.run([Transaction(110, (A, B, A, X)), Transaction(120, (Y, A))])
    plain = Delivered(pipe.folder, schema_events="false").all()
    events = Delivered(pipe.folder).all()
    assert [one for one in events if one["operation"] != "SCHEMA_CHANGE"] == plain
    assert len(events) == len(plain) + 3


@settings(max_examples=5)
@given(streams(), st.integers(1, 7), st.booleans())
@example([Transaction(110, (A, "m", B, "m", X)), Transaction(120, ("m", A, "m"))], 1, True)
def test_every_cut_gives_every_event_once(transactions: list[Transaction], seal_rows: int, markers: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, no_catalog():
        Pipe(Path(folder), seal_rows).run(transactions)
        delivered = Delivered(Path(folder), tx_markers=str(markers).lower())
        lines = delivered.between(START, delivered.end)
        events = [json.loads(line) for line in lines]
        expected = [change for change in expected_history(transactions) if change.before is not None]
        told = [one["position"] for one in events if one["operation"] == "SCHEMA_CHANGE"]
        assert told == [str(change.position) for change in expected]
        positions = [one["position"] for one in events]
        assert positions == sorted(set(positions))
        assert len({one["id"] for one in events}) == len(events)
        cuts = [START, *map(Position.parse, positions), *(Position.end(one.lsn) for one in transactions), delivered.end]
        cuts = sorted({cut for cut in cuts if cut <= delivered.end})
        for cut in cuts:
            assert delivered.between(START, cut) + delivered.between(cut, delivered.end) == lines
        steps = itertools.chain.from_iterable(delivered.between(*pair) for pair in itertools.pairwise(cuts))
        assert list(steps) == lines


def test_a_mark_gives_a_table_its_name_again_and_one_that_tells_nothing_ends_its_question(tmp_path: Path) -> None:
    """Another table had the name since: the marks say who has it now. Who asked waits until the record is another object."""
    file = tmp_path / "shapes.jsonl"
    mine = Relation(1, "public", "a", "d", (Column("id", 23, -1, True),))
    other = replace(mine, oid=2)
    column = {"name": "id", "attnum": 1, "type": "integer", "ndims": 0, "not_null": True, "since": "1"}
    details = {"columns": [column], "primary_key": ["id"], "types": None}
    told = [(10, mine), (20, other)]
    append_shapes(file, [ShapeChange(Position.at(commit, 1), one, details=details) for commit, one in told])
    observer = ShapeObserver(file, Position.end(30))
    assert observer.taken() == {1} and observer.is_taken(mine) and not observer.is_taken(other)

    def mark(commit: int) -> None:
        columns = {"commit": [commit], "kind": [int(Kind.SNAPSHOT)], "xid": [0], "rows": [1]}
        batch = SimpleNamespace(relations=[mine], transactions=pa.table(columns))
        observer._take_mark(
            cast(Any, batch), pa.table({"relation": [0], "prefix": [json.dumps(details)], "ordinal": [1]})
        )

    mark(40)
    assert observer.taken() == {2} and observer.current[1].position > Position.at(20, 1)
    asked = observer.current[1]
    mark(50)
    assert observer.current[1] is not asked and observer.current[1].position == asked.position
