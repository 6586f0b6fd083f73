"""The one page of figures: it is what its data says, and a new figure replaces an old one without losing it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bars import BARS
from bench import missing_fast_paths, prepare
from figures import Figure, Run, load, update
from report import GROUPS, render

ROOT = Path(__file__).parents[2]
FIRST, SECOND = Run("make bench", "2026-01-01", "a"), Run("make bench", "2026-02-02", "b")


def test_the_page_is_made_from_the_figures_that_are_kept() -> None:
    """Run `python benchmarks/run.py --page` after a change of bars, of the text or of the data."""
    assert (ROOT / "docs" / "benchmarks.md").read_text() == render(load())


def test_every_figure_is_in_a_group_of_the_page() -> None:
    shown = {section for sections in GROUPS.values() for section in sections}
    assert {key.partition(".")[0] for key in BARS} == shown


def test_a_new_figure_remembers_the_one_that_it_replaces_and_leaves_others_alone() -> None:
    kept = update({}, [Figure("latency.p50", 99.0), Figure("start.once", 8.0)], FIRST)
    kept = update(kept, [Figure("latency.p50", 45.0, "quicker")], SECOND)
    one = kept["latency.p50"]
    assert one["before"] == {"value": 99.0, "date": "2026-01-01", "commit": "a"}
    assert (one["value"], one["bar"], one["passed"], one["date"]) == (45, "<= 50 ms", True, "2026-02-02")
    assert kept["start.once"]["date"] == "2026-01-01"


def test_what_could_not_be_measured_replaces_no_figure() -> None:
    kept = update({}, [Figure("peers.debezium", 0.4), Figure("peers.wal2json", None, "gone")], FIRST)
    again = update(kept, [Figure("peers.debezium", None, "not installed")], SECOND)
    assert again["peers.debezium"]["value"] == 0.4 and again["peers.wal2json"]["note"] == "gone"


def test_benchmarks_refuse_to_run_without_a_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_fast_paths() == []
    monkeypatch.setenv("PGCDC_PURE_PYTHON", "1")
    monkeypatch.setenv("PGCDC_ORDINARY_SPARK", "1")
    missing = missing_fast_paths()
    assert len(missing) == 4 and "short ways" in missing[-1]
    with pytest.raises(SystemExit, match="short ways"):
        prepare()


_RATE = re.compile(r"\d[\d,.]*\s?k? ?(changes|events|commits)/s|\bp(50|95|99)\b|µs CPU|\d\.\d+x\b")
_HISTORY = ("benchmarks.md", "reliability.md")


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name
)
def test_no_other_page_has_figures_that_were_measured(page: Path) -> None:
    if page.name in _HISTORY or page.parent.name == "decisions":
        return
    assert [line for line in page.read_text().splitlines() if _RATE.search(line)] == []
