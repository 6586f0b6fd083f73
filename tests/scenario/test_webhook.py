"""The webhook against real HTTP servers that answer in every way there is, and kill -9 in the middle."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import trustme
from receivers import How, Receiver, Request, answer, free_port, raw, receiver
from running import run
from targets.events import END, START, STREAM, batch, batch_of, by_key, event, line, to_line
from targets.webhook import ITEMS

from pgcdc.core.errors import PgcdcError, SinkError, SinkRejected, SinkUnavailable
from pgcdc.core.position import Position
from pgcdc.core.relation import ShapeChange, append_shapes
from pgcdc.event.batch import Batch
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import DeliveryOptions
from pgcdc.sink.webhook import WebhookOptions, WebhookSink

SECRET = "s3cr3t-in-query"
COUNT = len(STREAM)


@pytest.fixture
def hook() -> Iterator[Receiver]:
    with receiver() as one:
        yield one


@contextlib.contextmanager
def sink_to(url: str, folder: Path, delivery: DeliveryOptions | None = None, **options: Any) -> Iterator[Runner]:
    acks = folder / "acks"
    acks.mkdir(exist_ok=True)
    if not (folder / "shapes.jsonl").exists():
        append_shapes(folder / "shapes.jsonl", [ShapeChange(Position.at(101, 0), ITEMS)])
    given = {"url": url, "allow_private": True, "request_timeout": 5.0, **options}
    tries = delivery.model_dump() if delivery is not None else {}
    sink = run(WebhookSink(WebhookOptions.model_validate(given)), acks, "webhook", **tries)
    sink.open(START)
    try:
        yield sink
    finally:
        sink.close()


def refused(folder: Path, url: str, kind: type[SinkError], **options: Any) -> SinkError:
    """What a write of all events raises; nothing of it is acknowledged, and no secret is told."""
    with sink_to(url, folder, **options) as sink:
        with pytest.raises(SinkError) as caught:
            sink.write(batch(START, END))
        assert type(caught.value) is kind, caught.value
        assert SECRET not in str(caught.value) and SECRET not in repr(caught.value)
        assert sink.ack == START
    return caught.value


# --- every way to answer


def test_requests_carry_what_the_manual_says(hook: Receiver, tmp_path: Path) -> None:
    with sink_to(hook.url, tmp_path, headers={"Authorization": "Bearer x"}, signing_key="key", concurrency=1) as sink:
        sink.write(batch(START, END))
    assert hook.lines == [line(position) for position in STREAM]
    first = hook.accepted[0]
    assert first.path == f"/hook?token={SECRET}"
    assert first.headers["Content-Type"] == "application/json" and first.headers["Authorization"] == "Bearer x"
    assert first.headers["User-Agent"].startswith("pgcdc/")
    assert first.headers["X-PGCDC-Event-ID"] == first.events[0]["id"]
    assert first.headers["X-PGCDC-Channel"] == "pgcdc:items"
    assert first.headers["X-PGCDC-Signature"].startswith("sha256=")
    assert first.headers["Cookie"] is None and first.headers["Accept-Encoding"] == "identity"


def test_batches_are_arrays_and_may_be_zipped(hook: Receiver, tmp_path: Path) -> None:
    with sink_to(hook.url, tmp_path, batch_size=5, concurrency=1, gzip=True) as sink:
        sink.write(batch(START, END))
    assert [int(one.headers["X-PGCDC-Batch-Size"]) for one in hook.accepted] == [5, 5, 5, 1]
    assert hook.accepted[0].headers["Content-Encoding"] == "gzip"
    assert hook.lines == [line(position) for position in STREAM]


@pytest.mark.parametrize("status", [400, 403, 404, 413, 422])
def test_refused_event_is_named_and_the_others_arrive(hook: Receiver, tmp_path: Path, status: int) -> None:
    bad = str(STREAM[4])
    said = f"no: token={SECRET}".encode()
    hook.how = lambda request: answer(status, said) if request.events[0]["position"] == bad else None
    with sink_to(hook.url, tmp_path) as sink:
        with pytest.raises(SinkRejected) as caught:
            sink.write(batch(START, END))
        (reject,) = caught.value.rejects
        assert (reject.position, reject.kind) == (bad, f"http_{status}")
        assert "no:" in reject.text and SECRET not in reject.text + str(caught.value)
        assert sink.ack == STREAM[3]  # everything before it
        sink.write(batch(START, END).without([bad]))
        assert sink.ack == END
    assert sorted(one["position"] for one in hook.events) == [str(one) for one in STREAM if str(one) != bad]
    assert len(hook.seen) == COUNT  # the others were sent once


@pytest.mark.parametrize("status", [410, 401])
def test_answer_that_concerns_all_stops(hook: Receiver, tmp_path: Path, status: int) -> None:
    hook.always(answer(status, b"no"))
    error = refused(tmp_path, hook.url, SinkError, concurrency=1)
    assert f"answer {status}" in error.message and error.advice
    assert len(hook.seen) == 1


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirect_is_not_followed(hook: Receiver, tmp_path: Path, status: int) -> None:
    with receiver() as private:
        hook.always(answer(status, Location=f"{private.url}&password=x"))
        error = refused(tmp_path, hook.url, SinkError, concurrency=1)
        assert "redirect" in error.message and "URL" in error.advice
        assert private.seen == []


@pytest.mark.parametrize(("value", "low", "high"), [("17", 17, 17), ("", 0, 0), ("never", 0, 0)])
def test_busy_receiver_says_when_it_wants_more(
    hook: Receiver, tmp_path: Path, value: str, low: float, high: float
) -> None:
    hook.always(answer(429, b"slow down", Retry_After=value))
    error = refused(tmp_path, hook.url, SinkUnavailable, concurrency=1)
    assert isinstance(error, SinkUnavailable)
    assert low <= error.retry_in_s <= high
    assert error.positions == ()  # no event is to blame
    assert len(hook.seen) == 1  # nothing more was tried


def test_receiver_that_is_down_is_waited_for_also_if_used_up_tries_are_dead_letters(
    hook: Receiver, tmp_path: Path
) -> None:
    """A failure of one event may be set aside then; one of the receiver as a whole must not empty the stream."""
    gone = refused(tmp_path, f"http://127.0.0.1:{free_port()}/", SinkUnavailable, concurrency=1)
    hook.always(answer(503))
    busy = refused(tmp_path, hook.url, SinkUnavailable, concurrency=1)
    hook.always(answer(500))
    failed = refused(tmp_path, hook.url, SinkUnavailable, concurrency=1)
    assert isinstance(gone, SinkUnavailable) and isinstance(busy, SinkUnavailable)
    assert isinstance(failed, SinkUnavailable)
    assert (gone.positions, busy.positions, failed.positions) == ((), (), (str(STREAM[0]),))


def _never(handler: BaseHTTPRequestHandler, request: Request) -> None:
    time.sleep(1.0)


UNAVAILABLE: dict[str, tuple[How, str]] = {
    "500": (answer(500, b"oops"), "answer 500: oops"),
    "503": (answer(503), "answer 503"),
    "408": (answer(408), "answer 408"),
    "garbage": (raw(b"\x00\xff\x16\x03 this is no HTTP\r\n\r\n"), "not HTTP"),
    "half a status": (raw(b"HTTP/1.1 2"), "answer|closed|HTTP"),
    "closes at once": (raw(), "closed before the answer"),
    "huge header": (raw(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n"), "not HTTP"),
    "never answers": (_never, "no answer within 0.3 s"),
}


@pytest.mark.parametrize("name", UNAVAILABLE)
def test_what_may_pass_is_tried_again_and_nothing_is_lost(hook: Receiver, tmp_path: Path, name: str) -> None:
    how, says = UNAVAILABLE[name]
    hook.always(how)
    with sink_to(hook.url, tmp_path, request_timeout=0.3 if how is _never else 10.0) as sink:
        with pytest.raises(SinkUnavailable, match=says) as caught:
            sink.write(batch(START, END))
        assert SECRET not in str(caught.value) and sink.ack == START
        hook.how = lambda request: None
        sink.write(batch(START, END))
        assert sink.ack == END
    assert sorted(one["position"] for one in hook.events) == [str(one) for one in STREAM]


def _reset(handler: BaseHTTPRequestHandler, request: Request) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    handler.close_connection = True


def test_reset_connection_and_nobody_there(hook: Receiver, tmp_path: Path) -> None:
    hook.always(_reset)
    refused(tmp_path, hook.url, SinkUnavailable)
    error = refused(tmp_path, f"http://127.0.0.1:{free_port()}/?token={SECRET}", SinkUnavailable)
    assert "no connection: Connection refused" in error.message
    error = refused(tmp_path, f"http://nowhere.invalid/?token={SECRET}", SinkUnavailable)
    assert "cannot be resolved" in error.message


@pytest.mark.parametrize(
    "how",
    [
        raw(
            b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 50000000\r\n\r\n",
            b"x" * (1 << 20),
            b"x" * (1 << 20),
        ),
        raw(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 100\r\n\r\n", b"x", pause_s=0.05),
        raw(b"HTTP/1.1 204 No Content\r\nConnection: close\r\nSet-Cookie: a=b\r\n\r\n"),
        raw(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnope"),
    ],
    ids=["huge body", "half a body", "cookie", "broken gzip"],
)
def test_status_counts_whatever_comes_behind_it(
    hook: Receiver, tmp_path: Path, how: How, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgcdc.sink.http.BODY_S", 0.2)
    hook.always(how)
    url = hook.url.replace("127.0.0.1", "localhost")  # cookies are for names
    with sink_to(url, tmp_path, concurrency=2) as sink:
        sink.write(batch(START, Position.end(120)))
        assert sink.ack == Position.end(120)
    assert all(request.headers["Cookie"] is None for request in hook.seen)
    assert len(hook.seen) == 8


def test_endless_body_is_not_read(hook: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgcdc.sink.http.BODY_S", 30.0)
    sent = 0

    def how(handler: BaseHTTPRequestHandler, request: Request) -> None:
        nonlocal sent
        handler.close_connection = True
        handler.wfile.write(b"HTTP/1.1 400 No\r\nContent-Length: 1000000000\r\n\r\n")
        with contextlib.suppress(OSError):
            for _ in range(500):
                handler.wfile.write(b"x" * 65536)
                sent += 65536

    hook.always(how)
    with sink_to(hook.url, tmp_path, concurrency=1) as sink, pytest.raises(SinkRejected, match="answer 400: xxx"):
        sink.write(batch(START, Position.at(110, 1)))
    wait_until(lambda: hook.under_way == 0)
    assert sent < 20 << 20, sent


def test_connection_that_is_closed_after_each_answer_is_only_a_retry(hook: Receiver, tmp_path: Path) -> None:
    def how(request: Request) -> How:
        hook.accepted.append(request)
        return raw(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    hook.how = how
    options = DeliveryOptions(max_retries=100, backoff_base=0.001, backoff_cap=0.001)
    with sink_to(hook.url, tmp_path, options, concurrency=1) as sink:
        sink.write(batch(START, END))
    assert list(dict.fromkeys(hook.lines)) == [line(position) for position in STREAM]


def test_slow_body_of_an_answer_is_not_waited_for(
    hook: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgcdc.sink.http.BODY_S", 0.05)
    hook.always(raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", *[b"x"] * 9, pause_s=0.3))
    began = time.monotonic()
    with sink_to(hook.url, tmp_path, concurrency=1) as sink:
        sink.write(batch(START, Position.at(110, 2)))
    assert time.monotonic() - began < 1
    assert len(hook.seen) == 2


# --- batches


@pytest.mark.parametrize("concurrency", [1, 4])
def test_bad_events_of_a_batch_are_found_and_each_other_one_arrives_once(
    hook: Receiver, tmp_path: Path, concurrency: int
) -> None:
    bad = {str(STREAM[2]), str(STREAM[9])}
    hook.how = lambda request: answer(400) if bad & {one["position"] for one in request.events} else None
    with sink_to(hook.url, tmp_path, batch_size=16, concurrency=concurrency) as sink:
        with pytest.raises(SinkRejected) as caught:
            sink.write(batch(START, END))
        assert {one.position for one in caught.value.rejects} == bad
        sink.write(batch(START, END).without(bad))
    arrived = [one["position"] for one in hook.events]
    assert sorted(arrived) == [str(one) for one in STREAM if str(one) not in bad]


def test_receiver_that_takes_less_at_once_gets_less_at_once(hook: Receiver, tmp_path: Path) -> None:
    hook.how = lambda request: answer(413) if len(request.events) > 3 else None
    with sink_to(hook.url, tmp_path, batch_size=16, concurrency=1) as sink:
        sink.write(batch(START, END))
    assert hook.lines == [line(position) for position in STREAM]


# --- order


def changes(keys: int, count: int, seed: int) -> list[str]:
    """Changes of rows, with a TRUNCATE and a moved key among them."""
    pick = random.Random(seed)
    found = []
    for number in range(count):
        position = Position.at(200 + number, 1)
        one = event(position, key=pick.randrange(keys), operation=pick.choice(["INSERT", "UPDATE", "DELETE"]))
        if number % 97 == 50:
            one["operation"] = one["payload"]["op"] = "TRUNCATE"
        if number % 89 == 40:
            one["operation"] = one["payload"]["op"] = "UPDATE"
            one["payload"]["old"] = {"id": str(pick.randrange(keys))}
        found.append(to_line(one))
    return found


def whole(lines: Sequence[str]) -> Batch:
    return batch_of(START, Position.end(100_000), lines)


def is_barrier(text: str) -> bool:
    one = json.loads(text)
    return one["operation"] == "TRUNCATE" or one["payload"]["old"] is not None


def check_order(sent: Sequence[str], arrived: Sequence[str]) -> None:
    """At first arrival: each key in order, and barriers behind all before them and before all behind them."""
    first = list(dict.fromkeys(arrived))
    assert sorted(first) == sorted(sent)
    assert by_key(first) == by_key(sent)
    place = {text: number for number, text in enumerate(first)}
    for number, text in enumerate(sent):
        if is_barrier(text):
            assert place[text] == number


@pytest.mark.parametrize("batch_size", [1, 7])
def test_each_key_is_in_order_with_many_workers_and_a_receiver_of_moods(
    hook: Receiver, tmp_path: Path, batch_size: int
) -> None:
    hook.delay_s = 0.01
    lines = changes(keys=30, count=400, seed=batch_size)
    with sink_to(hook.url, tmp_path, concurrency=16, batch_size=batch_size) as sink:
        sink.write(whole(lines))
    arrived = hook.lines
    assert len(arrived) == len(lines)
    check_order(lines, arrived)
    assert hook.most_under_way > 3
    assert arrived != lines or batch_size > 1


def test_order_holds_through_failures_and_retries_and_nothing_comes_twice(hook: Receiver, tmp_path: Path) -> None:
    pick, lock = random.Random(3), threading.Lock()

    def how(request: Request) -> How | None:
        with lock:
            return answer(pick.choice([500, 429, 503])) if pick.random() < 0.02 else None

    hook.how, hook.delay_s = how, 0.004
    lines = changes(keys=20, count=400, seed=5)
    options = DeliveryOptions(max_retries=1000, backoff_base=0.001, backoff_cap=0.002)
    with sink_to(hook.url, tmp_path, options, concurrency=16) as sink:
        sink.write(whole(lines))
        assert sink.ack == Position.end(100_000)
    assert len(hook.seen) > len(lines)  # there were failures
    assert len(hook.lines) == len(lines)
    check_order(lines, hook.lines)


def test_ack_follows_what_is_delivered_before_a_failure(hook: Receiver, tmp_path: Path) -> None:
    hook.how = lambda request: answer(500) if request.events[0]["position"] >= str(STREAM[6]) else None
    with sink_to(hook.url, tmp_path, concurrency=1) as sink, pytest.raises(SinkUnavailable):
        sink.write(batch(START, END))
    assert sink.ack == STREAM[5]
    hook.how = lambda request: None
    with sink_to(hook.url, tmp_path, concurrency=1) as sink:
        sink.write(batch(START, END))
    assert hook.lines == [line(position) for position in STREAM]  # also over the restart


def test_large_batch_is_given_in_parts_that_are_done_in_time(hook: Receiver, tmp_path: Path) -> None:
    hook.delay_s = 0.002
    acks: list[Position] = []
    with sink_to(hook.url, tmp_path, DeliveryOptions(timeout=1.0), concurrency=2) as sink:
        write = sink.sink.write

        def watch(batch: Batch) -> None:
            acks.append(sink.ack)
            write(batch)

        sink.sink.write = watch  # type: ignore[method-assign]
        sink.write(whole(changes(10, 300, 1)))
        assert sink.ack == Position.end(100_000)
    assert len(acks) > 1
    assert len(hook.lines) == 300


# --- dead letters again


def test_redelivery_sends_again_and_leaves_the_ack(hook: Receiver, tmp_path: Path) -> None:
    with sink_to(hook.url, tmp_path, concurrency=1) as sink:
        sink.write(batch(START, END))
        hook.accepted.clear()
        bad, after = str(STREAM[5]), [str(one) for one in STREAM[6:8]]
        hook.how = lambda request: (
            answer(400) if request.events[0]["position"] == bad
            else answer(500) if request.events[0]["position"] in after else None
        )  # fmt: skip
        letters = batch(START, Position.end(120))
        with pytest.raises(SinkRejected) as caught:
            sink.redeliver(letters)
        assert [one.position for one in caught.value.rejects] == [bad]
        hook.how = lambda request: None
        assert list(sink.redeliver(letters.without([bad]))) == []
        assert sorted(one["position"] for one in hook.events) == [str(one) for one in STREAM[:8] if str(one) != bad]
        sink.redeliver(letters.without([bad]))  # asked for once more
        assert len(hook.events) == 14
        assert sink.ack == END


def test_redelivery_whose_last_event_is_refused_sends_the_others_once(hook: Receiver, tmp_path: Path) -> None:
    with sink_to(hook.url, tmp_path, concurrency=1) as sink:
        sink.write(batch(START, END))
        hook.accepted.clear()
        bad = str(STREAM[7])
        hook.how = lambda request: answer(400) if request.events[0]["position"] == bad else None
        letters = batch(START, Position.end(120))
        with pytest.raises(SinkRejected):
            sink.redeliver(letters)
        rest = letters.without([bad])
        sink.redeliver(
            Batch(START, STREAM[6], rest.events)
        )  # as `dlq/replay.py` does: its end is that of its last letter
        assert [one["position"] for one in hook.events] == [str(one) for one in STREAM[:7]]


# --- TLS


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def server_context(authority: trustme.CA, *names: str, asks: bool = False) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(context)
    if asks:
        authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def test_certificates_are_verified(authority: trustme.CA, tmp_path: Path) -> None:
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca_file))
    with receiver(server_context(authority, "localhost")) as hook:
        error = refused(tmp_path, hook.url, SinkError)
        assert "certificate is not valid" in error.message and "ca_file" in error.advice
        other = trustme.CA()
        other.cert_pem.write_to_path(str(tmp_path / "other.pem"))
        refused(tmp_path, hook.url, SinkError, ca_file=str(tmp_path / "other.pem"))
        refused(tmp_path, hook.url.replace("localhost", "127.0.0.1"), SinkError, ca_file=str(ca_file))  # another name
        assert hook.seen == []
        with sink_to(hook.url, tmp_path, ca_file=str(ca_file)) as sink:
            sink.check()
            sink.write(batch(START, END))
        assert len(hook.lines) == COUNT


def test_server_may_ask_for_our_certificate(authority: trustme.CA, tmp_path: Path) -> None:
    ca_file, cert_file, key_file = (str(tmp_path / name) for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(ca_file)
    ours = authority.issue_cert("pgcdc.example")
    ours.cert_chain_pems[0].write_to_path(cert_file)
    ours.private_key_pem.write_to_path(key_file)
    with receiver(server_context(authority, "localhost", asks=True)) as hook:
        refused(tmp_path, hook.url, SinkUnavailable, ca_file=ca_file)
        with sink_to(hook.url, tmp_path, ca_file=ca_file, cert_file=cert_file, key_file=key_file) as sink:
            sink.write(batch(START, END))
        assert len(hook.lines) == COUNT
    options = {"url": "https://example.com", "cert_file": cert_file, "key_file": ca_file, "allow_private": True}
    with pytest.raises(SinkError, match=r"cert\.pem cannot be used for TLS"):
        run(WebhookSink(WebhookOptions.model_validate(options)), tmp_path / "acks", "webhook").check()


def test_plain_http_at_a_tls_url_is_no_certificate_error(hook: Receiver, tmp_path: Path) -> None:
    refused(tmp_path, hook.url.replace("http:", "https:"), SinkUnavailable)


# --- where a request must not go


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0.0.0.0"])
def test_private_addresses_are_refused_when_a_connection_is_made(hook: Receiver, tmp_path: Path, host: str) -> None:
    url = hook.url.replace("127.0.0.1", host)
    error = refused(tmp_path, url, SinkError, allow_private=False)
    assert "private address" in error.message and "allow_private" in error.advice
    assert hook.seen == []
    acks = tmp_path / "acks"
    with pytest.raises(SinkError, match="private address"):
        run(WebhookSink(WebhookOptions(url=url)), acks, "webhook").check()


def test_name_that_leads_somewhere_else_the_next_time_gains_nothing(
    hook: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(hook.url.rpartition(":")[2].partition("/")[0])
    answers = iter(["93.184.216.34"])

    def resolve(host: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers, "127.0.0.1"), port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    url = f"http://rebind.example:{port}/?token={SECRET}"
    with sink_to(url, tmp_path, allow_private=False) as sink:
        sink.check()  # a public one, this time
        with pytest.raises(SinkError, match="private address") as caught:
            sink.write(batch(START, END))
        assert not isinstance(caught.value, SinkUnavailable)
    assert hook.seen == []


def test_proxies_of_the_environment_are_used_only_if_that_is_asked_for(
    hook: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiver() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url.partition("/hook")[0])
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        with sink_to(hook.url, tmp_path) as sink:
            sink.write(batch(START, Position.end(110)))
        assert proxy.seen == [] and len(hook.seen) == 4
        with sink_to("http://hooks.example/x", tmp_path, proxy_from_env=True) as sink:
            sink.check()
            sink.write(batch(START, END))
        assert len(proxy.seen) == COUNT - 4
        assert proxy.seen[0].path == "http://hooks.example/x"


def test_netrc_of_the_user_is_not_read(hook: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login a password b\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with sink_to(hook.url, tmp_path) as sink:
        sink.write(batch(START, END))
    assert hook.seen[0].headers["Authorization"] is None


def test_host_that_does_not_exist_is_found_by_the_check(tmp_path: Path) -> None:
    with pytest.raises(PgcdcError, match="cannot be resolved"):
        run(WebhookSink(WebhookOptions(url="https://nowhere.invalid/x")), tmp_path, "webhook").check()


# --- kill -9


CHILD = """
    import sys
    from pathlib import Path
    from pgcdc.core.position import Position
    from pgcdc.sink.webhook import WebhookOptions
    from pgcdc.sink.webhook import WebhookSink
    from running import run
    from targets.events import START, batch_of

    folder, url, batch_size, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    lines = (folder / "lines").read_text().splitlines(keepends=True)
    options = WebhookOptions(url=url, allow_private=True, concurrency=16, batch_size=batch_size)
    sink = run(WebhookSink(options), folder / "acks", "webhook")
    sink.open(START)
    sent = 0
    for begin in range(0, len(lines), step):  # cut in other places each time
        part = lines[begin : begin + step]
        sink.write(batch_of(START, Position.at(200 + begin + len(part) - 1, 1), part))
    sink.write(batch_of(START, Position.end(100_000), []))
    print("done")
"""


@pytest.mark.parametrize("batch_size", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_in_the_middle_everything_arrives_in_order_and_repeats_have_their_ids(
    hook: Receiver, tmp_path: Path, batch_size: int
) -> None:
    lines = changes(keys=40, count=600, seed=9)
    (tmp_path / "lines").write_text("".join(lines))
    (tmp_path / "acks").mkdir()
    append_shapes(tmp_path / "shapes.jsonl", [ShapeChange(Position.at(101, 0), ITEMS)])
    hook.delay_s = 0.01
    tests = Path(__file__).parents[1]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent / "src"), str(tests)])}

    def start(step: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path), hook.url, str(batch_size), str(step)]
        return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)

    for round_number, step in enumerate([600, 170, 90]):
        child, before = start(step), len(hook.lines)
        wait_until(lambda before=before: len(hook.lines) > before + 60 and hook.under_way > 0)  # type: ignore[misc]
        assert child.poll() is None, "it ended before it was killed"
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        wait_until(lambda: hook.under_way == 0)
        assert round_number or len(set(hook.lines)) < len(lines)
    assert start(250).communicate(timeout=60)[0] == "done\n"
    arrived = hook.lines
    assert len(arrived) > len(set(arrived)) == len(lines)  # there were repeats, and nothing but them
    check_order(lines, arrived)


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# --- the example in the documentation


def test_example_receiver_checks_the_signature_and_takes_every_event_once(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "webhook_receiver.py"
    environ = {**os.environ, "SIGNING_KEY": "the key"}
    child = subprocess.Popen(
        [sys.executable, str(example), "0"], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        url = child.stdout.readline().removeprefix("listening on ").strip() + "hook"
        error = refused(tmp_path, url, SinkError, signing_key="another key")
        assert "answer 401" in error.message and "signing key" in error.advice
        kinds: list[dict[str, Any]] = [{}, {"batch_size": 5}, {"batch_size": 5, "gzip": True}]
        for number, options in enumerate(kinds):
            (tmp_path / f"{number}").mkdir()  # a sink that has forgotten everything
            with sink_to(url, tmp_path / f"{number}", signing_key="the key", **options) as sink:
                sink.write(batch(START, END))
        with contextlib.closing(sqlite3.connect(tmp_path / "inbox.db")) as inbox:
            rows = inbox.execute("SELECT event FROM events ORDER BY json_extract(event, '$.position')").fetchall()
        assert [json.loads(text) for (text,) in rows] == [json.loads(line(position)) for position in STREAM]
        broken = json.loads(line(STREAM[0]))
        del broken["id"]
        with sink_to(url, tmp_path, signing_key="the key") as sink, pytest.raises(SinkRejected, match="answer 400"):
            sink.write(batch_of(START, END, [to_line(broken)]))
    finally:
        child.kill()
        child.wait(10)
