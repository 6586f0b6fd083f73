"""Tables that the publications gained since the slot began: the rows that they have already are read beside the stream."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from psycopg import Error
from psycopg.errors import LockNotAvailable

from pgcdc.postgres.database import Connection, name_table
from pgcdc.source.postgres.setup.guard import connection_ended
from pgcdc.source.postgres.snapshot.requests import RequestQueue, SnapshotRequest, new_id

__all__ = ["note_tables"]

logger = logging.getLogger("pgcdc.capture")


def note_tables(queue: RequestQueue, sql: Connection, publications: Sequence[str], *, is_wanted: bool) -> list[str]:
    """Note which tables there are; of those that are new, the rows are asked for if that `is_wanted`. Returns these.

    What was noted is durable together with the requests, so that no crash forgets a table. At the first time nothing is
    asked for: these tables are those of the slot's beginning.
    """
    try:
        with sql.transaction():  # the view opens every table: the stream must not wait behind a VACUUM FULL
            sql.execute("SET LOCAL lock_timeout = '100ms'")
            found = {oid: name_table(schema, name) for oid, schema, name in sql.execute(_TABLES, [list(publications)])}
    except LockNotAvailable:
        return []  # we look again in a few seconds
    except Error as error:
        raise connection_ended(error) from error
    known = queue.tables
    if known == found.keys():
        return []
    fresh = sorted(found.keys() - known) if known is not None and is_wanted else []
    added = [(oid, found[oid]) for oid in fresh]
    queue.know(found, [SnapshotRequest(new_id(), name, "added", oid=oid) for oid, name in added])
    if added:
        logger.info("new tables, whose existing rows are read: %s", ", ".join(name for _, name in added))
    return [name for _, name in added]


_TABLES = """
SELECT c.oid::int8, n.nspname::text, c.relname::text
FROM pg_publication_tables p JOIN pg_namespace n ON n.nspname = p.schemaname
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = p.tablename
WHERE p.pubname = ANY (%s)
"""
