"""A source with its state directory, prepared as a start does it; and what its capture process is told."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

from pgcdc.capture.spec import CaptureOptions, CaptureSpec, make_spec
from pgcdc.core.state import StateDir
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.postgres.setup import prepare as preparing
from pgcdc.source.postgres.setup.publications import PublicationInfo

__all__ = ["Ready", "Wanted", "follow_tables", "prepare"]


class Wanted(PostgresOptions, CaptureOptions):
    """What a test wants to capture. Rows that are there are not read, unless it says so."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{"snapshot_mode": "never", **given})


@dataclass(frozen=True, slots=True)
class Ready(preparing.Prepared):
    """A source that can be read."""

    spec: CaptureSpec


def prepare(wanted: Wanted, **more: Any) -> Ready:
    """Prepare it, for a capture process that ends with this one."""
    source = wanted.part(PostgresOptions)
    made = preparing.prepare(source, StateDir(wanted.state_dir), **more)
    spec = make_spec(source, wanted, made.names, os.getpid())
    return Ready(**{field.name: getattr(made, field.name) for field in fields(made)}, spec=spec)


def follow_tables(wanted: Wanted) -> tuple[PublicationInfo, ...]:
    """Publish the tables that exist now."""
    return preparing.follow_tables(wanted.part(PostgresOptions), StateDir(wanted.state_dir))
