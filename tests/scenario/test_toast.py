"""Values that PostgreSQL does not send: resolved, or marked, and never wrong. Real TOAST values, no Spark."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from databases import Database, drop_database
from preparing import Wanted, prepare
from streams import SETTINGS, Change
from toasting import TABLE, Rig, text

from pgcdc.core.errors import ConfigError, ConversionError, SourceError, StateError
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.source.postgres.options import ToastOptions
from pgcdc.source.postgres.toast import resolver as toast_module
from pgcdc.spool.segment import CaptureBatch

SLOW = pytest.mark.slow


@pytest.fixture
def docs(database: Database) -> Database:
    database.execute(TABLE)
    return database


@pytest.fixture
def rig(docs: Database, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(docs, tmp_path)
    yield made
    made.close()


def insert(*ids: int) -> str:
    rows = ", ".join(f"({one}, 0, '{text(one)}', '{text(one + 1000)}')" for one in ids)
    return f"INSERT INTO docs VALUES {rows}"


def body_of(change: Change) -> bytes | None:
    return change.row["body"]


def marked(change: Change) -> list[str]:
    return [change.columns[number] for number in change.unchanged or []]


# --- the life of an entry


def test_an_update_that_leaves_values_alone_gets_them_from_the_insert(rig: Rig) -> None:
    rig.read(insert(1, 2))
    one, two = rig.read("UPDATE docs SET n = n + 1")
    assert body_of(one) == text(1).encode() and one.row["note"] == text(1001).encode()
    assert body_of(two) == text(2).encode()
    assert one.unchanged is None and two.unchanged is None
    assert rig.counted == (4, 0, 2)


def test_what_was_never_seen_is_marked_and_counted(docs: Database, tmp_path: Path) -> None:
    docs.execute(insert(1))
    rig = Rig(docs, tmp_path)
    (change,) = rig.read("UPDATE docs SET n = 1")
    assert marked(change) == ["body", "note"] and body_of(change) is None
    assert rig.counted == (0, 2, 0)
    (change,) = rig.read(f"UPDATE docs SET body = '{text(7)}'")
    assert marked(change) == ["note"], "a column of which nothing is known stays unknown"
    (change,) = rig.read("UPDATE docs SET n = 2")
    assert marked(change) == ["note"] and body_of(change) == text(7).encode()
    assert rig.counted == (1, 4, 1)
    rig.close()


def test_an_update_of_one_value_replaces_it_and_keeps_the_other(rig: Rig) -> None:
    rig.read(insert(1), f"UPDATE docs SET body = '{text(9)}'")
    (change,) = rig.read("UPDATE docs SET n = 1")
    assert (body_of(change), change.row["note"]) == (text(9).encode(), text(1001).encode())


@pytest.mark.parametrize("value", ["NULL", pytest.param("'short'", marks=SLOW)])
def test_a_value_that_became_short_or_null_is_forgotten(rig: Rig, value: str) -> None:
    rig.read(insert(1), f"UPDATE docs SET body = {value}")
    (change,) = rig.read("UPDATE docs SET n = 1")
    assert body_of(change) == (None if value == "NULL" else b"short") and change.unchanged is None
    rig.read("UPDATE docs SET note = 'short'")
    assert rig.counted[2] == 0, "nothing is left to be remembered"


def test_a_changed_key_takes_its_values_along(rig: Rig) -> None:
    rig.read(insert(1, 2), "DELETE FROM docs WHERE id = 2")
    assert rig.counted[2] == 1
    (change,) = rig.read("UPDATE docs SET id = 2 WHERE id = 1")
    assert body_of(change) == text(1).encode() and change.unchanged is None
    (change,) = rig.read("UPDATE docs SET n = 1")
    assert body_of(change) == text(1).encode() and rig.counted[2] == 1
    (_, change) = rig.read("INSERT INTO docs (id) VALUES (1)", "UPDATE docs SET n = 2 WHERE id = 1")
    assert body_of(change) is None and change.unchanged is None


def test_a_deleted_row_is_forgotten(rig: Rig) -> None:
    rig.read(insert(1), "DELETE FROM docs")
    assert rig.counted[2] == 0


def test_truncate_forgets_the_table_and_no_other(rig: Rig) -> None:
    rig.read(
        "CREATE TABLE others (LIKE docs INCLUDING ALL)",
        "ALTER TABLE others REPLICA IDENTITY DEFAULT",
    )
    rig.execute(f"ALTER PUBLICATION {rig.publications[0]} ADD TABLE others")
    rig.read(insert(1), insert(1).replace("docs", "others"))
    assert rig.counted[2] == 2
    rig.read("TRUNCATE docs")
    assert rig.counted[2] == 1
    (change,) = rig.read("UPDATE others SET n = 1")
    assert body_of(change) == text(1).encode()
    rig.read(insert(1))
    (change,) = rig.read("UPDATE docs SET n = 1")
    assert body_of(change) == text(1).encode()


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE docs ADD more int",
        "ALTER TABLE docs RENAME TO papers",
        pytest.param("ALTER TABLE docs DROP note", marks=SLOW),
        pytest.param("ALTER TABLE docs RENAME note TO remark", marks=SLOW),
        pytest.param("ALTER TABLE docs ALTER note TYPE varchar(9000)", marks=SLOW),
    ],
)
def test_another_shape_of_the_table_begins_anew(rig: Rig, statement: str) -> None:
    rig.read(insert(1))
    rig.execute(statement)
    table = "papers" if "papers" in statement else "docs"
    (change,) = rig.read(f"UPDATE {table} SET n = 1")
    assert "body" in marked(change) and rig.counted[2] == 0
    (_, change) = rig.read(f"UPDATE {table} SET body = '{text(5)}'", f"UPDATE {table} SET n = 2")
    assert body_of(change) == text(5).encode()


def test_a_rewrite_that_keeps_the_shape_does_not_leave_old_values_behind(rig: Rig) -> None:
    """The stream does not tell what ALTER COLUMN ... USING has made of the values: only that something was done."""
    rig.read(insert(1))
    rig.execute("ALTER TABLE docs ALTER body TYPE text USING reverse(body)")
    (change,) = rig.read("UPDATE docs SET n = 1")
    assert "body" in marked(change), "neither the old value nor a wrong one"


def test_a_rewrite_while_nobody_reads_does_not_leave_old_values_behind(rig: Rig) -> None:
    lsn = rig.read(insert(1))[-1].lsn
    rig.close()
    rig.execute("ALTER TABLE docs ALTER body TYPE text USING reverse(body)")
    rig.open(lsn)
    (change,) = rig.read("UPDATE docs SET n = 1")
    assert "body" in marked(change)


def test_a_rewrite_within_a_backlog_does_not_leave_old_values_behind(docs: Database, tmp_path: Path) -> None:
    rig = Rig(docs, tmp_path)
    rig.close()
    rig.execute(insert(1), "UPDATE docs SET n = 1", "ALTER TABLE docs ALTER body TYPE text USING reverse(body)")
    rig.execute("UPDATE docs SET n = 2", insert(2), "UPDATE docs SET n = 3")
    rig.open(rig.start_lsn)
    rows = {change.row["n"]: change for change in rig.read() if change.row["id"] == b"1"}
    for n in (b"2", b"3"):
        assert "body" in marked(rows[n])
    rig.close()


def test_a_rewrite_is_noticed_by_who_was_behind_it_at_the_start(docs: Database, tmp_path: Path) -> None:
    """The catalog has looked the same ever since we looked: the rewrite was before, but the entry is older still."""
    rig = Rig(docs, tmp_path)
    rig.close()
    rig.execute(insert(1), "ALTER TABLE docs ALTER body TYPE text USING reverse(body)", "UPDATE docs SET n = 1")
    rig.open(rig.start_lsn)
    while (batch := rig.capture.receive_batch(limit=1)) is None or not batch.rows:
        pass
    assert sum(piece.rows for piece in rig.step.resolve(batch, rig.sql)) == 1
    assert rig.counted[2] == 1
    rig.restart(batch.last_lsn)
    (change,) = rig.read()
    assert "body" in marked(change)
    rig.close()


def test_a_table_that_was_not_published_for_a_while_begins_anew(rig: Rig) -> None:
    rig.read(insert(1))
    rig.execute(f"ALTER PUBLICATION {rig.publications[0]} DROP TABLE docs")
    rig.execute(f"UPDATE docs SET body = '{text(2)}'")
    rig.execute(f"ALTER PUBLICATION {rig.publications[0]} ADD TABLE docs")
    (change,) = rig.read("UPDATE docs SET n = 1")
    assert "body" in marked(change)


def test_a_vacuum_forgets_nothing(rig: Rig) -> None:
    rig.read(insert(1))
    rig.execute("VACUUM ANALYZE docs")
    (change,) = rig.read("UPDATE docs SET n = 1")
    assert body_of(change) == text(1).encode()


def test_a_row_that_comes_into_a_filter_is_marked_and_not_taken_from_before(docs: Database, tmp_path: Path) -> None:
    docs.execute("ALTER TABLE docs ADD UNIQUE (id, n); ALTER TABLE docs REPLICA IDENTITY USING INDEX docs_id_n_key")
    rig = Rig(docs, tmp_path, all_tables=False, tables=("docs",), row_filters=("docs=n < 10",))
    rig.read(insert(1))
    rig.read("UPDATE docs SET n = 20")
    rig.execute(f"UPDATE docs SET body = '{text(2)}'")
    (change,) = rig.read("UPDATE docs SET n = 5")
    assert change.op == "I" and marked(change) == ["body", "note"]
    rig.close()


def test_a_key_that_is_itself_out_of_line_is_resolved(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE docs (id text PRIMARY KEY, n int, body text)")
    database.execute("ALTER TABLE docs ALTER id SET STORAGE EXTERNAL, ALTER body SET STORAGE EXTERNAL")
    database.execute("ALTER TABLE docs SET (toast_tuple_target = 128)")
    rig = Rig(database, tmp_path)
    key = text(1, 2500)
    rig.read(f"INSERT INTO docs VALUES ('{key}', 0, '{text(2)}')")
    (change,) = rig.read("UPDATE docs SET n = 1")
    assert (change.row["id"], body_of(change), change.unchanged) == (key.encode(), text(2).encode(), None)
    rig.close()


def test_several_key_columns_and_types_whose_text_is_shorter_than_the_value(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (a int, b text, n int, many int8[], doc jsonb, PRIMARY KEY (a, b))")
    database.execute("ALTER TABLE t ALTER many SET STORAGE EXTERNAL, ALTER doc SET STORAGE EXTERNAL")
    rig = Rig(database, tmp_path)
    rig.read("INSERT INTO t SELECT 1, 'x', 0, array_agg(1), jsonb_agg(1) FROM generate_series(1, 400)")
    before = rig.changes[0]
    assert len(before.row["many"] or b"") < 1000, "four times as long in the table"
    (change,) = rig.read("UPDATE t SET n = 1")
    assert (change.row["many"], change.row["doc"]) == (before.row["many"], before.row["doc"])
    assert change.unchanged is None and rig.counted == (2, 0, 1)
    rig.close()


def test_short_rows_cost_nothing(rig: Rig) -> None:
    rig.read(
        "INSERT INTO docs SELECT k, 0, 'short', repeat('x', 500) FROM generate_series(1, 100) k",
        "UPDATE docs SET n = 1",
    )
    assert rig.counted == (0, 0, 0)


# --- the old tuple


@pytest.mark.parametrize("mode", ["mark", "full", pytest.param("cache", marks=SLOW)])
def test_with_the_whole_old_row_values_are_resolved_in_every_mode(docs: Database, tmp_path: Path, mode: str) -> None:
    docs.execute("ALTER TABLE docs REPLICA IDENTITY FULL")
    docs.execute(insert(1, 2))
    rig = Rig(docs, tmp_path, mode)
    changes = rig.read("UPDATE docs SET n = n + 1", "DELETE FROM docs WHERE id = 2")
    assert [body_of(change) for change in changes] == [text(1).encode(), text(2).encode(), text(2).encode()]
    assert all(change.unchanged is None for change in changes)
    rig.close()


def test_mark_leaves_the_mark(docs: Database, tmp_path: Path) -> None:
    rig = Rig(docs, tmp_path, "mark")
    _, change = rig.read(insert(1), "UPDATE docs SET n = 1")
    assert marked(change) == ["body", "note"]
    assert set(rig.step.status().values()) == {None} and not rig.state.toast.exists()
    rig.close()


def test_full_says_what_is_needed_before_anything_is_created(docs: Database, tmp_path: Path) -> None:
    docs.execute(
        'CREATE TABLE "Other" (id int PRIMARY KEY, body text); CREATE TABLE numbers (id int PRIMARY KEY, n int8)'
    )
    docs.execute("CREATE TABLE keyless (body text); CREATE TABLE plain (id int PRIMARY KEY, body text STORAGE PLAIN)")
    docs.execute("CREATE TABLE parts (id int PRIMARY KEY, body text) PARTITION BY RANGE (id)")
    docs.execute("CREATE TABLE part_1 PARTITION OF parts FOR VALUES FROM (0) TO (10)")
    options = Wanted(
        db=docs.url, slot_name=f"s_{docs.name}", all_tables=True, state_dir=str(tmp_path / "s"), toast="full"
    )
    with pytest.raises(SourceError) as caught:
        prepare(options)
    advice = caught.value.advice
    assert "docs (body, note)" in caught.value.message
    needed = ["docs", "Other", "part_1"]
    for table in needed:
        assert f'ALTER TABLE "public"."{table}" REPLICA IDENTITY FULL;' in advice
    assert advice.count("ALTER TABLE") == len(needed)
    assert docs.query("SELECT count(*) FROM pg_publication") == [(0,)] and not (tmp_path / "s").exists()
    for table in needed:
        docs.execute(f'ALTER TABLE "{table}" REPLICA IDENTITY FULL')
    prepare(options)


def test_full_stops_when_the_old_row_does_not_come_any_more(docs: Database, tmp_path: Path) -> None:
    docs.execute("ALTER TABLE docs REPLICA IDENTITY FULL")
    rig = Rig(docs, tmp_path, "full")
    rig.read(insert(1), "UPDATE docs SET n = 1")
    rig.execute("ALTER TABLE docs REPLICA IDENTITY DEFAULT")
    with pytest.raises(ConversionError, match=r"column body of table docs .* at [0-9A-F]{16}/0{12}1: ") as caught:
        rig.read("UPDATE docs SET n = 2")
    assert 'ALTER TABLE "public"."docs" REPLICA IDENTITY FULL;' in caught.value.advice
    rig.close()


def test_what_would_make_the_cache_stale_is_refused(docs: Database, tmp_path: Path) -> None:
    options = Wanted(
        db=docs.url, tables=("docs",), state_dir=str(tmp_path / "s"), toast="cache",
        origin="none",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="origin"):
        prepare(options)
    docs.execute("CREATE PUBLICATION only_updates FOR TABLE docs WITH (publish = 'update')")
    options = Wanted(
        db=docs.url, slot_name=f"s_{docs.name}", publication="only_updates", state_dir=str(tmp_path / "s"),
        toast="cache",
    )  # fmt: skip
    with pytest.raises(SourceError, match="only_updates"):
        prepare(options)


# --- state at a position


def history(rig: Rig) -> list[int]:
    """Six transactions; the END of each."""
    rig.read(
        insert(1, 2, 3),
        "UPDATE docs SET n = 1",
        f"UPDATE docs SET body = '{text(50)}' WHERE id = 1",
        "UPDATE docs SET n = 2",
        f"UPDATE docs SET id = 9, note = '{text(60)}' WHERE id = 2",
        "DELETE FROM docs WHERE id = 3",
        "UPDATE docs SET n = 3",
    )
    return sorted({change.lsn for change in rig.changes})


@pytest.mark.parametrize("orderly", [pytest.param(True, marks=SLOW), False], ids=["closed", "killed"])
def test_a_restart_anywhere_gives_the_same_rows_again(docs: Database, tmp_path: Path, orderly: bool) -> None:
    rig = Rig(docs, tmp_path)
    ends = history(rig)
    whole = rig.changes
    assert not any(change.unchanged for change in whole)
    for lsn in [ends[3], ends[-1], ends[0], ends[2], rig.start_lsn, ends[5]]:
        rig.restart(lsn, orderly=orderly)
        rig.read()
        assert rig.changes == [change for change in whole if change.lsn > lsn], f"behind {lsn:X}"
    rig.close()


def test_a_value_is_never_newer_than_the_position(rig: Rig) -> None:
    ends = history(rig)
    rig.restart(ends[0])
    (first, *_) = rig.read()
    assert body_of(first) == text(1).encode(), "not the value that transaction 3 has written"


def test_what_is_confirmed_is_not_gone_back_to(rig: Rig) -> None:
    ends = history(rig)
    rig.confirm(ends[4])
    whole = [change for change in rig.changes if change.lsn > ends[4]]
    rig.restart(ends[4])
    assert rig.read() == whole
    rig.confirm(ends[-1])
    rig.restart(ends[-1])
    assert rig.counted[2] == 2


def test_a_cache_that_does_not_reach_the_position_starts_empty(rig: Rig) -> None:
    rig.read(insert(1))
    rig.close()
    rig.toast = ToastOptions(toast="mark")
    rig.open(rig.changes[-1].lsn)
    lsn = rig.read(f"UPDATE docs SET body = '{text(2)}'")[-1].lsn
    rig.toast = ToastOptions(toast="cache")
    rig.restart(lsn)
    (change,) = rig.read("UPDATE docs SET n = 1")
    assert marked(change) == ["body", "note"], "a miss, not the value of before"


@pytest.mark.parametrize(
    "damage", ["garbage", "cut", "log", *(pytest.param(one, marks=SLOW) for one in ("missing", "other pipeline"))]
)
def test_a_cache_that_is_damaged_starts_empty(rig: Rig, damage: str) -> None:
    lsn = rig.read(insert(1))[-1].lsn
    end = rig.read("UPDATE docs SET n = 1")[-1].lsn
    rig.close()
    table = rig.state.toast / "table"
    if damage == "missing":
        table.unlink()
    elif damage == "garbage":
        table.write_bytes(b"\xff" * table.stat().st_size)
    elif damage == "cut":
        with open(table, "r+b") as file:
            file.truncate(3 * 4096)
    elif damage == "log":
        for path in rig.state.toast.glob("log-*"):
            path.unlink()
    else:
        rig.instance = "another"
    rig.open(lsn if damage == "log" else end)
    if damage == "log":
        assert rig.counted[2] == 0
    (*_, change) = rig.read("UPDATE docs SET n = 2")
    assert marked(change) == ["body", "note"]


def test_a_full_disk_is_an_error_with_advice(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from pgcdc.source.postgres.toast import cache_log as toast_log

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(toast_log, "write_all", full)
    with pytest.raises(StateError, match="No space left"):
        rig.read(insert(1))
    monkeypatch.undo()


# --- bounds


def test_at_its_limit_it_forgets_what_was_written_longest_ago(docs: Database, tmp_path: Path) -> None:
    rig = Rig(docs, tmp_path, limit=3)
    rig.read(insert(1, 2, 3), f"UPDATE docs SET body = '{text(11)}' WHERE id = 1")
    rig.read(insert(4))
    assert rig.counted[2] == 3
    changes = {change.row["id"]: change for change in rig.read("UPDATE docs SET n = 1 WHERE id IN (1, 2, 3)")}
    assert marked(changes[b"2"]) == ["body", "note"], "the oldest one"
    assert body_of(changes[b"1"]) == text(11).encode() and body_of(changes[b"3"]) == text(3).encode()
    rig.close()


def test_eviction_is_the_same_on_replay(docs: Database, tmp_path: Path) -> None:
    rig = Rig(docs, tmp_path, limit=5)
    rig.read(*(insert(one) for one in range(1, 9)))
    rig.read("UPDATE docs SET n = 1 WHERE id % 2 = 0", *(insert(one) for one in range(9, 12)), "UPDATE docs SET n = 2")
    whole = rig.changes
    assert any(change.unchanged for change in whole if change.op == "U")
    for lsn in sorted({change.lsn for change in whole}, reverse=True):
        rig.restart(lsn, orderly=False)
        rig.read()
        assert rig.changes == [change for change in whole if change.lsn > lsn]
    rig.close()


def test_a_batch_that_grows_much_leaves_in_pieces(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toast_module, "PIECE_BYTES", 20_000)
    rig.read(insert(*range(1, 31)))
    pieces: list[CaptureBatch] = []
    rig.execute("BEGIN; UPDATE docs SET n = 1; UPDATE docs SET n = 2 WHERE id = 1; COMMIT", "UPDATE docs SET n = 3")
    while sum(piece.rows for piece in pieces) < 61:
        batch = rig.capture.receive_batch()
        if batch is not None:
            pieces += list(rig.step.resolve(batch, rig.sql))
    assert len(pieces) > 5 and max(piece.part.nbytes for piece in pieces if piece.part) < 60_000
    rows = [row for piece in pieces for row in piece.data.to_pylist()]
    assert [row["ordinal"] for row in rows] == [*range(1, 32), *range(1, 31)]
    ends = [piece.end for piece in pieces]
    assert ends == sorted(set(ends)) and ends[-1].is_end
    for piece in pieces:
        assert piece.rows == sum(piece.transactions.column("rows").to_pylist())
        assert piece.transactions.column("complete").to_pylist()[-1] == piece.end.is_end


@pytest.fixture(scope="module")
def streaming_server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres.temporary(settings=SETTINGS) as server:
        yield server


def test_a_huge_transaction_comes_part_by_part(
    streaming_server: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed, spilled to disk, and with a subtransaction that is rolled back."""
    from pgcdc.source.postgres.wire import assemble

    monkeypatch.setattr(assemble, "SPILL_BYTES", 100_000)
    with psycopg.connect(streaming_server.url(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE huge")
    database = Database("huge", streaming_server.url("huge"), streaming_server)
    try:
        database.execute(TABLE)
        rig = Rig(database, tmp_path)
        rig.read("SELECT 1")
        statements = [
            "BEGIN",
            "INSERT INTO docs SELECT k, 0, repeat(k || ':', 1000), NULL FROM generate_series(1, 300) k",
            "SAVEPOINT a",
            "UPDATE docs SET body = repeat('never', 1000)",
            "ROLLBACK TO a",
            "UPDATE docs SET n = 1",
            "COMMIT",
        ]
        changes = rig.read("; ".join(statements), limit=100)
        assert len(changes) == 600
        for change in changes:
            assert body_of(change) == ((change.row["id"] or b"") + b":") * 1000
        assert rig.counted == (300, 0, 300)
        rig.close()
    finally:
        with psycopg.connect(streaming_server.url(), autocommit=True) as admin:
            drop_database(admin, "huge")


# --- everything at once

Expected = tuple[str, bytes, dict[str, bytes | None]]


class History:
    """Transactions over few keys, so that they meet often; values that move between short and long."""

    def __init__(self, seed: int, *, with_truncate: bool) -> None:
        self._dice = random.Random(seed)
        self._with_truncate = with_truncate
        self._rows: dict[int, dict[str, str | None]] = {}
        self._number = 0
        self.expected: list[Expected] = []
        """Operation, key and values of each change."""

    def transaction(self) -> str:
        return "; ".join(["BEGIN", *(self._statement() for _ in range(self._dice.randint(1, 4))), "COMMIT"])

    def _value(self) -> str | None:
        self._number += 1
        return self._dice.choice([None, f"s{self._number}", text(self._number), text(self._number)])

    def _expect(self, op: str, key: int) -> None:
        values = {name: None if one is None else one.encode() for name, one in self._rows.get(key, {}).items()}
        self.expected.append((op, b"%d" % key, values))

    def _statement(self) -> str:
        kind, key = self._dice.random(), self._dice.randint(1, 12)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = {"body": self._value(), "note": self._value()}
            self._expect("I", key)
            shown = ", ".join("NULL" if one is None else f"'{one}'" for one in row.values())
            return f"INSERT INTO docs VALUES ({key}, 0, {shown})"
        free = sorted(set(range(1, 13)) - set(self._rows))
        if kind < 0.45:
            self._expect("U", key)
            return f"UPDATE docs SET n = n + 1 WHERE id = {key}"
        if kind < 0.7:
            name = self._dice.choice(["body", "note"])
            row[name] = value = self._value()
            self._expect("U", key)
            return f"UPDATE docs SET {name} = " + ("NULL" if value is None else f"'{value}'") + f" WHERE id = {key}"
        if kind < 0.8 and free:
            other = self._dice.choice(free)
            self._rows[other] = self._rows.pop(key)
            self._expect("U", other)
            return f"UPDATE docs SET id = {other} WHERE id = {key}"
        if kind < 0.97 or not self._with_truncate:
            del self._rows[key]
            self._expect("D", key)
            return f"DELETE FROM docs WHERE id = {key}"
        self._rows.clear()
        self._expect("T", 0)
        return "TRUNCATE docs"


def check(changes: list[Change], expected: list[Expected]) -> int:
    """No value is wrong; how many are missing."""
    assert [change.op for change in changes] == [op for op, _, _ in expected]
    for change, (op, key, values) in zip(changes, expected, strict=True):
        if op in "IU":
            assert change.row["id"] == key
            for name, value in values.items():
                if name not in marked(change):
                    assert change.row[name] == value, f"{name} of {key!r} at {change.lsn:X}"
    return sum(len(change.unchanged or ()) for change in changes)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=SLOW) for seed in range(2, 12))])
@pytest.mark.parametrize("limit", [6, pytest.param(1000, marks=SLOW)])
def test_any_history_replayed_from_anywhere_gives_the_same_rows(
    docs: Database, tmp_path: Path, seed: int, limit: int
) -> None:
    print(f"seed {seed}, limit {limit}")
    dice, story = random.Random(seed), History(seed, with_truncate=False)
    rig = Rig(docs, tmp_path, limit=limit)
    for _ in range(10):
        rig.read(*(story.transaction() for _ in range(dice.randint(1, 8))))
    whole, ends = rig.changes, [rig.start_lsn, *sorted({change.lsn for change in rig.changes})]
    missing = check(whole, story.expected)
    assert missing == 0 if limit == 1000 else 0 < missing < len(whole) / 2
    confirmed = 0
    for _ in range(12):
        at = dice.choice([lsn for lsn in ends if lsn >= confirmed])
        rig.restart(at, orderly=dice.random() < 0.5)
        rig.read(limit=dice.choice([1, 3, 100]))
        assert rig.changes == [change for change in whole if change.lsn > at], f"behind {at:X}"
        if dice.random() < 0.3:
            confirmed = dice.choice([lsn for lsn in ends if lsn >= confirmed])
            rig.confirm(confirmed)
    rig.close()


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=SLOW) for seed in range(2, 12))])
def test_whatever_is_done_to_the_table_no_value_is_wrong(docs: Database, tmp_path: Path, seed: int) -> None:
    print(f"seed {seed}")
    dice, story = random.Random(seed), History(seed, with_truncate=True)
    rig = Rig(docs, tmp_path)
    looked_up = 0
    for _ in range(15):
        before = len(story.expected)
        for _ in range(dice.randint(1, 8)):
            rig.execute(story.transaction())
            if dice.random() < 0.1:
                rig.execute(
                    dice.choice(
                        ["VACUUM docs", "VACUUM FULL docs", "ANALYZE docs", "ALTER TABLE docs ALTER n SET DEFAULT 1"]
                    )
                )
        if dice.random() < 0.3:
            rig.restart(rig.changes[-1].lsn if rig.changes else rig.start_lsn, orderly=dice.random() < 0.5)
        check(rig.read(), story.expected[before:])
        looked_up += sum(rig.counted[:2])
    assert looked_up > 0
    rig.close()
