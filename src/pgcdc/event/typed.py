"""Changes of one table as rows of its own columns, in Spark's types. Old and new values of a group of changes are
converted into one Arrow array per column; the output rows only pick from it. So a DELETE (which shows its old values),
`_before` and the retractions of a Z-set need no conversion of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.errors import ConversionError, GapError, SchemaChanged
from pgcdc.core.position import Kind, Position
from pgcdc.core.relation import OldKind, Op, Relation
from pgcdc.event.events import EventColumns
from pgcdc.event.frame import I64, Bools, EventOptions, make_frame
from pgcdc.event.lines import places
from pgcdc.postgres.database import name_table, quote_qualified
from pgcdc.postgres.types.column import ColumnType, Rejected, take_column
from pgcdc.spool.reader import SegmentSlice, read_slice
from pgcdc.spool.schema import CHANGES

BEFORE = "_before"
UNCHANGED = "_unchanged_toast_columns"
WEIGHT = "_weight"
HEARTBEAT = "HEARTBEAT"  # `_op` of a row that only reports how far time has advanced
LOAD_AGAIN = "Load the table again"  # The start of the advice in SchemaChanged


@dataclass(frozen=True, slots=True)
class RowOptions:
    """How changes become rows."""

    zset: bool = False  # Rows with weights: an UPDATE retracts the old row (-1) and adds the new one (+1)
    truncate: str = "error"
    """How a Z-set handles TRUNCATE, which does not list the removed rows: `error`, or `mark` it with a row."""
    other_shapes: bool = False
    """Read changes made under other columns as far as possible; otherwise refuse them."""
    events: EventOptions = EventOptions()  # noqa: RUF009 - frozen
    snapshot_end: Position = Position.at(0, 0)  # noqa: RUF009 - frozen
    """The end of the initial snapshot's rows: only snapshot rows up to here are new to a Z-set."""


@dataclass(frozen=True, slots=True)
class TypedColumn:
    """One column: its definition in the database, and the type it gets."""

    name: str
    type_oid: int
    typmod: int
    type: ColumnType


@dataclass(frozen=True)
class TypedTable:
    """The shape for which a query was built. Picklable: it is sent to the executors."""

    namespace: str
    name: str
    columns: tuple[TypedColumn, ...]
    is_whole: bool = True
    """The query wants every column the table has; otherwise columns that it does not ask for may come and go."""
    before: tuple[str, ...] = ()  # The columns of the old row that it asked for

    @property
    def title(self) -> str:
        """Its name, for messages."""
        return name_table(self.namespace, self.name)

    @property
    def sql(self) -> str:
        """Its name, for SQL."""
        return quote_qualified(self.namespace, self.name)

    @cached_property
    def by_name(self) -> dict[str, TypedColumn]:
        """Its columns by name."""
        return {column.name: column for column in self.columns}

    @cached_property
    def before_arrow(self) -> pa.StructType:
        """The Arrow type of `_before`."""
        return pa.struct([pa.field(name, self.by_name[name].type.arrow) for name in self.before])

    def is_named(self, shape: Relation) -> bool:
        """Whether changes of this shape are changes of this table."""
        return (shape.namespace, shape.name) == (self.namespace, self.name)

    def can_read(self, shape: Relation) -> bool:
        """Whether its columns can be read from this shape, with NULL for columns that no longer exist. A column with
        another type qualifies only if its values are converted exactly or rejected: text, integers and decimals."""
        theirs = {column.name: (column.type_oid, column.typmod) for column in shape.columns}
        return all(
            theirs.get(one.name, (one.type_oid, one.typmod)) == (one.type_oid, one.typmod) or _is_strict(one.type.arrow)
            for one in self.columns
        )

    def explain(self, shape: Relation) -> str:
        """A short description of the differences from the query's columns; empty: none."""
        theirs = {column.name: (column.type_oid, column.typmod) for column in shape.columns}
        ours = {column.name: (column.type_oid, column.typmod) for column in self.columns}
        found = [f"column {name} is missing" for name in ours if name not in theirs]
        found += [f"column {name} has another type" for name in ours if name in theirs and theirs[name] != ours[name]]
        if self.is_whole:
            found += [f"column {name} is new" for name in theirs if name not in ours]
        return "; ".join(found)


def _is_strict(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind))


def typed_batch(
    pieces: Sequence[SegmentSlice],
    shapes: Mapping[int, Relation],
    table: TypedTable,
    schema: pa.Schema,
    options: RowOptions,
) -> pa.RecordBatch | None:
    """The table's changes in adjacent slices, with exactly `schema`; None if there are none. `shapes` are the versions
    of its relation."""
    found = []
    for piece in pieces:
        changes, owners = read_slice(piece)
        mine = pa.array(np.isin(changes.column("relation").to_numpy(), list(shapes)))
        found.append((changes.filter(mine), owners.filter(mine)))
    changes, owners = (pa.concat_tables(tables).combine_chunks() for tables in zip(*found, strict=True))
    if not len(changes):
        return None
    version = changes.column("relation").to_numpy()
    groups = []
    for number in np.unique(version).tolist():
        rows = np.flatnonzero(version == number)
        chosen = (one if len(rows) == len(version) else one.take(pa.array(rows)) for one in (changes, owners))
        mine, theirs = (one.combine_chunks().to_batches()[0] for one in chosen)
        groups.append((rows, _Group(mine, theirs, shapes[number], table, options)))
    batches = [group.batch(schema) for _, group in groups]
    if len(batches) == 1:
        return batches[0]
    order = np.concatenate([rows[group.row] for rows, group in groups])
    return pa.concat_batches(batches).take(pa.array(np.argsort(order, kind="stable")))


def heartbeat_batch(position: Position, time_us: int, schema: pa.Schema) -> pa.RecordBatch:
    """One row that says: everything committed before this time has arrived."""
    known = {
        "_op": pa.array([HEARTBEAT]),
        "_lsn": pa.array([position.commit]),
        "_ordinal": pa.array([position.place]),
        "_ts": pa.array([time_us]),
    }
    arrays = [
        known[field.name].cast(field.type) if field.name in known else pa.nulls(1, field.type) for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class _Group:
    """Changes of the same shape, and the rows they become."""

    def __init__(
        self, changes: pa.RecordBatch, owners: pa.RecordBatch, shape: Relation, table: TypedTable, options: RowOptions
    ) -> None:
        policy = options.events.invalid_text
        zeros = pa.array(np.zeros(len(changes), np.int32))  # the frame's only shape
        changes = changes.set_column(CHANGES.get_field_index("relation"), "relation", zeros)
        self._frame = make_frame(
            changes, owners, [shape], EventOptions(invalid_text="keep" if policy == "error" else policy)
        )
        self._changes = self._frame.changes
        self._shape = shape
        self._table = table
        self._options = options
        if not (table.can_read(shape) if options.other_shapes else not table.explain(shape)):
            raise SchemaChanged(
                f"the columns of table {table.title} at {self._position(0)} differ from those of the query: "
                f"{table.explain(shape)}",
                f"{LOAD_AGAIN}: the query resumes where it stopped, with the columns at that position",
            )
        self._op = self._frame.op
        self._has_new = _is_there(changes.column("new"))
        self._has_old = _is_there(changes.column("old"))
        self._news = int(self._has_new.sum())
        self._olds = int(self._has_old.sum())
        self.row, self._from_old, self._weight = self._choose()
        """For each output row: the change it comes from, whether it shows the old values, and its weight."""
        self._shown = EventColumns(self._frame, None, EventOptions())
        self._converted: dict[str, pa.Array] = {}
        self._flat: dict[str, pa.Array] = {}

    def batch(self, schema: pa.Schema) -> pa.RecordBatch:
        """The output rows with exactly these columns."""
        self._needs_old = bool(self._from_old.any()) or (BEFORE in schema.names and self._olds > 0)
        arrays = [self._column(field) for field in schema]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    # --- which rows are output

    def _choose(self) -> tuple[I64, Bools, npt.NDArray[np.int32]]:
        rows: I64 = np.arange(len(self._op))
        is_delete, is_truncate = self._op == Op.DELETE, self._op == Op.TRUNCATE
        if not self._options.zset:
            return rows, is_delete, np.zeros(0, np.int32)
        if is_truncate.any() and self._options.truncate == "error":
            raise GapError(
                f"table {self._table.title} was truncated at {self._position(int(is_truncate.argmax()))}, and "
                "a Z-set cannot take back rows that it does not see",
                "Load the rows again, or set option('truncate', 'mark') for a row with _op TRUNCATE and no _weight",
            )
        self._check_pairs()
        commit, place, end = (
            self._frame.commit,
            places(self._frame.kind, self._frame.ordinal),
            self._options.snapshot_end,
        )
        is_later = (commit > end.commit) | ((commit == end.commit) & (place > end.place))
        again = (self._op == Op.SNAPSHOT) & is_later
        if again.any():
            raise GapError(
                f"table {self._table.title} was read again at {self._position(int(again.argmax()))}, and a "
                "Z-set cannot add a row again without taking back the old one",
                "Load the rows again with a new slot and a new state directory",
            )
        is_update = self._op == Op.UPDATE
        out = np.repeat(rows, 1 + is_update)
        first_of_pair = is_update[out] & np.append(out[1:] == out[:-1], False)
        from_old = is_delete[out] | first_of_pair
        return out, from_old, np.where(is_truncate[out], 0, np.where(from_old, -1, 1)).astype(np.int32)

    def _check_pairs(self) -> None:
        """A retraction needs the whole old row, and then the new row must be complete as well."""
        needs = (self._op == Op.UPDATE) | (self._op == Op.DELETE)
        lacks = needs & (self._frame.old_kind != OldKind.FULL)
        if lacks.any():
            raise ConversionError(
                f"the change of table {self._table.title} at {self._position(int(lacks.argmax()))} has no old "
                "row, which a Z-set needs",
                f"Run: ALTER TABLE {self._table.sql} REPLICA IDENTITY FULL; it applies to later changes",
            )
        unchanged = self._changes.column("unchanged")
        if unchanged.null_count < len(unchanged):
            row = int(np.flatnonzero(_is_there(unchanged))[0])
            raise ConversionError(
                f"the change of table {self._table.title} at {self._position(row)} lacks an unchanged TOAST value",
                f"Run: ALTER TABLE {self._table.sql} REPLICA IDENTITY FULL; it applies to later changes",
            )

    # --- their columns

    def _column(self, field: pa.Field) -> pa.Array:
        name = field.name
        if name in self._table.by_name:
            return self._pick(self._values(name), self._from_old, self._op[self.row] != Op.TRUNCATE)
        if name == WEIGHT:
            return pa.array(self._weight, mask=self._weight == 0)
        if name == BEFORE:
            return self._before()
        made = self._shown.column(_META[name])
        made = made if len(made) == len(self.row) else made.take(pa.array(self.row))
        if name == UNCHANGED and made.null_count < len(made):
            asked = self._table.by_name
            made = pa.array(
                [[one for one in names or () if one in asked] or None for names in made.to_pylist()], made.type
            )
        return made if made.type == field.type else made.cast(field.type)

    def _values(self, name: str) -> pa.Array:
        """New values of all changes that have them, then the old ones (if needed), then one NULL."""
        if name not in self._converted:
            column = self._table.by_name[name]
            number = next((i for i, one in enumerate(self._shape.columns) if one.name == name), None)
            if number is None:
                made = pa.nulls(self._news + self._olds, column.type.arrow)
            else:
                parts = [self._texts(side, number) for side in (("new", "old") if self._needs_old else ("new",))]
                values = parts[0] if len(parts) == 1 else pa.concat_arrays(parts)
                try:
                    made = column.type.convert(values)
                except Rejected as problem:
                    raise self._explain(name, problem) from problem
            self._converted[name] = made
        return self._converted[name]

    def _texts(self, side: str, number: int) -> pa.Array:
        if side not in self._flat:
            self._flat[side] = pc.list_flatten(self._changes.column(side))
        return take_column(self._flat[side], len(self._shape.columns), number)

    def _pick(self, values: pa.Array, from_old: Bools, there: Bools) -> pa.Array:
        """The value of each output row."""
        if not from_old.any() and there.all() and self._news == len(self.row):
            return values.slice(0, self._news)
        new_place, old_place = np.cumsum(self._has_new) - 1, np.cumsum(self._has_old) - 1 + self._news
        place = np.where(from_old, old_place[self.row], new_place[self.row])
        there = there & np.where(from_old, self._has_old[self.row], self._has_new[self.row])
        return values.take(pa.array(np.where(there, place, 0), mask=None if there.all() else ~there))

    def _before(self) -> pa.Array:
        kind = self._table.before_arrow
        there = self._has_old[self.row]
        if not there.any():
            return pa.nulls(len(self.row), kind)
        always = np.ones(len(self.row), np.bool_)
        arrays = [self._pick(self._values(field.name), always, there) for field in kind]
        return pa.StructArray.from_arrays(arrays, fields=list(kind), mask=pa.array(~there))

    # --- messages for a value that does not fit

    def _position(self, row: int) -> Position:
        commit, kind, ordinal = (one[row].item() for one in (self._frame.commit, self._frame.kind, self._frame.ordinal))
        return Position(commit, Kind(kind), ordinal)

    def _explain(self, name: str, problem: Rejected) -> ConversionError:
        is_old = problem.index >= self._news
        there = np.flatnonzero(self._has_old if is_old else self._has_new)
        row = int(there[problem.index - (self._news if is_old else 0)])
        values = self._changes.column("old" if is_old else "new")[row].as_py()
        key = ", ".join(
            f"{column.name}={show_value(value)}"
            for column, value in zip(self._shape.columns, values, strict=True)
            if column.is_key and self._shape.replica_identity != "f"
        )
        where = f"column {name} of table {self._table.title} at {self._position(row)}{f', key {key}' if key else ''}"
        return ConversionError(f"{where}: {problem.reason}", problem.advice)


_META = {
    "_op": "operation",
    "_lsn": "lsn",
    "_ordinal": "ordinal",
    "_xid": "xid",
    "_ts": "created_at",
    UNCHANGED: "unchanged_toast_columns",
}
"""The columns that events also have."""


def _is_there(column: pa.Array) -> Bools:
    there: Bools = column.is_valid().to_numpy(zero_copy_only=False)
    return there


def show_value(value: bytes | None) -> str:
    """A value as shown in a message."""
    text = "NULL" if value is None else value.decode(errors="replace")
    return text if len(text) <= 60 else f"{text[:60]}..."
