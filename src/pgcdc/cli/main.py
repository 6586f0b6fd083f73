"""`pgcdc`: the commands. Each command's module is imported when it runs, so that `pgcdc --help` is quick."""

from __future__ import annotations

import sys

import typer

from pgcdc.cli.config import config_app
from pgcdc.cli.consumer import consumer_app
from pgcdc.cli.describe import describe
from pgcdc.cli.dlq import dlq_app
from pgcdc.cli.flags import SettingsCommand
from pgcdc.cli.listen import listen
from pgcdc.cli.playground import playground
from pgcdc.cli.reload import reload
from pgcdc.cli.resync import resync
from pgcdc.cli.slot import slot_app
from pgcdc.cli.snapshot import snapshot
from pgcdc.cli.status import status
from pgcdc.cli.validate import validate
from pgcdc.cli.version import version

__all__ = ["app", "main"]

app = typer.Typer(
    help="Change data capture: every change of a database, delivered exactly once, on Spark.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(cls=SettingsCommand)(listen)
app.command(cls=SettingsCommand)(validate)
app.command()(describe)
app.command()(snapshot)
app.command()(status)
app.command()(reload)
app.command()(resync)
app.command()(playground)
app.command()(version)
app.add_typer(config_app, name="config")
app.add_typer(dlq_app, name="dlq")
app.add_typer(slot_app, name="slot")
app.add_typer(consumer_app, name="consumer")


def main() -> None:
    """The entry point of the command `pgcdc`."""
    sys.exit(app())
