"""Takes events in order, folds them by table and key, and hands what they leave to an output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from pgcdc.errors import SinkError
from pgcdc.position import Position
from pgcdc.sink.pg_table.fold import Bag, Fold, Keyed, Move, Row
from pgcdc.sink.pg_table.lines import Event
from pgcdc.sink.pg_table.mapping import source_name
from pgcdc.sink.pg_table.rejected import Effect, key_text
from pgcdc.sink.pg_table.tables import SourceTable, TargetTable, choose_key, describe_source
from pgcdc.sink.pg_table.writer import RowFault
from pgcdc.spool.shapes import ShapeHistory

__all__ = ["Folding", "Output", "Sources"]

MOST_ROWS = 100_000
"""When so many rows are folded they are written, so that memory does not grow with the batch."""

_PUTS = frozenset({"INSERT", "SNAPSHOT"})
_IGNORED = frozenset({"MESSAGE", "BEGIN", "COMMIT", "SCHEMA_CHANGE", "SNAPSHOT_STARTED", "SNAPSHOT_COMPLETED"})


class Output(Protocol):
    """Where folded changes go."""

    def truncate(self, sources: Iterable[SourceTable]) -> None: ...
    def write(self, source: SourceTable, fold: Fold) -> None: ...
    def move(self, source: SourceTable, fold: Keyed, move: Move) -> None: ...


@dataclass(slots=True)
class _Open:
    source: SourceTable
    fold: Fold


class Sources:
    """Tables of the source by the events that come of them."""

    def __init__(self, shapes: ShapeHistory, find: Callable[[SourceTable], TargetTable | None]) -> None:
        """`find`: the table at the target."""
        self._shapes = shapes
        self.find = find
        self._known: dict[tuple[str, str], tuple[SourceTable, tuple[str, ...]]] = {}

    def forget(self) -> None:
        """Tables have other columns from now on."""
        self._known.clear()

    def describe(self, event: Event) -> SourceTable:
        """The table of an event, without a look at its row."""
        name = source_name(event["channel"], event["payload"]["table"])
        return describe_source(self._shapes, name, Position.parse(event["position"]))

    def of(self, event: Event) -> tuple[SourceTable, tuple[str, ...]]:
        """The table of an event that has a row, and the columns by which rows are found."""
        payload = event["payload"]
        place = (event["channel"], payload["table"])
        if place not in self._known:
            source = self.describe(event)
            row = {**(payload["old"] or {}), **payload["row"]}
            self._known[place] = source, choose_key(source, self.find(source), row)
        return self._known[place]

    def effects(self, event: Event) -> list[Effect]:
        """Which keys an event changes."""
        payload, position = event["payload"], event["position"]
        source, key = self.of(event)
        old, row = payload["old"] or {}, payload["row"]
        new = key_text({**old, **row}.get(name) for name in key)
        keys = dict.fromkeys([new])
        if old and event["operation"] == "UPDATE":
            keys.setdefault(key_text(old.get(name) for name in key))
        return [Effect(source.title, one, position) for one in keys]


class Folding:
    """One run over events."""

    def __init__(self, sources: Sources, output: Output) -> None:
        self._sources = sources
        self._output = output
        self._open: dict[tuple[str, str], _Open] = {}
        self._cleared: dict[tuple[str, str], SourceTable] = {}

    def take(self, events: list[Event]) -> None:
        """Fold the next events. SinkError: they are no events of ours."""
        opened = self._open
        for event in events:
            try:
                operation, payload = event["operation"], event["payload"]
                place = event["channel"], payload["table"]
            except (KeyError, TypeError):
                raise other_envelope(event) from None
            one = opened.get(place)
            if one is None:
                if operation in _IGNORED:
                    continue
                if operation == "TRUNCATE":
                    self._clear(place, event)
                    continue
                one = opened[place] = self._begin(event)
            try:
                if operation in _PUTS:
                    one.fold.insert(payload["row"])
                elif operation == "UPDATE":
                    move = one.fold.update(payload["row"], payload["old"], payload.get("_unchanged_toast_columns", ()))
                    if move is not None:
                        self._move(one, move)
                elif operation == "DELETE":
                    one.fold.delete(payload["row"])
                elif operation == "TRUNCATE":
                    self._clear(place, event)
                else:
                    raise SinkError(
                        f"the operation {operation} at {event['position']} cannot be applied to a table",
                        "A transform made it: pg_table applies INSERT, UPDATE, DELETE, TRUNCATE and SNAPSHOT",
                    )
            except KeyError as error:
                raise RowFault(
                    "missing_key", f"the event of table {one.source.title} has no value of its key {error.args[0]}"
                ) from None
        if sum(len(one.fold) for one in opened.values()) >= MOST_ROWS:
            self.flush()

    def flush(self) -> None:
        """Hand over everything so far."""
        if self._cleared:
            self._output.truncate(self._cleared.values())
            self._cleared = {}
        for one in self._open.values():
            if len(one.fold):
                self._output.write(one.source, one.fold)
                one.fold = self._fresh(one)

    def end(self) -> None:
        """Hand over everything; tables may look otherwise from here on."""
        self.flush()
        self._open.clear()
        self._sources.forget()

    def _begin(self, event: Event) -> _Open:
        source, key = self._sources.of(event)
        return _Open(source, self._make(source, key))

    def _fresh(self, one: _Open) -> Fold:
        return self._make(one.source, one.fold.key)

    def _make(self, source: SourceTable, key: tuple[str, ...]) -> Fold:
        if not key:
            return Bag()

        def keeps_more(row: Row) -> bool:
            target = self._sources.find(source)
            return target is not None and any(name not in row for name in target.writable(target.columns))

        return Keyed(key, keeps_more)

    def _clear(self, place: tuple[str, str], event: Event) -> None:
        """What was before is gone with the rest."""
        one = self._open.pop(place, None)
        self._cleared[place] = one.source if one is not None else self._sources.describe(event)

    def _move(self, one: _Open, move: Move) -> None:
        self.flush()
        assert isinstance(one.fold, Keyed)
        self._output.move(one.source, one.fold, move)


def other_envelope(event: object) -> SinkError:
    """The error for lines that are not events of ours."""
    what = "Debezium's" if isinstance(event, dict) and "op" in event.get("payload", event) else "another"
    return SinkError(
        f"pg_table in the mode apply got a line with {what} envelope",
        "It applies pgcdc's own events: take the transform debezium or cloudevents out of this adapter's, or use the mode "
        "append",
    )


def iterate(events: Iterable[list[Event]]) -> Iterator[Event]:
    """One after the other."""
    for piece in events:
        yield from piece
