"""The playground's live view: a function of what was measured, on a terminal of any size."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console
from unit.test_meter import COMMIT_S, as_batch, make_event, played

from pgcdc.playground.view import Meter, draw_screen, open_view, sparkline

NOW_S = COMMIT_S + 1.0


def draw(meter: Meter, width: int = 100, height: int = 40) -> str:
    console = Console(record=True, width=width, height=height, file=io.StringIO(), color_system=None)
    console.print(draw_screen(meter, NOW_S, 30, width, height))
    return console.export_text()


def test_the_screen_shows_rates_latency_tables_and_the_newest_events() -> None:
    shown = draw(played())
    for text in ("● streaming", "of 0:30", "events/s", "p50 80 ms", "billing.invoices", "41 events in 41 commits"):
        assert text in shown
    assert shown.rstrip().splitlines()[-2].startswith("│ INSERT orders: id=41 ")


@pytest.mark.parametrize(("width", "height"), [(200, 60), (100, 40), (80, 24), (60, 12), (40, 8)])
def test_every_size_is_filled_and_never_exceeded(width: int, height: int) -> None:
    lines = draw(played(), width, height).splitlines()
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width


def test_a_sparkline_shows_everything_but_zero() -> None:
    assert sparkline([0, 1, 1000, 500], 6) == "   ▁█▄"
    assert sparkline([1, 2, 3], 2) == "▅█"
    assert sparkline([], 3) == "   "


def test_without_a_terminal_lines_are_printed_now_and_then() -> None:
    out = io.StringIO()
    meter = Meter()
    meter.add(as_batch(make_event(1)), COMMIT_S)
    with open_view(meter, 30, Console(file=out, width=60)) as show:
        for second in range(8):
            show(COMMIT_S + second)
    assert [line[:25] for line in out.getvalue().splitlines()] == [
        "0:00  1 event in 1 commit",
        "0:05  1 event in 1 commit",
    ]


def test_on_a_terminal_the_whole_screen_is_drawn() -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

    out = Terminal()
    with open_view(played(), 30, Console(file=out, width=90, height=30, force_terminal=True)) as show:
        show(NOW_S)
    assert "commit to file" in out.getvalue() and "last events" in out.getvalue()
