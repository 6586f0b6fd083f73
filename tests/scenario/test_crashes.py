"""Kill -9 at any point: every change once, in order per key, and `confirmed_flush_lsn` never ahead."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import psycopg
import pytest
from databases import Database
from killing import Killer
from listening import ConfirmWatch, Listener, check_equal, wait_until

from pgcdc.playground import shop
from pgcdc.playground.postgres import EmbeddedPostgres

ROUNDS = int(os.environ.get("PGCDC_TORTURE_ROUNDS", "30"))


@pytest.fixture
def listener(database: Database, tmp_path: Path) -> Iterator[Listener]:
    one = Listener(database.url, tmp_path)
    with database.connect() as conn:
        shop.create_tables(conn)
    yield one
    one.kill_all()


def start_traffic(one: Listener, seed: int, rate_per_s: float = 150.0) -> shop.Traffic:
    with psycopg.connect(one.url, autocommit=True) as conn:
        shop.add_first_rows(conn)
    traffic = shop.Traffic(one.url, seed=seed, rate_per_s=rate_per_s)
    traffic.start()
    return traffic


# Every step of the delivery line in the driver, in its order; killed at each in turn, each start recovering from the last.
DRIVER_POINTS = [
    "lane.planned",
    "lane.collected",
    "file.half_written",
    "sink.before_ack",
    "sink.after_ack",
    "lane.written",
    "driver.before_ack",
    "driver.after_ack",
]
# Those around the history of shapes are in test_schema_changes.py: a query starts its capture five times a minute, no more.
CAPTURE_POINTS = [
    "capture.before_poll",
    "spool.before_index",
    "spool.after_index",
    "capture.before_confirm",
    "capture.after_confirm",
]


def hits(folder: Path) -> set[str]:
    return {path.name.removesuffix(".hit") for path in folder.glob("*.hit")}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "points",
    [
        pytest.param(["sink.before_ack", "driver.before_ack"], id="some"),
        pytest.param(DRIVER_POINTS, id="all", marks=pytest.mark.slow),
    ],
)
def test_kill_9_of_the_driver_at_every_step_loses_and_repeats_nothing(
    listener: Listener, tmp_path: Path, points: list[str]
) -> None:
    listener.start(wait=False, env={"PGCDC_FAILPOINTS": f"{points[0]}=kill@2"})
    wait_until(listener.state.identity_file.exists, 60, "slot and state directory")
    wait_until(lambda: bool(listener.ack()), 60, "the sink is open")
    capture = listener.capture_pid()
    assert capture is not None
    traffic = start_traffic(listener, seed=1)
    with ConfirmWatch(listener) as watch:
        for number, point in enumerate(points):
            if number:
                listener.start(wait=False, env={"PGCDC_FAILPOINTS": f"{point}=kill@3"})
            assert listener.wait_exit(120) == -signal.SIGKILL, listener.said()
            assert traffic.commits > 0, "changes must be in flight"
            before = traffic.commits
            wait_until(partial(lambda n: traffic.commits > n, before), 10, "traffic goes on while nobody reads")
            wait_until(lambda: listener.capture_pid() is None, 20, "the capture ends with the driver")
            wait_until(lambda: not psutil.pid_exists(capture), 10, "and so does its process")
        listener.start()
        traffic.stop()
        listener.wait_delivered()
        assert listener.stop() == 0
    check_equal(listener)
    assert watch.violations == []
    assert watch.moves > len(points) // 3


# Ways through Spark that leave each event as it is. Each run takes another one, on the checkpoint of the last.
TRANSFORMS = {
    "condition": "{type: filter, where: \"operation = 'DELETE' OR cardinality(row) > 0\"}",
    "sql": "{type: sql, set: {more: \"concat('x', row['id'])\"}}, {type: drop_columns, columns: [more]}",
    "python": "{type: python, function: 'same_event:same'}",
}


@pytest.mark.timeout(900)
def test_kill_9_of_the_driver_with_transforms_in_spark_loses_and_repeats_nothing(
    listener: Listener, tmp_path: Path
) -> None:
    """A batch that a short way has collected comes again, also by another way."""
    (tmp_path / "same_event.py").write_text("def same(event):\n    return event\n")
    for name, one in TRANSFORMS.items():
        (tmp_path / f"{name}.yaml").write_text(f"transforms: {{global: [{one}]}}\n")
    points = {"condition": "lane.collected", "sql": "sink.before_ack"}

    def start(name: str) -> None:
        env = {"PGCDC_FAILPOINTS": f"{points[name]}=kill@3"}
        listener.start("--config", str(tmp_path / f"{name}.yaml"), wait=False, env=env)

    start("condition")
    wait_until(lambda: bool(listener.ack()), 120, "the sink is open")
    traffic = start_traffic(listener, seed=6)
    with ConfirmWatch(listener) as watch:
        for number, name in enumerate(points):
            if number:
                start(name)
            assert listener.wait_exit(300) == -signal.SIGKILL, listener.said()
            before = traffic.commits
            wait_until(partial(lambda n: traffic.commits > n, before), 10, "changes are in flight")
            wait_until(lambda: listener.capture_pid() is None, 20, "the capture ends with the driver")
        listener.start("--config", str(tmp_path / "python.yaml"), env={"PYTHONPATH": str(tmp_path)})
        traffic.stop()
        listener.wait_delivered()
        assert listener.stop() == 0
    check_equal(listener)
    assert watch.violations == []
    assert watch.moves > 0


@pytest.mark.timeout(900)
def test_an_exception_at_every_step_of_the_driver_restarts_the_query_without_loss(
    listener: Listener, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    points = ",".join(f"{point}=raise@{3 + 4 * number}" for number, point in enumerate(DRIVER_POINTS))
    listener.start(env={"PGCDC_FAILPOINTS": points, "PGCDC_FAILPOINT_ONCE": str(marks)})
    traffic = start_traffic(listener, seed=2)
    with ConfirmWatch(listener) as watch:
        wait_until(lambda: hits(marks) == set(DRIVER_POINTS), 120, f"all failpoints hit: {hits(marks)}")
        traffic.stop()
        listener.wait_delivered()
        assert listener.stop() == 0, listener.said()
    begun, over = (listener.said().count(what) for what in ("restarting the query in", "the query runs again"))
    assert begun >= over > 0
    check_equal(listener)
    assert watch.violations == []


@pytest.mark.parametrize(
    "actions",
    [
        pytest.param(["kill", "raise", "kill", "kill", "raise"], id="mixed"),
        pytest.param(["kill"] * 5, id="kill", marks=pytest.mark.slow),
        pytest.param(["raise"] * 5, id="raise", marks=pytest.mark.slow),
    ],
)
def test_a_crash_of_the_capture_at_every_step_is_recovered_by_the_running_query(
    listener: Listener, tmp_path: Path, actions: list[str]
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    points = ",".join(
        f"{point}={action}@{20 + 15 * n if n < 3 else 2}"
        for n, (point, action) in enumerate(zip(CAPTURE_POINTS, actions, strict=True))
    )
    listener.start(env={"PGCDC_FAILPOINTS": points, "PGCDC_FAILPOINT_ONCE": str(marks)})
    traffic = start_traffic(listener, seed=3)
    with ConfirmWatch(listener) as watch:
        wait_until(lambda: hits(marks) == set(CAPTURE_POINTS), 120, "all failpoints hit")
        traffic.stop()
        listener.wait_delivered()
        assert listener.stop() == 0, listener.said()
    check_equal(listener)
    assert watch.violations == []


def run_rounds(folder: Path, targets: list[str], seed: int) -> None:
    print(f"seed {seed}, targets {targets}")
    with EmbeddedPostgres.temporary(settings={"synchronous_commit": "on"}) as server:
        one = Listener(server.url(), folder)
        with psycopg.connect(server.url(), autocommit=True) as conn:
            shop.create_tables(conn)
        try:
            one.start()
            traffic = start_traffic(one, seed)
            with ConfirmWatch(one) as watch:
                killer = Killer(one, server, traffic, seed)
                for target in targets:
                    killer.round(target)
                traffic.stop()
                one.wait_delivered()
                assert one.stop() == 0, one.said()
            check_equal(one)
            assert watch.violations == []
            assert watch.moves > 0
        finally:
            one.kill_all()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_kills_under_load_lose_and_repeat_nothing(tmp_path: Path) -> None:
    seed = int(os.environ.get("PGCDC_SEED", "0")) or random.randrange(1 << 30)
    run_rounds(tmp_path, ["capture", "worker", "postgres", "jvm"], seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_kills_under_load_lose_and_repeat_nothing(tmp_path: Path) -> None:
    seed = int(os.environ.get("PGCDC_SEED", "0")) or random.randrange(1 << 30)
    generator = random.Random(seed)
    targets = generator.choices(["capture", "worker", "postgres", "jvm", "driver"], k=ROUNDS)
    run_rounds(tmp_path, targets, seed)
