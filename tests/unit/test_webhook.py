"""The parts of the webhook that need no server: addresses, answers, options, keys, and who waits for whom."""

from __future__ import annotations

import hashlib
import hmac
import pickle
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pgcdc import adapters
from pgcdc.config.documents import show_yaml
from pgcdc.config.layers import load, load_config
from pgcdc.core.errors import ConfigError, SinkError, SinkRejected, SinkUnavailable
from pgcdc.core.settings import make_options
from pgcdc.sink.groups import Record
from pgcdc.sink.http import is_public, judge, parse_retry_after, secrets_of
from pgcdc.sink.spec import check_adapters, redact_url
from pgcdc.sink.webhook import WebhookOptions, WebhookSink

URL = "https://example.com/hook"
NOW = datetime(2026, 11, 16, 12, 0, 0, tzinfo=UTC)

# --- addresses


@pytest.mark.parametrize(
    "text", ["8.8.8.8", "93.184.216.34", "2606:2800:220:1::1", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_addresses_of_the_internet_are_public(text: str) -> None:
    assert is_public(text)


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1",
        "169.254.169.254", "169.254.170.2", "100.64.0.1", "100.100.100.200", "168.63.129.16", "192.0.0.192",
        "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "::7f00:1", "::a00:1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "fe80::1", "fe80::1%eth0", "fc00::1",
        "fd00:ec2::254", "fec0::1", "ff02::1", "2002:7f00:1::", "2002:a9fe:a9fe::", "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2001:db8::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "localhost", "",
    ],
)  # fmt: skip
def test_addresses_inside_of_a_network_are_not_public(text: str) -> None:
    assert not is_public(text)


# --- answers


@pytest.mark.parametrize(
    ("status", "means"),
    [
        *((status, None) for status in (200, 201, 202, 204, 299)),
        *((status, SinkError) for status in (300, 301, 302, 303, 304, 307, 308, 401, 405, 407, 410)),
        *((status, SinkRejected) for status in (400, 402, 403, 404, 406, 409, 411, 413, 414, 415, 418, 422, 451, 499)),
        *((status, SinkUnavailable) for status in (408, 425, 429, 500, 501, 502, 503, 504, 599)),
    ],
)
def test_status_says_what_becomes_of_events(status: int, means: type[SinkError] | None) -> None:
    verdict = judge(status, {}, b"why", str)
    assert verdict.error is means
    assert verdict.kind == ("ok" if means is None else f"http_{status}")
    assert bool(verdict.advice) == (means is SinkError)


def test_what_a_receiver_says_is_one_short_line_without_secrets() -> None:
    body = b"\x1b[31mno\r\n\tway\x00 s3cr3t " + b"x" * 1000 + b"\xff"
    text = judge(400, {}, body, lambda said: said.replace("s3cr3t", "***")).text
    assert text.startswith("answer 400: [31mno way *** xxx")
    assert len(text) < 230 and text.isprintable()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0), ("7", 7), (" 120 ", 120), ("999999999", 3600), ("Mon, 16 Nov 2026 12:00:30 GMT", 30),
        ("Mon, 16 Nov 2026 11:00:00 GMT", 0), ("Mon, 16 Nov 2037 11:00:00 GMT", 3600), ("", 0), ("soon", 0),
        ("-5", 0), ("1e9", 0), ("\u0663", 0),
    ],
)  # fmt: skip
def test_retry_after_is_seconds_or_a_date(text: str, seconds: float) -> None:
    assert parse_retry_after(text, NOW) == seconds


# --- options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "url or url_file is required"),
        ({"url": URL, "url_file": "x"}, "cannot be combined"),
        ({"url": "ftp://example.com"}, "not the URL of a webhook"),
        ({"url": "https:///path"}, "not the URL of a webhook"),
        ({"url": "https://2130706433/"}, "unusual form"),
        ({"url": "https://127.1/"}, "unusual form"),
        ({"url": "https://0x7f.0.0.1/"}, "unusual form"),
        ({"url": "https://0177.0.0.1/"}, "unusual form"),
        ({"url": "https://example.com:99999/"}, "not a URL"),
        ({"url": "https://example.com/\nHost: x"}, "not the URL of a webhook"),
        ({"url": "https://s3cr3t@example.com/"}, "user and password"),
        ({"url": URL + "#s3cr3t"}, "cannot contain #"),
        ({"url": URL, "headers": "Authorization s3cr3t"}, "no colon"),
        ({"url": URL, "headers": '{"Authorization": s3cr3t}'}, "not a JSON object"),
        ({"url": URL, "headers": {"A b": "s3cr3t"}}, "not a valid header name"),
        ({"url": URL, "headers": {"X": "s3cr3t\r\nY: z"}}, "cannot be sent"),
        ({"url": URL, "headers": {"content-length": "1"}}, "set by pgcdc"),
        ({"url": URL, "signing_key": "s3cr3t", "signing_key_file": "x"}, "cannot be combined"),
        ({"url": URL, "key_file": "x"}, "key_file needs cert_file"),
        ({"url": URL, "concurrency": 0}, "concurrency"),
        ({"url": URL, "request_timeout": 0}, "request_timeout"),
    ],
)
def test_wrong_options_are_refused_and_secrets_not_told(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        make_options(WebhookOptions, options, "adapter webhook")
    assert "s3cr3t" not in str(caught.value)


def test_secrets_are_not_in_a_repr(tmp_path: Path) -> None:
    (tmp_path / "headers").write_text("X-Token: from a file\n\nX-Plain: a: b\n")
    (tmp_path / "key").write_text("the key\n")
    (tmp_path / "url").write_text(f"{URL}?s3cr3t\n")
    spec = adapters.webhook(
        url_file=tmp_path / "url", headers={"Authorization": "Bearer s3cr3t"}, headers_file=tmp_path / "headers",
        signing_key_file=tmp_path / "key", timeout=15,
    )  # fmt: skip
    check_adapters([spec, adapters.webhook(f"{URL}?s3cr3t", name="other", signing_key="s3cr3t")])
    assert "s3cr3t" not in repr(spec) + repr(adapters.webhook(f"{URL}?s3cr3t", signing_key="s3cr3t"))
    options = spec.options
    assert isinstance(options, WebhookOptions)
    assert options.read_url() == f"{URL}?s3cr3t" and options.read_signing_key() == "the key"
    assert options.read_headers() == {"Authorization": "Bearer s3cr3t", "X-Token": "from a file", "X-Plain": "a: b"}
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize("file", ["url_file", "headers_file", "signing_key_file"])
def test_files_with_something_else_are_refused(tmp_path: Path, file: str) -> None:
    (tmp_path / "bad").write_bytes(b"s3cr3t \xff")
    given: dict[str, Any] = {file: tmp_path / "bad"}
    spec = adapters.webhook("" if file == "url_file" else URL, **given)
    with pytest.raises(ConfigError, match="bad") as caught:
        check_adapters([spec])
    assert "s3cr3t" not in str(caught.value)


def test_url_is_shown_without_what_may_be_secret() -> None:
    assert redact_url("https://u:p@example.com:8443/a/b?token=x") == "https://example.com:8443/a/b?***"
    assert redact_url("http://[::1]:80/") == "http://[::1]:80/"
    slack = "https://hooks.example.com/services/T00000000/B00000000/XxXxXxXxXxXxXxXxXxXxXxXx"
    assert redact_url(slack) == "https://hooks.example.com/services/T00000000/B00000000/***"
    assert "XxXxXxXxXxXxXxXxXxXxXxXx" in secrets_of(slack, {}, "")
    assert secrets_of(f"{URL}?a=b%20c", {"Authorization": "Bearer tok"}, "key") >= {"b c", "tok", "Bearer tok", "key"}


BASE = {"PGCDC_DB": "postgresql://h/x", "PGCDC_ALL_TABLES": "true", "PGCDC_ADAPTERS": "webhook"}


def test_configuration_takes_secrets_from_variables_and_shows_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pgcdc.yaml").write_text(
        "adapters:\n"
        "  - webhook\n"
        "  - {name: other, type: webhook, url: 'https://example.com/x?s3cr3t', headers: {X-Token: '${TOKEN}'}}\n"
        "webhook_headers: {Authorization: 'Bearer ${TOKEN}', X-Stage: test}\n"
    )
    variables = {
        "TOKEN": "s3cr3t", "PGCDC_WEBHOOK_URL": f"{URL}?s3cr3t", "PGCDC_WEBHOOK_SIGNING_KEY": "s3cr3t",
        "PGCDC_DB": "postgresql://h/x", "PGCDC_ALL_TABLES": "true",
    }  # fmt: skip
    loaded = load({}, variables, None)
    loaded.check()
    first, second = (spec.options for spec in loaded.config.adapter_specs)
    assert isinstance(first, WebhookOptions) and isinstance(second, WebhookOptions)
    assert first.url == f"{URL}?s3cr3t" and first.signing_key == "s3cr3t"
    assert first.headers == {"Authorization": "Bearer s3cr3t", "X-Stage": "test"}
    assert second.headers == {"X-Token": "s3cr3t"}
    shown = show_yaml(loaded)
    assert "s3cr3t" not in shown
    assert f"webhook_url: {URL}?***" in shown and "webhook_signing_key: '***'" in shown


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("webhook_signing_key: s3cr3t", "webhook_signing_key"),
        ("webhook_signing_key: s3cr3t${TOKEN}", "webhook_signing_key"),
        ("webhook_signing_key: ${TOKEN:-s3cr3t}", "webhook_signing_key"),
        ("webhook_headers: {Authorization: Bearer s3cr3t}", "webhook_headers"),
        ("webhook_headers: {Authorization: 'Bearer s3cr3t${TOKEN}'}", "webhook_headers"),
        ("webhook_headers: {Authorization: 'Bearer ${TOKEN:-s3cr3t}'}", "webhook_headers"),
        ("webhook_headers: {Cookie: 'a=${TOKEN}; b=s3cr3t'}", "webhook_headers"),
        ("webhook_headers: 'X-Api-Key: s3cr3t'", "webhook_headers"),
        ("adapters: [{name: a, type: webhook, url: 'https://h', signing_key: s3cr3t}]", r"adapters\[0\].signing_key"),
        ("adapters: [{name: webhook, url: 'https://h', headers: {cookie: s3cr3t}}]", r"adapters\[0\].headers"),
    ],
)
def test_secret_in_the_file_is_refused_without_being_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, key: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pgcdc.yaml").write_text(text)
    environ = {**BASE, "PGCDC_WEBHOOK_URL": URL} if "adapters" not in text else BASE
    if "adapters" in text:
        environ = {name: value for name, value in BASE.items() if name != "PGCDC_ADAPTERS"}
    with pytest.raises(ConfigError, match=rf"line 1: {key}: this file contains a secret") as caught:
        load_config({}, {**environ, "TOKEN": "other"}, None)
    assert "s3cr3t" not in str(caught.value) and "${NAME}" in caught.value.advice


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("webhook_signing_key: ${TOKEN}${TOKEN}", "${TOKEN}${TOKEN}"),
        ("webhook_headers: {Cookie: 'a=${TOKEN}; b=\"${TOKEN}\"'}", "a=${TOKEN}"),
        ("webhook_headers: {Authorization: 'Bearer ${TOKEN}'}", "Bearer ${TOKEN}"),
        ("webhook_url: https://h/x/${TOKEN}?key=s3cr3t${TOKEN}", "https://h/x/${TOKEN}?***"),
        ("webhook_url: https://h/s3cr3ts3cr3ts3cr3t${TOKEN}/x?${TOKEN}", "https://h/***/x?${TOKEN}"),
    ],
)
def test_variables_are_shown_by_name_and_nothing_secret_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, shown: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pgcdc.yaml").write_text(text)
    url = {} if "url" in text else {"PGCDC_WEBHOOK_URL": URL}
    found = show_yaml(load({}, {**BASE, **url, "TOKEN": "other"}, None))
    assert shown in found and "s3cr3t" not in found and "other" not in found


def test_flags_and_variables_say_headers_in_lines() -> None:
    config = load_config(
        {"webhook_headers": "X-A: 1\nX-B: 2: 3", "webhook_allow_private": True},
        {**BASE, "PGCDC_WEBHOOK_URL": URL},
        None,
    )
    options = config.adapter_specs[0].options
    assert isinstance(options, WebhookOptions)
    assert options.headers == {"X-A": "1", "X-B": "2: 3"} and options.allow_private


# --- requests


def record(number: int, lane: int = 0, is_barrier: bool = False, value: bytes = b"x", **more: Any) -> Record:
    given: dict[str, Any] = {"id": str(number), "channel": "c", "operation": "INSERT", "key": None, **more}
    return Record(f"{number:06}", value=value, lane=lane, is_barrier=is_barrier, **given)


TRACE = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "tracestate": "x=y"}


def make_request(events: list[Record], **options: Any) -> tuple[bytes, dict[str, str]]:
    return WebhookSink(WebhookOptions(url=URL, **options)).make_request(events)


def test_request_has_the_headers_of_the_manual_and_a_signature_over_what_is_sent() -> None:
    events = [record(1, value=b'{"a":1}', channel="pgcdc:tisch ä%\n", id="id of k", headers=TRACE)]
    body, headers = make_request(events, headers={"user-agent": "mine"}, signing_key="key")
    assert body == b'{"a":1}'
    assert headers["Content-Type"] == "application/json" and headers["user-agent"] == "mine"
    assert "User-Agent" not in headers
    assert headers["X-PGCDC-Event-ID"] == "id of k" and headers["X-PGCDC-Channel"] == "pgcdc:tisch%20%C3%A4%25%0A"
    assert headers["X-PGCDC-Signature"] == "sha256=" + hmac.new(b"key", body, hashlib.sha256).hexdigest()
    assert TRACE.items() <= headers.items()
    zipped, more = make_request(events, signing_key="key", batch_size=2, gzip=True)
    assert more["Content-Encoding"] == "gzip" and more["X-PGCDC-Batch-Size"] == "1"
    assert more["X-PGCDC-Signature"] == "sha256=" + hmac.new(b"key", zipped, hashlib.sha256).hexdigest()
    assert "X-PGCDC-Signature" not in make_request(events)[1]


def test_a_request_has_less_time_than_a_write() -> None:
    check_adapters([adapters.webhook(URL, request_timeout=29.0)])
    with pytest.raises(
        ConfigError, match="request_timeout is 40 s, but timeout, for a write of several requests, is only 30 s"
    ):
        check_adapters([adapters.webhook(URL, request_timeout=40)])
    with pytest.raises(ConfigError, match="--webhook-request-timeout"):
        load({"adapters": ["webhook"], "webhook_url": URL, "webhook_timeout": 10, "tables": "t"}, {}, None).check()
