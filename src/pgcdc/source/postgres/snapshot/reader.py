"""Reads chunks of tables, in one session. There are two kinds of orders, with the same COPY:

- `StageOrder`: a part of the plan of an initial snapshot, read in the snapshot that is held for it, into a durable file.
- `ChunkOrder`: the next rows of a table that is read beside the stream, in a snapshot of their own. Their table is locked
  against ALTER and TRUNCATE for that moment (ACCESS SHARE, as any SELECT). Then it is waited until what the snapshot could
  see is flushed: a commit that was not (synchronous_commit = off) could be lost by a crash of the server, and would not be
  in the stream before either.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pyarrow as pa
from psycopg import pq

from pgcdc.core.errors import ConnectionLost, PgcdcError, SourceError
from pgcdc.core.failpoint import hit
from pgcdc.postgres.database import (
    Connection,
    connect,
    explain_errors,
    explain_right,
    quote_identifier,
    quote_literal,
)
from pgcdc.source.postgres.setup.clock import wal_place
from pgcdc.source.postgres.setup.published import PublishedTable
from pgcdc.source.postgres.snapshot.chunks import Chunk, lock_chunks
from pgcdc.source.postgres.snapshot.copy import copy_rows, copy_statement
from pgcdc.source.postgres.snapshot.held import import_snapshot
from pgcdc.source.postgres.snapshot.planning import NoRight, SnapshotLost, check_table, find_table
from pgcdc.source.postgres.snapshot.releases import Staged, snapshot_rows, stage_rows

__all__ = ["Answer", "ChunkOrder", "ChunkRead", "Order", "Reader", "StageOrder"]

CHUNK_BYTES = 8 << 20
FLUSH_POLL_S = 0.02
_BATCH_BYTES = 1 << 20
_PASSING = ("40", "55P03", "57014")
"""Conflicts, deadlocks, locks and cancelled statements: the next attempt may do."""


@dataclass(frozen=True, slots=True)
class StageOrder:
    """A part of a table, to be read in a snapshot that is held."""

    id: str
    """Of the entry in the plan."""
    snapshot: str
    """Its name on the server."""
    published: PublishedTable
    chunk: Chunk
    folder: Path


@dataclass(frozen=True, slots=True)
class ChunkOrder:
    """The next rows of a table, or some rows of it, to be read in a snapshot of now."""

    table: str
    """As the user writes it."""
    oid: int = 0
    """The table that it was before; 0 if it was not looked for yet."""
    known: PublishedTable | None = None
    """None: look only what the table is like."""
    where: str = ""
    after: tuple[str, ...] | None = None
    """The last key that was read before."""
    low: tuple[str, ...] | None = None
    high: tuple[str, ...] | None = None
    keys: tuple[tuple[str, ...], ...] | None = None
    """Only these, in the order of PublishedTable.key."""
    only_keys: bool = False
    """Read the columns of the key, not whole rows."""
    limit: int = 1000

    @property
    def columns(self) -> tuple[str, ...]:
        """What a row consists of."""
        assert self.known is not None
        return self.known.key if self.only_keys else self.known.columns

    def statement(self) -> str:
        """The COPY. Keys are compared by the server, in its own order."""
        assert self.known is not None
        table = self.known
        key = ", ".join(map(quote_identifier, table.key))
        one_key = len(table.key) == 1
        conditions = [
            *([f"({key}) > ({_literals(self.after)})"] if self.after is not None else []),
            *([f"({key}) >= ({_literals(self.low)})"] if self.low is not None and self.after is None else []),
            *([f"({key}) < ({_literals(self.high)})"] if self.high is not None else []),
            *([table.row_filter] if table.row_filter else []),
            *([self.where] if self.where else []),
        ]
        if self.keys is not None:
            wanted = ", ".join(_literals(one) if one_key else f"({_literals(one)})" for one in self.keys)
            conditions.append(f"({key}) IN ({wanted})")
        where = (
            " WHERE " + " AND ".join(f"({one}\n)" for one in conditions) if conditions else ""
        )  # a comment ends there
        columns = ", ".join(map(quote_identifier, self.columns))
        cut = "" if self.keys is not None else f" LIMIT {self.limit}"
        return f"COPY (SELECT {columns} FROM {table.source}{where} ORDER BY {key}{cut}) TO STDOUT"


@dataclass(slots=True)
class ChunkRead:
    """What was read, and what is to be known of the moment in which it was."""

    table: PublishedTable
    """As the catalog describes it in the same moment."""
    values: list[pa.Array] = field(default_factory=list)
    rows: int = 0
    nbytes: int = 0
    is_last: bool = False
    """There is nothing behind it."""
    snapshot: str = ""
    """What was visible: `xmin:xmax:xip,...`."""
    lsn: int = 0
    """When the stream has passed this, it has passed everything that was visible."""
    time_us: int = 0
    seconds: float = 0.0
    estimated_rows: int = 0
    waiting_xids: tuple[int, ...] = ()
    """Of a look: transactions that wait for a synchronous standby. They may have been streamed to an earlier process."""


Order = StageOrder | ChunkOrder
Answer = Staged | ChunkRead | PgcdcError


class Reader:
    """Reads in one session, which is opened again when it was lost."""

    def __init__(self, url: str, publications: Sequence[str], application_name: str) -> None:
        self._url = url
        self._publications = tuple(publications)
        self._application_name = application_name
        self._conn: Connection | None = None
        self._role = ""

    def read(self, order: Order) -> Answer:
        """What was read, or why it was not."""
        try:
            with self._session(order):
                if isinstance(order, StageOrder):
                    return self._stage(order)
                read = self._look(order) if order.known is None else self._copy(order, order.known)
                self._await_flush(read)
                return read
        except PgcdcError as error:
            return error
        except Exception as error:  # a bug: the capture must hear of it
            return PgcdcError(f"a chunk cannot be read: {error!r}", "This is a bug in pgcdc: please report it")

    def close(self) -> None:
        """End the session."""
        if self._conn is not None:
            with contextlib.suppress(psycopg.Error):
                self._conn.close()
            self._conn = None

    @contextlib.contextmanager
    def _session(self, order: Order) -> Iterator[None]:
        try:
            with explain_errors(f"read table {_title(order)}"):
                yield
        except SourceError as error:
            self.close()
            cause = error.__cause__
            if isinstance(order, StageOrder) and isinstance(cause, psycopg.errors.InsufficientPrivilege):
                refused = explain_right(order.published.title, order.chunk.sql, self._role, cause)
                raise NoRight(refused.message, refused.advice) from cause
            if isinstance(cause, psycopg.Error) and (cause.sqlstate or "").startswith(_PASSING):
                raise ConnectionLost(error.message, error.advice) from cause
            raise
        except BaseException:
            self.close()  # it may be in a transaction, or in the middle of a COPY
            raise

    def _stage(self, order: StageOrder) -> Staged:
        conn = self._connection()
        columns, row_filter = order.published.columns, order.published.row_filter
        time_us = time.time_ns() // 1000
        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        if not import_snapshot(conn, order.snapshot):
            raise SnapshotLost("its snapshot is not held any more")
        conn.execute("SET LOCAL row_security = off")  # rows that a policy hides are an error, not missing
        conditions = [*order.chunk.conditions, *([row_filter] if row_filter else [])]
        statement = copy_statement(columns, order.chunk.source, conditions)
        name = f"{order.id}.{secrets.token_hex(4)}.arrow"  # another one for each attempt
        lock_chunks(conn, [order.chunk])
        hit("reader.reading")
        batches = (snapshot_rows(values, len(columns)) for values in copy_rows(conn, statement, len(columns)))
        rows, written = stage_rows(order.folder / name, batches)
        conn.execute("COMMIT")
        return Staged(name, rows, written, time_us)

    def _connection(self) -> Connection:
        if self._conn is not None and self._conn.pgconn.transaction_status != pq.TransactionStatus.IDLE:
            self.close()  # an open transaction would read in its old snapshot, for ever
        if self._conn is None or self._conn.closed:
            self._conn = connect(self._url, application_name=self._application_name)
            self._role = self._conn.info.user
            if self._conn.info.parameter_status("server_encoding") == "SQL_ASCII":
                self._conn.execute("SET client_encoding = 'SQL_ASCII'")  # as the stream has it
        return self._conn

    def _look(self, order: ChunkOrder) -> ChunkRead:
        conn = self._connection()
        table = find_table(conn, self._publications, order.table, order.oid)
        check_table(conn, table, order.where, lock_timeout="0")
        row = conn.execute(_ESTIMATE, [table.relation.oid] * 2).fetchone()
        waiting = conn.execute(_WAITING).fetchall()
        estimated = int(row[0] or 0) if row else 0
        return ChunkRead(table, estimated_rows=estimated, waiting_xids=tuple(int(one) for (one,) in waiting))

    def _copy(self, order: ChunkOrder, known: PublishedTable) -> ChunkRead:
        conn = self._connection()
        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        conn.execute("SET LOCAL row_security = off")  # rows that a policy hides are an error, not missing
        try:
            with conn.transaction():
                conn.execute(f"LOCK TABLE {known.source} IN ACCESS SHARE MODE".encode())
        except psycopg.errors.InsufficientPrivilege:  # of some columns only: a query may do what LOCK may not
            conn.execute("COMMIT")
            conn.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY")
            conn.execute("SET LOCAL row_security = off")
            conn.execute(
                f"SELECT FROM {known.source} LIMIT 0".encode()
            )  # and holds the lock; the COPY has a later snapshot
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):  # renamed, or dropped
            conn.execute("ROLLBACK")
            return ChunkRead(find_table(conn, self._publications, order.table, known.relation.oid))
        row = conn.execute(_MOMENT).fetchone()
        assert row is not None
        table = find_table(conn, self._publications, order.table, known.relation.oid)
        read = ChunkRead(table, snapshot=row[0], time_us=row[1])
        if table != known:  # to be looked at again, when the stream has come so far
            conn.execute("COMMIT")
            return read
        begun = time.monotonic()  # behind what takes as long for any number of rows
        columns = len(order.columns)
        if order.keys == ():
            conn.execute("COMMIT")
            read.is_last = True
            return read
        with contextlib.closing(
            copy_rows(conn, order.statement(), columns, batch_bytes=min(CHUNK_BYTES, _BATCH_BYTES))
        ) as arrays:
            for values in arrays:
                read.values.append(values)
                read.rows += len(values) // columns
                read.nbytes += values.nbytes
                if read.nbytes >= CHUNK_BYTES and order.keys is None:
                    break  # if there is more, this closes the connection: it is read as the next chunk
        is_whole = not conn.closed
        if is_whole:
            conn.execute("COMMIT")
        read.is_last = is_whole and (order.keys is not None or read.rows < order.limit)
        read.seconds = time.monotonic() - begun
        return read

    def _await_flush(self, read: ChunkRead) -> None:
        """Until what was visible is on the server's disk, and where in the WAL that is.

        What is not flushed may be nothing but pages that the reading itself has touched. If nobody commits, only commits
        that do not wait for their flush matter, and these are flushed after three times wal_writer_delay at most.
        """
        conn = self._connection()
        read.lsn = wal_place(conn)
        row = conn.execute("SELECT setting::float8 / 1000 FROM pg_settings WHERE name = 'wal_writer_delay'").fetchone()
        deadline = time.monotonic() + 3 * (row[0] if row else 0.2) + 1.0
        while True:
            is_late = time.monotonic() > deadline
            row = conn.execute("SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn").fetchone()
            assert row is not None
            if int(row[0]) >= read.lsn or is_late:
                read.lsn = min(read.lsn, int(row[0]))
                return
            time.sleep(FLUSH_POLL_S)


def _title(order: Order) -> str:
    return order.table if isinstance(order, ChunkOrder) else order.published.title


def _literals(values: Sequence[str]) -> str:
    return ", ".join(map(quote_literal, values))


_MOMENT = "SELECT txid_current_snapshot()::text, (extract(epoch FROM clock_timestamp()) * 1000000)::int8"
_ESTIMATE = """
SELECT sum(CASE WHEN relpages > 0 AND reltuples > 0
                THEN reltuples::float8 / relpages * pg_relation_size(oid) / current_setting('block_size')::int8
                ELSE 0 END)::int8
FROM pg_class WHERE relkind <> 'p' AND (oid = %s OR oid IN (SELECT relid FROM pg_partition_tree(%s::oid)))
"""
_WAITING = "SELECT backend_xid::text FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND backend_xid IS NOT NULL"
