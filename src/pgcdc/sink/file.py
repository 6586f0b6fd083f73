"""JSON lines in a file, exactly once.

The ack holds the position and the file's size at that position. After a crash the file is cut back to that size, so that a
half-written batch is written again from its beginning.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pgcdc.errors import SinkError, SinkUnavailable, StateError
from pgcdc.ops.failpoint import hit
from pgcdc.position import Position
from pgcdc.sink.ack import AckFile
from pgcdc.sink.base import Batch
from pgcdc.sink.state import KeyStore, read_lines
from pgcdc.state import fsync_folder, write_all

__all__ = ["FileSink"]


class FileSink:
    """Appends every event as one line to `path`."""

    def __init__(self, path: Path, acks: Path, name: str = "file") -> None:
        self.name = name
        self._path = path.absolute()
        self._ack = AckFile(acks, name)
        self._descriptor = -1
        self._size = 0

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @property
    def ack(self) -> Position:
        assert self._ack.position is not None
        return self._ack.position

    def check(self) -> None:
        with self._explain():
            self._look()
            if self._path.exists():
                os.close(os.open(self._path, os.O_WRONLY | os.O_NONBLOCK))  # a pipe without a reader must not block
            else:
                tempfile.TemporaryFile(dir=self._path.parent).close()

    def open(self, start: Position) -> None:
        with self._explain():
            self._open(start)

    @contextlib.contextmanager
    def _explain(self, done: str = "written") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SinkError(
                f"{self._path} cannot be {done}: {error.strerror}", "Check the folder and its permissions"
            ) from error

    def _look(self) -> bool:
        """Whether the file is the one that was written before. Raises SinkError if it is not as it was left."""
        detail = self._ack.detail
        # The same path may have been a folder before.
        known = self._ack.position is not None and "size" in detail and detail["path"] == str(self._path)
        exists = self._path.exists()
        if known and not exists:
            raise SinkError(
                f"{self._path} is gone, but events up to {self.ack} were written to it",
                "Move it back, or give the adapter another path: the next events go there",
            )
        size = self._path.stat().st_size if exists else 0
        if known and size < detail["size"]:
            raise SinkError(
                f"{self._path} has {size} bytes, but {detail['size']} were written to it",
                "Restore it, or give the adapter another path: the next events go there",
            )
        if not known and size:
            raise SinkError(
                f"{self._path} exists and was not written by this pipeline",
                "Move it away, or give the adapter another path",
            )
        return known

    def _open(self, start: Position) -> None:
        known = self._look()
        if not known:
            from pgcdc.sink.folder import leave_folder  # which imports this

            leave_folder(self._ack.detail)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._size = self._ack.detail["size"] if known else 0
        os.ftruncate(self._descriptor, self._size)
        os.lseek(self._descriptor, self._size, os.SEEK_SET)
        os.fsync(self._descriptor)
        fsync_folder(self._path.parent)
        self._save(self._ack.position or start, self._size)

    def write(self, batch: Batch) -> None:
        if batch.end <= self.ack:
            return
        batch = batch.after(self.ack)
        try:
            os.ftruncate(self._descriptor, self._size)  # a failed attempt may have left something
            os.lseek(self._descriptor, self._size, os.SEEK_SET)
            size = self._size
            for lines in batch.lines():
                size += write_all(self._descriptor, lines)
                hit("file.half_written")
            if size != self._size:
                os.fsync(self._descriptor)
        except OSError as error:
            raise SinkUnavailable(
                f"{self._path} cannot be written: {error.strerror}", "Is the disk full? Nothing is lost: start again"
            ) from error
        hit("file.before_ack")
        self._save(batch.end, size)
        hit("file.after_ack")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read_back(self, store: KeyStore) -> None:
        """Hand every event that the ack covers to `store`, in order."""
        with self._explain("read"):
            if self._look():
                read_lines(self._path, self._ack.detail["size"], store)

    def _save(self, position: Position, size: int) -> None:
        try:
            self._ack.save(position, {"path": str(self._path), "size": size})
        except StateError as error:
            raise SinkUnavailable(error.message, error.advice) from error
        self._size = size
