"""What a pipeline is told of one adapter, whoever says it: flags, YAML or Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, model_validator

from pgcdc.core.settings import Options, PathText, setting
from pgcdc.core.units import Bytes, Seconds

__all__ = ["AdapterSpec", "DeliveryOptions", "FileOptions", "NoopOptions", "Priority", "StdoutOptions"]

Priority = Literal["critical", "normal", "best-effort"]


class StdoutOptions(Options):
    """Events on standard output, for programs or for people."""

    format: Literal["auto", "json", "pretty"] = setting(
        "auto", "json: one event per line; pretty: for people; auto: pretty on a terminal, else json"
    )


class FileOptions(Options):
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
    def target(self) -> Path:
        """The path, made absolute."""
        return Path(self.path).absolute()

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder, or is to be one."""
        return self.path.endswith("/") or self.target.is_dir()


class NoopOptions(Options):
    """Takes everything and keeps nothing: for measurements, and for a look at what a pipeline costs."""


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


@dataclass(frozen=True)
class AdapterSpec:
    """One adapter of a pipeline. `transforms` are its own ones, behind the global ones; empty `routes` mean everything."""

    name: str
    type: str
    options: BaseModel
    delivery: DeliveryOptions = field(default_factory=DeliveryOptions)
    transforms: tuple[Any, ...] = ()
    routes: tuple[str, ...] = ()
    priority: Priority = "normal"
