"""The JSON schema of `pgcdc.yaml`, for editors: made from the model, and `${NAME}` may stand for any value."""

from __future__ import annotations

from typing import Any

from pgcdc.config.model import Config

_VARIABLE = {"type": "string", "pattern": r"\$\{"}
_LEAVES = ("integer", "number", "boolean")


def json_schema() -> dict[str, Any]:
    """Draft 2020-12."""
    schema = _clean(Config.model_json_schema(by_alias=True))
    assert isinstance(schema, dict)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "pgcdc",
        "description": "Configuration of a pgcdc pipeline (pgcdc.yaml)",
    }


def _clean(node: Any) -> Any:
    if isinstance(node, list):
        return [_clean(one) for one in node]
    if not isinstance(node, dict):
        return node
    kept = {key: _clean(one) for key, one in node.items() if key != "setting"}
    if isinstance(kept.get("properties"), dict):
        kept["properties"] = {name: _open(one) for name, one in kept["properties"].items()}
    return kept


def _open(field: dict[str, Any]) -> dict[str, Any]:
    """The same field, or a text with a variable in it."""
    field.pop("setting", None)
    if isinstance(field.get("anyOf"), list):
        takes_text = any(_takes_text(one) for one in field["anyOf"])
        return field if takes_text else {**field, "anyOf": [*field["anyOf"], _VARIABLE]}
    if field.get("type") in _LEAVES or "enum" in field:
        about: dict[str, Any] = {key: field[key] for key in ("description", "title", "default") if key in field}
        return {**about, "anyOf": [{key: one for key, one in field.items() if key not in about}, _VARIABLE]}
    return field


def _takes_text(field: Any) -> bool:
    return isinstance(field, dict) and field.get("type") == "string" and not {"enum", "pattern"} & set(field)
