"""What `pgcdc verify --repair` asks a real capture for: keys that differ come again, as rows or as deletes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
from databases import Database
from mirroring import NAME, Mirror, mirror_of
from redising import redis_mirror_of

from pgcdc import transform
from pgcdc.transform.specs import Chain

TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, v text, secret text, d int)",
    "INSERT INTO t SELECT g, 'v' || g, 's', g FROM generate_series(1, 9) g",
)


def repair(mirror: Mirror, *keys: str) -> dict[str, Any]:
    """As `verify --repair` asks for it. How it ended."""
    path = mirror.state.snapshot_keys / "repair-1.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps([key]) + "\n" for key in keys))
    request = {"id": "repair-1", "table": "t", "kind": "repair", "keys_file": str(path), "adapters": [NAME]}
    mirror.request({"do": "snapshot", "action": "add", **request})

    def found() -> dict[str, Any]:
        return next((one for one in mirror.snapshots() if one["id"] == "repair-1"), {})

    mirror.settle_until(lambda: found().get("status") in ("done", "failed"))
    if found()["status"] == "done":
        mirror.settle()
    return found()


def test_rows_and_deletes_come_through_renames_masks_and_dropped_columns(database: Database, tmp_path: Path) -> None:
    steps: Sequence[Any] = (
        transform.rename_fields({"id": "pk"}),
        transform.mask("secret", mode="redact"),
        transform.drop_columns("d"),
    )
    with mirror_of(database, tmp_path, chain=replace(Chain(tuple(steps)).made(), form="tables")) as mirror:
        mirror.run(*TABLE)
        mirror.start()
        mirror.settle()
        with psycopg.connect(mirror.target, autocommit=True) as conn:
            rows = conn.execute("SELECT * FROM t ORDER BY pk").fetchall()
            assert rows[1] == (2, "v2", "***REDACTED***")
            conn.execute("DELETE FROM t WHERE pk = 1")
            conn.execute("UPDATE t SET v = 'wrong', secret = 'wrong' WHERE pk = 2")
            conn.execute("INSERT INTO t VALUES (500, 'a lost delete')")
            assert repair(mirror, "1", "2", "500")["status"] == "done"
            assert conn.execute("SELECT * FROM t ORDER BY pk").fetchall() == rows
        assert mirror.dead_letters() == []


def test_a_key_that_the_source_cannot_have_is_deleted_and_the_others_are_repaired(
    database: Database, tmp_path: Path
) -> None:
    with redis_mirror_of(database, tmp_path) as mirror:
        mirror.run(*TABLE)
        mirror.start()
        mirror.settle(also=mirror.is_equal)
        client = mirror.server.client
        client.set("t:what", client.get("t:5") or "")
        client.set("t:500", client.get("t:5") or "")
        client.delete("t:1")
        client.set("t:2", "{}")
        ended = repair(mirror, "1", "2", "500", "what")
        assert (ended["status"], ended.get("error") or "") == ("done", "")
        assert mirror.is_equal() and client.get("t:what") is None
        assert mirror.dead_letters() == []
