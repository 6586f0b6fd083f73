"""The two Arrow schemas between capture and Spark. `CHANGES` is the content of a segment: one schema for all tables,
with values as PostgreSQL's exact bytes. `TRANSACTIONS` lists the transactions of those rows in order. It is in the
index rather than in the rows, because a transaction's position and time are known only at its Commit."""

from __future__ import annotations

import pyarrow as pa

CHANGES = pa.schema(
    [
        pa.field("ordinal", pa.int64(), nullable=False),
        pa.field("sub", pa.int32(), nullable=False),
        pa.field("op", pa.uint8(), nullable=False),
        pa.field("relation", pa.int32(), nullable=False),  # version number in Relations; -1 for a message
        pa.field("new", pa.list_(pa.binary())),  # one value per column; for a message: one element, its content
        pa.field("old", pa.list_(pa.binary())),
        pa.field("old_kind", pa.uint8(), nullable=False),
        pa.field("unchanged", pa.list_(pa.int16())),  # columns of `new` (i) or `old` (-1-i) that are unchanged TOAST
        pa.field("prefix", pa.string()),  # of a message; for a schema mark: the catalog's description, as JSON
    ]
)

ADDRESSED = "pgcdc:addressed"
"""The origin of rows that are for some adapters only (`event.audience`): other readers omit them."""

TRANSACTIONS = pa.schema(
    [
        pa.field("commit", pa.int64(), nullable=False),  # as in a position
        pa.field("kind", pa.uint8(), nullable=False),
        pa.field("commit_time", pa.int64(), nullable=False),  # microseconds since 1970-01-01 UTC
        pa.field("xid", pa.int64(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),  # the number of rows of this segment that belong to it
        pa.field("complete", pa.bool_(), nullable=False),  # false: it continues in the next segment
        pa.field("origin", pa.string()),
    ]
)
