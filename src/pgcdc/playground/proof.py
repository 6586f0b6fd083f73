"""The playground's proof: what was delivered, put together again, is what the database has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from pgcdc.playground.contents import Tables, check_sequence, differences
from pgcdc.playground.shop import fold

__all__ = ["Verdict", "compare", "read_events"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a comparison."""

    events: int
    rows: int
    tables: int
    faults: tuple[str, ...]
    """One line each; none if source and delivered content are equal."""

    @property
    def is_equal(self) -> bool:
        """Whether nothing was lost and nothing came twice."""
        return not self.faults

    def __str__(self) -> str:
        if self.is_equal:
            return (
                f"source and delivered content are equal: {self.rows:,} rows in {self.tables} tables, "
                f"{self.events:,} events, nothing lost, nothing twice"
            )
        count = len(self.faults)
        return f"source and delivered content differ: {count:,} {'difference' if count == 1 else 'differences'}"


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file, one by one. Raises ValueError for a line that is none."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                event: dict[str, Any] = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise ValueError(f"line {number} is not JSON: {error}") from None
            if not line.endswith(b"\n"):
                raise ValueError(f"line {number} has no end: the file is cut off")
            yield event


def compare(path: Path, source: Tables) -> Verdict:
    """Fold the file and compare it with the tables; ids must be unique and positions must rise."""
    rows = sum(len(table) for table in source.values())
    try:
        events, faults = _check_sequence(path)
        try:
            folded = fold(read_events(path), strict=True)
        except ValueError as error:
            faults.append(str(error))
            folded = fold(read_events(path))
        faults += differences(source, folded)
    except (ValueError, KeyError, TypeError) as error:  # not our events at all
        return Verdict(0, rows, len(source), (f"{path.name} cannot be read: {error}",))
    return Verdict(events, rows, len(source), tuple(faults))


def _check_sequence(path: Path) -> tuple[int, list[str]]:
    """How many events there are, and which of them came twice or out of order."""
    faults: list[str] = []
    return sum(1 for _ in check_sequence(read_events(path), faults)), faults
