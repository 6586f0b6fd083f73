"""What executors leave for the driver: staging tables, and a receipt that says what is to be done with them, in order."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pgcdc.core.errors import SinkRejected
from pgcdc.core.shapes import ShapeChange
from pgcdc.postgres.database import Connection, quote_qualified
from pgcdc.sink.base import Receipt
from pgcdc.sink.pg_table import staging
from pgcdc.sink.pg_table.fold import Bag, Fold, Keyed, Move
from pgcdc.sink.pg_table.mapping import TableName
from pgcdc.sink.pg_table.tables import SourceTable, describe_change
from pgcdc.sink.pg_table.writer import Writer, group_rows

__all__ = ["PartStager", "take_part"]

_EXACT = re.compile(
    r"(smallint|integer|bigint|oid|uuid|boolean|bytea|date|text|character|character varying|timestamp|time)\b"
)
"""Types whose equal values have the same text, by which events are spread over parts; numeric has 1.0 and 1.00."""


class PartStager:
    """Writes folded changes to tables of its own."""

    def __init__(self, conn: Connection, schema: str, prefix: str) -> None:
        self._conn = conn
        self._schema = schema
        self._prefix = f"{prefix}_{uuid.uuid4().hex[:8]}"
        self._steps: list[dict[str, Any]] = []

    def receipt(self) -> Receipt:
        """What is to be done."""
        return {"steps": self._steps}

    def truncate(self, sources: Iterable[SourceTable]) -> None:
        self._steps.append({"do": "truncate", "tables": [list(source.name) for source in sources]})

    def write(self, source: SourceTable, fold: Fold) -> None:
        for groups in group_rows(fold):
            if groups.deletes and not all(_is_exact(source, column) for column in fold.key):
                self.refuse()  # an equal key may have come in another part, before this delete or after it
            if groups.deletes:
                kind = "gone" if isinstance(fold, Bag) else "delete"
                self._stage(kind, source, groups.delete_columns, fold.key, groups.deletes)
            for kind, by_columns in (("put", groups.puts), ("patch", groups.patches), ("fresh", groups.fresh)):
                for columns, rows in by_columns.items():
                    self._stage(kind, source, columns, fold.key, rows)

    def move(self, source: SourceTable, fold: Keyed, move: Move) -> None:
        self.refuse()

    def refuse(self) -> None:
        """Leave the batch to the driver."""
        self._steps.append({"do": "refuse"})

    def _stage(
        self,
        kind: str,
        source: SourceTable,
        columns: Sequence[str],
        key: Sequence[str],
        rows: Sequence[bytes],
    ) -> None:
        name = quote_qualified(self._schema, f"{self._prefix}_{len(self._steps)}")
        self._conn.execute(staging.text_staging(name, columns).encode())
        staging.copy_rows(self._conn, name, columns, rows)
        self._steps.append({
            "do": kind, "table": list(source.name), "columns": list(columns), "key": list(key), "stage": name,
            "rows": len(rows),
        })  # fmt: skip


def _is_exact(source: SourceTable, column: str) -> bool:
    names = source.types.get(column, ())
    return bool(names) and _EXACT.match(names[0]) is not None


def take_part(receipt: Receipt, writer: Writer, find: Callable[[TableName], ShapeChange | None]) -> None:
    """Do what a receipt says, and drop its tables. SinkRejected: only the driver can."""
    if any(step["do"] == "refuse" for step in receipt["steps"]):
        raise SinkRejected("keys or tables change in a way that needs the order of all events: the driver applies them")
    for step in receipt["steps"]:
        if step["do"] == "truncate":
            writer.truncate([SourceTable((schema, name)) for schema, name in step["tables"]])
            continue
        name = step["table"][0], step["table"][1]
        writer.take(
            describe_change(name, find(name)),
            step["do"],
            step["stage"],
            step["columns"],
            tuple(step["key"]),
            step["rows"],
        )
