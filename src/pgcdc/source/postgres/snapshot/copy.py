"""Existing rows, by `COPY (SELECT ...) TO STDOUT`: values are byte for byte those that the stream sends.

Both write a value with its type's output function, in a session with the same settings; a cast to text would not
(`true` for `t`, char(n) without its blanks). COPY only adds escapes, which are undone here. Rows go straight into
buffers, and come out as the flat arrays from which typed rows are built: one value after another, row after row.

Two implementations give the same results: C (`_copy.pyx`), and Python here. The Python one runs without a compiler.
Read it first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Final, Protocol

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import generators, pq, waiting
from psycopg.abc import PQGen

from pgcdc.core.compiled import load_compiled
from pgcdc.core.errors import ConfigError, DecodeError
from pgcdc.postgres.database import Connection, execute_one, quote_identifier
from pgcdc.spool.schema import CHANGES

BATCH_BYTES: Final = 4 * 1024 * 1024
MAX_BATCH_BYTES: Final = 1 << 30
"""Offsets have 31 bits, and a buffer that is not full may still get one more row (1 GB at most)."""

GetCopyData = Callable[[int], "tuple[int, memoryview | bytes]"]
"""`pgconn.get_copy_data`: size and content of one message. Size 0: none yet; -1: no more."""

_READABLE: Final = waiting.Wait.R
_ADVICE: Final = "PostgreSQL does not write such rows: please report it, with the versions of PostgreSQL and pgcdc"


class CopyBuffer(Protocol):
    """Collects the lines of a COPY as values."""

    @property
    def rows(self) -> int:
        """The number of rows held."""

    def fill(self, get: GetCopyData, nbytes: int) -> int:
        """Take lines until about `nbytes` are held (1), none is available yet (0), or there are no more (-1)."""

    def take(self) -> pa.Array:
        """All held values as one flat array; empties the buffer."""


def select_statement(columns: Iterable[str], source: str, conditions: Sequence[str | None] = (), tail: str = "") -> str:
    """A SELECT of these columns. `source` is the FROM clause; conditions (None: skipped) are joined with AND."""
    given = " AND ".join(f"({one}\n)" for one in conditions if one)  # the newline ends a comment in the condition
    where = f" WHERE {given}" if given else ""
    return f"SELECT {', '.join(map(quote_identifier, columns))} FROM {source}{where}{tail}"


def copy_statement(columns: Iterable[str], source: str, conditions: Sequence[str | None] = (), tail: str = "") -> str:
    return f"COPY ({select_statement(columns, source, conditions, tail)}) TO STDOUT"


def check_condition(
    conn: Connection, columns: Iterable[str], source: str, conditions: Sequence[str | None], wrong: str
) -> None:
    """Run the query for no rows, so that wrong rights, columns or conditions show before anything starts. `wrong` is
    the message for the user's invalid condition; without a condition it is empty, and errors pass unchanged."""
    try:
        execute_one(conn, select_statement(columns, source, conditions, " LIMIT 0"))
    except (psycopg.ProgrammingError, psycopg.DataError) as error:
        if not wrong or isinstance(error, psycopg.errors.InsufficientPrivilege):
            raise
        text = " ".join((error.diag.message_primary or str(error)).split())
        raise ConfigError(f"{wrong}: {text}", "Write it as after WHERE in SQL: total > 100") from error


def copy_rows(conn: Connection, statement: str, columns: int, *, batch_bytes: int = BATCH_BYTES) -> Generator[pa.Array]:
    """The rows of a COPY statement in flat arrays of about `batch_bytes`, with `columns` values per row. Raises
    psycopg's errors. If it is not read to the end, the connection is closed, because the server would keep sending."""
    pgconn = conn.pgconn
    buffer = new_copy_buffer(columns)
    nbytes = min(batch_bytes, MAX_BATCH_BYTES)
    is_done = False
    try:
        # The extended protocol accepts no second statement, whatever a condition contains.
        pgconn.send_query_params(statement.encode(), [])
        (result,) = conn.wait(generators.execute(pgconn))
        if result.status == pq.ExecStatus.COPY_OUT:
            while conn.wait(_fill(pgconn, buffer, nbytes)) > 0:
                yield buffer.take()
            (result,) = conn.wait(generators.fetch_many(pgconn))
        is_done = True
        if result.status != pq.ExecStatus.COMMAND_OK:
            raise psycopg.errors.error_from_result(result)
    finally:
        if not is_done:
            conn.close()
    if buffer.rows:
        yield buffer.take()


def _fill(pgconn: pq.abc.PGconn, buffer: CopyBuffer, nbytes: int) -> PQGen[int]:
    """Fill the buffer, waiting for the server where necessary."""
    while (state := buffer.fill(pgconn.get_copy_data, nbytes)) == 0:
        while not (yield _READABLE):
            continue
        pgconn.consume_input()
    return state


def row_lists(values: pa.Array, columns: int) -> pa.Array:
    """The flat values as one list per row: the form of `new` in the schema CHANGES."""
    offsets = pa.array(np.arange(0, len(values) + 1, columns, dtype=np.int32))
    return pa.ListArray.from_arrays(offsets, values, type=CHANGES.field("new").type)


class PythonCopyBuffer:
    def __init__(self, columns: int) -> None:
        if columns < 1:
            raise ValueError(f"rows have at least one column, not {columns}")
        self._columns = columns
        self._values: list[bytes | None] = []
        self._nbytes = 0

    @property
    def rows(self) -> int:
        return len(self._values) // self._columns

    def fill(self, get: GetCopyData, nbytes: int) -> int:
        while self._nbytes < nbytes:
            size, line = get(1)
            if size <= 0:
                return size
            self._values += self._split(bytes(line))
            self._nbytes += size
        return 1

    def _split(self, line: bytes) -> list[bytes | None]:
        if not line.endswith(b"\n"):
            raise no_end_error()
        fields = line[:-1].split(b"\t")
        if len(fields) != self._columns:
            raise column_count_error(len(fields), self._columns)
        if b"\\" not in line:
            return list(fields)
        return [_unescape(field) for field in fields]

    def take(self) -> pa.Array:
        made = pa.array(self._values, pa.binary())
        self._values, self._nbytes = [], 0
        return made


_ESCAPED = re.compile(rb"\\(.?)", re.DOTALL)
_ESCAPES = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v", b"\\": b"\\"}


def _unescape(field: bytes) -> bytes | None:
    if field == rb"\N":
        return None
    return _ESCAPED.sub(_meant, field) if b"\\" in field else field


def _meant(found: re.Match[bytes]) -> bytes:
    try:
        return _ESCAPES[found[1]]
    except KeyError:
        raise escape_error(found[1]) from None


def no_end_error() -> DecodeError:
    """A message that is not a line."""
    return DecodeError("a row of COPY has no end of line", _ADVICE)


def column_count_error(found: int, columns: int) -> DecodeError:
    """A line with more or fewer values than requested."""
    return DecodeError(f"a row of COPY has {found} columns, not {columns}", _ADVICE)


def escape_error(behind: bytes) -> DecodeError:
    """A backslash before a character that is never escaped."""
    return DecodeError(f"a row of COPY has an unknown escape: {(chr(92).encode() + behind)!r}", _ADVICE)


def new_copy_buffer(columns: int) -> CopyBuffer:
    """An empty buffer: the compiled one, unless it was not built or PGCDC_PURE_PYTHON=1 says otherwise."""
    module = load_compiled("source.postgres.snapshot._copy")
    made: CopyBuffer = module.CompiledCopyBuffer(columns) if module is not None else PythonCopyBuffer(columns)
    return made
