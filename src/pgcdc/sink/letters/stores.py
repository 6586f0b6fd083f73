"""Where dead letters are kept: what every store can do, what one can do that is read again, and the two that are not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TextIO, runtime_checkable

from pgcdc.core.errors import SinkError
from pgcdc.sink.letters.record import DeadLetter

__all__ = ["DeadLetters", "Dropped", "Query", "ReadableDeadLetters", "StderrDeadLetters"]


class DeadLetters(Protocol):
    """Takes dead letters. Thread-safe: all adapters of a pipeline have one store."""

    pipeline: str
    """Whose letters are recorded; known when the source is."""

    def check(self) -> None:
        """Whether letters could be recorded; leaves nothing behind. PgcdcError: they could not."""

    def open(self) -> None:
        """Make what is needed. PgcdcError: it cannot be."""

    def record(self, letters: Sequence[DeadLetter]) -> None:
        """Keep letters: durable when this returns. One that is there already (by its id) stays as it is."""

    def close(self) -> None:
        """Release what is held; nothing is lost if this is never called."""


@dataclass(frozen=True, slots=True)
class Query:
    """Which letters are meant: all conditions hold."""

    pipeline: str | None = None
    adapter: str | None = None
    ids: tuple[str, ...] = ()
    since: datetime | None = None
    before: datetime | None = None
    is_waiting: bool | None = None
    """Only those that are still to be delivered, or only those that are not."""
    after: str | None = None
    """Only those behind this position."""
    limit: int = 0
    """At most so many, the first in the order of their positions; 0: all."""

    def matches(self, letter: DeadLetter) -> bool:
        """Whether the letter is meant, apart from the limit."""
        return (
            self.pipeline in (None, letter.pipeline)
            and self.adapter in (None, letter.adapter)
            and (not self.ids or letter.id in self.ids)
            and (self.since is None or letter.created_at >= self.since)
            and (self.before is None or letter.created_at < self.before)
            and self.is_waiting in (None, letter.is_waiting)
            and (self.after is None or letter.position > self.after)
        )


@runtime_checkable
class ReadableDeadLetters(DeadLetters, Protocol):
    """A store that is read again: by people, and to deliver what is in it."""

    def find(self, query: Query) -> Iterator[DeadLetter]:
        """The letters, in the order of their positions."""

    def mark(self, ids: Sequence[str], outcome: str, at: datetime | None, error: str = "") -> None:
        """What became of letters, durably. Without `at` they still wait, and were tried once more."""

    def purge(self, query: Query) -> int:
        """Delete letters for good; how many. Those that are recorded meanwhile stay."""


class StderrDeadLetters:
    """JSON lines on standard error, for whoever collects that. They cannot be read again."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.pipeline = ""
        self._stream = stream

    def check(self) -> None:
        pass

    def open(self) -> None:
        pass

    def record(self, letters: Sequence[DeadLetter]) -> None:
        stream = self._stream or sys.stderr
        try:
            for letter in letters:
                stream.write(json.dumps({"dead_letter": letter.to_json()}, ensure_ascii=False) + "\n")
            stream.flush()
        except (OSError, ValueError) as error:  # ValueError: it is closed
            raise SinkError(
                f"standard error is closed: {error}", "Start with a reader at it, or use --dlq file"
            ) from error

    def close(self) -> None:
        pass


class Dropped:
    """Nowhere: every one is told and counted, and gone. The only way to lose an event, and only if it was asked for."""

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self.pipeline = ""
        self._say = say

    def check(self) -> None:
        pass

    def open(self) -> None:
        pass

    def record(self, letters: Sequence[DeadLetter]) -> None:
        for letter in letters:
            self._say(
                f"event {letter.event_id or '-'} at {letter.position} is dropped (--dlq none): adapter {letter.adapter} "
                f"refused it: {letter.error_kind}: {letter.error}"
            )

    def close(self) -> None:
        pass
