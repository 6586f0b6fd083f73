"""The harness of the proofs: what eight writers did is delivered whole, and what is wrong with a delivery is found."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from databases import Database
from listening import wait_until
from proving import KEYS, Delivery, Hammer, assert_equal, compare, create_tables, fold

SEED = 5
WANTED = {"insert one", "update pair", "delete uu", "move parts", "update big", "body big", "insert log", "move big"}


def find(events: list[dict[str, Any]], operation: str, table: str) -> int:
    """The last such event of a row that is still there at the end: nothing behind it hides what is done to it."""
    left = fold(events)[f"public.{table}"]
    for number in reversed(range(len(events))):
        payload = events[number]["payload"]
        if events[number]["operation"] != operation or payload["table"] != table:
            continue
        if tuple(payload["row"][column] for column in KEYS[f"public.{table}"]) in left:
            return number
    raise AssertionError(f"no {operation} of {table}")


def test_everything_that_eight_writers_did_is_delivered_and_every_fault_is_found(
    database: Database, tmp_path: Path
) -> None:
    with database.connect() as conn:
        create_tables(conn, rows=0, wide=0)
    delivery = Delivery(database, tmp_path)
    delivery.begin()
    with Hammer(database.url, SEED, rows=150, wide=20, pause_s=0.005) as hammer:
        wait_until(lambda: set(hammer.done) >= WANTED and hammer.commits > 600, 60, "enough was written")
    assert hammer.rollbacks > 10
    delivery.deliver()
    events = delivery.events()
    assert_equal(database.url, events)

    insert, update = find(events, "INSERT", "one"), find(events, "UPDATE", "pair")
    with pytest.raises(AssertionError, match=r"missing in the output|does not exist"):
        assert_equal(database.url, events[:insert] + events[insert + 1 :])
    with pytest.raises(AssertionError, match="came twice"):
        fold(events[: insert + 1] + events[insert:])
    older = copy.deepcopy(events)
    older[update]["payload"]["row"]["note"] = "older"
    assert any("column note" in line for line in compare(database.url, fold(older)))
    with pytest.raises(AssertionError, match="came after"):
        fold([*events[:-2], events[-1], events[-2]])
    keyless = next(number for number, event in enumerate(events) if event["payload"]["table"] == "log")
    assert len(compare(database.url, fold(events[:keyless] + events[keyless + 1 :]))) == 1
