"""What adapters may know of a source before anything is made for it."""

from __future__ import annotations

from pgcdc.core.state import StateDir
from pgcdc.sink.spec import SourceView
from pgcdc.source.postgres.options import PostgresOptions

__all__ = ["view_source"]


def view_source(source: PostgresOptions, state: StateDir) -> SourceView:
    """The tables are asked for when somebody wants to know them."""

    def tables() -> set[tuple[str, str]]:
        from pgcdc.source.postgres.setup.rehearsal import rehearse  # with all that a capture needs

        published = rehearse(source.but(snapshot_mode="never", snapshot_first=None), state).published
        return {(one.relation.namespace, one.relation.name) for one in published}

    return SourceView(source.db, tables)
