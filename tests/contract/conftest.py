"""Shared by the contract tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sink_targets import TARGETS, Target, fresh
from targets.base import SERVERS

from pgcdc.core import failpoint
from pgcdc.playground.postgres import EmbeddedPostgres


@pytest.fixture(scope="session", autouse=True)
def servers(request: pytest.FixtureRequest) -> None:
    def start() -> EmbeddedPostgres:
        started: EmbeddedPostgres = request.getfixturevalue("postgres")
        return started

    SERVERS.start = start


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    with fresh(request.param) as made:
        yield made


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda point: monkeypatch.setattr(failpoint, "_POINTS", failpoint._parse(point.replace("@", "=raise@")))
