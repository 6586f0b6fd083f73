"""One dead letter: the event as it was to be delivered, who refused it, and why."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

from pgcdc.core.errors import Reject
from pgcdc.core.secrets import redact_text

__all__ = ["DELIVERED", "FAILED", "SUPERSEDED", "DeadLetter", "make_letter", "safe_error"]

_NAMESPACE = uuid.UUID("3f0c5e0e-6d0b-5b52-9d5f-0d1b8f5f6c11")
MAX_ERROR = 2000

DELIVERED, SUPERSEDED, FAILED = "delivered", "superseded", "failed"
"""What became of a letter: it is at its target; the target has something newer; or it was refused once more."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An event that an adapter could not deliver. The same event of the same adapter always has the same id."""

    id: str
    pipeline: str
    """Server and slot: several pipelines may share a store."""
    adapter: str
    position: str
    event_id: str
    channel: str
    operation: str
    error_kind: str
    error: str
    attempts: int
    event: str
    """The line without its end; several ones if they share a position, which nobody can refuse apart."""
    created_at: datetime
    replayed_at: datetime | None = None
    """When it was settled: it is durable at the target, or not wanted there any more."""
    outcome: str | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it is still to be delivered."""
        return self.replayed_at is None

    def lines(self) -> list[str]:
        """The lines as a sink takes them."""
        return [f"{line}\n" for line in self.event.split("\n")]

    def to_json(self) -> dict[str, Any]:
        """As it stands in files."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _text(value) if isinstance(value, datetime) else value for name, value in found.items()}

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> DeadLetter:
        """The letter behind `to_json()`. Raises ValueError, KeyError or TypeError if it is none."""
        values = {field.name: raw[field.name] for field in fields(DeadLetter)}
        created, replayed = values["created_at"], values["replayed_at"]
        return DeadLetter(
            **{
                **values,
                "created_at": datetime.fromisoformat(created),
                "replayed_at": datetime.fromisoformat(replayed) if replayed else None,
            }
        )


def make_letter(pipeline: str, adapter: str, lines: Sequence[str], reject: Reject, attempts: int) -> DeadLetter:
    """The letter of the lines at one position."""
    known = _read(lines[0])
    return DeadLetter(
        id=str(uuid.uuid5(_NAMESPACE, json.dumps([pipeline, adapter, reject.position]))),
        pipeline=pipeline,
        adapter=adapter,
        position=reject.position,
        event_id=_word(known, "id"),
        channel=_word(known, "channel"),
        operation=_word(known, "operation"),
        error_kind=_plain(reject.kind)[:100],
        error=safe_error(reject.text),
        attempts=attempts,
        event="\n".join(line.rstrip("\n") for line in lines),
        created_at=datetime.now(UTC),
    )


def safe_error(text: str) -> str:
    """What a target said, as it may be kept: without secrets, and not endless."""
    return _plain(redact_text(text))[:MAX_ERROR]


def _read(line: str) -> dict[str, Any]:
    """What is known of an event; a transform may have given it any other form."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _word(event: dict[str, Any], name: str) -> str:
    value = event.get(name)
    return _plain(value) if isinstance(value, str) else ""


def _plain(text: str) -> str:
    """Without what no database takes in a text."""
    return text.replace("\0", "").encode(errors="replace").decode()


def _text(time: datetime) -> str:
    return time.isoformat(timespec="microseconds")
