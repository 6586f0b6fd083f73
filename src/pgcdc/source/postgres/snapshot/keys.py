"""Files of keys that are read by name: rows that got another key while their table was read, and keys that a sink has.

*Moved*: a row may go from what is still to be read to what was. An UPDATE has the whole new row, so that this does no harm,
except for long values that it does not change: these are not in the stream, and whoever has not got the row yet would never
have them. So the new keys of such rows are written down, durably, before the change becomes visible, and read at the end.

*Vanished*: keys that a sink has, and the table perhaps no more: the candidates of requests of the kind vanished.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from pgcdc.core.errors import SourceError, StateError
from pgcdc.core.state import fsync_folder
from pgcdc.source.postgres.setup.published import PublishedTable
from pgcdc.source.postgres.snapshot.requests import SnapshotRequest
from pgcdc.source.postgres.snapshot.window import Key

__all__ = ["MovedKeys", "read_candidates"]


class MovedKeys:
    """The file of one request. Keys are texts by the names of their columns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending: set[Key] | None = None
        self._cut_tail()

    @property
    def nbytes(self) -> int:
        """How much is in it."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def add(self, moves: Iterable[tuple[Key, Key]], columns: list[str], done: int) -> None:
        """Old and new keys, by `columns`. When all else was read (`done` >= 0), only those that were not read yet count."""
        wanted = list(moves)
        if done >= 0:
            pending = self._load_pending(columns, done)
            kept = []
            for old, new in wanted:  # in order: a row may move on
                if old in pending:
                    pending.add(new)
                    kept.append((old, new))
            wanted = kept
        if not wanted:
            return
        lines = [json.dumps(dict(zip(columns, map(_text, new), strict=True))) for _, new in wanted]
        is_new = not self.path.exists()
        try:
            with open(self.path, "ab") as file:
                file.write("".join(f"{line}\n" for line in lines).encode())
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                fsync_folder(self.path.parent)
        except OSError as error:
            raise StateError(f"{self.path} cannot be written: {error.strerror}", "Make room on its disk") from error

    def read(self, done: int, count: int, key: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], ...], int]:
        """The next keys, each once, in the order of `key`, and how many bytes are done then."""
        if not self.nbytes:
            return (), done
        found: dict[tuple[str, ...], None] = {}
        with open(self.path, "rb") as file:
            file.seek(done)
            while len(found) < count and (line := file.readline()).endswith(b"\n"):
                raw = json.loads(line)
                done += len(line)
                if set(key) <= set(raw):
                    found[tuple(raw[name] for name in key)] = None
        return tuple(found), done

    def move_on(self) -> None:
        """Some of it was read: what was is not awaited any more."""
        self._pending = None

    def forget(self) -> None:
        """The request has ended."""
        self.path.unlink(missing_ok=True)
        self._pending = None

    def _load_pending(self, columns: list[str], done: int) -> set[Key]:
        if self._pending is None:
            keys, _ = self.read(done, 1 << 62, tuple(columns))
            self._pending = {tuple(one.encode("utf-8", "surrogateescape") for one in key) for key in keys}
        return self._pending

    def _cut_tail(self) -> None:
        """A line that was half written by a crash: the change comes again."""
        data = self.path.read_bytes() if self.nbytes else b""
        if data and not data.endswith(b"\n"):
            os.truncate(self.path, data.rfind(b"\n") + 1)


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def read_candidates(
    request: SnapshotRequest, begin: int, count: int, table: PublishedTable
) -> tuple[tuple[tuple[str, ...], ...], int]:
    """The next keys in the file of a request, each once, and how many bytes are done then. No keys: it is at its end."""
    found: dict[tuple[str, ...], None] = {}
    try:
        with open(request.keys_file, "rb") as file:
            file.seek(begin)
            while len(found) < count and (line := file.readline()):
                key = json.loads(line)
                if (
                    not isinstance(key, list)
                    or len(key) != len(table.key)
                    or not all(isinstance(one, str) for one in key)
                ):
                    raise ValueError(f"not a key of {len(table.key)} texts: {line[:80]!r}")
                found[tuple(key)] = None
                begin += len(line)
    except (OSError, ValueError) as error:
        raise SourceError(
            f"the keys of table {table.title} in {request.keys_file} cannot be read: {error}", "Make the file again"
        ) from error
    return tuple(found), begin
