"""pg_table against real PostgreSQL: what it refuses, what it waits for, and that nothing is lost or there twice."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from databases import Database
from psycopg import sql
from targets.events import END, START, STREAM, batch, batch_of, event, to_line
from targets.pg_table import ITEMS

from pgcdc.cli.config import run_checks
from pgcdc.config import load_config
from pgcdc.core import failpoint
from pgcdc.core.errors import SinkError, SinkRejected, SinkUnavailable
from pgcdc.core.failpoint import FailpointError
from pgcdc.core.position import SCHEMA_SUB, Position
from pgcdc.core.relation import ShapeChange, append_shapes
from pgcdc.core.state import Identity, StateDir
from pgcdc.event.forms import FIELDS
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.postgres.database import connect
from pgcdc.sink.contract import Progress
from pgcdc.sink.pg_table.options import PgTableOptions
from pgcdc.sink.pg_table.sink import PgTableSink
from pgcdc.sink.pg_table.target import Positions
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import DeliveryOptions
from pgcdc.source.protocol import Finding

HALF = Position.end(120)


class Made:
    """Sinks for one target and one state directory."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.said: list[str] = []
        self._sinks: list[Runner] = []
        (folder / "acks").mkdir(exist_ok=True)

    def sink(self, timeout_s: float = 30.0, **options: Any) -> Runner:
        acks = self.folder / "acks"
        given = PgTableOptions(**{"db": self.url, **options})
        delivery = DeliveryOptions(max_retries=0, cb_max_failures=0, timeout=timeout_s)
        made = Runner(PgTableSink(given), acks, "pg_table", delivery, say=self.said.append)
        self._sinks.append(made)
        return made

    def opened(self, timeout_s: float = 30.0, **options: Any) -> Runner:
        sink = self.sink(timeout_s, **options)
        sink.open(START)
        return sink

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


@pytest.fixture
def made(database: Database, tmp_path: Path) -> Iterator[Made]:
    made = Made(database.url, tmp_path)
    yield made
    made.close()


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda point: monkeypatch.setattr(failpoint, "_POINTS", failpoint._parse(point))


def positions(database: Database, table: str = "pgcdc_events") -> list[str]:
    return [one for (one,) in database.query(f"SELECT position FROM {table} ORDER BY position")]


def expected(end: Position = END) -> list[str]:
    return [str(one) for one in STREAM if one <= end]


# --- rows


def as_fields(lines: pa.Table) -> pa.Table:
    """As the source makes them, of lines: of what is not an event in its own form there is only the text."""
    rows = []
    for position, line in zip(lines["position"].to_pylist(), lines["line"].to_pylist(), strict=True):
        one = json.loads(line)
        names = {"id", "channel", "operation", "payload", "source", "created_at", "position"}
        if one.keys() - {"transaction"} == names:
            payload = line[line.index('"payload":') + 10 : line.index(',"source":')]
            block = json.dumps(one["transaction"]) if "transaction" in one else None
            rows.append({**one, "payload": payload, "transaction": block})
        else:
            rows.append({"position": position, "payload": line.strip()})
    columns = ["position", *(field.name for field in FIELDS)]
    return pa.table({name: pa.array([one.get(name) for one in rows], pa.string()) for name in columns})


@pytest.mark.parametrize("form", ["lines", "fields"])
def test_events_become_rows_and_what_transforms_made_of_them_is_kept_whole(
    database: Database, made: Made, form: str
) -> None:
    plain = event(Position.at(110, 1), text='tab\t quote " backslash \\ newline\n \\N')
    odd = {**event(Position.at(110, 2)), "channel": 'pgcdc:we"ird'}
    described = {**event(Position.at(110, 3)), "transaction": {"xid": 7, "commit_time": None, "seq": 3}}
    alone = {**event(Position.at(110, 4)), "created_at": None}
    extra = {**event(Position.at(110, 5)), "tenant": "a"}
    exact = to_line(event(Position.at(110, 6))).replace('"ä🐘"', "12345678901234567890123456789.10")
    envelope = '{"before":null,"after":{"id":1},"op":"c","position":"-"}\n'
    lines = [to_line(one) for one in (plain, odd, described, alone, extra)]
    everything = batch_of(START, END, [*lines, exact])
    table = everything.events.select(["position", "line"])
    for number, position in enumerate([Position.at(110, 7), Position.at(110, 7)]):
        row = {"position": [str(position)], "line": [envelope.replace('"-"', str(number))]}
        table = pa.concat_tables([table, pa.table(row)])
    table = as_fields(table) if form == "fields" else table
    made.opened().write(type(everything)(START, END, table))
    rows = database.query("SELECT id::text, channel, operation, payload, source, created_at::text, position, transaction "
                          "FROM pgcdc_events ORDER BY position, payload->>'position'")  # fmt: skip
    assert rows[0][:5] == (plain["id"], "pgcdc:items", "INSERT", plain["payload"], "wal_replication")
    assert rows[0][5:] == ("2026-11-16 00:46:06.258+00", str(Position.at(110, 1)), None)
    assert rows[1][1] == 'pgcdc:we"ird' and rows[2][7] == described["transaction"] and rows[3][5] is None
    assert rows[4][1] is None and rows[4][3] == extra
    ((number,),) = database.query(
        "SELECT payload #>> '{row,text}' FROM pgcdc_events WHERE position = %s", [str(Position.at(110, 6))]
    )
    assert number == "12345678901234567890123456789.10"
    assert [row[3]["position"] for row in rows[6:]] == [0, 1] and len({row[0] for row in rows}) == len(rows)


def test_table_may_have_more_columns_and_another_name(database: Database, made: Made) -> None:
    database.execute('CREATE SCHEMA "Log"')
    made.opened(table='"Log"."Events"').write(batch(START, HALF))
    database.execute('ALTER TABLE "Log"."Events" ADD COLUMN seen_at timestamptz DEFAULT now()')
    made.opened(table='"Log"."Events"').write(batch(HALF, END))
    assert positions(database, '"Log"."Events"') == expected()
    assert database.query('SELECT "position" FROM "Log".pgcdc_positions') == [(str(END),)]


# --- how far it is


def test_crash_between_the_commit_and_the_ack_is_seen_by_the_next_one(
    database: Database, made: Made, crash_at: Callable[[str], None]
) -> None:
    crash_at("pg_table.committed")
    with pytest.raises(FailpointError):
        made.opened().write(batch(START, HALF))
    assert positions(database) == expected(HALF)
    assert made.sink().ack == START
    sink = made.opened()
    assert sink.ack == HALF
    sink.write(batch(START, END))
    assert positions(database) == expected()


def test_crash_before_the_first_row_of_positions_leaves_no_stranger(
    database: Database, made: Made, crash_at: Callable[[str], None]
) -> None:
    crash_at("pg_table.before_ack")
    with pytest.raises(FailpointError):
        made.opened().write(batch(START, HALF))
    assert database.query("TABLE pgcdc_positions") == []
    made.opened().write(batch(START, END))
    assert positions(database) == expected()


def test_empty_batches_move_the_ack_and_not_the_target(database: Database, made: Made) -> None:
    sink = made.opened()
    sink.write(batch(START, HALF))
    before = database.query("SELECT xmin::text, position FROM pgcdc_positions")
    sink.write(batch_of(HALF, Position.end(125), []))
    assert sink.ack == Position.end(125)
    assert database.query("SELECT xmin::text, position FROM pgcdc_positions") == before
    sink = made.opened()
    assert sink.ack == Position.end(125)
    sink.write(batch(sink.ack, END))
    assert positions(database) == expected()


def test_target_that_was_restored_to_an_older_state_is_refused(database: Database, made: Made) -> None:
    sink = made.opened()
    sink.write(batch(START, HALF))
    database.execute("UPDATE pgcdc_positions SET position = %s", [str(START)])
    with pytest.raises(SinkError, match="an older state of the target was restored") as caught:
        made.opened()
    assert "resync" in caught.value.advice and not isinstance(caught.value, SinkUnavailable)
    database.execute("DELETE FROM pgcdc_positions")
    with pytest.raises(SinkError, match="has no position, but everything up to"):
        made.opened()
    assert database.query("TABLE pgcdc_positions") == []


def test_positions_go_back_where_a_resync_says_so(database: Database, made: Made) -> None:
    """Those of another server can be smaller: what comes from there is not what was written before."""
    made.opened().write(batch(Position.end(125), END))
    ack = Progress(made.folder / "acks", "pg_table")
    ack.rewind(START)
    sink = made.opened()
    assert sink.ack == START
    sink.write(batch(START, Position.end(125)))
    assert positions(database) == expected()
    assert database.query("SELECT position FROM pgcdc_positions") == [(str(Position.end(125)),)]
    assert made.opened().ack == Position.end(125)


def test_target_without_its_row_begins_again_after_a_resync(database: Database, made: Made) -> None:
    """The new slot stands behind everything that was written."""
    made.opened().write(batch(START, HALF))
    database.execute("DELETE FROM pgcdc_positions")
    ack = Progress(made.folder / "acks", "pg_table")
    ack.rewind(END)
    assert made.opened().ack == END
    assert database.query("SELECT position FROM pgcdc_positions") == [(str(END),)]
    assert made.opened().ack == END


def test_adapter_of_another_pipeline_is_refused_and_left_alone(database: Database, made: Made, tmp_path: Path) -> None:
    made.opened().write(batch(START, HALF))
    (tmp_path / "other").mkdir()
    other = Made(database.url, tmp_path / "other")
    for call in (lambda: other.sink().check(), other.opened):
        with pytest.raises(SinkError, match="of another pipeline") as caught:
            call()
        assert "Rename this adapter" in caught.value.advice
    assert positions(database) == expected(HALF)


def test_each_stream_of_a_pipeline_has_its_own_position(database: Database, made: Made) -> None:
    sink = made.opened()
    sink.write(batch(START, HALF))
    owner = sink.progress.owner
    with connect(database.url) as conn:
        view = Positions("public", sink.name, "view/totals")
        assert view.read(conn, owner) is None
        view.begin(conn, owner, START, "")
        view.advance(conn, owner, START, END)
        stranger = Positions("public", sink.name, "view/others")
        with pytest.raises(SinkUnavailable, match="another process writes"):
            stranger.begin(conn, "00000000-0000-0000-0000-000000000000", START, "")
        with pytest.raises(SinkError, match="of another pipeline"):
            stranger.read(conn, "00000000-0000-0000-0000-000000000000")
    rows = database.query("SELECT stream, position FROM pgcdc_positions ORDER BY stream")
    assert rows == [("", str(HALF)), ("view/totals", str(END))]
    assert made.opened().ack == HALF


def test_target_in_which_nothing_was_written_is_free_again(database: Database, made: Made, tmp_path: Path) -> None:
    """A replay to another target than the adapter's opens it with a state directory that nobody keeps."""
    (tmp_path / "other").mkdir()
    other = Made(database.url, tmp_path / "other")
    first = other.opened()
    assert list(first.redeliver(batch(START, HALF))) == []
    first.write(batch_of(START, Position.end(105), []))
    first.close()
    sink = made.opened()
    sink.write(batch(HALF, END))
    sink.close()
    assert positions(database) == expected()
    with pytest.raises(SinkError, match="of another pipeline"):
        other.opened()
    database.execute("DELETE FROM pgcdc_positions")
    assert other.opened().ack == Position.end(105)
    other.close()


def test_process_that_was_taken_for_dead_cannot_write_over_the_next_one(database: Database, made: Made) -> None:
    old = made.opened()
    old.write(batch(START, Position.end(110)))
    new = made.opened()
    new.write(batch(START, HALF))
    with pytest.raises(SinkUnavailable, match="another process writes"):
        old.write(batch(START, END))
    assert positions(database) == expected(HALF)
    old.write(batch(START, END))  # it has looked again
    assert positions(database) == expected()


def test_other_database_goes_on_there_and_the_old_rows_stay(database: Database, made: Made) -> None:
    made.opened().write(batch(START, HALF))
    other = f"{database.name}_2"
    database.execute(f"CREATE DATABASE {other}")
    try:
        made.url = database.server.url(other)
        made.opened().write(batch(START, END))
        made.close()
        with psycopg.connect(made.url) as conn:
            rows = conn.execute("SELECT position FROM pgcdc_events ORDER BY position").fetchall()
        assert [one for (one,) in rows] == expected()[len(expected(HALF)) :]
    finally:
        made.close()
        database.execute(f"DROP DATABASE {other} WITH (FORCE)")


# --- what is wrong with the target


def test_table_of_another_shape_is_refused_before_anything_is_written(database: Database, made: Made) -> None:
    database.execute("CREATE TABLE pgcdc_events (id uuid, payload text, channel text GENERATED ALWAYS AS ('x') STORED)")
    for call in (made.sink().check, made.opened):
        with pytest.raises(SinkError, match="has no column channel, operation, source") as caught:
            call()
        assert 'ADD COLUMN "operation" text' in caught.value.advice
    assert database.query("SELECT to_regclass('pgcdc_positions')") == [(None,)]


def test_read_only_target_is_waited_for(database: Database, made: Made) -> None:
    sink = made.opened()
    sink.write(batch(START, HALF))
    name = sql.Identifier(database.name)
    with database.connect() as conn:
        conn.execute(sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name))
    sink.close()
    with pytest.raises(SinkUnavailable, match="is read-only"):
        sink.write(batch(HALF, END))
    with pytest.raises(SinkUnavailable, match="is read-only"):
        made.sink().check()
    made.opened()  # one that has an ack waits at its first write
    assert "It continues when the target does" in made.said[-1]
    with psycopg.connect(database.server.url(), autocommit=True) as conn:
        conn.execute(sql.SQL("ALTER DATABASE {} RESET default_transaction_read_only").format(name))
    sink.write(batch(HALF, END))
    assert positions(database) == expected()


def test_locked_table_is_waited_for_and_no_longer_than_a_write_may_take(database: Database, made: Made) -> None:
    sink = made.opened(timeout_s=0.4)
    with database.connect(autocommit=False) as other:
        other.execute("LOCK TABLE pgcdc_events IN ACCESS EXCLUSIVE MODE")
        began = time.monotonic()
        with pytest.raises(SinkUnavailable, match="lock timeout") as caught:
            sink.write(batch(START, END))
        assert time.monotonic() - began < 5
        assert "pg_locks" in caught.value.advice
    sink.write(batch(START, END))
    assert positions(database) == expected()


def test_target_that_is_gone_comes_back_and_everything_is_there_once(tmp_path: Path) -> None:
    with EmbeddedPostgres.temporary(settings={"fsync": "off"}) as server:
        made = Made(server.url(), tmp_path)
        sink = made.opened()
        sink.write(batch(START, HALF))
        server.kill()
        with pytest.raises(SinkUnavailable):
            sink.write(batch(HALF, END))
        waiting = made.opened()
        with pytest.raises(SinkUnavailable, match="cannot connect"):
            waiting.write(batch(HALF, END))
        assert waiting.ack == HALF
        server.restart()
        sink.write(batch(START, END))
        waiting.write(batch(HALF, END))
        assert waiting.ack == END
        with psycopg.connect(server.url()) as conn:
            rows = conn.execute("SELECT position FROM pgcdc_events ORDER BY position").fetchall()
        assert [one for (one,) in rows] == expected()
        made.close()


def test_new_sink_needs_its_target(tmp_path: Path) -> None:
    made = Made("postgresql://u@127.0.0.1:1/nowhere", tmp_path)
    with pytest.raises(SinkUnavailable, match=r"cannot connect to 127\.0\.0\.1:1/nowhere"):
        made.opened()
    assert list((tmp_path / "acks").iterdir()) == []


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    name = f"r_{uuid.uuid4().hex[:8]}"
    database.execute(f"CREATE ROLE {name} LOGIN")
    yield name
    with database.connect() as conn:
        conn.execute(f"DROP OWNED BY {name}".encode())
        conn.execute(f"DROP ROLE {name}".encode())


def test_rights_that_are_missing_are_named_with_what_to_run(database: Database, made: Made, role: str) -> None:
    made.url = database.server.url(database.name, role)
    database.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    with pytest.raises(SinkError, match="cannot create tables in schema public") as caught:
        made.sink().check()
    advice = caught.value.advice.partition("owner: ")[2]
    assert 'CREATE TABLE IF NOT EXISTS "public"."pgcdc_events"' in advice
    database.execute(advice)  # what it says can be run as it is
    with pytest.raises(SinkError, match="has no INSERT right on table pgcdc_events") as caught:
        made.sink().check()
    database.execute(caught.value.advice.partition("Run: ")[2])
    with pytest.raises(SinkError, match="cannot write to pgcdc_positions at the target"):
        made.opened()
    database.execute(f"GRANT SELECT, INSERT, UPDATE ON pgcdc_positions TO {role}")
    sink = made.opened(create=False)
    sink.write(batch(START, END))
    assert positions(database) == expected()


def test_nothing_is_created_when_told_so(database: Database, made: Made) -> None:
    with pytest.raises(SinkError, match="`create` is false") as caught:
        made.sink(create=False).check()
    database.execute(caught.value.advice.partition("Run there: ")[2])
    made.opened(create=False).write(batch(START, END))
    assert positions(database) == expected()


@pytest.mark.parametrize("bad", [[3], [0, 5, 6, 15], list(range(16))], ids=str)
def test_refused_events_are_named_and_the_others_arrive(database: Database, made: Made, bad: list[int]) -> None:
    sink = made.opened()
    database.execute("ALTER TABLE pgcdc_events ADD CHECK (payload #>> '{row,text}' <> 'bad')")
    lines = [to_line(event(one, text="bad" if at in bad else "good")) for at, one in enumerate(STREAM)]
    everything = batch_of(START, END, lines)
    names = [str(STREAM[at]) for at in bad]
    found: list[str] = []
    for _ in bad:  # one after the other: what is before it is written
        with pytest.raises(SinkRejected) as caught:
            sink.write(everything.without(found))
        assert [one.kind for one in caught.value.rejects] == ["check_violation"]
        found += [one.position for one in caught.value.rejects]
        assert positions(database) == [one for one in expected(sink.ack) if one not in names]
    assert found == names
    sink.write(everything.without(names))
    assert sink.ack == END
    assert positions(database) == [one for one in expected() if one not in names]
    database.execute("ALTER TABLE pgcdc_events DROP CONSTRAINT pgcdc_events_payload_check")
    refused = batch_of(START, END, [lines[at] for at in bad])
    for _ in range(2):  # one that was delivered already is not there twice
        assert list(sink.redeliver(refused)) == []
    assert positions(database) == expected() and sink.ack == END


def test_line_that_only_looks_like_an_event_is_parsed(database: Database, made: Made) -> None:
    odd = to_line(event(Position.at(110, 1))).replace(',"source"', ',"extra":{"a":1},"source"')
    lines = batch_of(START, END, [odd, to_line(event(Position.at(110, 2)))])
    made.opened().write(replace(lines, events=lines.events.select(["position", "line"])))
    assert database.query("SELECT payload->'extra' FROM pgcdc_events ORDER BY position") == [({"a": 1},), (None,)]


def test_wrong_password_is_said_and_not_shown(tmp_path: Path) -> None:
    with EmbeddedPostgres.temporary(settings={"fsync": "off"}, password="right") as server:
        made = Made(server.url().replace(":right@", ":hunter2-wrong@"), tmp_path)
        sink = made.sink()
        for call in (sink.check, lambda: sink.open(START)):
            with pytest.raises(SinkError, match="password authentication failed") as caught:
                call()
            assert not isinstance(caught.value, SinkUnavailable)
            shown = f"{caught.value!r} {caught.value} {caught.value.__cause__} {sink.sink!r}"
            assert "hunter2" not in shown and "password" in caught.value.advice


def test_table_that_the_pipeline_captures_is_refused(database: Database, made: Made, tmp_path: Path) -> None:
    database.execute("CREATE TABLE log (id uuid PRIMARY KEY)")
    database.execute("CREATE PUBLICATION p FOR TABLE log")
    ((system,),) = database.query("SELECT system_identifier::text FROM pg_control_system()")
    StateDir(tmp_path).save_identity(
        Identity("postgres", system, database.name, "s", "i", 0, {"publications": [{"name": "p"}]})
    )
    for column, kind in [("channel", "text"), ("operation", "text"), ("payload", "jsonb"), ("source", "text"),
                         ("created_at", "timestamptz"), ("position", "text"), ("transaction", "jsonb")]:  # fmt: skip
        database.execute(f"ALTER TABLE log ADD COLUMN {column} {kind}")
    with pytest.raises(SinkError, match="which this pipeline captures"):
        made.sink(table="log").check()
    made.sink().check()


# --- sessions


def test_sessions_mean_by_texts_what_the_source_means_and_commits_are_durable(
    database: Database, made: Made, role: str
) -> None:
    database.execute(f"ALTER ROLE {role} SET synchronous_commit = off")
    database.execute(f"ALTER ROLE {role} SET TimeZone = 'Asia/Tokyo'")
    database.execute(f"ALTER ROLE {role} SET DateStyle = 'SQL, DMY'")
    database.execute(f"ALTER ROLE {role} SET default_transaction_isolation = 'serializable'")
    database.execute(f"GRANT CREATE ON SCHEMA public TO {role}")
    made.url = database.server.url(database.name, role)
    sink = made.opened()
    assert isinstance(sink.sink, PgTableSink)
    conn = sink.sink._conn
    assert conn is not None
    names = (
        "synchronous_commit",
        "TimeZone",
        "DateStyle",
        "IntervalStyle",
        "transaction_isolation",
        "application_name",
    )
    found = [conn.execute("SELECT current_setting(%s)", (name,)).fetchone() for name in names]
    assert [one and one[0] for one in found] == [
        "on",
        "UTC",
        "ISO, MDY",
        "iso_8601",
        "read committed",
        "pgcdc pg_table",
    ]


def test_sessions_find_a_few_thousand_keys_by_the_index_of_a_large_table(database: Database, made: Made) -> None:
    database.execute("CREATE TABLE large (id int PRIMARY KEY, v text)")
    database.execute("INSERT INTO large SELECT n, repeat('v', 120) FROM generate_series(1, 300000) n")
    database.execute("ANALYZE large")
    sink = made.opened().sink
    assert isinstance(sink, PgTableSink) and sink._conn is not None
    sink._conn.execute("CREATE TEMP TABLE keys AS SELECT n AS id FROM generate_series(1, 4500) n")
    plan = sink._conn.execute("EXPLAIN DELETE FROM large t USING keys s WHERE t.id = s.id").fetchall()
    assert "Nested Loop" in str(plan), "any other way reads all of the table or of its index"


def test_without_rights_for_origins_and_triggers_it_goes_on_and_says_what_to_grant(
    database: Database, made: Made, role: str
) -> None:
    database.execute(f"GRANT CREATE ON SCHEMA public TO {role}")
    made.url = database.server.url(database.name, role)
    append_shapes(made.folder / "shapes.jsonl", [ShapeChange(Position.at(100, 0, SCHEMA_SUB), ITEMS)])
    made.opened(mode="apply").write(batch(START, END))
    assert database.query("SELECT count(*) FROM items") == [(len(STREAM),)]
    triggers, origin = made.said[:2]
    assert "GRANT SET ON PARAMETER session_replication_role" in triggers
    assert "have no replication origin" in origin
    with pytest.raises(SinkError, match="cannot use a replication origin") as caught:
        made.opened(mode="apply", origin="mine")
    database.execute(caught.value.advice.partition("superuser: ")[2])
    made.said.clear()
    made.opened(mode="apply", origin="mine").write(
        batch_of(END, Position.end(160), [to_line(event(Position.at(160, 1)))])
    )
    assert not [text for text in made.said if "origin" in text]
    try:
        ((lsn,),) = database.query(
            "SELECT remote_lsn::text FROM pg_replication_origin_status WHERE external_id = 'mine'"
        )
        assert lsn == "0/A0"
    finally:
        made.close()
        database.execute("SELECT pg_replication_origin_drop('mine')")
        database.execute(f"DROP OWNED BY {role}")


def test_ack_file_tells_the_owner_and_no_secret(database: Database, made: Made) -> None:
    made.url = database.url.replace("postgres@", "postgres:hunter2@", 1)
    made.opened().write(batch(START, END))
    text = (made.folder / "acks" / "pg_table.json").read_text()
    assert "hunter2" not in text
    assert json.loads(text)["owner"] == database.query("SELECT owner::text FROM pgcdc_positions")[0][0]


@pytest.mark.parametrize("mode", ["append", "apply"])
def test_older_server(tmp_path: Path, mode: str) -> None:
    with EmbeddedPostgres.temporary(version=16, settings={"fsync": "off"}) as server:
        append_shapes(tmp_path / "shapes.jsonl", [ShapeChange(Position.at(100, 0, SCHEMA_SUB), ITEMS)])
        made = Made(server.url(), tmp_path)
        made.opened(mode=mode).write(batch(START, HALF))
        made.close()
        sink = made.opened(mode=mode)
        sink.write(batch(START, END))
        table = "items" if mode == "apply" else "pgcdc_events"
        with psycopg.connect(server.url(), autocommit=True) as conn:
            rows = conn.execute(f'SELECT "position" FROM {table} ORDER BY "position" COLLATE "C"'.encode()).fetchall()
        assert [one for (one,) in rows] == expected()
        assert made.said == (["table items created"] if mode == "apply" else [])
        made.close()


def test_server_without_merge_is_refused_for_applying(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgcdc.sink.pg_table.sink.MERGE_SINCE", 990000)
    made.sink().check()
    with pytest.raises(SinkError, match="applies with MERGE, which PostgreSQL 18 does not support"):
        made.sink(mode="apply").check()


def test_validation_looks_at_the_target_and_leaves_it_as_it_is(database: Database, tmp_path: Path) -> None:
    target = database.url.replace("postgres@", "postgres:hunter2@", 1)
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")

    def look(**more: Any) -> Finding:
        given = {"db": database.url, "all_tables": True, "adapters": ["pg_table"], "state_dir": str(tmp_path / "state")}
        config = load_config({**given, "pg_table_db": target, **more}, {}, None)
        return next(one for one in run_checks(config) if one.name == "adapter pg_table")

    found = look()
    assert found.status == "ok" and "hunter2" not in repr(found), found
    assert database.query("SELECT to_regclass('pgcdc_events'), to_regclass('pgcdc_positions')") == [(None, None)]
    database.execute("CREATE TABLE pgcdc_events (id int)")
    found = look()
    assert found.status == "failed" and "has no column" in found.detail and "ALTER TABLE" in found.advice
