"""Every error pgcdc raises on purpose, and what becomes of it.

    PgcdcError
    ├── ConfigError             stop, exit 2   wrong flag, file or value: nothing was started
    │   └── ConfigErrors        stop, exit 2   several of them at once
    ├── StateError              stop, exit 2   state directory unusable, locked or of another pipeline
    ├── SourceError             stop, exit 2   the database refuses what we need (right, slot, publication)
    │   └── ConnectionLost      retry          the connection ended; the slot keeps our place
    ├── DecodeError             stop, exit 1   a message we cannot read: names type, field and LSN
    ├── ConversionError         stop, exit 1   a value without a place in its Spark type: names table, key, column, position
    ├── TransformError          stop, exit 1   a transform cannot do what it is told with an event: names transform, position
    ├── SchemaChanged           stop, exit 1   a table has other columns than its typed query: load it again
    ├── GapError                stop, exit 1   going on would skip changes
    ├── SpoolError              stop, exit 1   a segment or the index is damaged
    └── SinkError               stop, exit 1   the target is in a state we must not touch
        ├── SinkUnavailable     retry          the target may come back
        ├── ReloadNeeded        reload         the copy of a table cannot follow: the capture reads the table again
        └── SinkRejected        dead letter    this row will never be accepted

An error carries one line that says what happened and one that says what to do.
"""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import ClassVar

__all__ = [
    "ConfigError",
    "ConfigErrors",
    "ConnectionLost",
    "ConversionError",
    "DecodeError",
    "GapError",
    "PgcdcError",
    "Policy",
    "Reject",
    "ReloadNeeded",
    "SchemaChanged",
    "SinkError",
    "SinkRejected",
    "SinkUnavailable",
    "SourceError",
    "SpoolError",
    "StateError",
    "TransformError",
    "full_jitter_s",
    "policy_of",
    "reconnect_delay_s",
    "sentences",
]


class Policy(Enum):
    """What the pipeline does with an error of a kind."""

    RETRY = "retry"
    DEAD_LETTER = "dead_letter"
    RELOAD = "reload"
    STOP = "stop"


def policy_of(error: BaseException) -> Policy:
    """What becomes of an error: the one place that is asked, by everybody who catches one."""
    if isinstance(error, SinkRejected) and not error.rejects:
        return Policy.STOP  # nobody knows which events it is about, and none is dropped
    if isinstance(error, PgcdcError):
        return error.policy
    # What a client library lets through: a connection may come back; anything else is a defect, and trying again hides it.
    return Policy.RETRY if isinstance(error, (ConnectionError, TimeoutError)) else Policy.STOP


def sentences(*texts: str) -> str:
    """Texts one behind the other. What a client said may have its full stop already."""
    *before, last = [one for one in texts if one] or [""]
    return " ".join([*(one if one.endswith((".", "!", "?")) else f"{one}." for one in before), last])


class PgcdcError(Exception):
    """Base of the tree: `message` says what happened, `advice` what the operator can do."""

    policy: ClassVar[Policy] = Policy.STOP
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message, advice)
        self.message = message
        self.advice = advice

    def __str__(self) -> str:
        return sentences(self.message, self.advice)

    def name_state_dir(self, path: Path) -> None:
        """Say in the advice which state directory it is about, unless that is the default."""
        if path.absolute() != Path(".pgcdc").absolute():
            command = f"pgcdc resync --state-dir {shlex.quote(str(path))}"
            self.advice = re.sub(r"pgcdc resync(?! (--state-dir|without))", lambda _: command, self.advice)

    def to_json(self) -> dict[str, str]:
        """The form that crosses process boundaries (status files, control socket), under a kind of the tree above."""
        kind = next(one.__name__ for one in type(self).__mro__ if one.__name__ in _KINDS)
        return {"kind": kind, "message": self.message, "advice": self.advice}

    @staticmethod
    def from_json(raw: dict[str, str]) -> PgcdcError:
        """The error another process wrote with `to_json`."""
        kind = _KINDS.get(raw.get("kind", ""), PgcdcError)
        return kind(raw.get("message", "unknown error"), raw.get("advice", ""))


class ConfigError(PgcdcError):
    """A flag, variable or file is wrong. Raised before anything is started."""

    exit_code = 2
    excerpt: str = ""  # The line of the file, with a caret below


class ConfigErrors(ConfigError):
    """Several things are wrong at once: `errors` has them all, each with its place and advice."""

    errors: tuple[PgcdcError, ...] = ()

    @classmethod
    def of(cls, errors: Sequence[PgcdcError]) -> PgcdcError:
        """One error for all of them; of a single one, that."""
        if len(errors) == 1:
            return errors[0]
        made = cls("; ".join(str(error) for error in errors))
        made.errors = tuple(errors)
        return made


class StateError(PgcdcError):
    """The state directory cannot be used: not writable, locked, or of another pipeline."""

    exit_code = 2


class SourceError(PgcdcError):
    """The database refuses something that we need."""

    exit_code = 2


class ConnectionLost(SourceError):
    """The connection ended. The slot keeps our place: connect again."""

    policy = Policy.RETRY
    exit_code = 1


class DecodeError(PgcdcError):
    """A replication message that we cannot read. Never skipped."""


class ConversionError(PgcdcError):
    """A value that has no place in its Spark type. Never NULL instead."""


class TransformError(PgcdcError):
    """A transform cannot do with an event what it is told to. The event is never left out instead."""


class SchemaChanged(PgcdcError):
    """A table has other columns than the typed query that reads it. The query goes on there when it is loaded again."""


class GapError(PgcdcError):
    """Going on would skip changes that were never delivered."""


class SpoolError(PgcdcError):
    """A segment or the index is damaged or missing."""


class SinkError(PgcdcError):
    """The target is in a state that we must not touch."""


class SinkUnavailable(SinkError):
    """The target does not answer; it may come back."""

    policy = Policy.RETRY

    def __init__(
        self, message: str, advice: str = "", *, retry_in_s: float = 0.0, positions: Sequence[str] = ()
    ) -> None:
        super().__init__(message, advice)
        self.retry_in_s = retry_in_s  # How long the target wants to be left alone, if it said so
        self.positions = tuple(positions)
        """The events that failed, if the sink can tell: they may go to dead letters when tries are used up."""


@dataclass(frozen=True, slots=True)
class Reject:
    """One event that a target refuses, whatever is tried."""

    position: str
    kind: str  # A short word for people and filters: `http_400`, `not_null_violation`
    text: str  # What the target said, without secrets


class ReloadNeeded(SinkError):
    """The copies of these tables cannot follow their source. Nothing of the batch was written: it comes again without
    them, and the capture reads them again. `tables` has for each oid its name and why."""

    policy = Policy.RELOAD

    def __init__(
        self, message: str = "", advice: str = "", tables: Mapping[int, tuple[str, str]] | None = None
    ) -> None:
        self.tables = dict(tables or {})
        told = "; ".join(f"table {name}: {reason}" for name, reason in self.tables.values())
        super().__init__(message or told, advice)


class SinkRejected(SinkError):
    """The target will never accept these events; the same batch without them is worth a try.

    Without `rejects` nobody knows which ones they are: the pipeline stops, or the runner of a sink that `finds_by_halves`
    finds out. `kind` and `text` are for the event that it finds, as in `Reject`.
    """

    policy = Policy.DEAD_LETTER

    def __init__(
        self, message: str, advice: str = "", rejects: Sequence[Reject] = (), *, kind: str = "rejected", text: str = ""
    ) -> None:
        super().__init__(message, advice)
        self.rejects = tuple(rejects)
        self.kind = kind
        self.text = text or message


_KINDS: dict[str, type[PgcdcError]] = {
    kind.__name__: kind
    for kind in (
        PgcdcError, ConfigError, ConfigErrors, StateError, SourceError, ConnectionLost, DecodeError,
        ConversionError, TransformError, SchemaChanged, GapError, SpoolError, SinkError, SinkUnavailable, ReloadNeeded,
        SinkRejected,
    )
}  # fmt: skip


# --- how long to wait before the next try: those who failed together do not come back together


def full_jitter_s(
    attempt: int, base_s: float, cap_s: float, uniform: Callable[[float, float], float] = random.uniform
) -> float:
    """Anything between 0 and `base_s` · 2^attempt, at most `cap_s`; the first attempt is 0."""
    return uniform(0.0, min(cap_s, base_s * 2.0 ** min(attempt, 64)))


def reconnect_delay_s(attempt: int) -> float:
    """Full jitter: anything up to 100 ms · 2^attempt, at most 30 s, at least 100 ms."""
    return max(0.1, full_jitter_s(attempt, 0.1, 30.0))
