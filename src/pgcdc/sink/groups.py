"""Concurrency that keeps the order by key, for sinks that send single events or small groups.

All events of a key go to one worker, which sends one group after the other. A barrier waits for everything before it,
and everything behind it waits for the barrier. A refused event blocks whatever must not overtake it: its dead letter
comes first. Errors that may be temporary or affect all events end the round: running groups finish, no new ones start.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from pgcdc.core.errors import Reject, SinkError, SinkRejected, SinkUnavailable
from pgcdc.core.position import Position
from pgcdc.core.wording import counted
from pgcdc.event.batch import Batch
from pgcdc.event.forms import TRACES, Form
from pgcdc.sink.contract import Sink, SinkContext

Order = Literal["key", "stream"]
Send = Callable[[Sequence["Record"]], Coroutine[Any, Any, None]]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Record:
    position: str
    id: str
    channel: str
    operation: str
    key: str | None  # The values of the key columns as a JSON array
    value: bytes  # The rendered event
    headers: dict[str, str] = field(default_factory=dict)  # The W3C trace context of the event
    lane: int = 0  # The same for all events that must stay in order
    is_barrier: bool = False


class GroupSink(Sink):
    """A sink that sends groups of events in parallel. Subclasses implement `send` and set the class attributes."""

    form: Form = "records"
    order: ClassVar[Order] = "key"
    """`key`: events of one key stay in order. `stream`: all events stay in order, one group after the other."""
    concurrency: int = 8  # The number of groups in flight
    group_events: int = 1  # The most events in a group
    group_bytes: int = 1_000_000  # The most bytes in a group with several events
    context: SinkContext
    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread

    async def send(self, group: Sequence[Record]) -> None:
        """Deliver a group; it counts as delivered on return.

        SinkUnavailable: try again later; it names the group's positions if only they are affected. SinkRejected: one
        event is wrong. If it is not named, bisection finds it, and the others are repeated. SinkError: the pipeline
        stops.
        """
        raise NotImplementedError

    async def disconnect(self) -> None:
        """Close what `send` opened."""

    def open(self, context: SinkContext) -> Position | None:
        self.context = context
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name=f"send-{context.name}", daemon=True)
            self._thread.start()
        return None

    def write(self, batch: Batch) -> None:
        """Send a batch. Dead letters are all sent too, since only the receiver knows what it has."""
        if len(batch):
            workers = self.concurrency if self.order == "key" else 1
            one = Round(self.send, workers, self.group_events, self.group_bytes, self.context.delivered)
            self._run(one.run(read_records(batch, self.order)))
            one.finish()

    def close(self) -> None:
        if self._loop is None:
            return
        with contextlib.suppress(Exception):
            self._run(self.disconnect())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self._loop.close()
        self._loop = None

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        assert self._loop is not None, "open() comes first"
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def read_records(batch: Batch, order: Order = "key") -> list[Record]:
    """The events of a batch, in order."""
    records = batch.records()
    names = ("position", "id", "channel", "operation", "key", "value", "key_hash", "is_barrier", *TRACES)
    columns = [getattr(records, name).to_pylist() for name in names]
    return [
        Record(
            position, id_, channel, operation, key, value.encode(),
            {name: text for name, text in zip(TRACES, traces, strict=True) if text is not None} if traces[0] else {},
            lane if order == "key" else 0, is_barrier,
        )
        for position, id_, channel, operation, key, value, lane, is_barrier, *traces in zip(*columns, strict=True)
    ]  # fmt: skip


def segments(records: Iterable[Record], workers: int) -> Iterator[list[list[Record]]]:
    """The queues of the workers, in rounds: one round is finished before the next begins."""
    if workers == 1:
        yield [list(records)]
        return
    run: list[Record] = []
    for record in records:
        if run and record.is_barrier != run[-1].is_barrier:
            yield _queues(run, workers)
            run = []
        run.append(record)
    if run:
        yield _queues(run, workers)


def _queues(run: list[Record], workers: int) -> list[list[Record]]:
    if run[0].is_barrier:  # one after the other
        return [run]
    queues: list[list[Record]] = [[] for _ in range(workers)]
    for record in run:
        queues[record.lane % workers].append(record)
    return [queue for queue in queues if queue]


class Round:
    """Sends events and collects the outcome. `delivered` receives positions as soon as they are delivered."""

    def __init__(
        self, send: Send, workers: int, group_events: int, group_bytes: int, delivered: Callable[[list[str]], None]
    ) -> None:
        self._send, self._workers, self._delivered = send, workers, delivered
        self._events, self._bytes = group_events, group_bytes
        self._left: Counter[str] = Counter()  # Events still to be sent, by position
        self._held: set[int] = set()  # Lanes with a refused event
        self._is_over = False
        self.rejects: list[Reject] = []
        self._refusal: SinkRejected | None = None
        self._stop: SinkError | None = None
        self._failures: list[SinkUnavailable] = []

    async def run(self, records: Sequence[Record]) -> None:
        self._left = Counter(record.position for record in records)
        for queues in segments(records, self._workers):
            # Wait for all workers even if one raises: groups of this round must not run into the next.
            ended = await asyncio.gather(*map(self._work, queues), return_exceptions=True)
            for error in filter(None, ended):
                raise error
            if self._is_over or self._held:
                return

    def finish(self) -> None:
        """Raise the round's outcome: errors that affect all events first, then refusals."""
        if self._stop is not None:
            raise self._stop
        if self._refusal is not None:
            first, more = self.rejects[0], len(self.rejects) - 1
            others = f" and {counted(more, 'other')}" if more else ""
            raise SinkRejected(
                f"{self._refusal.message} (the event at {first.position}{others})",
                self._refusal.advice,
                self.rejects,
            )
        if self._failures:
            longest = max(self._failures, key=lambda one: one.retry_in_s)
            is_general = not all(one.positions for one in self._failures)
            failed = [] if is_general else [position for one in self._failures for position in one.positions]
            raise SinkUnavailable(longest.message, longest.advice, retry_in_s=longest.retry_in_s, positions=failed)

    async def _work(self, queue: list[Record]) -> None:
        begin = 0
        try:
            while begin < len(queue) and not self._is_over:
                end = self._cut(queue, begin)
                await self._send_allowed(queue[begin:end])
                begin = end
        except BaseException:
            self._is_over = True
            raise

    def _cut(self, queue: list[Record], begin: int) -> int:
        """The end of the group that starts at `begin`."""
        size, end = len(queue[begin].value), begin + 1
        while end < len(queue) and end - begin < self._events:
            size += len(queue[end].value) + 1
            if size > self._bytes:
                break
            end += 1
        return end

    async def _send_allowed(self, group: Sequence[Record]) -> None:
        """Send the records that are not blocked. A blocked barrier ends the round, since everything is behind it."""
        allowed, is_held = [], False
        for record in group:
            is_held = bool(self._held) and record.is_barrier
            if is_held:
                break
            if record.lane not in self._held:
                allowed.append(record)
        if allowed and not self._is_over:
            await self._send_group(allowed)
        self._is_over |= is_held

    async def _send_group(self, group: Sequence[Record]) -> None:
        try:
            await self._send(group)
        except SinkRejected as error:
            await self._refuse(group, error)
        except SinkUnavailable as error:
            self._is_over = True
            self._failures.append(error)
        except SinkError as error:
            self._is_over = True
            self._stop = self._stop or error
        else:
            self._left.subtract(record.position for record in group)
            done = dict.fromkeys(record.position for record in group)
            self._delivered([position for position in done if not self._left[position]])

    async def _refuse(self, group: Sequence[Record], error: SinkRejected) -> None:
        if not error.rejects and len(group) > 1:
            # One of them is wrong: bisect, in order, without records that a refused one blocks.
            half = len(group) // 2
            await self._send_allowed(group[:half])
            await self._send_allowed(group[half:])
            return
        rejects = {one.position: one for one in error.rejects}
        rejects = rejects or {group[0].position: Reject(group[0].position, error.kind, error.text)}
        refused = [record for record in group if record.position in rejects]
        if not refused:
            raise SinkError(
                f"{error.message}: it refused events that were not sent to it", "This is a bug in the adapter"
            )
        self._refusal = self._refusal or error
        self.rejects += [rejects[position] for position in dict.fromkeys(record.position for record in refused)]
        self._held.update(record.lane for record in refused)
        if any(record.is_barrier for record in refused):
            self._is_over = True
        else:
            await self._send_allowed([record for record in group if record.lane not in self._held])
