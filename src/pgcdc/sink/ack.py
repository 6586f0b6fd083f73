"""A sink's ack on disk: the position, and what the sink needs to restore itself to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pgcdc.position import Position
from pgcdc.state import read_json, write_json_durably

__all__ = ["AckFile"]


class AckFile:
    """Durable when `save` returns: file and folder are fsynced."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"{name}.json"
        raw = read_json(self._path)
        self.position: Position | None = Position.parse(raw["position"]) if raw else None
        self.detail: dict[str, Any] = raw.get("detail", {}) if raw else {}

    def save(self, position: Position, detail: dict[str, Any]) -> None:
        """Replace the ack."""
        write_json_durably(self._path, {"position": str(position), "detail": detail})
        self.position, self.detail = position, detail
