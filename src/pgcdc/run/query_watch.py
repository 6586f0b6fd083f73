"""The query of one lane: started, watched, restarted after failures, and acknowledged when Spark has committed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pgcdc.core.errors import PgcdcError, Policy, SchemaChanged, SinkUnavailable, reconnect_delay_s
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.run.lane import Lane, LaneStopped
from pgcdc.spark.session import explain_failure, stop_within
from pgcdc.spool.consumers import MAIN

if TYPE_CHECKING:
    from pgcdc.run.supervisor import Lanes

QUERY_STOP_S = 3.0
RECOVERED_S = 10.0  # A query that has run this long without trouble has recovered
MAX_QUERY_FAILURES = 5


class QueryWatch:
    """Watches one lane. `look` raises the error that must end the run."""

    def __init__(self, lane: Lane, lanes: Lanes) -> None:
        self.lane = lane
        self.failures = 0
        self.retry_at = 0.0
        self.is_done = False
        self.position: Position | None = None  # The last acknowledged position
        self.error: PgcdcError | None = None  # The error it failed with, until it has recovered
        self._lanes = lanes
        self._is_main = lane.name == MAIN
        self._began = 0.0
        self._schema_place: Position | None = None
        """Where the typed query last restarted because of other columns: once per place."""

    def start(self) -> None:
        lanes, lane = self._lanes, self.lane
        assert lanes.spark is not None
        self.is_done, self._began = False, time.monotonic()
        try:
            options = {**lanes.options, "consumer": lane.name}
            lane.start(lanes.spark, options, lanes.program_of(lane), once=lanes.config.once)
        except PgcdcError:
            raise
        except Exception as error:
            raise self._explain(error) from error

    def look(self) -> None:
        """Start a missing query, and find out why a query has ended."""
        lane = self.lane
        if lane.query is None:
            if not self.is_done and time.monotonic() >= self.retry_at:
                self._begin()
            return
        try:
            if lane.query.isActive:
                if not lane.boundary.locked() and time.monotonic() >= self._began + RECOVERED_S:
                    self._forget_error()
                return
            error: BaseException | None = lane.query.exception()
        except Exception as raised:
            error = raised
        lane.query = None
        if error is None:
            self.is_done = self._lanes.config.once
        elif not isinstance(lane.error, LaneStopped):
            self.recover(self._explain(error))

    def fail(self, error: Exception) -> None:
        """Something outside the query failed: stop the query, and restart it if that may help."""
        explained = self._explain(error)
        if self.lane.query is not None:
            stop_within(QUERY_STOP_S, self.lane.query)
            self.lane.query = None
        self.recover(explained)

    def recover(self, error: PgcdcError) -> None:
        """Restart a query from its checkpoint if its failure may be temporary; anything else ends the run."""
        if self._follow_schema(error):
            return
        is_lasting = self.failures >= MAX_QUERY_FAILURES and not isinstance(error, SinkUnavailable)
        if error.policy is not Policy.RETRY or (self._is_main and (self._lanes.config.fail_fast or is_lasting)):
            raise error
        delay_s = reconnect_delay_s(self.failures)
        self.failures += 1
        self.retry_at = time.monotonic() + delay_s
        self.error = error
        members = [] if self._is_main else self.lane.members()
        for member in members:
            member.last_error = error
        if self._is_main or self.failures == 1:
            self._lanes.say(f"{error.message}; restarting the {self._what} in {delay_s:.1f} s")

    def acknowledge(self) -> None:
        """Every member has made durable what Spark committed, so the capture may confirm it."""
        if self._is_main:
            hit("driver.before_ack")
        link, name = self._lanes.link, self.lane.name
        position = self.lane.committed(lambda end: link.ack(name, end))
        if position is None:
            return
        self.position, self.failures = position, 0
        self._forget_error()
        if self._is_main:
            hit("driver.after_ack")

    def _begin(self) -> None:
        """Start a query that was never started or that failed."""
        try:
            if not self._is_main:
                member = next(iter(self.lane.members()), None)
                if member is None or member.is_busy:  # writes that have begun must end first
                    return
                member.open(self.lane.place)
            self.start()
        except PgcdcError as error:
            self.recover(error)

    def _forget_error(self) -> None:
        if self.error is None:
            return
        for member in self.lane.members():
            if member.last_error is self.error:
                member.last_error = None
        self.error = None
        self._lanes.say(f"the {self._what} runs again")

    @property
    def _what(self) -> str:
        members = [] if self._is_main else self.lane.members()
        return f"lane of adapter {members[0].name}" if members else "query"

    def _follow_schema(self, error: PgcdcError) -> bool:
        """When a typed query meets other columns, restart it there with the new ones; True if it may."""
        from pgcdc.event.typed import LOAD_AGAIN

        if not isinstance(error, SchemaChanged) or self._schema_place == self.lane.place:
            return False
        self._schema_place = self.lane.place
        self._lanes.acknowledge()
        what = error.message.partition(f". {LOAD_AGAIN}")[0]
        self._lanes.say(f"{what}; the query restarts there with these columns")
        return True

    def _explain(self, error: BaseException) -> PgcdcError:
        return explain_failure(error, self.lane.error, self._lanes.link.last_status)
