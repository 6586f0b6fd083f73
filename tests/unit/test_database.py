"""Connecting without a server: quoting, table names, and passwords that must not appear anywhere."""

from __future__ import annotations

import os
import socket
import threading
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from pgcdc.core.errors import ConfigError, ConnectionLost, SourceError
from pgcdc.postgres.database import (
    connect,
    explain_errors,
    name_table,
    parse_url,
    quote_identifier,
    quote_literal,
    quote_qualified,
    redact,
    split_table,
)
from pgcdc.source.postgres.setup import slots
from pgcdc.source.postgres.setup.slots import check_wal, create_slot

names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)


@given(names, names)
@example('"', "'")
@example("a.b", 'c"."d')
def test_a_quoted_table_is_read_back(schema: str, table: str) -> None:
    assert split_table(quote_qualified(schema, table)) == (schema, table)


@given(names, names)
@example("public", "Orders")
@example("public", "public")
def test_the_short_name_of_a_table_is_read_back(schema: str, table: str) -> None:
    assert split_table(name_table(schema, table)) == (schema, table)


@given(names)
def test_a_literal_ends_only_at_its_last_quote(text: str) -> None:
    quoted = quote_literal(text)
    assert quoted[0] == quoted[-1] == "'"
    assert quoted[1:-1].replace("''", "") == text.replace("'", "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("orders", ("public", "orders")),
        ("Orders", ("public", "orders")),
        (" sales.Orders ", ("sales", "orders")),
        ('"Orders"', ("public", "Orders")),
        ('"We.ird"."Ta""ble"', ("We.ird", 'Ta"ble')),
        ("ÄPFEL", ("public", "Äpfel")),  # the server folds ASCII only
    ],
)
def test_tables_are_named_as_in_sql(text: str, expected: tuple[str, str]) -> None:
    assert split_table(text) == expected


@pytest.mark.parametrize("text", ["", " ", "a.b.c", "my-table", '"open', "a b", ".a", "a.", '""', "1st", "a;drop"])
def test_what_is_not_a_table_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a table name"):
        split_table(text)


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_names_that_postgresql_cannot_have_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        quote_identifier(name)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://u:secret@h:5432/d", "postgresql://u:***@h:5432/d"),
        ("postgres://u@h/d", "postgres://u@h/d"),
        ("postgresql://h/d?user=u&password=secret", "postgresql://h/d?user=u&password=***"),
        ("postgresql://u:se:cret@h/d?application_name=a@b", "postgresql://u:***@h/d?application_name=a@b"),
        ("host=h password='se cret' user=u", "user=u password=*** host=h"),
        ("postgresql://u:se@cret@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u:se/cret@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u:12/cret@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u:se%zzcret@h/d", "postgresql://u:***@h/d"),
        ("host=h se cret", "***"),
    ],
)
def test_passwords_are_hidden(url: str, expected: str) -> None:
    assert redact(url) == expected


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=8))
def test_a_properly_encoded_password_never_shows(password: str) -> None:
    assume(password not in "postgresql://user:***@host:5432/shop")
    shown = redact(f"postgresql://user:{quote(password, safe='')}@host:5432/shop")
    assert shown == "postgresql://user:***@host:5432/shop"


@pytest.mark.parametrize(
    "url",
    [
        "postgres://u:hush/hush@host/db",
        "postgres://u:12/hush@host/db",
        "postgres://u:x@hush@host/db",
        "postgres://u:hush%zz@host/db",
        "postgres://u:hush@[::1/db",
        "postgres://u:hush@127.0.0.1:99999/db",
        "postgres://u:hush@127.0.0.1:x/db",
        "postgres://u:p@127.0.0.1/db?hush=1",
        "host=x hush",
        "",
    ],
)
def test_a_bad_url_is_explained_without_quoting_it(url: str) -> None:
    with pytest.raises(SourceError) as caught:
        connect(url)
    assert "hush" not in str(caught.value)
    assert "percent-encoded" in caught.value.advice
    assert not isinstance(caught.value, ConnectionLost)
    assert caught.value.__cause__ is None


def test_url_of_bytes_that_are_no_text_is_refused() -> None:
    url = os.fsdecode(b"postgresql://u:hush\xff@h/d")
    with pytest.raises(SourceError, match="not UTF-8 text"):
        parse_url(url)
    assert "hush" not in redact(url)


def test_dsn_and_url_give_the_same_parameters() -> None:
    assert parse_url("host=h port=1 user=u dbname=d") == parse_url("postgresql://u@h:1/d")


def test_a_refused_connection_may_heal(unused_port: int) -> None:
    url = f"postgresql://u:hush@127.0.0.1:{unused_port}/d"
    with pytest.raises(
        ConnectionLost, match=f"cannot connect to 127.0.0.1:{unused_port}/d as u: Connection refused"
    ) as e:
        connect(url)
    assert "\n" not in str(e.value)
    assert "hush" not in str(e.value)


@pytest.mark.parametrize("where", ["url", "dsn", "sslpassword", "environment"])
def test_a_password_that_the_library_quotes_is_hidden(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def fail(conninfo: str, **_: object) -> None:
        raise psycopg.OperationalError(f'connection failed: FATAL:  what is "hush-hush" in {conninfo} of hush-hush?')

    monkeypatch.setattr(psycopg, "connect", fail)
    if where == "environment":
        monkeypatch.setenv("PGPASSWORD", "hush-hush")
    url = {
        "url": "postgresql://u:hush-hush@h/d",
        "dsn": "host=h user=u password=hush-hush",
        "sslpassword": "host=h sslpassword=hush-hush",
        "environment": "host=h",
    }[where]
    with pytest.raises(ConnectionLost, match=r"\*\*\*") as caught:
        connect(url)
    assert "hush" not in str(caught.value) + repr(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_at_the_start_a_refused_connection_is_wrong_configuration(unused_port: int) -> None:
    with pytest.raises(SourceError) as caught:
        connect(f"host=127.0.0.1 port={unused_port}", may_retry=False)
    assert caught.value.exit_code == 2


def test_a_server_that_does_not_answer_times_out(unused_port: int) -> None:
    with socket.create_server(("127.0.0.1", unused_port)), pytest.raises(ConnectionLost, match="timeout"):
        connect(f"host=127.0.0.1 port={unused_port}", connect_timeout_s=2)


def test_an_unknown_host_may_heal_and_is_named() -> None:
    with pytest.raises(ConnectionLost, match=r"no\.such\.host\.invalid") as caught:
        connect("postgresql://no.such.host.invalid/d")
    assert "host name" in caught.value.advice


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (psycopg.OperationalError("server closed the connection"), ConnectionLost),
        (psycopg.InterfaceError("the connection is closed"), ConnectionLost),
        (psycopg.errors.AdminShutdown("bye"), ConnectionLost),
        (psycopg.errors.TooManyConnections("full"), ConnectionLost),
        (psycopg.errors.InsufficientPrivilege("no"), SourceError),
        (psycopg.errors.UndefinedTable("no"), SourceError),
    ],
)
def test_errors_of_open_connections_are_ours(error: psycopg.Error, expected: type[SourceError]) -> None:
    with pytest.raises(SourceError) as caught, explain_errors("look"):
        raise error
    assert type(caught.value) is expected
    assert str(caught.value).startswith("cannot look: ")


@pytest.mark.parametrize(
    ("wal_level", "in_recovery", "reason"),
    [("logical", True, "standby"), ("replica", False, "wal_level is replica"), ("replica", True, "standby")],
)
def test_servers_that_cannot_be_captured(wal_level: str, in_recovery: bool, reason: str) -> None:
    with pytest.raises(SourceError, match=reason):
        check_wal(wal_level, in_recovery)
    check_wal("logical", in_recovery=False)


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- creating a slot


class Walsender:
    """Its creation of a slot waits until it is cancelled, and then fails, or was done already."""

    def __init__(self, *, is_made: bool) -> None:
        self.info = SimpleNamespace(server_version=170000, backend_pid=42)
        self.calls: list[str] = []
        self._is_made, self._cancelled = is_made, threading.Event()

    def execute(self, command: bytes) -> Any:
        self.calls.append(command.decode().split()[0])
        if command.startswith(b"CREATE"):
            assert self._cancelled.wait(5.0)
            if not self._is_made:
                raise psycopg.errors.QueryCanceled("canceling statement due to user request")
        return SimpleNamespace(fetchone=lambda: ("s", "0/16B3748", None, "pgoutput"))

    def cancel_safe(self, *, timeout: float) -> None:
        self.calls.append("cancel")
        self._cancelled.set()

    def close(self) -> None:
        self.calls.append("close")
        self._cancelled.set()


@pytest.mark.parametrize("is_made", [True, False])
@pytest.mark.parametrize(
    ("error", "expected"),
    [(psycopg.errors.AdminShutdown("terminating"), ConnectionLost), (KeyboardInterrupt(), KeyboardInterrupt)],
    ids=["monitor_lost", "interrupt"],
)
def test_whatever_ends_the_wait_for_a_slot_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, expected: type[BaseException], is_made: bool
) -> None:
    monkeypatch.setattr(slots, "_REPORT_EVERY_S", 0.01)
    walsender: Any = Walsender(is_made=is_made)

    def fail(*_: object) -> None:
        threading.Timer(1.0, walsender._cancelled.set).start()  # the transaction ends some time
        raise error

    monitor: Any = SimpleNamespace(execute=fail)
    with pytest.raises(expected):
        create_slot(walsender, "s", monitor=monitor)
    drop = ["DROP_REPLICATION_SLOT"] if is_made else []
    assert walsender.calls == ["CREATE_REPLICATION_SLOT", "cancel", *drop, "close"]
