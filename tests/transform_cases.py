"""Chains of simple transforms for tests, and what an obvious implementation makes of an event."""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import re
from typing import Any

from hypothesis import strategies as st

from pgcdc.core.errors import TransformError
from pgcdc.core.relation import Op
from pgcdc.event.edits import LOOKS
from pgcdc.transform.specs import Chain

KEY_VARIABLE = "PGCDC_MASK_KEY"
KEY = "correct horse battery staple"

_names = st.text("abcé", min_size=1, max_size=2)
_columns = st.lists(_names, min_size=1, max_size=3)


@st.composite
def simple_specs(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["drop_columns", "rename_fields", "mask", "mask", "filter"]))
    if kind == "filter":
        return {"type": kind, "operations": draw(st.lists(st.sampled_from([op.name for op in Op]), min_size=4))}
    if kind == "rename_fields":
        return {
            "type": kind,
            "fields": draw(st.dictionaries(_names, st.sampled_from("xyzab"), min_size=1).filter(_is_one_to_one)),
        }
    spec: dict[str, Any] = {"type": kind, "columns": draw(_columns)}
    return spec | ({"mode": draw(st.sampled_from(["zero", "hash", "redact"]))} if kind == "mask" else {})


def _is_one_to_one(fields: dict[str, str]) -> bool:
    return len(set(fields.values())) == len(fields)


@st.composite
def simple_chains(draw: st.DrawFn) -> Chain:
    patterns = st.sampled_from(["*", "pgcdc:*", "sales.*", "[ab]*", "[!a]*", "?", "sales.?é*"])
    routes = draw(st.lists(patterns, max_size=2))
    return Chain(tuple(draw(st.lists(simple_specs(), max_size=4).filter(_names_what_is_there))), tuple(routes))


def _names_what_is_there(specs: list[dict[str, Any]]) -> bool:
    """Whether no step names a column that an earlier one took away: that is refused."""
    gone: set[str] = set()
    for spec in specs:
        named = set(spec.get("columns", spec.get("fields", ())))
        if named & gone:
            return False
        gone |= named if spec["type"] in ("drop_columns", "rename_fields") else set()
        gone -= set(spec.get("fields", {}).values())
    return True


def transformed(event: dict[str, Any], chain: Chain) -> Any:
    """The JSON object of an event (as `event_streams.expected_events` has it) behind a chain; None: the chain does not
    have it; TransformError itself: it fails.
    """
    patterns = [one if ":" in one else f"pgcdc:{one}" for one in chain.routes]
    if patterns and not any(fnmatch.fnmatchcase(event["channel"], one) for one in patterns):
        return None
    row, old = (None if event[side] is None else list(event[side]) for side in ("row", "old"))
    unchanged = list(event["unchanged_toast_columns"] or [])
    is_clash = False
    for spec in chain.transforms:
        if spec["type"] == "filter" and event["operation"] not in spec["operations"]:
            return None
        if spec["type"] == "drop_columns":
            row, old = ([one for one in side if one[0] not in spec["columns"]] if side else side for side in (row, old))
            unchanged = [name for name in unchanged if name not in spec["columns"]]
        if spec["type"] == "rename_fields":
            fields = spec["fields"]
            row, old = (
                [(fields.get(name, name), value) for name, value in side] if side else side for side in (row, old)
            )
            unchanged = [fields.get(name, name) for name in unchanged]
            for names in ([name for name, _ in row or []] + unchanged, [name for name, _ in old or []]):
                is_clash |= len(set(names)) < len(names)
        if spec["type"] == "mask":
            row, old = (
                [(name, _hide(value, spec["mode"]) if name in spec["columns"] else value) for name, value in side]
                if side
                else side
                for side in (row, old)
            )
    if is_clash:
        return TransformError
    payload = {"op": event["operation"], "schema": event["schema"], "table": event["table"]}
    payload |= {name: None if side is None else dict(side) for name, side in (("row", row), ("old", old))}
    if unchanged:
        payload["_unchanged_toast_columns"] = unchanged
    return {
        "id": event["id"],
        "channel": event["channel"],
        "operation": event["operation"],
        "payload": payload,
        "source": event["source"],
        "created_at": event["created_at"].strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "position": event["position"],
    }


def _hide(value: str | None, mode: str) -> str | None:
    if value is None:
        return None
    if mode == "hash":
        return hmac.new(KEY.encode(), value.encode(), hashlib.sha256).hexdigest()
    if mode == "redact":
        return "***REDACTED***"
    return next((zero for look, zero in LOOKS if re.search(look.replace(r"\z", r"\Z"), value)), "")
