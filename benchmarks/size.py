"""How large `src/pgcdc` is: small is a feature, so it has bars, too."""

from __future__ import annotations

import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench import Bench

__all__ = ["measure_size"]

PACKAGE = Path(__file__).parent.parent / "src" / "pgcdc"
_BLANK = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER", "ENCODING")}


def measure_size(bench: Bench) -> None:
    """Lines and modules of the package."""
    texts = {
        path: path.read_text() for path in sorted(PACKAGE.rglob("*.py*")) if path.suffix in (".py", ".pyx", ".pxd")
    }
    modules = {path: text for path, text in texts.items() if text}
    lines = sum(text.count("\n") for text in modules.values())
    code = sum(code_lines(path) for path in modules)
    core = sum(text.count("\n") for path, text in modules.items() if path.is_relative_to(PACKAGE / "core"))
    bench.add("size.code", code)
    bench.add("size.all", lines)
    bench.add("size.modules", len(modules))
    bench.add("size.core", core)


def code_lines(path: Path) -> int:
    """Lines that hold more than comments and docstrings; Cython has the same tokens."""
    found: set[int] = set()
    with path.open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    begins = True
    for token, following in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
        if token.type in _BLANK:
            begins |= token.type == tokenize.NEWLINE
        elif not (token.type == tokenize.STRING and begins and following.type == tokenize.NEWLINE):
            begins = False
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found)
