"""`pgcdc dlq`: look at dead letters, deliver them again, throw them away; also beside a pipeline that runs."""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgcdc.cli.flags import CONFIG_OPTION, SettingsCommand, given_flags
from pgcdc.cli.report import exit_on_error, print_table

if TYPE_CHECKING:
    from pgcdc.config import Config
    from pgcdc.core.state import StateDir
    from pgcdc.sink.letters.record import DeadLetter, Query, ReadableDeadLetters

dlq_app = typer.Typer(
    help="Events that a target refused: look, deliver again, throw away.", no_args_is_help=True, add_completion=False
)

Adapter = Annotated[list[str] | None, typer.Option("--adapter", help="Only of this adapter.")]
Since = Annotated[
    str | None, typer.Option(help="Only those of the last 30m, 24h, 7d; or since a time.", metavar="TIME")
]
Before = Annotated[
    str | None, typer.Option(help="Only older ones than 30m, 24h, 7d; or before a time.", metavar="TIME")
]
Ids = Annotated[list[str] | None, typer.Option("--id", help="Only this one. Repeatable.", metavar="ID")]
Limit = Annotated[int, typer.Option(help="At most so many, the oldest first; 0: all.", min=0)]
Json = Annotated[bool, typer.Option("--json", help="For machines.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
All = Annotated[bool, typer.Option("--all", help="Also letters of other pipelines in the same store.")]


class StoreCommand(SettingsCommand):
    """Only settings that say which letters are meant. What the last run had is the default."""

    taken = ("db", "dlq", "dlq_db", "dlq_file", "dlq_table", "state_dir")


@dlq_app.command("list", cls=StoreCommand)
@exit_on_error()
def list_command(
    ctx: typer.Context,
    adapter: Adapter = None,
    since: Since = None,
    before: Before = None,
    ids: Ids = None,
    limit: Limit = 100,
    waiting: Annotated[bool, typer.Option("--waiting", help="Only those that are still to be delivered.")] = False,
    every: All = False,
    as_json: Json = False,
    config: Annotated[Path | None, CONFIG_OPTION] = None,
) -> None:
    """Dead letters, the oldest first."""
    settings, store = _open(given_flags(ctx), config)
    name = _one_adapter(settings, store, adapter)
    found = list(store.find(_query(settings, name, since, before, ids, every, 0, True if waiting else None)))
    shown = found[:limit] if limit else found
    if as_json:
        typer.echo(json.dumps([_brief(one) for one in shown], indent=2))
        return
    if shown:
        print_table(
            ["id", "adapter", "position", "channel", "operation", "error", "tries", "created", "outcome"],
            [
                [
                    one.id, one.adapter, one.position, one.channel or "-", one.operation or "-",
                    f"{one.error_kind}: {one.error}"[:80], str(one.attempts), _ago(one.created_at),
                    one.outcome or "waiting",
                ]
                for one in shown
            ],
        )  # fmt: skip
    typer.echo(_summary(found, len(shown)), err=True)


@dlq_app.command("show", cls=StoreCommand)
@exit_on_error()
def show_command(
    ctx: typer.Context,
    letter_id: Annotated[str, typer.Argument(metavar="ID")],
    as_json: Json = False,
    config: Annotated[Path | None, CONFIG_OPTION] = None,
) -> None:
    """One dead letter, with its event."""
    letter = _get(_open(given_flags(ctx), config)[1], letter_id)
    if as_json:
        typer.echo(json.dumps(letter.to_json(), indent=2, ensure_ascii=False))
        return
    raw = letter.to_json()
    event = raw.pop("event")
    print_table(["letter", letter.id], [[name, str(value)] for name, value in raw.items() if name != "id" and value])
    typer.echo(event)


@dlq_app.command("purge", cls=StoreCommand)
@exit_on_error()
def purge_command(
    ctx: typer.Context,
    adapter: Adapter = None,
    since: Since = None,
    before: Before = None,
    ids: Ids = None,
    settled: Annotated[bool, typer.Option("--settled", help="Only those that are delivered or superseded.")] = False,
    everything: Annotated[bool, typer.Option("--everything", help="All of this pipeline.")] = False,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    config: Annotated[Path | None, CONFIG_OPTION] = None,
) -> None:
    """Delete dead letters for good."""
    from pgcdc.core.errors import ConfigError

    if not (adapter or since or before or ids or settled or everything):
        raise ConfigError(
            "it is not said which dead letters", "Give --adapter, --before, --id, --settled or --everything"
        )
    settings, store = _open(given_flags(ctx), config)
    _check_whose(settings, ids)
    name = _one_adapter(settings, store, adapter)
    query = _query(settings, name, since, before, ids, False, 0, False if settled else None)
    found = list(store.find(query))
    waiting = sum(one.is_waiting for one in found)
    what = f"{_count(len(found))}, of which {waiting:,} still wait" if waiting else _count(len(found))
    if dry_run or not found:
        typer.echo(f"{what}; nothing is deleted" if found else "there are none")
        return
    if waiting and not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"deleting {what} needs a confirmation", "Add --yes; or --settled to keep those")
        typer.confirm(f"Delete {what}? Their events are lost then", abort=True)
    from dataclasses import replace

    deleted = store.purge(replace(query, ids=tuple(one.id for one in found)))  # what came meanwhile was not asked about
    typer.echo(f"{_count(deleted)} deleted")


class ReplayCommand(SettingsCommand):
    """All settings but which adapters there are: `--adapter` says whose letters."""

    left_out = ("adapters",)


@dlq_app.command("replay", cls=ReplayCommand)
@exit_on_error()
def replay_command(
    ctx: typer.Context,
    adapter: Adapter = None,
    since: Since = None,
    before: Before = None,
    ids: Ids = None,
    limit: Limit = 0,
    dry_run: DryRun = False,
    as_json: Json = False,
    config: Annotated[Path | None, CONFIG_OPTION] = None,
) -> None:
    """Deliver dead letters again: by the run if there is one, else from here. Flags of an adapter name another target."""
    from dataclasses import asdict

    from pgcdc.config.layers import own_options
    from pgcdc.core.errors import SinkError
    from pgcdc.core.state import Lock, StateDir
    from pgcdc.run.letter_service import ask_run
    from pgcdc.sink.letters.delivery import Tally, find_batches

    flags = given_flags(ctx)
    plain = {key: value for key, value in flags.items() if key not in own_options(flags)}
    settings, store = _open(plain, config)
    state = StateDir(settings.state_dir)
    _check_whose(settings, ids)
    name = _one_adapter(settings, store, adapter)
    query = _query(settings, name, since, before, ids, False, limit, True)
    for one in ids or ():
        if not (letter := _get(store, one)).is_waiting:
            typer.echo(f"pgcdc: {one} is {letter.outcome} since {letter.replayed_at}: it does not go again", err=True)
        elif query.pipeline not in (None, letter.pipeline):
            typer.echo(f"pgcdc: {one} is of another pipeline, {letter.pipeline}: it does not go", err=True)
    names = sorted({letters[0].adapter for letters in find_batches(store, query)})
    is_running = Lock.holder(state.run_lock) is not None
    if dry_run:
        _say_plan(flags, config, store, query, names, is_running=is_running and not own_options(flags))
        return
    if not names:
        tally = Tally()
    elif is_running and not own_options(flags):
        tally = ask_run(state, query)
    else:
        tally = _replay_here(flags, config, state, store, query, names)
    if as_json:
        typer.echo(json.dumps(asdict(tally)))
    else:
        typer.echo(f"{tally.delivered:,} delivered, {tally.superseded:,} superseded, {tally.failed:,} refused again")
    if tally.error:
        raise SinkError(f"the rest was not delivered: {tally.error}")
    if tally.failed:
        raise typer.Exit(1)


def _replay_here(
    flags: dict[str, Any],
    file: Path | None,
    state: StateDir,
    store: ReadableDeadLetters,
    query: Query,
    names: list[str],
) -> Any:
    from dataclasses import replace

    from pgcdc.config.layers import plan_destinations
    from pgcdc.run.offline_letters import open_destination
    from pgcdc.sink.letters.delivery import Tally, deliver_again, find_batches

    tally = Tally()
    for name, destination in plan_destinations(flags, file, names).items():
        with open_destination(state, destination) as delivery:
            for letters in find_batches(store, replace(query, adapter=name)):
                part = deliver_again(store, letters, delivery.redeliver)
                tally.add(part)
                if part.error:
                    break
    return tally


def _say_plan(
    flags: dict[str, Any],
    file: Path | None,
    store: ReadableDeadLetters,
    query: Query,
    names: list[str],
    *,
    is_running: bool,
) -> None:
    from collections import Counter

    from pgcdc.config.layers import plan_destinations
    from pgcdc.sink.spec import describe_options

    counts = Counter(letter.adapter for letter in store.find(query))
    if not names:
        typer.echo("there are none that wait")
    destinations = {} if is_running else plan_destinations(flags, file, names)
    for name in names:
        where = "by the run"
        if name in destinations:
            spec = destinations[name].spec
            other = "another target: " if destinations[name].is_other else ""
            where = f"to {other}type {spec.type}{describe_options(spec.options)}"
        typer.echo(f"would deliver {_count(counts[name])} of adapter {name} {where}")


# --- what the commands have in common


def _open(flags: dict[str, Any], file: Path | None) -> tuple[Config, ReadableDeadLetters]:
    """The configuration, and the store that it means: or that of the last run, if it says nothing."""
    from pgcdc.config.layers import load
    from pgcdc.core.errors import ConfigError, StateError
    from pgcdc.core.state import StateDir, read_json
    from pgcdc.sink.letters.record import ReadableDeadLetters, make_store

    loaded = load(flags, os.environ, file)
    settings = loaded.config
    is_said = any((key,) in loaded.origins for key in ("dlq", "dlq_file", "dlq_db", "dlq_table"))
    is_needed = not is_said or (settings.dlq == "file" and settings.dlq_file is None)
    if is_needed and not settings.state_dir.is_dir():
        raise StateError(
            f"the state directory {settings.state_dir} does not exist",
            "Give that of the pipeline with --state-dir; or the letters themselves, with --dlq-file or --dlq-db",
        )
    if not is_said:
        last = read_json(StateDir(settings.state_dir).run_status) or {}
        if last.get("dlq") == "pg_table" and last.get(
            "dlq_elsewhere"
        ):  # else a table would be looked for at the source
            raise ConfigError(
                "the dead letters of the last run are in a database of their own",
                "Give it in PGCDC_DLQ_DB, or --dlq-db",
            )
        known = {key: last[key] for key in ("dlq", "dlq_file", "dlq_table") if last.get(key)}
        path = {"dlq_file": Path(known["dlq_file"])} if "dlq_file" in known else {}
        settings = settings.model_copy(update={**known, **path})
    elif ("dlq",) not in loaded.origins:
        settings = settings.model_copy(update={"dlq": "file" if settings.dlq_file else "pg_table"})
    if settings.dlq == "pg_table" and not (settings.dlq_db or settings.db):
        raise ConfigError("no database is given for the dead letters", "Use --dlq-db, --db, PGCDC_DLQ_DB or PGCDC_DB")
    store = make_store(settings)
    if not isinstance(store, ReadableDeadLetters):
        raise ConfigError(f"dead letters go to {settings.dlq}, where they cannot be read again", "Give --dlq")
    return settings, store


def _check_whose(settings: Config, ids: list[str] | None) -> None:
    """Several pipelines may share a store: what changes letters must know whose they are."""
    from pgcdc.core.errors import ConfigError
    from pgcdc.core.state import StateDir

    if not ids and StateDir(settings.state_dir).identity() is None:
        raise ConfigError(
            f"there is no pipeline in {settings.state_dir}: it is not known whose dead letters are meant",
            "Give its --state-dir; or name letters, by --id",
        )


def _one_adapter(settings: Config, store: ReadableDeadLetters, names: list[str] | None) -> str | None:
    """A misspelt name, or the last of several, must not look as if there were no letters."""
    from pgcdc.core.errors import ConfigError
    from pgcdc.core.settings import suggest
    from pgcdc.core.state import StateDir
    from pgcdc.sink.letters.record import Query

    if len(names or ()) > 1:
        raise ConfigError("--adapter is given more than once", "Name one adapter here; without it, all are meant")
    name = names[0] if names else None
    acks = (path.stem for path in StateDir(settings.state_dir).acks.glob("*.json"))
    known = sorted({*settings.adapter_names, *acks})
    if name is not None and name not in known and next(store.find(Query(adapter=name, limit=1)), None) is None:
        raise ConfigError(f"there is no adapter {name}, and no dead letter of one", suggest(name, known))
    return name


def _query(
    settings: Config,
    adapter: str | None,
    since: str | None,
    before: str | None,
    ids: list[str] | None,
    every: bool,
    limit: int,
    is_waiting: bool | None,
) -> Query:
    from pgcdc.core.state import StateDir
    from pgcdc.sink.letters.record import Query, name_pipeline

    identity = StateDir(settings.state_dir).identity()
    pipeline = None if every or identity is None else name_pipeline(identity)
    return Query(pipeline, adapter, tuple(ids or ()), _time(since), _time(before), is_waiting, None, limit)


def _time(text: str | None) -> datetime | None:
    """`24h` ago, or a time as ISO 8601 writes it (UTC, if it does not say)."""
    from pgcdc.core.errors import ConfigError
    from pgcdc.core.settings import parse_seconds

    if text is None:
        return None
    try:
        return datetime.now(UTC) - timedelta(seconds=parse_seconds(text))
    except ValueError:
        pass
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a time", "Write 30m, 24h, 7d, or 2026-01-31T12:00:00") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _get(store: ReadableDeadLetters, name: str) -> DeadLetter:
    from pgcdc.core.errors import ConfigError
    from pgcdc.sink.letters.record import Query

    letter = next(store.find(Query(ids=(name,))), None)
    if letter is None:
        raise ConfigError(f"there is no dead letter {name}", "See: pgcdc dlq list")
    return letter


def _brief(letter: DeadLetter) -> dict[str, Any]:
    return {name: value for name, value in letter.to_json().items() if name != "event"}


def _count(number: int) -> str:
    return f"{number:,} dead letter{'' if number == 1 else 's'}"


def _summary(found: list[DeadLetter], shown: int) -> str:
    if not found:
        return "no dead letters"
    times = [one.created_at for one in found]
    waiting = sum(one.is_waiting for one in found)
    text = f"{_count(len(found))} ({waiting:,} waiting), oldest {_ago(min(times))}, newest {_ago(max(times))}"
    return f"{text}; {shown:,} are shown, see --limit" if shown < len(found) else text


def _ago(time: datetime) -> str:
    seconds = max(0, int((datetime.now(UTC) - time).total_seconds()))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit} ago"
    return f"{seconds}s ago"
