"""A spool that no capture wrote, for queries without a database (`option("_spool", ...)`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pgcdc.core.position import Position
from pgcdc.core.relation import OldKind, Op, Relation
from pgcdc.spool.schema import CHANGES, TRANSACTIONS
from pgcdc.spool.segment import CaptureBatch, Part
from pgcdc.spool.writer import SpoolWriter

START_LSN = 8

Values = Sequence[bytes | None] | None
Change = tuple[Relation, Op, Values, Values]
"""Relation, operation, new values, old key."""


def write_spool(folder: Path, transactions: Sequence[Sequence[Change]]) -> Position:
    """One segment for each transaction; where the stream ends."""
    writer = SpoolWriter(folder, Position.end(START_LSN))
    lsn = START_LSN
    for changes in transactions:
        lsn += 8
        rows = [_row(number, writer.relations.intern(change[0]), change) for number, change in enumerate(changes, 1)]
        batch = pa.RecordBatch.from_pylist(rows, schema=CHANGES)
        owner = {
            "commit": lsn,
            "kind": 0,
            "commit_time": 0,
            "xid": 1,
            "rows": len(rows),
            "complete": True,
            "origin": None,
        }
        owners = pa.RecordBatch.from_pylist([owner], schema=TRANSACTIONS)
        part = Part(batch.num_rows, batch.nbytes, (len(rows), 0), batch)
        writer.append(CaptureBatch(part, owners, writer.relations, Position.end(lsn), lsn))
    writer.close()
    return Position.end(lsn)


def _row(number: int, version: int, change: Change) -> dict[str, Any]:
    _, op, new, old = change
    kind = OldKind.NONE if old is None else OldKind.KEY
    return {
        "ordinal": number, "sub": 0, "op": int(op), "relation": version, "new": new, "old": old,
        "old_kind": int(kind), "unchanged": None, "prefix": None,
    }  # fmt: skip
