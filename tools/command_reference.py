"""Writes docs/reference/commands.md: every command with its arguments and options, from the commands themselves.

    python tools/command_reference.py

Run it when a command or one of its options has changed; a test says if it was forgotten.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

from pgcdc.cli.main import COMMANDS, WITH_SETTINGS, app

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "commands.md"
_HEAD = """\
# Commands

<!-- made by tools/command_reference.py -->

`pgcdc COMMAND --help` shows the same. [Settings](../listen.md) has the flags that `listen`, `validate` and others share,
and the [exit codes](../listen.md#signals-and-exit-codes).

| command | what it does |
| --- | --- |
"""


def make_page() -> str:
    """The whole page."""
    group: Any = typer.main.get_command(app)
    with typer.Context(group) as context:
        commands = [(name, group.get_command(context, name)) for name in COMMANDS]
    rows = [f"| [`pgcdc {name}`](#pgcdc-{name}) | {_cell(text)} |\n" for name, text in COMMANDS.items()]
    return "".join([_HEAD, *rows, *(_section(name, command, 2) for name, command in commands)])


def _section(name: str, command: Any, level: int) -> str:
    text = " ".join((command.help or "").partition("\n\n")[0].split())
    parts = [f"\n{'#' * level} pgcdc {name}\n\n{_prose(text)}\n"]
    rows = [_row(one) for one in command.params if one.name != "help" and not getattr(one, "hidden", False)]
    if name in WITH_SETTINGS:
        parts.append("\nIt accepts [every setting](../listen.md#where-settings-come-from) as a flag.\n")
    elif rows:
        parts.append(f"\n| argument or option | meaning |\n| --- | --- |\n{''.join(rows)}")
    for child, made in getattr(command, "commands", {}).items():
        parts.append(_section(f"{name} {child}", made, level + 1))
    return "".join(parts)


def _row(one: Any) -> str:
    if one.param_type_name == "argument":
        return f"| `{one.name.upper()}` | {_cell(getattr(one, 'help', '') or '')} |\n"
    names = ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
    notes = [_cell(one.help or "")]
    if one.envvar:
        notes.append(f"Variable: `{one.envvar}`.")
    if one.default not in (None, False, True, "", (), []) and not callable(one.default) and "default" not in notes[0]:
        notes.append(f"Default: `{one.default}`.")
    return f"| {names} | {' '.join(note for note in notes if note)} |\n"


def _cell(text: str) -> str:
    return _prose(" ".join(text.split())).replace("|", "\\|")


def _prose(text: str) -> str:
    """Flags as code, outside of what is code already."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", part) for part in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    PAGE.write_text(make_page())
