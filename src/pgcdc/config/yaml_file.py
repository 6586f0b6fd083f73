"""`pgcdc.yaml`, with the line of every key and list item, and variables put in.

The tree of nodes is walked here rather than by PyYAML's constructor: it forgets lines, and takes the last of two equal keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pgcdc.core.errors import ConfigError
from pgcdc.core.secrets import expand
from pgcdc.core.settings import KeyPath

MAX_NODES = 20_000
"""Aliases can make a small file endless."""
_STRING = "tag:yaml.org,2002:str"
_HALF = re.compile("[\ud800-\udfff]")


def name_key(path: KeyPath) -> str:
    """The way to a value, as people write it: `adapters[1].path`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def value_at(values: Any, path: KeyPath) -> Any:
    """The value at the end of the way; None: there is none."""
    for part in path:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return None
    return values


@dataclass
class YamlFile:
    """What a file says."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    """The same as it is written, with `${NAME}`: for messages, and to be shown."""
    lines: dict[KeyPath, int] = field(default_factory=dict)
    secrets: set[str] = field(default_factory=set)
    """Values of variables that were put in."""

    def place(self, path: KeyPath) -> str:
        """`pgcdc.yaml, line 3: adapters[1].path`, as near to it as the file goes."""
        known = path
        while known and known not in self.lines:
            known = known[:-1]
        return f"{self.path}, line {self.lines.get(known, 1)}: {name_key(path)}"


def read_yaml(path: Path, environ: Mapping[str, str]) -> YamlFile:
    """Read a file; its top-level keys may have `-` for `_`. ConfigError with file and line for what cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {reason}", "Check --config") from None
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        return _Walk(YamlFile(path), loader, environ).file(node)
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply", "Correct the file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or "not valid YAML"
        problem = re.sub(r"'[^']{2,}'", "...", problem)  # it may be a part of a password
        raise ConfigError(f"{where}: {problem}", "Correct the file; quote texts with special characters") from None
    finally:
        if loader is not None:
            loader.dispose()


class _Walk:
    """From nodes to values."""

    def __init__(self, file: YamlFile, loader: yaml.SafeLoader, environ: Mapping[str, str]) -> None:
        self._file = file
        self._loader = loader
        self._environ = environ
        self._count = 0

    def file(self, node: yaml.Node | None) -> YamlFile:
        if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"):
            return self._file
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(
                f"{self._file.path}, line {node.start_mark.line + 1}: the file must be a list of `key: value`",
                "See docs/configuration.md, or begin with: pgcdc config init",
            )
        self._file.values, self._file.raw = self._mapping(node, ())
        return self._file

    def _value(self, node: yaml.Node, path: KeyPath) -> tuple[Any, Any]:
        self._count += 1
        if self._count > MAX_NODES:
            raise self._error(node, path, "the file is too large", "Aliases repeat what they stand for")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            values, raws = [], []
            for number, item in enumerate(node.value):
                self._file.lines[*path, number] = item.start_mark.line + 1
                value, raw = self._value(item, (*path, number))
                values.append(value)
                raws.append(raw)
            return values, raws
        assert isinstance(node, yaml.ScalarNode)
        if node.tag == _STRING:
            if "\0" in node.value:  # no path, name or text of PostgreSQL can have one
                raise self._error(node, path, "there is a NUL character in the text", "Take it away")
            if _HALF.search(node.value):  # "\ud83d": nothing can be written with it
                raise self._error(node, path, "there is half a character in the text", "Write the character itself")
            try:
                return expand(node.value, self._environ, lambda _, value: self._file.secrets.add(value)), node.value
            except ConfigError as error:
                raise self._error(node, path, error.message, error.advice) from None
        try:
            value = self._loader.construct_object(node)
        except yaml.YAMLError:
            raise
        except Exception:  # 2026-13-45, !!bool maybe: PyYAML does not say what it raises
            raise self._error(node, path, "this is not a value of YAML", "Put it into quotes") from None
        return value, value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> tuple[dict[str, Any], dict[str, Any]]:
        own: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            name = self._key(key, path)
            line = key.start_mark.line + 1
            if name in own:
                raise self._error(
                    key, (*path, name), "this key is given twice", f"It stands in line {own[name]} already"
                )
            own[name] = line
        self._loader.flatten_mapping(node)
        values: dict[str, Any] = {}
        raws: dict[str, Any] = {}
        for key, item in node.value:
            name = self._key(key, path)
            self._file.lines[*path, name] = key.start_mark.line + 1
            values[name], raws[name] = self._value(item, (*path, name))
        return values, raws

    def _key(self, node: yaml.Node, path: KeyPath) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.tag != _STRING:
            shown = node.value if isinstance(node, yaml.ScalarNode) else "..."
            raise self._error(node, path, f"the key {shown} is not a name", "Put it into quotes")
        name = str(node.value)
        return name if path else name.replace("-", "_")

    def _error(self, node: yaml.Node, path: KeyPath, message: str, advice: str) -> ConfigError:
        where = f"{self._file.path}, line {node.start_mark.line + 1}"
        return ConfigError(f"{where}: {name_key(path)}: {message}" if path else f"{where}: {message}", advice)
