"""Sends events to the standard input of a command, at least once, each with its id.

    exit   one process per batch: it reads to the end of its input, and status 0 means that everything is delivered
    line   one process for all batches: it prints a line for each event that it has processed
    write  one process for all batches: everything it has read from its input counts as delivered

A command that fails or does not answer in time is ended, together with everything it started. A new one gets the
unacknowledged events, after the runner's delay. Exit status 65 (EX_DATAERR) means that an event is wrong; the runner finds
out which one.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator
from pydantic_core import PydanticCustomError

from pgcdc.core.counters import EXEC_RESTARTS, counters
from pgcdc.core.errors import Reject, SinkError, SinkRejected, SinkUnavailable
from pgcdc.core.secrets import redact_text
from pgcdc.core.settings import Names, setting, text_or_list
from pgcdc.event.batch import Batch
from pgcdc.sink.command import LOOK_S, Command, end_group, find_marked
from pgcdc.sink.contract import Sink, SinkContext
from pgcdc.sink.spec import SinkOptions

DATA_ERROR = 65  # EX_DATAERR of sysexits.h
NOT_FOUND = (126, 127)  # A shell's exit codes for a command that cannot be executed or does not exist
PATIENCE = 0.8  # A command's share of the write timeout; the rest is for ending it
CLOSE_S = 5.0  # How long a command may run after its input ends
GRACE_S = 2.0  # How long a command may take to end on SIGTERM
_WORD = re.compile(r"[\w./+-]+")
_LATER = "It is started again; nothing is lost"


def _split_words(value: Any) -> Any:
    """Splits the text of a flag or variable like a shell does, with no other shell syntax."""
    try:
        return tuple(shlex.split(value)) if isinstance(value, str) else value
    except ValueError as error:
        raise PydanticCustomError("not_parsed", "{reason}", {"reason": f"not a list of words: {error}"}) from None


class ExecOptions(SinkOptions):
    """JSON lines to the standard input of a command."""

    command: str | tuple[str, ...] = setting("", "the command, run by a shell: sh -c COMMAND; a list: the same as argv")
    argv: Annotated[tuple[str, ...], BeforeValidator(_split_words), text_or_list()] = setting(
        (), "the command and its arguments as a list, without a shell"
    )
    ack: Literal["exit", "line", "write"] = setting(
        "exit",
        "when an event counts as delivered: exit (one process per batch, which exits with 0), line (the "
        "command prints a line for it) or write (the command has read it)",
    )
    keep_env: Names = setting((), "variables that the command receives although they hold secrets of pgcdc")

    @model_validator(mode="after")
    def _check(self) -> ExecOptions:
        is_given = bool(self.script.strip() if isinstance(self.command, str) else self.command)
        if is_given == bool(self.argv):
            raise ValueError("command or argv is required" if not self.argv else "command and argv cannot be combined")
        if not self.words[0]:
            raise ValueError("the first word of argv is the command, but it is empty")
        if any("\0" in word for word in self.words):
            raise ValueError("a command cannot contain a NUL")
        return self

    @property
    def script(self) -> str:
        return self.command if isinstance(self.command, str) else ""

    @property
    def words(self) -> list[str]:
        return ["sh", "-c", self.script] if self.script.strip() else [*self.command, *self.argv]

    def make(self) -> Sink:
        return ExecSink(self)

    def place(self) -> str:
        return repr((self.command, self.argv))


class ExecSink(Sink):
    """Writes every event as one line to a command."""

    finds_by_halves = True

    def __init__(self, options: ExecOptions) -> None:
        self._options, self._by_line = options, options.ack == "line"
        self.form = "records" if self._by_line else "lines"
        self._command: Command | None = None  # The process for all batches
        self._has_failed = False

    def check(self, context: SinkContext) -> None:
        script, missing = self._options.script, self._options.words[0]
        if script:
            reason = _ask_shell("-n", "-c", script)
            if reason:
                raise SinkError(
                    f"adapter {context.name}: the shell cannot parse the command: {reason}", "Correct its command"
                )
            missing = _first_word(script)
            is_there = not missing or not _ask_shell("-c", 'command -v -- "$1"', "sh", missing)
        else:
            is_there = shutil.which(missing) is not None
        if not is_there:
            raise SinkError(
                f"adapter {context.name}: the command {missing} does not exist or is not executable",
                "Correct its command or argv, install it, or use its full path",
            )

    def open(self, context: SinkContext) -> None:
        self._context, self._title = context, f"the command of adapter {context.name}"
        self._patience_s = context.timeout_s * PATIENCE
        self._grace_s = min(GRACE_S, context.timeout_s * (1 - PATIENCE) / 2)
        for pid in find_marked(context.progress.owner):
            context.say(f"ended the command of an earlier run (process {pid})")
            end_group(pid, self._grace_s)

    def write(self, batch: Batch) -> None:
        if not len(batch):
            return
        if self._options.ack == "exit":
            return self._run(batch)
        command = self._command
        if command is not None and command.has_ended:
            status = self._end(command)
            if not self._by_line:
                self._context.say(
                    f"the command ended with status {status} between two batches; it may not have processed "
                    "everything that it read"
                )
            command = None
        if command is None:
            command = self._command = self._start()
        self._converse(command, batch)

    def redeliver(self, batch: Batch) -> Collection[str]:
        """Give past events to a separate process."""
        if self._options.ack == "exit":
            self._run(batch)
            return ()
        command = self._start()
        try:
            self._converse(command, batch)
        finally:
            command.finish(self._grace_s, self._grace_s)
        return ()

    def close(self) -> None:
        if self._command is not None:
            self._command.finish(CLOSE_S, self._grace_s)
            self._command = None

    def _run(self, batch: Batch) -> None:
        """Give a batch to a new process, and wait until it ends."""
        command, deadline = self._start(), time.monotonic() + self._patience_s
        command.give(batch)
        try:
            while command.pieces and not command.has_ended and time.monotonic() < deadline:
                command.exchange(LOOK_S)
            if command.pieces and not command.has_ended:
                raise self._too_late(command, "did not read all events")
            command.close_input()
            if not command.wait(deadline - time.monotonic()):
                raise self._too_late(command, "did not end")
            is_unread = bool(command.pieces or command.unread)
        finally:
            status = self._end(command)
        if status:
            raise self._reject(command) if status == DATA_ERROR else self._explain(status, command)
        if is_unread:
            raise SinkUnavailable(
                f"{self._title} exited with 0, but did not read all events",
                "Let it read its input to the end. Nothing is lost: the events are sent again",
            )
        self._has_failed = False

    def _converse(self, command: Command, batch: Batch) -> None:
        """Give a batch to the long-running process, until it is done."""
        command.give(batch)
        before = command.progress
        try:
            if command.run(str(batch.end), time.monotonic() + self._patience_s, self._context.delivered):
                return
        except SinkError:  # its answer makes no sense
            self._end(command)
            raise
        if command.has_ended or command.is_mute:
            first = command.first_open
            status = self._end(command, self._grace_s)
            raise self._reject(command, first) if status == DATA_ERROR and first else self._explain(status, command)
        if command.progress > before:
            raise SinkUnavailable(
                f"{self._title} is slow: it did not process all events within {self._patience_s:g} s",
                f"It continues with them. Raise {self._context.name}_timeout, or lower max_batch_rows",
            )
        raise self._too_late(command, "acknowledged nothing" if self._by_line else "read nothing")

    # --- the process

    def _start(self) -> Command:
        if self._has_failed:
            counters.add(EXEC_RESTARTS, adapter=self._context.name)
            self._has_failed = False
        options = self._options
        return Command(options.words, self._context, keep_env=options.keep_env, by_line=self._by_line)

    def _end(self, command: Command, patience_s: float = 0.0) -> int:
        """End it; the next one counts as a restart unless all is well."""
        self._has_failed = True
        if command is self._command:
            self._command = None
        return command.finish(patience_s, self._grace_s)

    # --- errors

    def _explain(self, status: int, command: Command) -> SinkError:
        said = command.last_words
        behind = f": {said}" if said else ""
        if status in NOT_FOUND:
            return SinkError(
                f"{self._title} does not exist or is not executable (status {status}){behind}",
                "Correct its command or argv, or install it; nothing is lost",
            )
        if status == 0:
            return SinkUnavailable(
                f"{self._title} ended before it had read all events{behind}",
                "With ack: line and ack: write it must keep reading. Nothing is lost: it is started again",
            )
        how = f"failed with status {status}"
        if -status in set(signal.Signals):
            how = f"was ended by {signal.Signals(-status).name}"
        return SinkUnavailable(f"{self._title} {how}{behind}", _LATER)

    def _too_late(self, command: Command, what: str) -> SinkUnavailable:
        self._end(command)
        flush = " Does it flush its output after each line?" if self._by_line else ""
        return SinkUnavailable(
            f"{self._title} {what} within {self._patience_s:g} s, and was ended",
            f"It is started again.{flush} If it needs longer, raise {self._context.name}_timeout",
        )

    def _reject(self, command: Command, position: str = "") -> SinkRejected:
        """The error for a wrong event. Without a position, the runner finds the event."""
        kind, said = "exec_65", command.last_words or f"exit status {DATA_ERROR}"
        return SinkRejected(
            f"{self._title} refuses {f'the event at {position}' if position else 'an event'} (status {DATA_ERROR})",
            "See its messages on standard error",
            [Reject(position, kind, said)] if position else [],
            kind=kind,
            text=said,
        )


def _first_word(script: str) -> str:
    """The first word of a text, the command; empty if only a shell can tell."""
    with contextlib.suppress(ValueError):
        word = next(iter(shlex.split(script, comments=True)), "")
        return word if _WORD.fullmatch(word) else ""
    return ""


def _ask_shell(*words: str) -> str:
    """A shell's complaint about a command; empty if there is none."""
    try:
        found = subprocess.run(
            ["sh", *words], capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SinkError(f"no shell found: {error}", "Use argv, which needs no shell") from error
    return redact_text((found.stderr.strip().splitlines() or ["?"])[-1]) if found.returncode else ""
