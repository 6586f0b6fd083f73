"""Lines of COPY become the values that the server wrote, and C and Python agree."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pgcdc.core.errors import DecodeError
from pgcdc.source.postgres.snapshot.copy import CopyBuffer, PythonCopyBuffer, copy_statement, new_copy_buffer, row_lists
from pgcdc.spool.schema import CHANGES

NewBuffer = Callable[[int], CopyBuffer]
Value = bytes | None

VALUES = st.none() | st.binary(max_size=20) | st.text(st.sampled_from("\b\f\n\r\t\v\\N\0é"), max_size=8).map(str.encode)
ROWS = st.integers(1, 4).flatmap(lambda width: st.lists(st.lists(VALUES, min_size=width, max_size=width), min_size=1))


def compiled(columns: int) -> CopyBuffer:
    """The one in C. Where it was not built: a skip on a laptop, a failure in CI."""
    try:
        module = importlib.import_module("pgcdc.source.postgres.snapshot._copy")
    except ImportError as error:
        if os.environ.get("CI"):
            pytest.fail(f"the compiled buffer was not built: {error}")
        pytest.skip("the compiled buffer was not built")
    made: CopyBuffer = module.CompiledCopyBuffer(columns)
    return made


BOTH = pytest.mark.parametrize("new_buffer", [PythonCopyBuffer, compiled])


def write(row: Iterable[Value]) -> bytes:
    """A line, as the server writes it."""
    escapes = {8: b"\\b", 9: b"\\t", 10: b"\\n", 11: b"\\v", 12: b"\\f", 13: b"\\r", 92: b"\\\\"}
    fields = [rb"\N" if one is None else b"".join(escapes.get(byte, bytes([byte])) for byte in one) for one in row]
    return b"\t".join(fields) + b"\n"


def source(*lines: bytes) -> Callable[[int], tuple[int, memoryview | bytes]]:
    """What `get_copy_data` gives: the lines, after each that nothing is here yet, and at last the end."""
    answers = [answer for line in lines for answer in ((len(line), memoryview(line)), (0, b""))] + [(-1, b"")]
    return lambda wait: answers.pop(0)


def read(buffer: CopyBuffer, *lines: bytes, nbytes: int = 1 << 20) -> list[pa.Array]:
    """The arrays that come out: full ones, and what is left."""
    get, found = source(*lines), []
    while (state := buffer.fill(get, nbytes)) >= 0:
        if state:
            found.append(buffer.take())
    if buffer.rows:
        found.append(buffer.take())
    for one in found:
        one.validate(full=True)
    return found


@BOTH
@given(ROWS)
@example([[b"\\N", None, b"", b"\\"]])
@example([[b"", b"\t\n"], [None, None]])
def test_values_come_out_as_they_were(new_buffer: NewBuffer, rows: list[list[Value]]) -> None:
    (found,) = read(new_buffer(len(rows[0])), *map(write, rows))
    assert found.type == pa.binary()
    assert found.to_pylist() == [value for row in rows for value in row]
    lists = row_lists(found, len(rows[0]))
    assert lists.type == CHANGES.field("new").type and lists.to_pylist() == rows


@BOTH
def test_arrays_are_cut_at_the_limit_and_a_row_never(new_buffer: NewBuffer) -> None:
    rows = [[b"x" * 10, b"%d" % number] for number in range(10)]
    found = read(new_buffer(2), *map(write, rows), nbytes=40)
    assert [len(one) for one in found] == [8, 8, 4]
    assert [value for one in found for value in one.to_pylist()] == [value for row in rows for value in row]


@BOTH
def test_a_huge_value_is_one_value(new_buffer: NewBuffer) -> None:
    half = b"x" * 10_000_000
    buffer = new_buffer(2)
    first, second = read(buffer, half + rb"\t" + half + b"\t\\N\n", write([b"a", b"b"]), nbytes=1 << 22)
    assert first[0].as_py() == half + b"\t" + half and first[1].as_py() is None and second.to_pylist() == [b"a", b"b"]


@BOTH
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"a\tb", "no end of line"),
        (b"", "no end of line"),
        (b"a\n", "has 1 columns, not 2"),
        (b"a\tb\tc\td\n", "has 4 columns, not 2"),
        (b"a\\\tb\n", "unknown escape"),
        (b"a\\N\tb\n", "unknown escape"),
        (b"a\t\\x41\n", "unknown escape"),
        (b"a\tb\\\n", "unknown escape"),
    ],
)
def test_what_the_server_never_writes_is_refused(new_buffer: NewBuffer, line: bytes, said: str) -> None:
    buffer = new_buffer(2)
    good = write([b"1", None])
    answers = [(len(good), good), (len(line) or 1, line), (-1, b"")]
    with pytest.raises(DecodeError, match=said):
        buffer.fill(lambda wait: answers.pop(0), 1 << 20)
    assert buffer.rows == 1 and buffer.take().to_pylist() == [b"1", None]


@given(st.binary(max_size=12).map(lambda line: line.replace(b"\0", b"\\")))
def test_both_say_the_same_about_any_line(line: bytes) -> None:
    said = []
    for new_buffer in (PythonCopyBuffer, compiled):
        buffer = new_buffer(2)
        try:
            said.append(str([one.to_pylist() for one in read(buffer, line + b"\n")]))
        except DecodeError as error:
            said.append(str(error))
    assert said[0] == said[1]


@BOTH
def test_rows_have_columns(new_buffer: NewBuffer) -> None:
    with pytest.raises(ValueError, match="at least one column"):
        new_buffer(0)


def test_the_variable_chooses_the_one_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCDC_PURE_PYTHON", "1")
    assert isinstance(new_copy_buffer(1), PythonCopyBuffer)


def test_names_are_quoted_and_a_comment_in_a_condition_ends() -> None:
    statement = copy_statement(['a"b', "c"], 'ONLY "t"', ["x > 1 -- why", "y"])
    assert statement == 'COPY (SELECT "a""b", "c" FROM ONLY "t" WHERE (x > 1 -- why\n) AND (y\n)) TO STDOUT'
