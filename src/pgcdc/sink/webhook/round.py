"""One round of deliveries: the events of a batch, several requests at a time, each key's events in order.

Events of one key go to one worker, which sends one request after the other. An event without a key is a barrier. An event
that was refused holds what is behind it and must not overtake it: the dead letter comes first. Whatever may pass, or
concerns all events, ends the round: requests that are under way finish, no other one begins.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

from pgcdc.core.errors import Reject
from pgcdc.sink.webhook.answer import Means, Verdict
from pgcdc.sink.webhook.events import Event, Key

__all__ = ["Post", "Round", "segments"]

REQUEST_BYTES = 1_000_000
"""A request with several events is not larger: many servers take no more than that."""

Post = Callable[[Sequence[Event]], Awaitable[Verdict]]


def _is_barrier(event: Event) -> bool:
    return event.key is None or event.is_cut


def segments(events: Iterable[Event], workers: int) -> Iterator[list[list[Event]]]:
    """The queues of the workers, again and again: what is in one list of queues is done before the next one begins."""
    if workers == 1:
        yield [list(events)]
        return
    run: list[Event] = []
    is_single = False  # barriers, one after the other
    for event in events:
        is_next_single = event.key is None
        if run and (is_next_single != is_single or event.is_cut):
            yield _queues(run, 1 if is_single else workers)
            run = []
        is_single = is_next_single
        run.append(event)
    if run:
        yield _queues(run, 1 if is_single else workers)


def _queues(run: list[Event], workers: int) -> list[list[Event]]:
    queues: list[list[Event]] = [[] for _ in range(workers)]
    for event in run:
        queues[hash(event.key) % workers if workers > 1 else 0].append(event)
    return [queue for queue in queues if queue]


class Round:
    """Sends events, and remembers what became of them. `delivered` hears of positions as answers come."""

    def __init__(self, post: Post, workers: int, batch_size: int, delivered: Callable[[list[str]], None]) -> None:
        self._post, self._workers, self._batch_size = post, workers, batch_size
        self._delivered = delivered
        self._left: Counter[str] = Counter()
        """How many events of each position are to be sent."""
        self._held: set[Key] = set()
        self._is_over = False
        self.rejects: list[Reject] = []
        self.later: Verdict | None = None
        self.stop: Verdict | None = None
        self.failed: list[str] = []
        """Positions of what may be taken later."""
        self.is_general = False
        """It is the receiver, and not these events."""

    async def run(self, events: Sequence[Event]) -> None:
        """Send all of them, as far as it goes."""
        self._left = Counter(event.position for event in events)
        for queues in segments(events, self._workers):
            # All of them end, whatever one of them raises: the next round must not meet requests of this one.
            ended = await asyncio.gather(*map(self._work, queues), return_exceptions=True)
            for error in filter(None, ended):
                raise error
            if self._is_over or self._held:
                return

    async def _work(self, queue: list[Event]) -> None:
        begin = 0
        try:
            while begin < len(queue) and not self._is_over:
                end = self._cut(queue, begin)
                await self._send_allowed(queue[begin:end])
                begin = end
        except BaseException:
            self._is_over = True
            raise

    def _cut(self, queue: list[Event], begin: int) -> int:
        """Where the request that begins there ends."""
        size, end = len(queue[begin].body), begin + 1
        while end < len(queue) and end - begin < self._batch_size:
            size += len(queue[end].body) + 1
            if size > REQUEST_BYTES:
                break
            end += 1
        return end

    async def _send_allowed(self, events: Sequence[Event]) -> None:
        """Send those that nothing holds. A barrier that is held ends the round: everything is behind it."""
        allowed, is_held = [], False
        for event in events:
            is_held = bool(self._held) and _is_barrier(event)
            if is_held:
                break
            if event.key not in self._held:
                allowed.append(event)
        if allowed and not self._is_over:
            await self._send(allowed)
        self._is_over |= is_held

    async def _send(self, events: Sequence[Event]) -> None:
        verdict = await self._post(events)
        if verdict.means is Means.DELIVERED:
            self._left.subtract(event.position for event in events)
            self._delivered([one for one in dict.fromkeys(event.position for event in events) if not self._left[one]])
        elif verdict.means is Means.REFUSED and len(events) > 1:
            # One of them is to blame: halves find it. In order, and what a refused one holds is not sent.
            half = len(events) // 2
            await self._send_allowed(events[:half])
            await self._send_allowed(events[half:])
        elif verdict.means is Means.REFUSED:
            event = events[0]
            self.rejects.append(Reject(event.position, verdict.kind, verdict.text))
            if event.key is None:
                self._is_over = True
            else:
                self._held.add(event.key)
        else:
            self._is_over = True
            if verdict.means is Means.STOP:
                self.stop = self.stop or verdict
            else:
                self.failed += [event.position for event in events]
                self.is_general |= verdict.is_general
                if self.later is None or verdict.retry_in_s > self.later.retry_in_s:
                    self.later = verdict
