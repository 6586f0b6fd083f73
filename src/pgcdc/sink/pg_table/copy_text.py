"""Rows in the text format of COPY, in large pieces."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

__all__ = ["NULL", "copy_pieces"]

NULL = "\x01"
"""What stands for NULL. Not PostgreSQL's own \\N: without a backslash, a whole piece is looked at for escapes at once."""
PIECE_ROWS = 1000

_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", NULL: f"\\{NULL}"})


def copy_pieces(rows: Iterable[Collection[str | None]], width: int) -> Iterator[bytes]:
    """The rows, each of so many values, as text for COPY ... (NULL E'\\x01')."""
    rows = iter(rows)
    while piece := list(islice(rows, PIECE_ROWS)):
        yield _write_piece(piece, width)


def _write_piece(rows: Sequence[Collection[str | None]], width: int) -> bytes:
    """Most values need no escape: so the rows are only joined, and looked at together."""
    lines: list[str] = []
    nulls = 0
    join = "\t".join
    for values in rows:
        if not nulls:
            try:
                lines.append(join(values))  # type: ignore[arg-type]
                continue
            except TypeError:  # the next row has some NULL, too, more likely than not
                pass
        texts = list(values)
        nulls += texts.count(None)
        lines.append(join([NULL if text is None else text for text in texts]))
    text = "\n".join(lines)
    is_clean = (
        text.count("\t") == len(rows) * (width - 1)
        and text.count("\n") == len(rows) - 1
        and text.count(NULL) == nulls
        and "\\" not in text
        and "\r" not in text
    )
    if not is_clean:
        text = "\n".join("\t".join([_escape(value) for value in values]) for values in rows)
    return f"{text}\n".encode()


def _escape(value: str | None) -> str:
    return NULL if value is None else value.translate(_ESCAPES)
