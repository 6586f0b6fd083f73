"""Dead letters: an event as it was to be delivered, who refused it, and why; their stores, and which one is meant."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO, runtime_checkable

from pgcdc.core.errors import ConfigError, Reject, SinkError
from pgcdc.core.secrets import redact_text
from pgcdc.core.settings import Options, setting
from pgcdc.core.state import Identity, StateDir
from pgcdc.postgres.database import connect, explain_errors, name_table, parse_url, split_table
from pgcdc.postgres.fields import DatabaseUrl, TableName

__all__ = [
    "DELIVERED",
    "FAILED",
    "SUPERSEDED",
    "DeadLetter",
    "DeadLetters",
    "Dropped",
    "LetterSettings",
    "Query",
    "ReadableDeadLetters",
    "StderrDeadLetters",
    "check_not_captured",
    "describe_store",
    "make_letter",
    "make_store",
    "name_pipeline",
    "read_row",
    "safe_error",
]

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


def make_letter(
    pipeline: str,
    adapter: str,
    lines: Sequence[str],
    reject: Reject,
    attempts: int,
    known: Mapping[str, Any] | None = None,
) -> DeadLetter:
    """The letter of the lines at one position. `known` has the id, channel and operation, if they need not be read."""
    known = _read(lines[0]) if known is None else known
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


def read_row(line: str) -> dict[str, Any]:
    """The row of a rendered event, in any of our envelopes; empty if there is none."""
    event = _read(line)
    payload = next((one for one in map(event.get, ("payload", "data")) if isinstance(one, dict)), event)
    return next((one for one in map(payload.get, ("row", "after", "before")) if isinstance(one, dict)), {})


def _word(event: Mapping[str, Any], name: str) -> str:
    value = event.get(name)
    return _plain(value) if isinstance(value, str) else ""


def _plain(text: str) -> str:
    """Without what no database takes in a text."""
    return text.replace("\0", "").encode(errors="replace").decode()


def _text(time: datetime) -> str:
    return time.isoformat(timespec="microseconds")


# --- stores


class DeadLetters(Protocol):
    """Takes dead letters. Thread-safe: all adapters of a pipeline have one store."""

    pipeline: str = ""
    """Whose letters are recorded; known when the source is."""

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
                f"standard error is closed: {error}", "Start with a reader at it, or use --dlq file"
            ) from error


class Dropped(DeadLetters):
    """Nowhere: every one is told and counted, and gone. The only way to lose an event, and only if it was asked for."""

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self._say = say

    def record(self, letters: Sequence[DeadLetter]) -> None:
        for letter in letters:
            self._say(
                f"event {letter.event_id or '-'} at {letter.position} is dropped (--dlq none): adapter {letter.adapter} "
                f"refused it: {letter.error_kind}: {letter.error}"
            )


# --- which store a configuration means


DEAD = "Dead letters"


class LetterSettings(Options):
    """What becomes of events that a target refuses."""

    dlq: Literal["file", "pg_table", "stderr", "none"] = setting(
        "file", "Where refused events go: file, pg_table, stderr, or none (they are lost).", DEAD, metavar="STORE"
    )
    dlq_file: Path | None = setting(
        None, "With --dlq file: this one. (default: dead_letters.jsonl in the state directory)", DEAD, metavar="PATH",
        example="dead_letters.jsonl",
    )  # fmt: skip
    dlq_db: DatabaseUrl = setting(
        "", "With --dlq pg_table: the database. Better in PGCDC_DLQ_DB. (default: the source)", DEAD, metavar="URL",
        example="postgresql://app@localhost:5432/ops", secret=True,
    )  # fmt: skip
    dlq_table: TableName = setting(
        "pgcdc_dead_letters", "With --dlq pg_table: the table; created if it is missing.", DEAD, metavar="NAME"
    )


class Letters(Protocol):
    """The settings of dead letters, and what of the source matters for them: `run.settings.PipelineSettings`."""

    @property
    def dlq(self) -> str: ...
    @property
    def dlq_file(self) -> Path | None: ...
    @property
    def dlq_db(self) -> str: ...
    @property
    def dlq_table(self) -> str: ...
    @property
    def db(self) -> str: ...
    @property
    def state_dir(self) -> Path: ...
    @property
    def temporary_slot(self) -> bool: ...
    @property
    def publication(self) -> str | None: ...
    @property
    def uses_existing(self) -> bool: ...


def make_store(config: Letters, say: Callable[[str], None] = lambda text: None) -> DeadLetters:
    """The store; nothing is touched yet."""
    if config.dlq == "none":
        return Dropped(say)
    if config.dlq == "pg_table":
        from pgcdc.sink.letters.pg_store import PgDeadLetters

        return PgDeadLetters(config.dlq_db or config.db, config.dlq_table)
    if config.dlq == "stderr" or (config.temporary_slot and config.dlq_file is None):
        return StderrDeadLetters()  # the state directory of a temporary slot ends with it
    from pgcdc.sink.letters.file_store import FileDeadLetters

    if config.dlq_file is not None:
        return FileDeadLetters(config.dlq_file)
    return FileDeadLetters(StateDir(config.state_dir).letters_file, makes_folder=True)


def name_pipeline(identity: Identity) -> str:
    """Under which name the letters of a pipeline stand in a store that others may use, too."""
    return f"{identity.system}/{identity.stream}"


def describe_store(config: Letters) -> dict[str, Any]:
    """What `pgcdc dlq` has to know of the store of a run, without secrets."""
    file = str(Path(config.dlq_file).absolute()) if config.dlq_file is not None else None
    elsewhere = bool(config.dlq_db) and config.dlq_db != config.db
    return {"dlq": config.dlq, "dlq_file": file, "dlq_table": config.dlq_table, "dlq_elsewhere": elsewhere}


def check_not_captured(config: Letters) -> None:
    """Raise ConfigError if a publication of the user has the table of dead letters: each one would be an event, too."""
    if config.dlq != "pg_table" or not config.uses_existing or not _is_source(config):
        return
    schema, table = split_table(config.dlq_table)
    with (
        explain_errors(f"read publication {config.publication}"),
        connect(config.db, application_name="pgcdc dead letters", may_retry=False) as conn,
    ):
        found = conn.execute(
            """SELECT 1 FROM pg_publication p WHERE pubname = %s AND (puballtables OR EXISTS (
                   SELECT FROM pg_publication_tables t
                   WHERE t.pubname = p.pubname AND t.schemaname = %s AND t.tablename = %s))""",
            [config.publication, schema, table],
        ).fetchone()
    if found is not None:
        raise ConfigError(
            f"publication {config.publication} has table {name_table(schema, table)}: each dead letter would be an event",
            "Use --dlq file, another database (--dlq-db), or a publication that names its tables",
        )


def _is_source(config: Letters) -> bool:
    if not config.dlq_db:
        return True
    ours, source = parse_url(config.dlq_db), parse_url(config.db)
    return all(ours.get(key) == source.get(key) for key in ("host", "hostaddr", "port", "dbname"))
