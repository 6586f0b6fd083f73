"""The cast alone: rows as they lie in a segment, into columns of Spark's types."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import psycopg
import pyarrow as pa

from pgcdc.postgres.database import connect
from pgcdc.postgres.types.catalog import TypeCatalog
from pgcdc.postgres.types.column import ColumnType, TypeOptions, split_columns
from pgcdc.postgres.types.mapping import map_type

__all__ = ["Casting", "measure_casting"]

BATCH_ROWS = 65_536
SMALL_ROWS = 100
TARGET_ROWS = 1_024

# Every twentieth of the texts is NULL.
_ROWS = """
SELECT k * 7919::int8, k::int4, (k * 137 % 1000000007 / 100.0)::numeric(12,2), k % 3 = 0,
       CASE WHEN k % 20 > 0 THEN 'some text of row ' || k END, left(md5(k::text), 12)::varchar(40),
       '2026-01-01 00:00:00+00'::timestamptz + k * interval '1.234567 s', '2020-01-01'::date + k % 3650,
       sin(k), md5(k::text)::uuid
FROM generate_series(1, $1::int4) k
"""


@dataclass(frozen=True, slots=True)
class Casting:
    """Microseconds of CPU for a row."""

    whole_us: list[float]
    """Of each round, in batches of BATCH_ROWS."""
    split_us: float
    """Of it: taking the columns out of the rows."""
    small_us: float
    """In batches of SMALL_ROWS."""
    batch_us: float
    """A whole batch of TARGET_ROWS."""


def measure_casting(url: str, rows: int, rounds: int) -> Casting:
    """Ten columns of different types."""
    values, kinds = fetch_rows(url, rows)
    batches = [values.slice(first, BATCH_ROWS) for first in range(0, rows, BATCH_ROWS)]
    small = [values.slice(first, SMALL_ROWS) for first in range(0, rows // 10, SMALL_ROWS)]
    whole = [_time(batches, kinds) / rows for _ in range(rounds)]
    splits = [_time(batches, kinds, convert=False) / rows for _ in range(rounds)]
    smalls = [_time(small, kinds) / sum(map(len, small)) for _ in range(rounds)]
    medium = [values.slice(first, TARGET_ROWS) for first in range(0, rows // TARGET_ROWS * TARGET_ROWS, TARGET_ROWS)]
    mediums = [_time(medium, kinds) / len(medium) for _ in range(rounds)]
    return Casting(whole, float(np.median(splits)), float(np.median(smalls)), float(np.median(mediums)))


def fetch_rows(url: str, rows: int) -> tuple[pa.ListArray, list[ColumnType]]:
    """The server's own text, as in a segment: a list of values for each row."""
    with connect(url) as conn:
        catalog = TypeCatalog.load(conn)
        result = conn.pgconn.exec_params(_ROWS.encode(), [str(rows).encode()], result_format=0)
        if result.status != psycopg.pq.ExecStatus.TUPLES_OK:
            raise psycopg.errors.error_from_result(result)
    width = result.nfields
    flat = pa.array([result.get_value(row, column) for row in range(rows) for column in range(width)], pa.binary())
    offsets = pa.array(np.arange(0, rows * width + 1, width, dtype=np.int32))
    kinds = [map_type(catalog, result.ftype(n), result.fmod(n), 0, TypeOptions()) for n in range(width)]
    return pa.ListArray.from_arrays(offsets, flat), kinds


def _time(batches: list[pa.ListArray], kinds: list[ColumnType], *, convert: bool = True) -> float:
    began = time.process_time()
    for batch in batches:
        columns = split_columns(batch.flatten(), len(kinds))
        if convert:
            for kind, column in zip(kinds, columns, strict=True):
                kind.convert(column)
    return (time.process_time() - began) * 1e6
