"""The binary form of values, as pgoutput sends it with the option `binary`, and back to PostgreSQL's text."""

from __future__ import annotations

from pgcdc.source.postgres.wire.binary.decoder import BinaryDecoder, Unsupported, rewrite_row, to_text, unsupported

__all__ = [
    "BinaryDecoder",
    "Unsupported",
    "rewrite_row",
    "to_text",
    "unsupported",
]
