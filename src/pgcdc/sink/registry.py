"""Which types of adapters there are: the options of each, and how its sink is made. Nothing else knows them by name.

The configuration makes its keys, flags and its JSON schema of this; a new adapter is one entry here.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from pgcdc.core.errors import ConfigError
from pgcdc.sink.contract import Sink
from pgcdc.sink.exec.options import ExecOptions
from pgcdc.sink.pg_table.options import PgTableOptions
from pgcdc.sink.secrecy import keep_secrets
from pgcdc.sink.spec import AdapterSpec, DeliveryOptions, FileOptions, NoopOptions, StdoutOptions
from pgcdc.sink.webhook.options import WebhookOptions

if TYPE_CHECKING:
    from pgcdc.core.state import StateDir
    from pgcdc.source.postgres.options import PostgresOptions

__all__ = ["ADAPTERS", "AdapterType", "check_adapters", "check_options", "make_sink"]


def _nothing(options: Any) -> str:
    return ""


def _anything(options: Any) -> None:
    return None


def _any_delivery(options: Any, delivery: DeliveryOptions) -> None:
    return None


def _any_source(spec: AdapterSpec, source: PostgresOptions, state: StateDir) -> None:
    return None


@dataclass(frozen=True)
class AdapterType:
    """One type. Its options are `<type>_<field>` as flags and flat keys, and `<field>` in a mapping of its own."""

    name: str
    options: type[BaseModel]
    make: Callable[[AdapterSpec, Path], Sink]
    """The sink, with its ack in this folder (`acks` of a state directory, which has more that a sink may want to know)."""
    target: Callable[[Any], str] = _nothing
    """What no other adapter of a pipeline may write to; empty: it does not matter."""
    check: Callable[[Any], None] = _anything
    """Raises ConfigError for options that cannot work, without asking the target."""
    check_delivery: Callable[[Any, DeliveryOptions], None] = _any_delivery
    """Raises ConfigError for options that do not go with how it is called."""
    check_source: Callable[[AdapterSpec, PostgresOptions, StateDir], None] = _any_source
    """Raises ConfigError if it must not get the events of this source. Both are asked, and nothing is left behind."""
    place: Callable[[Any], str] | None = None
    """Where it delivers to, to the letter; None: that is `target`."""

    def where(self, options: Any) -> str:
        """Where it delivers to. It may be a secret."""
        return (self.place or self.target)(options)


def make_sink(spec: AdapterSpec, acks: Path) -> Sink:
    """The sink of one adapter; its ack stands in the folder `acks`."""
    keep_secrets(None, [spec])
    return ADAPTERS[spec.type].make(spec, acks)


def check_options(spec: AdapterSpec) -> None:
    """Raise ConfigError for an adapter that cannot work, without asking its target."""
    kind = ADAPTERS[spec.type]
    kind.check(spec.options)
    kind.check_delivery(spec.options, spec.delivery)


def check_adapters(specs: Sequence[AdapterSpec]) -> None:
    """Raise ConfigError for adapters that cannot be in one pipeline."""
    if not specs:
        raise ConfigError("no adapter is given", "Name one of pgcdc.adapters")
    for spec in specs:
        if not isinstance(spec, AdapterSpec):
            raise ConfigError(f"{spec!r} is no adapter", "Make one with pgcdc.adapters, such as adapters.file(path)")
    targets: dict[str, str] = {}
    for number, spec in enumerate(specs):
        kind = ADAPTERS[spec.type]
        if any(spec.name == other.name for other in specs[:number]):
            raise ConfigError(f"there are two adapters {spec.name}", "Give each a name of its own: name=...")
        check_options(spec)
        target = kind.target(spec.options)
        if target and target in targets:
            raise ConfigError(
                f"adapters {targets[target]} and {spec.name} write to the same target: {target}",
                "Give each a target of its own",
            )
        targets[target] = spec.name


def _make_stdout(spec: AdapterSpec, acks: Path) -> Sink:
    from pgcdc.sink.stdout import StdoutSink

    assert isinstance(spec.options, StdoutOptions)
    return StdoutSink(format=spec.options.format)


def _make_file(spec: AdapterSpec, acks: Path) -> Sink:
    from pgcdc.sink.folder import file_sink

    options = spec.options
    assert isinstance(options, FileOptions)
    return file_sink(
        options.target,
        is_folder=options.is_folder,
        max_bytes=options.max_size,
        max_files=options.max_files,
        compression=options.compress,
    )


def _check_file(options: FileOptions) -> None:
    if not options.target.parent.is_dir():
        raise ConfigError(f"the folder of the file {options.path} does not exist", "Create it first")
    if options.is_folder and options.max_size:
        raise ConfigError(
            f"{options.path} is a folder: there is nothing to rotate in it", "Leave max_size out, or name a file"
        )


def _make_exec(spec: AdapterSpec, acks: Path) -> Sink:
    from pgcdc.sink.exec.sink import ExecSink

    assert isinstance(spec.options, ExecOptions)
    return ExecSink(spec.options)


def _make_noop(spec: AdapterSpec, acks: Path) -> Sink:
    from pgcdc.sink.noop import NoopSink

    return NoopSink()


def _make_pg_table(spec: AdapterSpec, acks: Path) -> Sink:
    from pgcdc.sink.pg_table.sink import PgTableSink

    assert isinstance(spec.options, PgTableOptions)
    return PgTableSink(spec.options.resolved(), acks, spec.name, timeout_s=spec.delivery.timeout)


def _check_pg_table_source(spec: AdapterSpec, source: PostgresOptions, state: StateDir) -> None:
    from pgcdc.sink.pg_table.loops import check_source

    check_source(spec, source, state)


def _make_webhook(spec: AdapterSpec, acks: Path) -> Sink:
    from pgcdc.sink.webhook.sink import WebhookSink

    assert isinstance(spec.options, WebhookOptions)
    return WebhookSink(spec.options)


def _check_webhook(options: WebhookOptions) -> None:
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError("the adapter webhook needs the package aiohttp", "Run: pip install 'pgcdc[webhook]'")
    options.read_url()
    options.read_headers()
    options.read_signing_key()


def _check_webhook_delivery(options: WebhookOptions, delivery: DeliveryOptions) -> None:
    if options.request_timeout >= delivery.timeout:
        raise ConfigError(
            f"request_timeout is {options.request_timeout:g} s, and a write of several requests has {delivery.timeout:g} s "
            "(timeout): it would never be given up by itself",
            "Make request_timeout less than timeout: --webhook-request-timeout, --webhook-timeout; in a mapping of the "
            "YAML file, request_timeout and timeout",
        )


ADAPTERS: dict[str, AdapterType] = {
    kind.name: kind
    for kind in (
        AdapterType("stdout", StdoutOptions, _make_stdout, target=lambda options: "standard output"),
        AdapterType("file", FileOptions, _make_file, lambda options: os.path.realpath(options.target), _check_file),
        AdapterType("exec", ExecOptions, _make_exec, place=lambda options: repr((options.command, options.argv))),
        AdapterType("noop", NoopOptions, _make_noop),
        AdapterType(
            "pg_table",
            PgTableOptions,
            _make_pg_table,
            PgTableOptions.target,
            PgTableOptions.check,
            check_source=_check_pg_table_source,
            place=PgTableOptions.place,
        ),
        AdapterType(
            "webhook",
            WebhookOptions,
            _make_webhook,
            check=_check_webhook,
            check_delivery=_check_webhook_delivery,
            place=WebhookOptions.read_url,
        ),
    )
}
"""The types by name."""
