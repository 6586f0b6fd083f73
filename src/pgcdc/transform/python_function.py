"""A Python function of the user as a transform: called once for each event, in Spark's Python workers, a batch at a time."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pgcdc.core.errors import ConfigError, TransformError
from pgcdc.transform.expressions import KEEP, is_active

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["EventFunction", "call_all", "load_function", "with_function"]

EventFunction = Callable[[dict[str, Any]], Mapping[str, Any] | None]
CHANGEABLE = {
    "channel": "string",
    "operation": "string",
    "schema": "string",
    "table": "string",
    "row": "map<string,string>",
    "old": "map<string,string>",
    "unchanged_toast_columns": "array<string>",
}
"""What a function may change. What an event is known by never changes: id, position, time and transaction."""
_MAP = pa.map_(pa.string(), pa.string())
_ARROW = {"row": _MAP, "old": _MAP, "unchanged_toast_columns": pa.list_(pa.string())}
_RESULT = "_result"


def load_function(name: str, folder: str | None = None) -> EventFunction:
    """`module:function`, also of a module in `folder` (the current one). ConfigError if it is not there."""
    where = folder if folder is not None else os.getcwd()
    module_name, _, function_name = name.partition(":")
    if where not in sys.path:
        sys.path.append(where)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"python transform {name}: there is no module {error.name}",
            f"Put it into {where}, or install it for the Python that runs pgcdc and Spark's workers ({sys.executable})",
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"python transform {name}: its module cannot be imported: {type(error).__name__}: {error}",
            "Correct the module",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = ", ".join(sorted(one for one, value in vars(module).items() if callable(value) and one[0] != "_")[:8])
        raise ConfigError(
            f"python transform {name}: module {module_name} has no function {function_name}",
            f"It has: {known}" if known else "Write it there: it takes an event (a dict) and returns one, or None",
        )
    chosen: EventFunction = function
    return chosen


def with_function(events: DataFrame, name: str, function: EventFunction | None) -> DataFrame:
    """The events as the function returns them; those for which it returned None are left out."""
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.functions import arrow_udf

    columns = [one for one in events.columns if not one.startswith("_")]
    changed = [one for one in CHANGEABLE if one in columns]
    fields = ", ".join(f"`{one}` {CHANGEABLE[one].upper()}" for one in changed)
    folder, active = os.getcwd(), is_active(events)

    def call(asked: pa.Array) -> pa.Array:
        chosen = function if function is not None else load_function(name, folder)
        return call_all(asked, chosen, name, changed)

    caller: Any = arrow_udf(call, f"kept BOOLEAN, {fields}")  # type: ignore[call-overload]
    asked = F.when(active, F.struct(*(F.col(one) for one in columns)))
    made = events.withColumn(_RESULT, caller(asked))
    keep = F.coalesce(F.col(f"{_RESULT}.kept"), F.lit(False))
    results = {one: F.when(active, F.col(f"{_RESULT}.{one}")).otherwise(F.col(one)) for one in changed}
    if KEEP in events.columns:
        return made.withColumns({**results, KEEP: F.col(KEEP) & keep}).drop(_RESULT)
    return made.where(keep).withColumns(results).drop(_RESULT)


def call_all(asked: pa.Array, function: EventFunction, name: str, changed: list[str]) -> pa.Array:
    """The results of all events that are asked for (structs; null: not asked). TransformError names the position."""
    results: dict[str, list[Any]] = {one: [] for one in ("kept", *changed)}
    for event in asked.to_pylist(maps_as_pydicts="strict"):
        after = None if event is None else _call(function, event, name, changed)
        results["kept"].append(None if event is None else after is not None)
        for one in changed:
            results[one].append(None if after is None else after[one])
    arrays = [pa.array(results["kept"], pa.bool_())]
    arrays += [pa.array(_items(results[one], one), _ARROW.get(one, pa.string())) for one in changed]
    return pa.StructArray.from_arrays(arrays, ["kept", *changed])


def _items(values: list[Any], name: str) -> list[Any]:
    return [None if one is None else list(one.items()) for one in values] if _ARROW.get(name) == _MAP else values


def _call(function: EventFunction, event: dict[str, Any], name: str, changed: list[str]) -> dict[str, Any] | None:
    place = f"python transform {name} at position {event.get('position')}"
    given = {key: dict(value) if isinstance(value, dict) else value for key, value in event.items()}
    try:
        after = function(given)
    except Exception as error:
        text = " ".join(str(error).split())
        raise TransformError(
            f"{place}: {type(error).__name__}: {text}", "Correct the function, then start again"
        ) from error
    if after is None:
        return None
    if not isinstance(after, Mapping):
        raise TransformError(
            f"{place}: it returned {type(after).__name__}", "Return the event (a dict), or None to drop it"
        )
    for key, value in event.items():
        if key not in changed and after.get(key) != value:
            raise TransformError(
                f"{place}: it changed {key}",
                f"A function may change {', '.join(changed)}, and leaves the rest as it is",
            )
    unknown = sorted(set(after) - set(event))
    if unknown:
        raise TransformError(f"{place}: it added {unknown[0]}", "Put values of your own into row")
    return {one: _checked(one, after.get(one), place) for one in changed}


def _checked(key: str, value: Any, place: str) -> Any:
    advice = "Values are PostgreSQL's text: return str or None, for example str(value)"
    if value is None:
        return None
    if key in ("row", "old"):
        if not isinstance(value, Mapping):
            raise TransformError(f"{place}: {key} is {type(value).__name__}", "Return a dict, or None")
        for name, one in value.items():
            if not isinstance(name, str) or not (one is None or isinstance(one, str)):
                raise TransformError(f"{place}: {key}[{name!r}] is {type(one).__name__}", advice)
        return value
    if key == "unchanged_toast_columns":
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            raise TransformError(f"{place}: {key} is no list of names", "Return a list of str, or None")
        return list(value) or None
    if not isinstance(value, str):
        raise TransformError(f"{place}: {key} is {type(value).__name__}", advice)
    return value
