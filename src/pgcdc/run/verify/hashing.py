"""Checksums of rows, computed by the servers, or here from texts.

Values count as the texts that their type's output function writes, NULL differs from an empty text, and no two
different rows give the same input. Sums do not depend on order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import psycopg

from pgcdc.postgres.database import Connection

WRAP = 1 << 64
PROBE = 'a,"b"\\ ä€🐘'

Key = tuple[str, ...]
"""The texts of a row's key; for a table without a key, the hash of the row."""


class Seen(NamedTuple):
    """What a side has under one key."""

    rows: int
    total: int  # The sum of its rows' hashes
    mark: str = ""  # For the source: changes with every write, even of the same values

    @property
    def content(self) -> tuple[int, int]:
        return self.rows, self.total


def note(found: dict[Key, Seen], key: Key, hashed: int, mark: str = "") -> None:
    """Add one row under its key."""
    before = found.get(key)
    if before is None:
        found[key] = Seen(1, hashed % WRAP, mark)
    else:
        found[key] = Seen(before.rows + 1, (before.total + hashed) % WRAP, max(before.mark, mark))


class Sums:
    """How many rows are in each bucket of keys, and the sum of their hashes. Its size does not depend on the number of
    rows."""

    def __init__(self, buckets: int) -> None:
        self.rows, self.totals = [0] * buckets, [0] * buckets

    def add(self, bucket: int, rows: int, total: int) -> None:
        self.rows[bucket] += rows
        self.totals[bucket] = (self.totals[bucket] + total) % WRAP

    def differing(self, other: Sums) -> list[int]:
        mine, theirs = (zip(one.rows, one.totals, strict=True) for one in (self, other))
        return [bucket for bucket, (one, two) in enumerate(zip(mine, theirs, strict=True)) if one != two]


# --- computed here


def hash_values(values: Iterable[bytes | None]) -> int:
    """A 64-bit hash of the values of a row."""
    text = b"".join(b"-" if one is None else b"%d:%b" % (len(one), one) for one in values)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


# --- computed by a server


def hash_sql(columns: Sequence[str], *, is_md5: bool) -> str:
    """The hash of these columns as int8. ROW writes values with their output functions, quoted, and NULL as nothing."""
    return _hash_text(f"ROW({', '.join(columns)})::text", is_md5=is_md5)


def _hash_text(text: str, *, is_md5: bool) -> str:
    if is_md5:
        return f"('x' || substr(md5(convert_to({text}, 'UTF8')), 1, 16))::bit(64)::int8"
    return f'hashtextextended(({text}) COLLATE "C", 0)'


def must_use_md5(*servers: Connection) -> bool:
    """Whether these servers hash a text differently: another byte order, encoding, or version."""
    query = f"SELECT {_hash_text('$1::text', is_md5=False)}"
    return len({_ask(one, query) for one in servers}) > 1


def _ask(conn: Connection, query: str) -> object:
    try:
        return psycopg.RawCursor(conn).execute(query.encode(), [PROBE]).fetchone()
    except psycopg.DataError:  # it does not have these characters
        return conn
