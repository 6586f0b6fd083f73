"""Nested text: what PostgreSQL writes is taken apart exactly, all else is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from nested_text import write_array, write_hstore, write_interval, write_multirange, write_range, write_row

from pgcdc.postgres.types import interval, mapping, split
from pgcdc.postgres.types.column import Exactness, Rejected
from pgcdc.postgres.types.scalars import Scalar


class Raw(Scalar):
    """Bytes as they are."""

    __slots__ = ()

    def convert(self, values: pa.Array) -> pa.Array:
        values.validate(full=True)
        return values


RAW = Raw(pa.binary(), Exactness.EXACT)
SPLITTERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "arrays": (split.split_arrays, (1, b",")),
    "arrays of two dimensions": (split.split_arrays, (2, b",")),
    "arrays of three dimensions": (split.split_arrays, (3, b",")),
    "arrays of boxes": (split.split_arrays, (1, b";")),
    "rows of one": (split.split_rows, (1,)),
    "rows of three": (split.split_rows, (3,)),
    "ranges": (mapping.read_ranges, (RAW,)),
    "multiranges": (mapping.read_multiranges, (RAW,)),
    "pairs": (split.split_pairs, ()),
    "intervals": (interval.split_intervals, ()),
}


def column(values: list[bytes | None]) -> pa.Array:
    """In the middle of a larger array, as a slice of it."""
    return pa.array([b"before", None, *values, b"after"], pa.binary()).slice(2, len(values))


def take_apart(name: str, values: list[bytes | None]) -> Any:
    """What is found in the values; Arrow's own rules hold for all of it."""
    run, args = SPLITTERS[name]
    found = run(column(values), *args)
    for one in [found] if isinstance(found, pa.Array) else found:
        if isinstance(one, pa.Array):
            one.validate(full=True)
    return found


def is_refused(name: str, text: bytes) -> bool:
    """In a column whose other values are good."""
    good: bytes | None = {"intervals": b"PT0S", "ranges": b"empty", "pairs": b""}.get(name, b"{}")
    if name.startswith("rows"):
        good = None
    try:
        take_apart(name, [good, None, text, good])
    except Rejected as refused:
        assert refused.index == 2
        assert refused.reason
        return True
    return False


_awkward = st.text('"\\{}[](),; \t\v=>NULLnul1', max_size=6).map(str.encode)
_bytes = st.one_of(_awkward, st.binary(max_size=8))
_leaf = st.one_of(st.none(), _bytes, st.sampled_from([b"1", b"-2.5", b"NULL", b"null", b"", "é €".encode()]))


def nest(items: list[Any], offsets: Any) -> list[Any]:
    return [items[begin:end] for begin, end in pairwise(offsets)]


@given(st.lists(st.one_of(st.none(), st.lists(_leaf, max_size=5)), max_size=6))
@example([[b"x" * 300, b'"' * 300], [b"NULL", b"nULL", None, b""]])
@pytest.mark.parametrize("delimiter", [b",", b";"])
def test_arrays_of_one_dimension(delimiter: bytes, arrays: list[list[bytes | None] | None]) -> None:
    texts = [None if one is None else write_array(one, delimiter) for one in arrays]
    name = "arrays" if delimiter == b"," else "arrays of boxes"
    (offsets,), leaves = take_apart(name, texts)
    assert nest(leaves.to_pylist(), offsets) == [one or [] for one in arrays]


@given(st.data(), st.integers(2, 3))
def test_arrays_of_more_dimensions(data: st.DataObject, depth: int) -> None:
    def draw(sizes: list[int]) -> Any:
        return data.draw(_leaf) if not sizes else [draw(sizes[1:]) for _ in range(sizes[0])]

    arrays: list[Any] = []
    for _ in range(data.draw(st.integers(0, 4))):
        sizes = data.draw(st.lists(st.integers(1, 3), min_size=depth, max_size=depth))
        arrays.append(data.draw(st.sampled_from([[], None, draw(sizes)])))
    texts = [None if one is None else write_array(one) for one in arrays]
    found = take_apart("arrays of two dimensions" if depth == 2 else "arrays of three dimensions", texts)
    items = found.leaves.to_pylist()
    for offsets in reversed(found.offsets):
        items = nest(items, offsets)
    assert items == [one or [] for one in arrays]


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"}", b"{,}", b"{1,}", b"{,1}", b"{1", b"1}", b"{1}}", b"{1}x", b"{1}{2}", b"{1 }", b"{ 1}",
        b"{a\\b}", b'{a"b}',
        b'{"a"b}', b'{"a}', b'{"a\\n"}', b'{"a\\', b'{"a\\"', b"{null}", b"{Null}", b"{a,nulL}", b"{{}}", b"{{1}}",
        b"{{1},{2}}",
        b"[1:1]={1}", b"[0:1]={1,2}", b"{1,{2}}", b"{a{b}}", b"NULL", b'"{}"', b"{}{}", b"{\n}", b"{{{{{{{1}}}}}}}",
    ],
)  # fmt: skip
def test_what_is_no_array_is_refused(text: bytes) -> None:
    assert is_refused("arrays", text)


@pytest.mark.parametrize(
    "text",
    [
        b"{1}", b"{{1,2},{3}}", b"{{1},2}", b"{{1},{2}", b"{{1}{2}}", b"{{1},}", b"{{},{}}", b"{{1}},{2}}",
        b"{{1},{{2}}}", b"{{1} }",
        b"{{1},", b"{{{1}}}", b"[0:0][1:1]={{1}}", b"{{1}}}",
    ],
)  # fmt: skip
def test_what_is_no_array_of_two_dimensions_is_refused(text: bytes) -> None:
    assert is_refused("arrays of two dimensions", text)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("arrays", b"{{1,2}}", "an array of 2 dimensions in a column declared with 1"),
        ("arrays of two dimensions", b"{1}", "an array of 1 dimension in a column declared with 2"),
        ("arrays", b"[2:4]={1,2,3}", "its indexes do not start at 1"),
    ],
)
def test_arrays_of_another_form_are_refused_with_advice(name: str, text: bytes, reason: str) -> None:
    with pytest.raises(Rejected) as refused:
        take_apart(name, [text])
    assert refused.value.reason == reason
    assert "arrays=string" in refused.value.advice


@given(st.lists(st.one_of(st.none(), st.lists(_leaf, min_size=3, max_size=3)), max_size=6))
@example([[b"NULL", b"", None]])
def test_rows(rows: list[list[bytes | None] | None]) -> None:
    found = take_apart("rows of three", [None if one is None else write_row(one) for one in rows])
    assert nest(found.to_pylist(), range(0, 3 * len(rows) + 1, 3)) == [one or [None] * 3 for one in rows]


def test_a_row_of_one_attribute_that_is_null() -> None:
    assert take_apart("rows of one", [b"()", b'("")', b"(x)"]).to_pylist() == [None, b"", b"x"]


@pytest.mark.parametrize(
    "text",
    [
        b"", b"(", b"()", b"(,)", b"(,,,)", b"(1,2,3", b"1,2,3)", b"(1,2,3)x", b"(1,2,3))", b"((1,2,3)", b"(1, 2,3)",
        b'(1,"2,3)',
        b'(1,"a\\b",3)', b'(1,a"b,3)', b'(1,"a"b,3)', b"(1,(2),3)", b"(1\\,2,3)", b'(,,"', b'(,,"\\', b'(,,"a"',
    ],
)  # fmt: skip
def test_what_is_no_row_of_three_is_refused(text: bytes) -> None:
    assert is_refused("rows of three", text)


def test_a_row_of_an_altered_type_is_refused_by_its_number_of_attributes() -> None:
    with pytest.raises(Rejected, match="a row of 2 attributes, but its type has 3") as refused:
        take_apart("rows of three", [b"(1,2,3)", b'(1,"a,b")'])
    assert refused.value.index == 1
    assert "altered" in refused.value.advice


_bound = st.one_of(st.none(), _bytes)
_range = st.tuples(_bound, _bound, st.booleans(), st.booleans()).map(
    lambda one: (one[0], one[1], one[2] and one[0] is not None, one[3] and one[1] is not None)
)


def seen(found: dict[str, Any] | None) -> Any:
    if found is None or found["empty"]:
        assert found is None or (found["lower"], found["upper"]) == (None, None)
        return None
    return found["lower"], found["upper"], found["lower_inclusive"], found["upper_inclusive"]


@given(st.lists(st.one_of(st.none(), _range), max_size=6))
def test_ranges(ranges: list[Any]) -> None:
    texts: list[bytes | None] = [write_range(one) for one in ranges]
    found = take_apart("ranges", [*texts, None]).to_pylist()
    assert found[-1] is None
    assert [seen(one) for one in found] == [*ranges, None]


@given(st.lists(st.one_of(st.none(), st.lists(_range, max_size=4)), max_size=6))
def test_multiranges(values: list[list[Any] | None]) -> None:
    found = take_apart("multiranges", [None if one is None else write_multirange(one) for one in values])
    assert [one and [seen(part) for part in one] for one in found.to_pylist()] == values


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[", b"[1", b"[1,", b"[1,2", b"1,2]", b"[1,2]x", b"[1]", b"[1,2,3]", b"[,2]", b"[1,]", b"[1 ,2]",
        b"Empty", b"empty ",
        b'["a,2]', b"[a[b,2]", b"{[1,2)}", b'["a\\b",2)', b'["a"', b'["a',
    ],
)  # fmt: skip
def test_what_is_no_range_is_refused(text: bytes) -> None:
    assert is_refused("ranges", text)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"{[1,2)",
        b"{[1,2),}",
        b"{,}",
        b"{[1,2) }",
        b"{[1,2)}x",
        b"{empty}",
        b"[1,2)",
        b"{[1,2)[3,4)}",
        b"{[1,2),[3",
    ],
)
def test_what_is_no_multirange_is_refused(text: bytes) -> None:
    assert is_refused("multiranges", text)


@given(st.lists(st.one_of(st.none(), st.dictionaries(_bytes, st.one_of(st.none(), _bytes), max_size=4)), max_size=5))
def test_pairs(values: list[dict[bytes, bytes | None] | None]) -> None:
    (offsets,), leaves = take_apart("pairs", [None if one is None else write_hstore(one) for one in values])
    found = [dict(zip(one[::2], one[1::2], strict=True)) for one in nest(leaves.to_pylist(), offsets)]
    assert found == [one or {} for one in values]


@pytest.mark.parametrize(
    "text",
    [
        b" ", b'"a"', b'"a"=>', b'"a"=>"1', b'"a"=>1', b'a=>"1"', b'"a"=>"1",', b'"a"=>"1","b"=>"2"', b'"a"=>"1", ',
        b'"a"=>null',
        b'"a"=>NULLx', b'"a"=>"1", "a"=>"2"', b'"b"=>"1", "a"=>"2"', b'"bb"=>"1", "a"=>"2"', b'"a\\x"=>"1"',
        b'"a"=>"\\x"', b'"a',
        b'"a"=="1"', b'"a\\', b'"a"=>"\\', b'=>"1"', b"{}",
    ],
)  # fmt: skip
def test_what_is_no_hstore_is_refused(text: bytes) -> None:
    assert is_refused("pairs", text)


_i32 = st.one_of(st.integers(-30, 30), st.integers(-(2**31), 2**31 - 1))
_i64 = st.one_of(
    st.integers(-(10**8), 10**8), st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**63 - 1, -(2**63), -1, -500_000])
)


@given(st.lists(st.one_of(st.none(), st.tuples(_i32, _i32, _i64)), max_size=8))
@example([(2**31 - 1, -(2**31), 2**63 - 1), (-(2**31), 2**31 - 1, -(2**63)), (0, 0, -1), (-1, 1, -1), None])
def test_intervals(values: list[tuple[int, int, int] | None]) -> None:
    found = take_apart("intervals", [None if one is None else write_interval(*one) for one in values])
    assert list(zip(*[part.to_pylist() for part in found], strict=True)) == [one or (0, 0, 0) for one in values]


@pytest.mark.parametrize(
    "text",
    [
        b"", b"P", b"PT", b"P1", b"1D", b"P0D", b"P-0D", b"P01D", b"P1DT", b"PTT1H", b"PT1HT1M", b"P1H", b"PT1D",
        b"PT1Y", b"P1D1M",
        b"P1M1Y", b"PT1S1M", b"P1D1D", b"P1Y-1M", b"P-1Y1M", b"P12M", b"PT60M", b"PT60S", b"PT1H-1M", b"PT-1M1S",
        b"PT1M-0.5S",
        b"PT1.S", b"PT.5S", b"PT1.50S", b"PT0.0S", b"PT1.1234567S", b"PT0S ", b"P1.5D", b"PT1.5M", b"P+1D", b"P--1D",
        b"P2147483648D",
        b"P-2147483649D", b"P178956970Y8M", b"P-178956970Y-9M", b"PT2562047789H", b"PT2562047788H54.775808S",
        b"PT-2562047788H-54.775809S", b"P99999999999D", b"1 day", b"infinity ", b"P1W", b"P1D\n", b"PT-S", b"P-D",
        b"PT00.5S",
    ],
)  # fmt: skip
def test_what_is_no_interval_is_refused(text: bytes) -> None:
    assert is_refused("intervals", text)


@pytest.mark.parametrize("text", [b"infinity", b"-infinity"])
def test_an_infinite_interval_is_refused_with_advice(text: bytes) -> None:
    with pytest.raises(Rejected, match="infinity") as refused:
        take_apart("intervals", [text])
    assert "out_of_range=string" in refused.value.advice


_pieces = [
    b"{", b"}", b"[", b"]", b"(", b")", b",", b";", b'"', b'""', b"\\", b'\\"', b"=>", b", ", b"NULL", b"a", b"1",
    b"-", b" ", b"empty",
    b"P", b"T", b"1Y", b"-2M", b"3D", b"4H", b"5M", b"6.5S", b"0", b".", b"S", b"\0", b"\xff",
]  # fmt: skip
_noise = st.one_of(st.lists(st.sampled_from(_pieces), max_size=12).map(b"".join), st.binary(max_size=12))


@given(st.sampled_from(sorted(SPLITTERS)), st.lists(st.one_of(st.none(), _noise), max_size=4))
def test_noise_is_refused_or_read(name: str, values: list[bytes | None]) -> None:
    try:
        take_apart(name, values)
    except Rejected as refused:
        assert refused.index < len(values)
        assert values[refused.index] is not None
