"""Intervals as PostgreSQL writes them with IntervalStyle iso_8601: P1Y2M-3DT4H5M6.789S.

Months, days and microseconds have no fixed relation, and each has its own sign. PostgreSQL therefore stores three
numbers, and Spark gets the same three. Spark's own interval types hold only one or two of them.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from pgcdc.postgres.types.column import Exactness, Nested, Rejected, struct_array, struct_of
from pgcdc.postgres.types.split import ColumnText, find_misfit

_NAMES = ("months", "days", "microseconds")
_TYPES = (pa.int32(), pa.int32(), pa.int64())

_N, _TO_59, _FRACTION = "[1-9][0-9]{0,9}", "(?:[1-9]|[1-5][0-9])", r"\.[0-9]{0,5}[1-9]"
# A part that is zero is omitted. Years and months come from one number, so they share a sign; so do hours, minutes and
# seconds.
_YEARS = "|".join(f"(?:{sign}{_N}Y)?(?:{sign}(?:[1-9]|1[01])M)?" for sign in ("", "-"))
_HOURS = "|".join(
    f"(?:{sign}{_N}H)?(?:{sign}{_TO_59}M)?(?:{sign}(?:{_TO_59}(?:{_FRACTION})?|0{_FRACTION})S)?" for sign in ("", "-")
)
_INTERVAL = f"PT0S|P(?:{_YEARS})(?:-?{_N}D)?(?:T(?:{_HOURS}))?"
_UNFINISHED = ".*[^PT]"
_MOST_HOURS = 2**63 // 3_600_000_000

_SLOTS = np.zeros(256, np.int64)
_SLOTS[list(b"YMDHS.")] = 0, 1, 2, 3, 5, 5
_MINUTES, _PARTS = 4, 7


def split_intervals(values: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Months, days and microseconds of every interval; zeros for NULL."""
    for pattern in (_INTERVAL, _UNFINISHED):
        if (index := find_misfit(values, pattern)) is not None:
            raise _explain(index, values[index].as_py())
    text = ColumnText(values, b"PT0S")
    found = text.cut(b"PYMDTH.", b"YMDHS.")
    owners = text.owners(found.begins)
    times = found.marks[found.kinds == ord("T")]
    is_time = np.searchsorted(times, found.begins) > np.searchsorted(times, text.begins)[owners]
    is_fraction = found.opening == ord(".")
    slots = _SLOTS[found.closing] + (_MINUTES - 1) * (is_time & (found.closing == ord("M"))) + is_fraction
    numbers = found.leaves.view(pa.string()).cast(pa.int64()).to_numpy().copy()
    sizes = np.diff(np.frombuffer(found.leaves.buffers()[1], np.int32, len(numbers) + 1))
    numbers[is_fraction] *= 10 ** (6 - sizes[is_fraction].astype(np.int64))
    is_negative = np.zeros(len(values), np.bool_)
    is_negative[owners[is_time & (np.frombuffer(text.data, np.uint8)[found.begins] == ord("-"))]] = True
    parts = np.zeros((_PARTS, len(values)), np.int64)
    parts[slots, owners] = numbers
    months, days = 12 * parts[0] + parts[1], parts[2]
    hours, minutes, seconds, fraction = np.abs(parts[3:]).astype(np.uint64)
    size = np.uint64(1_000_000) * (np.uint64(3600) * hours + np.uint64(60) * minutes + seconds) + fraction
    beyond = (hours > _MOST_HOURS) | (size > np.uint64(2**63) - ~is_negative)
    for part in (months, days):
        beyond |= (part < -(2**31)) | (part >= 2**31)
    if beyond.any():
        raise Rejected(int(np.argmax(beyond)), "it is beyond PostgreSQL's range of intervals")
    microseconds = np.where(is_negative, np.uint64(0) - size, size).view(np.int64)
    return pa.array(months, pa.int32()), pa.array(days, pa.int32()), pa.array(microseconds)


def _explain(index: int, text: bytes) -> Rejected:
    if text in {b"infinity", b"-infinity"}:
        advice = "Read intervals, dates and times as text: out_of_range=string"
        return Rejected(index, f"{text.decode()} is not a number of months, days and microseconds", advice)
    return Rejected(index, "it is not an interval in the style iso_8601")


def read_intervals(values: pa.Array) -> pa.Array:
    """Convert intervals. Refuses infinity, which no number of months represents."""
    return struct_array(_NAMES, split_intervals(values), values)


INTERVALS = Nested(struct_of(_NAMES, _TYPES), Exactness.EXACT, "", read_intervals)
"""STRUCT<months INT, days INT, microseconds BIGINT>."""
