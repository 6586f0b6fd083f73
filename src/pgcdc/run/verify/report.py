"""The results of a comparison, and where they are kept: in `verify.json` while it continues, then in
`verify_last.json`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pgcdc.core.state import StateDir, fsync_folder, read_json, write_json
from pgcdc.run.verify.hashing import Key
from pgcdc.run.verify.settling import WRONG, Verdict

RESUMED_S = 6 * 3600.0
EQUAL, DIFFERENT, INCOMPLETE = 0, 1, 3  # Exit codes; 2 and others are errors


@dataclass
class TableResult:
    """One table at one adapter."""

    adapter: str
    table: str
    method: str = ""  # ranges, buckets, reading; and whether rows were counted because there is no key
    rows: int = 0  # At the source
    ranges: int = 0
    missing: int = 0
    extra: int = 0
    different: int = 0
    unsettled: int = 0  # Keys that changed at every look
    repaired: int = 0
    keys: dict[str, list[list[str]]] = field(default_factory=dict)  # The first keys of each verdict
    dead_letters: int = 0  # Waiting letters of this table and adapter
    explained: int = 0  # Rows that differ and have a waiting dead letter
    notes: list[str] = field(default_factory=list)
    reason: str = ""  # Why it was not compared
    after: list[str] | None = None  # The last key that was compared, to resume from
    file_bytes: int = 0  # How many bytes of its key file count
    is_done: bool = False

    @property
    def wrong(self) -> int:
        return self.missing + self.extra + self.different

    @property
    def equal(self) -> int:
        return max(0, self.rows - self.missing - self.different - self.unsettled)

    @property
    def outcome(self) -> str:
        if self.reason:
            return "not compared"
        return "different" if self.wrong else "unsettled" if self.unsettled else "equal"

    def add(self, key: Key, verdict: Verdict, keys: int) -> None:
        setattr(self, verdict, getattr(self, verdict) + 1)
        shown = self.keys.setdefault(verdict, [])
        if len(shown) < keys:
            shown.append(list(key))

    def to_json(self) -> dict[str, Any]:
        hidden = ("after", "file_bytes", "is_done")
        shown = {name: value for name, value in asdict(self).items() if name not in hidden}
        return {**shown, "equal": self.equal, "outcome": self.outcome}


@dataclass
class Report:
    position: str  # Everything up to here was compared
    tables: list[TableResult]
    left_out: list[str]
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        outcomes = {one.outcome for one in self.tables}
        return DIFFERENT if "different" in outcomes else INCOMPLETE if outcomes - {"equal"} else EQUAL

    @property
    def verdict(self) -> str:
        return {EQUAL: "equal", DIFFERENT: "different", INCOMPLETE: "incomplete"}[self.exit_code]

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "position": self.position,
            "seconds": round(self.seconds, 3),
            "tables": [one.to_json() for one in self.tables],
            "left_out": self.left_out,
        }

    def summary(self) -> dict[str, Any]:
        """The last result, for `pgcdc status`."""
        adapters: dict[str, dict[str, int]] = {}
        for one in self.tables:
            counts = adapters.setdefault(one.adapter, dict.fromkeys(("equal", *WRONG, "unsettled", "not_compared"), 0))
            for name in ("equal", *WRONG, "unsettled"):
                counts[name] += getattr(one, name)
            counts["not_compared"] += bool(one.reason)
        return {"time": time.time(), "verdict": self.verdict, "position": self.position, "adapters": adapters}


def describe_last(state: StateDir) -> str | None:
    """One line on the last comparison; None if there was none."""
    last = read_json(last_file(state))
    if last is None:
        return None
    parts = []
    for name, counts in last["adapters"].items():
        found = [f"{counts[one]:,} {one.replace('_', ' ')}" for one in counts if counts[one] and one != "equal"]
        parts.append(f"{name} {', '.join(found) or 'equal'}")
    minutes = (time.time() - last["time"]) / 60
    return f"{last['verdict']} at {last['position']}, {minutes:,.0f} min ago: {'; '.join(parts)}"


def last_file(state: StateDir) -> Path:
    return state.path / "verify_last.json"


class Notebook:
    """The results so far, so that an interrupted comparison can resume. The keys that differ are in separate files."""

    def __init__(self, state: StateDir, digest: str, *, resume: bool) -> None:
        self._file, self._folder, self._digest = state.path / "verify.json", state.path / "verify", digest
        raw = read_json(self._file) if resume else None
        if raw is None or raw["digest"] != digest or raw["time"] < time.time() - RESUMED_S:
            raw = {"results": {}, "position": ""}
        self.results = {name: TableResult(**one) for name, one in raw["results"].items()}
        self.position: str = raw["position"]
        self.is_resumed = bool(self.results)
        if not self.is_resumed:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(exist_ok=True)

    def save(self) -> None:
        results = {name: asdict(one) for name, one in self.results.items()}
        content = {"digest": self._digest, "time": time.time(), "position": self.position, "results": results}
        write_json(self._file, content)

    def close(self) -> None:
        """The comparison is finished: nothing is left to resume."""
        self._file.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{list(self.results).index(name)}.jsonl"

    def begin(self, name: str) -> None:
        """Forget keys of an attempt that was interrupted before they counted."""
        with open(self._path(name), "ab") as file:
            file.truncate(self.results[name].file_bytes)

    def add_keys(self, name: str, keys: list[Key]) -> None:
        with open(self._path(name), "ab") as file:
            file.write(b"".join(json.dumps(list(key)).encode() + b"\n" for key in keys))
            file.flush()
            self.results[name].file_bytes = file.tell()

    def keys(self, name: str) -> Iterator[Key]:
        with contextlib.suppress(FileNotFoundError), open(self._path(name), "rb") as file:
            for line in file:
                yield tuple(json.loads(line))

    def copy_keys(self, name: str, target: Path) -> None:
        """Make a durable copy for the repair."""
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.partial")
        with open(partial, "wb") as file:
            file.writelines(json.dumps(list(key)).encode() + b"\n" for key in self.keys(name))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
        fsync_folder(target.parent)
