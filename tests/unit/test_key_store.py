"""What a sink has, folded to keys: the candidates of rows that vanished."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from pgcdc.core.errors import SinkError
from pgcdc.core.position import Position
from pgcdc.core.state import Identity, StateDir
from pgcdc.run.resync import Resync
from pgcdc.sink import line_files
from pgcdc.sink.contract import Progress
from pgcdc.sink.file import FileSink
from pgcdc.sink.line_files import KeyStore, TableName

T = ("public", "t")
TABLES = {T: ("id",), ("sales", "pair"): ("b", "a"), ("public", "x.y"): ("id",), ("x", "y"): ("id",)}


def event(
    operation: str, row: dict[str, Any] | None, old: dict[str, Any] | None = None, channel: str = "pgcdc:t", **more: Any
) -> dict[str, Any]:
    table = more.pop("table", channel.removeprefix("pgcdc:").rpartition(".")[2])
    payload = {"op": operation, "table": table, "row": row, "old": old, **more}
    return {"channel": channel, "operation": operation, "payload": payload}


def keys(folder: Path, events: list[dict[str, Any]], table: TableName = T) -> list[Any]:
    with KeyStore(folder / "k.sqlite", TABLES) as store:
        for one in events:
            store.apply(one)
        count = store.write_keys(table, folder / "keys.jsonl")
    found = [json.loads(line) for line in (folder / "keys.jsonl").read_text().splitlines()]
    assert count == len(found)
    assert sorted(path.name for path in folder.iterdir()) == ["keys.jsonl"]
    return found


@pytest.mark.parametrize("buffered", [1, 3, 100_000])
def test_puts_deletes_and_moved_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffered: int) -> None:
    monkeypatch.setattr(line_files, "BUFFERED_KEYS", buffered)
    events = [
        event("INSERT", {"id": "1"}),
        event("SNAPSHOT", {"id": "2"}),
        event("UPDATE", {"id": "3"}),  # not known before: the stream began behind its insert
        event("INSERT", {"id": "4"}),
        event("DELETE", {"id": "4"}),
        event("INSERT", {"id": "4"}),
        event("DELETE", {"id": "1"}),
        event("UPDATE", {"id": "5"}, {"id": "2"}),
        event("UPDATE", {"id": "4", "v": "y"}, {"id": "4", "v": "x"}),
        event("MESSAGE", {"id": "9"}),
    ]
    assert keys(tmp_path, events) == [["3"], ["4"], ["5"]]


def test_truncate_clears_its_table_only(tmp_path: Path) -> None:
    other = event("INSERT", {"a": "1", "b": "x", "c": None}, channel="pgcdc:sales.pair")
    events = [event("INSERT", {"id": "1"}), other, event("TRUNCATE", None), event("INSERT", {"id": "2"})]
    assert keys(tmp_path, events) == [["2"]]
    assert keys(tmp_path, events, ("sales", "pair")) == [["x", "1"]]


def test_a_key_that_was_not_sent_again_is_the_old_one(tmp_path: Path) -> None:
    unchanged = event("UPDATE", {"v": "1"}, {"id": "long"}, _unchanged_toast_columns=["id"])
    assert keys(tmp_path, [event("INSERT", {"id": "long"}), unchanged]) == [["long"]]


def test_tables_whose_channels_are_the_same_are_told_apart(tmp_path: Path) -> None:
    events = [event("INSERT", {"id": "1"}, channel="pgcdc:x.y", table="x.y")]
    assert keys(tmp_path, events, ("x", "y")) == []
    assert keys(tmp_path, events, ("public", "x.y")) == [["1"]]
    other = [event("INSERT", {"id": "2"}, channel="pgcdc:x.y", table="y")]
    assert keys(tmp_path, other, ("public", "x.y")) == [] and keys(tmp_path, other, ("x", "y")) == [["2"]]


def test_rows_without_a_key_that_can_be_looked_for_are_counted(tmp_path: Path) -> None:
    with KeyStore(tmp_path / "k", TABLES) as store:
        for row in ({"nr": "1"}, {"id": "base64:/w=="}, {"id": "a\ufffd"}, {"id": "1"}):
            store.apply(event("INSERT", row))
        store.apply(event("INSERT", {"id": "1"}, channel="pgcdc:gone"))
        assert store.write_keys(T, tmp_path / "keys") == 1
        assert store.unread == {T: 3} and store.others == {"pgcdc:gone"}


def make_sink(folder: Path, text: str, size: int | None = None) -> FileSink:
    (folder / "events.jsonl").write_text(text)
    Progress(folder, "file").save(
        Position.end(8), {"path": str(folder / "events.jsonl"), "size": len(text) if size is None else size}
    )
    sink = FileSink(folder / "events.jsonl")
    sink.bind(Progress(folder, "file"))
    return sink


def test_the_file_is_read_up_to_its_ack(tmp_path: Path) -> None:
    acked = json.dumps(event("INSERT", {"id": "1"})) + "\n"
    sink = make_sink(tmp_path, acked + json.dumps(event("INSERT", {"id": "2"})), len(acked))
    with KeyStore(tmp_path / "k", TABLES) as store:
        sink.read_events(store)
        store.write_keys(T, tmp_path / "keys")
    assert (tmp_path / "keys").read_text() == '["1"]\n'


@pytest.mark.parametrize("text", ["nothing\n", '{"a": 1}\n', '{"_op": "INSERT", "id": 1}\n', "[]\n", '{"operation"'])
def test_a_file_that_is_not_one_of_events_is_refused(tmp_path: Path, text: str) -> None:
    with KeyStore(tmp_path / "k", TABLES) as store, pytest.raises(SinkError, match=r"events\.jsonl, line 1"):
        make_sink(tmp_path, text).read_events(store)


def test_a_file_that_is_gone_or_shorter_is_refused(tmp_path: Path) -> None:
    sink = make_sink(tmp_path, "", 10)
    with KeyStore(tmp_path / "k", TABLES) as store:
        with pytest.raises(SinkError, match="has 0 bytes, but 10 were written"):
            sink.read_events(store)
        (tmp_path / "events.jsonl").unlink()
        with pytest.raises(SinkError, match="is missing"):
            sink.read_events(store)


def test_memory_is_that_of_the_buffer_whatever_the_number_of_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_files, "BUFFERED_KEYS", 10_000)
    with KeyStore(tmp_path / "k", TABLES) as store:
        tracemalloc.start()
        try:
            for number in range(50_000):
                store.apply(event("INSERT", {"id": str(number)}))
            assert tracemalloc.get_traced_memory()[1] < 6 << 20
        finally:
            tracemalloc.stop()
        assert store.write_keys(T, tmp_path / "keys") == 50_000


def test_a_resync_names_every_target_that_it_cannot_read_back(tmp_path: Path) -> None:
    state_dir = StateDir(tmp_path)
    state_dir.save_identity(Identity("postgres", "7", "shop", "slot", "x", 100))
    state_dir.acks.mkdir()
    details: dict[str, dict[str, Any]] = {
        "exec": {"type": "exec"}, "file": {"path": "/out", "size": 0}, "hook": {}, "redis": {}, "stdout": {},
        "warehouse": {"target": ["db"]},
    }  # fmt: skip
    for name, detail in details.items():
        Progress(state_dir.acks, name).save(Position.end(100), detail)
    one = Resync("postgresql://nobody@localhost/x", tmp_path)
    assert one._blind() == ["exec", "hook", "redis", "stdout", "warehouse"]
