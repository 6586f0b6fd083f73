"""The adapter redis: both modes, keys, TRUNCATE, refused rows, and what the server says. With a server of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
from targets.base import ONE_TRY
from targets.events import END, START, STREAM, batch, batch_of, event, to_line
from targets.letters import Letters
from targets.redis import RedisServer, RedisTarget

from pgcdc import adapters
from pgcdc.core.errors import ConfigError, SinkError, SinkUnavailable, SourceError
from pgcdc.core.position import Position
from pgcdc.core.relation import Column, Relation
from pgcdc.core.state import StateDir
from pgcdc.run.settings import PipelineSettings, view_source
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import DeliveryOptions, SourceView, check_adapters
from pgcdc.transform.specs import Chain

ONE_MORE = DeliveryOptions(max_retries=1, backoff_base=0.001, backoff_cap=0.002, cb_max_failures=0, timeout=2.0)


class Target(RedisTarget):
    changes: Mapping[str, Any] = {}

    def options(self) -> Mapping[str, Any]:
        return {**super().options(), **self.changes}

    def rows(self) -> dict[str, Any]:
        return {key: json.loads(self.server.client.get(key)) for key in self.server.client.scan_iter("shop:items:*")}

    def opened(self, letters: Letters | None = None) -> Runner:
        made = self.sink(ONE_TRY, dead_letters=letters)
        made.open(START)
        return made


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    made = Target(tmp_path)
    yield made
    made.close()


def change(number: int, key: int, operation: str = "UPDATE", **given: Any) -> str:
    """A change of the row `key`; `given` goes to its payload."""
    made = event(STREAM[number], key=key, operation=operation, text=f"text {number}")
    if operation == "TRUNCATE":
        made["payload"]["row"] = None
    made["payload"] |= given
    return to_line(made)


def large(number: int, key: int) -> str:
    """A change that `opened_small` refuses."""
    return change(number, key, row={"id": str(key), "position": "p", "text": "x" * (1 << 20)})


def opened_small(target: Target, letters: Letters) -> Runner:
    """A sink with one retry, of a server that takes no large rows."""
    target.server.client.config_set("proto-max-bulk-len", 1 << 20)
    made = target.sink(ONE_MORE, dead_letters=letters)
    made.open(START)
    return made


def lose_answer(sink: Runner) -> None:
    """The server does what the next call says, and nobody hears of it."""
    inner: Any = sink.sink
    script = inner._script

    def call(*given: Any) -> None:
        inner._script = script
        script(*given)
        raise redis.ConnectionError("the answer is lost")

    inner._script = call


def write(sink: Runner, numbers: range, *lines: str) -> None:
    start = STREAM[numbers[0] - 1] if numbers[0] else START
    sink.write(batch_of(start, STREAM[numbers[-1]], lines))


def row(number: int, key: int) -> dict[str, str]:
    return {"id": str(key), "position": str(STREAM[number]), "text": f"text {number}"}


def test_value_that_was_not_sent_is_taken_from_the_server_or_named(target: Target) -> None:
    sink = target.opened()
    write(sink, range(1), change(0, 1, "INSERT"))
    lacks: dict[str, Any] = {"row": {"id": "1", "position": "p"}, "_unchanged_toast_columns": ["text"]}
    write(sink, range(1, 2), change(1, 1, **lacks))
    assert target.rows() == {"shop:items:1": {"id": "1", "position": "p", "text": "text 0"}}
    moved = {**lacks, "row": {"id": "2", "position": "q"}, "old": {"id": "1"}}
    write(sink, range(2, 3), change(2, 2, **moved))
    assert target.rows() == {"shop:items:2": {"id": "2", "position": "q", "text": "text 0"}}
    target.server.client.delete("shop:items:2")
    write(sink, range(3, 4), change(3, 2, **{**lacks, "row": {"id": "2", "position": "r"}}))
    assert target.rows() == {"shop:items:2": {"id": "2", "position": "r", "_unchanged_toast_columns": ["text"]}}


def test_truncate_removes_the_keys_of_its_table_alone(target: Target) -> None:
    client, sink = target.server.client, target.opened()
    write(sink, range(3), change(0, 1, "INSERT"), change(1, 2, "INSERT"), change(2, 3, "INSERT"))
    others = ["shop:items2:1", "shop:item", "shop:items", "items:1"]
    for key in others:
        client.set(key, "{}")
    client.rpush("shop:items:queue", "of somebody else")
    write(sink, range(3, 6), change(3, 4, "INSERT"), change(4, 0, "TRUNCATE"), change(5, 5, "INSERT"))
    left = set(client.scan_iter("*", _type="string"))
    assert left == {*others, "shop:items:5"}
    assert client.exists("shop:items:queue")


def test_invalidation_deletes_keys_of_any_type_and_goes_on_with_an_empty_server(target: Target) -> None:
    target.changes = {"mode": "invalidate"}
    client, sink = target.server.client, target.opened()
    for key in range(1, 9):
        client.hset(f"shop:items:{key}", "cached", "1")
    moved = change(3, 5, old={"id": "4"})
    write(sink, range(4), change(0, 1, "INSERT"), change(1, 2), change(2, 3, "DELETE"), moved)
    assert {int(key.rpartition(":")[2]) for key in client.scan_iter("shop:items:*")} == {6, 7, 8}
    write(sink, range(4, 5), change(4, 0, "TRUNCATE"))
    assert not list(client.scan_iter("shop:items:*"))
    client.flushdb()
    sink.close()
    sink = target.opened()
    client.set("shop:items:6", "cached")
    write(sink, range(5, 6), change(5, 6))
    assert not client.exists("shop:items:6")


def test_dead_letter_never_replaces_a_newer_row(target: Target) -> None:
    client, letters = target.server.client, Letters()
    sink = target.opened(letters)
    for key in (1, 2, 3):
        client.rpush(f"shop:items:{key}", "not yours")
    lines = [change(number, key, "INSERT") for number, key in enumerate((1, 2, 3))]
    write(sink, range(3), *lines)
    assert {one.error_kind for one in letters.kept.values()} == {"wrong_type"}
    client.delete("shop:items:1", "shop:items:2", "shop:items:3")
    write(sink, range(3, 5), change(3, 1), change(4, 3, "DELETE"))
    for _ in range(2):  # the second time all are done, with the same outcome
        left_out = sink.redeliver(batch_of(START, STREAM[2], lines))
        assert set(left_out) == {str(STREAM[0]), str(STREAM[2])}
        assert target.rows() == {"shop:items:1": row(3, 1), "shop:items:2": row(1, 2)}


def test_letters_of_a_truncated_table_are_superseded(target: Target) -> None:
    client, letters = target.server.client, Letters()
    sink = target.opened(letters)
    client.rpush("shop:items:1", "not yours")
    line = change(0, 1, "INSERT")
    write(sink, range(1), line)
    client.delete("shop:items:1")
    write(sink, range(1, 2), change(1, 0, "TRUNCATE"))
    assert set(sink.redeliver(batch_of(START, STREAM[0], [line]))) == {str(STREAM[0])}
    assert target.rows() == {}


def test_truncate_behind_a_refused_row_supersedes_its_letter(target: Target) -> None:
    client, letters = target.server.client, Letters()
    sink = target.opened(letters)
    client.rpush("shop:items:1", "not yours")
    line = change(0, 1, "INSERT")
    write(sink, range(2), line, change(1, 0, "TRUNCATE"))
    client.delete("shop:items:1")
    assert set(sink.redeliver(batch_of(START, STREAM[0], [line]))) == {str(STREAM[0])}
    assert target.rows() == {}


def test_old_letter_stays_superseded_when_an_answer_was_lost(target: Target) -> None:
    letters = Letters()
    sink = opened_small(target, letters)
    line = large(0, 7)
    lose_answer(sink)
    write(sink, range(2), line, change(1, 7))
    write(sink, range(2, 3), change(2, 8))
    assert len(letters.kept) == 1
    target.server.client.config_set("proto-max-bulk-len", 512 << 20)
    sink = target.opened()
    assert set(sink.redeliver(batch_of(START, STREAM[0], [line]))) == {str(STREAM[0])}
    assert target.rows() == {"shop:items:7": row(1, 7), "shop:items:8": row(2, 8)}


def test_letter_whose_answer_was_lost_counts_as_delivered(target: Target) -> None:
    letters = Letters()
    target.server.client.rpush("shop:items:1", "not yours")
    sink = opened_small(target, letters)
    lines = [change(0, 1, "INSERT"), change(1, 2, "INSERT")]
    write(sink, range(2), *lines)
    target.server.client.delete("shop:items:1")
    lose_answer(sink)
    left_out = sink.redeliver(batch_of(START, STREAM[1], lines))
    assert set(left_out) == {str(STREAM[1])}, "only what had been delivered before is superseded"
    assert target.rows() == {"shop:items:1": row(0, 1), "shop:items:2": row(1, 2)}


@pytest.mark.parametrize("is_one_batch", [False, True])
def test_value_of_a_refused_row_is_never_taken_from_the_row_before_it(target: Target, is_one_batch: bool) -> None:
    sink = opened_small(target, Letters())
    lacks: dict[str, Any] = {"row": {"id": "7", "position": "p"}, "_unchanged_toast_columns": ["text"]}
    lines = [change(0, 7, "INSERT"), large(1, 7), change(2, 7, **lacks), change(3, 7, **lacks)]
    if is_one_batch:
        write(sink, range(4), *lines)
    else:
        for number, line in enumerate(lines):
            write(sink, range(number, number + 1), line)
    assert target.rows() == {"shop:items:7": {**lacks["row"], "_unchanged_toast_columns": ["text"]}}
    write(sink, range(4, 6), change(4, 7), change(5, 7, **lacks))
    assert target.rows() == {"shop:items:7": {**lacks["row"], "text": "text 4"}}


@pytest.mark.parametrize("is_one_batch", [False, True])
def test_replay_takes_no_value_that_an_earlier_letter_changed(target: Target, is_one_batch: bool) -> None:
    client, sink = target.server.client, target.opened(Letters())
    lacks: dict[str, Any] = {"row": {"id": "1", "position": "p"}, "_unchanged_toast_columns": ["text"]}
    lines = [change(1, 1), change(2, 1, **lacks)]
    write(sink, range(1), change(0, 1, "INSERT"))
    before = client.getdel("shop:items:1")
    client.rpush("shop:items:1", "not yours")
    if is_one_batch:
        write(sink, range(1, 3), *lines)
    else:
        write(sink, range(1, 2), lines[0])
        write(sink, range(2, 3), lines[1])
    client.delete("shop:items:1")
    client.set("shop:items:1", before)
    assert set(sink.redeliver(batch_of(START, STREAM[2], lines))) == {str(STREAM[1])}
    assert target.rows() == {"shop:items:1": {**lacks["row"], "_unchanged_toast_columns": ["text"]}}


def test_row_that_is_too_large_is_a_dead_letter(target: Target) -> None:
    letters = Letters()
    sink = opened_small(target, letters)
    write(sink, range(2), change(0, 1, "INSERT"), large(1, 2))
    assert [one.error_kind for one in letters.kept.values()] == ["too_large"]
    assert target.rows() == {"shop:items:1": row(0, 1)}


def test_row_without_a_key_is_a_dead_letter(target: Target) -> None:
    letters = Letters()
    sink = target.opened(letters)
    write(sink, range(2), change(0, 1, row={"id": None, "position": "p", "text": "x"}), change(1, 2, "INSERT"))
    assert [one.error_kind for one in letters.kept.values()] == ["missing_key"]
    assert target.rows() == {"shop:items:2": row(1, 2)}


def test_writer_with_an_older_token_is_refused_and_writes_nothing(target: Target) -> None:
    first = target.opened()
    write(first, range(1), change(0, 1, "INSERT"))
    second = target.opened()
    with pytest.raises(SinkError, match="another process has written") as caught:
        write(first, range(1, 2), change(1, 2, "INSERT"))
    assert not isinstance(caught.value, SinkUnavailable)
    assert target.rows() == {"shop:items:1": row(0, 1)}
    write(second, range(1, 2), change(1, 2, "INSERT"))
    assert target.rows().keys() == {"shop:items:1", "shop:items:2"}


def test_state_that_was_lost_or_is_older_is_noticed(target: Target) -> None:
    client, sink = target.server.client, target.opened()
    sink.write(batch(START, Position.end(110)))
    (record,) = client.keys("shop::pgcdc:position:*")
    before = client.hgetall(record)
    sink.write(batch(Position.end(110), END))
    sink.close()
    client.hset(record, mapping=before)
    with pytest.raises(SinkError, match="an older state of the target was restored"):
        target.opened()
    client.flushdb()
    with pytest.raises(SinkError, match="has no position"):
        target.opened()


@pytest.mark.parametrize(("name", "value"), [("maxmemory", "1"), ("min-replicas-to-write", "1")])
def test_what_may_pass_is_said_with_advice_and_nothing_is_written_in_part(
    target: Target, name: str, value: str
) -> None:
    client, sink = target.server.client, target.opened()
    write(sink, range(1), change(0, 1, "INSERT"))
    before = client.config_get(name)[name]
    client.config_set(name, value)
    with pytest.raises(SinkUnavailable) as caught:
        write(sink, range(1, 3), change(1, 2, "INSERT"), change(2, 3, "INSERT"))
    assert caught.value.advice
    client.config_set(name, before)
    assert target.rows().keys() == {"shop:items:1"}
    write(sink, range(1, 3), change(1, 2, "INSERT"), change(2, 3, "INSERT"))
    assert len(target.rows()) == 3


def test_user_without_rights_is_refused_before_anything_starts(target: Target) -> None:
    target.server.client.acl_setuser(
        "app", enabled=True, passwords=["+secret-word"], keys=["other:*"], commands=["+@all"]
    )
    url = target.server.url.replace(f":{target.secret}@", "app:secret-word@")
    target.changes = {"url": url, "key_prefix": "other:"}
    target.sink().check()
    target.changes = {"url": url}
    with pytest.raises(SinkError, match="rights of redis_url") as caught:
        target.sink().check()
    assert "secret-word" not in str(caught.value)


# --- fsync


def test_nothing_is_acknowledged_before_the_server_has_called_fsync(target: Target) -> None:
    sink = target.sink(ONE_MORE)
    sink.open(START)
    with target.server.without_fsync():
        for _ in range(2):  # tried again, the position is already at the end of the batch
            with pytest.raises(SinkUnavailable, match="does not fsync"):
                write(sink, range(1), change(0, 1, "INSERT"))
        assert sink.ack == START
        other = target.sink(ONE_MORE)
        other.open(START)  # as after a crash between the write and fsync
        assert other.ack == START
    write(other, range(1), change(0, 1, "INSERT"))
    assert other.ack == STREAM[0]
    assert target.rows() == {"shop:items:1": row(0, 1)}


def test_letter_is_not_delivered_before_the_server_has_called_fsync(target: Target) -> None:
    sink = opened_small(target, Letters())
    target.server.client.rpush("shop:items:1", "not yours")
    line = change(0, 1, "INSERT")
    write(sink, range(1), line)
    target.server.client.delete("shop:items:1")
    with target.server.without_fsync(), pytest.raises(SinkUnavailable, match="does not fsync"):
        sink.redeliver(batch_of(START, STREAM[0], [line]))
    assert set(sink.redeliver(batch_of(START, STREAM[0], [line]))) == set()
    assert target.rows() == {"shop:items:1": row(0, 1)}


def test_lost_answer_about_settings_does_not_end_the_waiting(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*names: Any) -> None:
        raise redis.ConnectionError("the answer is lost")

    with monkeypatch.context() as patch, pytest.raises(SinkUnavailable, match="the answer is lost"):
        patch.setattr(redis.Redis, "config_get", lose)
        target.opened()


def test_server_that_cannot_wait_for_fsync_is_named_once(target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    target.server.kill()
    target.server = RedisServer(target.server.folder, "--rename-command", "WAITAOF", "", password=target.secret)
    sink = target.opened()
    sink.open(START)
    write(sink, range(1), change(0, 1, "INSERT"))
    assert target.rows() == {"shop:items:1": row(0, 1)}
    assert capsys.readouterr().err.count("do not wait for fsync (unknown command 'WAITAOF'") == 1


def test_server_that_never_calls_fsync_is_not_waited_for(target: Target) -> None:
    target.server.client.config_set("appendfsync", "no")
    write(target.opened(), range(1), change(0, 1, "INSERT"))
    assert target.rows() == {"shop:items:1": row(0, 1)}


# --- options


@pytest.mark.parametrize("changes", [{"mode": "sync"}, {"mode": "sync", "id_column": "id"}])
def test_copy_that_was_not_made_with_these_options_is_not_continued(target: Target, changes: dict[str, str]) -> None:
    target.changes = {"mode": "sync"} if "id_column" in changes else {"mode": "invalidate"}
    sink = target.opened()
    write(sink, range(1), change(0, 1, "INSERT"))
    sink.close()
    target.changes = changes
    with pytest.raises(SinkError, match=r"has no position.*made with other options"):
        target.opened()
    target.changes = {**changes, "mode": "invalidate"}
    write(target.opened(), range(1, 2), change(1, 1))
    assert target.rows() == {}


@pytest.mark.parametrize(
    ("url", "options", "is_refused"),
    [
        ("redis://:other@host:6379/0", {}, True),
        ("redis://host:6379?db=0", {"mode": "invalidate"}, True),
        ("redis://host:6379/0", {"routes": ["a"]}, True),
        ("redis://host:6379/1", {}, False),
        ("redis://host:6379/0", {"key_prefix": "b:"}, False),
    ],
)
def test_two_adapters_never_share_keys(url: str, options: dict[str, Any], is_refused: bool) -> None:
    first = adapters.redis("redis://host:6379/0", mode="sync")
    second = adapters.redis(url, name="second", **{"mode": "sync", **options})
    if not is_refused:
        return check_adapters([first, second])
    with pytest.raises(ConfigError, match=r"write to the same target: keys \* in database 0 of host:6379"):
        check_adapters([first, second])


def test_two_adapters_share_a_server_by_their_routes() -> None:
    made = [adapters.redis("redis://host/0", mode="sync", name=name, routes=[name]) for name in ("one", "two")]
    check_adapters(made)


# --- found before anything is read


def look(*relations: Relation, **options: Any) -> None:
    spec = adapters.redis("redis://h", mode="sync", **options)
    spec.options.check_source("cache", SourceView("", tuple, lambda: relations))


def table(name: str, identity: str, **columns: bool) -> Relation:
    """A table with these columns, which are part of its key or not."""
    return Relation(1, "public", name, identity, tuple(Column(one, 25, -1, key) for one, key in columns.items()))


def test_a_wrong_id_column_is_refused_before_the_rows_are_read() -> None:
    orders, lines = table("orders", "d", id=True, n=False), table("lines", "f", id=True, at=True)
    look(orders, lines)
    look(orders, lines, id_column="id")
    with pytest.raises(ConfigError, match="adapter cache: table orders has no column idd") as caught:
        look(orders, lines, id_column="idd")
    assert "id_column" in caught.value.advice
    with pytest.raises(ConfigError, match="its replica identity lacks n"):
        look(orders, id_column="n")
    with pytest.raises(ConfigError, match="rows of table heap have no key"):
        look(table("heap", "n", n=False))


def test_a_source_that_cannot_be_asked_is_no_matter_of_the_adapter() -> None:
    def fail() -> list[Relation]:
        raise SourceError("it is down")

    adapters.redis("redis://h", mode="sync").options.check_source("cache", SourceView("", tuple, fail))


def test_an_adapter_sees_its_tables_as_routes_and_transforms_leave_them(tmp_path: Path) -> None:
    settings, state = PipelineSettings(detector="rate"), StateDir(tmp_path)

    def seen(*transforms: Any, routes: tuple[str, ...] = ()) -> dict[str, list[str]]:
        found = view_source(settings, state, Chain(transforms, routes)).relations()
        return {one.name: [column.name for column in one.columns] for one in found}

    name, columns = next(iter(seen().items()))
    last = columns[-1]
    assert seen(routes=("none",)) == {} and list(seen(routes=(name,))) == [name]
    assert seen({"type": "rename_fields", "fields": {last: "other"}})[name] == [*columns[:-1], "other"]
    assert seen({"type": "sql", "set": {"x": "1"}}) == {}  # only Spark knows


@pytest.mark.parametrize("url", ["redis://h/abc", "redis://h/1x", "redis://h/0/1", "redis://h?db=abc"])
def test_a_database_that_is_no_number_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="its database is not a number"):
        check_adapters([adapters.redis(url, mode="sync")])
    check_adapters(
        [adapters.redis("redis://h/3", mode="sync"), adapters.redis("unix:///a/b?db=2", mode="sync", name="b")]
    )
