"""Dead letters: an event as it was to be delivered, who refused it, and why; and what a store of them is."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO, runtime_checkable

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from pgcdc.core.errors import Reject, SinkError
from pgcdc.core.secrets import redact_text
from pgcdc.core.settings import Options, setting
from pgcdc.postgres.selection import DatabaseUrl, TableName

_NAMESPACE = uuid.UUID("3f0c5e0e-6d0b-5b52-9d5f-0d1b8f5f6c11")
MAX_ERROR = 2000
DEAD = "Dead letters"

DELIVERED, SUPERSEDED, FAILED = "delivered", "superseded", "failed"
"""A letter's outcome: it is at its target; the target has something newer; or it was refused again."""


class LetterSettings(Options):
    """What becomes of events that a target refuses."""

    dlq: Literal["file", "pg_table", "stderr", "none"] = setting(
        "file", "Where refused events go: file, pg_table, stderr, or none (they are lost).", DEAD, metavar="STORE"
    )
    dlq_file: Path | None = setting(
        None, "With --dlq file: the file. (default: dead_letters.jsonl in the state directory)", DEAD, metavar="PATH",
        example="dead_letters.jsonl",
    )  # fmt: skip
    dlq_db: DatabaseUrl = setting(
        "", "With --dlq pg_table: the database. Better in PGCDC_DLQ_DB. (default: the source)", DEAD, metavar="URL",
        example="postgresql://app@localhost:5432/ops", secret=True,
    )  # fmt: skip
    dlq_table: TableName = setting(
        "pgcdc_dead_letters", "With --dlq pg_table: the table; created if it is missing.", DEAD, metavar="NAME"
    )


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An event that an adapter could not deliver. The same event of the same adapter always has the same id."""

    id: str
    pipeline: str  # Server and slot: several pipelines may share a store
    adapter: str
    position: str
    event_id: str
    channel: str
    operation: str
    error_kind: str
    error: str
    attempts: int
    event: str  # The line without its end; several ones if they share a position, which nobody can refuse apart
    created_at: datetime
    replayed_at: datetime | None = None  # When it was settled: durable at the target, or no longer wanted there
    outcome: str | None = None

    @property
    def is_waiting(self) -> bool:
        return self.replayed_at is None

    def lines(self) -> list[str]:
        return [f"{line}\n" for line in self.event.split("\n")]

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = _LETTER.dump_python(self, mode="json")
        return found

    @staticmethod
    def from_json(raw: Any) -> DeadLetter:
        """Inverse of `to_json()`. Raises ValueError if invalid."""
        return _LETTER.validate_python(raw)


def make_letter(
    pipeline: str,
    adapter: str,
    lines: Sequence[str],
    reject: Reject,
    attempts: int,
    known: Mapping[str, Any] | None = None,
) -> DeadLetter:
    """The letter of the lines at one position. `known` has the id, channel and operation, if known."""
    known = read_event(lines[0]) if known is None else known
    event_id, channel, operation = (
        _plain(value) if isinstance(value, str) else "" for value in map(known.get, ("id", "channel", "operation"))
    )
    return DeadLetter(
        id=str(uuid.uuid5(_NAMESPACE, json.dumps([pipeline, adapter, reject.position]))),
        pipeline=pipeline,
        adapter=adapter,
        position=reject.position,
        event_id=event_id,
        channel=channel,
        operation=operation,
        error_kind=_plain(reject.kind)[:100],
        error=safe_error(reject.text),
        attempts=attempts,
        event="\n".join(line.rstrip("\n") for line in lines),
        created_at=datetime.now(UTC),
    )


def safe_error(text: str) -> str:
    """A target's message as it may be kept: without secrets, and limited."""
    return _plain(redact_text(text))[:MAX_ERROR]


def read_event(line: str) -> dict[str, Any]:
    """The details of a rendered event; empty if a transform changed its form."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _plain(text: str) -> str:
    """Without characters that databases refuse in text."""
    return text.replace("\0", "").encode(errors="replace").decode()


# --- stores


class DeadLetters(Protocol):
    """Takes dead letters. Thread-safe: all adapters of a pipeline have one store."""

    pipeline: str = ""  # Whose letters are recorded; known when the source is

    def check(self) -> None:
        """Whether letters could be recorded; leaves nothing behind. PgcdcError: they could not."""
        return None

    def open(self) -> None:
        """Make what is needed. PgcdcError: it cannot be."""
        return None

    def record(self, letters: Sequence[DeadLetter]) -> None:
        """Keep letters: durable when this returns. One that is there already (by its id) stays as it is."""

    def close(self) -> None:
        """Release what is held; nothing is lost if this is never called."""
        return None


@dataclass(frozen=True, slots=True)
class Query:
    """Which letters are meant: all conditions hold."""

    pipeline: str | None = None
    adapter: str | None = None
    ids: tuple[str, ...] = ()
    since: datetime | None = None
    before: datetime | None = None
    is_waiting: bool | None = None  # Only those that are still to be delivered, or only those that are not
    after: str | None = None  # Only those behind this position
    limit: int = 0  # At most so many, the first in the order of their positions; 0: all

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


QUERY = TypeAdapter(Query)  # How a query crosses a socket
_LETTER = TypeAdapter(DeadLetter)


@runtime_checkable
class ReadableDeadLetters(DeadLetters, Protocol):
    """A store that is read again: by people, and to deliver what is in it."""

    def find(self, query: Query) -> Iterator[DeadLetter]:
        """The letters, in the order of their positions."""

    def mark(self, ids: Sequence[str], outcome: str, at: datetime | None, error: str = "") -> None:
        """What became of letters, durably. Without `at` they still wait, and were tried once more."""

    def purge(self, query: Query) -> int:
        """Delete letters for good; how many. Those that are recorded meanwhile stay."""


class StderrDeadLetters(DeadLetters):
    """JSON lines on standard error, for whoever collects that. They cannot be read again."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def record(self, letters: Sequence[DeadLetter]) -> None:
        stream = self._stream or sys.stderr
        try:
            for letter in letters:
                stream.write(json.dumps({"dead_letter": letter.to_json()}, ensure_ascii=False) + "\n")
            stream.flush()
        except (OSError, ValueError) as error:  # ValueError: it is closed
            raise SinkError(
                f"standard error is closed: {error}", "Start pgcdc with a reader on it, or use --dlq file"
            ) from error


class Dropped(DeadLetters):
    """Nowhere: every one is told and counted, and gone. The only way to lose an event, and only if it was asked for."""

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self._say = say

    def record(self, letters: Sequence[DeadLetter]) -> None:
        for letter in letters:
            self._say(
                f"event {letter.event_id or '-'} at {letter.position} was dropped (--dlq none): adapter "
                f"{letter.adapter} refused it: {letter.error_kind}: {letter.error}"
            )
