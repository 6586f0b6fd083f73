"""Rows that were read from a table, in the schema of changes: what files of rows (`releases.stage_rows`) are made of."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from pgcdc.core.operation import OldKind, Op
from pgcdc.core.relation import Relation
from pgcdc.source.postgres.snapshot.copy import row_lists
from pgcdc.spool.schema import CHANGES

__all__ = ["deleted_rows", "snapshot_mark", "snapshot_rows", "truncated_rows"]


def snapshot_rows(values: pa.Array, columns: int) -> pa.RecordBatch:
    """Rows as changes of the operation SNAPSHOT; `values` are those of `copy_rows`: flat, `columns` for each row."""
    lists = row_lists(values, columns)
    return _batch(Op.SNAPSHOT, {"new": lists}, len(lists))


def deleted_rows(rows: pa.Array) -> pa.RecordBatch:
    """Rows that are gone, as DELETEs. `rows` are lists of values, one for each column; only those of the key count."""
    return _batch(Op.DELETE, {"old": rows}, len(rows), OldKind.KEY)


def truncated_rows() -> pa.RecordBatch:
    """A TRUNCATE: all rows of the table come again."""
    return _batch(Op.TRUNCATE, {}, 1)


def snapshot_mark(op: Op, snapshot: str, kind: str, table: Relation, rows: int) -> pa.RecordBatch:
    """One event on `pgcdc:_snapshot`: the reading of a table begins, or is complete."""
    texts = [snapshot, kind, table.namespace, table.name, str(rows)]
    values = pa.array([[text.encode() for text in texts]], CHANGES.field("new").type)
    return _batch(op, {"new": values}, 1, relation=-1)


def _batch(
    op: Op, known: dict[str, pa.Array], count: int, old_kind: OldKind = OldKind.NONE, relation: int = 0
) -> pa.RecordBatch:
    columns = {
        "ordinal": pa.array(np.zeros(count), pa.int64()),
        "sub": pa.array(np.zeros(count), pa.int32()),
        "op": pa.array(np.full(count, int(op)), pa.uint8()),
        "relation": pa.array(np.full(count, relation), pa.int32()),
        "old_kind": pa.array(np.full(count, int(old_kind)), pa.uint8()),
        **known,
    }
    arrays = [columns[field.name] if field.name in columns else pa.nulls(count, field.type) for field in CHANGES]
    return pa.RecordBatch.from_arrays(arrays, schema=CHANGES)
