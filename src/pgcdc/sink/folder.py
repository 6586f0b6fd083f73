"""JSON lines in a folder of part files, exactly once. Spark's executors write large batches in parallel.

A part is first written durably to a hidden folder (`_pgcdc`), where no reader looks. Then the ack moves and names its
parts. Only then do they get their final names. After a crash at any point, the ack therefore says which parts to show;
everything else in the hidden folder is uncommitted and deleted. A file there names the folder's owner: another pipeline
would delete what this one is writing.

The names sort in stream order: the end of the batch, then the number of the part. In a batch written in parallel, all
events of a key are in one part, in order. Redelivered dead letters get a part after the existing ones: `R` and a number
that is never reused, since a reader may have moved older parts away.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from pgcdc.core.errors import SinkError, SinkUnavailable
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.state import fsync_folder, write_all, write_durably
from pgcdc.core.wording import counted
from pgcdc.event.batch import Batch, line_buffers
from pgcdc.sink.contract import ParallelSink, Progress, Receipt, SinkContext
from pgcdc.sink.file import DiskSink
from pgcdc.sink.line_files import EventStore, content_kind, read_lines

HIDDEN = "_pgcdc"  # Spark and many other readers ignore names with a leading underscore
OWNER = "owner"  # A file with the random name that is also in the owning sink's ack
_PART = re.compile(r"[0-9A-F]{16}-[0-9A-F]{13}(?:\.[0-9A-F]{8})?-R?[0-9]{5}\.jsonl")


def leave_folder(progress: Progress) -> None:
    """Finish what a folder's ack has begun, before the adapter switches to another target.

    Parts that the ack names are acknowledged, so nothing would write them again. A missing folder was deleted by the
    user.
    """
    if "parts" not in progress.detail:
        return
    folder = Path(progress.detail["path"])
    try:
        _show_parts(folder, progress.detail.get("shown", []))
        if _read_owner(folder) == progress.owner:
            (folder / HIDDEN / OWNER).unlink()
    except OSError as error:
        raise SinkError(
            f"{folder} has acknowledged parts that are not visible yet and cannot be moved into place: "
            f"{error.strerror}",
            "Make that folder writable again; the next events go to the new target",
        ) from error


def _show_parts(folder: Path, shown: Sequence[Sequence[str]]) -> list[str]:
    """Rename parts to their final names. Returns the missing ones: shown before a crash, or moved away since."""
    missing = []
    for file, name in shown:
        try:
            os.rename(folder / HIDDEN / file, folder / name)
        except (FileNotFoundError, NotADirectoryError):
            missing.append(name)
    if shown and folder.is_dir():
        fsync_folder(folder)
    return missing


def _read_owner(folder: Path) -> str | None:
    try:
        return (folder / HIDDEN / OWNER).read_text() or None  # empty after a crash: nobody owns it
    except (FileNotFoundError, NotADirectoryError):
        return None


@dataclass(frozen=True, slots=True)
class FolderPartWriter:
    """Writes one part to the hidden folder. Sent to the executors, which see the same folder."""

    folder: str

    def write_part(self, part: int, lines: Iterable[pa.RecordBatch]) -> Receipt | None:
        """Write a file with a name that no other attempt uses. It is durable on return."""
        path = Path(self.folder) / f"{part:05d}-{uuid.uuid4().hex}"
        size = 0
        try:
            with open(path, "xb", buffering=0) as file:
                for batch in lines:
                    for piece in line_buffers([batch.column("line")]):
                        size += write_all(file.fileno(), piece)
                    hit("folder.half_written")
                os.fsync(file.fileno())
            fsync_folder(path.parent)
        except OSError as error:
            raise SinkUnavailable(
                f"{path} cannot be written: {error.strerror}",
                "Check that the disk has room, and that every host of the cluster can reach the folder",
            ) from error
        if not size:
            path.unlink()
            return None
        return {"part": part, "file": path.name, "size": size}


class FolderSink(DiskSink, ParallelSink):
    """Writes every batch as one or more part files."""

    takes_executors = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._hidden = self.path / HIDDEN
        self._is_owed = False  # The ack names parts that are not shown yet
        self._again: list[str] = []  # Redelivered positions that are in the ack but not shown yet

    @property
    def is_there(self) -> bool:
        return self.path.exists()

    @property
    def kind(self) -> str:
        """The content's kind: see `content_kind`."""
        return content_kind(self.path) if self.path.exists() else ""

    @property
    def is_complete(self) -> bool:
        """Always true: nothing is ever removed."""
        return True

    def check(self, context: SinkContext) -> None:
        self.bind(context.progress)
        with self._explain():
            self._look()
            tempfile.TemporaryFile(dir=self.path if self.path.exists() else self.path.parent).close()

    def open(self, context: SinkContext) -> None:
        self.bind(context.progress)
        with self._explain():
            is_known = self._look()
            self.path.mkdir(exist_ok=True)
            self._hidden.mkdir(exist_ok=True)
            fsync_folder(self.path.parent)
            if not is_known:
                leave_folder(self._progress)
                self._progress.detail = {}  # it belongs to another target
                self._save(context.start, parts=0, size=0)
            self._claim()
            _show_parts(self.path, self._shown)
            self._is_owed = False
            self.discard_parts()

    def write(self, batch: Batch) -> None:
        self._catch_up()
        if batch.end > self._at:
            self.discard_parts()  # of a failed attempt
            receipt = self.part_writer().write_part(0, batch.events.to_batches())
            self.commit_parts(batch.start, batch.end, [receipt] if receipt else [])

    def redeliver(self, batch: Batch) -> Collection[str]:
        """Add one part, which the ack then names. The ack's position stays."""
        self._catch_up()
        positions = batch.positions().to_pylist()
        before, self._again = self._again, []
        if positions and positions == before:
            return ()
        self.discard_parts()
        receipt = self.part_writer().write_part(0, batch.events.to_batches())
        if receipt is not None:
            hit("folder.before_redelivered")
            number = self._progress.detail.get("redelivered", 0) + 1
            shown = [[receipt["file"], self._name(self._at, f"R{number:05d}")]]
            self._save(self._at, parts=1, size=int(receipt["size"]), redelivered=number, shown=shown)
            self._again = positions
            self._publish()
            self._again = []
        return ()

    def part_writer(self) -> FolderPartWriter:
        return FolderPartWriter(str(self._hidden))

    def commit_parts(self, start: Position, end: Position, receipts: Sequence[Receipt]) -> None:
        """Show exactly the parts of these receipts, and move the ack to `end`."""
        self._catch_up()
        if end <= self._at:
            return
        if start < self._at:
            raise SinkUnavailable(
                f"these parts begin at {start}, but {self.path} has everything up to {self._at}",
                "It is retried with parts that begin there",
            )
        for receipt in receipts:
            self._check_part(receipt)
        parts = sorted(receipts, key=lambda receipt: int(receipt["part"]))
        shown = [[one["file"], self._name(end, f"{one['part']:05d}")] for one in parts]
        hit("folder.before_ack")
        self._save(end, parts=len(parts), size=sum(int(one["size"]) for one in parts), shown=shown)
        self._publish()
        hit("folder.after_shown")

    def discard_parts(self) -> None:
        """Delete parts that no ack names: from a crash, a lost task, or a duplicate attempt."""
        named = {OWNER, *(file for file, _ in self._shown)}
        with self._explain(kind=SinkUnavailable):
            for path in self._hidden.iterdir():
                if path.name not in named:
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._progress.detail.get("parts") == 0:  # the folder is empty: anyone may use it
            with contextlib.suppress(OSError):
                if _read_owner(self.path) == self._progress.owner:
                    (self._hidden / OWNER).unlink()

    def read_events(self, store: EventStore) -> None:
        """Pass every event that the ack covers to `store`, in order."""
        with self._explain("read"):
            if not self._look():
                return
            parts = self._parts()
            found, known = (len(parts), sum(path.stat().st_size for path in parts)), self._progress.detail
            if found != (known["parts"], known["bytes"]):
                raise SinkError(
                    f"{self.path} has {counted(found[0], 'part')} with {found[1]} bytes, but "
                    f"{counted(known['parts'], 'part')} with {known['bytes']} bytes were written",
                    "Move the missing files back",
                )
            for path in parts:
                read_lines(path, None, store)

    def _parts(self) -> list[Path]:
        """The parts that the ack covers, in order. Renames nothing: a running pipeline would miss its files."""
        last = self._name(self._at, "")[: -len("-.jsonl")]
        names = (path.name for path in self.path.iterdir() if _PART.fullmatch(path.name))
        found = {name: self.path / name for name in names if name.rpartition("-")[0] <= last}
        for file, name in self._shown:
            if name not in found and (self._hidden / file).exists():
                found[name] = self._hidden / file
        return [found[name] for name in sorted(found)]

    # --- the folder

    @property
    def _shown(self) -> list[list[str]]:
        """The parts that the ack names: their files in the hidden folder, and their final names."""
        found: list[list[str]] = self._progress.detail.get("shown", [])
        return found

    @staticmethod
    def _name(end: Position, number: str) -> str:
        return f"{str(end).replace('/', '-')}-{number}.jsonl"

    def _look(self) -> bool:
        """Whether the folder is the one written before. Raises SinkError if it has changed since."""
        detail = self._progress.detail
        # The path may have been a file before.
        is_known = self._progress.position is not None and "parts" in detail and detail["path"] == str(self.path)
        if is_known and not self.path.is_dir():
            raise SinkError(
                f"{self.path} is missing, but events up to {self._progress.position} were written to it",
                "Move it back, or set another path for the adapter: it receives the next events",
            )
        if not is_known and self.path.exists():
            foreign = next((path.name for path in self.path.iterdir() if path.name != HIDDEN), None)
            if foreign is not None:
                raise SinkError(
                    f"{self.path} contains a file that this pipeline did not write: {foreign}",
                    "Empty the folder, or set another path for the adapter",
                )
        self._check_owner()
        return is_known

    def _check_owner(self) -> None:
        owner = _read_owner(self.path)
        if owner is not None and not (self._progress.has_owner and owner == self._progress.owner):
            raise SinkError(
                f"{self.path} belongs to another pipeline or another adapter",
                f"Set another path for the adapter; if nothing else writes there, delete {self._hidden / OWNER}",
            )

    def _claim(self) -> None:
        """Record ourselves as the folder's owner, unless another pipeline did so first."""
        owner = self._hidden / OWNER
        with contextlib.suppress(FileExistsError), open(owner, "x") as file:
            file.write(self._progress.owner)
            file.flush()
            os.fsync(file.fileno())
        if _read_owner(self.path) is None:  # a crash left it empty
            write_durably(owner, self._progress.owner.encode())
        fsync_folder(self._hidden)
        self._check_owner()

    def _publish(self) -> None:
        """Show the parts that were just saved."""
        hit("folder.before_shown")
        with self._explain(kind=SinkUnavailable):
            missing = _show_parts(self.path, self._shown)
        if missing:
            raise SinkError(
                f"part {missing[0]} of {self.path} was deleted under {self._hidden} before it was moved into "
                f"place: its events, up to {self._progress.position}, are lost there",
                "Keep other programs out of that folder, and deliver everything again: pgcdc resync --new-slot",
            )
        self._settle()

    def _settle(self) -> None:
        self._is_owed = False
        self._progress.settle()

    def _catch_up(self) -> None:
        """Show the parts that the ack on disk covers: saving the ack commits them."""
        if self._is_owed:
            with self._explain(kind=SinkUnavailable):
                _show_parts(self.path, self._shown)
            self._settle()

    def _check_part(self, receipt: Receipt) -> None:
        """Check that a part is visible from here before acknowledging it: executors may be on other hosts."""
        path = self._hidden / receipt["file"]
        with self._explain("read", SinkUnavailable):
            size = path.stat().st_size
        if size != receipt["size"]:
            raise SinkUnavailable(
                f"{path} has {size} bytes, but an executor wrote {receipt['size']}",
                "Check that every host of the cluster can reach the folder",
            )

    def _save(self, position: Position, *, parts: int, size: int, **more: Any) -> None:
        """Save the ack's new state before the parts are shown; the ack itself moves when they are."""
        before = self._progress.detail if "parts" in self._progress.detail else {}
        detail = {
            **({"redelivered": before["redelivered"]} if "redelivered" in before else {}),
            **more,
            "path": str(self.path),
            "parts": before.get("parts", 0) + parts,
            "bytes": before.get("bytes", 0) + size,
        }
        self._progress.save(position, detail, is_settled=False)
        self._is_owed = True
