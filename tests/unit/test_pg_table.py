"""pg_table without a server: its options, its secrets, and what SQLSTATEs mean."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg import errors

from pgcdc import Pipeline, adapters, sources
from pgcdc.config.documents import show_yaml
from pgcdc.config.layers import load, load_config
from pgcdc.core.errors import ConfigError, SinkError, SinkUnavailable
from pgcdc.core.position import Position
from pgcdc.sink.pg_table.options import PgTableOptions
from pgcdc.sink.pg_table.sink import PgTableSink
from pgcdc.sink.pg_table.target import Blame, blame, explain, kind_of

SOURCE = "postgresql://app@source/shop"
TARGET = "postgresql://app:hunter2@target/mirror"


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
        ({"pg_table_triggers": "on"}, "--pg-table-triggers needs --pg-table-mode apply"),
        ({"pg_table_mode": "apply", "pg_table_table": "x"}, "needs --pg-table-mode append"),
        ({"pg_table_table": "a.b.c"}, "not a table name"),
        ({"adapters": ["stdout"], "pg_table_mode": "apply"}, "--pg-table-mode needs --adapter pg_table"),
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
    with pytest.raises(ConfigError, match="this file contains the password") as caught:
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


# --- sessions


@pytest.mark.parametrize("found", [Position.end(100), None], ids=["older", "no_row"])
def test_lost_session_does_not_go_on_at_a_target_behind_what_was_written(
    monkeypatch: pytest.MonkeyPatch, found: Position | None
) -> None:
    sink: Any = PgTableSink(PgTableOptions(db=TARGET, table="t"))
    sink.name, sink._written, sink._conn = "a", Position.end(500), SimpleNamespace(closed=True)
    sink._positions = SimpleNamespace(title="pgcdc_positions")
    sink._context = SimpleNamespace(progress=SimpleNamespace(written=Position.end(500)))
    opened = SimpleNamespace(closed=False, close=lambda: None)

    def reopen(context: Any) -> Position | None:
        sink._conn, sink._written = opened, found
        return found

    monkeypatch.setattr(sink, "open", reopen)
    past: Any = SimpleNamespace(end=Position.end(600))
    for _ in range(2):
        for call in (sink.write, sink.redeliver):
            with pytest.raises(SinkUnavailable, match=r"is at|has no row"):
                call(past)
    found = Position.end(500)
    assert sink._session() is opened
