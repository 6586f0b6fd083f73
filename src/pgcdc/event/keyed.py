"""Changes of tables one by one, for stores that know a row by its key: which key each is about, and what is there then."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.errors import SinkError
from pgcdc.core.relation import OldKind, Op, Relation
from pgcdc.event.batch import Batch, TableChanges
from pgcdc.event.forms import has_key

Bools = npt.NDArray[np.bool_]
Key = tuple[str | None, ...]


class KeyedChange(NamedTuple):
    """What a change does to one row; of a TRUNCATE to all."""

    position: str
    table: Relation
    op: Op
    key: Key
    """The key of the row: after the change, of a DELETE before it. A value that did not come is None."""
    old_key: Key
    """The key that the row had: the same, unless an UPDATE changed it."""
    row: dict[str, str | None]
    """The values that are known, as text."""
    lacks: tuple[str, ...]
    """The columns whose values are unchanged, and were not sent."""


def keyed_changes(batch: Batch, id_column: str = "") -> Iterator[KeyedChange]:
    """The changes of a batch, those of one table in stream order. `id_column` is the key of all tables, instead of theirs.

    SinkError: rows of a table cannot be told apart.
    """
    for run in batch.tables():
        positions = batch.positions().take(pa.array(run.rows)).to_pylist()
        names = [column.name for column in run.relation.columns]
        if run.op[0] == Op.TRUNCATE:
            yield KeyedChange(positions[0], run.relation, Op.TRUNCATE, (), (), {}, ())
            continue
        key = [names.index(name) for name in _key_columns(run, id_column)]
        values, unknown = settle(run)
        partial = [(names[at], marks) for at, marks in enumerate(unknown) if marks is not None]
        rows = zip(*(column.to_pylist() for column in values), strict=True)
        old_keys = zip(*(run.old[at].to_pylist() for at in key), strict=True)
        has_old: Iterable[bool] = ((run.op == Op.UPDATE) & (run.old_kind != OldKind.NONE)).tolist()
        for at, (position, op, row, old, moved) in enumerate(
            zip(positions, run.op.tolist(), rows, old_keys, has_old, strict=True)
        ):
            found = dict(zip(names, row, strict=True))
            lacks = tuple(name for name, marks in partial if marks[at])
            for name in lacks:
                found.pop(name)
            after: Key = tuple(found.get(names[one]) for one in key)
            before = old if moved and None not in old else after
            yield KeyedChange(position, run.relation, Op(op), after, before, found, lacks)


def parts_of(batch: Batch, max_events: int, max_bytes: int) -> Iterator[Batch]:
    """A batch of changes of tables in parts of limited size; a larger row, and a TRUNCATE, stand alone."""
    cuts = np.flatnonzero(batch.events.column("op").to_numpy() == Op.TRUNCATE)
    cuts = np.unique(np.concatenate([cuts, cuts + 1, [len(batch)]]))
    begin = 0
    while True:
        end = min(begin + max_events, int(cuts[np.searchsorted(cuts, begin, side="right")])) if len(batch) else 0
        while end > begin + 1 and batch.events.slice(begin, end - begin).nbytes > max_bytes:
            end = (begin + end) // 2
        part = batch.slice(begin, end)  # a position is never cut
        yield part
        begin += len(part)
        if begin >= len(batch):
            return


def _key_columns(run: TableChanges, id_column: str) -> Sequence[str]:
    relation, details = run.relation, run.details or {}
    columns = {column.name: column for column in relation.columns}
    title = f"table {relation.channel.partition(':')[2]}"
    if id_column:
        if id_column not in columns:
            raise SinkError(f"{title} has no column {id_column}", "Give its adapter another id_column, or use routes")
        if relation.replica_identity in ("d", "i") and not columns[id_column].is_key:
            raise SinkError(
                f"{title}: its replica identity does not have {id_column}: a DELETE would not say which row it is about",
                "Run ALTER TABLE ... REPLICA IDENTITY FULL, or name a column of the identity",
            )
        return [id_column]
    primary = details.get("primary_key") or ()
    key = [name for name, column in columns.items() if column.is_key] if has_key(relation) else list(primary)
    if gone := [name for name in key if name not in columns]:  # dead letters may be older than the chain
        raise SinkError(
            f"rows of {title} come without {', '.join(gone)} of its key: a transform drops or renames it",
            "Name a column that they have with id_column, or keep the key out of drop_columns and rename_fields",
        )
    if not key:
        raise SinkError(
            f"rows of {title} come without a key",
            "Give it a primary key that no transform drops, name a column with id_column, or use routes",
        )
    if not has_key(relation) and details.get("is_key_deferrable"):
        raise SinkError(
            f"the key of {title} is checked at the end of a transaction: two rows may have the same one until then",
            "Name a column with id_column that is never exchanged, or make the key NOT DEFERRABLE",
        )
    return list(primary) if set(primary) == set(key) else key


def settle(changes: TableChanges, columns: Sequence[int] | None = None) -> tuple[list[pa.Array], list[Bools | None]]:
    """The row that each change is about, and which of its values are not known.

    Of a DELETE that is the old row. Elsewhere the old row has the values that were not sent, as far as it came.
    `columns`: only of these the old row of a DELETE is wanted.
    """
    has_old: Bools = changes.old_kind != OldKind.NONE
    is_full: Bools = changes.old_kind == OldKind.FULL
    is_delete: Bools = (changes.op == Op.DELETE) & has_old
    has_deletes = bool(is_delete.any())
    values, unknown = list(changes.new), list(changes.unchanged)
    for number, column in enumerate(changes.relation.columns):
        missing = changes.unchanged[number]
        from_old: Bools | None = is_delete if has_deletes and (columns is None or number in columns) else None
        if missing is not None:
            told: Bools = missing & (has_old if column.is_key else is_full)
            old_missing = changes.old_unchanged[number]
            if old_missing is not None:
                told &= ~old_missing
            left: Bools = missing & ~told
            unknown[number] = left if left.any() else None
            from_old = told if from_old is None else from_old | told
        if from_old is not None and from_old.any():
            values[number] = pc.if_else(pa.array(from_old), changes.old[number], values[number])
    return values, unknown
