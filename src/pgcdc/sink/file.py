"""JSON lines in a file, exactly once.

The ack holds the position and the file's size at that point. After a crash the file is cut back to that size, so that a
half-written batch is written again from its start.

With a size limit the file rotates: `events.jsonl` becomes `events.jsonl.000001`, the next one `.000002`; a file keeps
its number forever. The ack lists our numbers; files with other numbers are never touched or overwritten. The file is
renamed first, then the ack records it. In between, the file at the path is missing or new, and the one with the next
number has the size in the ack, so a start after a crash continues from there. A rotated file is compressed next to the
original, which is removed when the compressed file is durable. Every step can be repeated.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import model_validator

from pgcdc.core.errors import ConfigError, SinkError, SinkUnavailable
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.settings import Bytes, PathText, setting
from pgcdc.core.state import fsync_folder, write_all
from pgcdc.event.batch import Batch
from pgcdc.event.shape import TableShape
from pgcdc.sink.contract import Progress, Sink, SinkContext
from pgcdc.sink.line_files import (
    Compression,
    EventStore,
    Rotated,
    content_kind,
    find_rotated,
    highest_number,
    read_lines,
    rotated_name,
    tidy,
)
from pgcdc.sink.row_store import RowStore
from pgcdc.sink.spec import SinkOptions

if TYPE_CHECKING:
    from pgcdc.sink.folder import FolderSink

CLOSE_TIMEOUT_S = 30.0
READ_TRIES = 5


class FileOptions(SinkOptions):
    """JSON lines in a file, or in part files in a folder."""

    path: PathText = setting(..., "the file; or a folder, if it exists or ends with a slash", min_length=1)
    max_size: Bytes = setting(0, "rotate a file before it grows larger: 100MB; 0: never", ge=0)
    max_files: int = setting(0, "how many rotated files to keep; older ones are deleted; 0: all", ge=0)
    compress: Compression = setting("none", "how to compress rotated files")

    @model_validator(mode="after")
    def _check_rotation(self) -> FileOptions:
        for name, is_given in (("max_files", self.max_files > 0), ("compress", self.compress != "none")):
            if is_given and not self.max_size:
                raise ValueError(f"{name} applies to rotated files; set max_size as well")
        return self

    @property
    def full_path(self) -> Path:
        return Path(self.path).absolute()

    @property
    def is_folder(self) -> bool:
        """Whether the path is, or will be, a folder."""
        return self.path.endswith("/") or self.full_path.is_dir()

    def make(self) -> FileSink | FolderSink:
        from pgcdc.sink.folder import FolderSink  # it imports this module

        if self.is_folder:
            return FolderSink(self.full_path)
        return FileSink(self.full_path, max_bytes=self.max_size, max_files=self.max_files, compression=self.compress)

    def target(self) -> str:
        return os.path.realpath(self.full_path)

    def check(self) -> None:
        if not self.full_path.parent.is_dir():
            raise ConfigError(f"the folder of the file {self.path} does not exist", "Create it first")
        if self.is_folder and self.max_size:
            raise ConfigError(f"{self.path} is a folder, which is not rotated", "Remove max_size, or name a file")


class DiskSink(Sink):
    """The shared part of file and folder sinks."""

    reads_back = True

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # The file or folder

    @property
    def name(self) -> str:
        return self._progress.name

    def bind(self, progress: Progress) -> None:
        """Load what was written before. Must run before anything reads."""
        self._progress = progress

    @property
    def is_there(self) -> bool:
        """Whether there is anything to read."""
        raise NotImplementedError

    def read_events(self, store: EventStore) -> None:
        """Pass every event that the ack covers to `store`, in order."""
        raise NotImplementedError

    def read_back(self, context: SinkContext, shape: TableShape, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows that the events leave of a table. Starts again if a writer rotates files or shows parts
        meanwhile."""
        for left in reversed(range(READ_TRIES)):
            progress = Progress(context.progress.folder, context.name)
            self.bind(progress)
            with RowStore(shape) as store:
                try:
                    if "path" in progress.detail:
                        self.read_events(store)
                    yield from store.rows(columns)
                    return
                except SinkError:
                    if not left or Progress(progress.folder, context.name).detail == progress.detail:
                        raise

    @property
    def _at(self) -> Position:
        assert self._progress.position is not None
        return self._progress.position

    @contextlib.contextmanager
    def _explain(
        self,
        done: str = "written",
        kind: type[SinkError] = SinkError,
        advice: str = "Check the folder and its permissions",
    ) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise kind(f"{self.path} cannot be {done}: {error.strerror or error}", advice) from error


class FileSink(DiskSink):
    """Appends every event as one line to `path`."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = 0,
        max_files: int = 0,
        compression: Compression = "none",
    ) -> None:
        """A file rotates before it exceeds `max_bytes` (0: never); `max_files` rotated files are kept (0: all)."""
        super().__init__(path)
        self._descriptor = -1
        self._max_bytes, self._max_files, self._compression = max_bytes, max_files, compression
        self._pool: ThreadPoolExecutor | None = None  # Tidies rotated files: compression is slow
        self._is_stopped = False

    def check(self, context: SinkContext) -> None:
        self.bind(context.progress)
        with self._explain():
            self._look()
            if self.path.exists():
                os.close(os.open(self.path, os.O_WRONLY | os.O_NONBLOCK))  # a pipe without a reader must not block
            else:
                tempfile.TemporaryFile(dir=self.path.parent).close()

    def open(self, context: SinkContext) -> None:
        self.bind(context.progress)
        self._say, self._is_stopped = context.say, False
        with self._explain():
            if not self._look():
                from pgcdc.sink.folder import leave_folder  # it imports this module

                leave_folder(self._progress)
                self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
                os.fsync(self._descriptor)
                fsync_folder(self.path.parent)
                last = highest_number(self.path)  # of other pipelines
                rotated = {"first": last + 1, "oldest": last + 1, "last": last, "bytes": 0}
                self._progress.save(context.start, {"path": str(self.path), "size": 0, **rotated})
            self._restore()

    def write(self, batch: Batch) -> None:
        with self._explain(kind=SinkUnavailable, advice="Is the disk full? Nothing is lost: it is retried"):
            self._restore()
            while True:
                part = self._fitting(batch)
                self._append(part.lines())
                if part.end >= batch.end:
                    return
                hit("sink.before_ack")
                self._progress.save(part.end)  # the next event goes to another file
                batch = batch.after(part.end)

    def redeliver(self, batch: Batch) -> Collection[str]:
        """Append past lines. This changes the size in the ack, not its position."""
        with self._explain(kind=SinkUnavailable, advice="Is the disk full? Nothing is lost: try again"):
            self._restore()
            if self._size and self._max_bytes and self._size + sum(map(len, batch.lines())) > self._max_bytes:
                self._rotate()
            self._append(batch.lines())
            self._progress.save(self._at)
        return ()

    def close(self) -> None:
        self._release()
        if self._pool is not None:  # unfinished work is done after the next start
            timer = threading.Timer(CLOSE_TIMEOUT_S, self._stop)
            timer.start()
            self._pool.shutdown()
            timer.cancel()
            self._pool = None

    # --- its content

    @property
    def is_there(self) -> bool:
        return bool(self._contents())

    @property
    def kind(self) -> str:
        """The content's kind, see `content_kind`."""
        return next(filter(None, (content_kind(path) for path, _ in self._contents())), "")

    @property
    def is_complete(self) -> bool:
        """Whether all events that were written still exist: not if `max_files` removed files."""
        return bool(self._rotated.oldest == self._rotated.first)

    def read_events(self, store: EventStore) -> None:
        """Pass every event that the ack covers to `store`, in order."""
        with self._explain("read"):
            if not self._look():
                return
            if not self.is_complete:
                raise SinkError(
                    f"older files of {self.path} were removed, as max_files allows",
                    "The target can no longer be read back",
                )
            size = sum(read_lines(path, size, store) for path, size in self._contents())
            expected = self._rotated.size + self._size
            if size != expected:
                raise SinkError(
                    f"{self.path} and its rotated files have {size} bytes, but {expected} were written",
                    "Move the missing files back",
                )

    def _contents(self) -> list[tuple[Path, int | None]]:
        """The existing files, in order, and how many bytes of each count; None: all."""
        numbers = self._rotated
        found = filter(None, (find_rotated(self.path, one) for one in range(numbers.oldest, numbers.last + 1)))
        current = self._moved if self._is_moved else self.path
        return [*((path, None) for path in found), *([(current, self._size)] if current.exists() else [])]

    # --- the file

    @property
    def _size(self) -> int:
        return int(self._progress.detail.get("size", 0))

    @property
    def _rotated(self) -> Rotated:
        """Our rotated files."""
        detail: dict[str, Any] = self._progress.detail
        return Rotated(*(int(detail.get(name, 0)) for name in ("first", "oldest", "last", "bytes")))

    @property
    def _moved(self) -> Path:
        """The file's name after rotation."""
        return rotated_name(self.path, self._rotated.last + 1)

    @property
    def _is_moved(self) -> bool:
        """Whether a crash interrupted a rotation: the file is renamed, but the ack does not say so."""
        return self._size > 0 and _length(self.path) <= 0 and _length(self._moved) == self._size

    def _look(self) -> bool:
        """Whether the file is the one written before. Raises SinkError if it has changed since."""
        detail, size = self._progress.detail, _length(self.path)
        # The path may have been a folder before.
        if self._progress.position is None or "size" not in detail or detail["path"] != str(self.path):
            if size > 0:
                raise SinkError(
                    f"{self.path} exists and was not written by this pipeline",
                    "Move it away, or set another path for the adapter",
                )
            return False
        if self._is_moved:
            return True
        if size < 0:
            raise SinkError(
                f"{self.path} is missing, but events up to {self._at} were written to it",
                "Move it back, or set another path for the adapter: it receives the next events",
            )
        if size < self._size:
            raise SinkError(
                f"{self.path} has {size} bytes, but {self._size} were written",
                "Restore it, or set another path for the adapter: it receives the next events",
            )
        return True

    def _restore(self) -> None:
        """Open the file as the ack says, and cut off what a failed attempt or a crash left."""
        if self._descriptor < 0:
            if self._is_moved:
                self._note_rotation()
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
            os.ftruncate(self._descriptor, self._size)
            os.fsync(self._descriptor)
            fsync_folder(self.path.parent)
            if self._rotated.last >= self._rotated.first:
                self._pool = self._pool or ThreadPoolExecutor(1, "rotated-files")
                self._pool.submit(self._tidy, self._rotated)
        os.ftruncate(self._descriptor, self._size)
        os.lseek(self._descriptor, self._size, os.SEEK_SET)

    def _append(self, lines: Iterable[memoryview]) -> None:
        size = self._size
        for piece in lines:
            size += write_all(self._descriptor, piece)
            hit("file.half_written")
        if size != self._size:
            os.fsync(self._descriptor)
        self._progress.next_detail = {**self._progress.detail, "size": size}  # the runner saves it with the ack

    def _fitting(self, batch: Batch) -> Batch:
        """The part of a batch that fits into this file: at least one event, in a new file if needed."""
        if not self._max_bytes or not len(batch):
            return batch
        ends = np.cumsum(pc.binary_length(batch.events.column("line")).to_numpy().astype(np.int64))
        count = int(np.searchsorted(ends, self._max_bytes - self._size, side="right"))
        if count == 0 and self._size:
            self._rotate()
            count = int(np.searchsorted(ends, self._max_bytes, side="right"))
        return batch.first(max(count, 1))

    # --- rotation

    def _rotate(self) -> None:
        if (foreign := find_rotated(self.path, self._rotated.last + 1)) is not None:
            raise SinkError(f"{foreign} exists and was not written by this pipeline", "Move it away")
        os.fsync(self._descriptor)  # data that was cut off must not reappear under the new name
        self._release()
        hit("file.before_rotation")
        os.rename(self.path, self._moved)
        hit("file.renamed")
        self._restore()

    def _note_rotation(self) -> None:
        """Record in the ack that the file was renamed, once the next file exists."""
        first, oldest, last, total = self._rotated
        os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644))
        fsync_folder(self.path.parent)
        if self._max_files:
            oldest = max(oldest, last + 2 - self._max_files)
        rotated = {"first": first, "oldest": oldest, "last": last + 1, "bytes": total + self._size}
        self._progress.save(self._at, {**self._progress.detail, **rotated, "size": 0})
        hit("file.rotated")

    def _tidy(self, rotated: Rotated) -> None:
        try:
            tidy(self.path, rotated, self._compression, lambda: self._is_stopped)
        except OSError as error:  # no events are at risk: files are only larger or more than needed
            self._say(f"rotated files of {self.path} could not be compressed or removed: {error.strerror}")

    def _stop(self) -> None:
        self._is_stopped = True

    def _release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _length(path: Path) -> int:
    """The size of a file; -1 if it does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1
