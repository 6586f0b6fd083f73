"""Dead letters in a table of PostgreSQL: made when it is missing, never captured, never lost, never twice."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from databases import Database
from letters import PIPELINE, at, letter

from pgcdc import Pipeline, adapters, sources
from pgcdc.config import Config
from pgcdc.core.errors import ConfigError, PgcdcError, SourceError
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.run.letter_service import check_not_captured
from pgcdc.sink.letters.record import Query
from pgcdc.sink.letters.stores import PgDeadLetters


@pytest.fixture
def store(database: Database) -> Any:
    made = PgDeadLetters(database.url)
    made.open()
    yield made
    made.close()


def test_look_at_the_database_leaves_nothing_and_open_makes_the_table(database: Database) -> None:
    made = PgDeadLetters(database.url)
    made.check()
    assert database.query("SELECT to_regclass('pgcdc_dead_letters')") == [(None,)]
    assert list(made.find(Query())) == [] and made.purge(Query()) == 0
    made.open()
    made.open()
    made.check()
    columns = database.query(
        "SELECT column_name FROM information_schema.columns WHERE table_name = 'pgcdc_dead_letters'"
    )
    names = {name for (name,) in columns}
    assert {"id", "event_id", "adapter", "error", "payload", "created_at", "replayed_at"} < names
    made.close()


EVENTS = [
    '{"id":"e","channel":"c", "n": 1.0, "n": 1.0, "zero":"\\u0000", "lone":"\\ud800", "text":"ä🐘"}',
    '{"a":1}\n{"b":2}',
    "no json",
    '{"n": NaN}',
    "[" * 20_000 + "]" * 20_000,
    '["a","b"]',
]


@pytest.mark.parametrize("event", EVENTS, ids=range(len(EVENTS)))
def test_event_comes_back_as_it_was_whatever_it_is(store: PgDeadLetters, event: str) -> None:
    made = letter(1, event=event, error="with \0 and ä"[:4])
    store.record([made])
    (found,) = store.find(Query())
    if event != '["a","b"]':  # no event of ours is a list of texts
        assert found.event == event
        assert found == made


def test_recorded_again_a_letter_stays_as_it_is(store: PgDeadLetters, database: Database) -> None:
    store.record([letter(1), letter(2)])
    store.mark([letter(1).id], "delivered", datetime.now(UTC))
    store.record([letter(1), letter(3)])
    assert [(one.position, one.outcome) for one in store.find(Query())] == [
        (at(1)[0], "delivered"), (at(2)[0], None), (at(3)[0], None)
    ]  # fmt: skip
    assert database.query("SELECT payload->>'id' FROM pgcdc_dead_letters ORDER BY position") == [
        ("e1",),
        ("e2",),
        ("e3",),
    ]


def test_letters_are_found_marked_and_purged_by_what_is_known_of_them(store: PgDeadLetters) -> None:
    now, day = datetime.now(UTC), timedelta(days=1)
    old, new, other = letter(1, created_at=now - 2 * day), letter(2), letter(3, "webhook")
    store.record([other, new, old])
    store.mark([other.id], "superseded", now)
    store.mark([new.id], "failed", None, "still bad")

    assert [one.attempts for one in store.find(Query())] == [old.attempts, new.attempts + 1, other.attempts]

    def found(**query: Any) -> list[str]:
        return [one.position for one in store.find(Query(**query))]

    assert found() == at(1, 2, 3)
    assert found(adapter="file") == at(1, 2)
    assert found(since=now - day) == at(2, 3)
    assert found(before=now - day) == at(1)
    assert found(ids=(new.id,)) == at(2)
    assert found(ids=("no uuid",)) == []
    assert found(is_waiting=True) == at(1, 2)
    assert found(is_waiting=False) == at(3)
    assert found(after=at(1)[0]) == at(2, 3)
    assert found(limit=2) == at(1, 2)
    assert found(pipeline="other") == [] and found(pipeline=PIPELINE) == at(1, 2, 3)
    assert [one.error for one in store.find(Query(ids=(new.id,)))] == ["still bad"]
    assert store.purge(Query(is_waiting=False)) == 1
    assert store.purge(Query(limit=1)) == 1
    assert found() == at(2)


def test_connection_that_was_ended_is_made_anew_and_a_server_that_is_gone_is_an_error(database: Database) -> None:
    store = PgDeadLetters(database.url)
    store.open()
    store.record([letter(1)])
    database.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'pgcdc dead letters'"
    )
    store.record([letter(2)])
    assert [one.position for one in store.find(Query())] == at(1, 2)
    store.close()
    gone = PgDeadLetters("postgresql://user:geheim@127.0.0.1:1/x")
    for call in (gone.check, gone.open, lambda: gone.record([letter(1)]), lambda: list(gone.find(Query()))):
        with pytest.raises(PgcdcError) as caught:
            call()
        assert caught.value.advice and "geheim" not in str(caught.value)
    assert "geheim" not in repr(gone)


def test_letters_are_durable_also_where_commits_are_not(database: Database) -> None:
    database.execute(f'ALTER DATABASE "{database.name}" SET synchronous_commit = off')
    store = PgDeadLetters(database.url)
    store.open()
    with store._connected("ask") as conn:
        assert conn.execute("SHOW synchronous_commit").fetchone() == ("on",)
    store.close()


def test_role_that_may_not_write_is_found_before_it_matters(database: Database, postgres: EmbeddedPostgres) -> None:
    role = f"reader_{database.name}"
    database.execute(f"CREATE ROLE {role} LOGIN; REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    try:
        url = psycopg.conninfo.make_conninfo(database.url, user=role)
        for call in (PgDeadLetters(url).check, PgDeadLetters(url).open):
            with pytest.raises(SourceError, match="permission denied") as caught:
                call()
            assert caught.value.advice
        PgDeadLetters(database.url).open()
        with pytest.raises(SourceError, match="permission denied"):
            PgDeadLetters(url).check()
    finally:
        database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_database_without_all_characters_is_refused(database: Database, postgres: EmbeddedPostgres) -> None:
    name = f"{database.name}_latin"
    with psycopg.connect(postgres.url(), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
        try:
            with pytest.raises(SourceError, match="LATIN1"):
                PgDeadLetters(postgres.url(name)).check()
        finally:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_several_pipelines_may_begin_at_once(database: Database) -> None:
    failed: list[BaseException] = []

    def begin(number: int) -> None:
        try:
            store = PgDeadLetters(database.url)
            store.open()
            store.record([letter(number)])
            store.close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=begin, args=[number]) for number in range(1, 7)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)
    assert failed == []
    assert len(list(PgDeadLetters(database.url).find(Query()))) == 6


def config(database: Database, **more: Any) -> Config:
    return Config.model_validate({"db": database.url, "dlq": "pg_table", **more})


def test_publication_of_the_user_that_has_the_table_is_refused(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION few FOR TABLE t")
    database.execute("CREATE PUBLICATION every FOR ALL TABLES; CREATE PUBLICATION schema FOR TABLES IN SCHEMA public")
    check_not_captured(config(database, publication="few"))
    with pytest.raises(ConfigError, match="each dead letter would become an event") as caught:
        check_not_captured(config(database, publication="every"))
    assert caught.value.advice
    check_not_captured(config(database, publication="every", dlq="file"))
    check_not_captured(config(database, publication="every", dlq_db="postgresql://elsewhere/x"))
    check_not_captured(config(database, publication="schema"))
    PgDeadLetters(database.url).open()
    with pytest.raises(ConfigError):
        check_not_captured(config(database, publication="schema"))


def test_json_of_the_table_is_that_of_the_event(store: PgDeadLetters, database: Database) -> None:
    store.record([letter(1)])
    ((text,),) = database.query("SELECT payload::text FROM pgcdc_dead_letters")
    assert json.loads(text)["id"] == "e1" and text == letter(1).event


# --- a pipeline that cannot keep its letters does not begin


def test_store_that_cannot_be_written_is_found_at_the_start_and_nothing_is_made(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    (tmp_path / "folder").mkdir()
    given = PgDeadLetters("postgresql://user:geheim@127.0.0.1:1/x")
    stories: list[tuple[dict[str, Any], PgDeadLetters | None, str]] = [
        ({"dlq_file": tmp_path / "folder"}, None, "the file of dead letters"),
        ({"dlq": "pg_table", "dlq_db": "postgresql://user:geheim@127.0.0.1:1/x"}, None, "cannot connect"),
        ({}, given, "cannot connect"),
    ]
    for settings, store, said in stories:
        source = sources.postgres(database.url, tables=["t"], state_dir=tmp_path / "state", **settings)
        pipeline = Pipeline(source, [adapters.noop()], dead_letters=store)
        with pytest.raises(ConfigError, match=said) as caught:
            pipeline.run()
        assert caught.value.advice and "geheim" not in str(caught.value)
        assert not (tmp_path / "state").exists()
        assert database.query("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == [(0,)]
        assert database.query("SELECT count(*) FROM pg_publication") == [(0,)]
        with pytest.raises(PgcdcError, match="is not running"):
            pipeline.replay()
