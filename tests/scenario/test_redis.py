"""The adapter redis behind a real stream: what a client of our own finds at the server is what SQL finds in the source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from applying import Source
from redising import rows_of_server, rows_of_sql, runner, source_and_server
from targets.letters import Letters
from targets.redis import RedisServer

from pgcdc.core.errors import SinkError
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.sink.letters.delivery import as_batch

Pair = tuple[Source, RedisServer]
BIG = "string_agg(md5(random()::text), '')"


@pytest.fixture
def pair(postgres: EmbeddedPostgres, tmp_path: Path) -> Iterator[Pair]:
    with source_and_server(postgres, tmp_path) as made:
        yield made


def big(chars: int = 4000) -> str:
    return f"(SELECT {BIG} FROM generate_series(1, {chars // 32}))"


def test_rows_are_kept_with_unchanged_toast_changed_keys_and_composite_keys(pair: Pair) -> None:
    source, server = pair
    sink = runner(source, server, key_prefix="shop:")
    table = "CREATE TABLE lines (a int, b text, n numeric, note text, PRIMARY KEY (b, a))"
    sink.write(source.read(table, "ALTER TABLE lines ALTER note SET STORAGE EXTERNAL"))
    sink.write(
        source.read(
            f"INSERT INTO lines SELECT n, 'x:' || n || '%', n, {big()} FROM generate_series(1, 50) n",
            "INSERT INTO lines VALUES (99, '', NULL, '\"ä🐘\\ / '), (98, '*', 1, NULL)",
        )
    )
    batch = source.read(
        "UPDATE lines SET n = n + 1 WHERE a <= 30",  # long values do not come
        "UPDATE lines SET a = a + 1000, b = b || '.' WHERE a <= 10",  # nor do they where the key changes
        "DELETE FROM lines WHERE a BETWEEN 20 AND 25",
        "BEGIN; UPDATE lines SET a = 1 WHERE a = 40; UPDATE lines SET a = 40 WHERE a = 1; COMMIT",
    )
    assert any(marks is not None for run in batch.tables() for marks in run.unchanged), "no value was left out"
    sink.write(batch)
    sink.close()
    expected = rows_of_sql(source, "lines", ["b", "a"], "shop:")
    assert len(expected) == 46
    assert rows_of_server(server, "shop:lines:*") == expected


def test_toast_that_the_server_does_not_have_is_named_and_not_null(pair: Pair) -> None:
    source, server = pair
    sink = runner(source, server)
    sink.write(
        source.read(
            "CREATE TABLE t (id int PRIMARY KEY, n int, note text)", "ALTER TABLE t ALTER note SET STORAGE EXTERNAL"
        )
    )
    sink.write(source.read(f"INSERT INTO t VALUES (1, 1, {big()})"))
    server.client.delete("t:1")
    sink.write(source.read("UPDATE t SET n = 2"))
    assert rows_of_server(server, "t:*") == {"t:1": {"id": "1", "n": "2", "_unchanged_toast_columns": ["note"]}}
    sink.write(source.read("UPDATE t SET note = 'short'"))
    assert rows_of_server(server, "t:*") == rows_of_sql(source, "t", ["id"])


def test_truncate_removes_the_keys_of_its_table_alone(pair: Pair) -> None:
    source, server = pair
    sink = runner(source, server)
    names = ["t", "tt", '"t[1]*"', "s.t", '"t:1"', '"s.t"']
    sink.write(source.read("CREATE SCHEMA s", *(f"CREATE TABLE {name} (id int PRIMARY KEY)" for name in names)))
    sink.write(source.read(*(f"INSERT INTO {name} SELECT generate_series(1, 3)" for name in names)))
    everything = set(server.client.scan_iter("*t*", _type="string"))
    assert everything == {f"{one}:{n}" for one in ("t", "tt", "t[1]*", "s.t", "t%3A1", "s%2Et") for n in (1, 2, 3)}
    for name, key in (("t", "t"), ('"t[1]*"', "t[1]*"), ("s.t", "s.t")):
        sink.write(source.read(f"INSERT INTO {name} VALUES (4)", f"TRUNCATE {name}", f"INSERT INTO {name} VALUES (5)"))
        everything = {one for one in everything if not one.startswith(f"{key}:")} | {f"{key}:5"}
        assert set(server.client.scan_iter("*t*", _type="string")) == everything
    assert len(everything) == 12


def test_invalidation_deletes_the_keys_of_changed_rows_and_no_others(pair: Pair) -> None:
    source, server = pair
    client = server.client
    sink = runner(source, server, mode="invalidate")
    sink.write(
        source.read(
            "CREATE TABLE t (id int PRIMARY KEY, n int)", "INSERT INTO t SELECT n, 0 FROM generate_series(1, 9) n"
        )
    )

    def changed(*statements: str) -> set[str]:
        for number in range(1, 20):
            client.hset(f"t:{number}", "cached", "1")  # of any type: it is a cache
        sink.write(source.read(*statements))
        return {f"t:{number}" for number in range(1, 20) if not client.exists(f"t:{number}")}

    assert changed("UPDATE t SET n = 1 WHERE id = 1", "DELETE FROM t WHERE id = 2") == {"t:1", "t:2"}
    assert changed("INSERT INTO t VALUES (12, 0)", "UPDATE t SET id = 13 WHERE id = 3") == {"t:12", "t:3", "t:13"}
    assert changed("TRUNCATE t") == {f"t:{number}" for number in range(1, 20)}
    client.flushdb()  # a cache that has lost everything has nothing old
    sink.close()
    sink = runner(source, server, mode="invalidate")
    assert changed("INSERT INTO t VALUES (1, 0)") == {"t:1"}


def test_id_column_makes_the_key_if_every_change_brings_it(pair: Pair) -> None:
    source, server = pair
    sink = runner(source, server, id_column="email")
    sink.write(source.read("CREATE TABLE u (id int PRIMARY KEY, email text)"))
    with pytest.raises(SinkError, match="replica identity lacks email"):
        sink.write(source.read("INSERT INTO u VALUES (1, 'a@b')"))
    assert rows_of_server(server, "u:*") == {}


def test_table_without_a_key_is_refused_with_advice(pair: Pair) -> None:
    source, server = pair
    sink = runner(source, server)
    with pytest.raises(SinkError, match="rows of table log have no key") as caught:
        sink.write(source.read("CREATE TABLE log (line text)", "INSERT INTO log VALUES ('a')"))
    assert "id_column" in caught.value.advice
    assert rows_of_server(server, "log*") == {}


def test_dead_letter_never_replaces_a_newer_row(pair: Pair) -> None:
    source, server = pair
    client, letters = server.client, Letters()
    sink = runner(source, server, letters)
    sink.write(source.read("CREATE TABLE t (id int PRIMARY KEY, n int)", "INSERT INTO t VALUES (0, 0)"))
    for number in (1, 2, 3, 4):
        client.rpush(f"t:{number}", "not yours")
    sink.write(source.read("INSERT INTO t VALUES (1, 1), (2, 1), (3, 1), (5, 1)", "UPDATE t SET id = 4 WHERE id = 5"))
    assert sorted(one.error_kind for one in letters.kept.values()) == ["wrong_type"] * 4
    client.delete("t:1", "t:2", "t:3", "t:4")
    sink.write(source.read("UPDATE t SET n = 2 WHERE id = 1", "DELETE FROM t WHERE id = 3"))
    waiting = sorted(letters.kept.values(), key=lambda one: one.position)
    left_out = sink.redeliver(as_batch(waiting))
    assert set(left_out) == {waiting[0].position, waiting[2].position}  # 1 has a newer row, 3 is gone
    assert rows_of_server(server, "t:*") == rows_of_sql(source, "t", ["id"])
    assert set(sink.redeliver(as_batch(waiting))) == set(left_out)  # asked once more: the same outcome
    assert rows_of_server(server, "t:*") == rows_of_sql(source, "t", ["id"])
