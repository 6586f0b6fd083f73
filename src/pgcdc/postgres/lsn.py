"""LSNs, the positions in PostgreSQL's WAL: an int inside, text at the edges."""

from __future__ import annotations

import re

_LSN = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


def format_lsn(lsn: int) -> str:
    """An LSN as PostgreSQL writes it: `16/B374D848`."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def parse_lsn(text: str) -> int:
    """Inverse of `format_lsn`. Raises ValueError for anything else."""
    found = _LSN.fullmatch(text)
    if found is None:
        raise ValueError(f"not an LSN: {text!r}")
    return (int(found[1], 16) << 32) | int(found[2], 16)
