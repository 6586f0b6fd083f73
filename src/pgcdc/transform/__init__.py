"""Transforms of events: functions on DataFrames, and the same in chains for the sinks of a pipeline.

    from pgcdc import transform
    events.transform(transform.drop_columns("password"))

What is behind the names is imported when it is asked for: workers and the command line need little of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgcdc.transform.check import check_chains, check_specs
    from pgcdc.transform.program import Chain, Program, compile_chains
    from pgcdc.transform.transforms import (
        Transform,
        cloudevents_envelope,
        debezium_envelope,
        drop_columns,
        filter,
        from_spec,
        mask,
        python,
        rename_fields,
        sql,
    )

__all__ = [
    "Chain",
    "Program",
    "Transform",
    "check_chains",
    "check_specs",
    "cloudevents_envelope",
    "compile_chains",
    "debezium_envelope",
    "drop_columns",
    "filter",
    "from_spec",
    "mask",
    "python",
    "rename_fields",
    "sql",
]

_HOME = {
    "Chain": "program",
    "Program": "program",
    "check_chains": "check",
    "check_specs": "check",
    "compile_chains": "program",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'pgcdc.transform' has no attribute {name!r}")
    return getattr(import_module(f"pgcdc.transform.{_HOME.get(name, 'transforms')}"), name)
