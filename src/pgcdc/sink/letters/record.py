"""Dead letters: the event as it was to be delivered, who refused it, and why. Also the interface of their stores."""

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
"""The outcome of a letter: it reached its target; the target has something newer; or it was refused again."""


class LetterSettings(Options):
    """How to handle events that a target refuses."""

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
    event: str  # The line without its newline; several lines if they share a position
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
        """The inverse of `to_json()`. Raises ValueError if invalid."""
        return _LETTER.validate_python(raw)


def make_letter(
    pipeline: str,
    adapter: str,
    lines: Sequence[str],
    reject: Reject,
    attempts: int,
    known: Mapping[str, Any] | None = None,
) -> DeadLetter:
    """The letter of the lines at one position. `known` has the id, channel and operation, if available."""
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
    """A target's message that is safe to store: without secrets, and of limited length."""
    return _plain(redact_text(text))[:MAX_ERROR]


def read_event(line: str) -> dict[str, Any]:
    """The details of a rendered event; empty if a transform changed its form."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _plain(text: str) -> str:
    """Remove characters that databases refuse in text."""
    return text.replace("\0", "").encode(errors="replace").decode()


# --- stores


class DeadLetters(Protocol):
    """Stores dead letters. Thread-safe: all adapters of a pipeline share one store."""

    pipeline: str = ""  # Recorded in letters; set when the source is known

    def check(self) -> None:
        """Check that letters can be recorded, without leaving anything behind. PgcdcError: they cannot."""
        return None

    def open(self) -> None:
        """Create what is needed. PgcdcError: it cannot be created."""
        return None

    def record(self, letters: Sequence[DeadLetter]) -> None:
        """Store letters; durable when this returns. A letter that already exists (by its id) stays unchanged."""

    def close(self) -> None:
        """Release resources; nothing is lost without this call."""
        return None


@dataclass(frozen=True, slots=True)
class Query:
    """Selects letters: all conditions must hold."""

    pipeline: str | None = None
    adapter: str | None = None
    ids: tuple[str, ...] = ()
    since: datetime | None = None
    before: datetime | None = None
    is_waiting: bool | None = None  # True: only letters still to be delivered. False: only settled ones
    after: str | None = None  # Only letters after this position
    limit: int = 0  # The most letters, first in the order of their positions; 0: all

    def matches(self, letter: DeadLetter) -> bool:
        """Whether the letter is selected, apart from the limit."""
        return (
            self.pipeline in (None, letter.pipeline)
            and self.adapter in (None, letter.adapter)
            and (not self.ids or letter.id in self.ids)
            and (self.since is None or letter.created_at >= self.since)
            and (self.before is None or letter.created_at < self.before)
            and self.is_waiting in (None, letter.is_waiting)
            and (self.after is None or letter.position > self.after)
        )


QUERY = TypeAdapter(Query)  # Serialises a query for a socket
_LETTER = TypeAdapter(DeadLetter)


@runtime_checkable
class ReadableDeadLetters(DeadLetters, Protocol):
    """A store that can be read: by people, and to redeliver letters."""

    def find(self, query: Query) -> Iterator[DeadLetter]:
        """The letters, in the order of their positions."""

    def mark(self, ids: Sequence[str], outcome: str, at: datetime | None, error: str = "") -> None:
        """Record the outcome of letters, durably. Without `at` they keep waiting, and the attempt is counted."""

    def purge(self, query: Query) -> int:
        """Delete letters permanently; returns how many. Letters recorded meanwhile stay."""


class StderrDeadLetters(DeadLetters):
    """Writes JSON lines to standard error, for log collectors. They cannot be read again."""

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
    """Reports and counts every letter, then discards it. The only way to lose an event, and only on request."""

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self._say = say

    def record(self, letters: Sequence[DeadLetter]) -> None:
        for letter in letters:
            self._say(
                f"event {letter.event_id or '-'} at {letter.position} was dropped (--dlq none): adapter "
                f"{letter.adapter} refused it: {letter.error_kind}: {letter.error}"
            )
