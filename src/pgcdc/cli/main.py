"""The commands of `pgcdc`. Each one's module is imported only when it is called, which keeps `pgcdc --help` fast."""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

COMMANDS = {
    "listen": "Deliver every committed change to the adapters, exactly once, until stopped.",
    "validate": "Check configuration, connection, rights, tables and adapters. Starts nothing, leaves nothing behind.",
    "describe": (
        "Show every column of a table: its types in PostgreSQL and Spark, whether it is a key, and how exact it is."
    ),
    "snapshot": (
        "Copy tables as they are now through adapters: consistent, complete, and nothing is left on the server."
    ),
    "verify": (
        "Compare every table with the source at every target that can be read back, and list the rows that differ."
    ),
    "status": (
        "Show the phase, positions, lag in bytes and seconds, and last error of the pipeline in a state directory."
    ),
    "reload": "Make a running `pgcdc listen` reread its transforms and routes; they apply from the next batch on.",
    "sentinel": (
        "Mark this moment in a running pipeline's stream, and wait until its targets have everything before it."
    ),
    "resync": "Repair targets: one copy (--table, --adapter), or after a lost slot everything, deletes included.",
    "playground": (
        "Run the demo: a PostgreSQL of its own under random traffic, captured through Spark and compared at the end."
    ),
    "version": "Show the versions of pgcdc, Python, PySpark and PyArrow, and which fast paths are in use.",
    "config": "Create a configuration file, show the effective settings, print the JSON schema.",
    "dlq": "Events that a target refused: list them, deliver them again, delete them.",
    "slot": "List, inspect and drop replication slots.",
    "consumer": "List and forget consumers of a slot. Each holds back WAL until it has acknowledged.",
}
"""The commands with their help lines. Each is a function of that name, or a group `<name>_app`, in
`pgcdc.cli.<name>`."""
_MODULES = {
    "validate": "config", "slot": "source", "consumer": "source", "describe": "source", "resync": "source",
    "reload": "status", "playground": "listen", "version": "main",
}  # fmt: skip
"""Commands that are in a module with another name."""
WITH_SETTINGS = ("listen", "validate")  # Commands that take every setting as a flag


class _Commands(TyperGroup):
    """Loads a command when it is called; listing the commands needs only the help lines."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"pgcdc.cli.{_MODULES.get(cmd_name, cmd_name)}")
        made = getattr(module, f"{cmd_name}_app", None)
        if made is None:
            made = typer.Typer(add_completion=False)
            kind: Any = (
                importlib.import_module("pgcdc.cli.flags").SettingsCommand if cmd_name in WITH_SETTINGS else None
            )
            made.command(cmd_name, cls=kind)(getattr(module, cmd_name))
        command = typer.main.get_command(made)
        command.name, command.help = cmd_name, COMMANDS[cmd_name]
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            if close and hasattr(error, "message"):
                error.message = f"No such command {args[0]!r}. Did you mean {close[0]!r}?"
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # it takes longer to load than everything else
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def _pgcdc(
    _: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="The same as `pgcdc version`.")
    ] = False,
) -> None:
    """Change data capture: every change of a database, delivered exactly once, on Spark."""


def version() -> None:
    """Show installed versions and which fast paths are in use."""
    from platform import python_version

    from pgcdc.core.compiled import describe_ways, find_version

    print(f"pgcdc {find_version('pgcdc')}")
    for name, way in describe_ways().items():
        print(f"{name} {way}")
    print(f"python {python_version()}, pyspark {find_version('pyspark')}, pyarrow {find_version('pyarrow')}")


def main() -> Any:
    """The entry point of the command `pgcdc`."""
    if sys.argv[1:] in (
        ["version"],
        ["--version"],
    ):  # no flags: their parser takes longer to load than everything else
        return version()
    sys.exit(app())
