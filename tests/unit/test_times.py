"""Where the time of a batch goes."""

from __future__ import annotations

import pytest

from pgcdc.run import times
from pgcdc.run.times import BatchTimes


def test_medians_of_each_step_and_a_batch_that_failed_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    found = BatchTimes()
    assert found.status() == {}
    for took_ms in (1, 2, 9):
        for step in times.STEPS:
            found.mark(step)
            now += took_ms / 1e3
    for step in ("planned", "called"):  # it fails, and comes again
        found.mark(step)
        now += 1.0
    assert found.status() == {"called": 2.0, "collected": 2.0, "written": 2.0, "ended": 2.0}


def test_a_batch_that_all_adapters_have_is_not_collected() -> None:
    found = BatchTimes()
    for step in ("planned", "called", "ended"):
        found.mark(step)
    assert list(found.status()) == ["called", "ended"]
