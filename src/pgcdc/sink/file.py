"""JSON lines in a file, exactly once.

The ack holds the position and the file's size at that position. After a crash the file is cut back to that size, so that a
half-written batch is written again from its beginning.

With a largest size the file rotates (`sink/rotation.py`): the ack first says that it does, then the file gets its number,
then the ack says that the next one has begun. A crash between is finished at the next start.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc
from pydantic import model_validator

from pgcdc.core.errors import ConfigError, SinkError, SinkUnavailable
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.settings import Bytes, PathText, setting
from pgcdc.core.state import fsync_folder, write_all
from pgcdc.event.batch import Batch
from pgcdc.sink.contract import Progress, Sink, SinkContext
from pgcdc.sink.rotation import Compression, Housekeeper, Numbers, find_rotated, highest_number, rotated_name
from pgcdc.sink.spec import SinkOptions
from pgcdc.sink.state import KeyStore, content_kind, read_lines

if TYPE_CHECKING:
    from pgcdc.sink.folder import FolderSink


class FileOptions(SinkOptions):
    """JSON lines in a file, or in part files in a folder."""

    path: PathText = setting(..., "the file; or a folder, which exists or ends with a slash", min_length=1)
    max_size: Bytes = setting(0, "a file that would grow larger is rotated: 100MB; 0: it never is", ge=0)
    max_files: int = setting(0, "how many rotated files are kept, older ones are deleted; 0: all of them", ge=0)
    compress: Compression = setting("none", "how rotated files are compressed")

    @model_validator(mode="after")
    def _check_rotation(self) -> FileOptions:
        for name, is_given in (("max_files", self.max_files > 0), ("compress", self.compress != "none")):
            if is_given and not self.max_size:
                raise ValueError(f"{name} is for files that rotate: give max_size, too")
        return self

    @property
    def full_path(self) -> Path:
        """The path, made absolute."""
        return Path(self.path).absolute()

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder, or is to be one."""
        return self.path.endswith("/") or self.full_path.is_dir()

    def make(self) -> FileSink | FolderSink:
        from pgcdc.sink.folder import FolderSink  # which imports this

        if self.is_folder:
            return FolderSink(self.full_path)
        return FileSink(self.full_path, max_bytes=self.max_size, max_files=self.max_files, compression=self.compress)

    def target(self) -> str:
        return os.path.realpath(self.full_path)

    def check(self) -> None:
        if not self.full_path.parent.is_dir():
            raise ConfigError(f"the folder of the file {self.path} does not exist", "Create it first")
        if self.is_folder and self.max_size:
            raise ConfigError(
                f"{self.path} is a folder: there is nothing to rotate in it", "Leave max_size out, or name a file"
            )


class DiskSink(Sink):
    """What a file and a folder have in common."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()

    @property
    def path(self) -> Path:
        """The file or folder."""
        return self._path

    @property
    def name(self) -> str:
        """The adapter's."""
        return self._progress.name

    def bind(self, progress: Progress) -> None:
        """Look at what was written before: comes before all that reads."""
        self._progress = progress

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
            raise kind(f"{self._path} cannot be {done}: {error.strerror or error}", advice) from error


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
        """A file rotates before it gets larger than `max_bytes` (0: never); `max_files` rotated ones are kept (0: all)."""
        super().__init__(path)
        self._descriptor = -1
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._compression = compression
        self._housekeeper: Housekeeper | None = None

    def check(self, context: SinkContext) -> None:
        self.bind(context.progress)
        with self._explain():
            self._look()
            if self._path.exists():
                os.close(os.open(self._path, os.O_WRONLY | os.O_NONBLOCK))  # a pipe without a reader must not block
            else:
                tempfile.TemporaryFile(dir=self._path.parent).close()

    def open(self, context: SinkContext) -> None:
        self.bind(context.progress)
        self._housekeeper = self._housekeeper or Housekeeper(self._path, self._compression, context.say)
        with self._explain():
            known = self._look()
            if not known:
                from pgcdc.sink.folder import leave_folder  # which imports this

                leave_folder(self._progress.detail)
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
                os.fsync(self._descriptor)
                fsync_folder(self._path.parent)
                self._progress.save(context.start, {"size": 0, "path": str(self._path)})
            self._restore()

    def write(self, batch: Batch) -> None:
        with self._explain(kind=SinkUnavailable, advice="Is the disk full? Nothing is lost: it is tried again"):
            self._restore()
            while True:
                part = self._fitting(batch)
                self._append(part.lines())
                if part.end >= batch.end:
                    return
                hit("sink.before_ack")
                self._progress.save(part.end)  # the next one goes to another file
                batch = batch.after(part.end)

    def redeliver(self, batch: Batch) -> Collection[str]:
        """Append lines of the past; they get the size of the ack, and not its position."""
        with self._explain(kind=SinkUnavailable, advice="Is the disk full? Nothing is lost: try again"):
            self._restore()
            if self._size and self._max_bytes and self._size + sum(map(len, batch.lines())) > self._max_bytes:
                self._rotate()
            self._append(batch.lines())
            self._progress.save(self._at)
        return ()

    def close(self) -> None:
        self._release()
        if self._housekeeper is not None:
            self._housekeeper.close()

    # --- what stands in it

    @property
    def is_there(self) -> bool:
        """Whether there is anything to read."""
        return bool(self._contents())

    @property
    def kind(self) -> str:
        """What stands in it, as `content_kind` says."""
        return next(filter(None, (content_kind(path) for path, _ in self._contents())), "")

    @property
    def is_complete(self) -> bool:
        """Whether everything that was written is kept: not if files were removed, as `max_files` says."""
        numbers = self._numbers
        return numbers is None or numbers.oldest == numbers.first

    def read_back(self, store: KeyStore) -> None:
        """Hand every event that the ack covers to `store`, in order."""
        with self._explain("read"):
            if not self._look():
                return
            if not self.is_complete:
                raise SinkError(
                    f"older files of {self._path} were removed, as max_files says", "It cannot be read back any more"
                )
            sizes = [read_lines(path, size, store) for path, size in self._contents()]
            expected = self._progress.detail.get("bytes", 0) + self._progress.detail["size"]
            if sum(sizes) != expected:
                raise SinkError(
                    f"{self._path} and its rotated files have {sum(sizes)} bytes, but {expected} were written to them",
                    "Move back what was moved away",
                )

    def _contents(self) -> list[tuple[Path, int | None]]:
        """The files that are there, in order, and how much of each counts; None: all."""
        found: list[tuple[Path, int | None]] = []
        detail, numbers = self._progress.detail, self._numbers
        if numbers is not None:
            for number in range(numbers.oldest, numbers.last + 1):
                if (rotated := find_rotated(self._path, number)) is not None:
                    found.append((rotated, None))
                elif number == numbers.last and "moving" in detail:
                    return [*found, (self._path, detail["moving"])]
        if self._path.exists():
            found.append((self._path, detail.get("size", 0)))
        return found

    # --- the file

    @property
    def _size(self) -> int:
        return int(self._progress.detail["size"])

    @property
    def _numbers(self) -> Numbers | None:
        """Which rotated files are ours."""
        detail = self._progress.detail
        return Numbers(detail["first"], detail["oldest"], detail["number"]) if "number" in detail else None

    def _look(self) -> bool:
        """Whether the file is the one that was written before. Raises SinkError if it is not as it was left."""
        detail = self._progress.detail
        # The same path may have been a folder before.
        known = self._progress.position is not None and "size" in detail and detail["path"] == str(self._path)
        exists = self._path.exists()
        size = self._path.stat().st_size if exists else 0
        if not known:
            if size:
                raise SinkError(
                    f"{self._path} exists and was not written by this pipeline",
                    "Move it away, or give the adapter another path",
                )
            return False
        is_moved = "moving" in detail and find_rotated(self._path, detail["number"]) is not None
        expected = detail["size"] if is_moved else detail.get("moving", detail["size"])
        if not exists and not is_moved:
            raise SinkError(
                f"{self._path} is gone, but events up to {self._at} were written to it",
                "Move it back, or give the adapter another path: the next events go there",
            )
        if size < expected:
            raise SinkError(
                f"{self._path} has {size} bytes, but {expected} were written to it",
                "Restore it, or give the adapter another path: the next events go there",
            )
        return True

    def _restore(self) -> None:
        """Have the file open and as the ack says: what a failed attempt, or a crash, has left behind that is cut off."""
        if "moving" in self._progress.detail:
            self._move()
        is_new = self._descriptor < 0
        if is_new:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._descriptor, self._size)
        os.lseek(self._descriptor, self._size, os.SEEK_SET)
        if is_new:
            os.fsync(self._descriptor)
            fsync_folder(self._path.parent)
            if self._housekeeper is not None and (numbers := self._numbers):
                self._housekeeper.ask(numbers)

    def _append(self, lines: Iterable[memoryview]) -> None:
        size = self._size
        for piece in lines:
            size += write_all(self._descriptor, piece)
            hit("file.half_written")
        if size != self._size:
            os.fsync(self._descriptor)
        self._progress.next_detail = {**self._progress.detail, "size": size}  # the runner saves it with the ack

    def _fitting(self, batch: Batch) -> Batch:
        """As much of a batch as this file takes: at least one event, and a new file for it if need be."""
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
        """Begin with the next file. The steps are written down first, so that they can be ended after a crash."""
        known = self._numbers
        number = known.last + 1 if known else highest_number(self._path) + 1
        if (foreign := find_rotated(self._path, number)) is not None:
            raise SinkError(f"{foreign} exists and was not written by this pipeline", "Move it away")
        first, oldest = (known.first, known.oldest) if known else (number, number)
        if self._max_files:
            oldest = max(oldest, number - self._max_files + 1)
        detail = self._progress.detail
        rotated = {"number": number, "first": first, "oldest": oldest, "bytes": detail.get("bytes", 0) + self._size}
        hit("file.before_rotation")
        self._progress.save(self._at, {**detail, **rotated, "size": 0, "moving": self._size})
        hit("file.rotation_noted")
        self._restore()

    def _move(self) -> None:
        """End a rotation that the ack has noted."""
        self._release()
        detail = dict(self._progress.detail)
        if find_rotated(self._path, detail["number"]) is None:
            os.truncate(self._path, detail["moving"])
            os.rename(self._path, rotated_name(self._path, detail["number"]))
        hit("file.renamed")
        os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644))  # before the ack says that it is there
        fsync_folder(self._path.parent)
        del detail["moving"]
        self._progress.save(self._at, detail)
        hit("file.rotated")

    # --- all of it

    def _release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
