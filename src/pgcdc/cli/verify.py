"""`pgcdc verify`: check that the targets are equal to the source."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgcdc.cli.flags import CONFIG_OPTION, SettingsCommand, given_flags
from pgcdc.cli.report import exit_on_error, print_table
from pgcdc.core.errors import ConfigError, PgcdcError
from pgcdc.core.log import begin_log, say
from pgcdc.core.wording import counted

if TYPE_CHECKING:
    from pgcdc.config.layers import Loaded
    from pgcdc.run.verify.report import Report


class VerifyCommand(SettingsCommand):
    """Accepts all settings except those that choose adapters and tables: the command's own flags narrow these down."""

    left_out = ("adapters", "table", "once", "warm_up", "verify_every")


def verify(
    ctx: typer.Context,
    config: Annotated[Path | None, CONFIG_OPTION] = None,
    name: Annotated[list[str] | None, typer.Option("--table", help="Only this table. Repeatable.")] = None,
    adapter: Annotated[list[str] | None, typer.Option("--adapter", help="Only this adapter. Repeatable.")] = None,
    keys: Annotated[int, typer.Option(min=0, help="Show at most this many keys of each kind of difference.")] = 20,
    rate: Annotated[float, typer.Option(min=0, help="Read at most this many rows a second; 0: no limit.")] = 0.0,
    repair: Annotated[bool, typer.Option("--repair", help="Send the rows that differ to that adapter again.")] = False,
    at_rest: Annotated[
        bool, typer.Option("--at-rest", help="Without a running pipeline: compare with what the targets have now.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Resume where the last comparison stopped.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare every table at every target that can be read back with the source, and list the rows that differ."""
    with exit_on_error():
        from pgcdc.cli.report import CopyProgress
        from pgcdc.run.chains import Chains
        from pgcdc.run.settings import choose_specs
        from pgcdc.run.verify.job import Verify, VerifyOptions
        from pgcdc.sink.spec import check_adapters, keep_secrets

        loaded = _load(given_flags(ctx), config, adapter or [])
        settings = loaded.config
        begin_log(settings.log_format)
        chains = Chains(choose_specs(settings, None), settings.global_transforms, is_typed=settings.table is not None)
        check_adapters(chains.specs)
        keep_secrets([settings.db, settings.dlq_db], chains.specs, chains.transforms)
        options = VerifyOptions(tuple(name or ()), tuple(adapter or ()), keys, rate, repair, at_rest, resume)
        progress = CopyProgress()
        try:
            report = Verify(settings, chains, options, say, progress).run()
        except PgcdcError as error:
            error.exit_code = max(error.exit_code, 2)  # type: ignore[misc]  # 1 says that something differs
            raise
        finally:
            progress.close()
        print(json.dumps(report.to_json())) if as_json else print_report(report)
        raise typer.Exit(report.exit_code)


verify_app = typer.Typer(add_completion=False)
verify_app.command("verify", cls=VerifyCommand)(verify)


def _load(flags: dict[str, Any], file: Path | None, names: list[str]) -> Loaded:
    """The configuration. If neither file nor variable names adapters, `--adapter` does."""
    from pgcdc.config.layers import load

    loaded = load(flags, os.environ, file)
    if ("adapters",) not in loaded.origins:
        if not names:
            raise ConfigError(
                "no adapter is configured", "Name the pipeline's file with --config, or use --adapter and its flags"
            )
        loaded = load({**flags, "adapters": names}, os.environ, file)
    return loaded


def print_report(report: Report) -> None:
    """Print the report for people."""
    counts = ("rows", "ranges", "equal", "missing", "extra", "different", "unsettled", "dead_letters")
    header = ["adapter", "table", "outcome", *(one.replace("_", " ") for one in counts)]
    rows = [
        [one.adapter, one.table, one.outcome, *(f"{getattr(one, count):,}" for count in counts)]
        for one in report.tables
    ]
    print_table(header, rows)
    for one in report.tables:
        title = f"{one.adapter}, table {one.table}"
        for verdict, keys in one.keys.items():
            shown = ", ".join(json.dumps(key, ensure_ascii=False) for key in keys)
            more = getattr(one, verdict) - len(keys)
            typer.echo(f"{title}: {verdict}: {shown}{f' and {more:,} more' if more > 0 else ''}")
        if one.repaired:
            typer.echo(f"{title}: {counted(one.repaired, 'row')} repaired")
        if one.explained:
            typer.echo(f"{title}: {counted(one.explained, 'different row')} with a waiting dead letter: pgcdc dlq list")
        elif one.dead_letters and one.wrong:
            typer.echo(
                f"{title}: {counted(one.dead_letters, 'waiting dead letter')}, likely the reason: pgcdc dlq list"
            )
        for text in (*one.notes, *([f"not compared: {one.reason}"] if one.reason else ())):
            typer.echo(f"{title}: {text}")
    for text in report.left_out:
        typer.echo(text)
    typer.echo(f"{report.verdict} at {report.position or 'no position'}")
