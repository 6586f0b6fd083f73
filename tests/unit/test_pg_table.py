"""pg_table without a server: its options, its secrets, rows for COPY, and what SQLSTATEs mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import errors

from pgcdc import Pipeline, adapters, sources
from pgcdc.config.documents import show_yaml
from pgcdc.config.layers import load, load_config
from pgcdc.core.errors import ConfigError, SinkError, SinkUnavailable
from pgcdc.core.position import Position
from pgcdc.event.lines import quote_json
from pgcdc.sink.pg_table.append import copy_rows, copy_rows_one_by_one
from pgcdc.sink.pg_table.options import PgTableOptions
from pgcdc.sink.pg_table.session import Blame, blame, explain, kind_of

SOURCE = "postgresql://app@source/shop"
TARGET = "postgresql://app:hunter2@target/mirror"


# --- rows for COPY

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["\\N", "\\", '","source":"x"', '"payload":{', "\t\n\r", "}\n", "ä🐘", '"}],"position":"0'])  # fmt: skip


@st.composite
def events(draw: st.DrawFn) -> tuple[str, str]:
    """A line as the pipeline renders it, with its position."""
    position = str(
        Position.at(draw(st.integers(1, 3)) * 8, draw(st.integers(1, 1 << 40)), draw(st.sampled_from([0, 5])))
    )
    row = ",".join(
        f"{quote_json(draw(texts))}:{quote_json(draw(st.none() | texts))}" for _ in range(draw(st.integers(0, 3)))
    )
    time = draw(st.sampled_from(['"2026-11-16T00:46:06.258000Z"', '"2026-11-16T00:46:06.258000Z"', "null"]))
    block = draw(
        st.sampled_from(["", "", ',"transaction":{"xid":7,"commit_time":null,"seq":1}', ',"transaction":null'])
    )
    payload = f'{{"op":"INSERT","table":{quote_json(draw(texts))},"row":{{{row}}},"old":null}}'
    head = f'"id":"{draw(st.uuids())}","channel":{quote_json("pgcdc:" + draw(texts))},"operation":"INSERT"'
    return position, (
        f'{{{head},"payload":{payload},"source":"wal_replication","created_at":{time},"position":"{position}"{block}}}\n'
    )


@given(st.lists(events(), max_size=8), st.booleans())
def test_rows_are_the_same_with_and_without_parsing(drawn: list[tuple[str, str]], large: bool) -> None:
    kind = pa.large_string() if large else pa.string()
    table = pa.table(
        {"position": pa.array([one for one, _ in drawn], kind), "line": pa.array([one for _, one in drawn], kind)}
    )
    fast = b"".join(copy_rows(table))
    assert fast.count(b"\n") == len(drawn)
    assert [_values(row) for row in fast.splitlines()] == [
        _values(row) for row in copy_rows_one_by_one(table).splitlines()
    ]


def _values(row: bytes) -> list[Any]:
    """What COPY makes of a row; JSON by its meaning."""
    values = [None if one == "\\N" else _unescape(one) for one in row.decode().split("\t")]
    return [json.loads(one) if one and at in (3, 7) else one for at, one in enumerate(values)]


def _unescape(text: str) -> str:
    return text.replace("\\\\", "\0").replace("\\t", "\t").replace("\\n", "\n").replace("\\r", "\r").replace("\0", "\\")


def test_plain_events_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(events: pa.Table) -> bytes:
        raise AssertionError("parsed")

    monkeypatch.setattr("pgcdc.sink.pg_table.append.copy_rows_one_by_one", refuse)
    line = (
        '{"id":"0197a3c0-0000-7000-8000-000000000001","channel":"pgcdc:sales.orders","operation":"UPDATE","payload":{"op":'
        '"UPDATE","table":"orders","row":{"source":"a\\"b"},"old":null},"source":"wal_replication","created_at":'
        '"2026-11-16T00:46:06.258000Z","position":"0000000000000008/0000000000001"}\n'
    )
    block = line.replace("}\n", ',"transaction":{"xid":7,"commit_time":"2026-11-16T00:46:06.258000Z","seq":1}}\n')
    for lines in ([line] * 3, [block] * 3):
        table = pa.table({"position": ["0000000000000008/0000000000001"] * 3, "line": lines})
        assert b"".join(copy_rows(table)).count(b"\n") == 3


# --- options


def flags(**more: Any) -> dict[str, Any]:
    return {"db": SOURCE, "all_tables": True, "adapters": ["pg_table"], **more}


def options_of(config: Any) -> PgTableOptions:
    (spec,) = config.adapter_specs
    assert isinstance(spec.options, PgTableOptions)
    return spec.options


def test_database_is_the_sources_unless_another_one_is_given(tmp_path: Path) -> None:
    assert options_of(load_config(flags(), {}, None)).db == SOURCE
    assert options_of(load_config(flags(), {"PGCDC_PG_TABLE_DB": TARGET}, None)).db == TARGET
    secret = tmp_path / "url"
    secret.write_text(TARGET + "\n")
    options = options_of(load_config(flags(pg_table_db_file=str(secret)), {}, None))
    assert options.db == "" and options.resolved().db == TARGET
    pipeline = Pipeline(
        sources.postgres(SOURCE, all_tables=True), [adapters.pg_table(), adapters.pg_table(TARGET, name="b")]
    )
    assert [spec.options.model_dump()["db"] for spec in pipeline._chains.specs] == [SOURCE, TARGET]


def test_flags_and_rules_for_tables() -> None:
    given = flags(
        pg_table_mode="apply", pg_table_tables='public.orders=mirror.orders2, "a,b"=c', pg_table_create=False,
        pg_table_target_schema="mirror",
    )  # fmt: skip
    options = options_of(load_config(given, {}, None))
    assert options.tables == ("public.orders=mirror.orders2", '"a,b"=c')
    assert options.create is False and options.own_schema == "mirror"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"pg_table_db": "postgresql://u:s3cret@x@h:p/d"}, "cannot be read"),
        ({"pg_table_db_file": TARGET}, "not the path of a file"),
        ({"pg_table_db_file": "/no/such/file"}, "cannot be read"),
        ({"pg_table_triggers": "on"}, "--pg-table-triggers is for --pg-table-mode apply"),
        ({"pg_table_mode": "apply", "pg_table_table": "x"}, "is for --pg-table-mode append"),
        ({"pg_table_table": "a.b.c"}, "not a table name"),
        ({"adapters": ["stdout"], "pg_table_mode": "apply"}, "--pg-table-mode is for --adapter pg_table"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_without_its_secrets(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        load_config({**flags(), **given}, {}, None)
    assert "s3cret" not in str(caught.value) and "hunter2" not in str(caught.value)


def test_two_adapters_do_not_append_to_one_table(tmp_path: Path) -> None:
    file = tmp_path / "pgcdc.yaml"
    file.write_text("adapters: [{name: a, type: pg_table}, {name: b, type: pg_table}]\n")
    with pytest.raises(ConfigError, match="write to the same target: table pgcdc_events in source:/shop"):
        load_config({"db": SOURCE, "all_tables": True}, {}, file)


@pytest.mark.parametrize(
    "form", ["pg_table_db: {}\nadapters: [pg_table]", "adapters: [{{name: m, type: pg_table, db: '{}'}}]"]
)
def test_password_stands_in_no_file_and_is_never_shown(tmp_path: Path, form: str) -> None:
    file = tmp_path / "pgcdc.yaml"
    file.write_text(form.format(TARGET))
    with pytest.raises(ConfigError, match="the password stands in this file") as caught:
        load_config({"db": SOURCE, "all_tables": True}, {}, file)
    assert "hunter2" not in str(caught.value)
    file.write_text(form.format(TARGET.replace("hunter2", "${SECRET}")))
    loaded = load({"db": SOURCE, "all_tables": True}, {"SECRET": "hunter2"}, file)
    loaded.check()
    assert options_of(loaded.config).db == TARGET
    assert "hunter2" not in show_yaml(loaded) + repr(options_of(loaded.config))


# --- SQLSTATEs


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (errors.ConnectionFailure, Blame.TARGET_NOW),
        (errors.DeadlockDetected, Blame.TARGET_NOW),
        (errors.SerializationFailure, Blame.TARGET_NOW),
        (errors.DiskFull, Blame.TARGET_NOW),
        (errors.TooManyConnections, Blame.TARGET_NOW),
        (errors.LockNotAvailable, Blame.TARGET_NOW),
        (errors.AdminShutdown, Blame.TARGET_NOW),
        (errors.QueryCanceled, Blame.TARGET_NOW),
        (errors.TransactionTimeout, Blame.TARGET_NOW),
        (errors.ReadOnlySqlTransaction, Blame.TARGET_NOW),
        (errors.IoError, Blame.TARGET_NOW),
        (psycopg.OperationalError, Blame.TARGET_NOW),
        (psycopg.InterfaceError, Blame.TARGET_NOW),
        (errors.NotNullViolation, Blame.EVENT),
        (errors.InvalidTextRepresentation, Blame.EVENT),
        (errors.ProgramLimitExceeded, Blame.EVENT),
        (errors.RaiseException, Blame.EVENT),
        (errors.UndefinedColumn, Blame.SHAPE),
        (errors.UndefinedTable, Blame.SHAPE),
        (errors.DuplicateColumn, Blame.SHAPE),
        (errors.DuplicateTable, Blame.SHAPE),
        (errors.InsufficientPrivilege, Blame.SETUP),
        (errors.FeatureNotSupported, Blame.SETUP),
        (errors.InternalError_, Blame.SETUP),
        (psycopg.ProgrammingError, Blame.SETUP),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_whose_fault_an_error_is(kind: type[psycopg.Error], expected: Blame) -> None:
    error = kind("what the server said")
    assert blame(error) is expected
    made = explain("mirror", "write", error)
    assert isinstance(made, SinkUnavailable) is (expected is Blame.TARGET_NOW)
    assert isinstance(made, SinkError) and made.advice
    assert str(made).startswith("adapter mirror cannot write: what the server said")


def test_kinds_have_the_names_of_the_manual() -> None:
    assert kind_of(errors.NotNullViolation("x")) == "not_null_violation"
    assert kind_of(psycopg.OperationalError("x")) == "connection_lost"
