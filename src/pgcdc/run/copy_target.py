"""Targets that appear under their name only when they are whole: until then they stand beside it, as NAME.partial.

What a killed run has left there is cleared by the next one; a lock tells it from one that is being written.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from pgcdc.core.errors import ConfigError, SinkError
from pgcdc.core.state import fsync_folder, write_all

__all__ = ["PartialFile", "PartialFolder", "explain_writing"]


@contextlib.contextmanager
def explain_writing(path: Path) -> Iterator[None]:
    """What the file system refuses becomes a SinkError with advice."""
    try:
        yield
    except OSError as error:
        raise SinkError(
            f"{path} cannot be written: {error.strerror or error}",
            "Is there room on the disk, and may we write there? Nothing is left there: start again",
        ) from error


class _Partial:
    """What both kinds of targets have in common."""

    _descriptor = -1

    def __init__(self, path: Path, flag: str) -> None:
        self.path = path.absolute()
        self._flag = flag
        self.partial = self.path.with_name(f"{self.path.name}.partial")
        """Where to write."""

    def _check_parent(self) -> None:
        if not self.path.name or not self.path.parent.is_dir():
            raise ConfigError(f"the folder of {self._flag} {self.path} does not exist", "Create it first")

    def _refuse(self, what: str) -> ConfigError:
        return ConfigError(f"{self._flag} {self.path} {what}", f"Move it away, or give another {self._flag}")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            self._descriptor = -1
            raise ConfigError(
                f"{self.partial} is being written by another run", "Wait for it, or choose another target"
            ) from None

    def _put_in_place(self) -> None:
        os.rename(self.partial, self.path)
        fsync_folder(self.path.parent)
        self.close()

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class PartialFile(_Partial):
    """A file, in the folder of `path`. `path` may be there only if it is empty."""

    def open(self) -> None:
        """Check the target, and begin. ConfigError if it cannot be used."""
        self._check_parent()
        self._check_target()
        with explain_writing(self.path):
            self._descriptor = os.open(self.partial, os.O_WRONLY | os.O_CREAT, 0o644)
            self._lock()
            os.ftruncate(self._descriptor, 0)

    def _check_target(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            found = self.path.stat()
            if not stat.S_ISREG(found.st_mode):
                raise self._refuse("is not a file")
            if found.st_size:
                raise self._refuse("exists and is not empty")

    def write(self, lines: memoryview) -> None:
        """Append."""
        with explain_writing(self.path):
            write_all(self._descriptor, lines)

    def finish(self) -> None:
        """All is there: make it durable, and give it its name."""
        with explain_writing(self.path):
            os.fsync(self._descriptor)
            self._check_target()
            self._put_in_place()

    def discard(self) -> None:
        """Leave nothing behind, unless it is finished."""
        if self._descriptor >= 0:
            self.partial.unlink(missing_ok=True)
            self.close()


class PartialFolder(_Partial):
    """A folder, with what others write into it. `path` may be there only if it is empty."""

    def open(self) -> None:
        """Check the target, and begin. ConfigError if it cannot be used."""
        self._check_parent()
        self._check_target()
        with explain_writing(self.path):
            self.partial.mkdir(exist_ok=True)
            self._descriptor = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY)
            self._lock()
            for left in self.partial.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()

    def _check_target(self) -> None:
        if self.path.is_dir() and any(self.path.iterdir()):
            raise self._refuse("is not empty")
        if self.path.exists() and not self.path.is_dir():
            raise self._refuse("is not a folder")

    def finish(self) -> None:
        """All is there: make it durable, and give it its name."""
        with explain_writing(self.path):
            for folder, _, files in os.walk(self.partial):
                for name in files:
                    _fsync_file(Path(folder, name))
                fsync_folder(Path(folder))
            self._check_target()
            self._put_in_place()

    def discard(self) -> None:
        """Leave nothing behind, unless it is finished."""
        if self._descriptor >= 0:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.close()


def _fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
