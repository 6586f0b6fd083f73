"""Takes one binary value apart, and writes numbers as PostgreSQL does.

Floats are written as the shortest decimals that read back as the same float, as in Ryu with PostgreSQL's one change:
never a decimal exactly between two floats, because some readers round it the wrong way. Python's repr does not have
that rule. Such a decimal has more digits than floats below 2**53 need, so only larger ones take the slow path.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

Converter = Callable[[bytes], bytes]

_I32 = struct.Struct("!i")


class Damaged(ValueError):
    """Bytes that do not fit the type. The message completes "value of type ..."."""


def sized(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise Damaged(f"has {len(data)} bytes, not {size}")
    return data


def unpack(form: struct.Struct, data: bytes) -> tuple[int, ...]:
    return form.unpack(sized(data, form.size))


class Reader:
    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def raw(self, size: int) -> bytes:
        at = self._advance(size)
        return self._data[at : at + size]

    def fields(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack_from(self._data, self._advance(form.size))

    def int32(self) -> int:
        number: int = _I32.unpack_from(self._data, self._advance(4))[0]
        return number

    def count(self, size: int) -> int:
        """The number of items that follow, each of at least `size` bytes."""
        count = self.int32()
        if not 0 <= count * size <= self.left:
            raise Damaged(f"claims {count} items in {self.left} bytes")
        return count

    def text(self) -> bytes:
        """Everything up to the next NUL, which is consumed."""
        end = self._data.find(0, self._at)
        if end < 0:
            raise Damaged("has a text without its NUL")
        text = self._data[self._at : end]
        self._at = end + 1
        return text

    def item(self) -> bytes | None:
        """The next nested value: its length and bytes, or NULL."""
        length = self.int32()
        if length == -1:
            return None
        if length < 0:
            raise Damaged(f"has a part of {length} bytes")
        return self.raw(length)

    def finish(self) -> None:
        """Raise if bytes are left."""
        if self.left:
            raise Damaged(f"is followed by {self.left} bytes")

    def _advance(self, size: int) -> int:
        at = self._at
        if size > len(self._data) - at:
            raise Damaged(f"is truncated: needs {size} bytes at {at}, {len(self._data) - at} are left")
        self._at = at + size
        return at


def fixed(form: str, text: bytes) -> Converter:
    """Converts integers of fixed size, formatted with `text`."""
    fields = struct.Struct(f"!{form}")
    return lambda data: text % unpack(fields, data)


def doubles(text: bytes) -> Converter:
    """Converts as many doubles as `text` has placeholders."""
    count = text.count(b"%b")
    return lambda data: text % tuple(_format_doubles(data, count))


def _format_doubles(data: bytes, count: int) -> list[bytes]:
    return [_format_float8(number) for number in struct.unpack(f"!{count}d", sized(data, 8 * count))]


# --- numbers

_NUMERIC = struct.Struct("!HhHH")
_VECTOR = struct.Struct("!HH")
_SPARSEVEC = struct.Struct("!iii")
_EXACT_INTEGERS = 2.0**53
_FLOAT4_FIXED, _FLOAT8_FIXED = 6, 15  # From this power of ten, floats are written with an exponent


def bool_text(data: bytes) -> bytes:
    return b"t" if sized(data, 1)[0] else b"f"


def char_text(data: bytes) -> bytes:
    """The type "char": one byte; empty for zero, octal if it is not ASCII."""
    byte = sized(data, 1)[0]
    return data if 0 < byte < 0x80 else b"\\%03o" % byte if byte else b""


def older_char_text(data: bytes) -> bytes:
    """The type "char" before PostgreSQL 15: the byte unchanged."""
    return data if char_text(data) else b""


def float4_text(data: bytes) -> bytes:
    return _format_float4(struct.unpack("!f", sized(data, 4))[0])


def _format_float8(value: float) -> bytes:
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


def _format_float4(value: float) -> bytes:
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
    """Digits and power of ten of the shortest decimal that is closer to `value` than to any other float of `bits` bits.
    `lowest` is the power of two of the smallest float's last bit. Exact integer arithmetic, in quarters of the last bit."""
    fraction, power = math.frexp(abs(value))
    power = max(power - bits, lowest)
    mantissa = int(math.ldexp(abs(value), -power)) if fraction else 0
    # Below a power of two floats are twice as dense.
    dense = mantissa == 1 << (bits - 1) and power > lowest
    middle, low, high = 4 * mantissa, 4 * mantissa - (1 if dense else 2), 4 * mantissa + 2
    power -= 2
    # Start with one digit more than certainly fits the interval, and go down to the first that does.
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
    """With an exponent for very large and very small numbers, otherwise without."""
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
    """A numeric: groups of four decimal digits, and the number of digits shown after the point."""
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


def sparsevec_text(data: bytes) -> bytes:
    """pgvector's sparsevec."""
    reader = Reader(data)
    size, count, _ = reader.fields(_SPARSEVEC)
    if not 0 <= count * 8 == reader.left:
        raise Damaged(f"claims {count} items in {reader.left} bytes")
    indices = struct.unpack(f"!{count}i", reader.raw(4 * count))
    values = struct.unpack(f"!{count}f", reader.raw(4 * count))
    pairs = [b"%d:%b" % (index + 1, _format_float4(value)) for index, value in zip(indices, values, strict=True)]
    return b"{%b}/%d" % (b",".join(pairs), size)


def vector(form: str) -> Converter:
    """pgvector's vector and halfvec: elements of both are written as four-byte floats."""

    def convert(data: bytes) -> bytes:
        reader = Reader(data)
        count, _ = reader.fields(_VECTOR)
        numbers = reader.fields(struct.Struct(f"!{count}{form}"))
        reader.finish()
        return b"[%b]" % b",".join(map(_format_float4, numbers))

    return convert


# --- paths and polygons

_POINT_BYTES = 16


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
    numbers = iter(_format_doubles(raw, 2 * count))
    return b",".join([b"(%b,%b)" % point for point in zip(numbers, numbers, strict=True)])
