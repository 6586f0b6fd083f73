"""Every error that pgcdc raises on purpose, and how it is handled.

    PgcdcError
    ├── ConfigError             stop, exit 2   wrong flag, file or value: nothing was started
    │   └── ConfigErrors        stop, exit 2   several of them together
    ├── StateError              stop, exit 2   state directory unusable, locked or of another pipeline
    ├── SourceError             stop, exit 2   the database refuses what we need (right, slot, publication)
    │   └── ConnectionLost      retry          the connection ended; the slot keeps our place
    ├── DecodeError             stop, exit 1   a message we cannot read: names type, field and LSN
    ├── ConversionError         stop, exit 1   a value that does not fit its Spark type: names table, key, column, position
    ├── TransformError          stop, exit 1   a transform cannot process an event: names transform, position
    ├── SchemaChanged           stop, exit 1   a table has other columns than its typed query: load it again
    ├── GapError                stop, exit 1   continuing would skip changes
    ├── SpoolError              stop, exit 1   a segment or the index is damaged
    └── SinkError               stop, exit 1   the target is in a state we must not touch
        ├── SinkUnavailable     retry          the target may come back
        ├── ReloadNeeded        reload         the copy of a table cannot follow: the capture reads the table again
        └── SinkRejected        dead letter    this row will never be accepted

An error has one line that says what happened, and one that says what to do.
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
    """How the pipeline handles an error."""

    RETRY = "retry"
    DEAD_LETTER = "dead_letter"
    RELOAD = "reload"
    STOP = "stop"


def policy_of(error: BaseException) -> Policy:
    """What to do about an error. Every handler asks this function and nothing else."""
    if isinstance(error, SinkRejected) and not error.rejects:
        return Policy.STOP  # nobody knows which events are affected, and none may be dropped
    if isinstance(error, PgcdcError):
        return error.policy
    # Errors that a client library did not wrap: a lost connection may recover; anything else is a bug, and retrying
    # would hide it.
    return Policy.RETRY if isinstance(error, (ConnectionError, TimeoutError)) else Policy.STOP


def sentences(*texts: str) -> str:
    """Join texts into sentences. A client's message may already end with a full stop."""
    *before, last = [one for one in texts if one] or [""]
    return " ".join([*(one if one.endswith((".", "!", "?")) else f"{one}." for one in before), last])


class PgcdcError(Exception):
    """Base of all errors: `message` says what happened, `advice` what the operator can do."""

    policy: ClassVar[Policy] = Policy.STOP
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message, advice)
        self.message = message
        self.advice = advice

    def __str__(self) -> str:
        return sentences(self.message, self.advice)

    def name_state_dir(self, path: Path) -> None:
        """Name the state directory in the advice, unless it is the default one."""
        if path.absolute() != Path(".pgcdc").absolute():
            command = f"pgcdc resync --state-dir {shlex.quote(str(path))}"
            self.advice = re.sub(r"pgcdc resync(?! (--state-dir|without))", lambda _: command, self.advice)

    def to_json(self) -> dict[str, str]:
        """The form that crosses process boundaries (status files, control socket), with its kind from the tree
        above."""
        kind = next(one.__name__ for one in type(self).__mro__ if one.__name__ in _KINDS)
        return {"kind": kind, "message": self.message, "advice": self.advice}

    @staticmethod
    def from_json(raw: dict[str, str]) -> PgcdcError:
        """The error that another process wrote with `to_json`."""
        kind = _KINDS.get(raw.get("kind", ""), PgcdcError)
        return kind(raw.get("message", "unknown error"), raw.get("advice", ""))


class ConfigError(PgcdcError):
    """A flag, variable or file is wrong. Raised before anything starts."""

    exit_code = 2
    excerpt: str = ""  # The line of the file, with a caret below


class ConfigErrors(ConfigError):
    """Several problems at the same time: `errors` lists all of them, each with its place and advice."""

    errors: tuple[PgcdcError, ...] = ()

    @classmethod
    def of(cls, errors: Sequence[PgcdcError]) -> PgcdcError:
        """One error for all of them; a single error is returned as it is."""
        if len(errors) == 1:
            return errors[0]
        made = cls("; ".join(str(error) for error in errors))
        made.errors = tuple(errors)
        return made


class StateError(PgcdcError):
    """The state directory cannot be used: not writable, locked, or owned by another pipeline."""

    exit_code = 2


class SourceError(PgcdcError):
    """The database refuses something that we need."""

    exit_code = 2


class ConnectionLost(SourceError):
    """The connection ended. Reconnect: the slot keeps our place."""

    policy = Policy.RETRY
    exit_code = 1


class DecodeError(PgcdcError):
    """A replication message that we cannot read. Never skipped."""


class ConversionError(PgcdcError):
    """A value that does not fit its Spark type. It never becomes NULL."""


class TransformError(PgcdcError):
    """A transform cannot process an event. The event is never dropped."""


class SchemaChanged(PgcdcError):
    """The columns of a table differ from those of the typed query that reads it. Load the table again to continue from
    here."""


class GapError(PgcdcError):
    """Continuing would skip changes that were never delivered."""


class SpoolError(PgcdcError):
    """A segment or the index is damaged or missing."""


class SinkError(PgcdcError):
    """The target is in a state that we must not touch."""


class SinkUnavailable(SinkError):
    """The target does not answer; it may recover."""

    policy = Policy.RETRY

    def __init__(
        self, message: str, advice: str = "", *, retry_in_s: float = 0.0, positions: Sequence[str] = ()
    ) -> None:
        super().__init__(message, advice)
        self.retry_in_s = retry_in_s  # How long the target asked us to wait, if it did
        self.positions = tuple(positions)
        """The events that failed, if the sink knows them: they may become dead letters after the last attempt."""


@dataclass(frozen=True, slots=True)
class Reject:
    """One event that a target refuses permanently."""

    position: str
    kind: str  # A short word for people and filters: `http_400`, `not_null_violation`
    text: str  # What the target said, without secrets


class ReloadNeeded(SinkError):
    """The copies of these tables can no longer follow their source.

    Nothing of the batch was written. The batch is repeated without these tables, and the capture reads them again.
    `tables` maps each oid to its name and the reason.
    """

    policy = Policy.RELOAD

    def __init__(
        self, message: str = "", advice: str = "", tables: Mapping[int, tuple[str, str]] | None = None
    ) -> None:
        self.tables = dict(tables or {})
        told = "; ".join(f"table {name}: {reason}" for name, reason in self.tables.values())
        super().__init__(message or told, advice)


class SinkRejected(SinkError):
    """The target will never accept these events; the batch may succeed without them.

    Without `rejects` the events are not known: the pipeline stops, or, for a sink that `finds_by_halves`, the runner
    finds them by splitting the batch. `kind` and `text` then describe the events it finds, as in `Reject`.
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


# --- delays before the next attempt, with jitter so that clients that failed together do not retry together


def full_jitter_s(
    attempt: int, base_s: float, cap_s: float, uniform: Callable[[float, float], float] = random.uniform
) -> float:
    """A random delay between 0 and `base_s` · 2^attempt, at most `cap_s`. The first attempt is 0."""
    return uniform(0.0, min(cap_s, base_s * 2.0 ** min(attempt, 64)))


def reconnect_delay_s(attempt: int) -> float:
    """A random delay up to 100 ms · 2^attempt: at least 100 ms, at most 30 s."""
    return max(0.1, full_jitter_s(attempt, 0.1, 30.0))
