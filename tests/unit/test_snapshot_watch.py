"""What `pgcdc listen` says of snapshots: what became of requests, and the last line of a run."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pgcdc.core.position import Position
from pgcdc.run.progress import SnapshotWatch, describe_stop
from pgcdc.run.supervisor import Lanes

READING = {
    "status": "reading",
    "tables": [{"rows": 50_000, "estimated_rows": 800_000}, {"rows": 5_180, "estimated_rows": 100_000}],
    "held_seconds": 7.5,
}


def request(name: str, status: str, **more: Any) -> dict[str, Any]:
    plain = {
        "id": name,
        "table": "t",
        "kind": "incremental",
        "status": status,
        "rows": 1234,
        "finished": 0.0,
        "error": "",
    }
    return {**plain, **more}


def test_requests_that_end_are_told_once() -> None:
    said: list[str] = []
    watch = SnapshotWatch(said.append, is_all=False)
    now = time.time() + 1
    status = {"snapshots": [request("old", "done", finished=now - 60), request("a", "running")]}
    watch.follow(lambda: status)
    status["snapshots"] = [request("a", "done", finished=now), request("b", "failed", finished=now, error="no key")]
    watch.follow(lambda: status)  # less than a second later: nobody looks
    assert said == []
    for _ in range(2):
        watch.follow(lambda: status, at_once=True)
    assert said == ["snapshot a of table t is complete: 1,234 rows read", "snapshot b of table t failed: no key"]
    status["snapshots"] = [request("c", "done", kind="vanished", finished=now)]
    watch.follow(lambda: status, at_once=True)
    assert said[2:] == ["snapshot c of table t is complete: 1,234 rows deleted that the source no longer has"]


def test_a_snapshot_alone_ends_where_its_rows_ended_also_while_changes_go_on() -> None:
    """What is moved beside the stream lets the stream be read: under traffic its end is never reached."""
    said: list[str] = []
    watch = SnapshotWatch(said.append, is_all=True)
    delivered = SimpleNamespace(place=Position.end(0x800))
    lanes = cast(Lanes, delivered)
    status: dict[str, Any] = {"initial_snapshot": {"status": "complete", "end": None}, "settled": None}
    assert not watch.follow(lambda: status, lanes, at_once=True)
    for number in range(1, 4):
        status["settled"] = str(Position.end(0x800 + 0x10 * number))
        assert not watch.follow(lambda: status, lanes, at_once=True)
    delivered.place = Position.end(0x810)
    status["settled"] = str(Position.end(0x900))
    assert watch.follow(lambda: status, lanes, at_once=True)
    assert said == [
        "the existing rows are delivered. The slot remains: start again without initial_only to deliver changes"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ({}, "stopped: all is there"),
        ({"initial_snapshot": None, "snapshots": [request("a", "done")]}, "stopped: all is there"),
        ({"initial_snapshot": {"status": "complete"}, "snapshots": []}, "stopped: all is there"),
        (
            {"initial_snapshot": READING},
            "stopped during the initial snapshot: 55,180 of about 900,000 rows read; the snapshot is held for 5 minutes, "
            "so that a start until then resumes it",
        ),
        (
            {"initial_snapshot": {"status": "planning", "tables": [], "held_seconds": 0.0}},
            "stopped during the initial snapshot; the next start resumes it",
        ),
        (
            {"snapshots": [request("a", "running"), request("b", "queued"), request("c", "paused")]},
            "stopped: all is there; 2 incremental snapshots go on at the next start",
        ),
        (
            {"snapshots": [request("a", "queued")]},
            "stopped: all is there; 1 incremental snapshot goes on at the next start",
        ),
    ],
)
def test_the_last_line_says_what_is_not_at_its_end(status: dict[str, Any], text: str) -> None:
    assert describe_stop(status, "all is there") == text
