"""Events to the standard input of a command, at least once, each with its id.

    exit   one process for each batch: it reads to the end of its input, and 0 means that all of it is delivered
    line   one process for all: it prints a line for each event that it has done
    write  one process for all: what is written to its input, and read by it, counts

A command that fails, or does not answer in time, is ended with everything that it has started. Another one gets what was not
acknowledged, after the pauses of the runner. Exit status 65 (EX_DATAERR) says that an event is wrong: the runner finds it.
"""

from __future__ import annotations

import contextlib
import os
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
from pgcdc.core.failpoint import hit
from pgcdc.core.secrets import known_secrets, redact_text
from pgcdc.core.settings import Names, setting, text_or_list
from pgcdc.event.batch import Batch
from pgcdc.sink.contract import Sink, SinkContext
from pgcdc.sink.exec.feed import LOOK_S, Feed, FeedEnded, FeedStalled
from pgcdc.sink.exec.process import GRACE_S, Process, clean_environment, end_leftover
from pgcdc.sink.spec import SinkOptions

DATA_ERROR = 65
"""EX_DATAERR of sysexits.h."""
NOT_FOUND = (126, 127)
"""How a shell says that there is no such command, or that it cannot be executed."""
PATIENCE = 0.8
"""Which part of the time for a write a command has: the rest is for ending it."""
CLOSE_S = 5.0
"""How long a command may go on when its input has ended."""
_WORD = re.compile(r"[\w./+-]+")
_LATER = "It is started again; nothing is lost"


def _split_words(value: Any) -> Any:
    """A text of a flag or variable, split as a shell would; nothing else of a shell is done."""
    try:
        return tuple(shlex.split(value)) if isinstance(value, str) else value
    except ValueError as error:
        raise PydanticCustomError("not_parsed", "{reason}", {"reason": f"not a list of words: {error}"}) from None


class ExecOptions(SinkOptions):
    """JSON lines to the standard input of a command."""

    command: str | tuple[str, ...] = setting(
        "", "the command, as text for a shell: sh -c COMMAND; a list: the same as argv"
    )
    argv: Annotated[tuple[str, ...], BeforeValidator(_split_words), text_or_list()] = setting(
        (), "the command and its arguments as a list, without a shell"
    )
    ack: Literal["exit", "line", "write"] = setting(
        "exit",
        "when an event counts as delivered: exit (one process per batch, which ends with 0), line (the "
        "command prints a line for it) or write (the command has read it)",
    )
    keep_env: Names = setting((), "variables that the command gets although they hold secrets of pgcdc")

    @model_validator(mode="after")
    def _check(self) -> ExecOptions:
        is_given = bool(self.script.strip() if isinstance(self.command, str) else self.command)
        if is_given == bool(self.argv):
            raise ValueError("command or argv is needed" if not self.argv else "command and argv are both given")
        if not self.words[0]:
            raise ValueError("the first word of argv is the command, and it is empty")
        if any("\0" in word for word in self.words):
            raise ValueError("a command cannot have a NUL in it")
        return self

    @property
    def script(self) -> str:
        """The text for a shell; empty if there is none."""
        return self.command if isinstance(self.command, str) else ""

    @property
    def words(self) -> list[str]:
        """What is executed."""
        return ["sh", "-c", self.script] if self.script.strip() else [*self.command, *self.argv]

    def make(self) -> Sink:
        return ExecSink(self)

    def place(self) -> str:
        return repr((self.command, self.argv))


class ExecSink(Sink):
    """Gives every event as one line to a command."""

    finds_by_halves = True

    def __init__(self, options: ExecOptions) -> None:
        self._options = options
        self.form = "records" if options.ack == "line" else "lines"
        self._feed: Feed | None = None
        self._process: Process | None = None
        self._has_failed = False

    def check(self, context: SinkContext) -> None:
        first = self._options.words[0]
        missing = "" if shutil.which(first) else first
        if self._options.script:
            missing = self._check_shell(context.name)
        if missing:
            raise SinkError(
                f"adapter {context.name}: the command {missing} does not exist, or cannot be executed",
                "Correct its command or argv, install it, or give its whole path",
            )

    def open(self, context: SinkContext) -> None:
        self._context, self._title = context, f"the command of adapter {context.name}"
        self._patience_s = context.timeout_s * PATIENCE
        self._grace_s = min(GRACE_S, context.timeout_s * (1 - PATIENCE) / 2)
        progress = context.progress
        with contextlib.suppress(TypeError, ValueError):  # there is none, or nobody can read it
            pid, started_at = progress.detail.get("process") or (0, 0.0)
            if end_leftover(pid, started_at, self._grace_s):
                context.say(f"ended the command of an earlier run (process {pid})")
        progress.save(context.start, {"type": "exec"})

    def write(self, batch: Batch) -> None:
        deadline = time.monotonic() + self._patience_s
        if self._options.ack == "exit":
            if len(batch):
                self._run(batch, deadline)
            return
        feed = self._feed
        if feed is not None and feed.process.has_ended:
            self._drop_feed(feed, f"ended with status {feed.process.wait(0)} between two batches")
            feed = None
        if feed is None:
            feed = self._feed = Feed(self._start(), by_line=self._options.ack == "line")
        feed.give(batch)
        try:
            self._converse(feed, str(batch.end), deadline)
        except SinkError:
            if feed.process.has_ended:
                self._drop_feed(feed)
            raise

    def redeliver(self, batch: Batch) -> Collection[str]:
        """Give events of the past to a process of their own."""
        deadline = time.monotonic() + self._patience_s
        if self._options.ack == "exit":
            self._run(batch, deadline)
            return ()
        feed = Feed(self._start(), by_line=self._options.ack == "line")
        feed.give(batch)
        try:
            self._converse(feed, "~", deadline)
        finally:
            self._let_end(feed.process, self._grace_s)
            self._process = self._feed.process if self._feed is not None else None
            if self._process is not None:  # which goes on
                self._note_process(self._process)
        return ()

    def close(self) -> None:
        if self._feed is not None:
            self._let_end(self._feed.process, CLOSE_S)
        elif self._process is not None:
            self._process.end(self._grace_s)
        self._feed = self._process = None

    # --- one process for each batch

    def _run(self, batch: Batch, deadline: float) -> None:
        """Give a batch to a new process, and wait until it has ended."""
        process = self._start()
        self._has_failed = True  # until it is known that it has not
        is_read = True
        try:
            for lines in batch.lines():
                data = lines
                while data and is_read:
                    if time.monotonic() > deadline:
                        raise self._too_late(process, "has not read all events")
                    try:
                        taken, _ = process.exchange(data, LOOK_S)
                        is_read = taken > 0 or not process.has_ended
                        data = data[taken:]
                    except BrokenPipeError:
                        is_read = False
                    hit("exec.half_sent")
            process.close_input()
            status = process.wait(deadline - time.monotonic())
            if status is None:
                raise self._too_late(process, "has not ended")
        except BaseException:
            process.end(self._grace_s)
            raise
        self._process = None
        if status == 0 and (process.left or not is_read):
            raise SinkUnavailable(
                f"{self._title} has ended with 0, but has not read all events",
                "Let it read to the end of its input. Nothing is lost: they come again",
            )
        if status:
            raise self._reject(process) if status == DATA_ERROR else self._explain(status, process)
        self._has_failed = False

    # --- one process for all

    def _converse(self, feed: Feed, end: str, deadline: float) -> None:
        process, before = feed.process, feed.progress
        by_line = self._options.ack == "line"

        def remember() -> None:
            if by_line and feed.done:  # what is only read is lost to it, if it fails
                self._context.delivered(feed.done)
                feed.done.clear()

        try:
            feed.run(end, deadline, remember)
        except FeedEnded:
            remember()
            status = process.wait(self._grace_s)
            status = process.end(self._grace_s) if status is None else status
            if status == DATA_ERROR and by_line and feed.first_open is not None:
                raise self._reject(process, feed.first_open) from None
            raise self._explain(status, process) from None
        except FeedStalled:
            if feed.progress > before:
                raise SinkUnavailable(
                    f"{self._title} is slow: it has not done all events within {self._patience_s:g} s",
                    f"It goes on with them. Raise {self._context.name}_timeout, or lower max_batch_rows",
                ) from None
            raise self._too_late(process, "has acknowledged nothing" if by_line else "reads nothing") from None
        except SinkError:  # it talks nonsense
            process.end(self._grace_s)
            raise
        finally:
            if by_line and process.has_ended:
                self._context.delivered(feed.done_ahead())

    def _drop_feed(self, feed: Feed, what: str = "") -> None:
        """Forget a process that has ended."""
        self._has_failed = True
        self._feed = self._process = None
        feed.process.end(self._grace_s)
        if what and self._options.ack == "write":
            self._context.say(f"the command {what}: what it had read and not done is lost to it")

    # --- the process

    def _start(self) -> Process:
        if self._has_failed:
            counters.add(EXEC_RESTARTS, adapter=self._context.name)
            self._has_failed = False
        ack = self._options.ack
        self._process = Process(
            self._options.words,
            clean_environment(os.environ, self._options.keep_env, known_secrets()),
            self._context.name,
            self._context.say,
            reads=ack == "line",
            counts=ack == "exit",
        )
        self._note_process(self._process)
        return self._process

    def _note_process(self, process: Process) -> None:
        """So that the next run can end it, if this one is killed."""
        progress = self._context.progress
        assert progress.position is not None
        progress.save(progress.position, {"type": "exec", "process": [process.pid, process.started_at]})

    def _let_end(self, process: Process, patience_s: float) -> None:
        process.close_input()
        if process.wait(patience_s) is None:
            process.end(self._grace_s)

    def _check_shell(self, name: str) -> str:
        """The first word of the text if there is no such command; "" if all is well, or only the shell can tell."""
        environment = clean_environment(os.environ, self._options.keep_env, known_secrets())

        def ask(*words: str) -> subprocess.CompletedProcess[str]:
            quiet = subprocess.DEVNULL
            return subprocess.run(
                ["sh", *words], env=environment, capture_output=True, text=True, timeout=10, stdin=quiet, check=False
            )

        try:
            found = ask("-n", "-c", self._options.script)
            if found.returncode:
                reason = redact_text((found.stderr.strip().splitlines() or ["?"])[-1])
                raise SinkError(f"adapter {name}: the shell cannot read the command: {reason}", "Correct it")
            word = next(iter(shlex.split(self._options.script, comments=True)), "")
            is_known = not _WORD.fullmatch(word) or ask("-c", 'command -v -- "$1"', "sh", word).returncode == 0
            return "" if is_known else word
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SinkError(f"adapter {name}: there is no shell: {error}", "Use argv, which needs none") from error
        except ValueError:
            return ""

    # --- errors

    def _explain(self, status: int, process: Process) -> SinkError:
        said = _last_words(process)
        behind = f": {said}" if said else ""
        if status in NOT_FOUND:
            return SinkError(
                f"{self._title} does not exist, or cannot be executed (status {status}){behind}",
                "Correct its command or argv, or install it; nothing is lost",
            )
        if status == 0:
            return SinkUnavailable(
                f"{self._title} has ended before it had all events{behind}",
                "With ack: line and ack: write it must read on and on. Nothing is lost: it is started again",
            )
        if status < 0:
            with contextlib.suppress(ValueError):
                return SinkUnavailable(f"{self._title} was ended by {signal.Signals(-status).name}{behind}", _LATER)
        return SinkUnavailable(f"{self._title} has failed with status {status}{behind}", _LATER)

    def _too_late(self, process: Process, what: str) -> SinkUnavailable:
        process.end(self._grace_s)
        self._has_failed = True
        flush = " Does it flush its output after each line?" if self._options.ack == "line" else ""
        return SinkUnavailable(
            f"{self._title} {what} within {self._patience_s:g} s, and was ended",
            f"It is started again.{flush} If it needs longer, raise {self._context.name}_timeout",
        )

    def _reject(self, process: Process, position: str = "") -> SinkRejected:
        """Without a position the runner finds out which one it is."""
        self._has_failed = True
        kind, said = "exec_65", _last_words(process) or f"exit status {DATA_ERROR}"
        which = f"the event at {position}" if position else "an event"
        return SinkRejected(
            f"{self._title} refuses {which} (status {DATA_ERROR})",
            "Look at what the command says about it on standard error",
            [Reject(position, kind, said)] if position else [],
            kind=kind,
            text=said,
        )


def _last_words(process: Process) -> str:
    """What it said last on standard error."""
    return redact_text(process.last_words[-1][:200]) if process.last_words else ""
