"""A mirror as users run it, with Spark: DDL that needs a reload, commands that replace and repair copies, and adapters that
do not hear of it."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from applying import two_databases
from listening import wait_until
from mirror_listening import ListeningMirror
from mirroring import compare

from pgcdc.playground.postgres import EmbeddedPostgres

TABLES = ["t", "other"]


@pytest.mark.timeout(300)
def test_a_mirror_stays_equal_and_is_repaired_while_others_go_on(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    with (
        two_databases(postgres) as (source, target),
        psycopg.connect(source, autocommit=True) as conn,
        psycopg.connect(target, autocommit=True) as copy,
    ):
        conn.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE other (id int PRIMARY KEY, v text)")
        conn.execute("INSERT INTO t SELECT n, 'v' || n FROM generate_series(1, 3000) n")
        file = tmp_path / "events.jsonl"
        flags = ("--all-tables", "--snapshot-mode", "initial", "--adapter", "file", "--file-path", str(file))
        one = ListeningMirror(source, target, tmp_path / "run", *flags)
        try:
            one.start()
            wait_until(lambda: not compare(source, target, TABLES), 60, "the copy is there")
            lines = len(file.read_text().splitlines())

            conn.execute("ALTER TABLE t ADD COLUMN x double precision DEFAULT random()")
            conn.execute("UPDATE t SET v = 'new' WHERE id = 5; INSERT INTO other VALUES (1, 'o')")
            done = one.command("sentinel", "--wait", "--timeout", "60s")  # which waits for the reload
            assert done.returncode == 0, done.stderr
            assert compare(source, target, TABLES) == []
            assert "table t: its rows were rewritten by ALTER TABLE" in one.said()
            done = one.command("sentinel", "--wait")
            assert done.returncode == 0 and "all targets have everything" in done.stdout, done.stderr
            assert len(file.read_text().splitlines()) == lines + 2  # of the reload nobody else hears

            copy.execute("DELETE FROM t WHERE id % 3 = 0")
            done = one.command("resync", "--table", "t", "--adapter", "pg_table", "--yes")
            assert done.returncode == 0, done.stderr
            wait_until(lambda: not compare(source, target, TABLES), 60, "the copy was replaced")

            copy.execute(
                "DELETE FROM t WHERE id = 7; UPDATE t SET v = 'bad' WHERE id = 8; INSERT INTO t VALUES (0, 'x')"
            )
            done = one.verify()
            assert done.returncode == 1, done.stdout + done.stderr
            done = one.verify("--repair")
            assert done.returncode == 0, done.stdout + done.stderr
            assert compare(source, target, TABLES) == []
            for words, text in (
                (("resync", "--table", "nope", "--adapter", "pg_table", "--yes"), "table nope is not captured"),
                (("resync", "--table", "t", "--adapter", "file", "--yes"), "keeps no copies of tables"),
                (("resync", "--table", "t", "--adapter", "other", "--yes"), "adapter 'other' does not exist"),
                (("resync", "--adapter", "pg_table", "--yes"), "Add --table NAME"),
            ):
                done = one.command(*words)
                assert done.returncode == 2 and text in done.stderr, done.stderr
            assert one.stop() == 0, one.said()

            copy.execute("DROP TABLE t")
            done = one.command("resync", "--table", "t", "--adapter", "pg_table", "--yes")
            assert done.returncode == 0 and "Start pgcdc listen" in done.stderr, done.stderr
            one.start()
            wait_until(lambda: not compare(source, target, TABLES), 60, "the copy was made again")
            assert one.stop() == 0, one.said()

            conn.execute("ALTER TABLE t ALTER COLUMN v TYPE int USING id * 2; INSERT INTO t VALUES (-1, 5)")
            one.start("--once", wait=False)
            assert one.process is not None and one.process.wait(120) == 0, one.said()
            assert compare(source, target, TABLES) == []
        finally:
            one.kill_all()
