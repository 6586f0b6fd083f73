"""What a capture process is told, on its standard input."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pgcdc.core.settings import Bytes, Options, setting
from pgcdc.core.state import StateDir
from pgcdc.source.protocol import SourceOptions


class CaptureOptions(Options):
    """Settings of every capture, whatever its source."""

    fail_fast: bool = setting(False, "Exit 1 when the connection is lost, for supervisors.", "Database")
    state_dir: Path = setting(Path(".pgcdc"), "Spool, acks and checkpoints.", "Running", metavar="PATH")
    spool_limit: Bytes = setting(1 << 30, "Stop reading when this much is undelivered.", "Running", ge=1 << 20)


@dataclass(frozen=True, slots=True)
class CaptureSpec:
    """Everything a capture process needs to know."""

    kind: str
    """Of the source: its name in `source.registry`."""
    source: dict[str, Any]
    """The options of the source, whole: only the source reads them."""
    state_dir: str
    spool_limit: int
    watch_pid: int
    """The driver: when this process is gone, so are we."""
    fail_fast: bool = False
    is_restart: bool = False
    """The pipeline was running: a server that is not there is waited for, not an error."""

    def to_json(self) -> str:
        """For the standard input of the process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CaptureSpec:
        """The specification behind `to_json()`."""
        return cls(**json.loads(text))


def make_spec(source: SourceOptions, options: CaptureOptions, watch_pid: int) -> CaptureSpec:
    """What the capture process of this source is told."""
    return CaptureSpec(
        kind=source.kind,
        source=source.model_dump(mode="json"),
        state_dir=str(StateDir(options.state_dir).path),
        spool_limit=options.spool_limit,
        watch_pid=watch_pid,
        fail_fast=options.fail_fast,
    )
