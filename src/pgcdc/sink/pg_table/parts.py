"""How executors write: into tables beside the target, which the driver merges in one transaction.

The URL of the target never stands in Spark's plan. Executors read it from a variable that the driver has set before the
JVM started, and whose name alone travels; on other hosts it is set by whoever starts the workers. Where it is missing, the
driver writes.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import psycopg
import pyarrow as pa

from pgcdc.core.errors import SinkRejected
from pgcdc.core.failpoint import hit
from pgcdc.core.shapes import ShapeHistory
from pgcdc.postgres.database import Connection
from pgcdc.sink.base import Receipt
from pgcdc.sink.pg_table.append import Appender
from pgcdc.sink.pg_table.options import PgTableOptions
from pgcdc.sink.pg_table.session import SessionPlan, connect_target
from pgcdc.sink.pg_table.sqlstate import Blame, blame, describe, explain

__all__ = ["PgTablePartWriter", "export_url", "url_variable"]


def url_variable(adapter: str) -> str:
    """The variable in which executors find the URL of an adapter's target."""
    return f"PGCDC_EXECUTOR_DB_{re.sub('[^A-Z0-9]', '_', adapter.upper())}"


def export_url(adapter: str, url: str) -> None:
    """Let the workers of a Spark that is started later find the URL."""
    os.environ[url_variable(adapter)] = url


@dataclass(frozen=True, slots=True)
class PgTablePartWriter:
    """Copies the events of one task to a table of the driver's. It holds no secret."""

    adapter: str
    variables: tuple[str, ...]
    """Where the URL is looked for."""
    options: PgTableOptions
    """Without the URL."""
    stage: str
    """Append: the table for the parts, as SQL takes it. Apply: what the names of such tables begin with."""
    shapes: ShapeHistory | None = None
    """Apply: the shapes of the source's tables, read."""

    def write_part(self, part: int, lines: Iterable[pa.RecordBatch]) -> Receipt | None:
        """Make the events of one task durable where nobody looks for them."""
        url = next((found for name in self.variables if (found := os.environ.get(name))), "")
        if not url:
            return {"part": part, "missing": self.variables[0]}
        try:
            with connect_target(SessionPlan(self.adapter, url)) as conn:
                receipt = self._write(conn, lines)
        except psycopg.Error as error:
            if blame(error) is Blame.EVENT or (self.shapes is not None and blame(error) is Blame.SHAPE):
                # The driver looks for the event that is to blame.
                raise SinkRejected(f"adapter {self.adapter}: {describe(error)}") from None
            raise explain(self.adapter, "write a part", error) from None
        return {**receipt, "part": part}

    def _write(self, conn: Connection, lines: Iterable[pa.RecordBatch]) -> Receipt:
        with conn.transaction():
            if self.shapes is not None:
                from pgcdc.sink.pg_table.apply import Applier

                receipt = Applier(self.options, self.shapes, self.adapter, _say_nothing).stage(conn, self.stage, lines)
            else:
                token = str(uuid.uuid4())
                rows = Appender(self.options.table).stage(conn, self.stage, token, _tables(lines))
                receipt = {"token": token, "rows": rows}
            hit("pg_table.part_written")
        return receipt


def _say_nothing(text: str) -> None:
    """The driver says it, when it merges."""


def _tables(lines: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    for batch in lines:
        yield pa.Table.from_batches([batch])
