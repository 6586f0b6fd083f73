"""The control socket: requests are answered in order, two kinds of them wait, and errors keep their kind."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from control_loop import Loop

from pgcdc.capture.control import ControlClient, ask, forget_consumer
from pgcdc.capture.server import CaptureGone, ControlServer
from pgcdc.cli.status import read_status
from pgcdc.core.counters import Counters
from pgcdc.core.errors import ConfigError, GapError, PgcdcError, SourceError, StateError
from pgcdc.core.position import Position
from pgcdc.core.state import Identity, Lock, StateDir, write_json
from pgcdc.run.control import RunServer
from pgcdc.sink.contract import Progress
from pgcdc.spool.consumers import Consumers


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.stop()


@pytest.fixture
def client(loop: Loop) -> Iterator[ControlClient]:
    made = ControlClient(loop.server.address)
    yield made
    made.close()


class Asking(threading.Thread):
    """A request that waits, in a thread of its own."""

    def __init__(self, ask: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._ask = ask
        self.answer: object = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = self._ask()
        except PgcdcError as error:
            self.error = error

    def result(self) -> object:
        self.join(5)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.answer


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_requests_carry_what_they_say_and_answers_come_back(loop: Loop, client: ControlClient) -> None:
    loop.replies = {
        "join": {"initial": str(Position.end(40)), "ack": str(Position.at(56, 3, 1)), "is_new": True},
        "target": {"lsn": 99},
        "status": {"phase": "streaming"},
    }
    assert client.join("reports") == (Position.end(40), Position.at(56, 3, 1))
    client.ack("reports", Position.at(56, 4))
    assert client.target() == 99
    assert client.status() == {"phase": "streaming"}
    client.stop()
    assert [{key: value for key, value in request.items() if key != "exclusive"} for request in loop.requests] == [
        {"do": "join", "consumer": "reports"},
        {"do": "ack", "consumer": "reports", "position": str(Position.at(56, 4))},
        {"do": "target"},
        {"do": "status"},
        {"do": "stop"},
    ]


def test_error_keeps_its_kind_and_the_connection_goes_on(loop: Loop, client: ControlClient) -> None:
    loop.replies = {"target": GapError("a hole", "fill it"), "status": {"ok": 1}}
    with pytest.raises(GapError, match="a hole") as caught:
        client.target()
    assert caught.value.advice == "fill it"
    assert client.status() == {"ok": 1}


def test_wait_ends_when_the_spool_grows(loop: Loop, client: ControlClient) -> None:
    asking = Asking(lambda: client.wait(5))
    until(lambda: loop.server.has_waiters)
    loop.call(loop.server.wake)
    assert asking.result() is True


def test_growth_between_two_waits_is_not_missed_and_not_told_twice(loop: Loop, client: ControlClient) -> None:
    loop.call(loop.server.wake)
    started = time.monotonic()
    assert client.wait(5) is True
    assert time.monotonic() - started < 2
    assert client.wait(0.05) is False


def test_wait_ends_after_its_time(loop: Loop, client: ControlClient) -> None:
    started = time.monotonic()
    assert client.wait(0.1) is False
    assert 0.1 <= time.monotonic() - started < 2


def test_one_who_waits_does_not_hold_up_others(loop: Loop, client: ControlClient) -> None:
    asking = Asking(lambda: client.wait(5))
    until(lambda: loop.server.has_waiters)
    with contextlib.closing(ControlClient(loop.server.address)) as other:
        assert other.status() == {}
    loop.call(loop.server.wake)
    assert asking.result() is True


def test_confirm_is_answered_when_it_was_sent(loop: Loop, client: ControlClient) -> None:
    asking = Asking(client.confirm)
    until(lambda: loop.server.confirm_requested)
    assert asking.is_alive()
    loop.call(lambda: loop.server.confirmed(77))
    assert asking.result() == 77
    assert not loop.server.confirm_requested


def test_failing_capture_tells_its_error_to_those_who_wait(loop: Loop, client: ControlClient) -> None:
    asking = Asking(lambda: client.wait(5))
    until(lambda: loop.server.has_waiters)
    loop.call(lambda: loop.server.close(SourceError("the slot is gone", "make another")))
    with pytest.raises(SourceError, match="the slot is gone"):
        asking.result()


def test_ending_capture_is_gone_for_those_who_wait_and_those_who_come(loop: Loop, client: ControlClient) -> None:
    asking = Asking(lambda: client.wait(5))
    until(lambda: loop.server.has_waiters)
    loop.call(loop.server.close)
    with pytest.raises(CaptureGone):
        asking.result()
    with pytest.raises(CaptureGone):
        client.status()
    with pytest.raises(CaptureGone):
        ControlClient(loop.server.address)


def test_client_that_leaves_while_it_waits_disturbs_nobody(loop: Loop, client: ControlClient) -> None:
    with contextlib.closing(ControlClient(loop.server.address)) as leaving:
        leaving._socket.sendall(b'{"do": "wait", "timeout_s": 5}\n{"do": "confirm"}\n')
        until(lambda: loop.server.confirm_requested)
    loop.call(loop.server.wake)
    loop.call(lambda: loop.server.confirmed(1))
    assert client.status() == {}


def test_requests_may_come_in_pieces_and_several_at_once(loop: Loop) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(loop.server.address)
        raw.settimeout(5)
        data = b"".join(json.dumps({"do": "status", "n": n}).encode() + b"\n" for n in range(3))
        for begin in range(0, len(data), 7):
            raw.sendall(data[begin : begin + 7])
            time.sleep(0.002)
        answers = b""
        while answers.count(b"\n") < 3:
            answers += raw.recv(100)
    assert answers == b"{}\n" * 3
    assert [request["n"] for request in loop.requests] == [0, 1, 2]


def test_consumer_has_one_exclusive_reader_until_that_one_leaves(loop: Loop, client: ControlClient) -> None:
    loop.replies = {"join": {"initial": str(Position.end(40)), "ack": str(Position.end(40)), "is_new": True}}
    with contextlib.closing(ControlClient(loop.server.address)) as first:
        first.join("reports", exclusive=True)
        first.join("reports", exclusive=True)
        with pytest.raises(
            ConfigError, match=r"another query already reads consumer 'reports'\. .*option\('consumer', ...\)"
        ):
            client.join("reports", exclusive=True)
        client.join("reports")
        client.join("others", exclusive=True)
    until(lambda: joins(client, "reports"))


def joins(client: ControlClient, consumer: str) -> bool:
    with contextlib.suppress(ConfigError):
        client.join(consumer, exclusive=True)
        return True
    return False


def test_only_the_owner_can_enter_the_folder_and_it_goes_with_the_server() -> None:
    selector = selectors.DefaultSelector()
    server = ControlServer(selector, lambda _: {})
    folder = Path(server.address).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.getuid()
    server.close()
    selector.close()
    assert not folder.exists()


def test_a_consumer_is_forgotten_by_the_capture_also_if_that_is_just_starting(loop: Loop, tmp_path: Path) -> None:
    """It has read the consumers already, and would write the forgotten one again."""
    state = StateDir(tmp_path / "state")
    state.create()
    Consumers(state.consumers_file).join("one", Position.end(8))
    lock = Lock(state.capture_lock)
    assert lock.acquire() is not None  # held, and no address yet
    asking = Asking(lambda: forget_consumer(state, "one"))
    asking.join(0.3)
    assert asking.is_alive() and "one" in Consumers(state.consumers_file)
    lock.write({"pid": 1, "address": loop.server.address})
    asking.join(5)
    assert not asking.is_alive() and asking.error is None
    assert loop.requests == [{"do": "forget", "consumer": "one"}]
    lock.release()
    forget_consumer(state, "one")  # nobody runs: we do it ourselves
    assert "one" not in Consumers(state.consumers_file)
    assert Lock.holder(state.capture_lock) is None


def test_a_capture_that_starts_for_ever_is_an_error(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.create()
    lock = Lock(state.capture_lock)
    assert lock.acquire() is not None
    with pytest.raises(StateError, match="is starting"):
        forget_consumer(state, "one", timeout_s=0.1)
    lock.release()


def test_a_client_that_asks_too_late_still_hears_why_the_capture_ended(tmp_path: Path) -> None:
    address = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        client = ControlClient(address)
        server, _ = listener.accept()
        reason = GapError("the publication is gone", "Start anew")
        server.sendall(json.dumps({"error": reason.to_json()}).encode() + b"\n")
        server.close()
    with contextlib.closing(client), pytest.raises(GapError, match="the publication is gone"):
        client.status()


# --- what is pushed


def test_what_is_pushed_comes_between_answers_and_only_to_who_follows(loop: Loop, client: ControlClient) -> None:
    other = ControlClient(loop.server.address)
    client.request({"do": "follow"})
    loop.call(lambda: loop.server.push({"status": {"phase": "streaming"}, "say": ["hello"]}))
    loop.call(lambda: loop.server.push({"status": {"phase": "paused"}}))
    loop.replies["status"] = {"phase": "asked"}
    assert client.status() == other.status() == {"phase": "asked"}, "an answer is never mistaken for a push"
    assert client.pushed == {"phase": "paused"} and client.said == ["hello"]
    loop.call(lambda: loop.server.push({"status": {"phase": "failed"}}))
    client.take_pushed()
    assert client.pushed == {"phase": "failed"}
    other.take_pushed()
    assert other.pushed == {}
    other.close()


def test_the_reason_of_an_end_is_not_lost_behind_the_last_push(loop: Loop, client: ControlClient) -> None:
    client.request({"do": "follow"})
    loop.call(lambda: loop.server.push({"status": {"phase": "failed"}}))
    loop.call(lambda: loop.server.close(GapError("the slot is gone")))
    client.take_pushed()
    assert client.pushed == {"phase": "failed"}
    with pytest.raises(GapError, match="the slot is gone"):
        client.status()


def test_nobody_waits_for_a_follower_that_does_not_read(loop: Loop, client: ControlClient) -> None:
    client.request({"do": "follow"})
    large = {"status": {"text": "x" * 100_000}}

    def push() -> None:
        for _ in range(100):
            loop.server.push(large)

    loop.call(push)
    with pytest.raises(CaptureGone):
        for _ in range(3):
            client.status()


def test_counters_of_another_process_are_counted_once_and_over_its_restart() -> None:
    theirs, ours = Counters(), Counters()
    theirs.add("rows", 3, table="t")
    ours.take("capture 1", theirs.to_json())
    theirs.add("rows", 2, table="t")
    for _ in range(2):
        ours.take("capture 1", json.loads(json.dumps(theirs.to_json())))
    ours.take("capture 2", [["rows", [["table", "t"]], 4]])
    assert ours.get("rows", table="t") == 9


# --- the socket of a run


def test_a_run_answers_and_what_does_not_run_does_not(tmp_path: Path) -> None:
    def answer(request: dict[str, object]) -> dict[str, object]:
        if request["do"] == "fail":
            raise StateError("no")
        return {"phase": "streaming"}

    path = tmp_path / "run.lock"
    assert ask(path, {"do": "status"}) == {}
    server, lock = RunServer(answer), Lock(path)
    assert lock.acquire() is not None
    assert ask(path, {"do": "status"}) == {}, "it has not said where it is"
    lock.write({"address": server.address})
    assert ask(path, {"do": "status"}) == {"phase": "streaming"}
    with pytest.raises(StateError):
        ask(path, {"do": "fail"})
    folder = Path(server.address).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    server.close()
    assert ask(path, {"do": "status"}) == {} and not folder.exists()
    lock.release()


def test_status_of_what_was_killed_is_what_is_durable(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.create()
    state.save_identity(Identity("postgres", "1", "db", "s", "i", 8))
    Consumers(state.consumers_file).begin(0x16000000F0)
    Progress(state.acks, "file").save(Position.end(0x90), {})
    lane = {
        "adapter": "file",
        "lane": "main",
        "ack": str(Position.end(8)),
        "lag_bytes": 0,
        "dropped": 0,
        "last_error": None,
    }
    write_json(state.run_status, {"phase": "streaming", "lanes": [lane]})
    report = read_status(tmp_path)
    assert report["phase"] == "not running (last: streaming)" and report["capture"] == "not running"
    assert report["confirmed_lsn"] == "16/F0" and report["lanes"][0]["ack"] == str(Position.end(0x90))
