"""`pgcdc.yaml`, with the line of every key and list item, and variables replaced. It walks the tree of nodes itself:
PyYAML's constructor forgets lines, and takes the last of two equal keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from pgcdc.core.errors import ConfigError
from pgcdc.core.secrets import expand
from pgcdc.core.settings import KeyPath

MAX_NODES = 20_000  # Aliases can make a small file endless
_STRING, _MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"
_UNUSABLE = {
    "\0": ("the text contains a NUL character", "Remove it"),  # no path, name or text of PostgreSQL can have one
    "[\ud800-\udfff]": ("the text contains half a character", "Write the character itself"),
}


def name_key(path: KeyPath) -> str:
    """The path of a value, as people write it: `adapters[1].path`."""
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
    """The content of a file. ConfigError with file and line for what cannot be read. `rename(path, key)` gives our name of a
    key below `path`."""

    def __init__(self, path: Path, environ: Mapping[str, str], rename: Callable[[KeyPath, str], str]) -> None:
        self.path = path
        self.secrets: set[str] = set()  # Values of variables that were put in
        self._environ = environ
        self._rename = rename
        self._lines: dict[KeyPath, int] = {}
        self._count = 0
        self.raw = self._read()  # As written, with `${NAME}`: for messages and display
        self.values: dict[str, Any] = self._expand(self.raw, ())

    def place(self, path: KeyPath) -> str:
        """`pgcdc.yaml, line 3: adapters[1].path`, as exactly as the file allows."""
        known = path
        while known and known not in self._lines:
            known = known[:-1]
        return f"{self.path}, line {self._lines.get(known, 1)}: {name_key(path)}".removesuffix(": ")

    def _read(self) -> dict[str, Any]:
        try:
            text = self.path.read_text(encoding="utf-8")
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
            mark = getattr(error, "problem_mark", None)
            where = f"{self.path}, line {mark.line + 1}" if mark else str(self.path)
            problem = getattr(error, "problem", None) or "not valid YAML"
            problem = re.sub(r"'[^']{2,}'", "...", problem)  # it may be a part of a password
            raise ConfigError(f"{where}: {problem}", "Correct the file; quote texts with special characters") from None
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
            self._lines |= {(*path, number): item.start_mark.line + 1 for number, item in enumerate(node.value)}
            return [self._value(item, (*path, number)) for number, item in enumerate(node.value)]
        if node.tag == _STRING:
            return node.value
        try:
            return self._loader.construct_object(node)
        except yaml.YAMLError:
            raise
        except Exception:  # 2026-13-45, !!bool maybe: PyYAML does not say what it raises
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
            self._lines[*path, name] = key.start_mark.line + 1
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
            self._lines[path] = node.start_mark.line + 1
        return ConfigError(f"{self.place(path)}: {message}", advice)
