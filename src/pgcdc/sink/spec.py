"""What a pipeline is told of one adapter, whoever says it: flags, YAML or Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

__all__ = ["AdapterSpec", "DeliveryOptions", "FileOptions", "NoopOptions", "Priority", "StdoutOptions"]

Priority = Literal["critical", "normal", "best-effort"]


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StdoutOptions(_Options):
    """`stdout` has none."""


class FileOptions(_Options):
    """JSON lines in a file, or in part files in a folder."""

    path: Path
    _has_slash: bool = PrivateAttr(default=False)

    @model_validator(mode="wrap")
    @classmethod
    def _note_slash(cls, values: Any, make: Callable[[Any], FileOptions]) -> FileOptions:
        """A Path forgets the slash at its end."""
        options = make(values)
        if isinstance(values, dict):
            options._has_slash = str(values.get("path", "")).endswith("/")
        return options

    @property
    def is_folder(self) -> bool:
        """Whether the target is a folder: it is one, or the path ends with a slash."""
        return self._has_slash or self.path.is_dir()


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
