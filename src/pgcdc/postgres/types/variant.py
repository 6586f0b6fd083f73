"""json and jsonb as Spark's VARIANT, encoded here: value by value, in Python, so many times slower than as text.

Spark's own encoder rounds numbers that it has no place for. Here such a number is refused: only what fits into
DECIMAL(38), or is the shortest text of a double, becomes one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from pgcdc.postgres.types.column import Exactness, Rejected
from pgcdc.postgres.types.scalars import shorten

if TYPE_CHECKING:
    from pyspark.sql.types import VariantVal

_ADVICE = "Read json columns as text: json=string"
_DIGITS = 38
# Numbers that are not simply integers or decimals of Spark's; also in strings, where they do no harm.
_UNUSUAL = re.compile(r"[0-9][eE]|[0-9.]{38}")


class _Unfit(ValueError):
    """A part of the document that has no place."""


@dataclass(frozen=True, slots=True)
class Variants:
    """json and jsonb as VARIANT. Of equal keys the last one counts, as in jsonb."""

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
    raise Rejected(index, f"the document cannot be a VARIANT: {reason}", _ADVICE)


def _check_number(text: str) -> None:
    number = Decimal(text)
    _, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    plain = "e" not in text and "E" not in text
    if plain and len(digits) <= _DIGITS and -exponent <= _DIGITS:
        return
    nearest = float(text)
    if nearest in (float("inf"), float("-inf")) or Decimal(repr(nearest)) != number:
        raise _Unfit(f"the number {shorten(text)} is neither a DECIMAL of {_DIGITS} digits nor a DOUBLE")
