"""Which rows of a batch an adapter gets: not those of others, and of a held table only its own reload."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pytest

from pgcdc.core.errors import ReloadNeeded, SinkUnavailable
from pgcdc.core.position import Position
from pgcdc.core.relation import Column, Op, Relation, ShapeChange, ShapeHistory, append_shapes
from pgcdc.core.state import StateDir
from pgcdc.event.audience import Audience, Letter, append_letter, keep_letters
from pgcdc.event.batch import Batch
from pgcdc.event.forms import FORMS, Form
from pgcdc.event.shape import TableShape
from pgcdc.sink.contract import Progress, Sink, SinkContext
from pgcdc.sink.holds import Hold, Holds, find_misnamed
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import DeliveryOptions

T, OTHER = 1, 2
SHAPES = {oid: TableShape(Relation(oid, "public", f"t{oid}", "d", (Column("id", 23, -1, True),))) for oid in (T, OTHER)}


def row(position: Position, oid: int) -> tuple[str, int]:
    return str(position), oid


def batch(start: Position, end: Position, *rows: tuple[str, int]) -> Batch:
    columns = {name: pa.nulls(len(rows), FORMS["tables"].field(name).type) for name in FORMS["tables"].names}
    columns["relation"] = pa.array([oid for _, oid in rows], pa.int32())
    columns["op"] = pa.array([Op.INSERT] * len(rows), pa.uint8())
    positions = pa.array([position for position, _ in rows], pa.string())
    return Batch(start, end, pa.table({"position": positions, **columns}), SHAPES)


def stream(commit: int) -> Position:
    return Position.at(commit, 1)


def letter(commit: int, chunk: int, *adapters: str, reload: str = "r", is_last: bool = False) -> Letter:
    first, last = str(Position.of_chunk(commit, chunk, 0)), str(Position.chunk_end(commit, chunk))
    return Letter(first, last, adapters, reload, T if reload else 0, is_last)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "audience.jsonl"


def holds(file: Path, held: dict[int, Hold] | None = None, name: str = "copy", *, is_keyed: bool = True) -> Holds:
    folder = file.parent / "acks"
    folder.mkdir(exist_ok=True)
    progress = Progress(folder, name)
    progress.save(Position.end(1), holds=held or {})
    return Holds(Audience(file), progress, name, is_keyed=is_keyed)


def left(one: Holds, given: Batch) -> list[str]:
    return [str(text) for text in one.take(given).positions().to_pylist()]


def test_rows_for_others_are_left_out_and_everything_else_stays(file: Path) -> None:
    append_letter(file, letter(5, 0, "another", reload=""))
    rows = [row(stream(5), T), row(Position.of_chunk(5, 0, 1), T), row(stream(6), OTHER)]
    given = batch(Position.end(4), Position.end(6), *rows)
    assert left(holds(file), given) == [rows[0][0], rows[2][0]]
    assert left(holds(file, name="another"), given) == [text for text, _ in rows]


def test_a_held_table_is_taken_only_from_its_own_reload(file: Path) -> None:
    append_letter(file, letter(5, 0, "copy", reload="old", is_last=True))
    append_letter(file, letter(6, 0, "copy", reload="mine"))
    append_letter(file, letter(7, 0, "copy", reload="mine", is_last=True))
    rows = [
        row(stream(5), T), row(Position.of_chunk(5, 0, 1), T), row(stream(6), OTHER), row(stream(6), T),
        row(Position.of_chunk(6, 0, 1), T), row(stream(7), T), row(Position.of_chunk(7, 0, 1), T), row(stream(8), T),
    ]  # fmt: skip
    one = holds(file, {T: Hold("mine", "t1")})
    given = batch(Position.end(4), Position.end(8), *rows)
    assert left(one, given) == [rows[number][0] for number in (2, 4, 6, 7)]
    assert one.after(Position.end(4), Position.end(6)) == {T: Hold("mine", "t1")}
    assert one.after(Position.end(4), Position.end(8)) == {}


def test_the_first_row_of_a_reload_that_somebody_asked_for_holds_the_table(file: Path) -> None:
    append_letter(file, letter(5, 0, "copy"))
    append_letter(file, letter(6, 0, "copy", is_last=True))
    rows = [
        row(stream(5), T),
        row(Position.of_chunk(5, 0, 1), T),
        row(stream(6), T),
        row(Position.of_chunk(6, 0, 1), T),
    ]
    one = holds(file)
    assert left(one, batch(Position.end(4), Position.end(7), *rows)) == [rows[number][0] for number in (0, 1, 3)]
    assert one.after(Position.end(4), Position.chunk_end(5, 0)) == {T: Hold("r", "")}


def test_a_log_takes_what_is_addressed_to_it_and_leaves_nothing_else_out(file: Path) -> None:
    append_letter(file, letter(5, 0, "copy"))
    rows = [row(stream(5), T), row(Position.of_chunk(5, 0, 1), T), row(stream(6), T)]
    one = holds(file, is_keyed=False)
    assert left(one, batch(Position.end(4), Position.end(6), *rows)) == [text for text, _ in rows]
    assert one.after(Position.end(4), Position.end(6)) == {}


def test_holds_are_on_disk_before_anything_else_happens(file: Path) -> None:
    one = holds(file)
    one.add({T: Hold("mine", "t1", "why")})
    assert Progress(file.parent / "acks", "copy").holds == {T: Hold("mine", "t1", "why")}


def test_what_is_delivered_is_dropped_at_the_start_and_readers_notice(file: Path) -> None:
    audience = Audience(file)
    for commit in (5, 6):
        append_letter(file, letter(commit, 0, "copy"))
    assert [one.first[:16] for one in audience.between(Position.end(4), Position.end(9))] == [f"{5:016X}", f"{6:016X}"]
    keep_letters(file, {str(Position.chunk_end(6, 0))})
    append_letter(file, letter(7, 0, "copy"))
    assert [one.first[:16] for one in audience.between(Position.end(4), Position.end(9))] == [f"{6:016X}", f"{7:016X}"]


def test_a_batch_is_cut_where_a_reload_ends_so_that_what_follows_is_followed(file: Path) -> None:
    append_letter(file, letter(5, 0, "copy", is_last=True))
    one = holds(file, {T: Hold("r", "t1")})
    whole = batch(Position.end(4), Position.end(7), row(Position.of_chunk(5, 0, 1), T), row(stream(6), T))
    assert one.first_end(whole) == Position.chunk_end(5, 0)
    part = whole.up_to(Position.chunk_end(5, 0))
    assert (part.end, len(part)) == (Position.chunk_end(5, 0), 1) and one.first_end(part) is None


class Kept(Sink):
    """A target that is further than the ack says: its COMMIT succeeded while the session was lost."""

    form: Form = "tables"
    keeps_position: ClassVar[bool] = True

    def __init__(self, at: Position) -> None:
        self.at, self.tries = at, list[list[int]]()

    def open(self, context: SinkContext) -> Position | None:
        return self.at

    def write(self, batch: Batch) -> None:
        self.tries.append(batch.events.column("relation").to_pylist())
        if len(self.tries) == 1:
            raise ReloadNeeded(tables={T: ("t1", "why")})
        if len(self.tries) == 2:
            raise SinkUnavailable("later")


def runner(file: Path, sink: Kept) -> Runner:
    state = StateDir(file.parent)
    state.snapshot.mkdir(exist_ok=True)
    options = DeliveryOptions(max_retries=3, backoff_base=0.001, backoff_cap=0.002)
    return Runner(sink, state.acks, "copy", options, say=lambda text: None)


def test_a_hold_ends_also_if_the_target_was_further_than_the_ack(file: Path) -> None:
    holds(file, {T: Hold("r", "t1")})
    (file.parent / "snapshot").mkdir()
    append_letter(file.parent / "snapshot" / "audience.jsonl", letter(5, 0, "copy", is_last=True))
    made = runner(file, Kept(Position.end(6)))
    made.open(Position.end(1))
    assert made.ack == Position.end(6) and made.progress.holds == {}


def test_a_table_that_is_held_stays_out_of_every_other_try(file: Path) -> None:
    holds(file)
    sink = Kept(Position.end(1))
    made = runner(file, sink)
    made.open(Position.end(1))
    made.write(batch(Position.end(1), Position.end(9), row(stream(5), T), row(stream(6), OTHER)))
    assert sink.tries == [[T, OTHER], [OTHER], [OTHER]]
    assert list(made.progress.holds) == [T]


def test_a_change_under_a_name_that_is_another_tables_by_then_is_a_reason_to_reload(tmp_path: Path) -> None:
    """The server does not say that a partitioned table was renamed."""
    file = tmp_path / "shapes.jsonl"
    mine, other = SHAPES[T].relation, SHAPES[OTHER].relation
    taker = replace(other, name=mine.name)
    append_shapes(file, [ShapeChange(stream(1), mine), ShapeChange(stream(2), other)])
    history = ShapeHistory(file)

    def found(*rows: tuple[str, int]) -> set[int]:
        return set(find_misnamed(batch(Position.end(2), Position.end(9), *rows), history))

    rows = [row(stream(3), T), row(stream(6), T)]
    assert found(*rows) == set()
    append_shapes(file, [ShapeChange(stream(5), taker, other)])
    assert found(rows[0]) == set()  # it was its own then
    assert found(*rows) == {T}
    assert found(row(stream(6), OTHER)) == set()
    assert found(row(Position.of_chunk(6, 0, 1), T)) == set()  # what was read has the name of then
    append_shapes(file, [ShapeChange(stream(6), mine, mine)])
    assert found(row(stream(7), T)) == set()  # it has its name again

    quoted = replace(mine, name="T 1")
    append_shapes(
        file, [ShapeChange(stream(20), quoted, mine), ShapeChange(stream(21), replace(other, name="T 1"), taker)]
    )
    late = replace(batch(Position.end(9), Position.end(30), row(stream(22), T)), shapes={T: TableShape(quoted)})
    assert find_misnamed(late, history)[T][0] == '"T 1"'  # the reload is asked for by this name


def test_it_is_not_written_to_the_other_table(file: Path) -> None:
    holds(file)
    sink = Kept(Position.end(1))
    sink.tries = [[], []]  # it takes everything
    made = runner(file, sink)
    mine, other = SHAPES[T].relation, SHAPES[OTHER].relation
    history = [
        ShapeChange(stream(1), mine),
        ShapeChange(stream(2), other),
        ShapeChange(stream(5), replace(other, name="t1"), other),
    ]
    append_shapes(StateDir(file.parent).shapes_file, history)
    made.open(Position.end(1))
    made.write(batch(Position.end(1), Position.end(9), row(stream(6), T), row(stream(7), OTHER)))
    assert sink.tries[2:] == [[OTHER]]
    assert list(made.progress.holds) == [T]
