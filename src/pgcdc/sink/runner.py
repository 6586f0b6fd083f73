"""Everything around a sink: the ack, retry, circuit breaker, rate limit, timeout, dead letters and hooks.

`errors.policy_of` decides on errors: temporary errors are retried here; events that will never be accepted are recorded
durably as dead letters, then the others are delivered. A sink always has a single writer: a write that times out is
abandoned, and no other starts before it ends. What it delivered is left out of the next attempt.

The ack is saved here, durably, after a write has returned. If the target keeps the position (`keeps_position`), the ack
follows the target: `open` asks it at the start and after every failed write.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path

from pgcdc.core.counters import TABLE_RELOADS, counters
from pgcdc.core.errors import (
    PgcdcError,
    Policy,
    Reject,
    ReloadNeeded,
    SinkError,
    SinkRejected,
    policy_of,
    sentences,
)
from pgcdc.core.failpoint import hit
from pgcdc.core.log import say
from pgcdc.core.position import Position
from pgcdc.core.relation import ShapeHistory
from pgcdc.core.state import StateDir
from pgcdc.event.audience import Audience
from pgcdc.event.batch import Batch, halve, is_single
from pgcdc.event.changes import read_changes
from pgcdc.event.edits import SimpleChain
from pgcdc.sink.attempts import Attempts, Clock, DeliveryHooks, Refusal
from pgcdc.sink.contract import Progress, Sink, SinkContext
from pgcdc.sink.holds import Hold, Holds, find_misnamed, new_hold
from pgcdc.sink.letters.delivery import SetAside
from pgcdc.sink.letters.record import DeadLetters
from pgcdc.sink.spec import DeliveryOptions

PART_OF_TIMEOUT = 0.25  # A part's share of the write timeout, at the speed of the last part (`Sink.part_events`)
MAX_PART = 50_000
SAVE_INTERVAL_S = 0.2  # How often the ack is saved during a write


def tell(adapter: str, text: str) -> None:
    """Print one line on the terminal or in the service's log."""
    say(text, adapter=adapter)


class Runner:
    """A sink with its safeguards. `stop` ends every wait immediately, from any thread."""

    def __init__(
        self,
        sink: Sink,
        acks: Path,
        name: str,
        options: DeliveryOptions = DeliveryOptions(),  # noqa: B008 - frozen
        hooks: DeliveryHooks | None = None,
        dead_letters: DeadLetters | None = None,
        *,
        say: Callable[[str], None] | None = None,
        clock: Clock | None = None,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """`acks` is the folder of acks in a state directory. Without `dead_letters`, a refused event ends the
        delivery."""
        self.sink = sink
        self.name = name
        self.options = options
        self.progress = Progress(acks, name)
        self._state = StateDir(acks.parent)
        self._shapes = ShapeHistory(self._state.shapes_file)
        self._say = say or partial(tell, name)
        self.attempts = Attempts(name, options, hooks, clock, uniform, self._say)
        self._aside = SetAside(dead_letters, name, options.dead_letter_limit) if dead_letters is not None else None
        self._start: Position | None = None
        self._is_open = False  # The sink stands where the ack does
        self._delivered, self._redelivered = set[str](), set[str]()
        """Positions after the ack that the target has; and those of the current redelivery."""
        self._now: Batch | None = None  # The batch being written; None: dead letters
        self._is_untouched = False  # The target keeps rows and has nothing of this sink
        self._saved_at = self.attempts.clock.now()
        self._part = sink.part_events
        self.progress.is_keyed = sink.form == "tables"
        audience = Audience(self._state.audience_file)
        self.holds = Holds(audience, self.progress, name, is_keyed=self.progress.is_keyed)
        self.chain: Callable[[], SimpleChain] = lambda: SimpleChain((), ())
        """How the adapter's transforms change columns. Dead letters are already transformed."""

    @property
    def ack(self) -> Position:
        """Everything up to here is durable at the target."""
        assert self.progress.acked is not None, "open() comes first"
        return self.progress.acked

    @property
    def dead_letters(self) -> int:
        return self._aside.count if self._aside is not None else 0

    def check(self) -> None:
        self.sink.check(self._context(self.progress.position or Position.end(0)))

    def open(self, start: Position) -> None:
        """Open the sink at its ack; a new one starts at `start`. If the target is unreachable and there is an ack to
        start from, it is opened at the first write."""
        with self.attempts.taken():
            self._start, began = start, self.attempts.clock.now()
            error = self.attempts.run(self._open, self.options.timeout, "the opening of")
            if error is not None:
                if self.progress.position is None or policy_of(error) is not Policy.RETRY:
                    raise error
                self.attempts.note_failure(began, is_told=True)
                self._say(sentences(str(error), "It continues when the target does"))
            if self._aside is not None:
                self._aside.begin(self.ack)

    def write(self, batch: Batch) -> None:
        """Deliver a batch, skipping what the ack covers."""
        with self._delivering():
            bad: Position | None = None  # an earlier event is refused, but not named
            while batch.end > self.ack:
                batch = batch.after(self._reached)
                part = self._cut(batch)
                if bad is not None and bad > self._reached:
                    count = sum(one <= str(bad) for one in batch.positions().to_pylist())
                    part = halve(batch.first(count))
                bad = self._write(part) or bad

    def deliver(self, end: Position, events: int, write: Callable[[], None], timeout_s: float | None = None) -> None:
        """Like `write`, for other ways of writing: `write` makes everything up to `end` durable.

        Raises SinkRejected, because only `Runner.write` knows the events and can set some aside.
        """

        def work() -> None:
            self._reopen()
            write()
            self._acknowledge(end)

        with self._delivering():
            if end > self.ack:
                self.attempts.pass_breaker()
                limit_s = timeout_s or self.options.timeout
                self.attempts.try_often(events, work, limit_s, is_done=lambda: self.ack >= end)

    def redeliver(self, batch: Batch) -> Collection[str]:
        """Redeliver dead letters. Raises SinkRejected: refused events already have their letters."""
        left_out: set[str] = set()

        def write(part: Batch) -> None:
            self._reopen()
            self._now = None
            part = part.without(self._redelivered)  # what an earlier attempt delivered
            if len(part) and self._is_untouched:
                raise SinkError(
                    f"adapter {self.name} has written nothing to this target, so it is unknown which of these "
                    "events are superseded",
                    "Deliver them to the adapter's own target",
                )
            if len(part):
                with self._using_sink():
                    left_out.update(self.sink.redeliver(self._as_taken(part)))

        with self.attempts.taken():
            self.attempts.pass_breaker()
            parts = [batch.without(self._redelivered)]
            while parts:
                part = parts.pop(0)
                do, may_halve = partial(write, part), self.sink.finds_by_halves
                refusal = self.attempts.try_often(len(part), do, self.options.timeout, may_halve=may_halve)
                if refusal is None:
                    self._redelivered.update(part.positions().to_pylist())
                elif is_single(part):
                    raise _named(refusal, part)
                else:
                    half = halve(part)
                    parts = [half, part.without(half.positions().to_pylist()), *parts]
        self._redelivered.clear()
        return left_out

    def hold(self, tables: Mapping[int, Hold], without: int = 0) -> None:
        """Accept these tables only from their reload, and release `without`. Durable on return. SinkTimeout: a write
        still runs."""
        with self.attempts.taken():
            self.holds.add(tables, without)

    def stop(self) -> None:
        """End all waits. A running write may finish, nothing is retried, and undelivered batches raise."""
        self.attempts.stop()

    def close(self) -> None:
        """Close the sink, unless a write still runs. Nothing is lost if it is never closed."""
        self.attempts.rest()
        if not self.attempts.is_calling:
            self.sink.close()

    # --- the sink and its ack

    @property
    def _reached(self) -> Position:
        """What is durable, including what the sink has yet to settle."""
        return self.progress.position or self.ack

    def _context(self, start: Position) -> SinkContext:
        identity = self._state.identity()
        stream, source = (identity.key, identity.title) if identity else ("", "")
        known = (self.name, start, self.progress, self._shapes, self._say, self.options.timeout)
        return SinkContext(*known, stream, source, identity, self.chain, self._note)

    def _note(self, positions: Iterable[str]) -> None:
        """Called by the sink during a write: these positions are delivered."""
        if self._now is None:
            self._redelivered.update(positions)
            return
        self._delivered.update(positions)
        if self.attempts.clock.now() >= self._saved_at + SAVE_INTERVAL_S:
            self._save_prefix(self._now)

    def _save_prefix(self, part: Batch) -> None:
        """Move the ack as far as everything before it is delivered, so that a crash repeats less."""
        self._saved_at = self.attempts.clock.now()  # first, so that a failed save is not repeated immediately
        positions = part.after(self._reached).positions().to_pylist() if self._delivered else ()
        done = list(takewhile(self._delivered.__contains__, positions))
        if done:
            hit("sink.before_ack")
            self.progress.save(Position.parse(done[-1]))
            self._forget(done[-1])

    def _open(self) -> None:
        progress = self.progress
        assert self._start is not None
        known = progress.written if not progress.is_rewound else None
        begin = progress.position or self._start
        said = self.sink.open(self._context(begin))
        if self.sink.keeps_position and known is not None and (said is None or said < known):
            where = f"is at {said}" if said is not None else "has no position"
            raise SinkError(
                f"the target of adapter {self.name} {where}, but everything up to {known} was written to it. "
                "The record was deleted or made with other options, or an older state of the target was "
                "restored",
                "Restore a newer state, or deliver everything again: pgcdc resync --new-slot --truncate",
            )
        reached = max(said or begin, begin)
        if progress.position != reached or progress.written != said or progress.is_rewound:
            progress.save(reached, written=said, holds=self.holds.after(begin, reached))
        progress.settle()
        self._is_untouched = self.sink.form == "tables" and known is None and reached == self._start
        self._is_open = True

    def _reopen(self) -> None:
        if not self._is_open:
            self._open()

    @contextmanager
    def _using_sink(self) -> Iterator[None]:
        """After an outage, a target that keeps the position may be an older copy: `_open` checks where it stands."""
        try:
            yield
        except BaseException as error:
            self._is_open = not (self.sink.keeps_position and policy_of(error) is Policy.RETRY)
            raise

    def _acknowledge(self, end: Position, written: Position | None = None) -> None:
        """Save the ack: everything up to it now counts as durable."""
        hit("sink.before_ack")
        before = self.progress.position
        if before is None or before < end:
            holds = self.holds.after(before, end) if before is not None else None
            self.progress.save(end, written=written, holds=holds)
        self.progress.settle()
        hit("sink.after_ack")
        self._forget(str(end))

    def _forget(self, up_to: str) -> None:
        self._delivered = {one for one in self._delivered if one > up_to}

    def _write_part(self, part: Batch, is_empty: bool) -> None:
        """Runs in the writing thread."""
        self._reopen()
        if self.sink.keeps_position and (self._reached >= part.end or (is_empty and not self._has_shapes(part))):
            return self._acknowledge(part.end)
        rest = self.holds.take(part.after(self._reached).without(self._delivered))
        began = self.attempts.clock.now()
        self._now = part
        try:
            rest = self._put(self._as_taken(rest))
        except BaseException as error:
            self.progress.next_detail = None
            if isinstance(error, SinkError):
                with contextlib.suppress(PgcdcError):  # the error being raised says more
                    self._save_prefix(part)
            raise
        self._is_untouched = False
        self._learn(len(rest), self.attempts.clock.now() - began)
        self._acknowledge(part.end, part.end if self.sink.keeps_position else None)

    def _put(self, batch: Batch) -> Batch:
        """Have the sink write a batch, without tables that it cannot follow. Returns what was written."""
        while True:
            try:
                if self.progress.is_keyed and (misnamed := find_misnamed(batch, self._shapes)):
                    raise ReloadNeeded(tables=misnamed)
                with self._using_sink():
                    self.sink.write(batch)
                return batch
            except ReloadNeeded as error:
                self._check_reload(error)
                held = {oid: new_hold(*why) for oid, why in error.tables.items() if oid not in self.progress.holds}
                if not held:
                    raise SinkError(f"adapter {self.name} cannot follow a table that it leaves out: {error}") from error
                self.holds.add(held)
                counters.add(TABLE_RELOADS, len(held), adapter=self.name)
                for one in held.values():
                    self._say(f"table {one.table}: {one.reason}. It is read again and its copy replaced")
                batch = self.holds.take(batch)

    def _check_reload(self, error: ReloadNeeded) -> None:
        name, reason = next(iter(error.tables.values()))
        message = f"adapter {self.name}: table {name} cannot follow its source: {reason}"
        if self.chain().hides_reloads:
            raise SinkError(
                message, "Add TRUNCATE and SNAPSHOT to its filter of operations: a reload needs both"
            ) from error
        if self.options.on_drift == "stop":
            advice = f"Replace the copy, then start again: pgcdc resync --table {name} --adapter {self.name}"
            raise SinkError(message, advice) from error

    def _has_shapes(self, part: Batch) -> bool:
        """Whether a table's shape changes in this part. A keyed sink follows such a change even without a row."""
        if not self.progress.is_keyed:
            return False
        self._shapes.refresh()
        return bool(self._shapes.between(part.start, part.end))

    def _as_taken(self, batch: Batch) -> Batch:
        """A batch in the sink's form. Dead letters arrive as lines."""
        if self.sink.form != "tables" or batch.form == "tables":
            return batch
        self._shapes.refresh()
        return read_changes(batch, self._shapes, self.chain())

    # --- one delivery

    @contextmanager
    def _delivering(self) -> Iterator[None]:
        with self.attempts.taken():
            try:
                yield
            except BaseException as error:
                self.attempts.hooks.on_failure(error)
                raise

    def _write(self, whole: Batch) -> Position | None:
        """Deliver a batch; refused events go to the dead letters first.

        Returns the end of a batch with a refused event that is not named: bisection finds it.
        """
        whole = self.holds.take(whole)
        part, out = whole, set[str]()
        while True:
            self.attempts.pass_breaker()
            refusal = self.attempts.try_often(
                len(part),
                partial(self._write_part, part, len(whole) == 0),
                self.options.timeout,
                is_done=lambda: self.ack >= whole.end,
                may_refuse=self._aside is not None,
                may_halve=self.sink.finds_by_halves,
            )
            if refusal is None:
                break
            if not refusal.rejects and not is_single(part):
                return part.end
            rejects = refusal.rejects or _named(refusal, part).rejects
            if self._aside is None:
                raise _named(refusal, part)
            letters = self._aside.take(whole, out, rejects, refusal.attempts, self.ack)
            if letters:
                self.attempts.hooks.on_dead_letters(letters)
            part = whole.without(out)
        if self._aside is not None:
            self._aside.settle(whole, out)
        return None

    def _cut(self, batch: Batch) -> Batch:
        """The part of a batch that the sink can write in time and the rate limit allows, if the sink takes parts."""
        if self.sink.whole_batches:
            return batch
        if (end := self.holds.first_end(batch)) is not None:  # from there on the sink follows its table again
            return batch.up_to(end)
        batch = batch.first(self._part) if self._part else batch
        if self.attempts.bucket is None or len(batch) <= self.attempts.bucket.burst:
            return batch
        return batch.first(self.attempts.bucket.burst)

    def _learn(self, events: int, seconds: float) -> None:
        """Set the size of the next part."""
        if self._part and events:
            rate = events / max(seconds, 1e-3)
            wanted = int(rate * self.options.timeout * PART_OF_TIMEOUT)
            self._part = min(max(self.sink.part_events // 4, wanted, 1), 4 * self._part, MAX_PART)


def _named(refusal: Refusal, part: Batch) -> SinkRejected:
    """The refusal of a batch with a single position, with that position named."""
    error = refusal.error
    assert error is not None
    if error.rejects:
        return error
    position = part.positions()[0].as_py()
    return SinkRejected(
        f"{error.message} (the event at {position})", error.advice, [Reject(position, error.kind, error.text)]
    )
