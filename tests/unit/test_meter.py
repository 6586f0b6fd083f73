"""The playground without its processes: what it measures, how it looks, and what its proof finds."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest

from pgcdc.core.position import Position
from pgcdc.playground.proof import Tables, Verdict
from pgcdc.playground.proof import compare as compare_with
from pgcdc.playground.shop import KEYS
from pgcdc.playground.view import (
    Meter,
    describe_event,
    format_latency,
    format_ms,
    progress_line,
    summary_line,
)

COMMIT_S = 1_700_000_000.25
COMMIT_TEXT = "2023-11-14T22:13:20.250000Z"


def make_event(
    lsn: int, ordinal: int = 1, operation: str = "INSERT", table: str = "orders", **more: Any
) -> dict[str, Any]:
    payload = {"op": operation, "table": table, "row": {"id": str(lsn)}, "old": None} | more
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{lsn}/{ordinal}")),
        "channel": f"pgcdc:{table}",
        "operation": operation,
        "payload": payload,
        "source": "wal_replication",
        "created_at": COMMIT_TEXT,
        "position": str(Position.at(lsn, ordinal)),
    }


def as_batch(*events: Mapping[str, Any]) -> pa.Table:
    lines = [orjson.dumps(event).decode() + "\n" for event in events]
    return pa.table(
        {
            "position": pa.array([event["position"] for event in events], pa.string()),
            "line": pa.array(lines, pa.string()),
        }
    )


FIRST = as_batch(make_event(1) | {"created_at": "2023-11-14T22:13:10.000000Z"})
FIRST_S = COMMIT_S - 0.01
"""Committed long before the first delivery: its latency does not count."""


def played(events: int = 40) -> Meter:
    meter = Meter()
    meter.add(FIRST, FIRST_S)
    tables = ("customers", "documents", "inventory", "order_items", "orders", "products", "billing.invoices")
    for number in range(events):
        operation = ("INSERT", "UPDATE", "DELETE")[number % 3]
        event = make_event(number + 2, operation=operation, table=tables[number % len(tables)])
        meter.add(as_batch(event), COMMIT_S + 0.08)
    return meter


# --- measuring


def measured(*events: Mapping[str, Any]) -> Meter:
    """Delivered 40 ms after the commit."""
    meter = Meter()
    meter.add(as_batch(*events), COMMIT_S + 0.040)
    return meter


def test_a_batch_is_measured_by_event_commit_and_latency() -> None:
    newest = make_event(3, 1, "UPDATE")
    found = measured(make_event(1, 1), make_event(1, 2, table="billing.invoices"), make_event(2, 1, "UPDATE"), newest)
    assert (found.events, found.commits) == (4, 3)
    assert found.last[-1] == newest
    assert found.counts == {("orders", "INSERT"): 1, ("billing.invoices", "INSERT"): 1, ("orders", "UPDATE"): 2}


def test_rows_that_look_like_an_event_are_not_taken_for_one() -> None:
    row = {
        "created_at": "1999-01-01T00:00:00.000000Z",
        "x": '","operation":"DELETE","created_at":"1999-01-01T00:00:00.000000Z","position":"0"}',
        "y": 'back\\slash "quoted" 東京 🚲\n',
    }
    found = measured(make_event(1, row=row, old=row))
    assert found.last[-1]["operation"] == "INSERT"
    assert found.began_s == COMMIT_S + 0.040


def test_an_empty_batch_measures_nothing() -> None:
    meter = measured()
    assert meter.events == 0 and meter.began_s is None


def test_a_transaction_in_two_batches_is_one_commit() -> None:
    meter = Meter()
    meter.add(as_batch(make_event(1, 1), make_event(1, 2)), COMMIT_S)
    meter.add(as_batch(make_event(1, 3), make_event(2, 1)), COMMIT_S)
    assert (meter.events, meter.commits) == (4, 2)


def test_rates_and_latency_forget_what_is_old_but_totals_do_not() -> None:
    meter = Meter()
    meter.add(as_batch(make_event(1) | {"created_at": "2023-11-14T22:00:00.000000Z"}), COMMIT_S - 60)
    meter.add(as_batch(*(make_event(n) for n in range(2, 52))), COMMIT_S + 0.5)
    events_per_s, commits_per_s, latencies = meter.recent(COMMIT_S + 2)
    assert events_per_s == commits_per_s == pytest.approx(5)
    assert latencies == {500: 50}
    assert meter.recent(COMMIT_S + 30) == (0, 0, Counter())
    assert (meter.events, meter.latencies) == (51, {500: 50})


def test_latency_counts_from_the_first_delivery_on() -> None:
    meter = Meter()
    meter.add(FIRST, FIRST_S)
    assert not meter.latencies
    meter.add(as_batch(make_event(2)), COMMIT_S + 0.04)
    assert meter.latencies == {40: 1}


def test_percentiles_are_those_of_the_events() -> None:
    values = np.random.default_rng(1).lognormal(4, 1, 20_000)
    latencies = Counter(map(round, values))
    for share in (0.5, 0.99, 1.0):
        assert format_latency(latencies, share) == format_ms(round(np.quantile(values, share, method="inverted_cdf")))


def test_a_latency_below_zero_is_counted() -> None:
    assert format_latency(Counter({-1: 1, 3: 1}), 0.5) == "-1 ms"
    assert format_latency(Counter(), 0.5) == "-"


# --- looks


@pytest.mark.parametrize(("value", "text"), [(0, "0 ms"), (84.4, "84 ms"), (999.6, "1.0 s"), (12_345, "12.3 s")])
def test_times_are_short(value: float, text: str) -> None:
    assert format_ms(value) == text


def test_awkward_values_do_not_break_the_line_of_an_event() -> None:
    row = {"id": "7", "name": "two\nlines\tand \x1b[31m", "note": None, "text": "x" * 500, "city": "東京 [bold]🚲"}
    event = make_event(1, operation="UPDATE", row=row, old={"id": "6"}, _unchanged_toast_columns=["body"])
    text = describe_event(event)
    assert text.startswith("UPDATE orders: id=6→7 ") and len(text.splitlines()) == 1
    assert "\x1b" not in text
    assert "note=null" in text and text.endswith(" body=…") and "two·lines·and ·[31m" in text
    assert "x" * 28 + "…" in text and "東京 [bold]🚲" in text


def test_lag_is_what_is_written_and_not_delivered() -> None:
    meter = played()
    meter.server_lsn, meter.delivered_lsn = 5_000, 2_000
    assert "lag 3.0 kB" in progress_line(meter, COMMIT_S + 1)
    meter.delivered_lsn = 6_000
    assert "lag 0 bytes" in progress_line(meter, COMMIT_S + 1)


def test_lines_for_logs() -> None:
    assert progress_line(played(), COMMIT_S + 1.0) == (
        "0:01  41 events in 41 commits, 41 events/s, 41 commits/s, lag 0 bytes, latency p50 80 ms p99 80 ms"
    )
    assert summary_line(Counter({80: 900, 190: 299, 1500: 1})) == (
        "commit to file: p50 80 ms, p99 190 ms, max 1.5 s over 1,200 events"
    )


def test_latency_that_is_not_known_yet_is_not_zero() -> None:
    meter = Meter()
    meter.add(FIRST, FIRST_S)
    assert progress_line(meter, FIRST_S).endswith("latency p50 - p99 -")


# --- proof

SHOP: Tables = {"public.orders": {("1",): {"id": "1"}, ("2",): {"id": "2"}}}


def write_events(path: Path, *events: Mapping[str, Any]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(event) + b"\n" for event in events))
    return path


def compare(path: Path, source: Tables) -> Verdict:
    return compare_with(path, source, KEYS)


def test_equal_contents_are_said_to_be_equal(tmp_path: Path) -> None:
    verdict = compare(write_events(tmp_path / "events", make_event(1), make_event(2)), SHOP)
    assert verdict.is_equal
    assert str(verdict) == (
        "source and delivered content are equal: 2 rows in 1 table, 2 events, none lost, none twice"
    )


def test_a_lost_event_is_found(tmp_path: Path) -> None:
    verdict = compare(write_events(tmp_path / "events", make_event(1)), SHOP)
    assert verdict.faults == ("public.orders ('2',): missing in the output",)
    assert str(verdict) == "source and delivered content differ: 1 difference"


def test_an_update_without_its_insert_is_found_even_if_the_rows_agree(tmp_path: Path) -> None:
    verdict = compare(write_events(tmp_path / "events", make_event(1, operation="UPDATE"), make_event(2)), SHOP)
    assert len(verdict.faults) == 1 and "does not exist" in verdict.faults[0]


def test_an_event_that_came_twice_is_found(tmp_path: Path) -> None:
    twice = make_event(2, operation="UPDATE")
    verdict = compare(write_events(tmp_path / "events", make_event(1), make_event(2, 0), twice, twice), SHOP)
    assert len(verdict.faults) == 2
    assert "came twice" in verdict.faults[0] and "came after" in verdict.faults[1]


def test_events_out_of_order_are_found(tmp_path: Path) -> None:
    verdict = compare(write_events(tmp_path / "events", make_event(2), make_event(1)), SHOP)
    assert len(verdict.faults) == 1 and "came after" in verdict.faults[0]


@pytest.mark.parametrize(("ending", "reason"), [(b'{"id"', "line 2 is not JSON"), (b"{}", "line 2 is incomplete")])
def test_a_file_that_is_cut_off_is_found(tmp_path: Path, ending: bytes, reason: str) -> None:
    path = write_events(tmp_path / "events", make_event(1))
    path.write_bytes(path.read_bytes() + ending)
    verdict = compare(path, SHOP)
    assert not verdict.is_equal and reason in verdict.faults[0]
