"""Values without nested values: bytes, bits, dates and times, network addresses; and the converter for each type."""

from __future__ import annotations

import struct
from ipaddress import IPv6Address
from typing import Final
from uuid import UUID

from pgcdc.source.postgres.wire.binary.numbers import (
    Converter,
    Damaged,
    Reader,
    bool_text,
    char_text,
    doubles,
    fixed,
    float4_text,
    numeric_text,
    older_char_text,
    path_text,
    polygon_text,
    sized,
    sparsevec_text,
    unpack,
    vector,
)

_I32 = struct.Struct("!i")
_INET = struct.Struct("!BBBB")
_SNAPSHOT = struct.Struct("!qq")
_FAMILIES = {2: 4, 3: 16}  # The number of bytes in an address: IPv4, IPv6
_MAPPED = bytes(10) + b"\xff\xff"


def _versioned_text(data: bytes) -> bytes:
    """jsonb, jsonpath, ltree: a version, then the text."""
    if data[:1] != b"\x01":
        raise Damaged(f"is not of version 1 but {data[0] if data else 'empty'}")
    return data[1:]


def _bytea_text(data: bytes) -> bytes:
    """Hexadecimal, as with `bytea_output = hex`."""
    return b"\\x" + data.hex().encode()


def _bits_text(data: bytes) -> bytes:
    """bit and varbit: the number of bits, then the bits from the left."""
    reader = Reader(data)
    count = reader.int32()
    if count < 0 or reader.left != (count + 7) // 8:
        raise Damaged(f"claims {count} bits in {reader.left} bytes")
    raw = reader.raw(reader.left)
    # In pieces: converting one huge number takes quadratic time.
    return b"".join([_BYTES_AS_BITS[byte] for byte in raw])[:count]


_BYTES_AS_BITS = [f"{byte:08b}".encode() for byte in range(256)]


def _network(*, always_bits: bool) -> Converter:
    """inet and cidr: an address and its network bits, which are omitted for a single host."""

    def convert(data: bytes) -> bytes:
        reader = Reader(data)
        family, bits, _, size = reader.fields(_INET)
        if _FAMILIES.get(family) != size or bits > 8 * size:
            raise Damaged(f"has an unknown address: family {family}, {size} bytes, {bits} bits")
        address = reader.raw(size)
        reader.finish()
        return (_format_address(address) + (f"/{bits}" if always_bits or bits != 8 * size else "")).encode()

    return convert


def _format_address(address: bytes) -> str:
    """An IPv4 address inside an IPv6 address is written as IPv4."""
    ipv4 = ".".join(map(str, address[-4:]))
    if address[:-4] == b"":
        return ipv4
    if address[:12] == _MAPPED:
        return f"::ffff:{ipv4}"
    return f"::{ipv4}" if not any(address[:12]) and any(address[12:14]) else str(IPv6Address(address))


def _snapshot_text(data: bytes) -> bytes:
    """pg_snapshot and txid_snapshot: xmin, xmax and the transactions in progress."""
    reader = Reader(data)
    count = reader.int32()
    xmin, xmax = reader.fields(_SNAPSHOT)
    if count < 0 or reader.left != 8 * count:
        raise Damaged(f"claims {count} transactions in {reader.left} bytes")
    running = struct.unpack(f"!{count}q", reader.raw(reader.left))
    return b"%d:%d:%b" % (xmin, xmax, b",".join([b"%d" % xid for xid in running]))


def _hstore_text(data: bytes) -> bytes:
    """hstore: pairs of texts; a value may be NULL."""
    reader = Reader(data)
    pairs = []
    for _ in range(reader.count(8)):
        key, value = reader.item(), reader.item()
        if key is None:
            raise Damaged("has a key that is NULL")
        pairs.append(_quote_hstore(key) + b"=>" + (b"NULL" if value is None else _quote_hstore(value)))
    reader.finish()
    return b", ".join(pairs)


def _quote_hstore(text: bytes) -> bytes:
    return b'"%b"' % text.replace(b"\\", b"\\\\").replace(b'"', b'\\"')


# --- dates, times and intervals (ISO, UTC, iso_8601); Python's datetime ends at the years 1 and 9999

_I64 = struct.Struct("!q")
_TIMETZ = struct.Struct("!qi")
_INTERVAL = struct.Struct("!qii")

_SECOND = 1_000_000
_HOUR = 3_600 * _SECOND
_DAY = 86_400 * _SECOND

_DAYS_TO_2000 = 730_425  # From 1 March of the year 0 to 1 January 2000
_DAYS_OF_400_YEARS = 146_097

_INFINITE_DAYS = {2**31 - 1: b"infinity", -(2**31): b"-infinity"}
_INFINITE_TIMES = {2**63 - 1: b"infinity", -(2**63): b"-infinity"}
_INFINITE_INTERVALS: dict[tuple[int, ...], bytes] = {
    (2**63 - 1, 2**31 - 1, 2**31 - 1): b"infinity",
    (-(2**63), -(2**31), -(2**31)): b"-infinity",
}


def _date_text(data: bytes) -> bytes:
    """Days since 2000-01-01."""
    (days,) = unpack(_I32, data)
    if days in _INFINITE_DAYS:
        return _INFINITE_DAYS[days]
    date, era = _format_date(days)
    return f"{date}{era}".encode()


def _time_text(data: bytes) -> bytes:
    """Microseconds since midnight."""
    return _format_time(unpack(_I64, data)[0]).encode()


def _timetz_text(data: bytes) -> bytes:
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


def _interval_text(data: bytes) -> bytes:
    """Microseconds, days and months, each with its own sign. All at their extremes mean infinity."""
    return _INFINITE_INTERVALS.get(unpack(_INTERVAL, data)) or _finite_interval_text(data)


def _finite_interval_text(data: bytes) -> bytes:
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
    """Quotient and remainder with the sign of `number`, as in C."""
    quotient, rest = divmod(abs(number), by)
    return (quotient, rest) if number >= 0 else (-quotient, -rest)


def _format_parts(*parts: tuple[int, str]) -> str:
    return "".join([f"{number}{unit}" for number, unit in parts if number])


def _timestamp(zone: str) -> Converter:
    """Microseconds since 2000-01-01, in UTC if there is a zone."""

    def convert(data: bytes) -> bytes:
        (time,) = unpack(_I64, data)
        if time in _INFINITE_TIMES:
            return _INFINITE_TIMES[time]
        days, time = divmod(time, _DAY)
        date, era = _format_date(days)
        return f"{date} {_format_time(time)}{zone}{era}".encode()

    return convert


def _format_date(days: int) -> tuple[str, str]:
    """The date, and the suffix for years before Christ."""
    # Years are counted from March, so that the leap day is the last of its year.
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
        raise Damaged(f"is not a time of day: {time} microseconds")
    seconds, fraction = divmod(time, _SECOND)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}{_format_fraction(fraction)}"


def _format_fraction(microseconds: int) -> str:
    return f".{microseconds:06d}".rstrip("0") if microseconds else ""


SCALARS: Final[dict[str, Converter]] = {
    **dict.fromkeys(("name", "text", "bpchar", "varchar", "json_", "xml_", "enum_"), bytes),
    **dict.fromkeys(("jsonb_", "jsonpath_", "ltree:ltree_", "ltree:lquery_", "ltree:ltxtq_"), _versioned_text),
    **dict.fromkeys(("oid", "xid", "cid"), fixed("I", b"%d")),
    "bool": bool_text,
    "char": char_text,
    "int2": fixed("h", b"%d"),
    "int4": fixed("i", b"%d"),
    "int8": fixed("q", b"%d"),
    "xid8": fixed("Q", b"%d"),
    "float4": float4_text,
    "float8": doubles(b"%b"),
    "numeric_": numeric_text,
    "vector:vector_": vector("f"),
    "vector:halfvec_": vector("e"),
    "vector:sparsevec_": sparsevec_text,
    "bytea": _bytea_text,
    "bit_": _bits_text,
    "varbit_": _bits_text,
    "uuid_": lambda data: str(UUID(bytes=sized(data, 16))).encode(),
    "inet_": _network(always_bits=False),
    "cidr_": _network(always_bits=True),
    "macaddr_": lambda data: sized(data, 6).hex(":").encode(),
    "macaddr8_": lambda data: sized(data, 8).hex(":").encode(),
    "tid": fixed("IH", b"(%d,%d)"),
    "pg_lsn_": fixed("II", b"%X/%X"),
    "pg_snapshot_": _snapshot_text,
    "txid_snapshot_": _snapshot_text,  # until PostgreSQL 12
    "hstore:hstore_": _hstore_text,
    "date_": _date_text,
    "time_": _time_text,
    "timetz_": _timetz_text,
    "timestamp_": _timestamp(""),
    "timestamptz_": _timestamp("+00"),
    "interval_": _interval_text,
    "point_": doubles(b"(%b,%b)"),
    "line_": doubles(b"{%b,%b,%b}"),
    "lseg_": doubles(b"[(%b,%b),(%b,%b)]"),
    "box_": doubles(b"(%b,%b),(%b,%b)"),
    "circle_": doubles(b"<(%b,%b),%b>"),
    "path_": path_text,
    "poly_": polygon_text,
}
"""By the stem of a type's function names: `int4` for int4out and int4send."""

OLDER: Final[dict[str, tuple[int, Converter]]] = {
    "char": (150000, older_char_text),
    "interval_": (170000, _finite_interval_text),
}
"""Types that older versions wrote differently."""
