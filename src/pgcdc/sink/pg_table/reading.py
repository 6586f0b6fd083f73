"""Rows of a target's table as text, for `read_back`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import pyarrow as pa

from pgcdc.postgres.database import Connection, quote_identifier, quote_qualified
from pgcdc.sink.pg_table.options import TableName

BATCH_ROWS = 10_000
_COLUMNS = "SELECT attname::text FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0"


def read_rows(conn: Connection, name: TableName, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """All rows; none if the table does not exist. Uses COPY, because a cast writes other texts (`true` for `t`)."""
    known = {column for (column,) in conn.execute(_COLUMNS, (quote_qualified(*name),))}
    if not known:
        return
    listed = ", ".join(quote_identifier(one) if one in known else "NULL" for one in columns)
    with conn.cursor().copy(f"COPY (SELECT {listed} FROM {quote_qualified(*name)}) TO STDOUT".encode()) as copy:
        rows = copy.rows()
        while part := list(islice(rows, BATCH_ROWS)):
            arrays = [pa.array(one, pa.string()) for one in zip(*part, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, list(columns))
