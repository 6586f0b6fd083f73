"""`pgcdc dlq`: list, show, replay and purge dead letters, even while a pipeline runs."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from pgcdc.cli.flags import CONFIG_OPTION, SettingsCommand, given_flags
from pgcdc.cli.report import confirm, exit_on_error, print_table
from pgcdc.config.adapters import FLAT_KEYS
from pgcdc.config.layers import load
from pgcdc.core.errors import ConfigError, SinkError, StateError
from pgcdc.core.log import say
from pgcdc.core.settings import make_options, parse_seconds, suggest
from pgcdc.core.state import Lock, StateDir, read_json
from pgcdc.core.wording import counted
from pgcdc.run.letter_service import Destination, ask_run, make_store, name_pipeline, open_destination
from pgcdc.sink.letters.delivery import Tally, deliver_again, deliver_all
from pgcdc.sink.letters.record import DeadLetter, Query, ReadableDeadLetters
from pgcdc.sink.spec import ADAPTERS, AdapterSpec, DeliveryOptions, check_options, describe_options, keep_secrets

dlq_app = typer.Typer(
    help="Events that a target refused: list, show, deliver again, delete.", no_args_is_help=True, add_completion=False
)

Adapter = Annotated[list[str] | None, typer.Option("--adapter", help="Only those of this adapter.")]
Since = Annotated[
    str | None, typer.Option(help="Only newer ones: from the last 30m, 24h or 7d, or since a time.", metavar="TIME")
]
Before = Annotated[
    str | None, typer.Option(help="Only older ones: than 30m, 24h or 7d, or from before a time.", metavar="TIME")
]
Ids = Annotated[list[str] | None, typer.Option("--id", help="Only this one. Repeatable.", metavar="ID")]
Limit = Annotated[int, typer.Option(help="Show or deliver at most this many, the oldest first; 0: all.", min=0)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")]
All = Annotated[bool, typer.Option("--all", help="Include letters of other pipelines in the same store.")]
File = Annotated[Path | None, CONFIG_OPTION]
SHOWN_REASONS = 5


class StoreCommand(SettingsCommand):
    """Accepts only settings that locate dead letters. They default to those of the last run."""

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
    waiting: Annotated[bool, typer.Option("--waiting", help="Only those that wait to be delivered.")] = False,
    every: All = False,
    as_json: Json = False,
    config: File = None,
) -> None:
    """Dead letters, the oldest first."""
    letters = _Letters(given_flags(ctx), config)
    query = letters.query(adapter, since, before, ids, is_waiting=True if waiting else None)
    found = list(letters.store.find(replace(query, pipeline=None) if every else query))
    shown = found[:limit] if limit else found
    if as_json:
        briefs = [{name: value for name, value in one.to_json().items() if name != "event"} for one in shown]
        typer.echo(json.dumps(briefs, indent=2))
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
    config: File = None,
) -> None:
    """One dead letter, with its event."""
    raw = _Letters(given_flags(ctx), config).get(letter_id).to_json()
    if as_json:
        typer.echo(json.dumps(raw, indent=2, ensure_ascii=False))
        return
    event = raw.pop("event")
    print_table(["letter", raw.pop("id")], [[name, str(value)] for name, value in raw.items() if value])
    typer.echo(event)


@dlq_app.command("purge", cls=StoreCommand)
@exit_on_error()
def purge_command(
    ctx: typer.Context,
    adapter: Adapter = None,
    since: Since = None,
    before: Before = None,
    ids: Ids = None,
    settled: Annotated[bool, typer.Option("--settled", help="Only those that were delivered or superseded.")] = False,
    everything: Annotated[bool, typer.Option("--everything", help="All dead letters of this pipeline.")] = False,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    config: File = None,
) -> None:
    """Delete dead letters for good."""
    if not (adapter or since or before or ids or settled or everything):
        raise ConfigError("no dead letters are selected", "Use --adapter, --before, --id, --settled or --everything")
    letters = _Letters(given_flags(ctx), config)
    letters.check_whose(ids)
    query = letters.query(adapter, since, before, ids, is_waiting=False if settled else None)
    found = list(letters.store.find(query))
    waiting = sum(one.is_waiting for one in found)
    what = f"{_count(len(found))} ({waiting:,} waiting)" if waiting else _count(len(found))
    if dry_run or not found:
        typer.echo(f"{what}; nothing was deleted" if found else "there are none")
        return
    if waiting and not yes:
        refusal = f"deleting {what} needs confirmation"
        confirm(
            f"Delete {what}? Their events will be lost", refusal, "Add --yes, or --settled to keep the waiting ones"
        )
    chosen = replace(query, ids=tuple(one.id for one in found))  # leave letters that arrived after the question
    typer.echo(f"{_count(letters.store.purge(chosen))} deleted")


class ReplayCommand(SettingsCommand):
    """Accepts all settings except those that choose adapters: `--adapter` selects whose letters to replay."""

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
    config: File = None,
) -> None:
    """Deliver dead letters again, through the running pipeline if there is one. Flags of an adapter choose another
    target."""
    flags = given_flags(ctx)
    others = own_options(flags)
    letters = _Letters({key: value for key, value in flags.items() if key not in others}, config)
    letters.check_whose(ids)
    query = letters.query(adapter, since, before, ids, is_waiting=True, limit=limit)
    for letter in map(letters.get, ids or ()):
        if not letter.is_waiting:
            said = f"was {letter.outcome} at {letter.replayed_at}: not delivered again"
            typer.echo(f"pgcdc: {letter.id} {said}", err=True)
        elif query.pipeline not in (None, letter.pipeline):
            typer.echo(f"pgcdc: {letter.id} belongs to another pipeline, {letter.pipeline}: not delivered", err=True)
    counts = Counter(letter.adapter for letter in letters.store.find(query))
    is_running = Lock.holder(letters.state.run_lock) is not None and not others
    if dry_run:
        _say_plan(flags, config, counts, is_running=is_running)
        return
    if not counts:
        tally = Tally()
    elif is_running:
        tally = ask_run(letters.state, query)
    else:
        tally = _replay_here(flags, config, letters, query, sorted(counts))
    if as_json:
        typer.echo(json.dumps(asdict(tally)))
    else:
        typer.echo(f"{tally.delivered:,} delivered, {tally.superseded:,} superseded, {tally.failed:,} refused again")
    if tally.reasons and not as_json:
        _say_reasons(tally.reasons)
    if tally.error:
        raise SinkError(f"the remaining dead letters were not delivered: {tally.error}")
    if tally.failed:
        raise typer.Exit(1)


def _say_reasons(reasons: dict[str, int]) -> None:
    """The most frequent ones first."""
    found = sorted(reasons.items(), key=lambda one: -one[1])
    for reason, count in found[:SHOWN_REASONS]:
        say(f"{count:,} refused again by {reason[:300]}")
    if rest := sum(count for _, count in found[SHOWN_REASONS:]):
        say(f"{rest:,} refused again for other reasons: pgcdc dlq list --waiting")


def _replay_here(flags: dict[str, Any], file: Path | None, letters: _Letters, query: Query, names: list[str]) -> Tally:
    tally, store = Tally(), letters.store
    for name, destination in plan_destinations(flags, file, names).items():
        with open_destination(letters.state, destination) as runner:
            tally.add(
                deliver_all(
                    store, replace(query, adapter=name), lambda _, part: deliver_again(store, part, runner.redeliver)
                )
            )
    return tally


def _say_plan(flags: dict[str, Any], file: Path | None, counts: Counter[str], *, is_running: bool) -> None:
    if not counts:
        typer.echo("no dead letters are waiting")
    destinations = {} if is_running else plan_destinations(flags, file, sorted(counts))
    for name, count in sorted(counts.items()):
        where = "through the running pipeline"
        if name in destinations:
            spec = destinations[name].spec
            other = "another target: " if destinations[name].is_other else ""
            where = f"to {other}type {spec.type}{describe_options(spec.options)}"
        typer.echo(f"would deliver {_count(count)} of adapter {name} {where}")


class _Letters:
    """The store of the configuration, or without one, the store of the last run."""

    def __init__(self, flags: dict[str, Any], file: Path | None) -> None:
        loaded = load(flags, os.environ, file)
        settings = loaded.config
        self.state = StateDir(settings.state_dir)
        self._adapters = settings.adapter_names
        is_said = any((key,) in loaded.origins for key in ("dlq", "dlq_file", "dlq_db", "dlq_table"))
        is_needed = not is_said or (settings.dlq == "file" and settings.dlq_file is None)
        if is_needed and not self.state.path.is_dir():
            raise StateError(
                f"the state directory {settings.state_dir} does not exist",
                "Set --state-dir to that of the pipeline, or name the dead letters with --dlq-file or --dlq-db",
            )
        if not is_said:
            last = read_json(self.state.run_status) or {}
            if last.get("dlq") == "pg_table" and last.get("dlq_elsewhere"):  # else a table at the source
                raise ConfigError(
                    "the dead letters of the last run are in a database of their own",
                    "Set PGCDC_DLQ_DB or --dlq-db to its URL",
                )
            known = {key: last[key] for key in ("dlq", "dlq_file", "dlq_table") if last.get(key)}
            path = {"dlq_file": Path(known["dlq_file"])} if "dlq_file" in known else {}
            settings = settings.but(**known | path)
        elif ("dlq",) not in loaded.origins:
            settings = settings.but(dlq="file" if settings.dlq_file else "pg_table")
        if settings.dlq == "pg_table" and not (settings.dlq_db or settings.db):
            raise ConfigError("no database is set for the dead letters", "Use --dlq-db, --db, PGCDC_DLQ_DB or PGCDC_DB")
        store = make_store(settings)
        if not isinstance(store, ReadableDeadLetters):
            raise ConfigError(
                f"dead letters go to {settings.dlq}, which cannot be read back", "Set --dlq to file or pg_table"
            )
        self.store: ReadableDeadLetters = store

    def check_whose(self, ids: list[str] | None) -> None:
        """Several pipelines may share a store, so a command that changes letters must name an adapter."""
        if not ids and self.state.identity() is None:
            raise ConfigError(
                f"{self.state.path} has no pipeline, so the owner of the dead letters is unknown",
                "Set --state-dir to that of the pipeline, or name dead letters with --id",
            )

    def query(
        self,
        names: list[str] | None,
        since: str | None,
        before: str | None,
        ids: list[str] | None,
        *,
        is_waiting: bool | None,
        limit: int = 0,
    ) -> Query:
        """Refuses unknown adapters, so that a typo does not look like an empty list."""
        if len(names or ()) > 1:
            raise ConfigError("--adapter can be used only once here", "Name one adapter, or none for all of them")
        name = names[0] if names else None
        known = sorted({*self._adapters, *(path.stem for path in self.state.acks.glob("*.json"))})
        if name is not None and name not in known and next(self.store.find(Query(adapter=name, limit=1)), None) is None:
            raise ConfigError(f"adapter {name} does not exist and has no dead letters", suggest(name, known))
        identity = self.state.identity()
        pipeline = name_pipeline(identity) if identity is not None else None
        return Query(pipeline, name, tuple(ids or ()), _time(since), _time(before), is_waiting, None, limit)

    def get(self, name: str) -> DeadLetter:
        """The letter with this id, or a prefix of it."""
        letter = next(self.store.find(Query(ids=(name,))), None)
        if letter is None:
            raise ConfigError(f"dead letter {name} does not exist", "List them with: pgcdc dlq list")
        return letter


def _time(text: str | None) -> datetime | None:
    """Parse `24h` (that long ago) or an ISO 8601 time (UTC by default)."""
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


def _count(number: int) -> str:
    return counted(number, "dead letter")


def _summary(found: list[DeadLetter], shown: int) -> str:
    if not found:
        return "no dead letters"
    times = [one.created_at for one in found]
    waiting = sum(one.is_waiting for one in found)
    text = f"{_count(len(found))} ({waiting:,} waiting), oldest {_ago(min(times))}, newest {_ago(max(times))}"
    return f"{text}; {shown:,} shown (see --limit)" if shown < len(found) else text


def _ago(time: datetime) -> str:
    seconds = max(0, int((datetime.now(UTC) - time).total_seconds()))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit} ago"
    return f"{seconds}s ago"


# --- where replayed dead letters go


def own_options(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that choose an adapter's target."""
    own = [key for key, (_, name) in FLAT_KEYS.items() if name not in DeliveryOptions.model_fields]
    return {key: flags[key] for key in own if key in flags}


def plan_destinations(flags: Mapping[str, Any], file: Path | None, adapters: list[str]) -> dict[str, Destination]:
    """Where the letters of each adapter go. A flag overrides the target in the configuration."""
    others = own_options(flags)
    base = load({key: value for key, value in flags.items() if key not in others}, os.environ, file)
    specs = {spec.name: spec for spec in base.config.adapter_specs} if ("adapters",) in base.origins else {}
    shared = base.config.global_transforms
    keep_secrets([base.config.db, base.config.dlq_db], list(specs.values()), shared)
    found: dict[str, Destination] = {}
    for name in adapters:
        given: dict[str, Any] = {}
        if spec := specs.get(name):
            given = {FLAT_KEYS[key][1]: one for key, one in others.items() if FLAT_KEYS[key][0] == spec.type}
        elif name in ADAPTERS:  # no file: the flags are the configuration
            spec = load({**flags, "adapters": [name]}, os.environ, file).config.adapter_specs[0]
        else:
            raise ConfigError(
                f"the configuration has no adapter {name}",
                "Name the configuration file of its pipeline with --config, or the target with --adapter",
            )
        chain = [*shared, *spec.transforms]
        found[name] = Destination(_change(spec, given) if given else spec, chain, is_other=bool(given))
    return found


def _change(spec: AdapterSpec, given: Mapping[str, Any]) -> AdapterSpec:
    replaced = {key for name in given for key in (name, f"{name}_file", name.removesuffix("_file"))}
    kept = {name: one for name, one in spec.options if name in spec.options.model_fields_set - replaced}
    what = f"adapter {spec.name}"
    options = make_options(type(spec.options), {**kept, **given}, what, "See the documentation of the adapter")
    changed = replace(spec, options=options)
    check_options(changed)
    return changed
