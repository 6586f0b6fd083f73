"""Shared by the contract tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sink_targets import TARGETS, Target, fresh

from pgcdc.ops import failpoint


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    with fresh(request.param) as made:
        yield made


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda point: monkeypatch.setattr(failpoint, "_POINTS", failpoint._parse(point))
