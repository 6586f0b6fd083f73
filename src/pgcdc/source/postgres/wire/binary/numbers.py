"""Numbers as PostgreSQL writes them.

Floats are the shortest decimals that read back as the same float, as Ryu finds them with one change of PostgreSQL's:
never one that lies exactly between two floats, because some readers round that the wrong way. Python's repr has no such
rule. Such a decimal needs more digits than a float of less than 2**53 is given, so only larger ones take the long way.
"""

from __future__ import annotations

import math
import struct

from pgcdc.source.postgres.wire.binary.reader import Damaged, Reader, unpack

_I16, _I32, _I64 = struct.Struct("!h"), struct.Struct("!i"), struct.Struct("!q")
_U32, _U64 = struct.Struct("!I"), struct.Struct("!Q")
_NUMERIC = struct.Struct("!HhHH")
_VECTOR = struct.Struct("!HH")
_SPARSEVEC = struct.Struct("!iii")
_FLOAT4, _FLOAT8 = struct.Struct("!f"), struct.Struct("!d")

_EXACT_INTEGERS = 2.0**53
_FLOAT4_FIXED, _FLOAT8_FIXED = 6, 15
"""From this power of ten on a float has an exponent."""


def bool_text(data: bytes) -> bytes:
    """t or f."""
    if len(data) != 1:
        raise Damaged(f"has {len(data)} bytes, not 1")
    return b"t" if data[0] else b"f"


def char_text(data: bytes) -> bytes:
    """The type "char": one byte, nothing for zero, octal if it is not ASCII."""
    if len(data) != 1:
        raise Damaged(f"has {len(data)} bytes, not 1")
    return data if 0 < data[0] < 0x80 else b"\\%03o" % data[0] if data[0] else b""


def older_char_text(data: bytes) -> bytes:
    """The type "char" before PostgreSQL 15: the byte as it is."""
    return data if char_text(data) else b""


def int2_text(data: bytes) -> bytes:
    """A smallint."""
    return b"%d" % unpack(_I16, data)[0]


def int4_text(data: bytes) -> bytes:
    """An integer."""
    return b"%d" % unpack(_I32, data)[0]


def int8_text(data: bytes) -> bytes:
    """A bigint."""
    return b"%d" % unpack(_I64, data)[0]


def uint32_text(data: bytes) -> bytes:
    """oid, xid, cid."""
    return b"%d" % unpack(_U32, data)[0]


def uint64_text(data: bytes) -> bytes:
    """xid8."""
    return b"%d" % unpack(_U64, data)[0]


def float4_text(data: bytes) -> bytes:
    """A real."""
    return format_float4(unpack(_FLOAT4, data)[0])


def float8_text(data: bytes) -> bytes:
    """A double precision."""
    return format_float8(unpack(_FLOAT8, data)[0])


def format_float8(value: float) -> bytes:
    """A double as float8out writes it."""
    if not math.isfinite(value):
        return _name_special(value)
    if abs(value) >= _EXACT_INTEGERS:
        digits, exponent = _find_shortest(value, 53, -1074)
    else:
        mantissa, _, power = repr(abs(value)).partition("e")
        whole, _, fraction = mantissa.partition(".")
        digits = whole + fraction
        exponent = int(power or 0) - len(fraction)
    return _layout(value, digits, exponent, _FLOAT8_FIXED)


def format_float4(value: float) -> bytes:
    """A double that is a float as float4out writes it."""
    if not math.isfinite(value):
        return _name_special(value)
    if value == 0:
        return _layout(value, "0", 0, _FLOAT4_FIXED)
    digits, exponent = _find_shortest(value, 24, -149)
    return _layout(value, digits, exponent, _FLOAT4_FIXED)


def _name_special(value: float) -> bytes:
    return b"NaN" if math.isnan(value) else b"Infinity" if value > 0 else b"-Infinity"


def _find_shortest(value: float, bits: int, lowest: int) -> tuple[str, int]:
    """Digits and power of ten of the shortest decimal that only `value` is nearest to, of floats of `bits` bits.

    `lowest` is the power of two that the last bit of the smallest float has. Exact, by integers: all quantities are in
    quarters of the last bit.
    """
    fraction, power = math.frexp(abs(value))
    power = max(power - bits, lowest)
    mantissa = int(math.ldexp(abs(value), -power)) if fraction else 0
    # Below a power of two floats are twice as dense.
    dense = mantissa == 1 << (bits - 1) and power > lowest
    middle, low, high = 4 * mantissa, 4 * mantissa - (1 if dense else 2), 4 * mantissa + 2
    power -= 2
    # One more than the decimals that surely fit into the interval; then down to the first that does.
    exponent = math.floor(math.log10(high - low) + power * math.log10(2)) + 2
    while True:
        scale, unit = (1 << power, 1) if power > 0 else (1, 1 << -power)
        if exponent > 0:
            unit *= 10**exponent
        else:
            scale *= 10**-exponent
        whole, rest = divmod(middle * scale, unit)
        whole += 2 * rest > unit or (2 * rest == unit and whole % 2 == 1)
        if whole * unit <= low * scale:
            whole += 1
        if low * scale < whole * unit < high * scale:
            return str(whole), exponent
        exponent -= 1


def _layout(value: float, digits: str, exponent: int, fixed: int) -> bytes:
    """With an exponent for the very large and the very small, else without."""
    digits = digits.lstrip("0")
    stripped = digits.rstrip("0")
    exponent += len(digits) - len(stripped)
    sign = "-" if math.copysign(1.0, value) < 0 else ""
    if not stripped:
        return f"{sign}0".encode()
    point = len(stripped) + exponent
    if not -4 < point <= fixed:
        tail = f".{stripped[1:]}" if len(stripped) > 1 else ""
        return f"{sign}{stripped[0]}{tail}e{point - 1:+03d}".encode()
    if point <= 0:
        return f"{sign}0.{'0' * -point}{stripped}".encode()
    if point >= len(stripped):
        return f"{sign}{stripped}{'0' * (point - len(stripped))}".encode()
    return f"{sign}{stripped[:point]}.{stripped[point:]}".encode()


_NUMERIC_SPECIAL = {0xC000: b"NaN", 0xD000: b"Infinity", 0xF000: b"-Infinity"}


def numeric_text(data: bytes) -> bytes:
    """A numeric: groups of four decimal digits, and how many digits are shown after the point."""
    reader = Reader(data)
    count, weight, sign, scale = reader.fields(_NUMERIC)
    raw = reader.raw(2 * count)
    reader.finish()
    if sign in _NUMERIC_SPECIAL:
        return _NUMERIC_SPECIAL[sign]
    if sign not in {0, 0x4000}:
        raise Damaged(f"has an unknown sign: {sign:#06x}")
    groups = struct.unpack(f"!{count}H", raw)
    if groups and max(groups) > 9999:
        raise Damaged(f"has a group of digits above 9999: {max(groups)}")
    digits = "".join([f"{group:04d}" for group in groups])
    point = 4 * (weight + 1)
    whole = digits[:point].ljust(point, "0").lstrip("0") if point > 0 else ""
    text = ("-" if sign else "") + (whole or "0")
    if scale:
        fraction = digits[point:] if point >= 0 else "0" * min(-point, scale) + digits
        text += "." + fraction[:scale].ljust(scale, "0")
    return text.encode()


def vector_text(data: bytes) -> bytes:
    """pgvector's vector."""
    return _format_vector(data, 4, "f")


def halfvec_text(data: bytes) -> bytes:
    """pgvector's halfvec: its elements are written as floats of four bytes."""
    return _format_vector(data, 2, "e")


def sparsevec_text(data: bytes) -> bytes:
    """pgvector's sparsevec."""
    reader = Reader(data)
    size, count, _ = reader.fields(_SPARSEVEC)
    if not 0 <= count * 8 == reader.left:
        raise Damaged(f"claims {count} items in {reader.left} bytes")
    indices = struct.unpack(f"!{count}i", reader.raw(4 * count))
    values = struct.unpack(f"!{count}f", reader.raw(4 * count))
    pairs = [b"%d:%b" % (index + 1, format_float4(value)) for index, value in zip(indices, values, strict=True)]
    return b"{%b}/%d" % (b",".join(pairs), size)


def _format_vector(data: bytes, size: int, form: str) -> bytes:
    reader = Reader(data)
    count, _ = reader.fields(_VECTOR)
    raw = reader.raw(size * count)
    reader.finish()
    return b"[%b]" % b",".join([format_float4(value) for value in struct.unpack(f"!{count}{form}", raw)])


# --- geometric types: floats with the brackets of their kind

_POINT_BYTES = 16


def point_text(data: bytes) -> bytes:
    """(x,y)"""
    return b"(%b,%b)" % tuple(_format_floats(data, 2))


def line_text(data: bytes) -> bytes:
    """{A,B,C}"""
    return b"{%b,%b,%b}" % tuple(_format_floats(data, 3))


def lseg_text(data: bytes) -> bytes:
    """[(x,y),(x,y)]"""
    return b"[(%b,%b),(%b,%b)]" % tuple(_format_floats(data, 4))


def box_text(data: bytes) -> bytes:
    """(x,y),(x,y)"""
    return b"(%b,%b),(%b,%b)" % tuple(_format_floats(data, 4))


def circle_text(data: bytes) -> bytes:
    """<(x,y),r>"""
    return b"<(%b,%b),%b>" % tuple(_format_floats(data, 3))


def path_text(data: bytes) -> bytes:
    """((x,y),...) if it is closed, else [(x,y),...]"""
    closed, points = data[:1], _format_points(data[1:])
    if closed not in {b"\0", b"\1"}:
        raise Damaged(f"is neither open nor closed: {closed!r}")
    return b"(%b)" % points if closed == b"\1" else b"[%b]" % points


def polygon_text(data: bytes) -> bytes:
    """((x,y),...)"""
    return b"(%b)" % _format_points(data)


def _format_points(data: bytes) -> bytes:
    reader = Reader(data)
    count = reader.count(_POINT_BYTES)
    raw = reader.raw(count * _POINT_BYTES)
    reader.finish()
    numbers = iter(_format_floats(raw, 2 * count))
    return b",".join([b"(%b,%b)" % point for point in zip(numbers, numbers, strict=True)])


def _format_floats(data: bytes, count: int) -> list[bytes]:
    if len(data) != 8 * count:
        raise Damaged(f"has {len(data)} bytes, not {8 * count}")
    return [format_float8(number) for number in struct.unpack(f"!{count}d", data)]
