"""What `pgcdc listen` says of snapshots: what became of requests, and the last line of a run."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pgcdc.run.progress import RequestWatch, describe_stop

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
    watch = RequestWatch(said.append)
    now = time.time() + 1
    status = {"snapshots": [request("old", "done", finished=now - 60), request("a", "running")]}
    watch.follow(lambda: status)
    status["snapshots"] = [request("a", "done", finished=now), request("b", "failed", finished=now, error="no key")]
    watch.follow(lambda: status)  # less than a second later: nobody looks
    assert said == []
    for _ in range(2):
        watch.follow(lambda: status, at_once=True)
    assert said == ["snapshot a of table t is complete: 1,234 rows", "snapshot b of table t failed: no key"]
    status["snapshots"] = [request("c", "done", kind="vanished", finished=now)]
    watch.follow(lambda: status, at_once=True)
    assert said[2:] == ["snapshot c of table t is complete: 1,234 rows that vanished are deleted"]


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ({}, "stopped: all is there"),
        ({"initial_snapshot": None, "snapshots": [request("a", "done")]}, "stopped: all is there"),
        ({"initial_snapshot": {"status": "complete"}, "snapshots": []}, "stopped: all is there"),
        (
            {"initial_snapshot": READING},
            "stopped in the initial snapshot: 55,180 of about 900,000 rows are read; the snapshot is held for 5 minutes, "
            "and a later start goes on as well",
        ),
        (
            {"initial_snapshot": {"status": "planning", "tables": [], "held_seconds": 0.0}},
            "stopped in the initial snapshot; the next start goes on",
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
