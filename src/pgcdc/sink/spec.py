"""What a pipeline is told of one adapter, whoever says it: flags, YAML or Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from pgcdc.core.errors import ConfigError
from pgcdc.core.settings import Options, PathText, setting, setting_of
from pgcdc.core.units import Bytes, Seconds

if TYPE_CHECKING:
    from pgcdc.event.forms import Form
    from pgcdc.sink.contract import Sink

__all__ = [
    "AdapterSpec",
    "DeliveryOptions",
    "FileOptions",
    "NoopOptions",
    "Priority",
    "SinkOptions",
    "SourceView",
    "StdoutOptions",
    "with_source_db",
]

Priority = Literal["critical", "normal", "best-effort"]


class DeliveryOptions(Options):
    """How a sink is called, the same for all: `<adapter>_<field>` in the configuration."""

    max_retries: int = setting(5, "tries after the first, before the adapter counts as failed", ge=0)
    backoff_base: Seconds = setting(0.1, "each pause is random between 0 and base * 2^tries", gt=0)
    backoff_cap: Seconds = setting(30.0, "no pause is longer", gt=0)
    timeout: Seconds = setting(30.0, "time for one write; then it has failed", gt=0)
    cb_max_failures: int = setting(
        5, "failures in a row that open the circuit breaker; 0: none", ge=0, aliases=("cb_failures",)
    )
    cb_reset: Seconds = setting(60.0, "time until an open circuit breaker lets one try through", gt=0)
    rate_limit: float = setting(0.0, "events per second; 0: no limit", ge=0)
    rate_limit_burst: int = setting(0, "events at once; 0: as many as in one second", ge=0, aliases=("rate_burst",))
    on_exhausted: Literal["wait", "dead_letter"] = setting(
        "wait", "an event whose tries are used up is waited for, or goes to the dead letters"
    )
    dead_letter_limit: int = setting(
        1000, "more refused events in a row stop the pipeline; 0: any number may be refused", ge=0
    )


@dataclass(frozen=True, slots=True)
class SourceView:
    """As much of the source as an adapter may want to know before anything is made for it."""

    url: str
    """Of its database; empty if it has none. It may hold a secret."""
    tables: Callable[[], Collection[tuple[str, str]]]
    """Schema and name of each table that a start would capture. PgcdcError: that cannot be told."""


class SinkOptions(Options):
    """The options of one type of adapter, which an entry point of the group `pgcdc.sinks` names.

    Flags, variables, keys of the YAML file, the JSON schema and the reference are made from its fields.
    """

    def make(self) -> Sink:
        """The sink. What it needs is imported here."""
        raise NotImplementedError

    def form(self) -> Form:
        """Which form of events its sink reads."""
        return self.make().form

    def target(self) -> str:
        """What no other adapter of a pipeline may write to, for people; empty: it does not matter."""
        return ""

    def place(self) -> str:
        """Where it delivers to, to the letter. It may be a secret."""
        return self.target()

    def secrets(self) -> Collection[str]:
        """Texts that must be seen nowhere. Those in files are read."""
        return ()

    def check(self) -> None:
        """Raise ConfigError for options that cannot work, without asking the target."""
        return None

    def check_delivery(self, delivery: DeliveryOptions) -> None:
        """Raise ConfigError for options that do not go with how it is called."""
        return None

    def check_source(self, adapter: str, source: SourceView) -> None:
        """Raise ConfigError if it must not get the events of this source. Both are asked, and nothing is left behind."""
        return None


class StdoutOptions(SinkOptions):
    """Events on standard output, for programs or for people."""

    format: Literal["auto", "json", "pretty"] = setting(
        "auto", "json: one event per line; pretty: for people; auto: pretty on a terminal, else json"
    )

    def make(self) -> Sink:
        from pgcdc.sink.stdout import StdoutSink

        return StdoutSink(format=self.format)

    def target(self) -> str:
        return "standard output"


class FileOptions(SinkOptions):
    """JSON lines in a file, or in part files in a folder."""

    path: PathText = setting(..., "the file; or a folder, which exists or ends with a slash", min_length=1)
    max_size: Bytes = setting(0, "a file that would grow larger is rotated: 100MB; 0: it never is", ge=0)
    max_files: int = setting(0, "how many rotated files are kept, older ones are deleted; 0: all of them", ge=0)
    compress: Literal["none", "gzip", "zstd"] = setting("none", "how rotated files are compressed")

    @model_validator(mode="after")
    def _check_rotation(self) -> FileOptions:
        for name, is_given in (("max_files", self.max_files > 0), ("compress", self.compress != "none")):
            if is_given and not self.max_size:
                raise ValueError(f"{name} is for files that rotate: give max_size, too")
        return self

    @property
    def full_path(self) -> Path:
        """The path, made absolute."""
        return Path(self.path).absolute()

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder, or is to be one."""
        return self.path.endswith("/") or self.full_path.is_dir()

    def make(self) -> Sink:
        from pgcdc.sink.folder import file_sink

        return file_sink(
            self.full_path,
            is_folder=self.is_folder,
            max_bytes=self.max_size,
            max_files=self.max_files,
            compression=self.compress,
        )

    def target(self) -> str:
        return os.path.realpath(self.full_path)

    def check(self) -> None:
        if not self.full_path.parent.is_dir():
            raise ConfigError(f"the folder of the file {self.path} does not exist", "Create it first")
        if self.is_folder and self.max_size:
            raise ConfigError(
                f"{self.path} is a folder: there is nothing to rotate in it", "Leave max_size out, or name a file"
            )


class NoopOptions(SinkOptions):
    """Takes everything and keeps nothing: for measurements, and for a look at what a pipeline costs."""

    def make(self) -> Sink:
        from pgcdc.sink.noop import NoopSink

        return NoopSink()


@dataclass(frozen=True)
class AdapterSpec:
    """One adapter of a pipeline. `transforms` are its own ones, behind the global ones; empty `routes` mean everything."""

    name: str
    type: str
    options: SinkOptions
    delivery: DeliveryOptions = field(default_factory=DeliveryOptions)
    transforms: tuple[Any, ...] = ()
    routes: tuple[str, ...] = ()
    priority: Priority = "normal"


def with_source_db(spec: Any, db: str) -> Any:
    """The same cascade for an adapter that was made in Python; what is no adapter stays as it is."""
    if not isinstance(spec, AdapterSpec):
        return spec
    fields = type(spec.options).model_fields
    missing = {
        name: db
        for name, info in fields.items()
        if setting_of(name, info).cascade == "db"
        and not getattr(spec.options, name)
        and not getattr(spec.options, f"{name}_file", None)
    }
    return replace(spec, options=spec.options.model_copy(update=missing)) if missing else spec
