"""Snapshot rows that only some adapters receive: a reload of one table, or the repair of some keys. The other adapters
never see them. The capture appends to the file before such rows become visible, so every replay addresses them the same
way."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from pgcdc.core.position import Position
from pgcdc.core.relation import GrowingLines
from pgcdc.core.state import append_lines, encode_line, read_lines, write_durably


@dataclass(frozen=True, slots=True)
class Letter:
    """One release of rows, and which adapters receive it."""

    first: str  # Positions, as text
    last: str
    adapters: tuple[str, ...]
    reload: str = ""  # The request whose rows replace the content of a table; "" for single rows
    oid: int = 0  # The oid of that table
    is_last: bool = False  # After this release the table is complete again
    table: str = ""  # The table's name, for messages


_LETTER = TypeAdapter(Letter)


def append_letter(path: Path, letter: Letter) -> None:
    append_lines(path, [asdict(letter)])


def keep_letters(path: Path, ends: Collection[str]) -> None:
    """Keep only the letters of releases that end at these positions. The others were either delivered, or never
    released because of a crash. Called by the writer when it starts."""
    found = read_lines(path)
    kept = [one for one in found if one["last"] in ends]
    if len(kept) < len(found):
        write_durably(path, b"".join(map(encode_line, kept)))


class Audience:
    """Follows the file as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = GrowingLines(path)
        self._file = (0, 0)  # Its inode and its length at the last read
        self._letters: list[Letter] = []

    def between(self, start: Position, end: Position) -> Sequence[Letter]:
        """The letters addressed in (start, end], in order."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return ()
        if found.st_ino != self._file[0] or found.st_size < self._file[1]:  # the capture was restarted
            self._lines, self._letters = GrowingLines(self._path), []
        self._file = (found.st_ino, found.st_size)
        self._letters += map(_LETTER.validate_python, self._lines.read())
        first, last = (bisect_right(self._letters, str(one), key=lambda letter: letter.last) for one in (start, end))
        reached = self._letters[first : last + 1]  # a batch may end inside the last one
        return [one for one in reached if one.first <= str(end)]
