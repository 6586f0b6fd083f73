"""Spark steps on events as columns: users' conditions, SQL and Python functions, and the steps between them.

Every function takes a DataFrame of events and returns one with the same columns. In a lane there is a boolean column
`_keep`: filters only clear it, so that a chain is a series of projections. Elsewhere filters drop rows. `sql` and
`where` are Spark expressions. Everything else runs in Spark's Python workers, on whole columns with the code of
`event`, except the user's own functions.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.errors import ConfigError, TransformError
from pgcdc.core.relation import Op
from pgcdc.event.columns import CHANGEABLE, EVENT_COLUMNS, KEY_COLUMNS, SHAPE_COLUMNS
from pgcdc.event.events import edit_columns, render_columns

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

EventFunction = Callable[[dict[str, Any]], Mapping[str, Any] | None]
ArrowMap = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
Step = Mapping[str, Any]
KEEP = "_keep"
_UNCHANGED = "unchanged_toast_columns"
_VALUES, _ROW, _OLD_VALUES, _RESULT = "_values", "_row", "_old_values", "_result"
_MAP = pa.map_(pa.string(), pa.string())
_ARROW = {"row": _MAP, "old": _MAP, _UNCHANGED: pa.list_(pa.string())}
_AS_TEXT = "Values are PostgreSQL's text: return str or None, for example str(value)"
_HIDDEN = {*KEY_COLUMNS, "table_ordinal"}
_TYPES = {**{name: EVENT_COLUMNS[name] for name in CHANGEABLE}, "shape": SHAPE_COLUMNS["shape"]}


# --- SQL


def filtered(events: DataFrame, operations: Sequence[str], where: str | None) -> DataFrame:
    """Only these operations (none: all), and only row changes for which the SQL condition is true."""
    from pyspark.sql import functions as F

    passes = F.col("operation").isin(*operations) if operations else F.lit(True)
    if where is not None:
        has_row = F.col("table").isNotNull() & F.col("row").isNotNull()
        asked = _is_active(events) & passes & has_row  # skips events that are already dropped, so they cannot fail
        passes = passes & F.when(asked, F.coalesce(F.expr(where), F.lit(False))).otherwise(F.lit(True))
    if KEEP in events.columns:
        return events.withColumn(KEEP, F.col(KEEP) & passes)
    return events.where(passes)


def with_values(events: DataFrame, expressions: Mapping[str, str]) -> DataFrame:
    """Set values of `row` with SQL expressions, which all see the original row.

    Old rows (`old`, and a DELETE's row) get no additional columns, so that "not sent" never looks like NULL. For the
    same reason unchanged TOAST columns stay unchanged.
    """
    from pyspark.sql import functions as F

    columns = events.columns
    values = F.struct(*(_as_text(events, text).alias(str(number)) for number, text in enumerate(expressions.values())))
    active = _is_active(events) & F.col("table").isNotNull()
    steps = events.withColumns({_VALUES: F.when(active & F.col("row").isNotNull(), values), _ROW: F.col("row")})
    changed = {
        "row": F.when(active, _set_values(F.col(_ROW), F.col(_VALUES), list(expressions))).otherwise(F.col(_ROW))
    }
    if "old" in columns:  # the same expressions again, with the old row as `row`
        steps = steps.withColumn("row", F.col("old"))
        steps = steps.withColumn(_OLD_VALUES, F.when(active & F.col("old").isNotNull(), values))
        replaced = _replace_values(F.col("old"), F.col(_OLD_VALUES), list(expressions))
        changed["old"] = F.when(active, replaced).otherwise(F.col("old"))
    return steps.withColumns(changed).select(*columns)


def _set_values(row: Column, values: Column, names: list[str]) -> Column:
    """Set values by name: in place, or appended."""
    from pyspark.sql import functions as F

    unchanged = F.coalesce(F.col(_UNCHANGED), F.array().cast("array<string>"))
    takes_more = F.col("operation") != "DELETE"
    is_new = [takes_more & ~F.map_contains_key(row, name) & ~F.array_contains(unchanged, name) for name in names]
    added = [
        F.when(one, F.create_map(F.lit(name), values[str(number)])).otherwise(F.create_map().cast("map<string,string>"))
        for number, (name, one) in enumerate(zip(names, is_new, strict=True))
    ]
    return F.map_concat(_replace_values(row, values, names), *added)


def _replace_values(row: Column, values: Column, names: list[str]) -> Column:
    from pyspark.sql import functions as F

    def choose(name: Column, value: Column) -> Column:
        chosen = F.when(F.lit(False), value)
        for number, wanted in enumerate(names):
            chosen = chosen.when(name == wanted, values[str(number)])
        return chosen.otherwise(value)

    return F.transform_values(row, choose)


def _as_text(events: DataFrame, expression: str) -> Column:
    """A value as events carry it: PostgreSQL's text, where Spark's differs."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import BooleanType

    value = F.expr(expression)
    if isinstance(events.select(value).schema[0].dataType, BooleanType):
        return F.when(value, F.lit("t")).when(~value, F.lit("f"))
    return value.cast("string")


def _is_active(events: DataFrame) -> Column:
    from pyspark.sql import functions as F

    return F.col(KEEP) if KEEP in events.columns else F.lit(True)


# --- in Python workers


def run_native(events: DataFrame, steps: Sequence[Step]) -> DataFrame:
    """The events after these steps (`Transform.worker_step`): simple ones as `event.edits` applies them, and
    functions."""
    from pyspark.sql import functions as F

    columns = [one for one in events.columns if not one.startswith("_") and one not in _HIDDEN]
    changed = [one for one in _TYPES if one in columns]
    fields = ", ".join(f"`{one}` {_TYPES[one].upper()}" for one in changed)
    folder, active = os.getcwd(), _is_active(events)

    def call(asked: pa.Array) -> pa.Array:
        return _run_steps(asked, steps, changed, folder)

    made = events.withColumn(_RESULT, _called(events, columns, call, f"kept BOOLEAN, {fields}"))
    keep = F.coalesce(F.col(f"{_RESULT}.kept"), F.lit(False))
    results = {one: F.when(active, F.col(f"{_RESULT}.{one}")).otherwise(F.col(one)) for one in changed}
    if KEEP in events.columns:
        return made.withColumns({**results, KEEP: F.col(KEEP) & keep}).drop(_RESULT)
    return made.where(keep).withColumns(results).drop(_RESULT)


def with_event_text(events: DataFrame, *envelope: Step, transaction: bool = False) -> DataFrame:
    """The events with their text in the column `_text`: JSON, or their envelope."""
    for step in envelope:
        if step["type"] == "debezium":
            need_columns(events, "shape", *(["table_ordinal"] if step["transaction"] else []))
    return with_text(events, "_text", partial(render_columns, steps=envelope, transaction=transaction))


def need_columns(events: DataFrame, *needed: str) -> None:
    """Raise ConfigError if events do not have a column that Debezium's documents need."""
    missing = [name for name in needed if name not in events.columns]
    if missing:
        raise ConfigError(
            f"Debezium's envelope needs the column {missing[0]} of events",
            "Select it when you load the stream: .schema(EVENT_SCHEMA + SHAPE_SCHEMA), both of pgcdc.transform",
        )


def with_text(events: DataFrame, name: str, write: Callable[[pa.RecordBatch], pa.Array]) -> DataFrame:
    """The events with one more text column, made from the columns of many rows together."""
    columns = [one for one in events.columns if not one.startswith("_")]

    def call(asked: pa.Array) -> pa.Array:
        return _scatter(write(_rows_of(asked)), asked)

    return events.withColumn(name, _called(events, columns, call, "STRING"))


def map_in_arrow(frame: DataFrame, function: ArrowMap, schema: pa.Schema) -> DataFrame:
    """`frame.mapInArrow` without its check for pandas, which it does not use."""
    from pyspark.sql import DataFrame
    from pyspark.sql.pandas.functions import vectorized_udf  # type: ignore[attr-defined]
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.util import PythonEvalType

    udf = vectorized_udf(function, from_arrow_schema(schema), PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    column = udf(*[frame[name] for name in frame.columns])
    return DataFrame(frame._jdf.mapInArrow(column._jc, False, None), frame.sparkSession)


def _called(events: DataFrame, columns: Sequence[str], call: Callable[[pa.Array], pa.Array], kind: str) -> Column:
    """A function's result on these columns, as one column, for events that the chain has not dropped."""
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.functions import arrow_udf

    asked = F.when(_is_active(events), F.struct(*(F.col(one) for one in columns)))
    made: Column = arrow_udf(call, kind)(asked)  # type: ignore[call-overload]
    return made


def _rows_of(asked: pa.Array) -> pa.RecordBatch:
    present: pa.RecordBatch = pa.RecordBatch.from_struct_array(asked.drop_null())
    return present


def _scatter(made: pa.Array, asked: pa.Array) -> pa.Array:
    """Results for the rows that are not null, and null for the others."""
    if not asked.null_count:
        return made
    is_valid = asked.is_valid().to_numpy(zero_copy_only=False)
    return made.take(pa.array(np.cumsum(is_valid) - 1, mask=~is_valid))


def _run_steps(asked: pa.Array, steps: Sequence[Step], changed: list[str], folder: str) -> pa.Array:
    """`kept` and the changed columns of all requested events (structs; null: not requested)."""
    events = _rows_of(asked)
    kept = np.arange(events.num_rows)  # the indexes of the events that are left
    for name, some in groupby(steps, lambda step: step["function"] if step["type"] == "python" else ""):
        chain = tuple(some)
        if name:
            found, keep = call_all(events, chain[0]["call"] or load_function(name, folder), name)
        else:
            made = edit_columns(events, chain)
            found = dict(zip(made.type.names, made.flatten(), strict=True))
            keep = made.is_valid().to_numpy(zero_copy_only=False)
        columns = [found.get(one, events.column(one)) for one in events.schema.names]
        events = pa.RecordBatch.from_arrays(columns, events.schema.names).filter(pa.array(keep))
        kept = kept[keep]
    place = np.full(len(asked) - asked.null_count, -1)
    place[kept] = np.arange(len(kept))
    index = pa.array(place, mask=place < 0)
    arrays = [pa.array(place >= 0), *(events.column(name).take(index) for name in changed)]
    return _scatter(pa.StructArray.from_arrays(arrays, ["kept", *changed]), asked)


# --- users' functions


def load_function(name: str, folder: str | None = None) -> EventFunction:
    """Load `module:function`, also from a module in `folder` (default: the current one). ConfigError if it is
    missing."""
    where = folder if folder is not None else os.getcwd()
    module_name, _, function_name = name.partition(":")
    if where not in sys.path:
        sys.path.append(where)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"python transform {name}: module {error.name} does not exist",
            f"Put it into {where}, or install it for the Python that runs pgcdc and Spark's workers ({sys.executable})",
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"python transform {name}: its module cannot be imported: {type(error).__name__}: {error}",
            "Fix the module",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = ", ".join(sorted(one for one, value in vars(module).items() if callable(value) and one[0] != "_")[:8])
        raise ConfigError(
            f"python transform {name}: module {module_name} has no function {function_name}",
            f"It has: {known}" if known else "Define it: it takes an event (a dict) and returns one, or None",
        )
    chosen: EventFunction = function
    return chosen


def call_all(
    events: pa.RecordBatch, function: EventFunction, name: str
) -> tuple[dict[str, pa.Array], np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """The function's results, and which events it keeps. TransformError names the position."""
    shown = events.select([one for one in events.schema.names if one != "shape"])
    changed = [one for one in CHANGEABLE if one in shown.schema.names]
    results = [_call(function, one, name, changed) for one in _as_dicts(shown)]
    made = {}
    for one in changed:
        values = [None if after is None else after.get(one) for after in results]
        if one in ("row", "old"):
            values = [None if value is None else list(value.items()) for value in values]
        made[one] = pa.array(values, _ARROW.get(one, pa.string()))
    return made, np.array([after is not None for after in results], np.bool_)


def _as_dicts(events: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    names = events.schema.names
    columns = [
        _map_dicts(one) if one.type == _MAP else one.to_pylist(maps_as_pydicts="strict") for one in events.columns
    ]
    return (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))


def _map_dicts(maps: pa.Array) -> list[dict[str, str | None] | None]:
    """The same as `to_pylist`, in a sixth of the time."""
    names = pc.dictionary_encode(maps.keys)
    known, values, ends = names.dictionary.to_pylist(), maps.items.to_pylist(), maps.offsets.to_pylist()
    keys = [known[number] for number in names.indices.to_pylist()]
    pieces = zip(maps.is_valid().to_pylist(), ends, ends[1:], strict=False)
    return [dict(zip(keys[a:b], values[a:b], strict=True)) if is_valid else None for is_valid, a, b in pieces]


def _call(function: EventFunction, event: dict[str, Any], name: str, changed: list[str]) -> Mapping[str, Any] | None:
    place = f"python transform {name} at position {event.get('position')}"
    given = {key: dict(value) if isinstance(value, dict) else value for key, value in event.items()}
    try:
        after = function(given)
    except Exception as error:
        text = " ".join(str(error).split())
        raise TransformError(
            f"{place}: {type(error).__name__}: {text}", "Fix the function, then start again"
        ) from error
    if fault := None if after is None else _find_fault(event, after, changed):
        raise TransformError(f"{place}: {fault[0]}", fault[1])
    return after


def _find_fault(event: dict[str, Any], after: Any, changed: list[str]) -> tuple[str, str] | None:
    """What is wrong with a return value, and the advice."""
    if not isinstance(after, Mapping):
        return f"it returned {type(after).__name__}", "Return the event (a dict), or None to drop it"
    for key, value in event.items():
        if key not in changed and after.get(key) != value:
            return f"it changed {key}", f"A function may change {', '.join(changed)} and must leave the rest unchanged"
    if unknown := sorted(set(after) - set(event)):
        return f"it added {unknown[0]}", "Put your own values into row"
    for key in changed:
        value = after.get(key)
        if value is None:
            continue
        if key == _UNCHANGED:
            if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
                return f"{key} is not a list of names", "Return a list of str, or None"
        elif key in ("row", "old"):
            if not isinstance(value, Mapping):
                return f"{key} is {type(value).__name__}", "Return a dict, or None"
            for name, one in value.items():
                if not isinstance(name, str) or not (one is None or isinstance(one, str)):
                    return f"{key}[{name!r}] is {type(one).__name__}", _AS_TEXT
        elif not isinstance(value, str):
            return f"{key} is {type(value).__name__}", _AS_TEXT
        elif key == "operation" and value not in Op.__members__:
            return f"unknown operation {value}", f"Use one of: {', '.join(Op.__members__)}"
    return None
