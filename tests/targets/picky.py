"""A file that refuses lines and has outages: the smallest target with every ability, for the suite's own sake."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pgcdc.core.errors import Reject, SinkRejected, SinkUnavailable
from pgcdc.core.position import Position
from pgcdc.event.batch import Batch
from pgcdc.sink.file import FileSink
from targets.base import BaseTarget
from targets.events import event, to_line

_BAD = "refuse this"


class PickyTarget(BaseTarget):
    type, before_ack, can_break, is_made_by_options = "file", "sink.before_ack", True, False

    def __init__(self, folder: Path) -> None:
        self.acks, self.path = folder, folder / "events.jsonl"
        self.is_up, self.takes_bad = True, False

    def options(self) -> Mapping[str, Any]:
        return {"path": str(self.path)}

    def make(self) -> FileSink:
        return _PickySink(self)

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines(keepends=True) if self.path.exists() else []

    def break_target(self) -> None:
        self.is_up = False

    def heal_target(self) -> None:
        self.is_up = True

    def bad_line(self, position: Position) -> str:
        return to_line(event(position, text=_BAD))

    def accept_bad(self) -> None:
        self.takes_bad = True

    def wrong_options(self) -> Sequence[tuple[Mapping[str, Any], str]]:
        return [({}, "path")]


class _PickySink(FileSink):
    """Names one event after the other, as a target does that answers for each."""

    def __init__(self, target: PickyTarget) -> None:
        super().__init__(target.path)
        self._target = target

    def write(self, batch: Batch) -> None:
        self._look_at(batch)
        super().write(batch)

    def redeliver(self, batch: Batch) -> Collection[str]:
        self._look_at(batch)
        return super().redeliver(batch)

    def _look_at(self, batch: Batch) -> None:
        if not self._target.is_up:
            raise SinkUnavailable("the picky file is away", "Wait for it")
        for position, line in zip(
            *(batch.events.column(name).to_pylist() for name in ("position", "line")), strict=True
        ):
            if _BAD in line and not self._target.takes_bad:
                raise SinkRejected(
                    "the picky file refuses an event", "Send others", [Reject(position, "picky", "not with me")]
                )


TARGETS = {"file_picky": PickyTarget}
