"""What transforms have done to the lines of a target, in the state directory: whether `pgcdc resync` can read them back.

It is kept until the adapter gets another target: older lines stay where they are when a chain changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pgcdc.core.state import read_json, write_json_durably
from pgcdc.sink.spec import AdapterSpec
from pgcdc.transform.program import Chain
from pgcdc.transform.transforms import from_spec

__all__ = ["note_chains", "why_unreadable"]


def note_chains(path: Path, chains: Iterable[tuple[AdapterSpec, Chain]]) -> None:
    """Remember these chains beside what the file has; durable when this returns, so do it before they write."""
    before: dict[str, Any] = read_json(path) or {}
    after = dict(before)
    for spec, chain in chains:
        target = spec.options.target()
        known = before.get(spec.name, {})
        if known.get("target") != target:
            known = {}
        columns, others = set(known.get("columns", ())), set(known.get("others", ()))
        for one in map(from_spec, chain.transforms):
            if one.name in ("drop_columns", "mask"):
                columns.update(one.spec.columns)
            elif one.name == "rename_fields":
                columns.update(one.spec.fields, one.spec.fields.values())
            elif one.name == "sql":
                columns.update(one.spec.set)
            elif one.name != "filter":
                others.add(one.name)
        after.pop(spec.name, None)
        if columns or others:
            after[spec.name] = {"target": target, "columns": sorted(columns), "others": sorted(others)}
    if after != before:
        write_json_durably(path, after)


def why_unreadable(noted: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Why rows cannot be found by these columns in what was written; "" if they can. `noted`: the entry of its adapter."""
    if noted.get("others"):
        return f"lines that the transform {', '.join(noted['others'])} has made"
    changed = sorted(set(noted.get("columns", ())) & set(keys))
    return f"lines in which transforms change the key ({', '.join(changed)})" if changed else ""
