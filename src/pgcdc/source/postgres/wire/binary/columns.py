"""Before the start: are there published columns whose values cannot travel in binary form?"""

from __future__ import annotations

from collections.abc import Sequence

from pgcdc.core.errors import SourceError
from pgcdc.postgres.database import Connection, name_table
from pgcdc.postgres.types.catalog import TypeCatalog
from pgcdc.source.postgres.wire.binary.decoder import unsupported

__all__ = ["check_columns"]

_COLUMNS = """
SELECT t.schemaname, t.tablename, a.attname, a.atttypid::bigint
FROM pg_publication_tables t
JOIN pg_namespace n ON n.nspname = t.schemaname
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE t.pubname = ANY (%s)
ORDER BY 1, 2, a.attnum
"""


def check_columns(conn: Connection, publications: Sequence[str]) -> None:
    """Raise unless every column of these publications has a type that we can turn into text."""
    rows = conn.execute(_COLUMNS, [list(publications)]).fetchall()
    refused = {one.type_oid: one for one in unsupported(TypeCatalog.load(conn), [row[3] for row in rows])}
    for schema, table, column, oid in rows:
        if oid in refused:
            raise SourceError(
                f"column {column} of table {name_table(schema, table)} cannot travel in binary form: {refused[oid].reason}",
                "Leave --binary off: text has the same values for every type",
            )
