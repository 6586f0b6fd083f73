"""Texts, bytes, bits, dates and times, network addresses and the server's own identifiers."""

from __future__ import annotations

import struct

from pgcdc.source.postgres.wire.binary.reader import Damaged, Reader, unpack

_INET = struct.Struct("!BBBB")
_TID = struct.Struct("!IH")
_LSN = struct.Struct("!II")
_SNAPSHOT = struct.Struct("!qq")
_FAMILIES = {2: 4, 3: 16}
"""How many bytes an address has: IPv4, IPv6."""


def plain_text(data: bytes) -> bytes:
    """Types that are sent as they are written."""
    return data


def versioned_text(data: bytes) -> bytes:
    """jsonb, jsonpath, ltree: a version, and what is written."""
    if data[:1] != b"\x01":
        raise Damaged(f"is not of version 1 but {data[0] if data else 'empty'}")
    return data[1:]


def bytea_text(data: bytes) -> bytes:
    """Hexadecimal, as bytea_output says."""
    return b"\\x" + data.hex().encode()


def bits_text(data: bytes) -> bytes:
    """bit and varbit: how many bits, and the bits from the left."""
    reader = Reader(data)
    count = reader.int32()
    if count < 0 or reader.left != (count + 7) // 8:
        raise Damaged(f"claims {count} bits in {reader.left} bytes")
    raw = reader.raw(reader.left)
    # In pieces: the text of one huge number would take quadratic time.
    return b"".join([_BYTES_AS_BITS[byte] for byte in raw])[:count]


_BYTES_AS_BITS = [f"{byte:08b}".encode() for byte in range(256)]


def uuid_text(data: bytes) -> bytes:
    """A UUID."""
    if len(data) != 16:
        raise Damaged(f"has {len(data)} bytes, not 16")
    text = data.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:])).encode()


def macaddr_text(data: bytes) -> bytes:
    """A MAC address of 6 bytes."""
    return _format_mac(data, 6)


def macaddr8_text(data: bytes) -> bytes:
    """A MAC address of 8 bytes."""
    return _format_mac(data, 8)


def _format_mac(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise Damaged(f"has {len(data)} bytes, not {size}")
    return data.hex(":").encode()


def inet_text(data: bytes) -> bytes:
    """A host, with the bits of its network unless it stands alone."""
    return _format_network(data, always_bits=False)


def cidr_text(data: bytes) -> bytes:
    """A network."""
    return _format_network(data, always_bits=True)


def _format_network(data: bytes, *, always_bits: bool) -> bytes:
    reader = Reader(data)
    family, bits, _, size = reader.fields(_INET)
    if _FAMILIES.get(family) != size or bits > 8 * size:
        raise Damaged(f"has an unknown address: family {family}, {size} bytes, {bits} bits")
    address = reader.raw(size)
    reader.finish()
    text = _format_ipv4(address) if size == 4 else _format_ipv6(address)
    if always_bits or bits != 8 * size:
        text += f"/{bits}"
    return text.encode()


def _format_ipv4(address: bytes) -> str:
    return ".".join(map(str, address))


def _format_ipv6(address: bytes) -> str:
    """With :: for the first longest run of zeros; an IPv4 address at the end of one is written as such."""
    words = struct.unpack("!8H", address)
    start, length = max(((at, _count_zeros(words, at)) for at in range(8)), key=lambda run: run[1])
    if length < 2:
        return ":".join(f"{word:x}" for word in words)
    if start == 0 and (length == 6 or (length == 5 and words[5] == 0xFFFF)):
        return f"::{'ffff:' if length == 5 else ''}{_format_ipv4(address[12:])}"
    head, tail = words[:start], words[start + length :]
    return f"{':'.join(f'{word:x}' for word in head)}::{':'.join(f'{word:x}' for word in tail)}"


def _count_zeros(words: tuple[int, ...], start: int) -> int:
    end = start
    while end < len(words) and words[end] == 0:
        end += 1
    return end - start


def tid_text(data: bytes) -> bytes:
    """The place of a row: block and item."""
    return b"(%d,%d)" % unpack(_TID, data)


def lsn_text(data: bytes) -> bytes:
    """A position in the WAL."""
    return b"%X/%X" % unpack(_LSN, data)


def snapshot_text(data: bytes) -> bytes:
    """pg_snapshot and txid_snapshot: xmin, xmax and the transactions in progress."""
    reader = Reader(data)
    count = reader.int32()
    xmin, xmax = reader.fields(_SNAPSHOT)
    if count < 0 or reader.left != 8 * count:
        raise Damaged(f"claims {count} transactions in {reader.left} bytes")
    running = struct.unpack(f"!{count}q", reader.raw(reader.left))
    return b"%d:%d:%b" % (xmin, xmax, b",".join([b"%d" % xid for xid in running]))


def hstore_text(data: bytes) -> bytes:
    """hstore: pairs of texts, of which the value may be NULL."""
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
