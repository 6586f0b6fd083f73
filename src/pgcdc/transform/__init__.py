"""Transforms of events: functions on DataFrames, and the same in chains for the sinks of a pipeline.

    from pgcdc import transform
    events.transform(transform.drop_columns("password"))

What is behind the names is imported when it is asked for: workers and the command line need little of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgcdc.event.columns import EVENT_SCHEMA, SHAPE_SCHEMA
    from pgcdc.transform.check import check_chains, check_specs
    from pgcdc.transform.program import Chain, Program, compile_chains
    from pgcdc.transform.transforms import (
        Transform,
        cloudevents_envelope,
        debezium_envelope,
        debezium_key,
        drop_columns,
        event_json,
        filter,
        from_spec,
        mask,
        python,
        rename_fields,
        sql,
    )

__all__ = [
    "EVENT_SCHEMA",
    "SHAPE_SCHEMA",
    "Chain",
    "Program",
    "Transform",
    "check_chains",
    "check_specs",
    "cloudevents_envelope",
    "compile_chains",
    "debezium_envelope",
    "debezium_key",
    "drop_columns",
    "event_json",
    "filter",
    "from_spec",
    "mask",
    "python",
    "rename_fields",
    "sql",
]

_HOME = {
    **dict.fromkeys(("EVENT_SCHEMA", "SHAPE_SCHEMA"), "event.columns"),
    **dict.fromkeys(("Chain", "Program", "compile_chains"), "transform.program"),
    **dict.fromkeys(("check_chains", "check_specs"), "transform.check"),
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'pgcdc.transform' has no attribute {name!r}")
    return getattr(import_module(f"pgcdc.{_HOME.get(name, 'transform.transforms')}"), name)
