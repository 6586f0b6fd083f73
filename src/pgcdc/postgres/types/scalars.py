"""Columns of single values, converted a whole column at a time with pyarrow's casts.

PostgreSQL writes values in a session with our settings, so a cast may accept more than PostgreSQL ever writes. It must
never round, truncate or guess. Each cast here was checked for that; where pyarrow would do so, our own code converts
instead.
"""

from __future__ import annotations

import binascii
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.postgres.types.column import Exactness, Rejected, spark_name, validity

if TYPE_CHECKING:
    from pyspark.sql.types import VariantVal

_SHOWN = 40
_BOOLS = pa.array([b"f", b"t"], pa.binary())


@dataclass(frozen=True, slots=True)
class Scalar:
    """Defaults that all types of single values share."""

    arrow: pa.DataType
    exactness: Exactness = Exactness.EXACT
    rule: str = ""


class Text(Scalar):
    """The value is PostgreSQL's text."""

    __slots__ = ()

    def convert(self, values: pa.Array) -> pa.Array:
        """The same bytes, which must be valid UTF-8."""
        return _cast(values, lambda some: some.cast(pa.string()), self._refuse)

    def _refuse(self, index: int, value: bytes) -> Rejected:
        return Rejected(index, "the text is not valid UTF-8", "Repair it, or keep such bytes in a column of type bytea")


class Numbers(Scalar):
    """Integers and floats. pyarrow picks the nearest float, as PostgreSQL intended."""

    __slots__ = ()

    def convert(self, values: pa.Array) -> pa.Array:
        """Convert to numbers."""
        return _cast(values, lambda some: some.cast(self.arrow), self._refuse)

    def _refuse(self, index: int, value: bytes) -> Rejected:
        return Rejected(index, f"{shorten(value)} is not a value of Spark's {spark_name(self.arrow)}")


class Decimals(Numbers):
    """numeric with a precision that Spark supports. The cast refuses digits that do not fit."""

    __slots__ = ()

    def _refuse(self, index: int, value: bytes) -> Rejected:
        return Rejected(
            index,
            f"{shorten(value)} does not fit Spark's {spark_name(self.arrow)}",
            "Read numeric columns as text or as doubles: numeric=string, numeric=double",
        )


class Nearest(Numbers):
    """numeric as the nearest double. Refuses numbers that are too large, which would silently become infinity."""

    __slots__ = ()

    def convert(self, values: pa.Array) -> pa.Array:
        """Convert to the nearest doubles."""
        doubles = Numbers.convert(self, values)
        infinite = pc.is_inf(doubles)
        if pc.any(infinite).as_py():
            meant = pc.ends_with(values, b"Infinity")
            index = pc.index(pc.and_not(infinite, meant), True).as_py()
            if index >= 0:
                reason = f"{shorten(values[index].as_py())} is too large for a double"
                raise Rejected(index, reason, "Read numeric columns as text: numeric=string")
        return doubles


class Bits(Scalar):
    """bool: `t` and `f`, which pyarrow's casts do not read."""

    __slots__ = ()

    def convert(self, values: pa.Array) -> pa.Array:
        """Convert to booleans."""
        found = pc.index_in(values, value_set=_BOOLS)
        if found.null_count != values.null_count:
            index = pc.index(pc.and_(found.is_null(), values.is_valid()), True).as_py()
            raise Rejected(index, f"{shorten(values[index].as_py())} is not a boolean")
        return found.cast(pa.bool_())


class Bytes(Scalar):
    r"""bytea, written as `\x` and two hexadecimal digits per byte."""

    __slots__ = ()

    def convert(self, values: pa.Array) -> pa.Array:
        """The bytes; all values are decoded with one call."""
        if not len(values):
            return values
        filled = values.fill_null(b"\\x") if values.null_count else values
        _, ends, data = filled.buffers()
        offsets = np.frombuffer(ends, np.int32, len(filled) + 1, filled.offset * 4)
        text = data.slice(offsets[0], offsets[-1] - offsets[0]).to_pybytes() if data else b""
        try:
            # A backslash is not a digit: if there are as many prefixes as values and each value starts with one, none
            # is inside.
            if text.count(b"\\x") != len(filled) or not pc.all(pc.starts_with(filled, b"\\x")).as_py():
                raise ValueError
            decoded = binascii.unhexlify(text.replace(b"\\x", b""))
            sizes = np.diff(offsets) - 2
            if (sizes & 1).any():
                raise ValueError
        except ValueError:
            index = first_refused(values, _unhexlify)
            raise Rejected(index, f"{shorten(values[index].as_py())} is not bytea in hex form") from None
        starts = np.zeros(len(filled) + 1, np.int32)
        np.cumsum(sizes // 2, out=starts[1:])
        valid = validity(values)
        return pa.BinaryArray.from_buffers(
            pa.binary(), len(values), [valid, pa.py_buffer(starts), pa.py_buffer(decoded)], values.null_count
        )


@dataclass(frozen=True, slots=True)
class Moments(Scalar):
    """Dates and timestamps of the years 1 to 9999, the range that Spark supports."""

    clamp: bool = False  # Values outside become the first or the last moment of those years

    def convert(self, values: pa.Array) -> pa.Array:
        """Convert to days or microseconds."""
        text = values.view(pa.string())
        try:
            return text.cast(self.arrow)
        except pa.ArrowInvalid:
            pass
        before = pc.or_(pc.ends_with(text, " BC"), pc.equal(text, "-infinity"))
        after = pc.or_(pc.equal(text, "infinity"), pc.match_substring_regex(text, "^[0-9]{5,}-"))
        outside = pc.or_(before, after)
        if not self.clamp and pc.any(outside).as_py():
            index = pc.index(outside, True).as_py()
            shown = shorten(values[index].as_py())
            raise Rejected(
                index,
                f"{shown} is outside the years 1 to 9999, the range of Spark's {spark_name(self.arrow)}",
                "Clamp such values, or read dates and timestamps as text: out_of_range=clamp, out_of_range=string",
            )
        first, last = self._limits()
        inside = pc.if_else(before, first, pc.if_else(after, last, text))
        return _cast(inside, lambda some: some.cast(self.arrow), self._refuse)

    def _limits(self) -> tuple[str, str]:
        if pa.types.is_date(self.arrow):
            return "0001-01-01", "9999-12-31"
        if self.arrow.tz is None:
            return "0001-01-01 00:00:00", "9999-12-31 23:59:59.999999"
        return "0001-01-03 00:00:00+00", "9999-12-31 00:00:00+00"  # collect() can write these in any zone's local time

    def _refuse(self, index: int, value: bytes) -> Rejected:
        return Rejected(index, f"{shorten(value)} is not a value of Spark's {spark_name(self.arrow)}")


def first_refused(values: pa.Array, cast: Callable[[pa.Array], object]) -> int:
    """The index of the first value that makes `cast` fail, found by bisection. At least one must fail."""
    begin, end = 0, len(values)
    while end - begin > 1:
        middle = (begin + end) // 2
        try:
            cast(values.slice(begin, middle - begin))
        except (pa.ArrowInvalid, ValueError):
            end = middle
        else:
            begin = middle
    return begin


def shorten(value: bytes | str) -> str:
    text = value if isinstance(value, str) else value.decode("utf-8", "backslashreplace")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _cast(values: pa.Array, cast: Callable[[pa.Array], pa.Array], refuse: Callable[[int, Any], Rejected]) -> pa.Array:
    try:
        return cast(values)
    except pa.ArrowInvalid:
        index = first_refused(values, cast)
        # Read as bytes, because it may not be UTF-8.
        raise refuse(index, values.view(pa.binary())[index].as_py()) from None


def _unhexlify(values: pa.Array) -> None:
    for value in values.to_pylist():
        if value is not None:
            if not value.startswith(b"\\x"):
                raise ValueError
            binascii.unhexlify(value[2:])


# --- json and jsonb as Spark's VARIANT, encoded here value by value in Python: many times slower than text. Spark's own
# encoder rounds numbers that do not fit, so we encode: only numbers that fit DECIMAL(38), or that are the shortest text
# of a double, are accepted.

_JSON_ADVICE = "Read json columns as text: json=string"
_VARIANT_DIGITS = 38
# Numbers that are not plain integers or decimals in Spark. May also match inside strings, which is harmless.
_UNUSUAL = re.compile(r"[0-9][eE]|[0-9.]{38}")


class _Unfit(ValueError):
    """A part of the document that VARIANT cannot represent."""


@dataclass(frozen=True, slots=True)
class Variants:
    """json and jsonb as VARIANT. Of duplicate keys the last one counts, as in jsonb."""

    arrow: pa.DataType = field(
        default_factory=lambda: pa.struct(
            [
                pa.field("value", pa.binary(), nullable=False),
                pa.field("metadata", pa.binary(), nullable=False, metadata={b"variant": b"true"}),
            ]
        )
    )
    exactness: Exactness = Exactness.CONVERTED
    rule: str = "numbers as DECIMAL or DOUBLE; of equal keys the last"

    def convert(self, values: pa.Array) -> pa.Array:
        """Spark's two byte strings for each document."""
        found: list[VariantVal | None] = [
            None if value is None else _encode(index, value) for index, value in enumerate(values.to_pylist())
        ]
        parts = [
            pa.array([b"" if one is None else getattr(one, part) for one in found], pa.binary())
            for part in ("value", "metadata")
        ]
        missing = pa.array(np.array([one is None for one in found], np.bool_)) if values.null_count else None
        return pa.StructArray.from_arrays(parts, fields=list(self.arrow), mask=missing)


def _encode(index: int, value: bytes) -> VariantVal:
    from pyspark.errors import PySparkException  # executors have it
    from pyspark.sql.types import VariantVal

    try:
        text = value.decode()
        if _UNUSUAL.search(text):
            json.loads(text, parse_float=_check_number, parse_int=_check_number)
        return VariantVal.parseJson(text)
    except UnicodeError:
        reason = "a string in it is not valid Unicode"
    except RecursionError:
        reason = "it is nested too deeply"
    except _Unfit as error:
        reason = str(error)
    except ValueError as error:
        reason = f"it cannot be read: {error}"
    except PySparkException:
        reason = "it is larger than 16 MiB"
    raise Rejected(index, f"the document cannot be a VARIANT: {reason}", _JSON_ADVICE)


def _check_number(text: str) -> None:
    number = Decimal(text)
    _, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    plain = "e" not in text and "E" not in text
    if plain and len(digits) <= _VARIANT_DIGITS and -exponent <= _VARIANT_DIGITS:
        return
    nearest = float(text)
    if nearest in (float("inf"), float("-inf")) or Decimal(repr(nearest)) != number:
        raise _Unfit(f"the number {shorten(text)} is neither a DECIMAL of {_VARIANT_DIGITS} digits nor a DOUBLE")
