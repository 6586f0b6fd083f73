"""`pgcdc resync`: bring sinks back to the source after a lost slot, or read some tables again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pgcdc.cli.report import exit_on_error, say


def resync(
    db: Annotated[str, typer.Option(envvar="PGCDC_DB", help="URL of the source database.")] = "",
    state_dir: Annotated[Path, typer.Option(help="The state directory.", envvar="PGCDC_STATE_DIR")] = Path(".pgcdc"),
    table: Annotated[
        list[str] | None,
        typer.Option(help="The slot works: read only this table again. Repeatable."),
    ] = None,
    new_slot: Annotated[
        bool, typer.Option("--new-slot", help="Give up a slot that still works, or follow another server.")
    ] = False,
    tables: Annotated[
        str, typer.Option(help="Capture these tables from now on: a,b,schema.c. (default: those of before)")
    ] = "",
    truncate: Annotated[
        bool,
        typer.Option("--truncate", help="Send a TRUNCATE of every table before its rows, instead of comparing keys."),
    ] = False,
    two_phase: Annotated[
        bool, typer.Option("--two-phase", help="Make the new slot for pgcdc listen --two-phase.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """After a lost slot: a new one, every table again, and deletes of the rows that vanished meanwhile."""
    with exit_on_error():
        from pgcdc.core.errors import ConfigError
        from pgcdc.core.settings import split_outside_quotes
        from pgcdc.run.resync import Resync, ResyncOptions
        from pgcdc.source.postgres.setup.slots import describe_wait

        if not db:
            raise ConfigError("no database is given", "Use --db or the variable PGCDC_DB")
        chosen = tuple(name for name in split_outside_quotes(tables, ",") if name)
        options = ResyncOptions(db, state_dir, tuple(table or ()), new_slot, chosen, truncate, two_phase)
        with Resync(options, say) as one:
            for line in one.plan():
                say(line)
            if not yes and not one.is_begun:
                if not sys.stdin.isatty():
                    raise ConfigError("a resync needs a confirmation", "Add --yes")
                typer.confirm("Go on?", abort=True)
            one.run(lambda transactions: say(describe_wait(transactions)))
        say("done. Start pgcdc listen as before: it brings the sinks back to the source")
