"""Every text for people in pgcdc, gathered from its syntax trees. `python tests/said_lines.py [FOLDER]` prints them."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "pgcdc"
ERRORS = re.compile(r"(Error|Errors|ConnectionLost|SinkRejected|SinkUnavailable|ReloadNeeded|SchemaChanged|Conflict)$")
_SQL = re.compile(
    r"\s*(SELECT|WITH|INSERT INTO|UPDATE|DELETE FROM|CREATE|DROP|ALTER|SET|COPY|BEGIN|LOCK|TRUNCATE|VALUES|FROM|WHERE|JOIN|"
    r"LEFT JOIN|ORDER BY|AND|OR|ON|DECLARE|GRANT|MERGE|START_REPLICATION|CREATE_REPLICATION_SLOT|REPLICA IDENTITY|COMMIT|"
    r"ADD|FOR|CASE|USING|RENAME|PRIMARY KEY|NULLIF|COALESCE|PREPARE|EXECUTE|SAVEPOINT|ROLLBACK|REPLICATION|FETCH|CLOSE)\b"
)
_WORDS = re.compile(r"[A-Za-z]{2,}[,;:.]? \S*[a-z]")


@dataclass(frozen=True, slots=True)
class Line:
    path: str
    number: int
    kind: str
    """`error`, `advice`, or the name of the function that gets it; `text` for any other."""
    text: str
    """Values in braces, as in the source."""

    def __str__(self) -> str:
        return f"{self.path}:{self.number}: {self.kind}: {self.text}"


def gather() -> list[Line]:
    """All of them, in the order of the files."""
    found = [line for path in sorted(SOURCE.rglob("*.py")) for line in _lines_of(path)]
    return sorted(found, key=lambda line: (line.path, line.number))


def _lines_of(path: Path) -> Iterator[Line]:
    tree = ast.parse(path.read_text())
    kinds: dict[int, str] = {}
    inner: set[int] = set()  # Parts of a text that is there as a whole
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            kinds |= _kinds_of(node)
        if isinstance(node, ast.JoinedStr):
            inner |= {id(one) for one in ast.walk(node)} - {id(node)}
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            inner.add(id(node.value))
    for node in ast.walk(tree):
        text = _text_of(node)
        if text is not None and id(node) not in inner and (id(node) in kinds or _is_prose(text)):
            yield Line(str(path.relative_to(SOURCE)), node.lineno, kinds.get(id(node), "text"), text)  # type: ignore[attr-defined]


def _text_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text_of(one) or "" for one in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    return None


def _kinds_of(call: ast.Call) -> dict[int, str]:
    """The kinds of a call's arguments, by node."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "PydanticCustomError":
        found = {id(one): "check" for one in call.args[1:2]}
        named: dict[int, str] = {}
    elif name in ("debug", "info", "warning", "error", "exception"):
        found, named = {id(one): "log" for one in call.args[:1]}, {}
    elif ERRORS.search(name):
        first = 1 if name == "Conflict" else 0
        found = {id(one): kind for one, kind in zip(call.args[first:], ("error", "advice"), strict=False)}
        named = {id(one.value): "advice" for one in call.keywords if one.arg == "advice"}
    elif name in ("say", "_say", "echo", "print", "refuse"):
        found, named = {id(one): name for one in call.args[:1]}, {}
    elif name in ("setting", "Field", "Option", "Argument"):
        found = {id(one): "help" for one in call.args[1:2]} if name == "setting" else {}
        named = {id(one.value): "help" for one in call.keywords if one.arg in ("help", "description")}
    else:
        return {}
    texts = {id(one) for one in [*call.args, *(one.value for one in call.keywords)] if _text_of(one)}
    return {node: kind for node, kind in {**found, **named}.items() if node in texts}


def _is_prose(text: str) -> bool:
    return bool(_WORDS.search(text)) and not _SQL.match(text)


if __name__ == "__main__":
    shown = [line for line in gather() if not sys.argv[1:] or any(line.path.startswith(one) for one in sys.argv[1:])]
    print("\n".join(map(str, shown)))
