"""`Capture.messages()` on a real server."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from listening import wait_until
from streams import SETTINGS, Stream, new_stream

import pgcdc
from pgcdc.messages import UNCHANGED, Change, Commit, Message, Sentinel
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.postgres.lsn import parse_lsn


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres.temporary(settings=SETTINGS) as server:
        yield server


@pytest.fixture
def stream(server: EmbeddedPostgres) -> Iterator[Stream]:
    with new_stream(server) as stream:
        yield stream


def confirmed(stream: Stream, slot: str) -> int:
    ((lsn,),) = stream.query(f"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{slot}'")
    return parse_lsn(lsn)


def test_everything_comes_in_order_and_a_commit_can_be_confirmed(stream: Stream) -> None:
    stream.execute(
        "CREATE TABLE notes (id int PRIMARY KEY, n int, body text)",
        "ALTER TABLE notes ALTER body SET STORAGE EXTERNAL",
        "CREATE PUBLICATION p FOR TABLE notes",
    )
    slot = stream.slot()
    stream.execute(
        "INSERT INTO notes VALUES (1, 1, repeat('x', 9000)), (2, NULL, '')",
        "BEGIN; UPDATE notes SET n = 2 WHERE id = 1; UPDATE notes SET id = 3 WHERE id = 2; COMMIT",
        "SELECT pg_logical_emit_message(true, 'pgcdc.sentinel', '5f0c')",
        "ALTER TABLE notes ADD COLUMN late bool",
        "BEGIN; DELETE FROM notes WHERE id = 3; INSERT INTO notes VALUES (4, 4, '', true); TRUNCATE notes; COMMIT",
    )
    found: list[Message] = []
    with pgcdc.open_capture(stream.url, slot=slot, publication="p", messages=True) as capture:
        for message in capture.messages(timeout_s=2.0):
            found.append(message)
            if isinstance(message, Commit):
                capture.send_feedback(message.lsn)
    kinds = [one.kind for one in found]
    assert kinds == [
        *("begin", "relation", "change", "change", "commit"),
        *("begin", "change", "change", "commit"),
        *("begin", "sentinel", "commit"),
        *("begin", "relation", "change", "change", "change", "commit"),
    ]
    changes = [one for one in found if isinstance(one, Change)]
    assert [(one.op, one.new, one.old) for one in changes] == [
        ("INSERT", {"id": "1", "n": "1", "body": "x" * 9000}, None),
        ("INSERT", {"id": "2", "n": None, "body": ""}, None),
        ("UPDATE", {"id": "1", "n": "2", "body": UNCHANGED}, None),
        ("UPDATE", {"id": "3", "n": None, "body": ""}, {"id": "2"}),
        ("DELETE", None, {"id": "3"}),
        ("INSERT", {"id": "4", "n": "4", "body": "", "late": "t"}, None),
        ("TRUNCATE", None, None),
    ]
    assert [one.id for one in found if isinstance(one, Sentinel)] == ["5f0c"]
    places = [(one.lsn, one.number) for one in changes]
    assert places == sorted(set(places)) and {one.origin for one in found} == {""}
    assert all(one.time and abs(one.time - datetime.now(UTC)) < timedelta(minutes=5) for one in found)
    assert confirmed(stream, slot) >= found[-1].lsn
    with pgcdc.open_capture(stream.url, slot=slot, publication="p") as capture:
        assert list(capture.messages(timeout_s=1.0)) == []


def test_progress_of_an_idle_server_is_confirmed_only_when_everything_before_is(stream: Stream) -> None:
    stream.execute("CREATE TABLE t (id int)", "CREATE TABLE other (id int)", "CREATE PUBLICATION p FOR TABLE t")
    slot = stream.slot()
    stream.execute("INSERT INTO t VALUES (1)")
    with pgcdc.open_capture(stream.url, slot=slot, publication="p") as capture:
        messages = capture.messages(timeout_s=1.0)
        lsn = [next(messages) for _ in range(4)][-1].lsn
        for is_safe in (False, True):
            if is_safe:
                capture.send_feedback(lsn)
            stream.execute("INSERT INTO other VALUES (1)")
            ((end,),) = stream.query("SELECT pg_current_wal_flush_lsn()")
            capture.target_lsn = parse_lsn(end)
            capture.ask_for_progress()
            assert list(messages) == []
            messages = capture.messages(timeout_s=1.0)
            if is_safe:
                wait_until(lambda: confirmed(stream, slot) > lsn, 5, "the slot follows the idle server")
            else:
                assert capture.handed_out_lsn > lsn > confirmed(stream, slot)


def test_the_example_of_the_page_runs(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "capture.md").read_text()
    example = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1].replace(
        "timeout_s=30", "timeout_s=3"
    )
    stream.execute("CREATE TABLE orders (id int PRIMARY KEY)", "CREATE PUBLICATION trial FOR TABLE orders")
    monkeypatch.setenv("PGCDC_DB", stream.url)
    writer = threading.Timer(1.5, stream.execute, ["INSERT INTO orders VALUES (7)"])
    writer.start()
    exec(compile(example, "capture.md", "exec"), {})
    writer.join()
    assert capsys.readouterr().out == "orders has id\nINSERT orders {'id': '7'}\n"
