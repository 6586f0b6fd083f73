"""Events to the standard input of a command, at least once, each with its id.

    exit   one process for each batch: it reads to the end of its input, and 0 means that all of it is delivered
    line   one process for all: it prints a line for each event that it has done
    write  one process for all: what is written to its input, and read by it, counts

A command that fails, or does not answer in time, is ended with everything that it has started. Another one gets what was not
acknowledged, after the pauses of `sink/delivery.py`. Exit status 65 (EX_DATAERR) says that an event is wrong: it is found.
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
from pathlib import Path

from pgcdc.core.counters import EXEC_RESTARTS, counters
from pgcdc.core.errors import Reject, SinkError, SinkRejected, SinkUnavailable, StateError
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.secrets import redact_text
from pgcdc.core.state import read_json, write_json
from pgcdc.sink.ack import AckFile
from pgcdc.sink.base import Batch
from pgcdc.sink.exec.feed import LOOK_S, Feed, FeedEnded, FeedStalled
from pgcdc.sink.exec.options import ExecOptions
from pgcdc.sink.exec.process import GRACE_S, Process, clean_environment, end_leftover
from pgcdc.sink.secrecy import known_secrets
from pgcdc.sink.tell import tell

__all__ = ["ExecSink"]

DATA_ERROR = 65
"""EX_DATAERR of sysexits.h."""
NOT_FOUND = (126, 127)
"""How a shell says that there is no such command, or that it cannot be executed."""
PATIENCE = 0.8
"""Which part of the time for a write a command has: the rest is for ending it."""
SAVE_INTERVAL_S = 0.2
CLOSE_S = 5.0
"""How long a command may go on when its input has ended."""
_WORD = re.compile(r"[\w./+-]+")


class ExecSink:
    """Gives every event as one line to a command."""

    def __init__(
        self,
        options: ExecOptions,
        acks: Path,
        name: str = "exec",
        *,
        timeout_s: float = 30.0,
        grace_s: float = GRACE_S,
    ) -> None:
        self.name = name
        self._options = options
        self._ack = AckFile(acks, name)
        self._note = acks / f"{name}.process"
        self._patience_s = timeout_s * PATIENCE
        self._grace_s = min(grace_s, timeout_s * (1 - PATIENCE) / 2)
        self._feed: Feed | None = None
        self._process: Process | None = None
        self._has_failed = False
        self._reached = ""
        """Events up to here are done, acknowledged on disk or not."""
        self._ahead: set[str] = set()
        """Positions behind that which are done."""
        self._redelivered: set[str] = set()
        self._saved_at = 0.0
        self._said = ""
        """What a command said that refused something."""

    @property
    def ack(self) -> Position:
        assert self._ack.position is not None
        return self._ack.position

    def check(self) -> None:
        word = self._options.argv[0] if self._options.argv else ""
        if not word:
            word = self._check_shell()
        elif shutil.which(word) is not None:
            return
        if word:
            raise SinkError(
                f"adapter {self.name}: the command {word} does not exist, or cannot be executed",
                "Correct its command or argv, install it, or give its whole path",
            )

    def open(self, start: Position) -> None:
        with contextlib.suppress(StateError, KeyError, TypeError):
            left = read_json(self._note)
            if isinstance(left, dict) and end_leftover(left["pid"], left["started_at"], self._grace_s):
                tell(self.name, f"ended the command of an earlier run (process {left['pid']})")
        if self._ack.position is None:
            self._save(start)

    def write(self, batch: Batch) -> None:
        if batch.end <= self.ack:
            return
        deadline = time.monotonic() + self._patience_s
        batch = batch.after(self.ack)
        if self._options.ack == "exit":
            self._write_by_exit(batch, deadline)
        else:
            self._write_by_feed(batch, deadline)

    def redeliver(self, batch: Batch) -> Collection[str]:
        """Give events of the past to a process of their own."""
        deadline = time.monotonic() + self._patience_s
        batch = batch.without(self._redelivered)
        if self._options.ack == "exit":
            self._write_by_exit(batch, deadline, is_past=True)
        elif batch.events.num_rows:
            feed = Feed(self._start(), by_line=self._options.ack == "line")
            self._give(feed, batch)
            try:
                self._converse(feed, batch, deadline, is_past=True)
            finally:
                self._redelivered |= {one for one in _positions(batch) if one <= feed.reached} | feed.done_ahead()
                feed.process.close_input()
                if feed.process.wait(self._grace_s) is None:
                    feed.process.end(self._grace_s)
                self._process = self._feed.process if self._feed is not None else None
                if self._process is not None:  # which goes on
                    self._note_process(self._process)
        self._redelivered.clear()
        return ()

    def close(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.process.close_input()
            if feed.process.wait(CLOSE_S) is None:
                feed.process.end(self._grace_s)
        elif self._process is not None:
            self._process.end(self._grace_s)
        self._process = None
        self._note.unlink(missing_ok=True)

    # --- one process for each batch

    def _write_by_exit(self, batch: Batch, deadline: float, *, is_past: bool = False) -> None:
        """If a batch is refused, its halves tell who is to blame. What was taken is acknowledged at once."""
        parts = [(batch, False)]
        while parts:
            part, is_bad = parts.pop()
            half = _halve(part)
            if not is_bad or half is None:
                status = self._run(part, deadline) if part.events.num_rows else 0
                if status == 0:
                    self._redelivered |= set(_positions(part)) if is_past else set()
                    if not is_past:
                        hit("exec.before_ack")
                        self._save(part.end)
                    continue
                if half is None:
                    raise self._reject(_positions(part)[0])
            assert half is not None
            parts += [(part.after(half.end), True), (half, False)]

    def _run(self, batch: Batch, deadline: float) -> int:
        """Give a batch to a new process; its exit status."""
        process = self._start()
        is_read = True
        try:
            for lines in batch.lines():
                data = lines
                while data and is_read:
                    if time.monotonic() > deadline:
                        raise self._too_late(process, "has not read all events")
                    try:
                        taken, _ = process.exchange(data, LOOK_S)
                    except BrokenPipeError:
                        taken, is_read = 0, False
                    is_read = is_read and not (taken == 0 and process.has_ended)
                    data = data[taken:]
                    hit("exec.half_sent")
            process.close_input()
            status = process.wait(deadline - time.monotonic())
            if status is None:
                raise self._too_late(process, "has not ended")
        except BaseException:
            self._has_failed = True
            process.end(self._grace_s)
            raise
        self._process = None
        self._has_failed = status != 0
        if status == 0 and (process.left or not is_read):
            self._has_failed = True
            raise SinkUnavailable(
                f"the command of adapter {self.name} has ended with 0, but has not read all events",
                "Let it read to the end of its input. Nothing is lost: they come again",
            )
        if status == DATA_ERROR:
            self._said = _last_words(process)
        elif status:
            raise self._explain(status, process)
        return status

    # --- one process for all

    def _write_by_feed(self, batch: Batch, deadline: float) -> None:
        feed = self._feed
        if feed is not None and feed.process.has_ended:
            self._drop_feed(feed, f"ended with status {feed.process.wait(0)} between two batches")
            feed = None
        if feed is None:
            feed = self._feed = Feed(self._start(), by_line=self._options.ack == "line")
        self._give(feed, batch)
        try:
            self._converse(feed, batch, deadline)
        except (SinkError, FeedEnded):
            if feed.process.has_ended:
                self._drop_feed(feed)
            raise
        hit("exec.before_ack")
        self._save(batch.end)

    def _give(self, feed: Feed, batch: Batch) -> None:
        """What this process has not been given, and none before it has done."""
        after = max(feed.given_to, self._reached) if feed is self._feed else ""
        skipped = self._ahead if feed is self._feed else set()
        pairs = zip(_positions(batch), batch.events.column("line").to_pylist(), strict=True)
        kept = [(position, line) for position, line in pairs if position > after and position not in skipped]
        feed.give([position for position, _ in kept], [line for _, line in kept])

    def _converse(self, feed: Feed, batch: Batch, deadline: float, *, is_past: bool = False) -> None:
        process, before = feed.process, feed.progress

        def remember() -> None:
            if is_past or not feed.reached > self._reached:
                return
            self._reached = feed.reached
            if self._options.ack == "line" and time.monotonic() > self._saved_at + SAVE_INTERVAL_S:
                hit("exec.before_ack")
                self._save(min(Position.parse(self._reached), batch.end))

        end = str(batch.end) if not is_past else "~"
        try:
            feed.run(end, deadline, remember)
        except FeedEnded:
            remember()
            status = process.wait(self._grace_s)
            status = process.end(self._grace_s) if status is None else status
            if status == DATA_ERROR and self._options.ack == "line" and feed.first_open is not None:
                self._said = _last_words(process)
                raise self._reject(feed.first_open) from None
            raise self._explain(status, process) from None
        except FeedStalled:
            if feed.progress > before:
                raise SinkUnavailable(
                    f"the command of adapter {self.name} is slow: it has not done all events within "
                    f"{self._patience_s:g} s",
                    f"It goes on with them. Raise {self.name}_timeout, or lower max_batch_rows",
                ) from None
            raise self._too_late(
                process, "has acknowledged nothing" if self._options.ack == "line" else "reads nothing"
            ) from None
        except SinkError:  # it talks nonsense
            process.end(self._grace_s)
            raise

    def _drop_feed(self, feed: Feed, what: str = "") -> None:
        """Forget a process that has ended, but not what it has done."""
        self._has_failed = True
        if self._options.ack == "line":
            self._reached = max(self._reached, feed.reached)
            self._ahead |= feed.done_ahead()
        else:  # what was in the pipe is lost to it: what is not acknowledged comes again
            self._reached = ""
        self._feed = self._process = None
        feed.process.end(self._grace_s)
        if what and self._options.ack == "write":
            tell(self.name, f"the command {what}: what it had read and not done is lost to it")

    # --- the process

    def _start(self) -> Process:
        if self._has_failed:
            counters.add(EXEC_RESTARTS, adapter=self.name)
            self._has_failed = False
        environment = clean_environment(os.environ, self._options.keep_env, known_secrets())
        ack = self._options.ack
        self._process = Process(self._options.words, environment, self.name, reads=ack == "line", counts=ack == "exit")
        self._note_process(self._process)
        return self._process

    def _note_process(self, process: Process) -> None:
        """So that the next run can end it, if this one is killed."""
        with contextlib.suppress(StateError):
            write_json(self._note, {"pid": process.pid, "started_at": process.started_at})

    def _check_shell(self) -> str:
        """The first word of the text if there is no such command; "" if all is well, or only the shell can tell."""
        environment = clean_environment(os.environ, self._options.keep_env, known_secrets())

        def ask(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                ["sh", *words],
                env=environment,
                capture_output=True,
                text=True,
                timeout=10,
                stdin=subprocess.DEVNULL,
                check=False,
            )

        try:
            found = ask("-n", "-c", self._options.command)
            if found.returncode:
                reason = redact_text((found.stderr.strip().splitlines() or ["?"])[-1])
                raise SinkError(f"adapter {self.name}: the shell cannot read the command: {reason}", "Correct it")
            word = next(iter(shlex.split(self._options.command, comments=True)), "")
            if not _WORD.fullmatch(word):
                return ""
            return "" if ask("-c", 'command -v -- "$1"', "sh", word).returncode == 0 else word
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SinkError(f"adapter {self.name}: there is no shell: {error}", "Use argv, which needs none") from error
        except ValueError:
            return ""

    # --- errors

    def _explain(self, status: int, process: Process) -> SinkError:
        said = _last_words(process)
        behind = f": {said}" if said else ""
        if status in NOT_FOUND:
            return SinkError(
                f"the command of adapter {self.name} does not exist, or cannot be executed (status {status}){behind}",
                "Correct its command or argv, or install it; nothing is lost",
            )
        if status < 0:
            with contextlib.suppress(ValueError):
                return SinkUnavailable(
                    f"the command of adapter {self.name} was ended by {signal.Signals(-status).name}{behind}",
                    "It is started again; nothing is lost",
                )
        if status == 0:
            return SinkUnavailable(
                f"the command of adapter {self.name} has ended before it had all events{behind}",
                "With ack: line and ack: write it is to read on and on. Nothing is lost: it is started again",
            )
        return SinkUnavailable(
            f"the command of adapter {self.name} has failed with status {status}{behind}",
            "It is started again; nothing is lost",
        )

    def _too_late(self, process: Process, what: str) -> SinkUnavailable:
        process.end(self._grace_s)
        self._has_failed = True
        flush = " Does it flush its output after each line?" if self._options.ack == "line" else ""
        return SinkUnavailable(
            f"the command of adapter {self.name} {what} within {self._patience_s:g} s, and was ended",
            f"It is started again.{flush} If it needs longer, raise {self.name}_timeout",
        )

    def _reject(self, position: str) -> SinkRejected:
        self._has_failed = True
        return SinkRejected(
            f"the command of adapter {self.name} refuses the event at {position} (status {DATA_ERROR})",
            "Look at what the command says about it on standard error",
            [Reject(position, "exec_65", self._said or f"exit status {DATA_ERROR}")],
        )

    def _save(self, position: Position) -> None:
        try:
            self._ack.save(position, {"type": "exec"})
        except StateError as error:
            raise SinkUnavailable(error.message, error.advice) from error
        self._saved_at = time.monotonic()
        text = str(position)
        self._ahead = {one for one in self._ahead if one > text}


def _last_words(process: Process) -> str:
    """What it said last on standard error."""
    return redact_text(process.last_words[-1][:200]) if process.last_words else ""


def _positions(batch: Batch) -> list[str]:
    found: list[str] = batch.events.column("position").to_pylist()
    return found


def _halve(batch: Batch) -> Batch | None:
    """The first half of a batch; None if it has one position only, which is never cut."""
    positions = _positions(batch)
    if not positions or positions[0] == positions[-1]:
        return None
    half = batch.first(max(1, len(positions) // 2))
    if half.events.num_rows == len(positions):  # the second half shares one position
        half = batch.first(positions.index(positions[-1]))
    return half
