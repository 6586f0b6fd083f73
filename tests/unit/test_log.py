"""Lines on stderr: with their time while a pipeline runs, or one JSON object each."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta

import pytest
import typer

from pgcdc.cli.flags import EPILOG
from pgcdc.cli.report import CopyProgress, exit_on_error
from pgcdc.config import load_config
from pgcdc.core import log
from pgcdc.core.errors import ConfigError, ConfigErrors, SinkError
from pgcdc.sink.runner import tell
from pgcdc.sink.spec import DeliveryOptions

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


def test_lines_have_their_time_from_the_beginning_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    log.say("written")
    log.begin_log("text")
    log.say("ready")
    tell("audit", "recovered")
    log.say_error(SinkError("it broke", "Mend it"))
    plain, *stamped = capsys.readouterr().err.splitlines()
    assert plain == "pgcdc: written"
    wanted = ("pgcdc: ready", "pgcdc: adapter audit: recovered", "error: it broke. Mend it")
    assert len(stamped) == 3
    for line, text in zip(stamped, wanted, strict=True):
        assert re.fullmatch(STAMP + re.escape(text), line)


def test_json_is_one_object_a_line_with_what_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    log.begin_log("json")
    log.say("ready: slot a to file")
    tell("audit", "recovered after 3 s\nand more")
    log.say('warning: table public."Order Items": no column é')
    log.say("adapter audit: table t cannot be read again")
    both = [ConfigError("adapter x does not exist", "Add it"), ConfigError("no table")]
    with pytest.raises(typer.Exit), exit_on_error():
        raise ConfigErrors.of(both)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    for line in lines:
        assert abs(datetime.now(UTC) - datetime.fromisoformat(line.pop("time"))) < timedelta(seconds=5)
    assert lines == [
        {"level": "info", "message": "ready: slot a to file"},
        {"level": "info", "message": "recovered after 3 s\nand more", "adapter": "audit"},
        {"level": "warning", "message": 'table public."Order Items": no column é', "table": 'public."Order Items"'},
        {"level": "info", "message": "adapter audit: table t cannot be read again", "adapter": "audit", "table": "t"},
        {"level": "error", "message": "adapter x does not exist", "advice": "Add it", "adapter": "x"},
        {"level": "error", "message": "no table"},
    ]


def test_json_has_no_bars_between_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    log.begin_log("json")
    assert CopyProgress()._bars is None


def test_format_is_a_setting() -> None:
    assert (
        load_config({"tables": "t", "db": "postgresql://h/d"}, {"PGCDC_LOG_FORMAT": "json"}, None).log_format == "json"
    )
    with pytest.raises(ConfigError, match="text' or 'json'"):
        load_config({"tables": "t", "db": "postgresql://h/d", "log_format": "xml"}, {}, None)


def test_help_names_every_delivery_setting() -> None:
    assert [name for name in DeliveryOptions.model_fields if f"-{name.replace('_', '-')}" not in EPILOG] == []
