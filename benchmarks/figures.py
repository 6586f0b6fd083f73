"""Figures, and the file that keeps them: docs/benchmarks.json. The page is made from it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bars import BARS

__all__ = ["ROOT", "Figure", "Run", "load", "save", "update", "verdict"]

ROOT = Path(__file__).parent.parent
DATA = ROOT / "docs" / "benchmarks.json"


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured; None if that is not possible here, and the note says why."""

    key: str
    value: float | None
    note: str = ""

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]

    @property
    def shown(self) -> str:
        return "skipped" if self.value is None else BARS[self.key].show(self.value)

    @property
    def is_met(self) -> bool | None:
        return None if self.value is None else BARS[self.key].is_met(self.value)


def verdict(is_met: bool | None) -> str:
    return {None: "", True: "pass", False: "MISS"}[is_met]


@dataclass(frozen=True, slots=True)
class Run:
    """Where figures come from."""

    command: str
    date: str
    commit: str

    @classmethod
    def now(cls, command: str) -> Run:
        asked = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
        commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
        return cls(command, f"{datetime.now(UTC):%Y-%m-%d}", commit)


def load(path: Path = DATA) -> dict[str, Any]:
    """Everything that is kept: `figures` and `quick` by key, `machine`."""
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return {"figures": {}, "quick": {}, "machine": {}, **kept}


def update(kept: dict[str, Any], new: Iterable[Figure], run: Run) -> dict[str, Any]:
    """The records with new figures; each remembers the value that it replaces. What could not be measured replaces none."""
    records = dict(kept)
    for figure in new:
        old = records.get(figure.key)
        if figure.value is None and old is not None:
            continue
        bar = BARS[figure.key]
        before = {name: old[name] for name in ("value", "date", "commit")} if old and old["value"] is not None else None
        records[figure.key] = {
            "section": figure.section, "name": bar.name, "bar": bar.text, "unit": bar.unit,
            "value": None if figure.value is None else round(figure.value, 4),
            "passed": figure.is_met, "note": figure.note, "date": run.date, "commit": run.commit, "command": run.command,
            "before": before,
        }  # fmt: skip
    return {key: records[key] for key in BARS if key in records}


def save(data: dict[str, Any], path: Path = DATA) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
