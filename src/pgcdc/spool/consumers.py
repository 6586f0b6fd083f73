"""The readers of the spool, and how far each has made it durable. The minimum of all acks may be confirmed. That minimum
is durable here *before* it is confirmed to the source. So if a slot is ahead of this file, somebody else moved it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgcdc.core.errors import ConfigError, GapError
from pgcdc.core.position import Position
from pgcdc.core.state import read_json, write_json_durably
from pgcdc.spool.index import NO_TOKEN, Token

MAIN = "main"  # The consumer of `pgcdc listen`
_SIDE_LANE = re.compile(rf"{MAIN}~.+~[0-9]+")


def is_side_lane(name: str) -> bool:
    """Whether a consumer is `pgcdc listen` serving a single adapter (`run/roster.py`)."""
    return _SIDE_LANE.fullmatch(name) is not None


@dataclass(slots=True)
class Consumer:
    """One reader of the spool."""

    initial: Position  # Where it began: after a crash in its first batch Spark asks again, and must get the same answer
    ack: Position
    confirmable: int  # The last END of a transaction that its acks cover


class Consumers:
    """The consumers of one slot, and the confirmed position."""

    def __init__(self, path: Path) -> None:
        self._path = path
        raw: dict[str, Any] = read_json(path) or {}
        self.confirmed_lsn: int = raw.get("confirmed_lsn", 0)
        self._floor = Position.parse(raw["floor"]) if "floor" in raw else Position.at(0, 0)
        """Up to here the spool was released while other consumers existed: no consumer can start before it."""
        commit, value = raw.get("token", (0, ""))
        self.token = Token(commit, bytes.fromhex(value))  # The last token of the confirmed transactions
        self._dirty = False
        self._consumers = {
            name: Consumer(Position.parse(one["initial"]), Position.parse(one["ack"]), one["confirmable"])
            for name, one in raw.get("consumers", {}).items()
        }

    def __contains__(self, name: str) -> bool:
        return name in self._consumers

    def __getitem__(self, name: str) -> Consumer:
        return self._consumers[name]

    def names(self) -> list[str]:
        return sorted(self._consumers)

    def join(self, name: str, start: Position | None = None) -> Consumer:
        """The consumer with this name; a new one begins at `start`, or with everything kept. Durable when this returns.
        Raises GapError if the changes after `start` are no longer kept."""
        if name not in self._consumers:
            start = self.base if start is None else start
            if start < self.base:
                raise GapError(
                    f"consumer {name!r} cannot start at {start}: changes are kept only after {self.base}",
                    "Start it with the changes that are kept, and with a new target",
                )
            self._consumers[name] = Consumer(start, start, start.confirmable)
            self._save()
        return self._consumers[name]

    def forget(self, name: str) -> None:
        """Drop a consumer that will not come back. Durable when this returns."""
        if name not in self._consumers:
            known = ", ".join(self.names()) or "none"
            raise ConfigError(f"consumer {name!r} does not exist", f"Known consumers: {known}")
        self._floor = self.base
        del self._consumers[name]
        self._save()

    def ack(self, name: str, position: Position) -> None:
        """The consumer has made everything up to `position` durable."""
        consumer = self._consumers.get(name)
        if consumer is None:
            raise ConfigError(
                f"consumer {name!r} was forgotten while its query was running",
                "Stop the query, or start it again with a new checkpoint",
            )
        if position > consumer.ack:
            consumer.ack = position
            consumer.confirmable = max(consumer.confirmable, position.confirmable)
            self._dirty = True

    def confirmable(self, token_at: Callable[[int], Token] = lambda commit: NO_TOKEN) -> int:
        """What may be confirmed to the source now. This and its last token are durable here when this returns."""
        if not self._consumers:
            return self.confirmed_lsn
        lsn = min(consumer.confirmable for consumer in self._consumers.values())
        token = token_at(lsn)
        if lsn > self.confirmed_lsn:
            self.confirmed_lsn, self._dirty = lsn, True
        if token.commit > self.token.commit:  # may come later: an ack may be ahead of what was read again
            self.token, self._dirty = token, True
        if self._dirty:
            self._save()
        return self.confirmed_lsn

    @property
    def base(self) -> Position:
        """The position up to which nothing is needed: the confirmed one, plus the snapshot rows after it that all
        consumers have acknowledged."""
        base = max(Position.end(self.confirmed_lsn), self._floor)
        acks = [consumer.ack for consumer in self._consumers.values()]
        acked = min(acks, default=base)
        return acked if acked > base and acked.is_snapshot and acked.commit == self.confirmed_lsn else base

    def begin(self, lsn: int) -> None:
        """A new slot: it has confirmed `lsn`, and has no consumers yet."""
        self.confirmed_lsn, self.token = lsn, NO_TOKEN
        self._floor = Position.at(0, 0)
        self._save()

    def to_json(self) -> dict[str, Any]:
        """The form in the file and in `pgcdc status`."""
        return {
            "confirmed_lsn": self.confirmed_lsn,
            "floor": str(self._floor),
            **({"token": [self.token.commit, self.token.value.hex()]} if self.token.value else {}),
            "consumers": {
                name: {"initial": str(one.initial), "ack": str(one.ack), "confirmable": one.confirmable}
                for name, one in self._consumers.items()
            },
        }

    def _save(self) -> None:
        write_json_durably(self._path, self.to_json())
        self._dirty = False
