"""`pgcdc dlq`: letters are listed, shown, delivered again and purged; what is not meant stays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import running
import yaml
from letters import PIPELINE, at, letter
from sink_targets import START, batch
from typer.testing import CliRunner

from pgcdc import adapters
from pgcdc.cli.config import _look_at_adapter, _try
from pgcdc.cli.main import app
from pgcdc.config import Config
from pgcdc.config.documents import json_schema, show_yaml
from pgcdc.config.layers import load
from pgcdc.core.errors import ConfigError, SinkError
from pgcdc.core.position import Position
from pgcdc.core.state import Identity, Lock, StateDir, write_json
from pgcdc.run.chains import note_targets
from pgcdc.sink.file import FileSink
from pgcdc.sink.letters.record import Query
from pgcdc.sink.letters.stores import FileDeadLetters
from pgcdc.sink.spec import describe_options
from pgcdc.transform.specs import Chain

DB = "postgresql://app:geheim@127.0.0.1:1/shop"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateDir:
    monkeypatch.chdir(tmp_path)
    for name in ("PGCDC_DB", "PGCDC_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    made = StateDir(tmp_path / ".pgcdc")
    made.create()
    made.save_identity(Identity("postgres", "7", "shop", "slot", "x", 100))
    return made


@pytest.fixture
def store(state: StateDir) -> FileDeadLetters:
    made = FileDeadLetters(state.letters_file)
    made.record([letter(1, created_at=datetime.now(UTC) - timedelta(days=2)), letter(2), letter(3, "webhook")])
    made.record([replace(letter(4), pipeline="another/slot")])
    return made


Run = Callable[..., Any]


@pytest.fixture
def run(state: StateDir) -> Run:
    return lambda *arguments: CliRunner().invoke(app, ["dlq", *arguments])


def ids(result: Any) -> list[str]:
    return [one["position"] for one in json.loads(result.stdout)]


def test_list_shows_what_is_meant_and_counts_all(run: Run, store: FileDeadLetters) -> None:
    assert ids(run("list", "--json")) == at(1, 2, 3)
    assert ids(run("list", "--json", "--adapter", "file")) == at(1, 2)
    assert ids(run("list", "--json", "--since", "24h")) == at(2, 3)
    assert ids(run("list", "--json", "--before", "1d")) == at(1)
    assert ids(run("list", "--json", "--before", "2020-01-01T00:00:00")) == []
    assert ids(run("list", "--json", "--id", letter(2).id)) == at(2)
    assert ids(run("list", "--json", "--limit", "2")) == at(1, 2)
    assert ids(run("list", "--json", "--all")) == at(1, 2, 3, 4)
    store.mark([letter(1).id], "delivered", datetime.now(UTC))
    assert ids(run("list", "--json", "--waiting")) == at(2, 3)
    shown = run("list", "--limit", "1")
    assert shown.exit_code == 0 and "http_400: bad" in shown.stdout
    assert "3 dead letters (2 waiting), oldest 2d ago, newest 0s ago; 1 shown" in shown.stderr.replace(
        "1s ago", "0s ago"
    )
    assert "event" not in json.loads(run("list", "--json").stdout)[0]


@pytest.mark.parametrize("command", [["list"], ["replay"], ["purge", "--settled"]])
def test_wrong_names_are_told(run: Run, store: FileDeadLetters, state: StateDir, command: list[str]) -> None:
    (state.acks / "audit.json").write_text("{}")
    wrong = run(*command, "--adapter", "audti")
    assert wrong.exit_code == 2 and "adapter audti does not exist" in wrong.stderr and "audit" in wrong.stderr
    assert run(*command, "--adapter", "audit").exit_code == 0
    wrong = run(*command, "--state-dir", "nosuch")
    assert wrong.exit_code == 2 and "the state directory nosuch does not exist" in wrong.stderr


def test_letters_that_are_named_need_no_state_directory(run: Run, store: FileDeadLetters, tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    store.path.rename(copy)
    shutil.rmtree(tmp_path / ".pgcdc")
    assert run("list").exit_code == 2
    assert ids(run("list", "--json", "--dlq-file", str(copy))) == at(1, 2, 3, 4)


def test_show_has_the_event(run: Run, store: FileDeadLetters) -> None:
    assert json.loads(run("show", letter(2).id, "--json").stdout)["event"] == letter(2).event
    assert letter(2).event in run("show", letter(2).id).stdout
    missing = run("show", "nothing")
    assert missing.exit_code == 2 and "dead letter nothing does not exist" in missing.stderr


@pytest.mark.parametrize("text", ["yesterday", "5x", ""])
def test_time_that_is_none_is_refused(run: Run, text: str) -> None:
    result = run("list", "--since", text)
    assert result.exit_code == 2 and "is not a time" in result.stderr


def test_purge_deletes_only_what_is_said_and_asks_for_what_waits(run: Run, store: FileDeadLetters) -> None:
    assert run("purge").exit_code == 2
    unsure = run("purge", "--adapter", "file")
    assert unsure.exit_code == 2 and "2 dead letters (2 waiting)" in unsure.stderr
    assert "nothing was deleted" in run("purge", "--everything", "--dry-run").stdout
    assert len(list(store.find(Query()))) == 4
    store.mark([letter(1).id], "delivered", datetime.now(UTC))
    assert run("purge", "--settled").stdout == "1 dead letter deleted\n"
    assert run("purge", "--adapter", "file", "--yes").stdout == "1 dead letter deleted\n"
    assert [one.position for one in store.find(Query())] == at(3, 4)
    assert run("purge", "--everything", "--yes").exit_code == 0
    assert [one.position for one in store.find(Query())] == at(4)  # of another pipeline
    assert run("purge", "--everything").stdout == "there are none\n"


# --- replay


@pytest.fixture
def delivered(state: StateDir, tmp_path: Path) -> Path:
    """What the adapter `file` has delivered before, as its configuration says."""
    path = tmp_path / "events.jsonl"
    sink = running.run(FileSink(path), state.acks)
    sink.open(START)
    sink.write(batch(START, Position.end(110)))
    sink.close()
    note_targets(state, [(adapters.file(path), Chain(()))])
    (tmp_path / "pgcdc.yaml").write_text(
        yaml.safe_dump({"adapters": ["file"], "file_path": str(path), "tables": ["t"]})
    )
    return path


def test_replay_without_a_run_delivers_as_the_configuration_says(
    run: Run, store: FileDeadLetters, delivered: Path, state: StateDir
) -> None:
    before, ack = delivered.read_text(), (state.acks / "file.json").read_text()
    plan = run("replay", "--adapter", "file", "--dry-run")
    assert f"would deliver 2 dead letters of adapter file to type file, path {delivered}" in plan.stdout
    assert delivered.read_text() == before
    one = run("replay", "--adapter", "file", "--limit", "1")
    assert (one.exit_code, one.stdout) == (0, "1 delivered, 0 superseded, 0 refused again\n"), one.stderr
    rest = run("replay", "--adapter", "file", "--json")
    assert json.loads(rest.stdout)["delivered"] == 1
    assert delivered.read_text() == before + "".join(f"{letter(number).event}\n" for number in (1, 2))
    now = json.loads((state.acks / "file.json").read_text())
    assert now["position"] == json.loads(ack)["position"] and now["detail"]["size"] == delivered.stat().st_size
    assert run("replay", "--adapter", "file").stdout == "0 delivered, 0 superseded, 0 refused again\n"
    assert [one.outcome for one in store.find(Query(PIPELINE))] == ["delivered", "delivered", None]
    foreign = run("replay", "--id", next(store.find(Query("another/slot"))).id)
    assert "belongs to another pipeline, another/slot" in foreign.stderr and foreign.stdout.startswith("0 delivered")
    again = run("replay", "--id", letter(1).id)
    assert "not delivered again" in again.stderr and again.stdout.startswith("0 delivered")


def test_flag_of_the_adapter_names_another_target_and_its_own_is_left_alone(
    run: Run, store: FileDeadLetters, delivered: Path, state: StateDir, tmp_path: Path
) -> None:
    before, ack = delivered.read_text(), (state.acks / "file.json").read_text()
    other = tmp_path / "repaired.jsonl"
    lock = Lock(state.run_lock)
    assert lock.acquire() is not None  # a run goes on meanwhile
    result = run("replay", "--adapter", "file", "--file-path", str(other))
    lock.release()
    assert result.exit_code == 0, result.stderr
    assert other.read_text() == "".join(f"{letter(number).event}\n" for number in (1, 2))
    assert (delivered.read_text(), (state.acks / "file.json").read_text()) == (before, ack)


def test_replay_says_what_it_cannot_do(run: Run, store: FileDeadLetters, delivered: Path, state: StateDir) -> None:
    unknown = run("replay", "--adapter", "webhook", "--config", "pgcdc.yaml")
    assert unknown.exit_code == 2 and "webhook" in unknown.stderr
    (state.acks / "file.json").unlink()
    new = run("replay", "--adapter", "file")
    assert new.exit_code == 2 and "has not delivered anything" in new.stderr
    assert [one.outcome for one in store.find(Query(PIPELINE))] == [None] * 3


def test_target_that_is_gone_leaves_letters_as_they_are(run: Run, store: FileDeadLetters, delivered: Path) -> None:
    delivered.unlink()
    result = run("replay", "--adapter", "file")
    assert result.exit_code == 1 and "is missing" in result.stderr
    assert [one.outcome for one in store.find(Query(PIPELINE))] == [None] * 3


def test_another_path_without_a_configuration_does_not_take_the_place_of_the_first(
    run: Run, store: FileDeadLetters, delivered: Path, state: StateDir
) -> None:
    Path("pgcdc.yaml").unlink()
    ack = (state.acks / "file.json").read_text()
    result = run("replay", "--adapter", "file", "--file-path", "other.jsonl")
    assert result.exit_code == 2 and "has delivered to another target" in result.stderr
    assert (state.acks / "file.json").read_text() == ack and not Path("other.jsonl").exists()
    assert run("replay", "--adapter", "file", "--file-path", str(delivered)).stdout.startswith("2 delivered")


def test_plan_shows_no_secret(run: Run, store: FileDeadLetters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCDC_WEBHOOK_SIGNING_KEY", "geheim-key")
    plan = run("replay", "--adapter", "webhook", "--dry-run", "--webhook-url", "https://example.com/a?x=geheim-query")
    assert (
        "would deliver 1 dead letter of adapter webhook to type webhook, url https://example.com/a?***" in plan.stdout
    )
    assert "geheim" not in plan.output + plan.stderr


@pytest.mark.parametrize("command", [["purge", "--everything", "--yes"], ["replay"]])
def test_letters_are_not_touched_if_nobody_knows_whose_they_are(
    run: Run, store: FileDeadLetters, command: list[str]
) -> None:
    where = ["--dlq-file", str(store.path), "--state-dir", "nowhere"]
    result = run(*command, *where)
    assert result.exit_code == 2 and "the owner of the dead letters is unknown" in result.stderr
    assert len(list(store.find(Query(is_waiting=True)))) == 4
    assert len(ids(run("list", "--json", *where))) == 4
    assert run("purge", "--id", letter(1).id, "--yes", *where).stdout == "1 dead letter deleted\n"


# --- which store


def test_store_is_that_of_the_last_run_if_nobody_says_another(run: Run, state: StateDir, tmp_path: Path) -> None:
    other = FileDeadLetters(tmp_path / "other.jsonl")
    other.record([letter(9)])
    write_json(state.run_status, {"dlq": "file", "dlq_file": str(other.path), "dlq_table": "x"})
    assert ids(run("list", "--json")) == at(9)
    assert ids(run("list", "--json", "--dlq", "file")) == []
    assert ids(run("list", "--json", "--dlq-file", str(other.path))) == at(9)
    write_json(state.run_status, {"dlq": "pg_table", "dlq_file": None, "dlq_table": "x"})
    gone = run("list")
    assert gone.exit_code == 2 and "no database is set" in gone.stderr
    write_json(state.run_status, {"dlq": "pg_table", "dlq_file": None, "dlq_table": "x", "dlq_elsewhere": True})
    elsewhere = run("list", "--db", DB)
    assert elsewhere.exit_code == 2 and "database of their own" in elsewhere.stderr
    unreadable = run("list", "--dlq", "stderr")
    assert unreadable.exit_code == 2 and "cannot be read back" in unreadable.stderr


def test_password_of_the_database_is_never_shown(run: Run, state: StateDir) -> None:
    result = run("list", "--dlq-db", DB)
    assert result.exit_code != 0 and "geheim" not in result.output + result.stderr
    loaded = load({"tables": "t", "db": DB, "dlq": "pg_table", "dlq_db": DB}, {}, None)
    assert "geheim" not in show_yaml(loaded)
    Path("pgcdc.yaml").write_text(yaml.safe_dump({"dlq": "pg_table", "dlq_db": DB}))
    with pytest.raises(ConfigError, match="this file contains the password") as caught:
        load({}, {}, None)
    assert "geheim" not in str(caught.value) and "dlq_db_file" in caught.value.advice
    Path("secret").write_text(DB + "\n")
    Path("pgcdc.yaml").write_text(yaml.safe_dump({"dlq": "pg_table", "dlq_db_file": "secret"}))
    loaded = load({}, {}, None)
    assert loaded.config.dlq_db == DB and "geheim" not in show_yaml(loaded)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dlq": "fil"}, "dlq"),
        ({"dlq_file": "x", "dlq": "pg_table"}, "--dlq-file needs --dlq file"),
        ({"dlq_db": DB}, "--dlq-db needs --dlq pg_table"),
        ({"dlq_table": "x"}, "--dlq-table needs --dlq pg_table"),
        ({"dlq": "pg_table", "dlq_table": "t"}, "each one would become an event"),
        ({"dlq": "pg_table", "dlq_table": "x", "tables": (), "all_tables": True}, "begin with pgcdc_"),
        ({"dlq": "pg_table", "dlq_db": DB, "dlq_db_file": "x"}, "dlq_db and dlq_db_file cannot be combined"),
        ({"stdout_on_exhausted": "drop"}, "stdout_on_exhausted"),
    ],
)
def test_settings_that_cannot_be_are_named(state: StateDir, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"tables": "t", "db": DB, **settings}, {}, None).check()
    assert said in str(caught.value) and "geheim" not in str(caught.value)


def test_settings_that_can_be_are_taken(state: StateDir) -> None:
    for settings in (
        {},
        {"dlq": "none"},
        {"dlq": "pg_table", "dlq_db": "postgresql://other/x", "dlq_table": "x", "tables": (), "all_tables": True},
        {"dlq": "file", "dlq_file": "x.jsonl", "stdout_on_exhausted": "dead_letter", "stdout_dead_letter_limit": 0},
    ):
        load({"tables": "t", "db": DB, **settings}, {}, None).check()
    assert set(json_schema()["properties"]) >= {"dlq", "dlq_db", "dlq_file", "dlq_table", "file_on_exhausted"}


def test_validate_finds_a_store_that_cannot_be_written(state: StateDir) -> None:
    Path("a_folder").mkdir()
    good = CliRunner().invoke(app, ["validate", "--json", "--db", DB, "--tables", "t"])
    bad = CliRunner().invoke(app, ["validate", "--json", "--db", DB, "--tables", "t", "--dlq-file", "a_folder"])
    table = CliRunner().invoke(app, ["validate", "--json", "--db", DB, "--tables", "t", "--dlq", "pg_table"])

    def look(text: str) -> tuple[str, str]:
        return next(
            (one["status"], one["detail"]) for one in json.loads(text)["checks"] if one["name"] == "dead letters"
        )

    assert look(good.stdout) == ("ok", f"go to {state.letters_file}")
    assert look(bad.stdout)[0] == "failed" and "a_folder" in look(bad.stdout)[1]
    assert look(table.stdout)[0] == "failed" and "geheim" not in table.stdout


def test_options_are_described_without_secrets_and_without_defaults() -> None:
    hook = adapters.webhook("https://example.com/hook?x=geheim", signing_key="geheim", request_timeout=2.5)
    said = describe_options(hook.options)
    assert "geheim" not in said and ", signing_key ***" in said and ", request_timeout 2.5" in said
    hook = adapters.webhook("https://example.com/hook")
    assert describe_options(hook.options) == ", url https://example.com/hook"
    command = adapters.exec(["cat", "a b"], ack="line")
    assert describe_options(command.options) == ", command cat 'a b', ack line"


def test_validation_describes_an_adapter_without_its_secrets(tmp_path: Path) -> None:
    raw = {"tables": ["t"], "adapters": ["webhook"], "state_dir": tmp_path, "webhook_url": "http://127.0.0.1:1/hook",
           "webhook_signing_key": "geheim", "webhook_allow_private": True}  # fmt: skip
    config = Config.model_validate(raw)
    said = _look_at_adapter(config, config.adapter_specs[0])
    assert "signing_key ***" in said and "geheim" not in said
    assert _try("adapter a", lambda: _fail("adapter a: it is down")).detail == "it is down"


def _fail(message: str) -> str:
    raise SinkError(message)


def test_several_adapters_are_refused_rather_than_all_but_the_last_forgotten(run: Run, store: FileDeadLetters) -> None:
    for command in (["list"], ["replay"], ["purge", "--yes"]):
        result = run(*command, "--adapter", "file", "--adapter", "other")
        assert result.exit_code == 2 and "--adapter can be used only once here" in result.stderr
    assert [one.outcome for one in store.find(Query(PIPELINE))] == [None] * 3
