"""Reads chunks of tables in a thread and on a connection of its own, so that the stream never waits for a table.

Each chunk is read in a snapshot of its own, with the table locked against ALTER and TRUNCATE for that moment (ACCESS SHARE,
as any SELECT). Then it is waited until what the snapshot could see is flushed: a commit that was not (synchronous_commit =
off) could be lost by a crash of the server, and would not be in the stream before either.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psycopg
import pyarrow as pa
from psycopg import pq

from pgcdc.core.errors import ConnectionLost, PgcdcError, SourceError
from pgcdc.postgres.database import (
    Connection,
    connect,
    execute_one,
    explain_errors,
    explain_right,
    quote_identifier,
    quote_literal,
    split_table,
)
from pgcdc.source.postgres.setup.clock import wal_place
from pgcdc.source.postgres.setup.published import PublishedTable, find_published, read_published
from pgcdc.source.postgres.snapshot.copy import copy_rows

__all__ = ["ChunkOrder", "ChunkRead", "ChunkReader", "NeverReadable", "check_readable", "find_table"]

CHUNK_BYTES = 8 << 20
FLUSH_POLL_S = 0.02
_BATCH_BYTES = 1 << 20
_PASSING = ("40", "55P03", "57014")
"""Conflicts, deadlocks, locks and cancelled statements: the next attempt may do."""


class NeverReadable(SourceError):
    """The table is gone, is not published any more, or has no key: to try again is no use."""


@dataclass(frozen=True, slots=True)
class ChunkOrder:
    """What to read."""

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


class ChunkReader:
    """One thread, one order at a time. `fileno` becomes readable when `take` has something."""

    def __init__(self, url: str, publications: Sequence[str], application_name: str) -> None:
        self._url = url
        self._publications = tuple(publications)
        self._application_name = application_name
        self._orders: queue.SimpleQueue[ChunkOrder | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[ChunkRead | PgcdcError] = queue.SimpleQueue()
        self._readable, self._writable = os.pipe()
        self._conn: Connection | None = None
        self._thread: threading.Thread | None = None
        self.is_busy = False

    def fileno(self) -> int:
        """For a selector."""
        return self._readable

    def start(self, order: ChunkOrder) -> None:
        """Read this; nothing else is read meanwhile."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="chunks", daemon=True)
            self._thread.start()
        self.is_busy = True
        self._orders.put(order)

    def take(self) -> ChunkRead | PgcdcError | None:
        """What became of the order; None if it is not done."""
        try:
            found = self._done.get_nowait()
        except queue.Empty:
            return None
        os.read(self._readable, 1)
        self.is_busy = False
        return found

    def close(self) -> None:
        """End the thread; what is being read is given up."""
        if self._thread is None:
            return
        self._orders.put(None)
        conn = self._conn
        if conn is not None and self.is_busy:
            with contextlib.suppress(psycopg.Error):
                conn.cancel()
        self._thread.join(2)

    # --- in the thread

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                found: ChunkRead | PgcdcError = self._read(order)
            except PgcdcError as error:
                found = error
            except Exception as error:  # a bug: the capture must hear of it
                found = PgcdcError(f"a chunk cannot be read: {error!r}", "This is a bug in pgcdc: please report it")
            self._done.put(found)
            os.write(self._writable, b"x")
        self._drop()

    def _drop(self) -> None:
        if self._conn is not None:
            with contextlib.suppress(psycopg.Error):
                self._conn.close()
            self._conn = None

    def _read(self, order: ChunkOrder) -> ChunkRead:
        try:
            with explain_errors(f"read table {order.table}"):
                read = self._look(order) if order.known is None else self._copy(order, order.known)
                self._await_flush(read)
                return read
        except SourceError as error:
            self._drop()
            cause = error.__cause__
            if isinstance(cause, psycopg.Error) and (cause.sqlstate or "").startswith(_PASSING):
                raise ConnectionLost(error.message, error.advice) from cause
            raise
        except BaseException:
            self._drop()  # it may be in a transaction, or in the middle of a COPY
            raise

    def _connection(self) -> Connection:
        if self._conn is not None and self._conn.pgconn.transaction_status != pq.TransactionStatus.IDLE:
            self._drop()  # an open transaction would read in its old snapshot, for ever
        if self._conn is None or self._conn.closed:
            self._conn = connect(self._url, application_name=self._application_name)
            if self._conn.info.parameter_status("server_encoding") == "SQL_ASCII":
                self._conn.execute("SET client_encoding = 'SQL_ASCII'")  # as the stream has it
        return self._conn

    def _look(self, order: ChunkOrder) -> ChunkRead:
        conn = self._connection()
        table = find_table(conn, self._publications, order.table, order.oid)
        check_readable(conn, table, order.where, lock_timeout="0")
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


def find_table(conn: Connection, publications: Sequence[str], name: str, oid: int = 0) -> PublishedTable:
    """The table that is meant, if it can be read while the stream goes on. SourceError with advice if not."""
    wanted = split_table(name)
    known: list[PublishedTable] = []
    if oid:
        found = find_published(conn, publications, oid)
    else:
        known = read_published(conn, publications)
        found = next((one for one in known if (one.relation.namespace, one.relation.name) == wanted), None)
    if found is None:
        known = known or read_published(conn, publications)
        names = ", ".join(one.title for one in known[:10]) or "none"
        what = "is not captured any more" if oid else "is not captured"
        raise NeverReadable(f"table {name} {what}", f"Name one of those that are: {names}")
    if not found.key:
        raise NeverReadable(
            f"table {found.title} has no primary key or replica identity index: its existing rows cannot be read while the "
            "stream goes on",
            "Add a primary key; or begin anew with all tables: pgcdc resync --new-slot",
        )
    return found


def check_readable(conn: Connection, table: PublishedTable, where: str, lock_timeout: str = "1s") -> None:
    """Raise SourceError if its rows cannot be read: no right, or a condition that is none. Timeout 0: wait for locks."""
    columns = ", ".join(map(quote_identifier, table.columns))
    condition = f" WHERE ({where}\n)" if where else ""
    try:
        with conn.transaction():
            conn.execute("SET TRANSACTION READ ONLY")
            conn.execute("SET LOCAL row_security = off")
            conn.execute(f"SET LOCAL lock_timeout = {quote_literal(lock_timeout)}".encode())
            execute_one(conn, f"SELECT {columns} FROM {table.source}{condition} LIMIT 0")
    except psycopg.errors.InsufficientPrivilege as error:
        raise explain_right(table.title, table.sql, conn.info.user, error) from None
    except psycopg.errors.LockNotAvailable:
        raise SourceError(f"table {table.title} is locked", "Try again when nobody alters it") from None
    except (psycopg.ProgrammingError, psycopg.DataError, psycopg.errors.FeatureNotSupported) as error:
        if not where:
            raise
        raise SourceError(
            f"the condition {where!r} cannot be used: {error.diag.message_primary}",
            f"Write an SQL expression over the columns of {table.title}, as behind WHERE",
        ) from None


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
