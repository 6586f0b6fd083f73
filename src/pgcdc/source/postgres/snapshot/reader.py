"""Reads chunks of tables in separate processes, so that the stream never waits for a table, nor one chunk for another.

There are three kinds of orders, all using the same COPY:

- `StageOrder`: a part of the plan of an initial snapshot, read in the snapshot that is held for it, into a durable file.
- `ChunkOrder`: the next rows of a table that is read beside the stream, in their own snapshot. Their table is locked
  against ALTER and TRUNCATE meanwhile (ACCESS SHARE, as by any SELECT). Then the reader waits until everything the
  snapshot could see is flushed. A commit that was not (synchronous_commit = off) could be lost in a crash of the
  server, and the stream would not have it before that either.
- `TableOrder`: a whole table for its reload, in one snapshot, into durable files. The reader waits for the flush here
  as well.

A process has one session and gets one order at a time. It ends with the capture. If one dies, that counts as a lost
connection: its order is given again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import selectors
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import pq

from pgcdc.core.errors import ConnectionLost, PgcdcError, SourceError
from pgcdc.core.failpoint import hit
from pgcdc.postgres.database import Connection, connect, execute_one, explain_errors, explain_right, quote_identifier
from pgcdc.source.postgres.setup.guard import wal_place
from pgcdc.source.postgres.setup.shapes import read_catalog
from pgcdc.source.postgres.setup.tables import PublishedTable
from pgcdc.source.postgres.snapshot.asking import check_table, find_table
from pgcdc.source.postgres.snapshot.chunks import Chunk, check_partitions, key_conditions, literals, lock_chunks
from pgcdc.source.postgres.snapshot.copy import copy_rows, copy_statement, select_statement
from pgcdc.source.postgres.snapshot.held import import_snapshot
from pgcdc.source.postgres.snapshot.releases import Staged, bare_rows, snapshot_rows, stage_rows

CHUNK_BYTES = 8 << 20
FLUSH_POLL_S = 0.02
PARENT_POLL_S = 1.0
_BATCH_BYTES = 1 << 20
TABLE_BATCHES = 16  # Batches per file of a whole table, so that other releases wait for no more than this
# Conflicts, deadlocks, locks and cancelled statements: the next attempt may succeed
_PASSING = ("40", "55P03", "57014")
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class StageOrder:
    """A part of a table, to read in a held snapshot."""

    id: str  # The chunk's id in the plan
    snapshot: str  # The snapshot's name on the server
    known: PublishedTable
    chunk: Chunk
    folder: Path

    @property
    def table(self) -> str:
        return self.known.title


@dataclass(frozen=True, slots=True)
class ChunkOrder:
    """The next rows of a table, or given ones, to read in a new snapshot."""

    table: str  # As the user writes it
    oid: int = 0  # The table's previous oid; 0 if not looked up yet
    known: PublishedTable | None = None  # None: only read the table's description
    where: str = ""
    after: tuple[str, ...] | None = None  # The last key of the previous chunk
    low: tuple[str, ...] | None = None
    high: tuple[str, ...] | None = None
    keys: tuple[tuple[str, ...], ...] | None = None  # Read only these, in the order of PublishedTable.key
    only_keys: bool = False  # Read only the columns of the key
    limit: int = 1000
    is_first: bool = False  # The first chunk of its request: also read the catalog

    @property
    def columns(self) -> tuple[str, ...]:
        assert self.known is not None
        return self.known.key if self.only_keys else self.known.columns

    def statement(self, *, by_text: bool = False) -> str:
        """The COPY. The server compares keys, in its own order. `by_text`: a given key may not be a valid value of the
        key's type."""
        assert self.known is not None
        table, low = self.known, self.low if self.after is None else None
        conditions = [*key_conditions(table.key, self.after, low, self.high), table.row_filter, self.where]
        key, tail = ", ".join(map(quote_identifier, table.key)), f" LIMIT {self.limit}"
        if self.keys is not None:
            wanted = ", ".join(f"({literals(one)})" for one in self.keys)
            names = ", ".join(f"concat({quote_identifier(one)})" for one in table.key) if by_text else key
            conditions.append(f"({names}) IN ({wanted})")
            tail = ""
        return copy_statement(self.columns, table.source, conditions, f" ORDER BY {key}{tail}")


@dataclass(frozen=True, slots=True)
class TableOrder:
    """All rows of a table, to read in a new snapshot."""

    id: str
    table: str
    oid: int
    folder: Path


@dataclass(slots=True)
class ChunkRead:
    """The result of a read, and the details as of its snapshot."""

    table: PublishedTable  # The catalog's description at the same moment
    values: list[pa.Array] = field(default_factory=list)
    rows: int = 0
    nbytes: int = 0
    is_last: bool = False  # No rows follow it
    snapshot: str = ""  # What the snapshot saw: `xmin:xmax:xip,...`
    lsn: int = 0  # When the stream has passed this LSN, it has passed everything visible
    time_us: int = 0
    seconds: float = 0.0
    estimated_rows: int = 0
    details: dict[str, Any] | None = None  # The catalog's description of its shape in that snapshot
    files: list[Staged] = field(default_factory=list)  # The files with the rows of a whole table
    waiting_xids: tuple[int, ...] = ()
    """When only the description is read: transactions that wait for a synchronous standby. They may have been streamed
    to an earlier process."""


Order = StageOrder | ChunkOrder | TableOrder
Answer = Staged | ChunkRead | PgcdcError


class Reader:
    """Reads in one session, which is reopened when lost."""

    def __init__(self, url: str, publications: Sequence[str], application_name: str) -> None:
        self._url = url
        self._publications = tuple(publications)
        self._application_name = application_name
        self._conn: Connection | None = None

    def read(self, order: Order) -> Answer:
        """The result of an order, or why there is none."""
        try:
            with explain_errors(f"read table {order.table}"):
                if isinstance(order, StageOrder):
                    return self._stage(order)
                if isinstance(order, TableOrder):
                    read = self._copy_table(order)
                else:
                    read = self._look(order) if order.known is None else self._copy(order, order.known)
                self._await_flush(read)
                return read
        except PgcdcError as error:
            return self._explain(order, error)
        except Exception as error:  # a bug: report it to the capture
            return PgcdcError(f"a chunk cannot be read: {error!r}", "This is a bug in pgcdc: please report it")
        finally:
            if self._conn is not None and self._conn.pgconn.transaction_status != pq.TransactionStatus.IDLE:
                self.close()  # in an open transaction it would read in its old snapshot forever

    def close(self) -> None:
        if self._conn is not None:
            with contextlib.suppress(psycopg.Error):
                self._conn.close()
            self._conn = None

    def _explain(self, order: Order, error: PgcdcError) -> PgcdcError:
        cause = error.__cause__
        if isinstance(order, StageOrder) and isinstance(cause, psycopg.errors.InsufficientPrivilege):
            return explain_right(order.table, order.chunk.sql, self._connection().info.user, cause)
        if isinstance(cause, psycopg.Error) and (cause.sqlstate or "").startswith(_PASSING):
            return ConnectionLost(error.message, error.advice)
        return error

    def _begin(self) -> Connection:
        conn = self._connection()
        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        return conn

    def _stage(self, order: StageOrder) -> Staged:
        time_us = time.time_ns() // 1000
        conn, columns = self._begin(), order.known.columns
        if not import_snapshot(conn, order.snapshot):
            raise SourceError("its snapshot was lost")
        conn.execute(_SHOW_ALL)
        statement = copy_statement(columns, order.chunk.source, [*order.chunk.conditions, order.known.row_filter])
        lock_chunks(conn, [order.chunk])
        hit("reader.reading")
        batches = (snapshot_rows(values, len(columns)) for values in copy_rows(conn, statement, len(columns)))
        staged = stage_rows(order.folder, batches, order.id, time_us)
        conn.execute("COMMIT")
        return staged

    def _connection(self) -> Connection:
        if self._conn is None or self._conn.closed:
            self._conn = connect(self._url, application_name=self._application_name)
            if self._conn.info.parameter_status("server_encoding") == "SQL_ASCII":
                self._conn.execute("SET client_encoding = 'SQL_ASCII'")  # as the stream's connection does
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
        conn = self._begin()
        conn.execute(_SHOW_ALL)
        try:
            with conn.transaction():
                conn.execute(f"LOCK TABLE {known.source} IN ACCESS SHARE MODE".encode())
        except psycopg.errors.InsufficientPrivilege:
            # The rights cover only some columns: a query is allowed where LOCK is not.
            conn.execute("COMMIT")
            conn.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY")
            conn.execute(_SHOW_ALL)
            # This query holds the lock, and the COPY takes a later snapshot.
            conn.execute(f"SELECT FROM {known.source} LIMIT 0".encode())
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):  # renamed, or dropped
            conn.execute("ROLLBACK")
            return ChunkRead(find_table(conn, self._publications, order.table, known.relation.oid))
        row = conn.execute(_MOMENT).fetchone()
        assert row is not None
        table = find_table(conn, self._publications, order.table, known.relation.oid)
        read = ChunkRead(table, snapshot=row[0], time_us=row[1])
        if order.is_first:
            read.details = self._describe(conn, table)
        begun = time.monotonic()  # measured without the part that takes the same time for any number of rows
        if table == known and order.keys != ():  # else the description is read again when the stream has come this far
            self._copy_values(conn, order, read)
        is_whole = not conn.closed
        if is_whole:
            check_partitions(conn, read.details)
            conn.execute("COMMIT")
        read.is_last = is_whole and (order.keys is not None or read.rows < order.limit)
        read.seconds = time.monotonic() - begun
        return read

    def _describe(self, conn: Connection, table: PublishedTable) -> dict[str, Any] | None:
        return read_catalog(conn, [table.relation], self._publications).describe(table.relation)

    def _copy_table(self, order: TableOrder) -> ChunkRead:
        conn = self._begin()
        conn.execute(_SHOW_ALL)
        table = find_table(conn, self._publications, order.table, order.oid, needs_key=False)
        conn.execute("ROLLBACK")
        conn = self._begin()
        conn.execute(_SHOW_ALL)
        lock_chunks(conn, [Chunk(table.relation.namespace, table.relation.name, is_root=table.kind == "p")])
        row = conn.execute(_MOMENT).fetchone()
        assert row is not None
        if find_table(conn, self._publications, order.table, order.oid, needs_key=False) != table:
            raise ConnectionLost(f"table {table.title} was altered at this moment")
        read, columns = ChunkRead(table, snapshot=row[0], time_us=row[1]), len(table.columns)
        read.details = self._describe(conn, table)
        made: Iterator[pa.RecordBatch]
        if columns:
            statement = copy_statement(table.columns, table.source, [table.row_filter])
            rows = copy_rows(conn, statement, columns, batch_bytes=_BATCH_BYTES)
            made = (snapshot_rows(values, columns) for values in rows)
        else:
            bare = select_statement((), table.source, [table.row_filter])
            ((count,),) = execute_one(conn, f"SELECT count(*) FROM ({bare}) AS bare").fetchall()
            made = bare_rows(count)
        while True:
            hit("reader.table")
            batches = islice(made, TABLE_BATCHES)
            staged = stage_rows(order.folder, batches, f"{order.id}-{len(read.files)}", read.time_us)
            if not staged.rows:
                break
            read.files.append(staged)
        read.rows = sum(one.rows for one in read.files)
        check_partitions(conn, read.details)
        conn.execute("COMMIT")
        return read

    def _copy_values(self, conn: Connection, order: ChunkOrder, read: ChunkRead) -> None:
        if order.keys is None:
            return self._copy_statement(conn, order, order.statement(), read)
        try:
            with conn.transaction():
                self._copy_statement(conn, order, order.statement(), read)
        except psycopg.DataError:  # a key from a target is no valid value here: compare all rows by text
            self._copy_statement(conn, order, order.statement(by_text=True), read)

    def _copy_statement(self, conn: Connection, order: ChunkOrder, statement: str, read: ChunkRead) -> None:
        columns = len(order.columns)
        rows = copy_rows(conn, statement, columns, batch_bytes=min(CHUNK_BYTES, _BATCH_BYTES))
        with contextlib.closing(rows):
            for values in rows:
                read.values.append(values)
                read.rows += len(values) // columns
                read.nbytes += values.nbytes
                if read.nbytes >= CHUNK_BYTES and order.keys is None:
                    break  # if there is more, closing `rows` ends the connection: the next chunk reads the rest

    def _await_flush(self, read: ChunkRead) -> None:
        """Wait until everything visible is on the server's disk, and set `read.lsn` to its end in the WAL. The
        unflushed WAL may consist only of pages touched by reading. If nobody commits, only asynchronous commits matter,
        and these are flushed within three times wal_writer_delay."""
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


_SHOW_ALL = "SET LOCAL row_security = off"  # Rows hidden by a policy are an error, rather than silently missing
_MOMENT = "SELECT txid_current_snapshot()::text, (extract(epoch FROM clock_timestamp()) * 1000000)::int8"
_ESTIMATE = """
SELECT sum(CASE WHEN relpages > 0 AND reltuples > 0
                THEN reltuples::float8 / relpages * pg_relation_size(oid) / current_setting('block_size')::int8
                ELSE 0 END)::int8
FROM pg_class WHERE relkind <> 'p' AND (oid = %s OR oid IN (SELECT relid FROM pg_partition_tree(%s::oid)))
"""
_WAITING = "SELECT backend_xid::text FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND backend_xid IS NOT NULL"


# --- the processes


@dataclass(slots=True)
class _Worker:
    process: ForkProcess
    pipe: Pipe
    order: Order | None = None


class Readers:
    """The reader processes, started on demand. `fileno` becomes readable when `take` has something."""

    def __init__(self, url: str, publications: Sequence[str], application_name: str, count: int = 1) -> None:
        self._setup = (url, tuple(publications), application_name)
        self._count = count
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()

    @property
    def orders(self) -> list[Order]:
        return [one.order for one in self._workers if one.order is not None]

    @property
    def is_free(self) -> bool:
        return len(self.orders) < self._count

    def fileno(self) -> int:
        return self._selector.fileno()

    def start(self, order: Order) -> None:
        worker = next((one for one in self._workers if one.order is None), None) or self._new_worker()
        worker.order = order
        with contextlib.suppress(OSError):  # it is dead, and `take` will report it
            worker.pipe.send(order)

    def take(self) -> tuple[Order, Answer] | None:
        """The outcome of an order; None if none is finished."""
        for key, _ in self._selector.select(0):
            worker: _Worker = key.data
            order, worker.order = worker.order, None
            try:
                answer: Answer = worker.pipe.recv()
            except (EOFError, OSError):
                self._end(worker)
                answer = ConnectionLost("a process that reads tables ended")
            if order is not None:
                return order, answer
        return None

    def close(self) -> None:
        """End the processes and discard what they were reading."""
        for worker in list(self._workers):
            self._end(worker)

    def _new_worker(self) -> _Worker:
        """Forked, so everything is already imported. The child must not use the capture's objects."""
        ours, its = _FORK.Pipe()
        process = _FORK.Process(target=_serve, args=(Reader(*self._setup), os.getpid(), its), daemon=True)
        process.start()
        its.close()
        worker = _Worker(process, ours)
        self._workers.append(worker)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return worker

    def _end(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.pipe)
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()


def _serve(reader: Reader, parent: int, pipe: Pipe) -> None:
    """Runs in the child process: execute orders one after another, until the pipe is closed."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _keep_files(pipe.fileno())
    threading.Thread(target=_end_with, args=[parent], daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            order: Order = pipe.recv()
            hit("reader.ordered")
            answer = reader.read(order)
            hit("reader.read")
            pipe.send(answer)
    os._exit(0)  # skip all cleanup


def _keep_files(kept: int) -> None:
    """Close every file descriptor except stdout, stderr and this one."""
    for begin, end in pairwise([-1, 1, 2, kept, os.sysconf("SC_OPEN_MAX")]):
        os.closerange(begin + 1, end)
    os.open(os.devnull, os.O_RDWR)  # becomes standard input


def _end_with(parent: int) -> None:
    """End this process when its parent ends: a read may wait hours for a lock, and must not outlive the capture."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(0)
