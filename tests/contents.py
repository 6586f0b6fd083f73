"""What cannot be among the events of a whole run: rows of snapshots that come twice, too late, or older than the stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pgcdc.playground import proof
from pgcdc.playground.proof import Key, Row, Rules, Tables, check_sequence, differences, read_tables, shown, table_of

__all__ = ["check_sequence", "differences", "fold_events", "read_tables"]


def fold_events(
    events: Iterable[Mapping[str, Any]],
    keys: Mapping[str, Sequence[str]],
    *,
    strict: bool = False,
    complete: bool = True,
    resynced: bool = False,
) -> Tables:
    """The tables that result from these events. With `strict`, what cannot be is a ValueError.

    `complete`: the events begin with the tables' rows, or with empty tables; else rows that are not known are fine.
    `resynced`: after a second initial snapshot of a table, rows of before are fine until they are deleted.
    """
    return proof.fold_events(events, keys, SnapshotRules(complete, resynced) if strict else None)


class SnapshotRules(Rules):
    def __init__(self, complete: bool, resynced: bool) -> None:
        self._complete = complete
        self._resynced = resynced
        self._kinds: dict[str, str] = {}
        self._read: dict[str, dict[Key, str]] = {}
        """Of each table: what has come in the snapshot that was begun last, and behind which transaction."""
        self._old: dict[str, set[Key]] = {}
        """Of each table: rows of before a resync, that nobody has told anything about yet."""

    def observe(self, event: Mapping[str, Any], tables: Tables) -> None:
        if event["operation"] != "SNAPSHOT_STARTED":
            return
        mark = event["payload"]["row"]
        name = f"{mark['schema']}.{mark['table']}"
        self._kinds[name] = mark["kind"]
        self._read[name] = {}
        if self._resynced and mark["kind"] == "initial":
            self._old[name] = set(tables.get(name, {}))

    def fault(self, event: Mapping[str, Any], rows: Mapping[Key, Row], key: Key, previous: Row | None) -> str | None:
        operation, name = event["operation"], table_of(event)
        old = self._old.get(name, set())
        is_old = key in old
        old.discard(key)
        if operation == "SNAPSHOT":
            return self._snapshot_fault(event, name, key, None if is_old else previous, is_old)
        # rows that vanished before a resync are deleted by rows of a snapshot: the stream may have done it meanwhile
        is_check = operation == "DELETE" and str(event.get("position", "/0")).partition("/")[2].startswith("1")
        found = super().fault(event, {} if is_old else rows, key, previous)
        is_fine = found == "exists" and is_old
        is_fine |= found == "does not exist" and (not self._complete or is_check)
        return None if is_fine else found

    def _snapshot_fault(
        self, event: Mapping[str, Any], name: str, key: Key, previous: Row | None, is_old: bool
    ) -> str | None:
        row, place = event["payload"]["row"], str(event.get("position")).partition("/")[0]
        read = self._read.setdefault(name, {})
        if read.get(key) == place:  # behind another transaction it may come again: keys that were moved are looked up
            return "came twice in one snapshot"
        read[key] = place
        if previous is None:
            is_again = self._kinds.get(name) in ("incremental", "always")
            return "is gone, and comes back" if is_again and self._complete and not is_old else None
        found = [column for column in row if column in previous and previous[column] != row[column]]
        if not found:
            return None
        return f"has {shown(row[found[0]])} in column {found[0]}, but the stream had {shown(previous[found[0]])}"
