"""`pgcdc verify` beside traffic, of files, folders and Redis, and repairs."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from targets.redis import RedisServer
from verifying import ITEMS, ROWS, adapter, mirrored

from pgcdc.core.state import StateDir
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.run.verify import comparing, repair

# --- beside traffic


@pytest.mark.parametrize("kind", ["pg_table", "file"])
def test_no_false_alarm_beside_200_commits_a_second(
    postgres: EmbeddedPostgres, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "RANGE_ROWS", 200)
    file = adapter("file", path=str(tmp_path / "events.jsonl"))
    keyless = ("CREATE TABLE log (a int)", "ALTER TABLE log REPLICA IDENTITY FULL")
    with mirrored(postgres, tmp_path, ITEMS, ROWS, *keyless, specs=[file]) as (flow, mirror):
        mirror.execute("DELETE FROM items WHERE id = 990")
        with traffic(flow.url) as commits:
            while commits[0] < 600:
                report = flow.verify(adapters=("mirror" if kind == "pg_table" else "file",))
                wrong = {one.table: one.keys for one in report.tables if one.wrong}
                assert wrong == ({"items": {"missing": [["990"]]}} if kind == "pg_table" else {})
                assert sum(one.unsettled for one in report.tables) == 0
        assert flow.check()["file/items"].outcome == "equal"


@contextmanager
def traffic(url: str) -> Iterator[list[int]]:
    """Every kind of change, of keys that come back and keys that do not, about 200 commits a second."""
    commits, ended = [0], threading.Event()

    def write() -> None:
        chance = random.Random(1)
        with psycopg.connect(url, autocommit=True) as conn:
            while not ended.is_set():
                key = chance.randint(1, 980)
                conn.execute("UPDATE items SET price = price + 1, at = now() WHERE id = %s", (key,))
                conn.execute("DELETE FROM items WHERE id = %s", (key + 1,))
                conn.execute("INSERT INTO items VALUES (%s, 'again') ON CONFLICT DO NOTHING", (key + 1,))
                conn.execute("INSERT INTO log VALUES (%s)", (key,))
                conn.execute("DELETE FROM log WHERE a < %s", (key // 2,))
                commits[0] += 5
                ended.wait(0.02)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield commits
    finally:
        ended.set()
        thread.join()


# --- files, folders, Redis


@pytest.mark.parametrize("path", ["events.jsonl", "parts/"])
def test_differences_in_files_and_folders_are_found(postgres: EmbeddedPostgres, tmp_path: Path, path: str) -> None:
    (tmp_path / "parts").mkdir()
    with mirrored(postgres, tmp_path, specs=[adapter("file", path=str(tmp_path) + "/" + path)]) as (flow, _):
        flow.deliver(ITEMS, ROWS, "UPDATE items SET name = 'x' WHERE id < 10", "DELETE FROM items WHERE id > 990")
        assert flow.check()["file/items"].outcome == "equal"
        written = next(iter([tmp_path / path] if path == "events.jsonl" else (tmp_path / path).glob("*.jsonl")))
        text = written.read_text()
        written.write_text(text.replace('"name":"item 77"', '"name":"item 76"').replace('"id":"88"', '"id":"89"', 1))
        one = flow.check(adapters=("file",))["file/items"]
        assert (one.keys["different"], one.keys["missing"]) == ([["77"]], [["88"]])
        written.write_text(text[:-1])
        one = flow.check(adapters=("file",))["file/items"]
        assert one.outcome == "not compared" and "bytes" in one.reason


def test_differences_in_redis_are_found(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    server = RedisServer(tmp_path / "server")
    try:
        redis = adapter("redis", url=server.url, mode="sync", key_prefix="a:")
        with mirrored(postgres, tmp_path, ITEMS, ROWS, specs=[redis]) as (flow, _):
            assert flow.check()["redis/items"].outcome == "equal"
            client = server.client
            client.delete("a:items:5")
            client.set("a:items:6", client.get("a:items:7"))
            client.set("a:items:8", "no row")
            client.set("a:items:what", client.get("a:items:9"))
            one = flow.check(adapters=("redis",))["redis/items"]
            assert one.keys == {"missing": [["5"]], "different": [["6"], ["8"]], "extra": [["what"]]}
    finally:
        server.kill()


# --- repair


def test_repair_asks_the_capture_for_the_keys_that_differ_and_looks_again(
    postgres: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyless = ("CREATE TABLE log (a int)", "ALTER TABLE log REPLICA IDENTITY FULL", "INSERT INTO log VALUES (1)")
    pairs = 'CREATE TABLE "Pair" (b text, a int, n int, PRIMARY KEY (a, b))'
    rows = """INSERT INTO "Pair" SELECT 'b"' || n, n, n FROM generate_series(1, 9) n"""
    with mirrored(postgres, tmp_path, ITEMS, ROWS, *keyless, pairs, rows) as (flow, mirror):
        mirror.execute("DELETE FROM items WHERE id IN (1, 2, 3)")
        mirror.execute("INSERT INTO items (id) VALUES (-1)")
        mirror.execute("TRUNCATE log")
        mirror.execute('UPDATE "Pair" SET n = 0 WHERE a = 4')
        asked = list[dict[str, Any]]()

        def add(state: StateDir, request: dict[str, Any]) -> None:
            asked.append(request)
            if request["table"] == "items":  # all but one
                mirror.execute("DELETE FROM items WHERE id = -1")
                flow.deliver("UPDATE items SET price = 0 WHERE id IN (1, 2)")  # which brings a missing row

        def listed(state: StateDir) -> list[dict[str, Any]]:
            return [{"id": one["id"], "status": "done", "error": ""} for one in asked]

        monkeypatch.setattr(repair, "ask_snapshots", add)
        monkeypatch.setattr(repair, "list_snapshots", listed)
        found = flow.check(repair=True)
        items = found["mirror/items"]
        assert (items.repaired, items.keys, items.wrong) == (3, {"missing": [["3"]]}, 1)
        assert found["mirror/log"].notes[-1].endswith("pgcdc resync --table log --adapter mirror")
        assert found['mirror/"Pair"'].different == 1
        files = {one["table"]: Path(one.pop("keys_file")) for one in asked}
        assert [(one["action"], one["kind"], one["adapters"]) for one in asked] == [("add", "repair", ["mirror"])] * 2
        assert all(path.parent == flow.state.snapshot_keys for path in files.values())
        keys = {name: sorted(map(json.loads, path.read_text().splitlines())) for name, path in files.items()}
        assert keys == {"items": [["-1"], ["1"], ["2"], ["3"]], '"Pair"': [["4", 'b"4']]}  # in the order of the key
