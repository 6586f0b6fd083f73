"""Changes that the stream has, and a table's rows had already when they were read: they are left out.

The rows of an initial snapshot are those of the moment at which the slot begins, so that the stream follows without a gap.
If that snapshot was lost, a table is read in a younger one: then the stream brings changes that its rows have already. Which
ones is known exactly, by the transactions that the younger snapshot saw.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgcdc.source.postgres.snapshot.plan import SkipRule
from pgcdc.spool.batch import CaptureBatch, Part

__all__ = ["is_visible", "leave_out"]

_HALF = 1 << 31


def is_visible(xids: npt.NDArray[np.int64], snapshot: str) -> npt.NDArray[np.bool_]:
    """Which of these transactions a pg_snapshot (`xmin:xmax:xip,...`) sees. They have 32 bits, as in the stream."""
    _, xmax, running = snapshot.split(":")
    last = int(xmax)
    # The 64 bits that are nearest to the snapshot: nothing else can be in the stream beside it.
    distance = (xids - last + _HALF) % (2 * _HALF) - _HALF
    full = last + distance
    in_progress = np.array([int(one) for one in running.split(",") if one], np.int64)
    seen: npt.NDArray[np.bool_] = (full < last) & ~np.isin(full, in_progress)
    return seen


def leave_out(batch: CaptureBatch, rules: Sequence[SkipRule]) -> CaptureBatch:
    """The batch without what the rules name. Positions stay: whoever comes behind a change has the same as with it."""
    lsns = batch.transactions.column("lsn").to_numpy()
    if batch.part is None or not len(lsns) or lsns[0] > max((rule.lsn for rule in rules), default=0):
        return batch
    data = batch.part.load().combine_chunks().to_batches()[0]
    counts = batch.transactions.column("rows").to_numpy()
    of_row = np.repeat(np.arange(len(counts)), counts)
    versions = data.column("relation").to_numpy()
    gone = np.zeros(len(versions), np.bool_)
    for rule in rules:
        mine = [version for version in np.unique(versions) if version >= 0 and batch.relations[version].oid == rule.oid]
        known = is_visible(batch.transactions.column("xid").to_numpy(), rule.visible) & (lsns <= rule.lsn)
        gone |= np.isin(versions, mine) & known[of_row]
    if not gone.any():
        return batch
    kept = data.filter(pa.array(~gone))
    left = np.bincount(of_row[~gone], minlength=len(counts))
    index = batch.transactions.schema.get_field_index("rows")
    transactions = batch.transactions.set_column(
        index, batch.transactions.schema.field(index), pa.array(left, pa.int64())
    ).filter(pa.array(left > 0))
    if batch.part.path is not None:
        batch.part.path.unlink(missing_ok=True)
    part = Part(kept.num_rows, kept.nbytes, batch.part.last, kept) if kept.num_rows else None
    return CaptureBatch(part, transactions, batch.relations, batch.end, batch.last_lsn, batch.told)
