"""What a pipeline is told of one adapter, whoever says it: flags, YAML or Python."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

__all__ = ["AdapterSpec", "DeliveryOptions", "FileOptions", "NoopOptions", "Priority", "SizeBytes", "StdoutOptions"]

Priority = Literal["critical", "normal", "best-effort"]


PathText = Annotated[str, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)]
"""A path as it was written: one that ends with a slash is a folder."""


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _parse_size(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    from pgcdc.spark.options import parse_bytes  # which is not small

    try:
        return parse_bytes(value)
    except ValueError:
        raise PydanticCustomError("not_parsed", "{reason}", {"reason": "not a size like 512MB or 1GB"}) from None


SizeBytes = Annotated[int, BeforeValidator(_parse_size), WithJsonSchema({"type": ["integer", "string"]})]
"""A number of bytes, or a text like `100MB`."""


class StdoutOptions(_Options):
    """Events on standard output, for programs or for people."""

    format: Literal["auto", "json", "pretty"] = Field(
        default="auto",
        description="json: one event per line; pretty: for people; auto: pretty on a terminal, else json",
    )


class FileOptions(_Options):
    """JSON lines in a file, or in part files in a folder."""

    path: PathText = Field(min_length=1, description="the file; or a folder, which exists or ends with a slash")
    max_size: SizeBytes = Field(
        default=0, ge=0, description="a file that would grow larger is rotated: 100MB; 0: it never is"
    )
    max_files: int = Field(
        default=0, ge=0, description="how many rotated files are kept, older ones are deleted; 0: all of them"
    )
    compress: Literal["none", "gzip", "zstd"] = Field(default="none", description="how rotated files are compressed")

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


class NoopOptions(_Options):
    """Takes everything and keeps nothing: for measurements, and for a look at what a pipeline costs."""


class DeliveryOptions(_Options):
    """How a sink is called, the same for all: `<adapter>_<field>` in the configuration."""

    max_retries: int = Field(default=5, ge=0, description="tries after the first, before the adapter counts as failed")
    backoff_base: float = Field(
        default=0.1, gt=0, description="seconds; each pause is random between 0 and base * 2^tries"
    )
    backoff_cap: float = Field(default=30.0, gt=0, description="seconds")
    timeout: float = Field(default=30.0, gt=0, description="seconds for one write; then it has failed")
    cb_max_failures: int = Field(
        default=5, ge=0, description="failures in a row that open the circuit breaker; 0: none"
    )
    cb_reset: float = Field(
        default=60.0, gt=0, description="seconds until an open circuit breaker lets one try through"
    )
    rate_limit: float = Field(default=0.0, ge=0, description="events per second; 0: no limit")
    rate_limit_burst: int = Field(default=0, ge=0, description="events at once; 0: as many as in one second")
    on_exhausted: Literal["wait", "dead_letter"] = Field(
        default="wait", description="an event whose tries are used up is waited for, or goes to the dead letters"
    )
    dead_letter_limit: int = Field(
        default=1000, ge=0, description="more refused events in a row stop the pipeline; 0: any number may be refused"
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
