"""`pgcdc listen` on a cluster: a master and two workers, one of which is gone in the middle of a large batch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from clusters import Cluster
from databases import Database
from listening import ConfirmWatch, Listener, wait_until

from pgcdc.sink.folder import OWNER

pytestmark = pytest.mark.slow

ROWS = 60_000
ROUNDS, MAX_ROUNDS = 3, 8
KEYS = 5_000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster") as one:
        yield one


class FolderListener(Listener):
    """Delivers to a folder."""

    def read(self) -> list[dict[str, Any]]:
        parts = sorted(self.output.glob("*.jsonl"))
        return [json.loads(line) for part in parts for line in part.read_text().splitlines()]

    def delivered_lsn(self) -> int:
        """An ack inside of a transaction is not its end."""
        ack = self.ack()
        return 0 if ack is None else ack.commit if ack.is_end else ack.commit - 1

    def hidden(self) -> list[Path]:
        folder = self.output / "_pgcdc"
        return [path for path in folder.iterdir() if path.name != OWNER] if folder.exists() else []


@pytest.fixture
def listener(database: Database, tmp_path: Path, cluster: Cluster) -> Iterator[FolderListener]:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, n int NOT NULL, note text)")
    one = FolderListener(database.url, tmp_path, "--tables", "t", "--spark-master", cluster.url)
    one.output = tmp_path / "events"
    one.output.mkdir()
    yield one
    one.kill_all()


def change_everything(database: Database, number: int) -> None:
    """Every row, a dozen times, in transactions of one large batch; in the middle a TRUNCATE."""
    with database.connect(autocommit=False) as conn:
        conn.execute(
            "INSERT INTO t SELECT i, %s, repeat('x', 100) FROM generate_series(1, %s) i "
            "ON CONFLICT (id) DO UPDATE SET n = excluded.n",
            [number, KEYS],
        )
        for more in range(ROWS // KEYS // 2):
            conn.execute("UPDATE t SET n = %s", [number + more])
        conn.execute("TRUNCATE t")
        conn.execute("INSERT INTO t SELECT i, %s, repeat('y', 100) FROM generate_series(1, %s) i", [number, KEYS])
        for more in range(ROWS // KEYS // 2):
            conn.execute("UPDATE t SET n = %s", [number + more])


def check(events: list[dict[str, Any]], database: Database) -> None:
    positions = [event["position"] for event in events]
    assert len(set(positions)) == len(positions) == len({event["id"] for event in events})
    rows: dict[str, tuple[str, str]] = {}
    last: dict[str, str] = {}
    wall = ""
    for event in events:
        row = event["payload"]["row"]
        if event["operation"] == "TRUNCATE":
            assert all(position < event["position"] for position in last.values())
            rows, wall = {}, event["position"]
            continue
        assert max(wall, last.get(row["id"], "")) < event["position"]
        last[row["id"]] = event["position"]
        rows[row["id"]] = (row["n"], row["note"])
    assert rows == {str(key): (str(n), note) for key, n, note in database.query("SELECT id, n, note FROM t")}


def test_worker_that_dies_while_its_tasks_write(database: Database, listener: FolderListener, cluster: Cluster) -> None:
    listener.start()
    rounds = 0
    was_in_flight = False
    with ConfirmWatch(listener) as watch:
        while not was_in_flight or rounds < ROUNDS:
            assert rounds < MAX_ROUNDS
            executors = cluster.executors(0)
            change_everything(database, rounds)
            rounds += 1
            if rounds > 1 and not was_in_flight:
                wait_until(lambda: bool(listener.hidden()), 60, "executors write parts")
                for process in executors:  # first stopped, so that nothing goes on while we look
                    with contextlib.suppress(psutil.Error):
                        process.suspend()
                end = int(database.query("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")[0][0])
                was_in_flight = listener.delivered_lsn() < end
                if was_in_flight:
                    assert len(executors) >= 2  # the JVM and Python processes of its tasks
                    cluster.kill_worker(0)
                else:
                    for process in executors:
                        with contextlib.suppress(psutil.Error):
                            process.resume()
            listener.wait_delivered(120)
    assert watch.violations == []
    assert watch.moves > 0
    wait_until(lambda: not listener.hidden(), 30, "what the ack names is shown")  # which comes a moment after the ack
    events = listener.read()
    per_round = KEYS * (2 + 2 * (ROWS // KEYS // 2)) + 1
    assert len(events) == rounds * per_round
    check(events, database)
    assert any(path.name.endswith("-00001.jsonl") for path in listener.output.glob("*.jsonl"))
    assert listener.stop() == 0
    assert listener.hidden() == []
