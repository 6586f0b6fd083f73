"""The conversation with a command that goes on over batches: events in, and maybe lines out that acknowledge them.

With acknowledgements by line, a line of any text stands for the oldest event that has none yet; one that is a JSON object
with an `id` stands for the event with that id, whichever it is. So a command may answer in another order.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from pgcdc.core.errors import SinkError
from pgcdc.core.failpoint import hit
from pgcdc.event.batch import Batch
from pgcdc.sink.exec.process import Process

CHUNK_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20
READ_PAUSE_S = 0.001
LOOK_S = 0.2
"""How often a command that says nothing is looked at."""


class FeedEnded(Exception):
    """The command has ended, or reads or says no more."""


class FeedStalled(Exception):
    """The time is over."""


@dataclass(slots=True, eq=False)
class _Event:
    position: str
    id: str
    line: str
    is_offered: bool = False
    is_done: bool = False


class Feed:
    """One process and the events that it was given. Events come in the order of their positions."""

    def __init__(self, process: Process, *, by_line: bool) -> None:
        self.process = process
        self.done: list[str] = []
        """Positions that are done, in order, until somebody takes them."""
        self.progress = 0
        """Grows with every byte that it reads, or with every event that it acknowledges."""
        self._given_to = ""
        """The last position that it was given."""
        self._taken = 0
        self._by_line = by_line
        self._open: deque[_Event] = deque()
        """Events that are not done, or stand behind one that is not."""
        self._by_id: dict[str, _Event] = {}
        self._waiting: deque[_Event] = deque()
        self._data = memoryview(b"")
        self._said = b""

    def give(self, batch: Batch) -> None:
        """What of a batch it has not been given. A position comes with all its events at once."""
        if self._by_line:
            records = batch.records()
            columns = [one.to_pylist() for one in (records.position, records.id, records.value)]
        else:
            positions = batch.positions().to_pylist()
            columns = [positions, positions, batch.texts()]
        events = [_Event(*one) for one in zip(*columns, strict=True) if one[0] > self._given_to]
        self._open.extend(events)
        self._waiting.extend(events)
        if self._by_line:
            self._by_id.update((event.id, event) for event in events)
        if events:
            self._given_to = events[-1].position

    def done_ahead(self) -> set[str]:
        """Positions that are done, behind one that is not."""
        open_ones = {event.position for event in self._open if not event.is_done}
        return {event.position for event in self._open} - open_ones

    @property
    def first_open(self) -> str | None:
        """The position of the oldest event without an acknowledgement."""
        return self._open[0].position if self._open else None

    def run(self, end: str, deadline: float, on_progress: Callable[[], None]) -> None:
        """Until everything up to `end` is done. FeedEnded, FeedStalled; SinkError for a command that talks nonsense."""
        while self._open and self._open[0].position <= end:
            left = deadline - time.monotonic()
            if left <= 0:
                raise FeedStalled
            self._fill()
            had_ended = self.process.has_ended
            if not self._by_line and not self._data and not had_ended:
                time.sleep(READ_PAUSE_S)
            try:
                wait_s = min(left, LOOK_S) if self._by_line or self._data else 0
                taken, said = self.process.exchange(self._data, 0 if had_ended else wait_s)
            except BrokenPipeError:
                self._data = memoryview(b"")
                self._listen_to_the_end()
                raise FeedEnded from None
            self._data = self._data[taken:]
            if self._by_line:
                self._hear(said)
            else:
                self._count_read(taken)
            on_progress()
            is_silent = (had_ended and not said) or (self._by_line and not self.process.has_output)
            if is_silent and self._open and self._open[0].position <= end:
                raise FeedEnded

    def _fill(self) -> None:
        if self._data or not self._waiting:
            return
        texts, size = [], 0
        while self._waiting and size < CHUNK_BYTES:
            event = self._waiting.popleft()
            event.is_offered = True
            texts.append(f"{event.line}\n".encode())
            size += len(texts[-1])
        self._data = memoryview(b"".join(texts))
        hit("exec.half_sent")

    def _count_read(self, taken: int) -> None:
        """All that is offered, written and read is done."""
        self._taken += taken
        unread = self.process.unread
        self.progress = max(self.progress, self._taken - unread)
        if not self._data and not unread and not self.process.has_ended:
            while self._open and self._open[0].is_offered:
                self._open.popleft()

    # --- acknowledgements

    def _listen_to_the_end(self) -> None:
        """What it said before it ended counts."""
        while self._by_line and self.process.has_output:
            _, said = self.process.exchange(memoryview(b""), LOOK_S)
            self._hear(said)
            if not said and self.process.has_output:  # somebody else has it open
                return

    def _hear(self, said: bytes) -> None:
        *lines, self._said = (self._said + said).split(b"\n")
        if len(self._said) > MAX_LINE_BYTES:
            raise SinkError(
                f"the command has printed {len(self._said)} bytes without a newline",
                "With ack: line it prints one line for each event that it has done",
            )
        for line in lines:
            self._acknowledge(line)
            while self._open and self._open[0].is_done:
                event = self._open.popleft()
                if not self._open or self._open[0].position != event.position:
                    self.done.append(event.position)

    def _acknowledge(self, line: bytes) -> None:
        found = self._open[0] if self._open else None
        if line.startswith(b"{") and found is not None and found.id != found.position:  # a typed row has no id
            with contextlib.suppress(ValueError):
                wanted = orjson.loads(line).get("id")
                found = found if wanted in (None, found.id) else self._by_id.get(wanted)
        if found is None or found.is_done or not found.is_offered:
            raise SinkError(
                "the command has printed a line for an event that it was not given, or for one twice",
                "With ack: line it prints one line for each event that it has done, and nothing else: other output "
                "belongs to standard error. If it prints what it likes, use ack: exit",
            )
        found.is_done = True
        self.progress += 1
        self._by_id.pop(found.id, None)
