"""Rows of snapshots in the stream: their positions, their log, and what is left of both after a crash."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

from pgcdc.core.errors import SpoolError, StateError
from pgcdc.core.position import LAST_CHUNK, SNAPSHOT, Position
from pgcdc.core.relation import Column, OldKind, Op, Relation, Relations
from pgcdc.source.postgres.snapshot.releases import Releases, find_staged, stage_rows
from pgcdc.spool.schema import CHANGES, TRANSACTIONS
from pgcdc.spool.segment import CaptureBatch, Part, split_batch

ORDERS = Relation(16384, "public", "orders", "d", (Column("id", 23, -1, True),))
BASE = Position.end(0x100)


def rows(*ids: int, op: Op = Op.SNAPSHOT) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [
            {"ordinal": 0, "sub": 0, "op": int(op), "relation": 0, "new": [str(one).encode()], "old_kind": OldKind.NONE}
            for one in ids
        ],
        schema=CHANGES,
    )


def release(releases: Releases, after: Position, *batches: pa.RecordBatch) -> Position:
    return releases.add(after, releases.stage(batches, 1_000_000), ORDERS).end


def ids(batches: list[CaptureBatch]) -> list[bytes]:
    return [new[0] for batch in batches for new in batch.data.column("new").to_pylist()]


def test_rows_of_a_snapshot_stand_between_two_transactions(tmp_path: Path) -> None:
    releases = Releases(tmp_path, BASE)
    first = release(releases, BASE, rows(1, 2), rows(3))
    second = release(releases, first, rows(4))
    assert BASE < first < second < Position.at(0x108, 1)
    assert first.is_end and second.is_end and first.is_snapshot and not BASE.is_snapshot
    assert {first.confirmable, second.confirmable} == {0x100}
    assert Position.parse(str(second)) == second and Position.from_offset(second.to_offset()) == second


def test_a_release_follows_the_very_end_of_its_transaction(tmp_path: Path) -> None:
    releases = Releases(tmp_path, BASE)
    first = release(releases, BASE, rows(1, 2))
    second = release(releases, first, rows(3))
    one, two = releases.after(BASE)
    assert one.follows(BASE) and two.follows(first) and two.follows(Position(0x100, SNAPSHOT, second.ordinal - 1))
    assert not any(one.follows(end) for end in (Position.end(0xF8), Position.at(0x100, 3), Position.end(0x108)))


def test_a_note_is_there_again_after_a_crash(tmp_path: Path) -> None:
    releases = Releases(tmp_path, BASE)
    note = {"request": "a", "last_key": ["1"]}
    releases.add(BASE, releases.stage([rows(1)]), ORDERS, note)
    assert [one.note for one in Releases(tmp_path, BASE).after(BASE)] == [note]


def test_batches_have_final_positions_and_only_the_last_ends_the_chunk(tmp_path: Path) -> None:
    releases, relations = Releases(tmp_path, BASE), Relations([Relation(1, "a", "b", "d", ())])
    release(releases, release(releases, BASE, rows(0)), rows(1, 2), rows(3))
    _, second = releases.after(BASE)
    batches = list(releases.batches(second, relations))
    assert [batch.end.is_end for batch in batches] == [False, True]
    positions = [
        Position(batch.transactions.column("commit")[0].as_py(), batch.transactions.column("kind")[0].as_py(), ordinal)
        for batch in batches
        for ordinal in batch.data.column("ordinal").to_pylist()
    ]
    assert positions == sorted(positions) and positions[-1] < batches[-1].end and positions[1] == batches[0].end
    assert ids(batches) == [b"1", b"2", b"3"]
    assert {version for batch in batches for version in batch.data.column("relation").to_pylist()} == {1}
    assert relations[1] == ORDERS and batches[-1].last_lsn == 0x100


def test_what_was_released_is_there_again_after_a_crash(tmp_path: Path) -> None:
    releases = Releases(tmp_path, BASE)
    first = release(releases, BASE, rows(1))
    second = release(releases, first, rows(2))
    with open(tmp_path / "releases.jsonl", "ab") as log:
        log.write(b"0000 half a li")
    again = Releases(tmp_path, BASE)
    assert [one.end for one in again.after(BASE)] == [first, second]
    assert [one.end for one in again.after(first)] == [second]
    third = release(again, second, rows(3))
    assert [one.end for one in Releases(tmp_path, first).after(BASE)] == [second, third]


def test_nobody_needs_what_is_released_everywhere(tmp_path: Path) -> None:
    releases = Releases(tmp_path, BASE)
    first = release(releases, BASE, rows(1))
    second = release(releases, first, rows(2))
    releases.forget(first)
    assert [one.end for one in releases.after(BASE)] == [second]
    assert len(list(tmp_path.glob("*.arrow"))) == 1
    releases.forget(second)
    assert not list(tmp_path.iterdir())


def test_files_that_nobody_knows_are_removed_at_a_start(tmp_path: Path) -> None:
    releases = Releases(tmp_path, BASE)
    release(releases, BASE, rows(1))
    kept, _ = releases.stage([rows(2)]), releases.stage([rows(3)])
    (tmp_path / "a.arrow.7.partial").touch()
    again = Releases(tmp_path, BASE)
    again.remove_unknown({kept.file})
    (released,) = again.after(BASE)
    assert {one.name for one in tmp_path.glob("*.arrow*")} == {released.staged.file, kept.file}


def test_staged_rows_are_found_again_without_reading_them(tmp_path: Path) -> None:
    staged = stage_rows(tmp_path, [rows(1, 2), rows(3)], "16384-1-0", 1_000_000)
    (tmp_path / "16384-1-1.7.arrow.partial").touch()
    (tmp_path / staged.file).write_bytes(b"")
    assert find_staged(tmp_path) == {"16384-1-0": staged} and (staged.rows, staged.time_us) == (3, 1_000_000)


def test_damage_is_said(tmp_path: Path) -> None:
    releases = Releases(tmp_path, BASE)
    release(releases, BASE, rows(1))
    (known,) = releases.after(BASE)
    (tmp_path / known.staged.file).write_bytes(b"nonsense")
    with pytest.raises(StateError, match="missing or damaged"):
        list(releases.batches(known, Relations()))


@pytest.mark.parametrize(
    "after", [Position.at(0x100, 3), Position.chunk_end(0x100, LAST_CHUNK), Position.behind(0x100)]
)
def test_where_there_is_no_place_nothing_is_released(tmp_path: Path, after: Position) -> None:
    releases = Releases(tmp_path, BASE)
    with pytest.raises(SpoolError, match="no position"):
        release(releases, after, rows(1))
    assert not releases.after(BASE)


def test_a_batch_is_split_between_its_transactions() -> None:
    transactions = pa.RecordBatch.from_pylist(
        [
            {"commit": lsn, "kind": 0, "commit_time": 0, "xid": lsn, "rows": count, "complete": True, "origin": None}
            for lsn, count in ((0x108, 2), (0x110, 1), (0x118, 2))
        ],
        schema=TRANSACTIONS,
    )
    data = rows(1, 2, 3, 4, 5, op=Op.INSERT)
    batch = CaptureBatch(
        Part(5, data.nbytes, (2, 0), data), transactions, Relations(), Position.end(0x118), 0x118, token=b"set"
    )
    before, after = split_batch(batch, 0x111)
    assert before is not None
    assert (ids([before]), before.end, before.last_lsn) == ([b"1", b"2", b"3"], Position.end(0x110), 0x110)
    assert (ids([after]), after.end, after.last_lsn) == ([b"4", b"5"], Position.end(0x118), 0x118)
    assert (before.token, after.token) == (b"", b"set"), "with it a source goes on behind all of them"
    assert split_batch(batch, 0x101) == (None, batch)


def test_rows_are_on_disk_before_the_log_says_where_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill cannot show a missing fsync: the calls are traced."""
    releases = Releases(tmp_path / "r", BASE)
    real, calls = os.fsync, list[str]()

    def fsync(descriptor: int) -> None:
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    staged = releases.stage([rows(2)])
    releases.add(BASE, staged, ORDERS)
    log = calls.index("releases.jsonl")
    assert calls[0].endswith(".partial"), "before they have their name"
    assert calls[1:log] == ["r"], "the folder, with the name of the file"
