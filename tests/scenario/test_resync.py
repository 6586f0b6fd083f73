"""`pgcdc resync`: a lost slot, the same sinks, and a crash at every step of it."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import proving
import pytest
from commands import pgcdc
from databases import Database
from listening import wait_until
from proving import LINES, Delivery, Hammer, assert_equal, create_tables, fold

from pgcdc import adapters, transform
from pgcdc.cli.status import read_status
from pgcdc.core.errors import ConfigError, GapError, SinkError, SourceError, StateError
from pgcdc.core.position import Position
from pgcdc.core.state import Lock, StateDir, read_json, write_json
from pgcdc.run.chains import note_targets, why_unreadable
from pgcdc.run.resync import Resync
from pgcdc.sink.file import FileSink
from pgcdc.source.postgres.snapshot.releases import Releases
from pgcdc.source.postgres.snapshot.requests import RequestQueue, RequestState, SnapshotRequest
from pgcdc.transform.specs import Chain

KEYS = {"public.t": ("id",), "public.pair": ("b", "a"), "public.log": ()}
POINTS = ["keys", "noted", "dropped", "emptied", "prepared", "truncated", "kept", "queued", "acked"]
FOLDERS_OF_THE_SLOT = ["typed", "toast"]


@pytest.fixture
def delivery(database: Database, tmp_path: Path) -> Delivery:
    """A pipeline that has delivered something and was stopped."""
    with database.connect() as conn:
        conn.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        conn.execute("CREATE TABLE pair (a int, b text, v text, PRIMARY KEY (b, a))")
        conn.execute("CREATE TABLE log (v text)")
    one = Delivery(database, tmp_path)
    one.begin()
    with database.connect() as conn:
        conn.execute("INSERT INTO t SELECT n, 'x' FROM generate_series(1, 9) n")
        conn.execute("DELETE FROM t WHERE id > 5")
        conn.execute("INSERT INTO pair VALUES (1, 'a', 'x'), (2, 'b', 'x')")
        conn.execute("INSERT INTO log VALUES ('1'), ('2')")
    one.deliver()
    for folder in FOLDERS_OF_THE_SLOT:
        (one.state.path / folder).mkdir(exist_ok=True)
        (one.state.path / folder / "old").touch()
    (one.state.checkpoints / "main").mkdir()
    RequestQueue(one.state.snapshot / "requests.json").add(SnapshotRequest("old", "t"))
    return one


def lose_slot(database: Database) -> None:
    slot = [f"s_{database.name}"]
    free = "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND NOT active"
    wait_until(lambda: bool(database.query(free, slot)), 10, "the walsender has ended")
    database.execute("SELECT pg_drop_replication_slot(%s)", slot)
    database.execute("DELETE FROM t WHERE id = 1")
    database.execute("INSERT INTO t VALUES (7, 'new')")
    database.execute("DELETE FROM pair WHERE a = 2")


def resync(one: Delivery, **more: Any) -> list[str]:
    """What it said it would do; it was done."""
    said: list[str] = []
    with Resync(one.database.url, one.state.path, say=said.append, **more) as work:
        said += work.plan()
        work.run()
    return said


def run_command(one: Delivery, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return pgcdc(
        "resync", "--state-dir", str(one.state.path), *flags, env={"PGCDC_DB": one.database.url, **environment}
    )


def vanished(one: Delivery) -> dict[str, list[list[str]]]:
    """The candidate keys of all requests."""
    found = {}
    for state in RequestQueue(one.state.snapshot / "requests.json").entries():
        if state.request.kind == "vanished":
            assert state.status == "queued" and state.request.table not in found
            lines = Path(state.request.keys_file).read_text().splitlines()
            found[state.request.table] = [json.loads(line) for line in lines]
    return found


def check_begun_anew(one: Delivery, size: int) -> None:
    """As a resync must leave it, whatever happened on the way: a new slot that nobody has read."""
    identity = one.state.identity()
    assert identity is not None
    slots = one.database.query("SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots")
    assert [int(lsn) for (lsn,) in slots] == [identity.created]
    ack = read_json(one.state.acks / "file.json")
    detail = ack.pop("detail")
    assert (detail["path"], detail["size"]) == (str(one.output), size)
    assert ack == {"position": str(Position.end(identity.created)), "is_rewound": True}
    assert read_json(one.state.consumers_file) == {
        "confirmed_lsn": identity.created,
        "floor": str(Position.at(0, 0)),
        "consumers": {},
    }
    assert vanished(one) == {"t": [["1"], ["2"], ["3"], ["4"], ["5"]], "pair": [["a", "1"], ["b", "2"]]}
    assert [
        state.id for state in RequestQueue(one.state.snapshot / "requests.json").entries() if state.id == "old"
    ] == []
    releases = Releases(one.state.snapshot, Position.end(identity.created)).after(Position.at(0, 0))
    assert [(release.relation or {})["name"] for release in releases] == ["log"]
    left = {path.name for path in one.state.path.iterdir()}
    assert not left & {*FOLDERS_OF_THE_SLOT, "shapes.jsonl", "resync", "resync.json"}
    assert list(one.state.checkpoints.iterdir()) == []


def test_a_lost_slot_is_begun_anew_with_the_same_file(delivery: Delivery, database: Database) -> None:
    lose_slot(database)
    size = delivery.output.stat().st_size
    with open(delivery.output, "a") as file:
        file.write('{"half a batch that was never acknowledged')
    said = "\n".join(resync(delivery))
    assert "no longer exists" in said and "table log has no key: a TRUNCATE" in said
    assert "no longer captured" not in said
    check_begun_anew(delivery, size)
    database.execute("INSERT INTO t VALUES (8, 'streamed')")
    database.execute("INSERT INTO log VALUES ('3')")
    delivery.forget()
    before = len(delivery.events())
    delivery.deliver()
    operations = [(event["operation"], event["payload"]["table"]) for event in delivery.events()[before:]]
    assert operations[0] == ("TRUNCATE", "log")
    assert [one for one in operations if one[0] == "INSERT"] == [("INSERT", "t"), ("INSERT", "log")]
    positions = [event["position"] for event in delivery.events()]
    assert positions == sorted(set(positions))
    assert ("2",) in fold(delivery.events(), KEYS, complete=False, resynced=True)["public.t"]


@pytest.fixture
def rotating(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Files that are delivered to rotate."""
    given: dict[str, Any] = {"max_bytes": 800, "compression": "zstd"}
    monkeypatch.setattr(proving, "FileSink", lambda path: FileSink(path, **given))
    return given


def test_keys_are_read_from_rotated_files(rotating: dict[str, Any], delivery: Delivery, database: Database) -> None:
    assert len(list(delivery.output.parent.glob("events.jsonl.*.zst"))) > 3
    lose_slot(database)
    said = "\n".join(resync(delivery))
    assert "rows that the source no longer has are deleted" in said
    assert vanished(delivery) == {"t": [["1"], ["2"], ["3"], ["4"], ["5"]], "pair": [["a", "1"], ["b", "2"]]}


@pytest.mark.slow
def test_files_that_were_removed_are_not_taken_for_rows_that_never_were(
    rotating: dict[str, Any], delivery: Delivery, database: Database
) -> None:
    rotating["max_files"] = 1
    database.execute("INSERT INTO t SELECT n, 'x' FROM generate_series(20, 30) n")
    delivery.deliver()
    lose_slot(database)
    said = "\n".join(resync(delivery))
    assert "files that were removed (max_files) cannot be read back" in said
    assert vanished(delivery) == {}


def test_the_file_is_brought_back_to_the_source_while_writers_are_at_work(database: Database, tmp_path: Path) -> None:
    with database.connect() as conn:
        create_tables(conn, rows=0, wide=0)
    one = Delivery(database, tmp_path)
    one.begin()
    with Hammer(database.url, 11, rows=400, wide=20, pause_s=0.005) as hammer:
        wait_until(lambda: hammer.commits > 500, 60, "rows")
        one.deliver()
        database.execute("SELECT pg_drop_replication_slot(%s)", [f"s_{database.name}"])
        database.execute("DELETE FROM one")
        database.execute("DELETE FROM pair WHERE number % 2 = 0")
        commits = hammer.commits
        wait_until(lambda: hammer.commits > commits + 100, 60, "changes that nobody will ever see")
        resync(one)
        one.forget()
        one.deliver(lambda: all(state.is_ended for state in requests(one)))
    assert {state.status for state in requests(one)} == {"done"} and hammer.rollbacks > 0
    one.deliver()
    assert_equal(database.url, one.events(), resynced=True)
    with pytest.raises(AssertionError, match="only in the output"):  # the deletes of what vanished are needed
        kept = [event for event in one.events() if event["operation"] != "DELETE" or not is_snapshot(event)]
        assert_equal(database.url, kept, resynced=True)


def requests(one: Delivery) -> list[RequestState]:
    return RequestQueue(one.state.snapshot / "requests.json").entries()


def is_snapshot(event: dict[str, Any]) -> bool:
    return Position.parse(event["position"]).is_snapshot


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_crash_at_any_step_is_finished_by_another_resync(delivery: Delivery, database: Database, point: str) -> None:
    lose_slot(database)
    size = delivery.output.stat().st_size
    killed = run_command(delivery, "--yes", PGCDC_FAILPOINTS=f"resync.{point}=kill")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    delivery.forget()
    if point != "keys":
        with pytest.raises(StateError, match=r"resync .* is unfinished"):
            delivery.load(LINES)
    resync(delivery)
    check_begun_anew(delivery, size)


@pytest.mark.slow
def test_kills_at_one_step_after_the_other_end_well(delivery: Delivery, database: Database) -> None:
    lose_slot(database)
    size = delivery.output.stat().st_size
    for point in POINTS:
        killed = run_command(delivery, "--yes", PGCDC_FAILPOINTS=f"resync.{point}=kill")
        assert killed.returncode == -signal.SIGKILL, (point, killed.stderr)
    done = run_command(delivery)  # what was confirmed once is not asked again
    assert done.returncode == 0 and "resuming the unfinished resync" in done.stderr and "pgcdc: done" in done.stderr
    check_begun_anew(delivery, size)


def test_a_slot_that_was_moved_is_lost_one_that_works_is_not_and_another_server_needs_to_be_meant(
    delivery: Delivery, database: Database
) -> None:
    with pytest.raises(ConfigError, match="no changes are lost"):
        resync(delivery)
    refused = run_command(delivery, "--new-slot")
    assert refused.returncode == 2 and "nothing was changed: a resync needs confirmation" in refused.stderr
    assert (
        "will be dropped; changes that only it holds are lost" in refused.stderr and "is dropped" not in refused.stderr
    )
    assert database.query("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", [f"s_{database.name}"])
    old = delivery.state.identity()
    database.execute("INSERT INTO t VALUES (8, 'never delivered')")
    database.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_insert_lsn())", [f"s_{database.name}"])
    said = "\n".join(resync(delivery))
    assert "the slot was recreated, or somebody else advanced it" in said and "will be dropped" in said
    new = delivery.state.identity()
    assert old is not None and new is not None and new.created > old.created
    assert "will be replaced, as requested" in "\n".join(resync(delivery, new_slot=True))

    raw = read_json(delivery.state.identity_file)
    later = {**raw["details"], "timeline": raw["details"]["timeline"] + 1}
    write_json(delivery.state.identity_file, {**raw, "details": later})
    with pytest.raises(GapError, match=r"timeline.*add --new-slot"):
        resync(delivery)
    said = "\n".join(resync(delivery, new_slot=True))
    assert "may be smaller than earlier ones" in said
    identity = delivery.state.identity()
    assert identity is not None and identity.details["timeline"] == raw["details"]["timeline"]


def test_a_running_pipeline_is_left_alone(delivery: Delivery, database: Database) -> None:
    delivery.load(LINES)
    delivery.reader.prepareForTriggerAvailableNow()
    try:
        refused = run_command(delivery, "--new-slot", "--yes")
        assert refused.returncode == 2 and "runs (process" in refused.stderr and "Stop it first" in refused.stderr
        assert delivery.reader is not None and Lock.holder(delivery.state.capture_lock) is not None
    finally:
        delivery.end()


def test_a_table_is_read_again_through_the_slot_that_works(delivery: Delivery, database: Database) -> None:
    before = delivery.state.identity()
    RequestQueue(delivery.state.snapshot / "requests.json").stop("old")
    said = "\n".join(resync(delivery, read_again=("t", "public.t")))
    assert "table t is read again" in said and "cannot be read back" not in said
    assert delivery.state.identity() == before
    assert vanished(delivery) == {"t": [["1"], ["2"], ["3"], ["4"], ["5"]]}
    asked = RequestQueue(delivery.state.snapshot / "requests.json").entries()[1:]
    assert [(one.request.kind, one.request.table) for one in asked] == [("incremental", "t"), ("vanished", "t")]
    assert not delivery.state.resync.exists()
    for table, message in (("nobody", "is not captured"), ("log", "has no key")):
        with pytest.raises(ConfigError, match=message):
            resync(delivery, read_again=(table,))
    with pytest.raises(ConfigError, match="Remove the other flags"):
        resync(delivery, read_again=("t",), new_slot=True)
    lose_slot(database)
    with pytest.raises(GapError, match="Repair all tables"):
        resync(delivery, read_again=("t",))


def test_what_is_wrong_is_refused_before_anything_is_thrown_away(delivery: Delivery, database: Database) -> None:
    lose_slot(database)
    before = set(delivery.state.path.rglob("*"))
    whole = delivery.output.read_bytes()
    delivery.output.write_bytes(b"nothing\n" + whole)
    with pytest.raises(SinkError, match="line 1 differs from what was written"):
        resync(delivery)
    delivery.output.unlink()
    with pytest.raises(SinkError, match="is missing"):
        resync(delivery)
    delivery.output.write_bytes(whole)
    assert not delivery.state.resync_note.exists()
    left = set(delivery.state.path.rglob("*"))
    assert left >= before and {path.name for path in left - before} <= {"run.lock", "resync"}
    with (
        pytest.raises(StateError, match="not a state directory"),
        Resync("", delivery.output.parent / "x"),
    ):
        pass


def test_truncate_instead_of_keys(delivery: Delivery, database: Database) -> None:
    lose_slot(database)
    resync(delivery, truncate=True)
    assert vanished(delivery) == {}
    database.execute("INSERT INTO pair VALUES (9, 'z', 'streamed')")
    delivery.forget()
    before = len(delivery.events())
    delivery.deliver()
    events = delivery.events()[before:]
    truncated = [event["payload"]["table"] for event in events if event["operation"] == "TRUNCATE"]
    assert sorted(truncated) == ["log", "pair", "t"]
    assert events[-1]["operation"] == "INSERT" and events[-1]["payload"]["table"] == "pair"
    assert ("9",) not in fold(delivery.events(), KEYS)["public.t"]


def test_a_table_that_is_gone_must_be_left_out_by_name(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    database.execute("CREATE TABLE b (id int PRIMARY KEY)")
    one = Delivery(database, tmp_path, tables="a,b")
    one.begin()
    database.execute("SELECT pg_drop_replication_slot(%s)", [f"s_{database.name}"])
    database.execute("DROP TABLE b")
    with pytest.raises(ConfigError, match="table b no longer exists"):
        resync(one)
    database.execute("CREATE TABLE b (id int PRIMARY KEY)")
    killed = run_command(one, "--yes", PGCDC_FAILPOINTS="resync.dropped=kill")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    database.execute("DROP TABLE b")
    with pytest.raises(SourceError, match="table b does not exist"):
        resync(one)
    with pytest.raises(StateError, match=r"resync .* is unfinished"):
        read_status(one.state.path)
    resync(one, tables=("a",))
    identity = one.state.identity()
    assert identity is not None and identity.details["asked"]["tables"] == ["a"]


CHANGING = (
    (transform.rename_fields(a="first"), "transforms change the key (a)"),
    (transform.debezium_envelope(), "lines that the transform debezium has made"),
    (transform.mask("id", mode="hash", key="0123456789abcdef"), "transforms change the key (id)"),
)


def test_lines_whose_keys_transforms_have_changed_are_not_read_back(delivery: Delivery, database: Database) -> None:
    spec, state = adapters.file(delivery.output), delivery.state
    for one, reason in CHANGING:
        state.targets_file.unlink(missing_ok=True)
        note_targets(state, [(spec, Chain((one,)))])
        note_targets(state, [(spec, Chain())])  # what was written so stays so
        with Resync(database.url, delivery.state.path, read_again=("t",)) as work:
            said = "\n".join(work.plan())
        assert reason in said and "cannot be read back: deletes of removed rows are not sent" in said
    lose_slot(database)
    said = "\n".join(resync(delivery))
    assert f"{reason} cannot be read back: deletes of removed rows are not sent" in said
    assert vanished(delivery) == {}


def test_lines_in_which_transforms_leave_the_keys_are_read_back(delivery: Delivery, database: Database) -> None:
    chain = Chain((transform.mask("v"), transform.filter(operations=["INSERT", "DELETE"])), ("*",))
    note_targets(delivery.state, [(adapters.file(delivery.output), chain)])
    note_targets(delivery.state, [(adapters.noop(), Chain((transform.drop_columns("id"),)))])
    lose_slot(database)
    assert "are deleted by events" in "\n".join(resync(delivery))
    assert set(vanished(delivery)) == {"t", "pair"}


def test_lines_of_another_form_are_not_read_back(delivery: Delivery, database: Database) -> None:
    lose_slot(database)
    whole = delivery.output.read_bytes()
    line = b'{"before":null,"after":{"id":1},"op":"c"}\n'
    delivery.output.write_bytes(whole[: whole.index(b"\n") + 1] + line + whole)
    with pytest.raises(SinkError, match=r"line 2 differs from what was written.*use --truncate"):
        resync(delivery)
    delivery.output.write_bytes(line + whole)
    assert "lines in another form cannot be read back" in "\n".join(resync(delivery))
    assert vanished(delivery) == {}


def test_transforms_are_remembered_until_the_target_is_another(tmp_path: Path) -> None:
    state, spec = StateDir(tmp_path), adapters.file(tmp_path / "a")
    note_targets(state, [(spec, Chain((transform.sql(a="1"),))), (adapters.noop(), Chain((transform.mask("b"),)))])
    note_targets(state, [(spec, Chain((transform.python(lambda event: event),)))])
    assert why_unreadable(state, "file", ["a"]) == "lines that the transform python has made"
    note_targets(state, [(adapters.file(tmp_path / "b"), Chain())])
    assert why_unreadable(state, "file", ["a"]) == ""
    assert why_unreadable(state, "noop", ["b"]) == "lines in which transforms change the key (b)"
