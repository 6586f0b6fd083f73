"""Takes events in order, folds them by table and key, and hands what they leave to an output."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import orjson
import pyarrow as pa

from pgcdc.core.errors import SinkError
from pgcdc.core.position import Position
from pgcdc.core.shapes import ShapeHistory
from pgcdc.sink.pg_table.copy_text import write_row
from pgcdc.sink.pg_table.fold import Bag, Fold, Keyed, Late, Move
from pgcdc.sink.pg_table.lines import Columns, Event, Scanned, parse_head, parse_line
from pgcdc.sink.pg_table.mapping import source_name
from pgcdc.sink.pg_table.rejected import Effect, key_text
from pgcdc.sink.pg_table.tables import SourceTable, TargetTable, choose_key, describe_source
from pgcdc.sink.pg_table.writer import RowFault

__all__ = ["Folding", "Output", "Sources"]

MOST_ROWS = 100_000
"""When so many rows are folded they are written, so that memory does not grow with the batch."""

_PUTS = frozenset({"INSERT", "SNAPSHOT"})
_ROWS = _PUTS | {"UPDATE", "DELETE"}
_IGNORED = frozenset({"MESSAGE", "BEGIN", "COMMIT", "SCHEMA_CHANGE", "SNAPSHOT_STARTED", "SNAPSHOT_COMPLETED"})


Place = tuple[str, str]
"""Channel and table of events."""


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
        self._known: dict[Place, tuple[SourceTable, Columns]] = {}

    def forget(self) -> None:
        """Tables have other columns from now on."""
        self._known.clear()

    def describe(self, place: Place, position: str) -> SourceTable:
        """A table as it is for the event at a position."""
        return describe_source(self._shapes, source_name(*place), Position.parse(position))

    def of(self, place: Place, position: str, columns: Iterable[str]) -> tuple[SourceTable, Columns]:
        """The table of an event with these columns, and those by which rows are found."""
        if place not in self._known:
            source = self.describe(place, position)
            self._known[place] = source, choose_key(source, self.find(source), set(columns))
        return self._known[place]

    def of_event(self, event: Event) -> tuple[SourceTable, Columns]:
        """The same, of an event that has a row."""
        payload = event["payload"]
        columns = {**(payload["old"] or {}), **payload["row"]}
        return self.of((event["channel"], payload["table"]), event["position"], columns)

    def effects(self, event: Event) -> list[Effect]:
        """Which keys an event changes; first that of its row."""
        payload, position = event["payload"], event["position"]
        source, key = self.of_event(event)
        old, row = payload["old"] or {}, payload["row"]
        together = {**old, **row}
        keys = {key_text(together.get(name) for name in key): None}
        if old and event["operation"] == "UPDATE":
            keys.setdefault(key_text(old.get(name) for name in key))
        return [Effect(source.title, one, position) for one in keys]


class Folding:
    """One run over events."""

    def __init__(self, sources: Sources, output: Output) -> None:
        self._sources = sources
        self._output = output
        self._open: dict[Place, _Open] = {}
        self._heads: dict[bytes, tuple[str, Place]] = {}
        self._cleared: dict[Place, SourceTable] = {}

    def take(self, events: list[Scanned], positions: pa.ChunkedArray, first: int = 0) -> None:
        """Fold the next events; their positions begin at `first`. SinkError: they are no events of ours."""
        heads, opened = self._heads, self._open
        for number, (head, columns, line, old_columns, old) in enumerate(events, first):
            if head is None:
                self._take_line(line or b"")
                continue
            known = heads.get(head)
            if known is None:
                channel, operation, table = parse_head(head)
                known = heads[head] = operation, (channel, table)
            operation, place = known
            one = opened.get(place)
            if columns is not None and one is not None and line is not None:
                try:
                    if operation in _PUTS:
                        one.fold.insert(columns, line)
                        continue
                    if operation == "DELETE":
                        one.fold.delete(columns, line)
                        continue
                    if operation == "UPDATE" and one.fold.update(columns, line, old_columns, old) is None:
                        continue
                except KeyError as error:
                    raise _missing_key(one.source, error) from None
            self._take(operation, place, positions[number].as_py(), (columns, line), (old_columns, old))
        if sum(len(one.fold) for one in opened.values()) >= MOST_ROWS:
            self.flush()

    def _take_line(self, line: bytes) -> None:
        """An event that is not common."""
        event = parse_line(line)
        payload = event["payload"]
        sides = [
            (None, None) if side is None else (tuple(side), write_row(side.values()))
            for side in (payload["row"], payload["old"])
        ]
        place = event["channel"], payload["table"]
        unchanged = payload.get("_unchanged_toast_columns", ())
        self._take(event["operation"], place, event["position"], sides[0], sides[1], unchanged)

    def take_event(self, event: Event) -> None:
        """Fold one event."""
        self._take_line(orjson.dumps(event))

    def _take(
        self,
        operation: str,
        place: Place,
        position: str,
        row: tuple[Columns | None, bytes | None],
        old: tuple[Columns | None, bytes | None],
        unchanged: Iterable[str] = (),
    ) -> None:
        """The whole truth about an event."""
        if operation in _IGNORED:
            return
        if operation == "TRUNCATE":
            one = self._open.pop(place, None)  # what was before is gone with the rest
            self._cleared[place] = one.source if one is not None else self._sources.describe(place, position)
            return
        columns, line = row
        if operation not in _ROWS or columns is None or line is None:
            raise SinkError(
                f"the operation {operation} at {position} cannot be applied to a table",
                "A transform made it: pg_table applies INSERT, UPDATE, DELETE, TRUNCATE and SNAPSHOT",
            )
        one = self._open.get(place)
        if one is None:
            source, key = self._sources.of(place, position, (*(old[0] or ()), *columns))
            one = self._open[place] = _Open(source, self._make(source, key))
        try:
            if operation in _PUTS:
                one.fold.insert(columns, line)
            elif operation == "DELETE":
                one.fold.delete(columns, line)
            else:
                move = one.fold.update(columns, line, *old, unchanged)
                if move is not None:
                    self._move(one, move)
        except KeyError as error:
            raise _missing_key(one.source, error) from None

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

    def _fresh(self, one: _Open) -> Fold:
        return self._make(one.source, one.fold.key)

    def _make(self, source: SourceTable, key: tuple[str, ...]) -> Fold:
        if not key:
            return Bag()
        if source.is_key_deferrable:
            return Late(key)

        def keeps_more(columns: Iterable[str]) -> bool:
            target = self._sources.find(source)
            return target is not None and not set(target.writable(target.columns)) <= set(columns)

        return Keyed(key, keeps_more)

    def _move(self, one: _Open, move: Move) -> None:
        self.flush()
        assert isinstance(one.fold, Keyed)
        self._output.move(one.source, one.fold, move)


def _missing_key(source: SourceTable, error: KeyError) -> RowFault:
    return RowFault("missing_key", f"the event of table {source.title} has no value of its key {error.args[0]}")
