"""Shared by the unit tests."""

from __future__ import annotations

import pytest

from pgcdc.core import log
from pgcdc.source.postgres.wire.rows import decoder_name


@pytest.fixture(params=["python", "compiled"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with both decoders."""
    monkeypatch.setenv("PGCDC_PURE_PYTHON", "1" if request.param == "python" else "0")
    if decoder_name() != request.param:
        pytest.skip("the compiled decoder was not built")
    return decoder_name()


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that a test runs in this process gives no times to the lines of the next test."""
    monkeypatch.setattr(log, "_format", None)
