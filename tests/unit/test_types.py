"""Columns of single values: what is accepted, what is refused and where, and that nothing depends on how arrays are cut."""

from __future__ import annotations

import json
import pickle
from decimal import Decimal, localcontext
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import VariantVal

from pgcdc.core.errors import ConfigError
from pgcdc.postgres.types.catalog import BUILT_IN, TypeCatalog, TypeInfo
from pgcdc.postgres.types.column import ColumnType, Exactness, Rejected, TypeOptions, split_columns
from pgcdc.postgres.types.mapping import check_options, map_type
from pgcdc.spark.tables import spark_type

OIDS = {info.name: info.oid for info in BUILT_IN.types.values()}


def mapped(name: str, typmod: int = -1, **options: str) -> ColumnType:
    return map_type(BUILT_IN, OIDS[name], typmod, 0, TypeOptions(**options))


def convert(kind: ColumnType, *values: bytes | None) -> list[Any]:
    found: list[Any] = kind.convert(pa.array(values, pa.binary())).to_pylist()
    return found


KINDS = [
    (mapped("bool"), [b"t", b"f"], b"x"),
    (mapped("int2"), [b"-32768", b"7"], b"32768"),
    (mapped("int4"), [b"1", b"-2"], b"2147483648"),
    (mapped("int8"), [b"1", b"-2"], b"1.0"),
    (mapped("float4"), [b"1.5", b"NaN"], b""),
    (mapped("float8"), [b"1.5", b"-Infinity"], b"one"),
    (mapped("numeric", 4 + (5 << 16 | 2)), [b"1.50", b"-999.99"], b"NaN"),
    (mapped("numeric", numeric="double"), [b"1.5", b"NaN"], b"1" + b"0" * 400),
    (mapped("text"), ["é".encode(), b""], b"\xff"),
    (mapped("bytea"), [b"\\x", b"\\x00ff", b"\\x5c78"], b"\\x0"),
    (mapped("date"), [b"2024-01-02", b"0001-01-01"], b"infinity"),
    (mapped("date", out_of_range="clamp"), [b"2024-01-02", b"infinity", b"0044-03-15 BC"], b"2024-02-30"),
    (mapped("timestamp"), [b"2024-01-02 03:04:05.6"], b"10000-01-01 00:00:00"),
    (mapped("timestamptz"), [b"2024-01-02 03:04:05+00"], b"0001-01-01 00:00:00+00 BC"),
    (mapped("timestamptz", out_of_range="clamp"), [b"-infinity"], b"2024-01-02 03:04:05"),
    (mapped("jsonb", json="variant"), [b'{"a": 1}', b"null"], b"1e400"),
]


@pytest.mark.parametrize(("kind", "good", "bad"), KINDS, ids=lambda one: getattr(one, "rule", None))
def test_the_first_value_without_a_place_is_named(kind: ColumnType, good: list[bytes], bad: bytes) -> None:
    values = [None, *good * 20, bad, None, bad, *good]
    for array in (pa.array(values, pa.binary()), pa.array([b"x", *values], pa.binary()).slice(1)):
        with pytest.raises(Rejected) as refused:
            kind.convert(array)
        assert refused.value.index == 1 + len(good) * 20
        assert refused.value.reason


@pytest.mark.parametrize(("kind", "good", "bad"), KINDS, ids=lambda one: getattr(one, "rule", None))
def test_a_column_may_be_cut_anywhere_and_travels(kind: ColumnType, good: list[bytes], bad: bytes) -> None:
    travelled: ColumnType = pickle.loads(pickle.dumps(kind))
    assert travelled == kind
    values = [bad, None, *good, None, *good, bad]
    whole = travelled.convert(pa.array(values[1:-1], pa.binary()))
    whole.validate(full=True)
    assert whole.type == kind.arrow
    assert whole.null_count == 2
    cut = kind.convert(pa.array(values, pa.binary()).slice(1, len(values) - 2))
    cut.validate(full=True)
    assert repr(cut.to_pylist()) == repr(whole.to_pylist())
    assert kind.convert(pa.array([], pa.binary())).to_pylist() == []
    assert kind.convert(pa.array([None, None], pa.binary())).to_pylist() == [None, None]


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        (b"00", b"\\x00"),
        (b"\\x0", b"\\x0"),
        (b"\\x\\x00", b"\\x"),
        (b"\\\\x", b"\\x"),
        (b"", b"\\x"),
        (b"\\x0 ", b"\\x00"),
    ],
)
def test_damaged_bytea_is_refused_whatever_its_neighbour_is(bad: bytes, good: bytes) -> None:
    kind = mapped("bytea")
    with pytest.raises(Rejected) as refused:
        convert(kind, b"\\xff", bad, good)
    assert refused.value.index == 1


def test_a_value_without_prefix_does_not_take_that_of_its_neighbour() -> None:
    with pytest.raises(Rejected) as refused:
        convert(mapped("bytea"), b"\\xff", b"0000", b"\\x\\x")
    assert refused.value.index == 1


@given(st.lists(st.none() | st.binary(max_size=20)) | st.lists(st.binary(max_size=20)))
def test_bytea_of_any_bytes(values: list[bytes | None]) -> None:
    texts = [None if one is None else b"\\x" + one.hex().encode() for one in values]
    assert convert(mapped("bytea"), *texts) == values
    sliced = pa.array([b"\\x01", *texts, b"\\x02"], pa.binary()).slice(1, len(texts))
    assert mapped("bytea").convert(sliced).to_pylist() == values


@given(st.lists(st.floats(width=64)), st.lists(st.floats(width=32)))
def test_floats_are_the_nearest(doubles: list[float], singles: list[float]) -> None:
    def write(value: float) -> bytes:
        return repr(value).replace("inf", "Infinity").replace("nan", "NaN").encode()

    assert repr(convert(mapped("float8"), *map(write, doubles))) == repr(doubles)
    assert repr(convert(mapped("float4"), *map(write, singles))) == repr(singles)


@given(st.decimals(allow_nan=False, allow_infinity=False).filter(lambda one: abs(one.adjusted()) < 300))
def test_numeric_as_double_is_the_nearest(number: Decimal) -> None:
    assert convert(mapped("numeric", numeric="double"), f"{number:f}".encode()) == [float(number)]


json_numbers = st.one_of(
    st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    st.decimals(allow_nan=False, allow_infinity=False, places=10, min_value=-(10**25), max_value=10**25),
)  # fmt: skip


@given(
    st.recursive(
        st.none() | st.booleans() | st.text() | json_numbers,
        lambda one: st.lists(one) | st.dictionaries(st.text(), one),
        max_leaves=10,
    )
)
def test_variant_is_what_the_document_says_or_is_refused(document: Any) -> None:
    text = write_json(document)
    try:
        (found,) = convert(mapped("json", json="variant"), text.encode("utf-8", "surrogatepass"))
    except Rejected as error:
        assert "number" in error.reason or "Unicode" in error.reason
        return
    with localcontext(prec=60):  # Spark's reader rounds to the precision of the context
        assert exact(VariantVal(found["value"], found["metadata"]).toPython()) == exact(document)


def exact(document: Any) -> Any:
    """With numbers as they are written, whatever type they have."""
    if isinstance(document, list):
        return [exact(one) for one in document]
    if isinstance(document, dict):
        return {key: exact(value) for key, value in document.items()}
    if isinstance(document, int | float) and not isinstance(document, bool):
        return Decimal(repr(document))
    return document


def write_json(document: Any) -> str:
    if isinstance(document, Decimal):
        return f"{document:f}"
    if isinstance(document, list):
        return "[" + ",".join(map(write_json, document)) + "]"
    if isinstance(document, dict):
        return "{" + ",".join(f"{json.dumps(key)}: {write_json(value)}" for key, value in document.items()) + "}"
    return json.dumps(document)


@pytest.mark.parametrize("number", [b"0.1234567890123456789e1", b"9" * 39, b"1e400", b"1e-400", b"0." + b"1" * 39])
def test_variant_has_no_place_for_a_number_that_would_be_rounded(number: bytes) -> None:
    with pytest.raises(Rejected, match="is neither a DECIMAL of 38 digits nor a DOUBLE"):
        convert(mapped("json", json="variant"), b'{"a": [%b]}' % number)


@pytest.mark.parametrize(
    ("precision", "scale", "expected"),
    [
        (12, 2, "decimal(12,2)"), (38, 38, "decimal(38,38)"), (3, -2, "decimal(5,0)"), (2, 4, "decimal(4,4)"),
        (38, 0, "decimal(38,0)"), (39, 0, "string"), (1000, -1000, "string"), (1, 39, "string"), (30, -9, "string"),
        (30, -8, "decimal(38,0)"), (1, 38, "decimal(38,38)"), (1000, 1000, "string"),
    ],
)  # fmt: skip
def test_precision_and_scale_of_numeric(precision: int, scale: int, expected: str) -> None:
    kind = mapped("numeric", 4 + (precision << 16 | scale & 0x7FF))
    assert spark_type(kind.arrow).simpleString() == expected
    assert kind.exactness is (Exactness.TEXT if expected == "string" else Exactness.EXACT)


def test_what_is_not_known_is_text() -> None:
    strange = TypeCatalog({1: TypeInfo(1, "public.strange", "strange:strange_out", None)})
    for oid in (1, 2):
        kind = map_type(strange, oid, -1, 0, TypeOptions())
        assert (spark_type(kind.arrow).simpleString(), kind.exactness) == ("string", Exactness.TEXT)


def test_a_choice_that_there_is_not_is_refused() -> None:
    check_options(TypeOptions())
    with pytest.raises(ConfigError, match=r"out_of_range=wrap is not a valid choice.*error, clamp, string"):
        check_options(TypeOptions(out_of_range="wrap"))


@given(st.integers(1, 5), st.data())
def test_rows_become_columns(width: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.lists(st.none() | st.binary(max_size=5), min_size=width, max_size=width)))
    flat = pa.array([b"before", *(value for row in rows for value in row), b"behind"], pa.binary())
    columns = split_columns(flat.slice(1, len(rows) * width), width)
    assert [column.to_pylist() for column in columns] == [[row[index] for row in rows] for index in range(width)]


def test_values_that_are_no_whole_rows_are_refused() -> None:
    assert split_columns(pa.array([], pa.binary()), 0) == []
    with pytest.raises(ValueError, match="3 values are not rows of 2"):
        split_columns(pa.array([b"", b"", b""], pa.binary()), 2)
