"""Splits the text of values that contain others: arrays, rows, ranges, hstore. A whole column becomes one flat column.

Converting one flat column is much cheaper than converting value by value; offsets say where each value begins. A
pattern describes how PostgreSQL writes a type. Other text is refused, except for unneeded quotes: in rows and ranges,
which bytes need quotes depends on the server's platform. Text that matches is split at brackets and commas outside
quotes, all values at once.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.postgres.types.column import Offsets, Rejected

Places = npt.NDArray[np.int64]  # Indexes into the text of a column, ascending

MAX_DIMENSIONS: Final = 6

_BLANKS = r" \t\n\r\v\f"
_ESCAPED = r'"(?:[^"\\]|\\["\\])*"'
_DOUBLED = r'"(?:[^"\\]|""|\\\\)*"'
_ATTRIBUTE = rf'(?:{_DOUBLED}|[^"\\(),{_BLANKS}]*)'
_BOUND = rf'(?:{_DOUBLED}|[^"\\()\[\],{_BLANKS}]+)'
_PAIR = rf"{_ESCAPED}=>(?:{_ESCAPED}|NULL)"
RANGE: Final = rf"(?:\[{_BOUND}|\({_BOUND}?),(?:{_BOUND}\]|{_BOUND}?\))"

_QUOTE, _BACKSLASH = b'"\\'
_NULL = np.frombuffer(b"NULL", np.uint8)


class Lists(NamedTuple):
    """Lists of lists of leaves."""

    offsets: list[Offsets]  # One array per level, outermost first
    leaves: pa.Array


def find_misfit(values: pa.Array, pattern: str) -> int | None:
    """The index of the first value that does not match the pattern. NULL matches."""
    fits = pc.match_substring_regex(values, f"^(?:{pattern})$")
    return pc.index(fits, False).as_py() if fits.false_count else None


def require(values: pa.Array, pattern: str, reason: str) -> None:
    """Raise Rejected unless all values match the pattern."""
    if (index := find_misfit(values, pattern)) is not None:
        raise Rejected(index, reason)


class ColumnText:
    """The text of a column, all values concatenated."""

    def __init__(self, values: pa.Array, instead: bytes = b"") -> None:
        """`instead` replaces NULL."""
        if values.null_count:
            values = values.fill_null(instead)
        _, ends, data = values.buffers()
        places = (
            np.frombuffer(ends, np.int32, len(values) + 1, 4 * values.offset) if len(values) else np.zeros(1, np.int32)
        )
        self.data: bytes = data.slice(places[0], places[-1] - places[0]).to_pybytes() if data and len(values) else b""
        self.begins = places[:-1] - places[0]

    def owners(self, places: Places) -> Places:
        """The indexes of the values that contain these places."""
        return np.searchsorted(self.begins, places, side="right") - 1

    def cut(self, before: bytes, after: bytes, *, has_null: bool = False) -> Pieces:
        """Cut out the leaves: the text between a byte of `before` and the next byte of `after`. Everything outside
        leaves is one of these bytes.

        With `has_null`, NULL is written as a word and no leaf is empty; otherwise an empty leaf is NULL.
        """
        # The same text with escaped bytes replaced by "a": the remaining backslashes and quotes are not part of a
        # value.
        plain = self.data
        if b"\\" in plain:
            plain = plain.replace(b"\\\\", b"\\a").replace(b'\\"', b"\\a")
        text = np.frombuffer(plain, np.uint8)
        is_mark = np.frombuffer(plain.translate(_among(before + after).tobytes()), np.bool_)
        has_quotes = b'"' in plain
        if has_quotes:
            is_quote = text == _QUOTE
            is_quoted = np.cumsum(is_quote, dtype=np.uint8) & 1 != 0
            is_mark = is_mark > is_quoted
        marks = np.flatnonzero(is_mark)
        kinds = text[marks]
        is_leaf = _among(before)[kinds[:-1]] & _among(after)[kinds[1:]]
        if has_null:
            is_leaf &= np.diff(marks) > 1
        first = np.flatnonzero(is_leaf)
        begins, ends = marks[first] + 1, marks[first + 1]
        is_null = self._find_null(text, begins, ends) if has_null else begins == ends
        if has_quotes:
            keep = ~(is_mark | is_quote | (text == _BACKSLASH))
            keep[1:] |= is_quote[:-1] & is_quote[1:] & is_quoted[1:]  # of a doubled quote in quotes, keep the second
            kept = np.frombuffer(self.data, np.uint8)[keep]
            starts = np.cumsum(keep, dtype=np.int32)[begins - 1]
        else:
            kept = np.frombuffer(plain.translate(None, before + after), np.uint8)
            starts = begins - first - 1
        offsets = np.append(starts, len(kept)).astype(np.int32)
        valid = np.packbits(~is_null, bitorder="little") if is_null.any() else None
        buffers = [None if one is None else pa.py_buffer(one) for one in (valid, offsets, kept)]
        leaves = pa.Array.from_buffers(pa.binary(), len(begins), buffers)
        return Pieces(marks, kinds, begins, kinds[first], kinds[first + 1], leaves)

    def _find_null(self, text: npt.NDArray[np.uint8], begins: Places, ends: Places) -> npt.NDArray[np.bool_]:
        is_null: npt.NDArray[np.bool_] = ends - begins == len(_NULL)
        words = text[begins[is_null][:, None] + np.arange(len(_NULL))]
        is_capital = (words == _NULL).all(axis=1)
        if (is_other := (words | 0x20 == _NULL | 0x20).all(axis=1) > is_capital).any():
            place = begins[is_null][is_other][:1]
            raise Rejected(int(self.owners(place)[0]), "NULL is not in capitals")
        is_null[is_null] = is_capital
        return is_null


class Pieces(NamedTuple):
    """The parts that a text was cut into."""

    marks: Places  # Brackets, commas and other separators outside quotes
    kinds: npt.NDArray[np.uint8]  # The byte at each mark
    begins: Places  # Where each leaf begins
    opening: npt.NDArray[np.uint8]  # The mark before each leaf
    closing: npt.NDArray[np.uint8]  # The mark after each leaf
    leaves: pa.Array


@cache
def _among(some: bytes) -> npt.NDArray[np.bool_]:
    return np.frombuffer(bytes(byte in some for byte in range(256)), np.bool_)


def offsets_of(outer: Places, inner: Places) -> Offsets:
    """Offsets of the inner items within the outer ones, given where each begins."""
    return np.append(np.searchsorted(inner, outer), len(inner)).astype(np.int32)


def split_arrays(values: pa.Array, depth: int, delimiter: bytes) -> Lists:
    """Arrays of `depth` dimensions with indexes from 1; `{}` may have any number of dimensions."""
    comma = delimiter.decode()
    pattern = rf'(?:{_ESCAPED}|[^"\\{{}}{_BLANKS}{comma}]+)'
    for _ in range(depth):
        pattern = rf"\{{{pattern}(?:{comma}{pattern})*\}}"
    if (index := find_misfit(values, rf"\{{\}}|{pattern}")) is not None:
        raise _explain_array(index, values[index].as_py(), depth)
    text = ColumnText(values, b"{}")
    found = text.cut(b"{" + delimiter, b"}" + delimiter, has_null=True)
    is_open, is_closed = found.kinds == ord("{"), found.kinds == ord("}")
    level = np.cumsum(is_open.astype(np.int8) - is_closed, dtype=np.int8)
    begins = [text.begins, *(found.marks[is_open & (level == one)] for one in range(2, depth + 1)), found.begins]
    offsets = [offsets_of(outer, inner) for outer, inner in pairwise(begins)]
    for lists, ends in zip(begins[1:-1], offsets[1:], strict=True):
        owners, sizes = text.owners(lists), np.diff(ends)
        if (is_uneven := sizes != sizes[np.searchsorted(owners, owners)]).any():
            raise Rejected(int(owners[is_uneven][0]), "its parts have different lengths")
    return Lists(offsets, found.leaves)


def _explain_array(index: int, text: bytes, depth: int) -> Rejected:
    advice = "Read arrays as text: arrays=string"
    if text.startswith(b"["):
        return Rejected(index, "its indexes do not start at 1", advice)
    found = len(text) - len(text.lstrip(b"{"))
    if found not in (0, depth) and found <= MAX_DIMENSIONS:
        plural = "s" * (found > 1)
        return Rejected(index, f"an array of {found} dimension{plural} in a column declared with {depth}", advice)
    reason = "the array has no end, or an element is quoted wrongly" if found else "it is not an array"
    return Rejected(index, reason)


def split_rows(values: pa.Array, count: int) -> pa.Array:
    """The `count` attributes of each row. For a NULL row every attribute is NULL."""
    require(values, rf"\({_ATTRIBUTE}(?:,{_ATTRIBUTE})*\)", "it is not a row, or is quoted wrongly")
    text = ColumnText(values, b"(%b)" % (b"," * (count - 1)))
    found = text.cut(b"(,", b",)")
    counts = np.diff(offsets_of(text.begins, found.begins))
    if (is_wrong := counts != count).any():
        index = int(np.argmax(is_wrong))
        plural = "" if counts[index] == 1 else "s"
        raise Rejected(
            index,
            f"a row of {counts[index]} attribute{plural}, but its type has {count}",
            "The type was altered. Load the table again, or read composite types as text: composites=string",
        )
    return found.leaves


def split_words(values: pa.Array) -> Lists:
    """int2vector, oidvector: numbers separated by spaces."""
    require(values, "(?:-?[0-9]+(?: -?[0-9]+)*)?", "it is not a list of numbers")
    text = _enclose(values)
    found = text.cut(b"{ ", b" }", has_null=True)
    return Lists([offsets_of(text.begins, found.begins)], found.leaves)


def split_pairs(values: pa.Array) -> Lists:
    """hstore: alternating keys and values; the offsets count both."""
    require(values, rf"(?:{_PAIR}(?:, {_PAIR})*)?", "it is not an hstore, or is quoted wrongly")
    text = _enclose(values)
    found = text.cut(b"{> ", b"=,}", has_null=True)
    # hstore sorts its keys by length, then by bytes. Checking the order also rules out duplicates.
    keys, owners = found.leaves.take(pa.array(np.arange(0, len(found.begins), 2))), text.owners(found.begins[::2])
    key, following = keys.slice(0, max(len(keys) - 1, 0)), keys.slice(1)
    size, size_after = pc.binary_length(key), pc.binary_length(following)
    in_order = pc.or_(pc.less(size, size_after), pc.and_(pc.equal(size, size_after), pc.less(key, following)))
    if (is_wrong := ~in_order.to_numpy(zero_copy_only=False) & (owners[:-1] == owners[1:])).any():
        raise Rejected(int(owners[:-1][is_wrong][0]), "its keys are not in the order of hstore")
    return Lists([offsets_of(text.begins, found.begins)], found.leaves)


def _enclose(values: pa.Array) -> ColumnText:
    """Add brackets, so that each value has a mark at both ends."""
    return ColumnText(pc.binary_join_element_wise(b"{", values.fill_null(b""), b"}", b""))
