"""Reads `pgcdc.yaml`, keeping the line of every key and list item, and replaces variables.

It walks the node tree because PyYAML's constructor drops line numbers, and keeps the last of two equal keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from pgcdc.config.excerpt import show_line
from pgcdc.core.errors import ConfigError
from pgcdc.core.secrets import expand
from pgcdc.core.settings import KeyPath

MAX_NODES = 20_000  # With aliases, a small file can expand without limit
_STRING, _MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"
_UNUSABLE = {
    "\0": ("the text contains a NUL character", "Remove it"),  # no path, name or text of PostgreSQL can have one
    "[\ud800-\udfff]": ("the text contains half a character", "Write the character itself"),
}
_WORDS = (
    (
        r"mapping values",
        "a colon is not expected here",
        "Quote a value that has `: ` in it; otherwise check the line above",
    ),
    (r"character '\\t'", "there is a tab", "Indent with spaces"),
    (r"cannot start any token", "a value cannot begin with this character", "Quote the value"),
    (r"<block end>", "this does not continue the line above", "Indent it like its neighbours; quote a whole value"),
    (
        r"',' or ']'",
        "the list that begins here does not end",
        "Put commas between its items, and ] behind the last one",
    ),
    (
        r"',' or '}'",
        "the mapping that begins here does not end",
        "Put commas between its keys, and } behind the last one",
    ),
    (r"end of stream", "the quoted text that begins here does not end", "Add the closing quote"),
    (r"could not find expected ':'", "this is not `key: value`", "Add a colon and a blank behind the key"),
)
"""What PyYAML says, what that means, and what to do."""


def name_key(path: KeyPath) -> str:
    """The path of a value in readable form: `adapters[1].path`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def value_at(values: Any, path: KeyPath) -> Any:
    """The value at this path, or None."""
    for part in path:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return None
    return values


class YamlFile:
    """The content of a file. Raises ConfigError with file and line for anything it cannot read. `rename(path, key)`
    returns our name for a key below `path`."""

    def __init__(
        self,
        path: Path,
        environ: Mapping[str, str],
        rename: Callable[[KeyPath, str], str],
        may_show: Callable[[str], bool],
        *,
        only: str = "",
    ) -> None:
        self.path = path
        self.secrets: set[str] = set()  # Values of the variables that were replaced
        self._environ = environ
        self._rename = rename
        self._may_show = may_show
        self._marks: dict[KeyPath, tuple[int, int]] = {}  # Line and column, from 0
        self._named: dict[str, tuple[int, int]] = {}  # The same, by what `place` said
        self._text = ""
        self._count = 0
        self.raw = self._read()  # As written, with `${NAME}`: for messages and display
        wanted = {key: one for key, one in self.raw.items() if only in ("", key)}
        self.values: dict[str, Any] = self._expand(wanted, ())

    def place(self, path: KeyPath) -> str:
        """`pgcdc.yaml, line 3: adapters[1].path`, as exactly as the file allows."""
        known = path
        while known and known not in self._marks:
            known = known[:-1]
        mark = self._marks.get(known, (0, 0))
        text = f"{self.path}, line {mark[0] + 1}: {name_key(path)}".removesuffix(": ")
        self._named[text] = mark
        return text

    def excerpt(self, message: str) -> str:
        """The line that a message is about, which begins with its place. Empty: there is none, or it may not be shown."""
        places = [text for text in self._named if message.startswith(text)]
        return show_line(self._text, *self._named[max(places, key=len)], self._may_show) if places else ""

    def _read(self) -> dict[str, Any]:
        try:
            text = self._text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"{self.path} cannot be read: {reason}", "Check --config") from None
        try:
            self._loader = yaml.SafeLoader(text)
            node = self._loader.get_single_node()
            raw = self._value(node, ()) if node is not None else {}
        except RecursionError:
            raise ConfigError(f"{self.path} is nested too deeply", "Correct the file") from None
        except yaml.YAMLError as error:
            raise self._explain(error) from None
        if not isinstance(raw, dict | None):
            advice = "See docs/configuration.md, or start with: pgcdc config init"
            raise self._error(node, (), "the file must be a list of `key: value`", advice)
        return raw or {}

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        self._count += 1
        if self._count > MAX_NODES:
            raise self._error(node, path, "the file is too large", "Use fewer aliases: each one counts in full")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            self._marks |= {(*path, number): _mark(item) for number, item in enumerate(node.value)}
            return [self._value(item, (*path, number)) for number, item in enumerate(node.value)]
        if node.tag == _STRING:
            return node.value
        try:
            return self._loader.construct_object(node)
        except yaml.YAMLError:
            raise
        except Exception:  # 2026-13-45, !!bool maybe: PyYAML does not document what it raises
            raise self._error(node, path, "this is not a valid YAML value", "Put it into quotes") from None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        own: dict[str, str] = {}
        for key, _ in node.value:
            if key.tag == _MERGE:
                continue
            name = self._key(key, path)
            if name in own:
                raise self._error(key, (*path, name), "this key occurs twice", f"It is already set in {own[name]}")
            other = f" as {key.value}" if key.value != name else ""
            own[name] = f"line {key.start_mark.line + 1}{other}"
        self._loader.flatten_mapping(node)
        raw = {}
        for key, item in node.value:
            name = self._key(key, path)
            self._marks[*path, name] = _mark(key)
            raw[name] = self._value(item, (*path, name))
        return raw

    def _key(self, node: yaml.Node, path: KeyPath) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.tag != _STRING:
            shown = node.value if isinstance(node, yaml.ScalarNode) else "..."
            raise self._error(node, path, f"the key {shown} is not a name", "Put it into quotes")
        return self._rename(path, str(node.value))

    def _expand(self, value: Any, path: KeyPath) -> Any:
        if isinstance(value, dict):
            return {key: self._expand(one, (*path, key)) for key, one in value.items()}
        if isinstance(value, list):
            return [self._expand(one, (*path, number)) for number, one in enumerate(value)]
        if not isinstance(value, str):
            return value
        for pattern, (message, advice) in _UNUSABLE.items():
            if re.search(pattern, value):
                raise self._error(None, path, message, advice)
        try:
            return expand(value, self._environ, lambda _, found: self.secrets.add(found))
        except ConfigError as error:
            raise self._error(None, path, error.message, error.advice) from None

    def _error(self, node: yaml.Node | None, path: KeyPath, message: str, advice: str) -> ConfigError:
        if node is not None:
            self._marks[path] = _mark(node)
        made = ConfigError(f"{self.place(path)}: {message}", advice)
        made.excerpt = self.excerpt(made.message)
        return made

    def _explain(self, error: yaml.YAMLError) -> ConfigError:
        """In words, at the place where what does not end begins."""
        problem = str(getattr(error, "problem", None) or "not valid YAML")
        mark, began = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
        if began is not None and re.search("',' or|end of stream", problem):
            mark = began
        unclear = re.sub(r"'[^']{2,}'", "...", problem)  # it may be a part of a password
        words = next((one[1:] for one in _WORDS if re.search(one[0], problem)), None)
        message, advice = words or (unclear, "Correct the file; quote texts with special characters")
        if mark is None:
            return ConfigError(f"{self.path}: {message}", advice)
        self._marks[()] = mark.line, mark.column
        made = ConfigError(f"{self.place(())}: {message}", advice)
        made.excerpt = self.excerpt(made.message)
        return made


def _mark(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line, node.start_mark.column
