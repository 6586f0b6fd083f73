"""Which Spark type a PostgreSQL type becomes. docs/types.md says the same in words, and a test compares them.

A type is known by the function that writes it (`catalog`), so that citext is text and a type nobody has heard of is read as
what it is on the wire: text.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pyarrow as pa

from pgcdc.core.errors import ConfigError
from pgcdc.postgres.types.catalog import TypeCatalog
from pgcdc.postgres.types.column import CHOICES, ColumnType, Exactness, TypeOptions
from pgcdc.postgres.types.nested import nested_type
from pgcdc.postgres.types.scalars import Bits, Bytes, Decimals, Moments, Nearest, Numbers, Text
from pgcdc.postgres.types.variant import Variants

_MAX_PRECISION = 38


def check_options(options: TypeOptions) -> TypeOptions:
    """The options themselves; ConfigError if there is no such choice."""
    for name, choices in CHOICES.items():
        chosen = getattr(options, name)
        if chosen not in choices:
            raise ConfigError(f"{name}={chosen} is not a choice for types", f"Use one of {', '.join(choices)}")
    return options


def map_type(catalog: TypeCatalog, oid: int, typmod: int, ndims: int, options: TypeOptions) -> ColumnType:
    """What a column of this type becomes; a domain is its base type, and what is not known is text."""
    info = catalog.types.get(oid)
    while info is not None and info.is_domain:
        typmod, ndims = info.typmod, info.ndims
        info = catalog.types.get(info.inner)
    if info is None:
        return _text(Exactness.TEXT, "the type is not known")
    found = nested_type(catalog, info, typmod, ndims, options, map_type)
    if found is not None:
        return found
    make = _MAKERS.get(info.output)
    return make(typmod, options) if make else _text(Exactness.TEXT)


def _text(exactness: Exactness, rule: str = "") -> Text:
    return Text(pa.string(), exactness, rule)


def _make_number(arrow: pa.DataType, typmod: int, options: TypeOptions) -> Numbers:
    return Numbers(arrow)


def _make_exact_text(rule: str, typmod: int, options: TypeOptions) -> Text:
    return _text(Exactness.EXACT, rule)


def _make_numeric(typmod: int, options: TypeOptions) -> ColumnType:
    if options.numeric == "double":
        return Nearest(pa.float64(), Exactness.CONVERTED, "the nearest double")
    if options.numeric == "string":
        return _text(Exactness.TEXT)
    if typmod < 0:
        return _text(Exactness.TEXT, "no precision is declared")
    precision = typmod - 4 >> 16 & 0xFFFF
    scale = (typmod - 4 & 0x7FF ^ 0x400) - 0x400  # 11 bits with a sign; before PostgreSQL 15 it had none, nor needed it
    # numeric(3,-2) goes up to 99900, numeric(2,4) up to 0.0099.
    digits, places = max(precision - min(scale, 0), scale), max(scale, 0)
    if digits > _MAX_PRECISION:
        return _text(Exactness.TEXT, f"Spark's DECIMAL has {_MAX_PRECISION} digits at most")
    return Decimals(pa.decimal128(digits, places))


def _make_moments(arrow: pa.DataType, typmod: int, options: TypeOptions) -> ColumnType:
    if options.out_of_range == "string":
        return _text(Exactness.TEXT)
    if options.out_of_range == "clamp":
        return Moments(arrow, Exactness.CONVERTED, "clamped to the years 1 to 9999", clamp=True)
    return Moments(arrow)


def _make_json(typmod: int, options: TypeOptions) -> ColumnType:
    return Variants() if options.json == "variant" else _text(Exactness.TEXT)


_Maker = Callable[[int, TypeOptions], ColumnType]

_BIGINT = partial(_make_number, pa.int64())
_PLAIN_TEXT = partial(_make_exact_text, "")

_MAKERS: dict[str, _Maker] = {
    "boolout": lambda typmod, options: Bits(pa.bool_()),
    "int2out": partial(_make_number, pa.int16()),
    "int4out": partial(_make_number, pa.int32()),
    "int8out": _BIGINT,
    "oidout": _BIGINT,  # these three have no sign: 32 bits of it need 64 with one
    "xidout": _BIGINT,
    "cidout": _BIGINT,
    "float4out": partial(_make_number, pa.float32()),
    "float8out": partial(_make_number, pa.float64()),
    "numeric_out": _make_numeric,
    "byteaout": lambda typmod, options: Bytes(pa.binary()),
    "date_out": partial(_make_moments, pa.date32()),
    "timestamp_out": partial(_make_moments, pa.timestamp("us")),
    "timestamptz_out": partial(_make_moments, pa.timestamp("us", "UTC")),
    "json_out": _make_json,
    "jsonb_out": _make_json,
    "bpcharout": partial(_make_exact_text, "padded with blanks"),
    **dict.fromkeys(("textout", "varcharout", "nameout", "charout", "xml_out", "enum_out"), _PLAIN_TEXT),
}
