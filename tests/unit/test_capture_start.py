"""A capture that fails right after its start says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgcdc.capture.control import _raise_failure
from pgcdc.core.errors import SourceError
from pgcdc.core.state import StateDir, write_json


def test_only_the_failure_of_the_process_that_was_started_is_raised(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.create()
    _raise_failure(state, 7)
    error = SourceError("no right", "grant it").to_json()
    write_json(state.capture_status, {"pid": 7, "phase": "failed", "last_error": error})
    _raise_failure(state, 0)
    _raise_failure(state, 8)
    with pytest.raises(SourceError, match="no right"):
        _raise_failure(state, 7)
    write_json(state.capture_status, {"pid": 7, "phase": "stopped", "last_error": error})
    _raise_failure(state, 7)
