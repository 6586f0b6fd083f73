"""Settings of events and of typed rows: what stands in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pgcdc.core.position import Position
from pgcdc.core.settings import Conflict, Options, setting
from pgcdc.event.frame import EventOptions
from pgcdc.postgres.selection import TableName

EVENTS, TYPED = "Events", "Typed rows"


class EventSettings(Options):
    """What stands in events."""

    tx_metadata: bool = setting(False, "Events name their transaction: xid, commit time, number.", EVENTS)
    tx_markers: bool = setting(False, "Also BEGIN and COMMIT events, on pgcdc:_txn.", EVENTS)
    schema_events: bool = setting(False, "Also an event when a table is altered, on pgcdc:_schema.", EVENTS)
    invalid_utf8: Literal["error", "replace", "base64"] = setting(
        "error", "Bytes that are not UTF-8: error, replace or base64.", EVENTS, metavar="POLICY"
    )

    @property
    def events(self) -> EventOptions:
        """The same for who makes them; markers say which transaction they are of."""
        return EventOptions(self.tx_markers or self.tx_metadata, self.tx_markers, self.invalid_utf8, self.schema_events)


class TypedSettings(Options):
    """Typed rows of one table instead of events."""

    table: TableName | None = setting(
        None, "Typed rows of this table instead of events: its own columns. See docs/types.md.", TYPED,
        metavar="NAME", example="orders",
    )  # fmt: skip
    changelog: Literal["changes", "zset"] = setting(
        "changes", "With --table: changes, or zset (rows with weights).", TYPED, metavar="KIND"
    )
    truncate: Literal["error", "mark"] = setting(
        "error", "With --changelog zset: error, or mark (a row for it).", TYPED, metavar="POLICY"
    )
    numeric: Literal["decimal", "string", "double"] = setting(
        "decimal", "With --table: numeric as decimal, string or double.", TYPED, metavar="KIND"
    )
    out_of_range: Literal["error", "clamp", "string"] = setting(
        "error", "With --table: infinity, BC: error, clamp, or dates as string.", TYPED, metavar="POLICY"
    )
    arrays: Literal["array", "string"] = setting("array", "With --table: array or string.", TYPED, metavar="KIND")
    composites: Literal["struct", "string"] = setting(
        "struct", "With --table: struct or string.", TYPED, metavar="KIND"
    )

    def typed_conflicts(self, events: EventSettings) -> Iterator[Conflict]:
        """What is for events alone, or for typed rows alone."""
        for name in ("tx_metadata", "tx_markers", "schema_events") if self.table else ():
            if getattr(events, name):
                flag = name.replace("_", "-")
                yield Conflict(
                    (name,),
                    f"--{flag} is for events, not for typed rows",
                    f"Leave --table or --{flag} out; rows have _xid and _ts",
                )
        for name in TypedSettings.model_fields if not self.table else ():
            if self.is_given(name):
                flag = name.replace("_", "-")
                yield Conflict((name,), f"--{flag} is for typed rows", "Add --table, or leave it out")


@dataclass(frozen=True, slots=True)
class RowOptions:
    """How changes become rows."""

    zset: bool = False
    """Rows with weights: an UPDATE takes the old row back (-1) and adds the new one (+1)."""
    truncate: str = "error"
    """What a TRUNCATE is for a Z-set, which was not told of the rows that are gone: `error`, or a row to `mark` it."""
    other_shapes: bool = False
    """Changes whose table has other columns by then are read as far as they go; else they are refused."""
    events: EventOptions = EventOptions()  # noqa: RUF009 - frozen
    snapshot_end: Position = Position.at(0, 0)  # noqa: RUF009 - frozen
    """Up to where rows of snapshots are those of the initial one: only these are new to a Z-set."""
