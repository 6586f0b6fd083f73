"""The state directory: which source it belongs to, which processes hold it, and files that survive a crash.

identity.json     the server and slot this directory belongs to, and the format of its files
identity.lock     held while a process changes the identity or our publications
run.lock          held by `pgcdc listen`; contains its pid and control socket
capture.lock      held by the capture process; contains its pid and control socket
capture.json      the last status of a capture that has ended
run.json          the driver's status, written when its phase changes
consumers.json    where every consumer is, and what was confirmed
lanes.json        which adapter is in which lane
targets.json      by adapter: a digest of the target, and the columns that transforms have changed there
shapes.jsonl      the shapes of every table, each with the position where it starts
spool/            segments and index
snapshot/         released rows of snapshots, requests to incremental snapshots (requests.json), and what only some
                  adapters receive (audience.jsonl)
acks/             one file per sink
checkpoints/      Spark's, one folder per lane, each with the ends of its batches (`ends/`)
toast/            the cache of --toast cache
dead_letters.jsonl  events that targets refused
verify.json       an unfinished `pgcdc verify`; verify/ has keys that differ, verify_last.json the last result
resync.json       an unfinished `pgcdc resync`; resync/ has its keys
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from pgcdc.core.errors import StateError

LOG_BYTES = 10 << 20
FORMAT = 4  # Of the state directory. Increase it when one version of pgcdc could misread the state of another
_OF_THE_SLOT = ("spool", "checkpoints", "consumers.json", "shapes.jsonl", "toast", "typed", "snapshot", "capture.json",
                "run.json", "lanes.json", "verify.json", "verify", "verify_last.json")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Identity:
    """The source that a state directory belongs to. Using it with another source would skip changes."""

    kind: str  # The name of the source (`source.protocol.find_source`)
    system: str  # The server or cluster, by something that does not change with its address
    database: str
    stream: str  # Our place in it, such as the name of the slot
    instance: str  # A random name of this pipeline, to recognise its own connections after a crash
    created: int  # The commit where the stream began; 0 while it is being created
    details: dict[str, Any] = field(default_factory=dict)  # What else must not change. Only the source reads it

    @property
    def key(self) -> str:
        """Identifies the pipeline's source, even if the database has moved."""
        return f"{self.kind}/{self.stream}"

    @property
    def title(self) -> str:
        """The name of the source, for people."""
        return f"{'slot ' if self.kind == 'postgres' else ''}{self.stream} of database {self.database}"


class StateDir:
    """The paths and the identity of one state directory."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.spool = self.path / "spool"
        self.acks = self.path / "acks"
        self.checkpoints = self.path / "checkpoints"
        self.consumers_file = self.path / "consumers.json"
        self.lanes_file = self.path / "lanes.json"
        self.targets_file = self.path / "targets.json"
        self.shapes_file = self.path / "shapes.jsonl"
        self.toast = self.path / "toast"
        self.snapshot = self.path / "snapshot"
        self.requests_file = self.snapshot / "requests.json"
        self.snapshot_keys = self.snapshot / "keys"
        self.audience_file = self.snapshot / "audience.jsonl"
        self.letters_file = self.path / "dead_letters.jsonl"
        self.resync = self.path / "resync"
        self.resync_note = self.path / "resync.json"
        self.capture_status = self.path / "capture.json"
        self.run_status = self.path / "run.json"
        self.capture_lock = self.path / "capture.lock"
        self.run_lock = self.path / "run.lock"
        self.identity_file = self.path / "identity.json"
        self.identity_lock = self.path / "identity.lock"

    def create(self) -> list[Path]:
        """Create the directory and its missing parents, readable only by the owner. Returns the folders it created.
        Raises StateError on failure."""
        try:
            made = _make_folders(self.path)
            for folder in (self.spool, self.acks, self.checkpoints):
                folder.mkdir(exist_ok=True)
            probe = self.path / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            reason = error.strerror or str(error)
            raise StateError(
                f"the state directory {self.path} is not writable: {reason}",
                "Choose another directory with --state-dir, or change its owner or permissions",
            ) from error
        return made

    @contextlib.contextmanager
    def claim(self, lock: Lock, timeout_s: float) -> Iterator[bool]:
        """Create the directory if needed and take one of its locks; False if another process holds it. The caller
        releases the lock.

        If the block raises and the directory was created here and still has no identity, it is removed while the lock
        is held.
        """
        for left in reversed(range(10)):
            try:
                made = self.create()
                taken = lock.acquire(timeout_s) is not None
                break
            except (FileNotFoundError, StateError) as error:  # another process that failed to start may have removed it
                gone = isinstance(error, FileNotFoundError) or isinstance(error.__cause__, FileNotFoundError)
                if not gone or not left:
                    raise
        try:
            yield taken
        except BaseException:
            if self.path in made and taken and not self.identity_file.exists():  # otherwise another process uses it
                shutil.rmtree(self.path, ignore_errors=True)
                with contextlib.suppress(OSError):  # folders that are not empty are in use
                    for folder in made[-2::-1]:
                        folder.rmdir()
            raise

    def identity(self) -> Identity | None:
        """The identity of the directory; None if it is new."""
        raw = read_json(self.identity_file)
        if raw is None:
            return None
        found = raw.pop("format", 1)
        if found != FORMAT:
            raise StateError(
                f"the state directory {self.path} has format {found}, but this version of pgcdc reads format {FORMAT}",
                "Use the version of pgcdc that wrote it, or start with a new --state-dir and a new --slot-name",
            )
        return Identity(**raw)

    def forget_slot(self) -> None:
        """Remove the state that belongs to the old slot. Locks, logs and acks stay."""
        for name in _OF_THE_SLOT:
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def check_whole(self) -> None:
        """Raise StateError after an interrupted `pgcdc resync`, when half of the state belongs to a slot that no longer
        exists."""
        if self.resync_note.exists():
            raise StateError(
                f"a resync of {self.path} is unfinished",
                f"Run it again; it resumes where it stopped: pgcdc resync --state-dir {self.path}",
            )

    def save_identity(self, identity: Identity) -> None:
        """Record the directory's identity durably."""
        write_json_durably(self.identity_file, {"format": FORMAT, **asdict(identity)})


def _make_folders(path: Path) -> list[Path]:
    made = []
    for folder in reversed([path, *path.parents]):
        if not folder.is_dir():
            with contextlib.suppress(FileExistsError):  # another process was faster
                folder.mkdir(mode=0o700 if folder == path else 0o777)
                made.append(folder)
    return made


class Lock:
    """An advisory lock on a file. The kernel releases it when its process dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self.previous: dict[str, Any] = {}  # What the last holder wrote, if it was killed; set when the lock is taken

    def acquire(self, timeout_s: float = 0.2) -> dict[str, Any] | None:
        """Take the lock; None if another process holds it, otherwise what a killed last holder wrote.

        The timeout is not 0 because `holder` briefly takes the lock to see whether it is free.
        """
        deadline = time.monotonic() + timeout_s
        while (file := self._try()) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        self._file = file
        file.seek(0)
        try:
            self.previous = json.loads(file.read() or "{}")
        except ValueError:
            self.previous = {}
        return self.previous

    def _try(self) -> IO[str] | None:
        file = open(self._path, "a+")  # noqa: SIM115 - open as long as the lock is held
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(self._path, file.fileno()):  # otherwise removed with a directory that failed to start
                return file
        except BlockingIOError:
            pass
        file.close()
        return None

    def write(self, content: dict[str, Any]) -> None:
        """Write the holder's details into the file."""
        assert self._file is not None
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps(content))
        self._file.flush()

    def release(self) -> None:
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None

    @staticmethod
    def holder(path: Path) -> dict[str, Any] | None:
        """The details that the holder wrote; None if nobody holds the lock."""
        try:
            with open(path) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    text = file.read()
                    with contextlib.suppress(ValueError):  # half-written: the holder is just starting
                        return json.loads(text) if text else {}
                    return {}
        except FileNotFoundError:
            pass
        return None


def is_at(path: Path, descriptor: int) -> bool:
    """Whether this path still names the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def open_log(path: Path) -> IO[bytes]:
    """Open a log file for appending. A large one is renamed to `.1` first."""
    if path.exists() and path.stat().st_size > LOG_BYTES:
        os.replace(path, path.with_name(f"{path.name}.1"))
    return open(path, "ab")


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if it does not exist. Raises StateError if it is damaged."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StateError(f"{path} is damaged", "Restore it from a backup, or start with a new --state-dir") from error


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file atomically. The new content may be lost if the machine crashes."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with explain_writing(path):
        temporary.write_text(json.dumps(content))
        os.replace(temporary, path)


def write_json_durably(path: Path, content: Any) -> None:
    """Replace a JSON file atomically. On return it survives a crash of the machine."""
    write_durably(path, json.dumps(content).encode())


def write_durably(path: Path, content: bytes, like: os.stat_result | None = None) -> None:
    """Replace a file atomically. On return it survives a crash of the machine. `like`: use the mode of that file and,
    if permitted, its owner."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with explain_writing(path):
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, 0o600 if like else 0o666)) as file:
            if like is not None:
                with contextlib.suppress(PermissionError):
                    os.fchown(file.fileno(), like.st_uid, like.st_gid)
                os.fchmod(file.fileno(), like.st_mode & 0o777)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)


@contextlib.contextmanager
def explain_writing(path: Path) -> Iterator[None]:
    """Turn an OSError while writing a file into a StateError."""
    try:
        yield
    except OSError as error:
        raise StateError(
            f"{path} cannot be written: {error.strerror}",
            "Is the disk of the state directory full? Nothing is lost: free some space and start again",
        ) from error


def write_all(descriptor: int, data: memoryview) -> int:
    """Write all of `data`, in as many writes as needed. Returns the number of bytes."""
    total = len(data)
    while data:
        data = data[os.write(descriptor, data) :]
    return total


def fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- append-only files of JSON lines, each with a checksum: a line half-written by a crash is ignored


def encode_line(record: dict[str, Any]) -> bytes:
    """Encode a record as one line with a checksum."""
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def decode_lines(data: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    """The valid lines at the start of `data`, each with its size in bytes."""
    for line in data.splitlines(keepends=True):
        crc, _, text = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or crc != b"%08x" % zlib.crc32(text):
            return
        yield json.loads(text), len(line)


def append_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Append records. On return they survive a crash of the machine."""
    with explain_writing(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            write_all(descriptor, memoryview(b"".join(map(encode_line, records))))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        fsync_folder(path.parent)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read all records and cut off a half-written last line. Only for the file's writer."""
    if not path.exists():
        return []
    found = list(decode_lines(path.read_bytes()))
    os.truncate(path, sum(size for _, size in found))
    return [record for record, _ in found]
