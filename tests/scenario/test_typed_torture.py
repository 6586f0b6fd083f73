"""A typed table that is altered while parts of its pipeline are killed: every row once, with the columns of its time."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest
from killing import Killer
from listening import ConfirmWatch, Listener

from pgcdc.playground.postgres import EmbeddedPostgres

ROUNDS = int(os.environ.get("PGCDC_TORTURE_ROUNDS", "5"))
TARGETS = ("capture", "worker", "postgres", "jvm", "driver")


class Altering:
    """Inserts, updates, deletes, changes keys, and every now and then adds or drops a column."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.commits = 0
        self.alters = 0
        self._columns: list[str] = []
        self._next_id = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            columns = list(self._columns)
            try:
                with psycopg.connect(self._url) as conn:
                    while not self._stop.wait(0.005):
                        columns = list(self._columns)
                        with conn.transaction():
                            for number in range(self._random.randint(1, 6)):
                                if number == 1 and self.commits % 200 < 5 and self.commits // 200 >= self.alters:
                                    self._alter(conn)
                                self._step(conn)
                        self.commits += 1
            except psycopg.Error:  # the server was killed: what was not committed is not there
                with_server = self._read_columns()
                self._columns = columns if with_server is None else with_server

    def _read_columns(self) -> list[str] | None:
        try:
            with psycopg.connect(self._url) as conn:
                rows = conn.execute(
                    "SELECT attname FROM pg_attribute WHERE attrelid = 't'::regclass AND attnum > 2 AND NOT attisdropped"
                )
                return [name for (name,) in rows]
        except psycopg.Error:
            return None

    def _alter(self, conn: psycopg.Connection[Any]) -> None:
        """In the middle of a transaction, about every second: each one starts the query anew."""
        self.alters += 1
        if len(self._columns) > 2 and self._random.random() < 0.5:
            conn.execute(f"ALTER TABLE t DROP {self._columns.pop(self._random.randrange(len(self._columns)))}".encode())
            return
        name = f"c{self.alters}_{self._random.randrange(1 << 20)}"
        kind = self._random.choice(["int", "numeric(9,2)", "text[]"])
        conn.execute(f"ALTER TABLE t ADD {name} {kind}".encode())
        self._columns.append(name)

    def _step(self, conn: psycopg.Connection[Any]) -> None:
        choice = self._random.random()
        if choice < 0.6:
            self._next_id += 1
            conn.execute("INSERT INTO t (id, v) VALUES (%s, %s)", [self._next_id, self._random.randrange(1000)])
        elif choice < 0.85:
            conn.execute("UPDATE t SET v = v + 1 WHERE id = %s", [self._random.randint(1, self._next_id + 1)])
        elif choice < 0.92:
            moved = "UPDATE t SET id = -id WHERE id = %s AND NOT EXISTS (SELECT FROM t WHERE id = %s)"
            one = self._random.randint(1, self._next_id + 1)
            conn.execute(moved, [one, -one])
        else:
            conn.execute("DELETE FROM t WHERE id = %s", [self._random.randint(1, self._next_id + 1)])


def fold(lines: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The table that the rows describe."""
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        own = {name: value for name, value in line.items() if not name.startswith("_")}
        before = line["_before"]
        if line["_op"] == "INSERT":
            assert own["id"] not in found, line
            found[own["id"]] = own
        elif line["_op"] == "UPDATE":
            old = found.pop(before["id"] if before else own["id"])
            assert old["v"] + (0 if before else 1) == own["v"], "a change is missing, or there twice"
            found[own["id"]] = own
        else:
            del found[own["id"]]
    return found


def run(folder: Path, targets: list[str], seed: int) -> None:
    print(f"seed {seed}, targets {targets}")
    with EmbeddedPostgres.temporary(settings={"synchronous_commit": "on"}) as server:
        with psycopg.connect(server.url(), autocommit=True) as conn:
            conn.execute("CREATE TABLE t (id int PRIMARY KEY, v int)")
        one = Listener(server.url(), folder, "--table", "t")
        try:
            one.start()
            traffic = Altering(server.url(), seed)
            traffic.start()
            with ConfirmWatch(one) as watch:
                killer = Killer(one, server, traffic, seed)
                for target in targets:
                    killer.round(target)
                traffic.stop()
                one.wait_delivered(180)
                assert one.stop() == 0, one.said()
            lines = one.events()
            places = [(line["_lsn"], line["_ordinal"]) for line in lines]
            assert places == sorted(set(places))
            assert traffic.alters >= len(targets)
            with psycopg.connect(server.url()) as conn:
                cursor = conn.execute("SELECT * FROM t")
                names = [column.name for column in cursor.description or ()]
                source = {row[0]: dict(zip(names, row, strict=True)) for row in cursor}
            folded = {key: {name: row.get(name) for name in names} for key, row in fold(lines).items()}
            assert folded == source and source
            assert watch.violations == [] and watch.moves > 0
        finally:
            one.kill_all()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_kills_while_the_table_is_altered_lose_and_repeat_nothing(tmp_path: Path) -> None:
    seed = int(os.environ.get("PGCDC_SEED", "0")) or random.randrange(1 << 30)
    run(tmp_path, random.Random(seed).choices(TARGETS, k=ROUNDS), seed)
