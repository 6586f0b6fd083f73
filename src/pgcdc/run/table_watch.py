"""What becomes of the captured tables while a pipeline runs: new ones, altered ones, and columns that none of them has."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pgcdc.config import Config
from pgcdc.core.errors import GapError, PgcdcError
from pgcdc.core.shapes import ShapeHistory
from pgcdc.core.state import StateDir
from pgcdc.event.shape_diff import describe_change
from pgcdc.postgres.database import connect, explain_errors
from pgcdc.source.postgres.setup.prepare import Prepared, follow_tables
from pgcdc.source.postgres.setup.published import read_published
from pgcdc.transform.check import missing_columns
from pgcdc.transform.program import Chain

__all__ = ["TableWatch"]

INTERVAL_S = 10.0


class TableWatch:
    """Says what is new; everything is looked at in the pipeline's thread."""

    def __init__(self, config: Config, shapes_file: Path, say: Callable[[str], None]) -> None:
        self._config = config
        self._say = say
        self._shapes = ShapeHistory(shapes_file)
        self._due = time.monotonic() + INTERVAL_S

    def begin(self) -> None:
        """What an earlier run has told is not told again."""
        self._shapes.refresh()

    def follow(self, prepared: Prepared) -> Prepared:
        """With --all-tables or --schemas: publish tables that were created meanwhile, and say so."""
        now = time.monotonic()
        if not (self._config.all_tables or self._config.schemas) or now < self._due:
            return prepared
        self._due = now + INTERVAL_S
        try:
            infos = follow_tables(self._config.source_options(), StateDir(self._config.state_dir))
        except GapError:
            raise
        except PgcdcError as error:
            self._say(f"new tables cannot be published: {error}")
            return prepared
        known = {table for info in prepared.publications for table in info.tables}
        added = sorted({table for info in infos for table in info.tables} - known)
        if not added:
            return prepared
        self._say(f"new tables are captured from now on: {', '.join(added)}")
        return replace(prepared, publications=infos)

    def tell_changes(self, prepared: Prepared | None, chains: Sequence[Chain]) -> None:
        """Tables that were altered; and what transforms do not find any more: a column that was renamed is not masked."""
        changes = self._shapes.refresh()
        for change in changes:
            for line in describe_change(change):
                self._say(line)
        if any(change.before is not None for change in changes):
            self.tell_missing(prepared, chains)

    def tell_missing(self, prepared: Prepared | None, chains: Sequence[Chain]) -> None:
        """Columns that no table has are no error: the table may come later. But a mask that hides nothing has to be told."""
        if prepared is None or not any(chain.transforms for chain in chains):
            return
        names = [one["name"] for one in prepared.identity.publications]
        with contextlib.suppress(PgcdcError), explain_errors("look at the columns"):
            with connect(self._config.db, may_retry=False) as sql:
                tables = [one.relation for one in read_published(sql, names)]
            for line in missing_columns(chains, tables):
                self._say(f"warning: {line}")
