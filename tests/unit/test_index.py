"""Index records and segments: what is read back is what was written, or it is refused. Never anything else."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from mmap import mmap
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc.core.errors import SpoolError
from pgcdc.core.position import LAST_ORDINAL, Kind, Position
from pgcdc.core.relation import Op
from pgcdc.spool.index import (
    IndexRecord,
    chunk_number,
    chunk_path,
    encode_record,
    list_chunks,
    load_transactions,
    scan_records,
)
from pgcdc.spool.schema import CHANGES, TRANSACTIONS
from pgcdc.spool.segment import checksum_file, open_segment, read_segment, write_segment

positions = st.builds(Position.end, st.integers(0, 2**63 - 1)) | st.builds(
    Position,
    st.integers(0, 2**63 - 1),
    st.sampled_from(Kind),
    st.integers(0, LAST_ORDINAL - 1),
    st.integers(0, 2**31 - 1),
)
transactions = st.lists(
    st.fixed_dictionaries(
        {
            "commit": st.integers(0, 2**63 - 1),
            "kind": st.sampled_from([0, 1]),
            "commit_time": st.integers(-(2**63), 2**63 - 1),
            "xid": st.integers(0, 2**32 - 1),
            "rows": st.integers(0, 2**40),
            "complete": st.booleans(),
            "origin": st.none() | st.text(max_size=5),
        }
    ),
    max_size=4,
).map(lambda rows: pa.RecordBatch.from_pylist(rows, schema=TRANSACTIONS))
records = st.one_of(
    st.builds(IndexRecord, positions, is_base=st.booleans()),
    st.builds(
        IndexRecord,
        positions,
        st.integers(1, 10**12 - 1).map(lambda number: f"seg-{number:012d}.arrow"),
        st.tuples(st.integers(0, 2**40), st.integers(0, 2**32 - 1)),
        st.integers(0, 2**40),
        st.integers(0, 2**31),
        st.integers(-(2**63), 2**63 - 1),
    ),
)


def same(one: IndexRecord, other: IndexRecord) -> bool:
    """Equal, wherever they stand."""
    return replace(one, place=other.place) == other


def parse(data: bytes) -> tuple[list[IndexRecord], bool]:
    """The records before the first damage, and whether there was damage."""
    found = []
    try:
        for record in scan_records(data, "index-1", 1):
            found.append(record)
    except SpoolError:
        return found, True
    return found, False


@settings(max_examples=40)
@given(st.lists(st.tuples(records, transactions), max_size=4), st.integers(0, 100))
def test_records_round_trip_with_their_places_and_transactions(
    written: list[tuple[IndexRecord, pa.RecordBatch]], begin: int
) -> None:
    encoded = [encode_record(*one) for one in written]
    data = b"".join(encoded)
    found = list(scan_records(data, "index-1", 7, begin))
    ends = [begin, *(begin + sum(map(len, encoded[: n + 1])) for n in range(len(encoded)))]
    assert [record.place for record in found] == [(7, *place) for place in pairwise(ends)]
    for record, (expected, transactions) in zip(found, written, strict=True):
        assert same(record, expected)
        body = load_transactions(data[record.place[1] - begin : record.place[2] - begin], record, "index-1")
        assert pa.ipc.read_record_batch(pa.py_buffer(body), TRANSACTIONS) == transactions


SAMPLE = [
    IndexRecord(Position.end(16), is_base=True),
    IndexRecord(
        Position.at(32, 3, 1),
        "seg-000000000001.arrow",
        (1234, 0xDEADBEEF),
        3,
        2,
        7,
    ),
    IndexRecord(Position.end(48)),
]
OF_SAMPLE = pa.RecordBatch.from_pylist(
    [{"commit": 32, "kind": 0, "commit_time": 7, "xid": 9, "rows": 3, "complete": False, "origin": "x"}],
    schema=TRANSACTIONS,
)
ENCODED = [encode_record(record, OF_SAMPLE if record.file else None) for record in SAMPLE]
DATA = b"".join(ENCODED)


def test_data_cut_at_any_byte_gives_the_records_before_it_and_no_error() -> None:
    ends = [sum(map(len, ENCODED[: n + 1])) for n in range(len(ENCODED))]
    for size in range(len(DATA) + 1):
        found, damaged = parse(DATA[:size])
        assert not damaged
        assert len(found) == sum(end <= size for end in ends)
        assert all(map(same, found, SAMPLE))


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80, 0xFF])
def test_any_flipped_byte_ends_the_sound_records_before_it(mask: int) -> None:
    starts = [sum(map(len, ENCODED[:n])) for n in range(len(ENCODED))]
    for place in range(len(DATA)):
        damaged = bytearray(DATA)
        damaged[place] ^= mask
        found, _ = parse(bytes(damaged))
        before = sum(start <= place for start in starts) - 1
        assert len(found) == before
        assert all(map(same, found, SAMPLE))


def test_damage_names_chunk_and_byte() -> None:
    data = bytearray(DATA)
    data[len(ENCODED[0])] ^= 1
    with pytest.raises(SpoolError, match=rf"index-7 is damaged at byte {len(ENCODED[0])}") as caught:
        list(scan_records(bytes(data), "index-7", 7))
    assert "spool" in caught.value.advice


def test_chunks_are_listed_oldest_first_and_nothing_else_is_one(tmp_path: Path) -> None:
    for number in (100_000_000, 2, 10, 1):
        chunk_path(tmp_path, number).touch()
    (tmp_path / "relations.jsonl").touch()
    (tmp_path / "seg-000000000001.arrow").touch()
    assert [chunk_number(path) for path in list_chunks(tmp_path)] == [1, 2, 10, 100_000_000]


# --- segments


def changes(count: int) -> pa.RecordBatch:
    row = {"sub": 0, "op": int(Op.INSERT), "relation": 0, "old": None, "old_kind": 0, "unchanged": None, "prefix": None}
    return pa.RecordBatch.from_pylist([row | {"ordinal": n + 1, "new": [b"x", None]} for n in range(count)], CHANGES)


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_segment_round_trips_and_leaves_no_other_file(tmp_path: Path, count: int) -> None:
    path = tmp_path / "seg.arrow"
    batch = changes(count)
    written = write_segment(path, batch)
    assert checksum_file(path) == written
    assert open_segment(path, written).to_pylist() == read_segment(path).to_pylist() == batch.to_pylist()
    assert list(tmp_path.iterdir()) == [path]


def test_slice_is_written_without_the_rest(tmp_path: Path) -> None:
    whole, part = changes(5000), changes(5000).slice(10, 3)
    written = write_segment(tmp_path / "part.arrow", part)
    assert written[0] < write_segment(tmp_path / "whole.arrow", whole)[0] / 10
    assert open_segment(tmp_path / "part.arrow", written).to_pylist() == part.to_pylist()


def test_segment_that_could_not_be_completed_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pgcdc.spool.segment.write_all", fail)
    with pytest.raises(OSError, match="No space"):
        write_segment(tmp_path / "seg.arrow", changes(1))
    assert not (tmp_path / "seg.arrow").exists()


def test_segment_with_any_flipped_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "seg.arrow"
    written = write_segment(path, changes(2))
    with open(path, "r+b", buffering=0) as file, mmap(file.fileno(), 0) as content:
        for place in range(len(content)):
            content[place] ^= 0x40
            with pytest.raises(SpoolError, match="checksum does not match"):
                open_segment(path, written)
            content[place] ^= 0x40
    assert open_segment(path, written).num_rows == 2


@pytest.mark.parametrize("size", [0, 1, -1])
def test_segment_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "seg.arrow"
    written = write_segment(path, changes(2))
    path.write_bytes((path.read_bytes() + b"x")[: size if size >= 0 else None])
    with pytest.raises(SpoolError, match=f"its index record says {written[0]}"):
        open_segment(path, written)


def test_missing_segment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpoolError, match="is missing"):
        open_segment(tmp_path / "seg.arrow", (1, 1))
