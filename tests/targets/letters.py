"""Dead letters in memory, which can be made to fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime

from pgcdc.core.errors import SinkError
from pgcdc.sink.letters.record import DeadLetter, Query


class Letters:
    """A store that outlives the sink, as a real one does."""

    def __init__(self) -> None:
        self.pipeline = "test"
        self.kept: dict[str, DeadLetter] = {}
        self.is_up = True

    def check(self) -> None:
        pass

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def record(self, letters: Sequence[DeadLetter]) -> None:
        if not self.is_up:
            raise SinkError("the store of dead letters is away", "Bring it back")
        for letter in letters:
            self.kept.setdefault(letter.id, letter)

    def find(self, query: Query) -> Iterator[DeadLetter]:
        return iter(sorted(filter(query.matches, self.kept.values()), key=lambda letter: letter.position))

    def mark(self, ids: Sequence[str], outcome: str, at: datetime | None, error: str = "") -> None:
        for one in ids:
            self.kept[one] = replace(self.kept[one], outcome=outcome, replayed_at=at)

    def purge(self, query: Query) -> int:
        raise NotImplementedError

    def lines(self) -> list[str]:
        """The events that are kept, in order."""
        return [line for letter in self.find(Query()) for line in letter.lines()]
