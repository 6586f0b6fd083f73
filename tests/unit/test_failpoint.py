"""Failpoints: nothing without the variable; with it, exactly the named place at exactly the given hit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pgcdc.core import failpoint
from pgcdc.core.failpoint import FailpointError, hit


def set_points(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(failpoint, "_POINTS", failpoint._parse(text))


def fired(name: str) -> bool:
    try:
        hit(name)
    except FailpointError as error:
        assert str(error) == f"failpoint {name}"
        return True
    return False


def test_without_the_variable_nothing_happens() -> None:
    assert not fired("lane.planned")


@pytest.mark.parametrize(
    ("text", "hits"),
    [
        ("a", [True, False, False]),
        ("a=raise", [True, False, False]),
        ("a=raise@1", [True, False, False]),
        ("a=raise@3", [False, False, True]),
        ("b=raise", [False, False, False]),
        ("b=raise,a=raise@2", [False, True, False]),
        ("", [False, False, False]),
    ],
)
def test_fires_once_at_the_given_hit(monkeypatch: pytest.MonkeyPatch, text: str, hits: list[bool]) -> None:
    set_points(monkeypatch, text)
    assert [fired("a") for _ in hits] == hits


def test_marker_makes_it_fire_once_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCDC_FAILPOINT_ONCE", str(tmp_path))
    set_points(monkeypatch, "a")
    assert fired("a")
    assert [path.name for path in tmp_path.iterdir()] == ["a.hit"]
    set_points(monkeypatch, "a")
    assert not fired("a")


_CODE = (
    "from pgcdc.core.failpoint import hit; hit('a'); print('alive', flush=True); hit('a'); print('dead', flush=True)"
)


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [("a=kill@2", -signal.SIGKILL, "alive\n"), ("a=kill", -signal.SIGKILL, ""), ("b=kill", 0, "alive\ndead\n")],
)
def test_variable_is_read_at_import_and_kill_is_kill_9(text: str, code: int, said: str) -> None:
    environment = {**os.environ, "PGCDC_FAILPOINTS": text}
    result = subprocess.run([sys.executable, "-c", _CODE], env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (code, said)
