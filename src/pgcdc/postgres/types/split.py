"""Takes apart the text of values that hold others: arrays, rows, ranges, hstore. A whole column becomes one flat column.

The flat column is turned into its own type at once, which is much cheaper than value by value; where each value begins
stands in offsets beside it. Whatever is not as PostgreSQL writes it is refused, with one exception: quotes that were not
needed, because for rows and ranges it depends on the server's platform which bytes need them.

There are two implementations with the same results, in C (`_split.pyx`) and here in Python, which runs where there was
no compiler and is the one to read first. The one in C does not say what is wrong: the one here is asked about that value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgcdc.core.compiled import load_compiled
from pgcdc.postgres.types.column import Rejected

Offsets = npt.NDArray[np.int32]
"""Where each list begins among the items of all, and at last where the last one ends."""

ADVICE: Final = "option arrays=string gives arrays as text"
MAX_DIMENSIONS: Final = 6

LOWER_INCLUSIVE: Final = 1
UPPER_INCLUSIVE: Final = 2
EMPTY: Final = 4


class Lists(NamedTuple):
    """Lists of lists of leaves."""

    offsets: list[Offsets]
    """Of each level, the outermost first."""
    leaves: pa.Array


class Ranges(NamedTuple):
    """Ranges; of a multirange column those of all its values."""

    offsets: Offsets
    """Where each value begins among the ranges."""
    kinds: npt.NDArray[np.uint8]
    """LOWER_INCLUSIVE, UPPER_INCLUSIVE, EMPTY of each range."""
    leaves: pa.Array
    """Two for each range: the bounds."""


def split_arrays(values: pa.Array, depth: int, delimiter: bytes) -> Lists:
    """Arrays of `depth` dimensions whose indexes start at 1; `{}` may have any number of them."""
    found: Lists = run_fastest("_split", "split_arrays", python_arrays, values, depth, delimiter)
    return found


def split_rows(values: pa.Array, count: int) -> pa.Array:
    """The `count` attributes of each row; of a row that is NULL each is NULL."""
    return run_fastest("_split", "split_rows", python_rows, values, count)


def split_ranges(values: pa.Array) -> Ranges:
    """One range for each value; for NULL an empty one."""
    found: Ranges = run_fastest("_split", "split_ranges", python_ranges, values)
    return found


def split_multiranges(values: pa.Array) -> Ranges:
    """Any number of ranges for each value."""
    found: Ranges = run_fastest("_split", "split_multiranges", python_multiranges, values)
    return found


def split_pairs(values: pa.Array) -> Lists:
    """hstore: keys and values in turns; the offsets count both."""
    found: Lists = run_fastest("_split", "split_pairs", python_pairs, values)
    return found


def run_fastest(module: str, name: str, python: Callable[..., Any], values: pa.Array, *args: object) -> Any:
    """The result of the splitter in C, or of the one in Python where there is no other. Raises Rejected."""
    compiled = load_compiled(f"postgres.types.{module}")
    if compiled is None:
        return python(values, *args)
    found = getattr(compiled, name)(values, *args)
    if not isinstance(found, int):
        return found
    try:
        python(values.slice(found, 1), *args)
    except Rejected as cause:
        raise Rejected(found, cause.reason, cause.advice) from None
    raise AssertionError(f"{name}: the implementations do not agree about value {found}")


class _Malformed(Exception):
    """What is wrong with one value, and the advice."""


def fail(reason: str, advice: str = "") -> NoReturn:
    """Refuse the value that is being split."""
    raise _Malformed(reason, advice)


def each_value(values: pa.Array, split: Callable[[bytes], None]) -> Iterator[None]:
    """Splits one value after the other, NULL excepted, and comes back after each."""
    for index, value in enumerate(values.to_pylist()):
        if value is not None:
            try:
                split(value)
            except _Malformed as cause:
                raise Rejected(index, *cause.args) from None
        yield


def _offsets(ends: Sequence[int]) -> Offsets:
    return np.array(ends, np.int32)


# Arrays: {1,NULL,"a \"b\""}

_QUOTED = re.compile(rb'"([^"\\]*(?:\\["\\][^"\\]*)*)"')
_ESCAPED = re.compile(rb'\\(["\\])')


def python_arrays(values: pa.Array, depth: int, delimiter: bytes) -> Lists:
    """`split_arrays` in Python."""
    leaves: list[bytes | None] = []
    offsets = [[0] for _ in range(depth)]
    split = partial(
        _split_array,
        delimiter=delimiter,
        plain=re.compile(rb'[^"\\{}\s' + re.escape(delimiter) + rb"]+"),
        simple=re.compile(rb'\{[^"\\{}\s]+\}'),
        offsets=offsets,
        leaves=leaves,
    )
    for _ in each_value(values, split):
        offsets[0].append(len(offsets[1]) - 1 if depth > 1 else len(leaves))
    return Lists([_offsets(ends) for ends in offsets], pa.array(leaves, pa.binary()))


def _split_array(
    text: bytes,
    *,
    delimiter: bytes,
    plain: re.Pattern[bytes],
    simple: re.Pattern[bytes],
    offsets: list[list[int]],
    leaves: list[bytes | None],
) -> None:
    if text == b"{}":
        return
    depth = len(offsets)
    _check_dimensions(text, depth)
    if depth == 1 and simple.fullmatch(text):
        leaves += [_unquoted(leaf) for leaf in text[1:-1].split(delimiter)]
        return
    at = depth
    counts, sizes = [0] * depth, [-1] * depth
    while True:
        at = _array_element(text, at, plain, leaves)
        counts[-1] += 1
        if text.startswith(delimiter, at):
            at += 1
            continue
        level = depth - 1
        while text.startswith(b"}", at):
            at += 1
            if sizes[level] not in {-1, counts[level]}:
                fail("its parts are of different lengths")
            sizes[level] = counts[level]
            if level == 0:
                if at < len(text):
                    fail("something stands behind the array")
                return
            offsets[level].append(len(offsets[level + 1]) - 1 if level + 1 < depth else len(leaves))
            counts[level] = 0
            level -= 1
            counts[level] += 1
            if text.startswith(delimiter, at):
                at += 1
                break
        else:
            fail("the array has no end, or something stands between its elements")
        opening = b"{" * (depth - 1 - level)
        if not text.startswith(opening, at):
            fail("its parts have different numbers of dimensions")
        at += len(opening)


def _check_dimensions(text: bytes, depth: int) -> None:
    if text.startswith(b"["):
        fail("its indexes do not start at 1", ADVICE)
    found = len(text) - len(text.lstrip(b"{"))
    if found == 0:
        fail("it is no array")
    if found != depth and found <= MAX_DIMENSIONS:
        fail(f"an array of {found} dimension{'s' * (found > 1)} in a column declared with {depth}", ADVICE)
    if found != depth:
        fail("an array of too many dimensions")


def _array_element(text: bytes, at: int, plain: re.Pattern[bytes], leaves: list[bytes | None]) -> int:
    """Reads one element, and says what stands behind it."""
    if found := plain.match(text, at):
        leaves.append(_unquoted(found[0]))
        return found.end()
    if not (found := _QUOTED.match(text, at)):
        fail("an element is missing, or not quoted as it should be")
    leaves.append(_ESCAPED.sub(rb"\1", found[1]))
    return found.end()


def _unquoted(leaf: bytes) -> bytes | None:
    if len(leaf) == 4 and leaf.upper() == b"NULL":
        if leaf != b"NULL":
            fail("NULL is not in capitals")
        return None
    if not leaf:
        fail("an element is missing")
    return leaf


# Rows and ranges: (1,"a ""b""",) and [1,5)

_ATTRIBUTE = re.compile(rb'"((?:[^"\\]+|""|\\\\)*+)"|([^"\\(),\s]*)')
_BOUND = re.compile(rb'"((?:[^"\\]+|""|\\\\)*+)"|([^"\\()\[\],\s]*)')
_TWICE = re.compile(rb'(["\\])\1')


def python_rows(values: pa.Array, count: int) -> pa.Array:
    """`split_rows` in Python."""
    leaves: list[bytes | None] = []
    for index, _ in enumerate(each_value(values, partial(_split_row, count=count, leaves=leaves))):
        leaves += [None] * (count * (index + 1) - len(leaves))
    return pa.array(leaves, pa.binary())


def _split_row(text: bytes, count: int, leaves: list[bytes | None]) -> None:
    if not text.startswith(b"("):
        fail("it is no row")
    at, found = 1, 0
    while count or text != b"()":
        at = _field(text, at, _ATTRIBUTE, leaves)
        found += 1
        if not text.startswith(b",", at):
            break
        at += 1
    if text[at:] != b")":
        fail("the row has no end, or is not quoted as it should be")
    if found != count:
        fail(
            f"a row of {found} attribute{'s' * (found != 1)}, but its type has {count}",
            "The type was altered. Load the table again, or read composite types as text: composites=string",
        )


def _field(text: bytes, at: int, pattern: re.Pattern[bytes], leaves: list[bytes | None]) -> int:
    """Reads an attribute or a bound, and says what stands behind it. Nothing at all is NULL."""
    found = pattern.match(text, at)
    if not found:
        fail("a quote has no end, or something in quotes is not doubled as it should be")
    quoted, plain = found.groups()
    leaves.append(_TWICE.sub(rb"\1", quoted) if quoted is not None else plain or None)
    return found.end()


def python_ranges(values: pa.Array) -> Ranges:
    """`split_ranges` in Python."""
    leaves: list[bytes | None] = []
    kinds: list[int] = []
    for index, _ in enumerate(each_value(values, partial(_split_range, kinds=kinds, leaves=leaves))):
        if len(kinds) == index:
            _append_empty(kinds, leaves)
    return _ranges(range(len(values) + 1), kinds, leaves)


def python_multiranges(values: pa.Array) -> Ranges:
    """`split_multiranges` in Python."""
    leaves: list[bytes | None] = []
    kinds: list[int] = []
    offsets = [0]
    for _ in each_value(values, partial(_split_multirange, kinds=kinds, leaves=leaves)):
        offsets.append(len(kinds))
    return _ranges(offsets, kinds, leaves)


def _ranges(offsets: Sequence[int], kinds: list[int], leaves: list[bytes | None]) -> Ranges:
    return Ranges(_offsets(offsets), np.array(kinds, np.uint8), pa.array(leaves, pa.binary()))


def _split_range(text: bytes, kinds: list[int], leaves: list[bytes | None]) -> None:
    if text == b"empty":
        _append_empty(kinds, leaves)
    elif _bounds(text, 0, kinds, leaves) != len(text):
        fail("something stands behind the range")


def _split_multirange(text: bytes, kinds: list[int], leaves: list[bytes | None]) -> None:
    if text == b"{}":
        return
    if not text.startswith(b"{"):
        fail("it is no multirange")
    at = _bounds(text, 1, kinds, leaves)
    while text.startswith(b",", at):
        at = _bounds(text, at + 1, kinds, leaves)
    if text[at:] != b"}":
        fail("the multirange has no end, or something stands behind it")


def _append_empty(kinds: list[int], leaves: list[bytes | None]) -> None:
    kinds.append(EMPTY)
    leaves += (None, None)


def _bounds(text: bytes, at: int, kinds: list[int], leaves: list[bytes | None]) -> int:
    """Reads one range that is not empty, and says what stands behind it."""
    opening = text[at : at + 1]
    if opening not in {b"[", b"("}:
        fail("it is no range")
    at = _field(text, at + 1, _BOUND, leaves)
    if not text.startswith(b",", at):
        fail("the range has no second bound, or is not quoted as it should be")
    at = _field(text, at + 1, _BOUND, leaves)
    closing = text[at : at + 1]
    if closing not in {b"]", b")"}:
        fail("the range has no end, or is not quoted as it should be")
    if (opening == b"[" and leaves[-2] is None) or (closing == b"]" and leaves[-1] is None):
        fail("a range without a bound that includes it")
    kinds.append(LOWER_INCLUSIVE * (opening == b"[") + UPPER_INCLUSIVE * (closing == b"]"))
    return at + 1


# hstore: "a"=>"1", "b"=>NULL


def python_pairs(values: pa.Array) -> Lists:
    """`split_pairs` in Python."""
    leaves: list[bytes | None] = []
    offsets = [0]
    for _ in each_value(values, partial(_split_hstore, leaves=leaves)):
        offsets.append(len(leaves))
    return Lists([_offsets(offsets)], pa.array(leaves, pa.binary()))


def _split_hstore(text: bytes, leaves: list[bytes | None]) -> None:
    at, last = 0, None
    while text:
        if not (found := _QUOTED.match(text, at)):
            fail("a key is not quoted as it should be")
        key = _ESCAPED.sub(rb"\1", found[1])
        # The order in which hstore keeps them, so that no key can stand there twice.
        if last is not None and (len(key), key) <= (len(last), last):
            fail("its keys are not in the order of hstore")
        last, at = key, found.end()
        if not text.startswith(b"=>", at):
            fail("a key has no value")
        at += 2
        if text.startswith(b"NULL", at):
            leaves += (key, None)
            at += 4
        elif found := _QUOTED.match(text, at):
            leaves += (key, _ESCAPED.sub(rb"\1", found[1]))
            at = found.end()
        else:
            fail("a value is not quoted as it should be")
        if at == len(text):
            return
        if not text.startswith(b", ", at):
            fail("something stands behind a value")
        at += 2
