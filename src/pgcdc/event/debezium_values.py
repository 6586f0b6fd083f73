"""Values as Debezium's PostgreSQL connector writes them by default. A value is PostgreSQL's text plus its type
(`event.shape`). Text that does not match its type becomes a JSON string."""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.event.lines import quote_json
from pgcdc.event.shape import Family, TableShape, ValueType, column_types

UNAVAILABLE = "__debezium_unavailable_value"
_STRING = f'"{UNAVAILABLE}"'
_BASE64 = f'"{base64.b64encode(UNAVAILABLE.encode()).decode()}"'
_BYTES = f"[{','.join(str(byte) for byte in UNAVAILABLE.encode())}]"
_PLACEHOLDERS = {
    (Family.TEXT, False): _STRING,
    (Family.BYTES, False): _BASE64,
    (Family.TEXT, True): f"[{_STRING}]",
    (Family.BYTES, True): f"[{_BASE64}]",
    (Family.INTEGER, True): _BYTES,
    (Family.DATE, True): _BYTES,
    (Family.HSTORE, False): quote_json(f"{{{_STRING}:{_STRING}}}"),
}
_ZEROS = {
    **dict.fromkeys((Family.INTEGER, Family.DATE, Family.TIME, Family.TIMESTAMP, Family.INTERVAL), "0"),
    **dict.fromkeys((Family.DOUBLE, Family.FLOAT), "0.0"),
    **dict.fromkeys((Family.BOOLEAN, Family.BIT), "false"),
    **dict.fromkeys((Family.NUMERIC, Family.MONEY), '"AA=="'),
    Family.NUMBER: '{"scale":0,"value":"AA=="}',
    Family.TIMESTAMPTZ: '"1970-01-01T00:00:00Z"',
    Family.TIMETZ: '"00:00:00Z"',
    Family.HSTORE: '"{}"',
    **dict.fromkeys((Family.VECTOR, Family.HALFVEC), "[]"),
    Family.POINT: '{"x":0.0,"y":0.0,"wkb":"AQEAAAAAAAAAAAAAAAAAAAAAAAAA","srid":null}',
    Family.SPARSEVEC: "null",
}
_MAX, _MIN = 2**63 - 1, -(2**63)


def placeholder(kind: ValueType) -> str:
    """The placeholder for an unchanged value that was not sent; empty where Debezium has none."""
    return _PLACEHOLDERS.get((kind.family, kind.is_array), "")


def absent(kind: ValueType) -> str:
    """The value of columns outside the key in a key-only old row: null, or a zero value where NOT NULL. Empty: omitted."""
    if kind.family is Family.OTHER:
        return ""
    if not kind.is_required:
        return "null"
    return "[]" if kind.is_array else _ZEROS.get(kind.family, '""')


def json_texts(values: pa.Array, kind: ValueType) -> pa.Array:
    """One column's values as JSON; null stays null. Equal values, which are often adjacent, are written once."""
    encoded = pc.dictionary_encode(values)
    written = [write_value(text, kind) for text in encoded.dictionary.to_pylist()]
    return pa.array(written, pa.string()).take(encoded.indices)


def write_value(text: str, kind: ValueType) -> str:
    if not kind.is_array:
        return _write_scalar(text, kind)
    if not _ONE_DIMENSION.match(text):  # several dimensions, or not an array after a transform
        return quote_json(text)
    return f"[{','.join('null' if one is None else _write_scalar(one, kind) for one in _elements(text))}]"


def write_key(row: Mapping[str, str | None] | None, shape: TableShape) -> str | None:
    """Debezium's message key for this row; None: its table has no key."""
    if row is None or not shape.key:
        return None
    names = [column.name for column in shape.relation.columns]
    types = dict(zip(names, column_types(shape.relation, shape.details), strict=True))
    fields = []
    for name in shape.key:
        kind, value = types[name], row.get(name)
        if name not in row:
            fields.append(f"{quote_json(name)}:{absent(kind)}")
        elif kind.family is not Family.OTHER:
            fields.append(f"{quote_json(name)}:{'null' if value is None else write_value(value, kind)}")
    return f"{{{','.join(fields)}}}"


def _write_scalar(text: str, kind: ValueType) -> str:
    try:
        return _WRITERS[kind.family](text, kind.digits)
    except (ValueError, KeyError, IndexError, OverflowError):
        return quote_json(text)


# --- numbers


def _integer(text: str, _: int) -> str:
    number = int(text)
    if not _MIN <= number <= _MAX:
        raise ValueError(text)
    return str(number)


def _double(text: str, single: bool = False) -> str:
    """A number as Java writes it; JSON has no NaN and no infinity."""
    if text in ("NaN", "Infinity", "-Infinity"):
        return f'"{text}"'
    if "n" in text.lower():
        raise ValueError(text)
    number = np.float32(text) if single else float(text)
    shown = str(number)
    size = abs(float(shown))
    if math.isinf(size):
        return '"Infinity"' if float(shown) > 0 else '"-Infinity"'
    if size == 0 or 1e-3 <= size < 1e7:
        return shown if "." in shown else f"{float(shown)!r}"
    if len(shown.rstrip("0").partition("e")[0].strip("-.")) == 1:  # Java writes two digits for the smallest numbers
        shown = f"{float(number):.1e}"
    sign, figures, exponent = Decimal(shown).as_tuple()
    significant = "".join(map(str, figures)).rstrip("0") or "0"
    power = int(exponent) + len(figures) - 1
    return f"{'-' if sign else ''}{significant[0]}.{significant[1:] or '0'}E{power}"


def _base64(data: bytes) -> str:
    return f'"{base64.b64encode(data).decode()}"'


def _base64_number(digits: str) -> str:
    """The bytes of an integer: as few as possible, big-endian, two's complement."""
    if not re.fullmatch("-?[0-9]+", digits, re.ASCII):
        raise ValueError(digits)
    number = int(digits)
    bits = (number if number >= 0 else ~number).bit_length()
    return _base64(number.to_bytes(bits // 8 + 1, signed=True))


def _numeric(text: str, _: int) -> str:
    return "null" if text in ("NaN", "Infinity", "-Infinity") else _base64_number(text.replace(".", ""))


def _number(text: str, _: int) -> str:
    """A numeric without a declared scale uses the scale it needs."""
    if text in ("NaN", "Infinity", "-Infinity"):
        return "null"
    plain = text.rstrip("0").rstrip(".") if "." in text else text
    return f'{{"scale":{len(plain.partition(".")[2])},"value":{_base64_number(plain.replace(".", ""))}}}'


def _money(text: str, _: int) -> str:
    return _base64_number(("-" if text.startswith("(") else "") + re.sub("[^0-9-]", "", text))


# --- times


_TIMESTAMP = re.compile(r"([0-9]{4,})-([0-9]{2})-([0-9]{2})(?: ([0-9:.]+))?( BC)?", re.ASCII)
_TIME = re.compile(r"([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{1,6}))?", re.ASCII)


def _days(text: re.Match[str]) -> int:
    """Days since 1970, in the proleptic Gregorian calendar."""
    year = int(text[1])
    year = 1 - year if text[5] else year
    month, day = int(text[2]), int(text[3])
    shifted = year - (month <= 2)
    era, of_era = divmod(shifted, 400)
    of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468


def _match(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    found = pattern.fullmatch(text)
    if found is None:
        raise ValueError(text)
    return found


def _micros(text: str) -> int:
    """Microseconds of a time of day."""
    found = _match(_TIME, text)
    seconds = int(found[1]) * 3600 + int(found[2]) * 60 + int(found[3])
    return seconds * 1_000_000 + int((found[4] or "").ljust(6, "0"))


def _date(text: str, _: int) -> str:
    special = {"infinity": "-2147472692", "-infinity": "-2147472691"}.get(text)
    return special or str(_days(_match(_TIMESTAMP, text)))


def _timestamp(text: str, digits: int) -> str:
    """A timestamp since 1970. The last years do not fit into 64 bits."""
    special = {"infinity": 9223372036825200000, "-infinity": -9223372036832400000}.get(text)
    if special is None:
        found = _match(_TIMESTAMP, text)
        special = min(_days(found) * 86_400_000_000 + _micros(found[4] or ""), _MAX)
    return str(special) if digits > 3 else str(-(-special // 1000) if special < 0 else special // 1000)


def _timestamptz(text: str, digits: int) -> str:
    """ISO 8601 in UTC, the session's zone. Years as in Java: 1 BC is 0, 44 BC is -43."""
    if text in ("infinity", "-infinity"):
        return f'"{text}"'
    if "+00" not in text:
        raise ValueError(text)
    found = _match(_TIMESTAMP, text.replace("+00", ""))
    whole, _, fraction = (found[4] or "").partition(".")
    year = f"-{int(found[1]) - 1:04}" if found[5] else f"+{found[1]}" if len(found[1]) > 4 else found[1]
    shown = f".{fraction.ljust(digits, '0')[:digits]}" if digits else ""
    return f'"{year}-{found[2]}-{found[3]}T{whole}{shown}Z"'


def _time(text: str, digits: int) -> str:
    micros = _micros(text)
    return str(micros if digits > 3 else micros // 1000)


def _timetz(text: str, _: int) -> str:
    """A time with time zone, converted to UTC."""
    found = _match(re.compile(r"([0-9:]{8})(\.[0-9]+)?([+-])([0-9:]+)", re.ASCII), text)
    offset = _micros((found[4] + ":00:00")[:8]) * (-1 if found[3] == "-" else 1)
    seconds = (_micros(found[1]) - offset) // 1_000_000 % 86_400
    return f'"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{found[2] or ""}Z"'


_INTERVAL = re.compile(
    r"P(?:(-?[0-9]+)Y)?(?:(-?[0-9]+)M)?(?:(-?[0-9]+)D)?(?:T(?:(-?[0-9]+)H)?(?:(-?[0-9]+)M)?(?:(-?[0-9.]+)S)?)?",
    re.ASCII,
)
_SECONDS = (31_557_600, 2_629_800, 86_400, 3600, 60, 1)
"""Seconds in each part of an interval: a month is a twelfth of 365.25 days."""


def _interval(text: str, _: int) -> str:
    """An interval in microseconds, limited to 64 bits."""
    if text in ("infinity", "-infinity"):
        return "0"
    parts = zip(_match(_INTERVAL, text).groups(), _SECONDS, strict=True)
    micros = int(sum(Decimal(part) * seconds for part, seconds in parts if part) * 1_000_000)
    return str(max(min(micros, _MAX), _MIN))


# --- the rest


def _bits(text: str, _: int) -> str:
    """A bit string as bytes, least significant first, without trailing zeros."""
    if text.strip("01"):
        raise ValueError(text)
    bits = text.lstrip("0")
    return _base64(int(bits or "0", 2).to_bytes((len(bits) + 7) // 8, "little"))


def _bytes(text: str, _: int) -> str:
    if not text.startswith("\\x"):
        raise ValueError(text)
    return _base64(bytes.fromhex(text[2:]))


_QUOTED = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_PAIR = re.compile(f"({_QUOTED})=>({_QUOTED}|NULL)", re.DOTALL)
_ONE_DIMENSION = re.compile(r"(\[[^=]*=)?\{[^{]")
_ELEMENT = re.compile(f"{_QUOTED}|[^,{{}}]+", re.DOTALL)


def _unquote(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1], flags=re.DOTALL)


def _hstore(text: str, _: int) -> str:
    """hstore as a JSON object, in a string."""
    if text and not text.startswith('"'):
        raise ValueError(text)
    pairs = (
        f"{quote_json(_unquote(key))}:{quote_json(None if value == 'NULL' else _unquote(value))}"
        for key, value in _PAIR.findall(text)
    )
    return quote_json(f"{{{','.join(pairs)}}}")


def _point(text: str, _: int) -> str:
    """A point, also as WKB: byte order, the type number of a point, and two doubles."""
    x, y = text.strip("()").split(",")
    wkb = base64.b64encode(struct.pack("<BIdd", 1, 1, float(x), float(y))).decode()
    return f'{{"x":{_double(x)},"y":{_double(y)},"wkb":"{wkb}","srid":null}}'


def _vector(text: str, _: int, *, single: bool = False) -> str:
    if not (text.startswith("[") and text.endswith("]")):
        raise ValueError(text)
    return f"[{','.join(_double(one, single) for one in text[1:-1].split(','))}]"


_SPARSE = re.compile(r"\{((?:[0-9]+:[-+.0-9eE]+)(?:,[0-9]+:[-+.0-9eE]+)*)?\}/([0-9]+)", re.ASCII)


def _sparse(text: str, _: int) -> str:
    found = _match(_SPARSE, text)
    pairs = (one.split(":") for one in (found[1] or "").split(",") if one)
    return f'{{"dimensions":{found[2]},"vector":[{",".join(f"[{place},{_double(value)}]" for place, value in pairs)}]}}'


def _elements(text: str) -> list[str | None]:
    body = text[text.index("=") + 1 :] if text.startswith("[") else text
    if body == "{}":
        return []
    parts = _ELEMENT.findall(body) if '"' in body else body[1:-1].split(",")
    return [None if one == "NULL" else _unquote(one) if one.startswith('"') else one for one in parts]


def _text(text: str, _: int) -> str:
    return quote_json(text)


_WRITERS: dict[Family, Callable[[str, int], str]] = {
    Family.TEXT: _text,
    Family.UUID: _text,
    Family.INTEGER: _integer,
    Family.BOOLEAN: lambda text, _: {"t": "true", "f": "false"}[text],
    Family.DOUBLE: lambda text, _: _double(text),
    Family.FLOAT: lambda text, _: _double(text, single=True),
    Family.NUMERIC: _numeric,
    Family.NUMBER: _number,
    Family.MONEY: _money,
    Family.TIMESTAMPTZ: _timestamptz,
    Family.TIMESTAMP: _timestamp,
    Family.DATE: _date,
    Family.TIME: _time,
    Family.TIMETZ: _timetz,
    Family.INTERVAL: _interval,
    Family.BYTES: _bytes,
    Family.BIT: lambda text, _: {"1": "true", "0": "false", "": "null"}[text],
    Family.BITS: _bits,
    Family.HSTORE: _hstore,
    Family.POINT: _point,
    Family.VECTOR: _vector,
    Family.HALFVEC: partial(_vector, single=True),
    Family.SPARSEVEC: _sparse,
}
