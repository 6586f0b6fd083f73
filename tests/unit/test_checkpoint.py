"""Where batches ended: what a lane remembers of them, and what its source may say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest

from pgcdc.core.errors import StateError
from pgcdc.core.position import Position
from pgcdc.run import lane as checkpoint_module
from pgcdc.run.lane import Checkpoint, Lane, Planned
from pgcdc.transform.specs import Chain


def at(number: int) -> Position:
    return Position.end(8 * number)


def test_the_ends_of_batches_are_there_after_a_crash_but_half_of_one_is_not(tmp_path: Path) -> None:
    ends = Checkpoint(tmp_path / "main", at(0))
    for number in range(3):
        ends.note(number, at(number + 1))
    (tmp_path / "main" / "ends" / "3").write_text(f"{at(4)}")
    again = Checkpoint(tmp_path / "main", at(0))
    assert [again.end_of(number) for number in range(3)] == [at(1), at(2), at(3)]
    with pytest.raises(StateError, match="does not record where batch 3 ended"):
        again.end_of(3)
    again.note(3, at(5))
    assert Checkpoint(tmp_path / "main", at(0)).end_of(3) == at(5)


def test_a_batch_that_is_planned_in_another_way_has_its_last_end(tmp_path: Path) -> None:
    ends = Checkpoint(tmp_path, at(0))
    for number, end in ((0, 1), (1, 2), (1, 4)):
        ends.note(number, at(end))
    assert ends.end_of(1) == at(4) and Checkpoint(tmp_path, at(0)).end_of(1) == at(4)


def test_the_folder_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "KEPT_ENDS", 5)
    ends = Checkpoint(tmp_path, at(0))
    for number in range(100):
        ends.note(number, at(number))
        assert len(list((tmp_path / "ends").iterdir())) <= 5
    assert [Checkpoint(tmp_path, at(0)).end_of(number) for number in range(95, 100)] == [
        at(number) for number in range(95, 100)
    ]


class NoProgram:
    chains = (Chain(),)

    def collect(self, blocks: object) -> list[Any]:
        raise AssertionError("nobody waits for it")


@pytest.fixture
def lane(tmp_path: Path) -> Lane:
    made = Lane("main", tmp_path / "main", at(1), list)
    made.program = cast(Any, NoProgram())
    return made


def commit(lane: Lane, number: int) -> None:
    """What Spark leaves behind a batch."""
    for folder in ("offsets", "commits"):
        (lane.checkpoint.folder / folder).mkdir(parents=True, exist_ok=True)
        (lane.checkpoint.folder / folder / str(number)).write_text("not read")


def test_a_lane_goes_on_where_the_last_committed_batch_ended(lane: Lane) -> None:
    lane.planned = Planned(at(1), at(3), 0)
    lane._deliver(cast(Any, None), 0)
    assert lane.place == at(1) and lane.committed() is None, "Spark has not committed it"
    commit(lane, 0)
    assert lane.place == at(3) and lane.committed() == at(3) and lane.committed() is None
    lane.planned = Planned(at(3), at(7), 0)
    lane._deliver(cast(Any, None), 1)
    again = Lane("main", lane.checkpoint.folder, at(1), list)
    assert again.place == at(3) and again.committed() == at(3), "batch 1 comes again"
    commit(lane, 1)
    assert Lane("main", lane.checkpoint.folder, at(1), list).place == at(7)


@pytest.mark.parametrize("planned", [None, Planned(at(2), at(7), 0), Planned(at(4), at(7), 0)])
def test_a_batch_that_does_not_begin_where_the_last_one_ended_is_refused(lane: Lane, planned: Planned | None) -> None:
    lane.planned = Planned(at(1), at(3), 0)
    lane._deliver(cast(Any, None), 0)
    lane.planned = planned
    with pytest.raises(StateError, match="expects batch 1 to begin at"):
        lane._deliver(cast(Any, None), 1)
    assert lane.next_start == at(3)


def test_what_a_source_said_counts_for_one_batch(lane: Lane) -> None:
    lane.planned = Planned(at(1), at(1), 0)
    lane._deliver(cast(Any, None), 0)
    with pytest.raises(StateError, match="its source says nothing"):
        lane._deliver(cast(Any, None), 1)


def test_ends_and_sparks_files_are_durable_before_the_ack(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def note(descriptor: int) -> None:
        synced.append(
            Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(lane.checkpoint.folder.parent).as_posix()
        )

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "fdatasync", note)
    Checkpoint(lane.checkpoint.folder, at(1))
    assert synced == ["main", "."], "the entries of the folders"
    lane.planned = Planned(at(1), at(3), 0)
    lane._deliver(cast(Any, None), 0)
    commit(lane, 0)
    lane.planned = Planned(at(3), at(7), 0)
    synced.clear()
    lane._deliver(cast(Any, None), 1)
    assert synced == [], "a batch does not wait for the disk"
    commit(lane, 1)
    assert lane.committed() == at(7)
    wanted = {f"main/{folder}{number}" for folder in ("ends", "offsets", "commits") for number in ("", "/1")}
    assert wanted <= set(synced)
    lane.planned = Planned(at(7), at(9), 0)
    lane._deliver(cast(Any, None), 2)
    commit(lane, 2)
    synced.clear()
    assert lane.committed() == at(9)
    wanted = {f"main/{folder}{number}" for folder in ("ends", "offsets", "commits") for number in ("", "/2")}
    assert sorted(synced) == sorted(wanted), "each file once: those of batch 1 are durable"


def test_what_spark_committed_before_the_machine_crashed_comes_again_if_its_end_is_lost(lane: Lane) -> None:
    for number in range(4):
        lane.planned = Planned(at(number + 1), at(number + 2), 0)
        lane._deliver(cast(Any, None), number)
        commit(lane, number)
    ends = lane.checkpoint.folder / "ends"
    (ends / "3").unlink()
    (ends / "2").write_text("")
    again = Lane("main", lane.checkpoint.folder, at(1), list)
    assert again.place == at(3) and again.committed() == at(3)
    names = {
        kind: sorted(one.name for one in (lane.checkpoint.folder / kind).iterdir()) for kind in ("offsets", "commits")
    }
    assert names == {"offsets": ["0", "1", "2"], "commits": ["0", "1"]}, "batch 2 comes again as it was planned"
    for name in ("0", "1"):
        (ends / name).unlink()
    with pytest.raises(StateError, match="does not record where batch 1 ended"):
        Lane("main", lane.checkpoint.folder, at(1), list)
