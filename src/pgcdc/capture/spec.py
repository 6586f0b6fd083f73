"""What a capture process is told, on its standard input."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from pgcdc.source.postgres.toast.resolver import ToastOptions
from pgcdc.source.postgres.wire.protocol import WireOptions

__all__ = ["CaptureSpec"]


@dataclass(frozen=True, slots=True)
class CaptureSpec:
    """Everything a capture process needs to know."""

    url: str
    slot: str
    publications: tuple[str, ...]
    state_dir: str
    spool_limit_bytes: int
    watch_pid: int
    """The driver: when this process is gone, so are we."""
    temporary: bool = False
    fail_fast: bool = False
    is_restart: bool = False
    """The pipeline was running: a server that is not there is waited for, not an error."""
    wire: WireOptions = WireOptions()  # noqa: RUF009 - frozen
    """What the server is asked for."""
    toast: ToastOptions = ToastOptions()  # noqa: RUF009 - frozen
    snapshot_only: bool = False
    """The stream is never read: only the rows of the initial snapshot are wanted."""
    snapshot_hold_limit_s: float = 6 * 3600.0
    signal_table: str = "pgcdc_signals"
    """Rows that are inserted there ask for snapshots, if it is captured."""
    chunk_size: int = 0
    """Rows that incremental snapshots read at a time, unless a request says otherwise; 0: what is read in a moment."""
    chunk_delay_s: float = 0.0
    read_added: bool = False
    """Existing rows of tables that are new in the publications are read."""

    def to_json(self) -> str:
        """For the standard input of the process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CaptureSpec:
        """The specification behind `to_json()`."""
        raw = json.loads(text)
        parsed = {"wire": WireOptions(**raw["wire"]), "toast": ToastOptions(**raw["toast"])}
        return cls(**{**raw, "publications": tuple(raw["publications"]), **parsed})
