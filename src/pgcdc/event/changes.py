"""Table changes for sinks: one by one, each with its row's key and the values after the change. Also rebuilds them from
dead letters, which keep only the rendered event."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.errors import ConfigError, PgcdcError, SinkError
from pgcdc.core.position import Position
from pgcdc.core.relation import OldKind, Op, Relation, ShapeHistory
from pgcdc.event.batch import Batch, TableChanges, split_forms
from pgcdc.event.columns import MAP, NAMES, ColumnReader, shape_text
from pgcdc.event.edits import SimpleChain
from pgcdc.event.events import block_schema, events_of
from pgcdc.event.forms import has_key
from pgcdc.event.frame import EventOptions
from pgcdc.event.shape import TableShape

Bools = npt.NDArray[np.bool_]
Key = tuple[str | None, ...]


class KeyedChange(NamedTuple):
    """The effect of a change on one row; for a TRUNCATE, on all rows."""

    position: str
    table: Relation
    op: Op
    key: Key  # The row's key after the change; for a DELETE, before it. A value that was not sent is None
    old_key: Key  # The row's previous key: the same, unless an UPDATE changed it
    row: dict[str, str | None]  # The known values, as text
    lacks: tuple[str, ...]  # Columns with unchanged values that were not sent


def keyed_changes(batch: Batch, id_column: str = "") -> Iterator[KeyedChange]:
    """The changes of a batch, in stream order for each table. `id_column` replaces the key of every table. Raises
    SinkError if a table's rows cannot be identified."""
    for run in batch.tables():
        positions = batch.positions().take(pa.array(run.rows)).to_pylist()
        names = [column.name for column in run.relation.columns]
        if run.op[0] == Op.TRUNCATE:
            yield KeyedChange(positions[0], run.relation, Op.TRUNCATE, (), (), {}, ())
            continue
        key = [names.index(name) for name in key_columns(run.relation, run.details, id_column)]
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
    """Split a batch of table changes into parts of limited size. A row above the limit and a TRUNCATE each get their
    own part."""
    cuts = np.flatnonzero(batch.events.column("op").to_numpy() == Op.TRUNCATE)
    cuts = np.unique(np.concatenate([cuts, cuts + 1, [len(batch)]]))
    begin = 0
    while True:
        end = min(begin + max_events, int(cuts[np.searchsorted(cuts, begin, side="right")])) if len(batch) else 0
        while end > begin + 1 and batch.events.slice(begin, end - begin).nbytes > max_bytes:
            end = (begin + end) // 2
        part = batch.slice(begin, end)  # a position is never split
        yield part
        begin += len(part)
        if begin >= len(batch):
            return


def check_keys(adapter: str, relations: Callable[[], Iterable[Relation]], id_column: str) -> None:
    """Raise ConfigError for tables whose rows have no key, before any row is read."""
    try:
        found = list(relations())
    except PgcdcError:  # callers that need the source report this themselves
        return
    for one in found:
        if not id_column and one.replica_identity == "f":
            continue  # the catalog supplies the key later
        try:
            key_columns(one, None, id_column)
        except SinkError as error:
            raise ConfigError(f"adapter {adapter}: {error.message}", error.advice) from None


def key_columns(relation: Relation, details: Mapping[str, Any] | None, id_column: str) -> Sequence[str]:
    """The key columns of a table. Raises SinkError if its rows cannot be identified."""
    details = details or {}
    columns = {column.name: column for column in relation.columns}
    title = f"table {relation.channel.partition(':')[2]}"
    if id_column:
        if id_column not in columns:
            raise SinkError(
                f"{title} has no column {id_column}", "Set another id_column for its adapter, or use routes"
            )
        if relation.replica_identity in ("d", "i") and not columns[id_column].is_key:
            raise SinkError(
                f"{title}: its replica identity lacks {id_column}, so a DELETE would not identify its row",
                "Run ALTER TABLE ... REPLICA IDENTITY FULL, or set id_column to a column of the identity",
            )
        return [id_column]
    primary = details.get("primary_key") or ()
    key = [name for name, column in columns.items() if column.is_key] if has_key(relation) else list(primary)
    if gone := [name for name in key if name not in columns]:  # a dead letter may be older than the chain
        raise SinkError(
            f"rows of {title} lack {', '.join(gone)} of its key: a transform drops or renames it",
            "Set id_column to a column that they have, or keep the key out of drop_columns and rename_fields",
        )
    if not key:
        raise SinkError(
            f"rows of {title} have no key",
            "Give it a primary key that no transform drops, set id_column, or use routes",
        )
    if not has_key(relation) and details.get("is_key_deferrable"):
        raise SinkError(
            f"the key of {title} is deferrable: two rows may share one until the transaction ends",
            "Set id_column to a column whose values are never swapped, or make the key NOT DEFERRABLE",
        )
    return list(primary) if set(primary) == set(key) else key


def settle(changes: TableChanges, columns: Sequence[int] | None = None) -> tuple[list[pa.Array], list[Bools | None]]:
    """Each change's row, and which of its values are unknown. For a DELETE it is the old row. Otherwise the old row, if
    it was sent, supplies the values that the new row omits. `columns`: read only these from a DELETE's old row."""
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


# --- rendered events as changes again

_EVENT = pa.schema(
    [
        *((name, pa.string()) for name in ("position", "id", "channel", "operation", "schema", "table", "shape")),
        *(("row", MAP), ("old", MAP), ("unchanged_toast_columns", NAMES)),
    ]
)


def read_changes(batch: Batch, shapes: ShapeHistory, chain: SimpleChain | None = None) -> Batch:
    """The same batch of lines or records, in the form `tables`. Raises SinkError if a line is not one of our events.
    `chain` is what the adapter's transforms do to columns now; the event may be older."""
    texts = zip(batch.positions().to_pylist(), batch.texts(), strict=True)
    events = [_read_event(*one, shapes, chain or SimpleChain((), ())) for one in texts]
    rows = pa.RecordBatch.from_pylist([one for one in events if one is not None], _EVENT)
    frame, given = ColumnReader().read(rows)
    tables = SimpleChain((), (), ("tables",))
    made = events_of(frame, None, block_schema([tables]), EventOptions(), [tables], given)
    whole = replace(batch, events=pa.Table.from_batches([made.replace_schema_metadata()]))
    return split_forms(whole, [(0, "tables")], [made.schema.metadata])[0]


def _read_event(position: str, text: str, shapes: ShapeHistory, chain: SimpleChain) -> dict[str, Any] | None:
    """The columns of an event (`event.columns`); None if it does not change a table."""
    event = _parse(text)
    operation, payload = event["operation"], event["payload"]
    row, old, lacks = payload["row"], payload["old"], payload.get("_unchanged_toast_columns", ())
    op = Op[operation] if operation in Op.__members__ else None
    if op is None or (row is None and op in (Op.INSERT, Op.SNAPSHOT, Op.UPDATE, Op.DELETE)):
        raise SinkError(
            f"the operation {operation} at {position} cannot be applied to a table",
            "A transform made it. Only INSERT, UPDATE, DELETE, TRUNCATE and SNAPSHOT can be applied",
        )
    if op not in (Op.INSERT, Op.SNAPSHOT, Op.UPDATE, Op.DELETE, Op.TRUNCATE):
        return None
    table = source_table(event["channel"], payload["table"])
    shape = _find_shape(shapes, table, position, chain, {*(row or ()), *lacks, *(old or ())})
    return {
        "position": position,
        "id": event.get("id"),
        "channel": event["channel"],
        "operation": operation,
        "schema": table[0],
        "table": table[1],
        "shape": None if shape is None else shape_text(shape),
        "row": None if row is None else list(row.items()),
        "old": None if old is None else list(old.items()),
        "unchanged_toast_columns": list(lacks) or None,
    }


def source_table(channel: str, table: str) -> tuple[str, str]:
    """The table of an event, from its channel and `payload.table`. Both are needed because names may contain dots."""
    full = channel.partition(":")[2]
    return ("public", table) if full == table else (full[: -len(table) - 1], table)


def _find_shape(
    shapes: ShapeHistory, table: tuple[str, str], position: str, chain: SimpleChain, names: set[str]
) -> TableShape | None:
    """The table's shape after the chain; the shape before it if only that one has its key among these columns."""
    change = shapes.in_force(*table, Position.parse(position))
    if change is None:
        return None
    behind, before = TableShape(*chain.describe(change.after, change.details)), TableShape(change.after, change.details)
    keys = [{one.name for one in shape.relation.columns if one.is_key} for shape in (behind, before)]
    return before if not keys[0] <= names and keys[1] <= names else behind


def _parse(text: str) -> dict[str, Any]:
    try:
        event = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise SinkError(f"a line is not JSON: {error}", "A transform made it. Only events can be applied") from None
    if isinstance(event, dict) and {"channel", "operation", "payload"} <= event.keys():
        return event
    inner = event.get("payload", event) if isinstance(event, dict) else event
    what = "Debezium's" if isinstance(inner, dict) and "op" in inner and "before" in inner else "another"
    raise SinkError(
        f"a line has {what} envelope and cannot be applied to a table",
        "Remove the transform debezium or cloudevents from this adapter, or use the mode append",
    )
