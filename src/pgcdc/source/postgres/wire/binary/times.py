"""Dates, times and intervals as PostgreSQL writes them with DateStyle ISO, TimeZone UTC and IntervalStyle iso_8601.

Not by Python's datetime, which ends at the years 1 and 9999.
"""

from __future__ import annotations

import struct

from pgcdc.source.postgres.wire.binary.reader import Damaged, unpack

__all__ = [
    "date_text",
    "finite_interval_text",
    "interval_text",
    "time_text",
    "timestamp_text",
    "timestamptz_text",
    "timetz_text",
]

_I32, _I64 = struct.Struct("!i"), struct.Struct("!q")
_TIMETZ = struct.Struct("!qi")
_INTERVAL = struct.Struct("!qii")

_SECOND = 1_000_000
_HOUR = 3_600 * _SECOND
_DAY = 86_400 * _SECOND

_DAYS_TO_2000 = 730_425
"""From 1 March of the year 0 to 1 January 2000."""
_DAYS_OF_400_YEARS = 146_097

_FOREVER_32, _FOREVER_64 = 2**31 - 1, 2**63 - 1
_INFINITE_INTERVALS: dict[tuple[int, ...], bytes] = {
    (_FOREVER_64, _FOREVER_32, _FOREVER_32): b"infinity",
    (-_FOREVER_64 - 1, -_FOREVER_32 - 1, -_FOREVER_32 - 1): b"-infinity",
}


def date_text(data: bytes) -> bytes:
    """Days since 2000-01-01."""
    (days,) = unpack(_I32, data)
    if days == _FOREVER_32:
        return b"infinity"
    if days == -_FOREVER_32 - 1:
        return b"-infinity"
    date, era = _format_date(days)
    return f"{date}{era}".encode()


def time_text(data: bytes) -> bytes:
    """Microseconds since midnight."""
    return _format_time(unpack(_I64, data)[0]).encode()


def timetz_text(data: bytes) -> bytes:
    """Microseconds since midnight, and seconds west of UTC."""
    time, west = unpack(_TIMETZ, data)
    minutes, seconds = divmod(abs(west), 60)
    hours, minutes = divmod(minutes, 60)
    zone = f"{'-' if west > 0 else '+'}{hours:02d}"
    if minutes or seconds:
        zone += f":{minutes:02d}"
    if seconds:
        zone += f":{seconds:02d}"
    return f"{_format_time(time)}{zone}".encode()


def timestamp_text(data: bytes) -> bytes:
    """Microseconds since 2000-01-01."""
    return _format_timestamp(unpack(_I64, data)[0], "")


def timestamptz_text(data: bytes) -> bytes:
    """Microseconds since 2000-01-01 UTC."""
    return _format_timestamp(unpack(_I64, data)[0], "+00")


def interval_text(data: bytes) -> bytes:
    """Microseconds, days and months: each has its own sign. Their extremes together are infinity."""
    return _INFINITE_INTERVALS.get(unpack(_INTERVAL, data)) or finite_interval_text(data)


def finite_interval_text(data: bytes) -> bytes:
    """An interval before PostgreSQL 17, which had no infinite ones."""
    time, days, months = unpack(_INTERVAL, data)
    years, months = _divide(months, 12)
    hours, rest = _divide(time, _HOUR)
    minutes, rest = _divide(rest, 60 * _SECOND)
    text = _format_parts((years, "Y"), (months, "M"), (days, "D"))
    if time:
        text += "T" + _format_parts((hours, "H"), (minutes, "M"))
        if rest:
            seconds, fraction = divmod(abs(rest), _SECOND)
            text += f"{'-' if rest < 0 else ''}{seconds}{_format_fraction(fraction)}S"
    return f"P{text or 'T0S'}".encode()


def _divide(number: int, by: int) -> tuple[int, int]:
    """Quotient and rest with the sign of `number`, as in C."""
    quotient, rest = divmod(abs(number), by)
    return (quotient, rest) if number >= 0 else (-quotient, -rest)


def _format_parts(*parts: tuple[int, str]) -> str:
    return "".join([f"{number}{unit}" for number, unit in parts if number])


def _format_timestamp(time: int, zone: str) -> bytes:
    if time == _FOREVER_64:
        return b"infinity"
    if time == -_FOREVER_64 - 1:
        return b"-infinity"
    days, time = divmod(time, _DAY)
    date, era = _format_date(days)
    return f"{date} {_format_time(time)}{zone}{era}".encode()


def _format_date(days: int) -> tuple[str, str]:
    """The date, and what stands behind everything if it is before Christ."""
    # The year is counted from March, so that the leap day is its last.
    cycle, day = divmod(days + _DAYS_TO_2000, _DAYS_OF_400_YEARS)
    year = (day - day // 1_460 + day // 36_524 - day // 146_096) // 365
    day -= 365 * year + year // 4 - year // 100
    month = (5 * day + 2) // 153
    day -= (153 * month + 2) // 5
    year += 400 * cycle + (month >= 10)
    month += 3 if month < 10 else -9
    shown, era = (year, "") if year > 0 else (1 - year, " BC")
    return f"{shown:04d}-{month:02d}-{day + 1:02d}", era


def _format_time(time: int) -> str:
    if not 0 <= time <= _DAY:
        raise Damaged(f"is no time of a day: {time} microseconds")
    seconds, fraction = divmod(time, _SECOND)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}{_format_fraction(fraction)}"


def _format_fraction(microseconds: int) -> str:
    return f".{microseconds:06d}".rstrip("0") if microseconds else ""
