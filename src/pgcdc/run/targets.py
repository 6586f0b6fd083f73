"""What was delivered to each target, as the state directory remembers it.

Where an adapter delivers to: a replay of dead letters without its run must go to the same place. And what transforms have
done to the lines there: whether `pgcdc resync` can read them back. That is kept until the adapter gets another target,
because older lines stay where they are when a chain changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from pgcdc.core.errors import StateError
from pgcdc.core.state import StateDir, read_json, write_json_durably
from pgcdc.sink.spec import AdapterSpec
from pgcdc.transform.program import Chain
from pgcdc.transform.transforms import from_spec


def note_targets(state: StateDir, chains: Iterable[tuple[AdapterSpec, Chain]]) -> None:
    """Remember these adapters beside those that are known; durable when this returns, so do it before they write."""
    before: dict[str, Any] = read_json(state.targets_file) or {}
    after = dict(before)
    for spec, chain in chains:
        digest = _digest(spec)
        known = before.get(spec.name, {})
        if known.get("target") != digest:
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
        after[spec.name] = {"target": digest, "columns": sorted(columns), "others": sorted(others)}
    if after != before:
        write_json_durably(state.targets_file, after)


def check_target(state: StateDir, spec: AdapterSpec) -> None:
    """StateError: the run had another target than these settings name. A letter would be settled where nobody looks."""
    known = (read_json(state.targets_file) or {}).get(spec.name)
    if known is not None and known["target"] != _digest(spec):
        raise StateError(
            f"adapter {spec.name} has delivered to another target than these settings name",
            "Give the configuration of the run: its --config file, or all of its flags and variables. For another target on "
            "purpose, give its flags beside a file that has the adapter",
        )


def why_unreadable(state: StateDir, adapter: str, keys: Iterable[str]) -> str:
    """Why rows cannot be found by these columns in what an adapter has written; "" if they can."""
    noted = (read_json(state.targets_file) or {}).get(adapter, {})
    if noted.get("others"):
        return f"lines that the transform {', '.join(noted['others'])} has made"
    changed = sorted(set(noted.get("columns", ())) & set(keys))
    return f"lines in which transforms change the key ({', '.join(changed)})" if changed else ""


def _digest(spec: AdapterSpec) -> str:
    """Nobody can read the target out of it: it may be a secret."""
    return hashlib.sha256(f"{spec.type}\0{spec.options.place()}".encode()).hexdigest()[:16]
