"""An archive of the classes that Spark loads (AppCDS).

The JVM maps the archive instead of reading ten thousand classes out of jars, which takes a third of the time to the
first event. The first run creates it in the background (`run/warm.py`). An archive fits one Java and one class path. If
anything is wrong with it, Spark starts without it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgcdc.core.errors import PgcdcError
from pgcdc.core.log import say
from pgcdc.core.state import Lock, write_json

KEPT = 2  # Archives, of 160 MB each: two installations may alternate
SWITCH = "PGCDC_CLASS_ARCHIVE"
"""An environment variable: `off`, or the folder to use."""
RETRY_S = 86_400.0  # Creating one costs half a minute of CPU, so a failure is not retried at every start
PROC = Path("/proc")


def folders() -> Iterator[Path]:
    """Where to keep files that speed up a start, best first: the cache folder, and a temporary folder of this user.

    Nobody else may write there, because the JVM runs what it finds.
    """
    said, cache = os.environ.get(SWITCH) or "off", os.environ.get("XDG_CACHE_HOME")
    found = [Path(tempfile.gettempdir()).resolve() / f"pgcdc-spark-{os.getuid()}"]
    with contextlib.suppress(RuntimeError):  # the user has no home
        chosen = Path(said) if said != "off" else (Path(cache) if cache else Path.home() / ".cache") / "pgcdc"
        found.insert(0, chosen.resolve())
    for folder in found:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not is_safe(folder):
                say_once(f"class archive {folder} is not used: other users may write there. Change its owner or mode")
            elif os.access(folder, os.W_OK) or any(folder.glob("classes-*.jsa")):
                yield folder
            else:
                raise PermissionError(errno.EACCES, "it is not writable")
        except OSError as error:
            if said != "off":
                say_once(f"class archive {folder} is not used: {error.strerror}")


def is_safe(path: Path) -> bool:
    """Whether only root and this user may write to a path."""
    found = path.lstat()
    return found.st_uid in (0, os.getuid()) and not found.st_mode & 0o022


@functools.cache
def say_once(text: str) -> None:
    say(text)


@dataclass(frozen=True, slots=True)
class ClassArchive:
    """The archive for one Java and one class path, with a note next to it.

    The note holds the archive's size and time, `null` if this Java cannot create archives, or why the last attempt
    failed.
    """

    file: Path

    @classmethod
    def of(cls, java: str, jars: Path) -> ClassArchive | None:
        """`java`: the text of its version. Returns None if archives are switched off or there is no place for one."""
        if os.environ.get(SWITCH) == "off":
            return None
        # Whole seconds: copies of an installation often keep no more
        try:
            stats = [(one.name, one.stat()) for one in sorted(jars.glob("*.jar"))]
        except OSError:  # a jar is being replaced, or a link points nowhere
            return None
        found = [(name, one.st_size, int(one.st_mtime)) for name, one in stats]
        name = f"classes-{zlib.crc32(repr((java, str(jars), found)).encode()):08x}.jsa"
        places = (cls(folder / name) for folder in folders())
        return next((one for one in places if one.is_whole or os.access(one.file.parent, os.W_OK)), None)

    @property
    def _note_file(self) -> Path:
        return self.file.with_suffix(".json")

    def _note(self) -> Any:
        """The content of the note; False if it cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads(self._note_file.read_text())
        return False

    @property
    def is_whole(self) -> bool:
        with contextlib.suppress(OSError):
            stat = self.file.stat()
            return is_safe(self.file) and self._note() == [stat.st_size, int(stat.st_mtime)]
        return False

    @property
    def is_wanted(self) -> bool:
        """Whether to create it: there is none, this Java can, and no attempt failed in the last day."""
        note = self._note()
        failed_at = note.get("at", 0.0) if isinstance(note, dict) else 0.0
        return note is not None and not self.is_whole and not 0 <= time.time() - failed_at < RETRY_S

    def give_up(self) -> None:
        """Record that this Java cannot create archives: do not try again."""
        write_json(self._note_file, None)

    @property
    def lock_file(self) -> Path:
        """Locked while an archive is being made in this folder."""
        return self.file.parent / "classes.lock"

    def begin(self) -> None:
        """Record an attempt in case it is killed: otherwise every start would repeat it. Call it under the lock."""
        self.fail("the process that made it was killed")

    def fail(self, reason: str, at: float | None = None) -> None:
        """Remove the archive and try again a day after `at`, or after now."""
        self.remove()
        with contextlib.suppress(PgcdcError):
            write_json(self._note_file, {"failed": reason, "at": at or time.time(), "is_said": at is not None})

    def failure(self) -> str | None:
        """Why the last attempt failed; returned only once."""
        note = self._note()
        if not isinstance(note, dict) or note.get("is_said", True) or Lock.holder(self.lock_file) is not None:
            return None
        with contextlib.suppress(PgcdcError):
            write_json(self._note_file, note | {"is_said": True})
        return str(note["failed"])

    def options(self, say: Callable[[str], None]) -> str:
        """Options for the JVM; empty if there is no archive yet."""
        if self.is_whole:
            return f' "-XX:SharedArchiveFile={self.file}" -Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off'
        if os.path.exists(self.file):
            say(f"the class archive {self.file} has changed: Spark starts without it, and it is created again")
            self.remove()
        return ""

    def check_used(self, jvm: int, say: Callable[[str], None]) -> None:
        """Remove the archive if this JVM was started with it but did not map it; only Linux shows that.

        The cause may be an option of this JVM, so it is recreated at most once a day.
        """
        with contextlib.suppress(OSError):
            asked, maps = (Path(PROC, str(jvm), one).read_text(errors="replace") for one in ("cmdline", "maps"))
            if self.file.name in asked and self.file.name not in maps:
                say(f"Java refused the class archive {self.file}: it is created again, at most once a day")
                self.fail("Java refused it", self.file.stat().st_mtime)

    def take(self, made: Path) -> None:
        """Move a new archive into place and delete old ones. The note is written last: an archive without one is
        recreated."""
        stat = made.stat()
        os.replace(made, self.file)
        write_json(self._note_file, [stat.st_size, int(stat.st_mtime)])
        others = sorted(self.file.parent.glob("classes-*.jsa"), key=lambda one: one.stat().st_mtime, reverse=True)
        for one in others[KEPT:]:
            ClassArchive(one).remove()

    def remove(self) -> None:
        for one in (self.file, self._note_file):
            with contextlib.suppress(OSError):
                one.unlink()
