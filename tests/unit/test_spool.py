"""The spool: whatever a crash or a bad disk leaves of it, what is read from it is a prefix of what was written.

In transport mode the slot is the durable log, so recovering is cutting off what is not sound and reading it again.
These tests therefore go one step further: after every damage the stream is sent again from where the spool says, and in
the end every change must be there once.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc.core.errors import GapError, SpoolError
from pgcdc.core.position import Position
from pgcdc.core.relation import Column, Op, Relation, Relations
from pgcdc.core.state import decode_lines, encode_line
from pgcdc.spool import segment
from pgcdc.spool import writer as writer_module
from pgcdc.spool.consumers import Consumers
from pgcdc.spool.index import (
    NO_TOKEN,
    IndexRecord,
    Token,
    encode_record,
    list_chunks,
    scan_records,
)
from pgcdc.spool.reader import SpoolReader, read_slice
from pgcdc.spool.schema import CHANGES, TRANSACTIONS
from pgcdc.spool.segment import CaptureBatch, Part, write_segment
from pgcdc.spool.writer import SpoolWriter

START = Position.end(800)
Row = tuple[int, int, int]
"""lsn, ordinal, sub."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a handful of records rolls over into new chunks."""
    monkeypatch.setattr(writer_module, "CHUNK_BYTES", 1500)


# --- making streams


@dataclass(frozen=True)
class Transaction:
    """One committed transaction: its changes as (ordinal, sub), and after how many of them a part ends."""

    lsn: int
    changes: tuple[tuple[int, int], ...]
    cuts: tuple[int, ...] = ()

    @property
    def rows(self) -> list[Row]:
        return [(self.lsn, *change) for change in self.changes]


@dataclass(frozen=True)
class Idle:
    """Nothing was published up to here."""

    lsn: int


Step = Transaction | Idle


def row(lsn: int, ordinal: int, sub: int) -> dict[str, Any]:
    return {
        "ordinal": ordinal,
        "sub": sub,
        "op": int(Op.MESSAGE if sub else Op.INSERT),
        "relation": -1 if sub else 0,
        "new": [f"{lsn}/{ordinal}.{sub}".encode()],
        "old": None,
        "old_kind": 0,
        "unchanged": None,
        "prefix": "p" if sub else None,
    }


def capture_batch(
    transactions: list[tuple[list[Row], bool]], relations: Relations | None = None, path: Path | None = None
) -> CaptureBatch:
    """What the assembler would hand out; with `path`, from a pending file."""
    rows = [one for of, _ in transactions for one in of]
    table = pa.RecordBatch.from_pylist(
        [
            {
                "commit": of[0][0],
                "kind": 0,
                "commit_time": of[0][0],
                "xid": of[0][0],
                "rows": len(of),
                "complete": done,
                "origin": None,
            }
            for of, done in transactions
        ],
        schema=TRANSACTIONS,
    )
    data = pa.RecordBatch.from_pylist([row(*one) for one in rows], schema=CHANGES)
    last, complete = rows[-1], transactions[-1][1]
    end = Position.end(last[0]) if complete else Position.at(*last)
    if path is not None:
        write_segment(path, data)
    part = Part(len(rows), data.nbytes, (last[1], last[2]), None if path else data, path)
    return CaptureBatch(part, table, relations or Relations(), end, last[0] if complete else 0)


def batches(steps: list[Step], group: int = 1) -> Iterator[CaptureBatch]:
    """The stream as the assembler would cut it: up to `group` small transactions together, a split one in its parts."""
    waiting: list[tuple[list[Row], bool]] = []
    for step in [*steps, None]:
        is_small = isinstance(step, Transaction) and not step.cuts
        if waiting and (not is_small or len(waiting) >= group):
            yield capture_batch(waiting)
            waiting = []
        if isinstance(step, Idle):
            yield CaptureBatch.advance(step.lsn, Relations())
        elif isinstance(step, Transaction):
            if is_small:
                waiting.append((step.rows, True))
                continue
            bounds = [0, *step.cuts, len(step.changes)]
            for begin, end in pairwise(bounds):
                yield capture_batch([(step.rows[begin:end], end == len(step.changes))])


def rows_of(steps: list[Step]) -> list[Row]:
    return [one for step in steps if isinstance(step, Transaction) for one in step.rows]


def send(writer: SpoolWriter, steps: list[Step], group: int = 1) -> None:
    """What the server does after a (re)start: everything that ends after where the spool is complete."""
    for batch in batches([step for step in steps if step.lsn > writer.resume_lsn], group):
        writer.append(batch)


def read_rows(reader: SpoolReader, start: Position, end: Position) -> list[Row]:
    """The rows in (start, end], through slices; every value is checked to be the one of its position."""
    found: list[Row] = []
    for piece in reader.slices(start, end):
        changes, owners = read_slice(piece)
        for one, lsn in zip(changes.to_pylist(), owners.column("commit").to_pylist(), strict=True):
            position = (lsn, one["ordinal"], one["sub"])
            assert one == row(*position)
            found.append(position)
    return found


def read_all(folder: Path) -> tuple[list[Row], SpoolReader]:
    reader = SpoolReader(folder)
    reader.refresh()
    return read_rows(reader, reader.base, reader.end), reader


def up_to(rows: list[Row], end: Position, after: Position = START) -> list[Row]:
    return [one for one in rows if after < Position.at(*one) <= end]


@st.composite
def streams(draw: st.DrawFn) -> list[Step]:
    """Transactions of row changes with messages between them, some split in parts, with idle progress between."""
    steps: list[Step] = []
    lsn = START.commit
    for _ in range(draw(st.integers(1, 7))):
        lsn += 8 * draw(st.integers(1, 3))
        if draw(st.integers(0, 4)) == 0:
            steps.append(Idle(lsn))
            continue
        changes = [
            (ordinal, sub)
            for ordinal, messages in enumerate(draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)))
            for sub in range(0 if ordinal else 1, messages + 1)
        ] or [(1, 0)]
        cuts = draw(st.sets(st.integers(1, len(changes) - 1), max_size=3)) if len(changes) > 1 else set()
        steps.append(Transaction(lsn, tuple(changes), tuple(sorted(cuts))))
    return steps


def cut_otherwise(draw: Callable[[st.SearchStrategy[Any]], Any], steps: list[Step]) -> list[Step]:
    """The same stream, as another run would cut it into parts."""
    return [
        Transaction(
            step.lsn, step.changes, tuple(sorted(draw(st.sets(st.integers(1, len(step.changes) - 1), max_size=2))))
        )
        if isinstance(step, Transaction) and len(step.changes) > 1
        else step
        for step in steps
    ]


SPLIT: list[Step] = [
    Transaction(880, ((1, 0), (2, 0))),
    Transaction(960, ((0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (3, 0)), (2, 3, 5)),
    Idle(1000),
    Transaction(1040, ((1, 0),)),
]


# --- writing and reading


@settings(max_examples=30)
@given(streams(), st.integers(1, 3))
def test_what_was_appended_is_read_back_once_and_in_order(steps: list[Step], group: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer = SpoolWriter(Path(folder), START)
        send(writer, steps, group)
        rows, reader = read_all(Path(folder))
        assert rows == rows_of(steps)
        assert (reader.base, reader.end, writer.end) == (START, Position.end(steps[-1].lsn), reader.end)
        assert writer.resume_lsn == steps[-1].lsn
        assert writer.bytes_held == sum(path.stat().st_size for path in Path(folder).glob("seg-*"))
        writer.close()


@settings(max_examples=30)
@given(streams(), st.integers(1, 3), st.data())
def test_slices_of_any_cuts_give_everything_once(steps: list[Step], group: int, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer = SpoolWriter(Path(folder), START)
        send(writer, steps, group)
        _, reader = read_all(Path(folder))
        places = [Position.at(*one) for one in rows_of(steps)] + [Position.end(step.lsn) for step in steps]
        cuts = sorted({START, reader.end, *data.draw(st.lists(st.sampled_from(places), max_size=5))})
        pieces = [read_rows(reader, one, other) for one, other in pairwise(cuts)]
        assert [one for piece in pieces for one in piece] == rows_of(steps)
        for piece, (one, other) in zip(pieces, pairwise(cuts), strict=True):
            assert piece == up_to(rows_of(steps), other, one)
        writer.close()


def test_same_cut_read_twice_gives_the_same_slices(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, START)
    send(writer, SPLIT)
    _, reader = read_all(tmp_path)
    assert reader.slices(Position.at(960, 1), Position.end(1040)) == reader.slices(
        Position.at(960, 1), Position.end(1040)
    )
    writer.close()


def test_pending_file_becomes_the_segment(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, START)
    pending = tmp_path / "pending-00000001.arrow"
    writer.append(capture_batch([([(880, 1, 0), (880, 2, 0)], True)], path=pending))
    assert not pending.exists()
    assert read_all(tmp_path)[0] == [(880, 1, 0), (880, 2, 0)]
    writer.close()


def test_empty_spool_begins_at_what_was_confirmed(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path / "new" / "spool", START)
    assert (writer.end, writer.resume_lsn, writer.bytes_held, writer.oldest_commit_us) == (START, START.commit, 0, None)
    rows, reader = read_all(tmp_path / "new" / "spool")
    assert (rows, reader.base, reader.end) == ([], START, START)
    writer.close()


def test_reader_of_a_spool_that_is_not_there_yet_waits(tmp_path: Path) -> None:
    reader = SpoolReader(tmp_path)
    reader.refresh()
    assert (reader.end, reader.records, reader.relations()) == (Position.at(0, 0), [], [])
    writer = SpoolWriter(tmp_path, START)
    send(writer, SPLIT)
    reader.refresh()
    assert read_rows(reader, START, reader.end) == rows_of(SPLIT)
    writer.close()


def test_start_before_what_is_kept_is_a_gap(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, START)
    send(writer, SPLIT)
    _, reader = read_all(tmp_path)
    for ask in (lambda: reader.slices(Position.end(792), reader.end), lambda: reader.after(Position.at(800, 5))):
        with pytest.raises(GapError, match="changes are kept only after 0000000000000320/0FFFFFFFFFFFF"):
            ask()
    writer.close()


def test_relations_stand_on_disk_before_the_segment_that_names_them(tmp_path: Path) -> None:
    shapes = [Relation(n, "public", f"t\n{n}", "d", (Column('"', 25, -1, True),)) for n in range(3)]
    writer = SpoolWriter(tmp_path, START)
    reader = SpoolReader(tmp_path)
    for number, shape in enumerate(shapes):
        assert writer.relations.intern(shape) == number
        writer.append(capture_batch([([(880 + 8 * number, 1, 0)], True)], writer.relations))
        reader.refresh()
        assert reader.records[-1].relations == number + 1
        assert reader.relations() == shapes[: number + 1]
    writer.close()
    again = SpoolWriter(tmp_path, START)
    assert again.relations.shapes == shapes
    assert again.relations.intern(shapes[1]) == 1
    again.close()


@pytest.mark.parametrize("missing_bytes", [1, 2, 30])
def test_half_written_relation_is_cut_off_with_the_segments_that_need_it(tmp_path: Path, missing_bytes: int) -> None:
    shapes = [Relation(n, "public", f"t{n}", "d", ()) for n in range(2)]
    writer = SpoolWriter(tmp_path, START)
    for number, shape in enumerate(shapes):
        writer.relations.intern(shape)
        writer.append(capture_batch([([(880 + 8 * number, 1, 0)], True)], writer.relations))
    writer.close()
    file = tmp_path / "relations.jsonl"
    file.write_bytes(file.read_bytes()[:-missing_bytes])
    again = SpoolWriter(tmp_path, START)
    assert (again.relations.shapes, again.end) == (shapes[:1], Position.end(880))
    again.relations.intern(shapes[1])
    again.append(capture_batch([([(888, 1, 0)], True)], again.relations))
    assert read_all(tmp_path)[0] == [(880, 1, 0), (888, 1, 0)]
    assert SpoolReader(tmp_path).relations() == shapes
    again.close()


def test_reader_leaves_a_relation_alone_that_is_just_being_written(tmp_path: Path) -> None:
    shapes = [Relation(n, "public", f"t{n}", "d", ()) for n in range(2)]
    first, second = (encode_line(shape.to_json()) for shape in shapes)
    reader = SpoolReader(tmp_path)
    for size in range(len(second)):
        (tmp_path / "relations.jsonl").write_bytes(first + second[:size])
        assert reader.relations() == shapes[:1]
    (tmp_path / "relations.jsonl").write_bytes(first + second)
    assert reader.relations() == shapes


# --- a reader beside a writer


@settings(max_examples=30)
@given(streams(), st.data())
def test_live_reader_sees_every_record_once_across_chunks_and_releases(steps: list[Step], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer, reader = SpoolWriter(folder, START), SpoolReader(folder)
        seen: list[Row] = []
        position = START
        for batch in batches(steps):
            writer.append(batch)
            if not data.draw(st.booleans()):
                continue
            reader.refresh()
            assert reader.end == writer.end
            seen += read_rows(reader, position, reader.end)
            position = reader.end
            if data.draw(st.booleans()):
                reader.forget(position)
            if position.is_end and data.draw(st.booleans()):
                writer.release(Position.end(position.commit))
        reader.refresh()
        seen += read_rows(reader, position, reader.end)
        assert seen == rows_of(steps)
        writer.close()


def test_reader_that_forgot_still_serves_what_comes_after(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, START)
    send(writer, SPLIT)
    _, reader = read_all(tmp_path)
    reader.forget(Position.at(960, 1))
    assert read_rows(reader, Position.at(960, 1), reader.end) == up_to(rows_of(SPLIT), reader.end, Position.at(960, 1))
    reader.forget(Position.end(1000))
    with pytest.raises(GapError):
        reader.slices(Position.end(880), reader.end)
    assert read_rows(reader, Position.end(1000), reader.end) == [(1040, 1, 0)]
    writer.close()


def test_reader_never_steps_over_records_that_an_older_chunk_lost(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, START)
    send(writer, [Transaction(808 + 8 * n, ((1, 0),)) for n in range(9)])
    writer.close()
    first, second = list_chunks(tmp_path)[:2]
    kept = SpoolReader(tmp_path)
    kept.refresh()
    lost = first.read_bytes()
    for size in range(0, len(lost), 7):
        first.write_bytes(lost[:size])
        reader = SpoolReader(tmp_path)
        reader.refresh()
        with pytest.raises(GapError):
            reader.slices(START, kept.end)
    assert second.exists()


def test_live_reader_goes_on_when_the_spool_begins_anew(tmp_path: Path) -> None:
    steps: list[Step] = [Transaction(808 + 8 * n, ((1, 0),)) for n in range(9)]
    writer, reader = SpoolWriter(tmp_path, START), SpoolReader(tmp_path)
    send(writer, steps[:6])
    writer.close()
    reader.refresh()
    acked = Position.end(832)
    flip(list_chunks(tmp_path)[0], 0)
    again = SpoolWriter(tmp_path, acked)
    assert again.end == acked
    send(again, steps)
    reader.refresh()
    assert (reader.base, reader.end) == (acked, Position.end(872))
    assert read_rows(reader, acked, reader.end) == rows_of(steps[4:])
    again.close()


# --- release


@settings(max_examples=30)
@given(streams(), st.data())
def test_release_deletes_what_everybody_is_past_of_and_keeps_the_rest(steps: list[Step], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = SpoolWriter(folder, START)
        send(writer, steps)
        lsn = data.draw(st.sampled_from([step.lsn for step in steps]))
        _, before = read_all(folder)
        writer.release(Position.end(lsn))
        assert read_rows(before, Position.end(lsn), before.end) == up_to(rows_of(steps), before.end, Position.end(lsn))
        _, fresh = read_all_kept(folder, Position.end(lsn))
        assert fresh == up_to(rows_of(steps), before.end, Position.end(lsn))
        left = [one for one in before.records if one.end > Position.end(lsn)]
        assert sorted(path.name for path in folder.glob("seg-*")) == sorted(one.file or "" for one in left)
        assert writer.bytes_held == sum(one.written[0] for one in left)
        writer.close()
        again = SpoolWriter(folder, Position.end(lsn))
        assert (again.end, again.bytes_held) == (before.end, writer.bytes_held)
        again.close()


def read_all_kept(folder: Path, start: Position) -> tuple[SpoolReader, list[Row]]:
    reader = SpoolReader(folder)
    reader.refresh()
    return reader, read_rows(reader, max(start, reader.base), reader.end)


def test_chunks_roll_and_go_when_everything_in_them_is_released(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, START)
    steps: list[Step] = [Transaction(808 + 8 * n, ((1, 0),)) for n in range(12)]
    send(writer, steps)
    chunks = list_chunks(tmp_path)
    assert len(chunks) >= 3
    assert all(path.stat().st_size < 3000 for path in chunks)
    writer.release(Position.end(896))
    assert list_chunks(tmp_path) == chunks[-1:]
    assert not list(tmp_path.glob("seg-*"))
    writer.append(capture_batch([([(960, 1, 0)], True)]))
    assert read_all_kept(tmp_path, Position.end(896))[1] == [(960, 1, 0)]
    writer.close()


def test_release_inside_of_a_split_transaction_keeps_all_its_parts(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, START)
    send(writer, SPLIT)
    writer.release(Position.end(952))
    assert read_all_kept(tmp_path, Position.end(880))[1] == up_to(rows_of(SPLIT), Position.end(1040), Position.end(880))
    assert writer.oldest_commit_us == 960
    writer.close()


def test_segment_numbers_are_not_used_again_while_files_are_there(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, START)
    writer.append(capture_batch([([(880, 1, 0)], True)]))
    writer.append(capture_batch([([(888, 1, 0)], True)]))
    writer.release(Position.end(880))
    writer.close()
    again = SpoolWriter(tmp_path, Position.end(880))
    again.append(capture_batch([([(896, 1, 0)], True)]))
    assert sorted(path.name for path in tmp_path.glob("seg-*")) == ["seg-000000000002.arrow", "seg-000000000003.arrow"]
    again.close()


# --- recovery


def test_strays_of_a_crash_are_removed(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, START)
    send(writer, SPLIT)
    writer.close()
    strays = [
        "pending-00000001.arrow",
        "pending-00000002.partial",
        "seg-000000000099.partial",
        "seg-000000000098.arrow",
    ]
    for stray in strays:
        (tmp_path / stray).write_bytes(b"half")
    again = SpoolWriter(tmp_path, START)
    assert not [stray for stray in strays if (tmp_path / stray).exists()]
    assert (read_all(tmp_path)[0], again.end) == (rows_of(SPLIT), Position.end(1040))
    again.append(capture_batch([([(1120, 1, 0)], True)]))
    assert read_all(tmp_path)[0] == [*rows_of(SPLIT), (1120, 1, 0)]
    again.close()


def test_spool_that_is_behind_what_was_confirmed_begins_anew_there(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, START)
    send(writer, SPLIT)
    writer.close()
    again = SpoolWriter(tmp_path, Position.end(1600))
    assert (again.end, again.resume_lsn, again.bytes_held) == (Position.end(1600), 1600, 0)
    rows, reader = read_all(tmp_path)
    assert (rows, reader.base, list(tmp_path.glob("seg-*"))) == ([], Position.end(1600), [])
    again.close()


def test_missing_segment_is_no_damage_if_it_was_confirmed(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, START)
    send(writer, SPLIT)
    writer.close()
    sorted(tmp_path.glob("seg-*"))[0].unlink()
    again = SpoolWriter(tmp_path, Position.end(880))
    assert again.end == Position.end(1040)
    again.close()


@settings(max_examples=30)
@given(streams(), st.integers(1, 3), st.data())
def test_transaction_read_again_after_a_crash_inside_of_it_is_not_repeated(
    steps: list[Step], group: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = SpoolWriter(folder, START)
        stream = list(batches(steps))
        for batch in stream[: data.draw(st.integers(0, len(stream)))]:
            writer.append(batch)
        writer.close()
        again = SpoolWriter(folder, START)
        assert again.end == writer.end
        send(again, cut_otherwise(data.draw, steps), group)
        assert read_all(folder)[0] == rows_of(steps)
        again.close()


@pytest.mark.parametrize("crash_after", range(1, 5))
@pytest.mark.parametrize("cuts", [(), (1,), (2,), (4,), (2, 3, 5), (1, 2, 3, 4, 5)])
def test_parts_are_completed_at_the_very_sub_ordinal(tmp_path: Path, crash_after: int, cuts: tuple[int, ...]) -> None:
    writer = SpoolWriter(tmp_path, START)
    for batch in list(batches(SPLIT))[:crash_after]:
        writer.append(batch)
    writer.close()
    again = SpoolWriter(tmp_path, START)
    assert again.resume_lsn == 880
    changed = Transaction(960, SPLIT[1].changes, cuts) if isinstance(SPLIT[1], Transaction) else SPLIT[1]
    send(again, [SPLIT[0], changed, *SPLIT[2:]])
    assert read_all(tmp_path)[0] == rows_of(SPLIT)
    assert again.end == Position.end(1040)
    again.close()


def test_pending_file_of_what_is_already_here_is_removed(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, START)
    rows: list[Row] = [(960, n, 0) for n in range(1, 6)]
    writer.append(capture_batch([(rows[:3], False)]))
    whole, half = tmp_path / "pending-00000001.arrow", tmp_path / "pending-00000002.arrow"
    writer.append(capture_batch([(rows[:2], False)], path=whole))
    writer.append(capture_batch([(rows[2:], True)], path=half))
    assert not whole.exists() and not half.exists()
    assert read_all(tmp_path)[0] == rows
    writer.close()


# --- damage


def truncate(path: Path, place: int) -> None:
    path.write_bytes(path.read_bytes()[:place])


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x55
    path.write_bytes(data)


def delete(path: Path, _: int) -> None:
    path.unlink()


def append_garbage(path: Path, place: int) -> None:
    path.write_bytes(path.read_bytes() + bytes(place % 50 + 1))


DAMAGES: dict[str, tuple[str, Callable[[Path, int], None]]] = {
    "index_truncated": ("index-*.log", truncate),
    "index_byte_flipped": ("index-*.log", flip),
    "index_chunk_deleted": ("index-*.log", delete),
    "index_with_garbage": ("index-*.log", append_garbage),
    "segment_truncated": ("seg-*.arrow", truncate),
    "segment_byte_flipped": ("seg-*.arrow", flip),
    "segment_deleted": ("seg-*.arrow", delete),
}


def check_recovery(folder: Path, steps: list[Step], base: Position, resent: list[Step], group: int = 1) -> None:
    """A damaged spool opens with a sound prefix that is not below `base`, and is complete after reading again."""
    whole = rows_of(steps)
    ends = {base, *(batch.end for batch in batches(steps))}
    writer = SpoolWriter(folder, base)
    assert writer.end in ends
    assert writer.end >= base
    assert base.commit <= writer.resume_lsn <= writer.end.commit
    reader, rows = read_all_kept(folder, base)
    assert reader.base <= base
    assert reader.end == writer.end
    assert rows == up_to(whole, writer.end, base)
    send(writer, resent, group)
    assert read_all_kept(folder, base)[1] == up_to(whole, Position.end(steps[-1].lsn), base)
    assert writer.end == Position.end(steps[-1].lsn)
    writer.close()


@pytest.mark.parametrize(("pattern", "harm"), DAMAGES.values(), ids=DAMAGES.keys())
@settings(max_examples=20)
@given(steps=streams(), data=st.data())
def test_damaged_spool_opens_with_a_sound_prefix_and_is_completed(
    pattern: str, harm: Callable[[Path, int], None], steps: list[Step], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = SpoolWriter(folder, START)
        stream = list(batches(steps))
        for batch in stream[: data.draw(st.integers(1, len(stream)))]:
            writer.append(batch)
        base = START
        if data.draw(st.booleans()):
            base = Position.end(
                data.draw(st.sampled_from([START.commit, *(s.lsn for s in steps if s.lsn <= writer.resume_lsn)]))
            )
            writer.release(base)
        writer.close()
        files = sorted(folder.glob(pattern))
        if files:
            file = data.draw(st.sampled_from(files))
            harm(file, data.draw(st.integers(0, file.stat().st_size - 1)))
        check_recovery(folder, steps, base, cut_otherwise(data.draw, steps), data.draw(st.integers(1, 3)))


def test_index_cut_between_any_two_records_of_any_chunk_is_recovered(tmp_path: Path) -> None:
    steps: list[Step] = [Transaction(808 + 8 * n, ((1, 0), (2, 0)), (1,) if n % 3 == 0 else ()) for n in range(8)]
    writer = SpoolWriter(tmp_path / "whole", START)
    send(writer, steps)
    writer.close()
    chunks = list_chunks(tmp_path / "whole")
    assert len(chunks) >= 3
    for chunk in chunks:
        data = chunk.read_bytes()
        places = [place for place in range(len(data)) if data.startswith(b"pgCD", place)]
        for place in [*places, len(data)]:
            folder = Path(tempfile.mkdtemp(dir=tmp_path))
            for path in (tmp_path / "whole").iterdir():
                (folder / path.name).write_bytes(path.read_bytes())
            truncate(folder / chunk.name, place)
            check_recovery(folder, steps, START, steps)


def test_reader_refuses_a_segment_that_was_damaged_after_it_was_indexed(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, START)
    send(writer, SPLIT)
    _, reader = read_all(tmp_path)
    flip(sorted(tmp_path.glob("seg-*"))[1], 40)
    with pytest.raises(SpoolError, match="checksum"):
        read_rows(reader, START, reader.end)
    writer.close()


def test_reader_raises_for_damage_in_the_index(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, START)
    send(writer, SPLIT[:1])
    writer.close()
    flip(list_chunks(tmp_path)[0], 0)
    with pytest.raises(SpoolError, match=r"index-00000001\.log is damaged"):
        SpoolReader(tmp_path).refresh()


# --- what a reader keeps in memory


def test_a_reader_keeps_a_few_words_of_each_segment_and_loads_transactions_when_they_are_asked_for(
    tmp_path: Path,
) -> None:
    writer = SpoolWriter(tmp_path, START)
    rows = [(START.commit + 8 * number, 1, 0) for number in range(1, 20_001)]
    for begin in range(0, len(rows), 5000):
        writer.append(capture_batch([([one], True) for one in rows[begin : begin + 5000]]))
    before = pa.total_allocated_bytes()
    reader = SpoolReader(tmp_path)
    tracemalloc.start()
    reader.refresh()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(reader.records) == 4 and reader.end == Position.end(rows[-1][0])
    assert held + pa.total_allocated_bytes() - before < 20_000, "much less than a byte for each transaction"
    assert read_rows(reader, START, reader.end) == rows


def test_an_index_that_was_cut_and_written_again_under_a_reader_is_refused(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, START)
    writer.append(capture_batch([([(880, 1, 0)], True)]))
    reader = SpoolReader(tmp_path)
    reader.refresh()
    chunk = list_chunks(tmp_path)[0]
    whole = chunk.read_bytes()
    assert reader.records[0].place is not None
    place = reader.records[0].place[1]
    chunk.write_bytes(whole[:place] + encode_record(replace(parsed(whole)[-1], rows=2)))
    with pytest.raises(SpoolError, match="no longer holds"):
        reader.slices(START, reader.end)
    chunk.write_bytes(whole[:place])
    with pytest.raises(SpoolError, match="no longer holds"):
        reader.slices(START, reader.end)
    chunk.unlink()
    with pytest.raises(SpoolError, match="is gone"):
        reader.slices(START, reader.end)


def parsed(data: bytes) -> list[IndexRecord]:
    return list(scan_records(data, "x", 1))


def test_only_what_was_appended_to_the_relations_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        encode_line(Relation(number, "public", f"t{number}", "d", (Column("id", 23, -1, True),)).to_json())
        for number in range(3)
    ]
    sizes: list[int] = []

    def decode(data: bytes) -> Iterator[tuple[dict[str, Any], int]]:
        sizes.append(len(data))
        return decode_lines(data)

    monkeypatch.setattr("pgcdc.core.relation.decode_lines", decode)
    reader = SpoolReader(tmp_path)
    file = tmp_path / "relations.jsonl"
    file.write_bytes(lines[0] + lines[1][:10])
    assert [one.name for one in reader.relations()] == ["t0"]
    file.write_bytes(lines[0] + lines[1])
    assert [one.name for one in reader.relations()] == ["t0", "t1"]
    assert [one.name for one in reader.relations()] == ["t0", "t1"]
    file.write_bytes(b"".join(lines))
    assert [one.name for one in reader.relations()] == ["t0", "t1", "t2"]
    assert sizes == [len(lines[0]) + 10, len(lines[1]), 0, len(lines[2])]


def test_the_token_of_a_transaction_survives_a_start_and_the_loss_of_the_spool(tmp_path: Path) -> None:
    """A source that needs more than a number goes on with what it said of the last transaction, or of one before."""
    consumers = Consumers(tmp_path / "consumers.json")
    consumers.begin(10)
    consumers.join("a")
    writer = SpoolWriter(tmp_path / "spool", consumers.base, consumers.token)
    assert not writer.has_tokens and writer.token_at(10) == NO_TOKEN
    for lsn in (20, 30, 40):
        writer.append(replace(CaptureBatch.advance(lsn, writer.relations), token=b"set:%d" % lsn))
    assert [writer.token_at(lsn) for lsn in (19, 20, 39, 99)] == [
        NO_TOKEN, Token(20, b"set:20"), Token(30, b"set:30"), Token(40, b"set:40"),
    ]  # fmt: skip
    writer.close()
    consumers.ack("a", Position.end(35))
    assert consumers.confirmable(writer.token_at) == 35
    again = Consumers(tmp_path / "consumers.json")
    assert again.token == Token(30, b"set:30")
    writer = SpoolWriter(tmp_path / "spool", again.base, again.token)
    assert writer.has_tokens and writer.token_at(writer.resume_lsn) == Token(40, b"set:40")
    writer.release(Position.end(35))
    assert writer.token_at(35) == Token(30, b"set:30")
    writer.close()
    shutil.rmtree(tmp_path / "spool")
    writer = SpoolWriter(tmp_path / "spool", again.base, again.token)
    assert (writer.resume_lsn, writer.token_at(35)) == (35, Token(30, b"set:30"))
    writer.close()


def test_an_older_token_that_a_power_cut_left_in_the_index_does_not_replace_the_durable_one(tmp_path: Path) -> None:
    """The source has given up what lies before the durable token: to ask with an older one would be a gap."""
    writer = SpoolWriter(tmp_path, Position.end(10))
    for lsn in (20, 30, 40):
        writer.append(replace(CaptureBatch.advance(lsn, writer.relations), token=b"set:%d" % lsn))
    writer.close()
    (index,) = list_chunks(tmp_path)
    os.truncate(index, [record.place[2] for record in scan_records(index.read_bytes(), index.name, 1)][1])
    writer = SpoolWriter(tmp_path, Position.end(40), Token(40, b"set:40"))
    assert (writer.resume_lsn, writer.token_at(writer.resume_lsn)) == (40, Token(40, b"set:40"))
    writer.append(replace(CaptureBatch.advance(50, writer.relations), token=b"set:50"))
    writer.release(Position.end(40))
    assert [writer.token_at(lsn).commit for lsn in (40, 50)] == [40, 50]
    writer.close()


def test_the_token_of_what_was_acknowledged_before_it_was_read_again_is_saved_when_it_comes(tmp_path: Path) -> None:
    consumers = Consumers(tmp_path / "consumers.json")
    consumers.begin(10)
    consumers.join("a")
    writer = SpoolWriter(tmp_path / "spool", consumers.base, consumers.token)
    writer.append(replace(CaptureBatch.advance(20, writer.relations), token=b"set:20"))
    consumers.ack("a", Position.end(30))
    assert consumers.confirmable(writer.token_at) == 30
    assert Consumers(tmp_path / "consumers.json").token == Token(20, b"set:20")
    writer.append(replace(CaptureBatch.advance(30, writer.relations), token=b"set:30"))
    assert consumers.confirmable(writer.token_at) == 30
    assert Consumers(tmp_path / "consumers.json").token == Token(30, b"set:30")
    writer.close()


def test_a_disk_that_is_full_in_the_middle_of_a_segment_leaves_nothing_to_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SpoolWriter(tmp_path, START)
    first, second = (capture_batch([([(START.commit + 8 * number, 1, 0)], True)]) for number in (1, 2))
    writer.append(first)
    left = [3]

    def write_until_full(descriptor: int, piece: memoryview) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, piece)

    monkeypatch.setattr(segment, "write_all", write_until_full)
    with pytest.raises(SpoolError, match="cannot be written: No space left on device"):
        writer.append(second)
    monkeypatch.undo()
    writer.close()
    again = SpoolWriter(tmp_path, START)
    assert again.end == first.end and not list(tmp_path.glob("*.partial"))
    again.append(second)
    assert read_all(tmp_path)[0] == [(START.commit + 8, 1, 0), (START.commit + 16, 1, 0)]
