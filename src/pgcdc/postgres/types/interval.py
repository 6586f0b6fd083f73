"""Intervals as PostgreSQL writes them with IntervalStyle iso_8601: P1Y2M-3DT4H5M6.789S.

Months, days and microseconds have no fixed relation, and each its own sign: so PostgreSQL keeps three numbers, and Spark
gets the same three. Spark's own interval types hold only one or two of them.

As in `split`, there are two implementations with the same results: in C (`_interval.pyx`) and here in Python.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgcdc.postgres.types.assemble import Nested, struct_array, struct_of
from pgcdc.postgres.types.column import Exactness
from pgcdc.postgres.types.split import each_value, fail, run_fastest

_NAMES: Final = ("months", "days", "microseconds")
_TYPES: Final = (pa.int32(), pa.int32(), pa.int64())

_PART = rb"(-?[1-9][0-9]{0,9})"
# A part that is zero is left out.
_INTERVAL = re.compile(
    rb"P(?:%bY)?(?:%bM)?(?:%bD)?" % (_PART, _PART, _PART)
    + rb"(?:T(?=.)(?:%bH)?(?:%bM)?(?:(-?)(0(?=\.)|[1-9][0-9]?)(?:\.([0-9]{0,5}[1-9]))?S)?)?" % (_PART, _PART)
)
_ADVICE = "option out_of_range=string gives intervals, dates and times as text"


class Intervals(NamedTuple):
    """The numbers of each value, zeros for NULL."""

    months: npt.NDArray[np.int32]
    days: npt.NDArray[np.int32]
    microseconds: npt.NDArray[np.int64]


def split_intervals(values: pa.Array) -> Intervals:
    """The three numbers of every interval."""
    found: Intervals = run_fastest("_interval", "split_intervals", python_intervals, values)
    return found


def python_intervals(values: pa.Array) -> Intervals:
    """`split_intervals` in Python."""
    numbers: list[tuple[int, int, int]] = []

    def split(text: bytes) -> None:
        numbers.append(_parse(text))

    for index, _ in enumerate(each_value(values, split)):
        if len(numbers) == index:
            numbers.append((0, 0, 0))
    months, days, microseconds = zip(*numbers, strict=True) if numbers else ((), (), ())
    return Intervals(np.array(months, np.int32), np.array(days, np.int32), np.array(microseconds, np.int64))


def _parse(text: bytes) -> tuple[int, int, int]:
    if text == b"PT0S":
        return 0, 0, 0
    if text in {b"infinity", b"-infinity"}:
        fail(f"{text.decode()} is no number of months, days and microseconds", _ADVICE)
    found = _INTERVAL.fullmatch(text)
    if not found or text == b"P":
        fail("it is no interval in the style iso_8601")
    sign, fraction = found[6], found[8] or b""
    years, months, days, hours, minutes, seconds = (int(found[group] or 0) for group in (1, 2, 3, 4, 5, 7))
    if sign:
        seconds = -seconds
    microseconds = int(fraction.ljust(6, b"0")) * (-1 if sign else 1)
    # They come from one number, so they have one sign.
    if abs(months) >= 12 or _differ(years, months):
        fail("its years and months do not fit each other")
    if abs(minutes) >= 60 or abs(seconds) >= 60 or _differ(hours, minutes, seconds or microseconds):
        fail("its hours, minutes and seconds do not fit each other")
    months += 12 * years
    microseconds += 1_000_000 * (3_600 * hours + 60 * minutes + seconds)
    if not (-(2**31) <= months < 2**31 and -(2**31) <= days < 2**31 and -(2**63) <= microseconds < 2**63):
        fail("it is beyond the intervals that PostgreSQL has")
    return months, days, microseconds


def _differ(*parts: int) -> bool:
    return min(parts) < 0 < max(parts)


class IntervalColumn(Nested):
    """interval: STRUCT<months INT, days INT, microseconds BIGINT>."""

    __slots__ = ()

    @classmethod
    def make(cls) -> IntervalColumn:
        """There is only one."""
        return cls(struct_of(_NAMES, _TYPES), Exactness.EXACT, "")

    def convert(self, values: pa.Array) -> pa.Array:
        """The three numbers of every interval. Infinity is refused: no number of months stands for it."""
        columns = [pa.array(part, one) for part, one in zip(split_intervals(values), _TYPES, strict=True)]
        return struct_array(_NAMES, columns, values)
