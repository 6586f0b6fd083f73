"""Every line that pgcdc can print reads as a colleague would say it. `python tests/said_lines.py` shows them all."""

from __future__ import annotations

import re

import pytest
from said_lines import Line, gather

LINES = gather()
ERRORS = [line for line in LINES if line.kind == "error" and not line.path.startswith("source/postgres/wire/")]

STILTED = (
    r"any more", r"\banew\b", r"\btold\b", r"\bhears? of", r"\bhear of", r"\bgo(es)? on\b", r"\bgoing on\b", r"what holds",
    r"\bthese hold\b", r"\bthat there (is|are)\b", r"\b(is|are) no values? of", r"\b(is|are) to (hold|be)\b",
    r"there is no word", r"(?<!there )\b(is|are) no (?!longer)[a-z]", r"made-up", r"\bcomes? again\b", r"\bbegins? again\b",
    r"\bbegun and\b", r"\bmade again\b", r"\bonce more\b", r"\bby now\b", r"\bso many\b", r"\btried again\b",
    r"\b(is|are) (both )?given\b", r"\bis said\b", r"\bnobody\b", r"\bas you ask\b", r"\bof before\b", r"\bthe sinks?\b",
    r"\bstands? (in|at|behind)\b", r"\b(comes?|puts?) behind\b", r"\bnot known\b", r"\bbegin with a new\b", r"\bGive --",
    r"\bGive (one|all|that)\b", r"\bLeave (it|them|--\S+|one of them) out\b", r"\bTake it away\b", r"\bdoes not go with\b",
    r"\bis wanted of\b", r"\btakes no\b", r"\bnothing (runs|goes)\b", r"\bmake room\b", r"\bin one way\b",
    r"\bit does not go\b", r"\blooks? at (?!it\b)", r"\bquick ways?\b", r"\bnot ours\b", r"\bfor machines\b",
)  # fmt: skip
"""How a colleague would not say it (docs of style: "Prose")."""

_COUNTED = re.compile(
    r"(?<!about )\{(?!counted|[A-Z_]+\}|self\._[A-Z_]+\})[^{}]*\} "
    r"(rows|events|tables|commits|dead letters|attempts|snapshots|parts|times in a row)\b(?!/s)"
)


def show(lines: list[Line]) -> str:
    return "\n".join(map(str, lines))


def test_the_list_is_whole() -> None:
    kinds = {line.kind for line in LINES}
    assert {"error", "advice", "help", "check", "say", "echo", "print", "log", "text"} <= kinds
    assert len(ERRORS) > 400 and len(LINES) > 2000


@pytest.mark.parametrize("words", STILTED)
def test_no_line_is_stilted(words: str) -> None:
    assert not (found := [line for line in LINES if re.search(words, line.text, re.IGNORECASE)]), show(found)


def test_numbers_stand_with_counted_so_that_one_row_is_no_rows() -> None:
    assert not (found := [line for line in LINES if _COUNTED.search(line.text)]), show(found)


def test_an_error_is_one_sentence_without_a_full_stop() -> None:
    """The advice follows it: `sentences` adds the stop between them."""
    wrong = [line for line in ERRORS if re.search(r"[^.][.! ]$|^ ", line.text)]
    assert not wrong, show(wrong)


def test_an_error_names_the_thing_with_its_words() -> None:
    """Two words at least beside the values, and no capital where the sentence begins."""
    plain = [(line, re.sub(r"\{[^{}]*(\{[^{}]*\}[^{}]*)*\}", "X", line.text)) for line in ERRORS]
    short = [line for line, text in plain if len(re.findall(r"[\w-]+", text)) < 2 and line.text[:1] != "{"]
    assert not short, show(short)
    first = [line for line, text in plain if re.match(r"[A-Z][a-z]+ ", text) and not text.startswith(NAMES)]
    assert not first, show(first)


NAMES = ("PostgreSQL", "Spark", "Java", "Debezium")


def test_an_advice_begins_with_a_capital_or_a_command() -> None:
    advice = [line for line in LINES if line.kind == "advice"]
    wrong = [
        line for line in advice if re.match(r"[a-z]", line.text) and not line.text.startswith(("pgcdc", "expected"))
    ]
    wrong = [line for line in wrong if " " in line.text and line.path != "spark/archive.py"]  # os.PathLike errors
    assert not wrong, show(wrong)
