"""What `prepare` would do, tried out: the same checks, and the publications made in a transaction that is rolled back.

Nothing is left in the database or in the state directory, and nobody else sees what is tried.
"""

from __future__ import annotations

from dataclasses import dataclass

from pgcdc.core.errors import SourceError
from pgcdc.core.state import StateDir
from pgcdc.postgres.database import connect, explain_errors
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.postgres.setup.preflight import ServerInfo, check
from pgcdc.source.postgres.setup.prepare import (
    check_begin,
    check_known,
    check_others,
    check_publications,
    check_rejoin,
    make_publications,
    publication_names,
)
from pgcdc.source.postgres.setup.publications import PublicationInfo
from pgcdc.source.postgres.setup.published import PublishedTable, read_published
from pgcdc.source.postgres.snapshot.planning import check_readable
from pgcdc.source.postgres.snapshot.signals import ensure_signal_table

__all__ = ["Rehearsal", "check_server", "check_slot", "rehearse"]

LOCK_TIMEOUT = "5s"
"""Who alters a captured table at this moment is not waited for."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What there would be."""

    publications: tuple[PublicationInfo, ...]
    is_new: bool
    unreadable: SourceError | None
    """Why the rows that are there could not be read, if they are wanted."""
    published: tuple[PublishedTable, ...] = ()
    """The tables with the columns that would be captured."""


def check_server(options: PostgresOptions) -> ServerInfo:
    """Connect, and see whether this server and role can be captured from. Raises with advice."""
    server = check(options.db, options.slot_name)
    options.check_server(server.version_num)
    return server


def check_slot(options: PostgresOptions, state: StateDir, server: ServerInfo, consumer: str) -> None:
    """Whether slot and state directory belong together, and nobody else reads the slot. Raises with advice."""
    state.check_whole()
    check_others(options, state, consumer)
    known = check_known(options, state, server)
    if known is not None and known.created_lsn > 0:
        check_rejoin(options, state, known, server)
    else:
        check_begin(options, state, server)


@explain_errors("try the publications")
def rehearse(options: PostgresOptions, state: StateDir) -> Rehearsal:
    """Make the publications (and the table of signals) as a start would, see what they hold, and take all of it back."""
    known = state.identity()
    began = known is not None and known.created_lsn > 0
    with connect(options.db, may_retry=False) as sql, sql.transaction(force_rollback=True):
        sql.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'".encode())
        names = publication_names(options, known if began else None)
        if began:
            assert known is not None
            check_publications(sql, options, known, names)
        if options.incremental_snapshot:
            ensure_signal_table(sql, options.signal_table, names[0] if options.uses_existing else "")
        publications = make_publications(sql, options, names)
        unreadable = None
        if not began and options.effective_snapshot_mode != "never":
            try:
                check_readable(sql, names)
            except SourceError as error:
                unreadable = error
        published = tuple(read_published(sql, names))
    return Rehearsal(publications, not began, unreadable, published)
