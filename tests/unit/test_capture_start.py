"""A capture that fails right after its start says why; and what it confirms."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pgcdc.capture.control import CaptureOptions, _raise_failure, make_spec
from pgcdc.capture.process import CaptureProcess
from pgcdc.core.errors import SourceError
from pgcdc.core.position import Position
from pgcdc.core.state import StateDir, read_json, write_json
from pgcdc.source.rate import source as rate
from pgcdc.source.rate.options import RateOptions
from pgcdc.spool.index import Token


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


def test_only_a_token_that_is_saved_is_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source gives up what is confirmed: without the token nothing could be read on from there."""
    state, options = StateDir(tmp_path / "state"), RateOptions(rate_rows_per_second=1e6, rate_transactions=9)
    monkeypatch.setattr(rate, "BATCH_ROWS", 3 * options.rate_transaction_rows)
    rate.RateSource(options).prepare(state, consumer="main")
    process = CaptureProcess(make_spec(options, CaptureOptions(state_dir=state.path), os.getpid()), state)
    seen: list[tuple[Token, object]] = []

    def confirm(token: Token) -> None:
        seen.append((token, read_json(state.consumers_file)["token"]))

    try:
        ends = [rate.FIRST_COMMIT + count for count in (3, 6, 9)]
        process._consumers.join("main")
        process._stream.connect()
        monkeypatch.setattr(process._stream, "confirm", confirm)
        for reached, acked in zip(ends, (ends[0], ends[0] + 1, ends[2]), strict=True):
            monkeypatch.setattr(process._stream, "_now", lambda reached=reached: reached)
            process._consumers.ack("main", Position.end(acked))
            if acked == ends[2]:  # ahead of what was read again
                process._confirm()
            while process._read_stream():
                pass
            process._confirm()
        expected = [ends[0], ends[0], ends[1], ends[2]]  # an ack inside of a batch gives up what is before the batch
        assert seen == [(Token(end, b"%d" % end), [end, (b"%d" % end).hex()]) for end in expected]
    finally:
        process.close()
