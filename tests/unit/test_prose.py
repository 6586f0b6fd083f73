"""The pages read as somebody would say them: none of these words, and short sentences where people begin."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])
PAGES = [page for page in PAGES if page.parent.name != "decisions"]  # records: they stay as they were written
FIRST_PAGES = [page for page in PAGES if page.parent.name in ("start", "tasks")]
MOST_WORDS = 18

STILTED = (
    r"\bany more\b",
    r"\banew\b",
    r"\b(is|are|was|were|be|been) told\b(?! apart)",
    r"\bhears? of\b",
    r"\b(go|goes|went|going) on\b",
    r"\bwhat holds\b",
    r"\bthat there (is|are)\b",
    r"\b(that|which|who) (is|are|was|were) there\b",
    r"\bno word of\b",
    r"\btaken for\b",
    r"\bbecomes? of\b",
    r"\b(is|are|was|be) said\b",
    r"\bis heeded|\bheeds?\b",
    r"\bsees? to it\b",
    r"\b(that|which) (is|are) none\b",
    r"\bfor ever\b",
    r"\b(has|have) not\.",
    r"\bnot lose out\b",
    r"\bbears? to\b",
    r"\bsays so\b",
    r"\bwould go over\b",
    r"\bknows? nothing of\b",
    r"\bmakes? it known\b",
)

_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_MADE = re.compile(r"<!-- settings: made.*?<!-- end of settings -->", re.DOTALL)
_MADE_PAGE = "<!-- made by tools/"


def prose_of(page: Path) -> str:
    """Without code, and without what is made from the code: its words are checked there."""
    text = page.read_text()
    if _MADE_PAGE in text or page.name == "benchmarks.md":
        return ""
    return re.sub(r"`[^`\n]*`", "`x`", _MADE.sub("", _FENCE.sub("", text)))


def sentences_of(page: Path) -> list[str]:
    """Sentences of paragraphs and lists; tables and headings have none."""
    lines = [line.strip() for line in prose_of(page).splitlines()]
    kept = ["" if line.startswith(("|", "#", "!", "<!--")) else line for line in lines]
    text = "\n".join(re.sub(r"^(-|\d+\.) ", "\n", line) for line in kept)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    parts = [
        part for block in re.split(r"\n\s*\n", text) for part in re.split(r"(?<=[.:!?])\s+", " ".join(block.split()))
    ]
    return [part for part in parts if part]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_stilted_words(page: Path) -> None:
    text = " ".join(prose_of(page).split())
    found = [text[max(0, hit.start() - 40) : hit.end() + 20] for one in STILTED for hit in re.finditer(one, text, re.I)]
    assert found == []


IN_CODE = (r"\bafresh\b", r"\b(by (itself|themselves))\b", r"\black(s|ed)?\b", r"\bwhom\b", r"\bis no number\b")


def explained_in(module: Path) -> Iterator[str]:
    """The docstrings and comments of a module."""
    for one in ast.walk(ast.parse(module.read_bytes())):
        if isinstance(one, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(one) or ""
    with module.open("rb") as file:
        yield from (one.string for one in tokenize.tokenize(file.readline) if one.type == tokenize.COMMENT)


def test_no_stilted_words_in_docstrings_and_comments() -> None:
    found, count = [], 0
    for module in sorted((ROOT / "src" / "pgcdc").rglob("*.py")):
        for text in explained_in(module):
            count += bool(text)
            found += [
                (module.name, text) for one in (*STILTED, *IN_CODE) if re.search(one, " ".join(text.split()), re.I)
            ]
    assert found == [] and count > 3000


@pytest.mark.parametrize("page", FIRST_PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_sentences_are_short(page: Path) -> None:
    counts = [len(sentence.split()) for sentence in sentences_of(page)]
    assert counts and sum(counts) / len(counts) <= MOST_WORDS
    longest = max(sentences_of(page), key=lambda one: len(one.split()))
    assert len(longest.split()) <= 2 * MOST_WORDS, longest


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_words_of_the_list_are_found() -> None:
    """A list that finds nothing would prove nothing."""
    text = "Rows that are there are read anew; nobody is told, and it goes on. It has not."
    assert len([one for one in STILTED if re.search(one, text, re.I)]) == 5
