"""Large batches in parts: every key's events in order, whatever the blocks, and nothing passes a barrier."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.errors import PySparkException
from pyspark.sql.types import BinaryType, BooleanType, StructField, StructType
from spools import START_LSN, write_spool

from pgcdc.core.errors import PgcdcError, SinkError, SinkRejected, SinkUnavailable, TransformError
from pgcdc.core.position import SCHEMA_SUB, Position
from pgcdc.core.relation import Column, OldKind, Op, Relation
from pgcdc.core.state import StateDir
from pgcdc.event.events import KEYED_LINES, events_of, open_blocks, pack_block, unpack_blocks
from pgcdc.event.forms import find_barriers, key_hashes
from pgcdc.event.frame import EventOptions, Frame, make_frame
from pgcdc.event.lines import IdSeed
from pgcdc.run.member import Adapter, Member
from pgcdc.run.roster import Membership, Roster
from pgcdc.sink.contract import Receipt
from pgcdc.sink.folder import FolderSink
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import DeliveryOptions
from pgcdc.spark import parallel
from pgcdc.spark.options import parse_options
from pgcdc.spark.parallel import LargeBatch, Piece, Segment, _open, _Split, _Write, plan_segments
from pgcdc.spark.session import explained
from pgcdc.spark.source import ChangeReader
from pgcdc.spool.schema import CHANGES, TRANSACTIONS

START, END = Position.end(8), Position.end(160)

ORDERS = Relation(1, "public", "orders", "d", (Column("id", 23, -1, True), Column("note", 25, -1, False)))
WIDER = Relation(
    1,
    "public",
    "orders",
    "d",
    (Column("note", 25, -1, False), Column("id", 23, -1, True), Column("more", 25, -1, False)),
)
ITEMS = Relation(2, "sales", "items", "i", (Column("a", 25, -1, True), Column("b", 25, -1, True)))
FULL = Relation(3, "public", "full", "f", (Column("id", 23, -1, True), Column("note", 25, -1, True)))
KEYLESS = Relation(4, "public", "keyless", "n", (Column("note", 25, -1, False),))
SHAPES = [ORDERS, WIDER, ITEMS, FULL, KEYLESS]


Values = Sequence[bytes | None] | None


def frame(*changes: tuple[Relation, Op, Values, Values]) -> Frame:
    """Changes as (relation, operation, new, old); old values are those of the key alone, except of a full identity."""
    rows = [
        {
            "ordinal": number,
            "sub": 0,
            "op": int(op),
            "relation": SHAPES.index(relation),
            "new": new,
            "old": old,
            "old_kind": int(OldKind.NONE if old is None else OldKind.FULL if relation is FULL else OldKind.KEY),
            "unchanged": None,
            "prefix": None,
        }
        for number, (relation, op, new, old) in enumerate(changes, 1)
    ]
    owner = {"commit": 16, "kind": 0, "commit_time": 0, "xid": 1, "rows": len(rows), "complete": True, "origin": None}
    owners = pa.RecordBatch.from_pylist([owner] * len(rows), schema=TRANSACTIONS)
    return make_frame(pa.RecordBatch.from_pylist(rows, schema=CHANGES), owners, SHAPES, EventOptions())


# --- keys


def test_all_changes_of_a_row_have_one_hash_in_any_frame_and_shape() -> None:
    inserted = (ORDERS, Op.INSERT, [b"17", b"x"], None)
    others = frame(
        (ITEMS, Op.INSERT, [b"17", b"x"], None),
        (ORDERS, Op.INSERT, [b"18", b"x"], None),
        inserted,
        (ORDERS, Op.UPDATE, [b"17", b"another"], None),
        (ORDERS, Op.SNAPSHOT, [b"17", None], None),
        (ORDERS, Op.DELETE, None, [b"17", None]),
    )
    hashes = key_hashes(others)
    assert set(hashes[2:].tolist()) == set(key_hashes(frame(inserted)).tolist())
    assert len(set(hashes.tolist())) == 3


def test_key_of_several_columns_and_of_long_and_empty_values() -> None:
    keys = [
        (b"a", b"b"),
        (b"b", b"a"),
        (b"ab", b""),
        (b"", b"ab"),
        (b"x" * 5000, b"y"),
        (b"x" * 5001, b"y"),
        (b"", b""),
    ]
    hashes = key_hashes(frame(*((ITEMS, Op.INSERT, list(key), None) for key in keys)))
    again = key_hashes(frame(*((ITEMS, Op.DELETE, None, list(key)) for key in keys)))
    assert len(set(hashes.tolist())) == len(keys)
    assert hashes.tolist() == again.tolist()


def test_tables_without_a_key_of_their_own_are_kept_together() -> None:
    hashes = key_hashes(
        frame(
            (FULL, Op.INSERT, [b"1", b"x"], None),
            (FULL, Op.UPDATE, [b"2", b"y"], [b"1", b"x"]),
            (FULL, Op.DELETE, None, [b"2", b"y"]),
            (KEYLESS, Op.INSERT, [b"x"], None),
            (KEYLESS, Op.INSERT, [b"y"], None),
        )
    )
    assert len(set(hashes[:3].tolist())) == 1
    assert len(set(hashes[3:].tolist())) == 1
    assert hashes[0] != hashes[3]


def test_hashes_spread_over_parts() -> None:
    hashes = key_hashes(frame(*((ORDERS, Op.INSERT, [str(n).encode(), b"x"], None) for n in range(4000))))
    counts = np.bincount((hashes.view(np.uint64) % np.uint64(8)).astype(np.int64), minlength=8)
    assert counts.min() > 400


@given(st.lists(st.tuples(st.binary(max_size=6), st.sampled_from([Op.INSERT, Op.DELETE])), min_size=1, max_size=30))
def test_equal_keys_have_equal_hashes(keys: list[tuple[bytes, Op]]) -> None:
    texts = [(key.hex().encode(), op) for key, op in keys]
    changes = [
        (ORDERS, op, None if op is Op.DELETE else [key, b"n"], [key, None] if op is Op.DELETE else None)
        for key, op in texts
    ]
    found: dict[bytes, set[int]] = defaultdict(set)
    for (key, _), number in zip(texts, key_hashes(frame(*changes)).tolist(), strict=True):
        found[key].add(number)
    assert all(len(numbers) == 1 for numbers in found.values())


def test_barriers_are_what_concerns_more_than_one_key() -> None:
    barriers = find_barriers(
        frame(
            (ORDERS, Op.INSERT, [b"1", b"x"], None),
            (ORDERS, Op.UPDATE, [b"1", b"y"], None),
            (ORDERS, Op.UPDATE, [b"2", b"y"], [b"1", None]),
            (FULL, Op.UPDATE, [b"2", b"y"], [b"1", b"x"]),
            (ORDERS, Op.DELETE, None, [b"2", None]),
            (ORDERS, Op.TRUNCATE, None, None),
        )
    )
    assert barriers.tolist() == [False, False, True, False, False, True]


def test_event_column_key_has_the_columns_of_the_identity() -> None:
    changes = frame(
        (WIDER, Op.INSERT, [b"x", b"7", None], None),
        (ITEMS, Op.DELETE, None, [b"1", b"2"]),
        (FULL, Op.INSERT, [b"1", b"x"], None),
        (KEYLESS, Op.INSERT, [b"x"], None),
        (ORDERS, Op.TRUNCATE, None, None),
    )
    schema = pa.schema(
        [("key", pa.map_(pa.string(), pa.string())), ("key_hash", pa.int64()), ("is_barrier", pa.bool_())]
    )
    events = events_of(changes, IdSeed(1, 2), schema, EventOptions())
    assert events.column("key").to_pylist() == [
        [("id", "7")],
        [("a", "1"), ("b", "2")],
        [("id", "1"), ("note", "x")],
        None,
        None,
    ]
    assert events.column("key_hash").to_pylist() == key_hashes(changes).tolist()


def test_blocks_with_keys_are_read_as_those_without() -> None:
    changes = frame(*((ORDERS, Op.INSERT, [str(n).encode(), b"x"], None) for n in range(5)))
    keyed = events_of(changes, IdSeed(1, 2), KEYED_LINES, EventOptions())
    blocks = pa.Table.from_batches(pack_block(keyed, "keyed_block"))
    assert unpack_blocks(blocks)[0].to_pylist() == keyed.select(["position", "line"]).to_pylist()


# --- segments

CUT = Position.at(16, 4, SCHEMA_SUB)


def place(number: int) -> str:
    return str(Position.at(16, number))


@pytest.mark.parametrize(
    ("pieces", "cuts", "expected"),
    [
        ([], [], [(END, 0)]),
        ([(1, 9, False), (2, 8, False)], [], [(END, 2)]),
        (
            [(1, 3, False), (4, 4, True), (5, 9, False)],
            [],
            [(Position.at(16, 3), 1), (Position.at(16, 4), 1), (END, 1)],
        ),
        ([(1, 1, True), (2, 2, True), (3, 9, False)], [], [(Position.at(16, 2), 2), (END, 1)]),
        ([(1, 3, False), (2, 4, False), (5, 9, False)], [CUT], [(Position.at(16, 4), 2), (END, 1)]),
        ([(1, 3, False), (5, 9, False)], [CUT, CUT], [(Position.at(16, 3), 1), (END, 1)]),
        ([(5, 9, False)], [CUT], [(END, 1)]),
    ],
)
def test_segments_end_at_barriers_and_cuts(
    pieces: list[tuple[int, int, bool]], cuts: list[Position], expected: list[tuple[Position, int]]
) -> None:
    known = [Piece(place(first), place(last), 1, is_serial) for first, last, is_serial in pieces]
    segments = plan_segments(reversed(known), START, END, cuts)
    assert [(segment.end, segment.events) for segment in segments] == expected
    assert [segment.start for segment in segments] == [START, *(segment.end for segment in segments[:-1])]


# --- the whole way, without Spark


class Parts:
    """A part writer that keeps lines."""

    def __init__(self) -> None:
        self.written: dict[int, list[str]] = {}

    def write_part(self, part: int, lines: Iterable[pa.RecordBatch]) -> Receipt:
        self.written[part] = [line for batch in lines for line in batch.column("line").to_pylist()]
        return {"part": part}


def written_by_executors(
    blocks: list[pa.RecordBatch], parts: int, cuts: list[Position], after: Position
) -> tuple[list[str], list[Segment]]:
    """What a reader finds who reads the parts in order: what Spark does between the steps is done here by hand."""
    keyed = [row for block in blocks for row in pack_block(block, "keyed_block")]
    rows = [row for batch in _Split(parts, tuple(map(str, cuts)))(iter(keyed)) for row in batch.to_pylist()]
    pieces = [Piece(row["first"], row["last"], row["events"], row["is_serial"]) for row in rows if not row["number"]]
    segments = plan_segments(pieces, START, END, cuts)
    lines: list[str] = []
    for segment in segments:
        inside = [row for row in rows if str(segment.start) < row["first"] <= str(segment.end)]
        for part in range(parts):
            mine = sorted((row for row in inside if row["part"] == part), key=lambda row: (row["first"], row["number"]))
            writer = Parts()
            batches = iter([pa.RecordBatch.from_pylist(mine, parallel._PIECES)] if mine else [])
            list(_Write(writer, str(after))(batches))
            lines += writer.written.get(0, [])
    return lines, segments


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9).map(lambda n: n == 0)), max_size=60),
    st.lists(st.integers(1, 15), max_size=8),
    st.integers(1, 5),
    st.lists(st.integers(0, 60), max_size=2),
    st.integers(0, 20),
)
def test_every_event_once_keys_in_order_and_nothing_passes_a_barrier(
    changes: list[tuple[int, bool]], sizes: list[int], parts: int, cut_at: list[int], done: int
) -> None:
    events = pa.RecordBatch.from_pydict(
        {
            "position": [place(number) for number in range(1, len(changes) + 1)],
            "line": [f"{number}\n" for number in range(1, len(changes) + 1)],
            "key_hash": [key * 7919 for key, _ in changes],
            "is_barrier": [is_barrier for _, is_barrier in changes],
        },
        schema=KEYED_LINES,
    )
    blocks, begin = [], 0
    for size in [*sizes, len(changes)]:
        blocks.append(events.slice(begin, size))
        begin += size
    cuts = [Position.at(16, number, SCHEMA_SUB) for number in cut_at]
    lines, segments = written_by_executors(
        [block for block in blocks if len(block)], parts, cuts, Position.at(16, done)
    )
    order = [int(line) for line in lines]
    assert sorted(order) == list(range(done + 1, len(changes) + 1))
    for key in {key for key, _ in changes}:
        of_key = [number for number in order if changes[number - 1][0] == key]
        assert of_key == sorted(of_key)
    walls = [float(number) for number, (_, is_barrier) in enumerate(changes, 1) if is_barrier]
    for wall in [*walls, *(number + 0.5 for number in cut_at)]:
        sides = [(number > wall) - (number < wall) for number in order]
        assert sides == sorted(sides)
    assert segments[-1].end == END


def test_nothing_passes_a_cut_in_the_middle_of_a_block() -> None:
    events = pa.RecordBatch.from_pydict(
        {
            "position": [place(number) for number in range(1, 9)],
            "line": [f"{number}\n" for number in range(1, 9)],
            "key_hash": [0, 1, 0, 1, 0, 1, 0, 1],
            "is_barrier": [False] * 8,
        },
        schema=KEYED_LINES,
    )
    lines, segments = written_by_executors([events], 2, [CUT], START)
    assert [int(line) for line in lines] == [1, 3, 2, 4, 5, 7, 6, 8]
    assert [segment.end for segment in segments] == [Position.at(16, 4), END]


def test_block_with_very_many_barriers_stays_in_one_piece() -> None:
    count = 4 * parallel.MAX_RUNS
    events = pa.RecordBatch.from_pydict(
        {
            "position": [place(number) for number in range(1, count + 1)],
            "line": [f"{number}\n" for number in range(1, count + 1)],
            "key_hash": list(range(count)),
            "is_barrier": [number % 2 == 0 for number in range(count)],
        },
        schema=KEYED_LINES,
    )
    lines, segments = written_by_executors([events], 4, [], START)
    assert [int(line) for line in lines] == list(range(1, count + 1))
    assert len(segments) == 1


def test_large_event_travels_in_several_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgcdc.event.events.PIECE_BYTES", 100)
    events = pa.RecordBatch.from_pydict(
        {
            "position": [place(1), place(2)],
            "line": ["x" * 1000 + "\n", "y\n"],
            "key_hash": [1, 1],
            "is_barrier": [False, False],
        },
        schema=KEYED_LINES,
    )
    assert len(list(pack_block(events))) > 3
    lines, _ = written_by_executors([events], 2, [], START)
    assert lines == ["x" * 1000 + "\n", "y\n"]


def test_rows_of_events_are_taken_like_blocks() -> None:
    row = {"position": place(1), "line": "x\n", "key_hash": 5, "is_barrier": False, "more": 1}
    opened = list(_open([pa.RecordBatch.from_pylist([row])], "line"))
    assert opened[0].schema == KEYED_LINES
    assert list(_open([], "line")) == []
    chosen = {"position": place(1), "line_0": None, "line_1": "y\n", "key_hash": 5, "is_barrier": False}
    others = {**chosen, "position": place(2), "line_0": "z\n", "line_1": None}
    opened = list(_open([pa.RecordBatch.from_pylist([chosen, others])], "line_1"))
    assert [batch.column("line").to_pylist() for batch in opened] == [["y\n"]]
    assert list(open_blocks([])) == []


# --- what a lane asks


def test_the_source_says_how_large_the_batch_is_that_it_plans(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    end = write_spool(state.spool, [[(ORDERS, Op.INSERT, [b"1", b"x"], None)]] * 20)
    schema = StructType([StructField("block", BinaryType()), StructField("is_last", BooleanType())])
    reader = ChangeReader(parse_options({"_spool": str(state.spool), "_run": "none", "consumer": "main"}), schema)
    reader._run = run = MagicMock()
    middle = Position.end(START_LSN + 80)
    reader.partitions(middle.to_offset(), end.to_offset())
    batch = {"do": "plan", "lane": "main", "start": str(middle), "end": str(end), "rows": 1, "events": 10}
    assert run.request.call_args.args == (batch,)


def test_a_batch_that_cannot_be_split_is_written_to_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pieces = MagicMock()
    pieces.where().select().collect.side_effect = PySparkException("a worker was lost")
    split = MagicMock()
    split.repartitionById().sortWithinPartitions().persist.return_value = pieces
    monkeypatch.setattr(parallel, "map_in_arrow", lambda *_: split)
    spark = MagicMock()
    spark.sparkContext.defaultParallelism = 2
    batch = LargeBatch(spark, MagicMock(), START, END, events=10)
    for name in ("first", "second"):
        member = Runner(FolderSink(tmp_path / name), tmp_path, name, DeliveryOptions(max_retries=0))
        member.open(START)
        with pytest.raises(SinkUnavailable, match="a worker was lost"):
            batch.write(member)
        assert member.ack == START


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            "Traceback\n  File x\npgcdc.core.errors.SinkUnavailable: the disk is full. Make room\n",
            SinkUnavailable,
            "the disk",
        ),
        (
            "x\npgcdc.core.errors.TransformError: transform 1 failed\n\tat org.apache",
            TransformError,
            "transform 1 failed",
        ),
        (
            "Job aborted: a worker was lost\n\tat org.apache",
            SinkUnavailable,
            "writing a: Job aborted: a worker was lost",
        ),
        ("[CAST] 1 + x", TransformError, "transform 2 failed"),
    ],
)
def test_what_an_executor_raised_is_raised_here(text: str, kind: type[PgcdcError], message: str) -> None:
    def explain(error: Exception) -> Exception:
        return TransformError("transform 2 failed") if "[CAST]" in str(error) else error

    with pytest.raises(kind, match=message) as raised, explained(explain, "writing a"):
        raise PySparkException(text)
    assert type(raised.value) is kind


def test_executors_write_what_is_behind_the_place_that_a_sink_has_skipped_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[_Write] = []

    def map_in_arrow(frame: MagicMock, writing: _Write, _: str) -> MagicMock:
        told.append(writing)
        frame.collect.return_value = []
        return frame

    monkeypatch.setattr(parallel, "map_in_arrow", map_in_arrow)
    member = Runner(FolderSink(tmp_path / "a"), tmp_path, "a")
    member.open(START)
    floor = Position.end(80)
    batch = LargeBatch(MagicMock(), MagicMock(), START, END, events=10)
    monkeypatch.setattr(batch, "_split", lambda: (MagicMock(), [Segment(START, END, 10)]))
    assert batch.write(member, floor)
    assert [one.after for one in told] == [str(floor)]
    assert member.ack == END
    assert batch.write(member, END)
    assert len(told) == 1


def test_batch_of_which_events_are_refused_goes_the_ordinary_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = FolderSink(tmp_path / "out")
    member = Runner(sink, tmp_path, "file")
    member.open(START)
    batch = LargeBatch(MagicMock(), MagicMock(), START, END)
    monkeypatch.setattr(batch, "_split", lambda: (MagicMock(), [Segment(START, END, 10)]))
    error: Exception = SinkRejected("an executor says: no")  # its rejects do not come through Spark

    def deliver(*_: object) -> None:
        raise error

    monkeypatch.setattr(LargeBatch, "_deliver", deliver)
    assert batch.write(member) is False
    error = SinkError("another one")
    with pytest.raises(SinkError, match="another one"):
        batch.write(member)


def test_a_rate_limit_wants_events_one_after_the_other(tmp_path: Path) -> None:
    membership = Membership(Roster(), MagicMock())
    for limit, takes_parts in ((0.0, True), (1e6, False)):
        sink = Runner(FolderSink(tmp_path / "a"), tmp_path, "a", DeliveryOptions(rate_limit=limit))
        member = Member(Adapter("a", sink), membership)
        assert member.takes_parts is takes_parts
        member.close()
