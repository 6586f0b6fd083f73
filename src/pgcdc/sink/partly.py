"""What is known of a batch that was delivered in part: what the target has of it, and where the bad event may be."""

from __future__ import annotations

from collections.abc import Iterable

from pgcdc.core.position import Position
from pgcdc.event.batch import Batch


class Memory:
    """Positions that the target has behind the ack, in this process."""

    def __init__(self) -> None:
        self._positions: set[str] = set()

    def add(self, positions: Iterable[str]) -> None:
        """These are delivered."""
        self._positions.update(positions)

    def rest(self, batch: Batch) -> Batch:
        """What of a batch is not."""
        return batch.without(self._positions)

    def prefix(self, batch: Batch) -> Position | None:
        """Up to where everything of a batch is; None if the first event is missing."""
        last = None
        for position in batch.positions().to_pylist() if self._positions else ():
            if position not in self._positions:
                break
            last = position
        return Position.parse(last) if last is not None else None

    def forget(self, up_to: Position) -> None:
        """The ack is there."""
        end = str(up_to)
        self._positions = {one for one in self._positions if one > end}

    def clear(self) -> None:
        """Forget all of it."""
        self._positions.clear()

    def __len__(self) -> int:
        return len(self._positions)


def is_single(batch: Batch) -> bool:
    """Whether all events of a batch share one position, which is never cut."""
    positions = batch.positions()
    return len(positions) > 0 and positions[0] == positions[len(positions) - 1]


def halve(batch: Batch) -> Batch:
    """About the first half of a batch; all of it if it has one position only."""
    positions = batch.positions().to_pylist()
    if is_single(batch) or not positions:
        return batch
    half = batch.first(max(1, len(positions) // 2))
    if len(half) == len(positions):  # the second half shares one position
        half = batch.first(positions.index(positions[-1]))
    return half
