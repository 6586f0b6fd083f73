"""A source with its state directory, prepared as a start does it; and what its capture process is told."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields
from typing import Any

from pgcdc.capture.control import CaptureOptions, CaptureSpec, make_spec
from pgcdc.core.state import StateDir
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.postgres.setup import prepare as preparing
from pgcdc.source.postgres.setup.fingerprint import SlotDetails
from pgcdc.source.postgres.setup.publications import PublicationInfo
from pgcdc.source.protocol import Prepared

__all__ = ["Ready", "Wanted", "follow_tables", "prepare"]


class Wanted(PostgresOptions, CaptureOptions):
    """What a test wants to capture. Rows that are there are not read, unless it says so."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{"snapshot_mode": "never", **given})


@dataclass(frozen=True, slots=True)
class Ready(Prepared):
    """A source that can be read."""

    spec: CaptureSpec = field(kw_only=True)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the publications."""
        return SlotDetails.of(self.identity).names

    @property
    def changed(self) -> list[str]:
        """What is said to be changed in the publications besides their tables."""
        end = "; this applies to what is written from now on"
        return [one.removesuffix(end) for one in self.notes if one.endswith(end)]

    @property
    def left_out(self) -> tuple[str, ...]:
        """Tables that are said to be no longer captured."""
        found = (
            re.fullmatch("table (.*) is no longer captured: it was removed from --tables", one) for one in self.notes
        )
        return tuple(one[1] for one in found if one)


def prepare(wanted: Wanted, **more: Any) -> Ready:
    """Prepare it, for a capture process that ends with this one."""
    source = wanted.part(PostgresOptions)
    made = preparing.prepare(source, StateDir(wanted.state_dir), **more)
    spec = make_spec(source, wanted, os.getpid())
    return Ready(**{one.name: getattr(made, one.name) for one in fields(made)}, spec=spec)


def follow_tables(wanted: Wanted) -> tuple[PublicationInfo, ...]:
    """Publish the tables that exist now."""
    return preparing.follow_tables(wanted.part(PostgresOptions), StateDir(wanted.state_dir))
