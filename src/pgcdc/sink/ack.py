"""A sink's ack on disk: the position, and what the sink needs to restore itself to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pgcdc.core.errors import StateError
from pgcdc.core.position import Position
from pgcdc.core.state import read_json, write_json_durably

__all__ = ["AckFile"]


class AckFile:
    """Durable when `save` returns: file and folder are fsynced."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"{name}.json"
        raw = read_json(self._path)
        self.position: Position | None = None
        self.detail: dict[str, Any] = {}
        if raw is not None:
            try:
                self.position, self.detail = Position.parse(raw["position"]), dict(raw["detail"])
            except (KeyError, TypeError, ValueError) as error:
                raise StateError(f"{self._path} is damaged", "Restore it from a backup") from error

    def save(self, position: Position, detail: dict[str, Any]) -> None:
        """Replace the ack."""
        write_json_durably(self._path, {"position": str(position), "detail": detail})
        self.position, self.detail = position, detail
