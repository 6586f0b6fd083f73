"""Where sinks write to, seen from the other end, and the events that tests give them.

The targets are those of `TARGETS` in each module of `targets`. What a target can say of itself stands in `targets/base.py`;
docs/contract.md says what the suite does with it.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import targets
from targets.base import BaseTarget, Target
from targets.events import (
    END,
    START,
    STREAM,
    WHOLE,
    batch,
    batch_of,
    by_key,
    cut,
    event,
    line,
    position_of,
    to_line,
    up_to,
)  # fmt: skip
from targets.file import FileTarget, FolderInTwoParts, FolderTarget

from pgcdc.core.position import Position
from pgcdc.sink.runner import Runner

__all__ = [
    "END", "REFERENCES", "START", "STREAM", "TARGETS", "WHOLE", "FileTarget", "FolderInTwoParts", "FolderTarget", "Target",
    "batch", "batch_of", "by_key", "cases", "check_all_arrived", "cut", "event", "fresh", "good", "having", "line",
    "opened", "position_of", "spoiled", "to_line", "up_to",
]  # fmt: skip


def _find_targets() -> dict[str, type[Target]]:
    modules = sorted(path.stem for path in Path(targets.__path__[0]).glob("*.py"))
    found: dict[str, type[Target]] = {}
    for name in modules:
        found |= vars(importlib.import_module(f"targets.{name}")).get("TARGETS", {})
    return found


TARGETS = _find_targets()
REFERENCES = [name for name, kind in TARGETS.items() if kind.is_reference]
"""One for each way of writing."""


def cases(values: Iterable[Any], names: Iterable[str] = TARGETS) -> list[Any]:
    """Every value for targets that are a reference, and the last one for others."""
    values = list(values)
    return [
        pytest.param(name, value, id=f"{name}-{value}")
        for name in names
        for value in (values if TARGETS[name].is_reference else values[-1:])
    ]


def having(ability: str) -> list[str]:
    """Targets with an ability that they have not by default."""
    return [name for name, kind in TARGETS.items() if getattr(kind, ability) is not getattr(BaseTarget, ability)]


@contextlib.contextmanager
def fresh(name: str) -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as folder:
        made = TARGETS[name](Path(folder))
        yield made
        made.close()


@contextlib.contextmanager
def opened(target: Target, start: Position = START) -> Iterator[Runner]:
    sink = target.sink()
    sink.open(start)
    yield sink
    sink.close()


def check_all_arrived(target: Target, expected: list[str] = WHOLE) -> None:
    """Every event once and in order; where the target cannot take back, repeats with the same id are allowed."""
    lines = target.lines()
    if not target.repeats:
        assert lines == expected
    first_seen = list(dict.fromkeys(lines))
    assert first_seen == expected


def spoiled(target: Target, bad: Sequence[Position]) -> list[str]:
    """The stream, with events at these places that the target refuses."""
    found = [target.bad_line(one) if one in bad else line(one) for one in STREAM]
    return [one for one in found if one is not None]


def good(bad: Sequence[Position]) -> list[str]:
    """The stream without these places."""
    return [line(one) for one in STREAM if one not in bad]
