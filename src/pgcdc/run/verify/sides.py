"""A table's rows on one side: as checksums that a server computes, or as texts that are read and hashed here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import psycopg
import pyarrow as pa

from pgcdc.event.edits import SimpleChain
from pgcdc.postgres.database import Connection, explain_errors, quote_identifier, quote_literal
from pgcdc.run.verify.hashing import WRAP, Key, Seen, Sums, hash_sql, hash_values, note
from pgcdc.run.verify.settling import Finder
from pgcdc.source.postgres.setup.tables import PublishedTable
from pgcdc.source.postgres.snapshot.copy import copy_rows

Range = tuple[Key | None, Key | None]  # After the first key, up to the second; None: no such bound
Pace = Callable[[int], None]  # Called with rows that were read: waits if necessary, to limit the rate at the source


ALL: Range = (None, None)


class Side(Finder, Protocol):
    """What every comparison needs. `of`: the number of buckets for keys, a power of 2."""

    def sums(self, part: Range, of: int) -> Sums:
        """The sums of a range's rows, by buckets of their keys."""

    def rows(self, part: Range, buckets: Collection[int], of: int) -> dict[Key, Seen]:
        """The rows of a range that are in some buckets."""


@dataclass(frozen=True)
class SqlSide(Side):
    """Rows that a server hashes."""

    conn: Connection
    source: str  # The FROM clause
    columns: tuple[str, ...]  # In SQL
    key: tuple[str, ...]  # Names of columns; (): rows are counted
    types: tuple[str, ...] = ()  # Of the key, if both sides have the same; otherwise keys are compared as texts
    condition: str | None = None
    is_md5: bool = False
    has_marks: bool = False
    pace: Pace = lambda rows: None
    title: str = ""  # For messages

    @property
    def _hash(self) -> str:
        return hash_sql(self.columns, is_md5=self.is_md5)

    @property
    def _names(self) -> list[str]:
        return [quote_identifier(one) for one in self.key]

    @property
    def _texts(self) -> list[str]:
        return [f"concat({one})" for one in self._names]  # it writes a value as COPY does

    def _bucket(self, of: int) -> str:
        hashed = hash_sql(self._names, is_md5=self.is_md5) if self.key else self._hash
        return f"({hashed} & {of - 1})"

    def _select(self, what: str, *conditions: str | None, tail: str = "", values: Sequence[object] = ()) -> list[tuple]:  # type: ignore[type-arg]
        given = " AND ".join(f"({one}\n)" for one in (self.condition, *conditions) if one)
        query = f"SELECT {what} FROM {self.source}{f' WHERE {given}' if given else ''}{tail}"
        with explain_errors(f"compare {self.title}"):
            return psycopg.RawCursor(self.conn).execute(query.encode(), values).fetchall()

    def _within(self, part: Range) -> list[str]:
        """A range in the order of the key: literals take the types of the columns."""
        names = ", ".join(self._names)
        bounds = zip((">", "<="), part, strict=True)
        return [f"({names}) {sign} ({', '.join(map(quote_literal, one))})" for sign, one in bounds if one is not None]

    def bound(self, after: Key | None, rows: int) -> Key | None:
        """The key of the last of `rows` rows; None if there are fewer."""
        order = f" ORDER BY {', '.join(self._names)} OFFSET {rows - 1} LIMIT 1"
        found = self._select(", ".join(self._texts), *self._within((after, None)), tail=order)
        return tuple(found[0]) if found else None

    def range_sum(self, part: Range) -> tuple[int, int]:
        ((count, total),) = self._select(f"count(*), coalesce(sum({self._hash}), 0)", *self._within(part))
        self.pace(count)
        return count, int(total) % WRAP

    def sums(self, part: Range, of: int) -> Sums:
        made, what = Sums(of), f"{self._bucket(of)}, count(*), sum({self._hash})"
        for bucket, count, total in self._select(what, *self._within(part), tail=" GROUP BY 1"):
            made.add(bucket, count, int(total))
        self.pace(sum(made.rows))
        return made

    def rows(self, part: Range, buckets: Collection[int], of: int) -> dict[Key, Seen]:
        return self._read(*self._within(part), f"{self._bucket(of)} = ANY ($1::int8[])", values=[list(buckets)])

    def find(self, keys: Collection[Key]) -> dict[Key, Seen]:
        if not self.key:
            return self._read(f"{self._hash} = ANY ($1::int8[])", values=[[int(one) for (one,) in keys]])
        given = [list(one) for one in zip(*keys, strict=True)]
        unnested = ", ".join(f"${number}::text[]" for number in range(1, len(given) + 1))
        aliases = [f"k{number}" for number in range(len(given))]
        names = self._names if self.types else self._texts
        wanted = [f"{one}::{kind}" for one, kind in zip(aliases, self.types, strict=True)] if self.types else aliases
        inner = f"SELECT {', '.join(wanted)} FROM unnest({unnested}) AS u({', '.join(aliases)})"
        return self._read(f"({', '.join(names)}) IN ({inner})", values=given)

    def _read(self, *conditions: str, values: Sequence[object] = ()) -> dict[Key, Seen]:
        key = f"ARRAY[{', '.join(self._texts)}]" if self.key else f"ARRAY[{self._hash}::text]"
        mark = "xmin::text" if self.has_marks and self.key else "''"
        found: dict[Key, Seen] = {}
        for names, hashed, version in self._select(f"{key}, {self._hash}, {mark}", *conditions, values=values):
            note(found, tuple(names), hashed, version)
        self.pace(len(found))
        return found


# --- hashed here

Rows = tuple[list[pa.Array], list[str] | None]
"""The columns of some rows, as texts, and their marks."""


@dataclass(frozen=True)
class ReadSide(Side):
    """Rows that come as texts, always all of them."""

    read: Callable[[Collection[Key] | None], Iterator[Rows]]
    """Reads all rows, or at least those with these keys."""
    key: tuple[int, ...]  # Indexes of columns; (): rows are counted

    def _walk(self, keys: Collection[Key] | None = None) -> Iterator[tuple[Key, int, int, str]]:
        """The key of each row, the key's hash, the row's hash and its mark."""
        for columns, marks in self.read(keys):
            values = [column.cast(pa.binary()).to_pylist() for column in columns]
            for number, row in enumerate(zip(*values, strict=True)):
                hashed = hash_values(row)
                if self.key:
                    parts = [row[at] for at in self.key]
                    key = tuple((one or b"").decode(errors="surrogateescape") for one in parts)
                    placed = hash_values(parts)
                else:
                    key, placed = (str(hashed),), hashed
                yield key, placed, hashed, marks[number] if marks else ""

    def sums(self, part: Range, of: int) -> Sums:
        made = Sums(of)
        for _, placed, hashed, _ in self._walk():
            made.add(placed % of, 1, hashed)
        return made

    def rows(self, part: Range, buckets: Collection[int], of: int) -> dict[Key, Seen]:
        wanted, found = set(buckets), dict[Key, Seen]()
        for key, placed, hashed, mark in self._walk():
            if placed % of in wanted:
                note(found, key, hashed, mark)
        return found

    def find(self, keys: Collection[Key]) -> dict[Key, Seen]:
        found: dict[Key, Seen] = {}
        for key, _, hashed, mark in self._walk(keys if self.key else None):
            if key in keys:
                note(found, key, hashed, mark if self.key else "")
        return found


@dataclass(frozen=True)
class SourceRows:
    """Rows of the source after a chain."""

    conn: Connection
    table: PublishedTable
    types: tuple[str, ...]  # Of the key
    chain: SimpleChain
    pace: Pace

    def __call__(self, keys: Collection[Key] | None) -> Iterator[Rows]:
        if keys is None:
            yield from self._copy(None)
            return
        names = [quote_identifier(one) for one in self.table.key]
        aliases = [f"k{number}" for number in range(len(names))]
        arrays = ", ".join(f"ARRAY[{', '.join(map(quote_literal, one))}]::text[]" for one in zip(*keys, strict=True))
        unnested = f"FROM unnest({arrays}) AS u({', '.join(aliases)})"
        typed = ", ".join(f"{one}::{kind}" for one, kind in zip(aliases, self.types, strict=True))
        try:
            yield from self._copy(f"({', '.join(names)}) IN (SELECT {typed} {unnested})")
        except psycopg.DataError:  # the target has a key that is invalid here: compare the text of every row
            texts = ", ".join(f"concat({one})" for one in names)
            yield from self._copy(f"({texts}) IN (SELECT {', '.join(aliases)} {unnested})")

    def _copy(self, condition: str | None) -> Iterator[Rows]:
        given = " AND ".join(f"({one}\n)" for one in (self.table.row_filter, condition) if one)
        selected = ", ".join([*map(quote_identifier, self.table.columns), "xmin"])
        query = f"SELECT {selected} FROM {self.table.source}{f' WHERE {given}' if given else ''}"
        width = len(self.table.columns) + 1
        for flat in copy_rows(self.conn, f"COPY ({query}) TO STDOUT", width):
            taken = [flat.take(pa.array(np.arange(at, len(flat), width))) for at in range(width)]
            self.pace(len(flat) // width)
            yield self.chain.columns(self.table.relation, taken[:-1]), taken[-1].cast(pa.string()).to_pylist()
