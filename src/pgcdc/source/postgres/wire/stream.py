"""The capture as a library: open it, receive batches, send feedback.

    with pgcdc.open_capture(url, slot="orders", publication="orders") as capture:
        while True:
            batch = capture.receive_batch(limit=10_000)
            store(batch.data)                      # Arrow, in the CHANGES schema
            capture.send_feedback(batch.last_lsn)  # only now may PostgreSQL forget it

The capture process of a pipeline is a loop around the same object.
"""

from __future__ import annotations

import contextlib
import select
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from psycopg import Connection

from pgcdc.core.errors import ConnectionLost, reconnect_delay_s
from pgcdc.core.relation import Relation, Relations
from pgcdc.core.settings import make_options
from pgcdc.postgres.database import connect
from pgcdc.postgres.lsn import format_lsn
from pgcdc.source.postgres.message_stream import Message, typed_messages
from pgcdc.source.postgres.options import WireOptions
from pgcdc.source.postgres.setup.slots import create_slot, is_two_phase
from pgcdc.source.postgres.wire import messages as wire
from pgcdc.source.postgres.wire.assemble import Assembler
from pgcdc.source.postgres.wire.replication import ReplicationStream, plugin_options, streaming_mode
from pgcdc.spool.segment import CaptureBatch

if TYPE_CHECKING:
    from pgcdc.source.postgres.wire.binary.decoder import BinaryDecoder

STATUS_INTERVAL_S = 10.0
ADVANCE_INTERVAL_S = 10.0
PUMP_MESSAGES = 2_000
PUMP_BYTES = 8 << 20


class Capture:
    """One logical replication stream, decoded to Arrow. Not thread-safe."""

    def __init__(
        self,
        url: str,
        *,
        slot: str,
        publications: Sequence[str],
        start_lsn: int = 0,
        confirmed_lsn: int = 0,
        relations: Relations | None = None,
        spill_dir: Path | None = None,
        application_name: str = "pgcdc",
        temporary: bool = False,
        options: WireOptions | None = None,
        fail_fast: bool = False,
        on_notice: Callable[[str], None] | None = None,
        check: Callable[[Connection], None] | None = None,
    ) -> None:
        """`check` is called with every new replication connection before the stream starts, and may raise to refuse it."""
        self._url = url
        self._check = check
        self._slot = slot
        self._publications = tuple(publications)
        self._application_name = application_name
        self._temporary = temporary
        self._options = options or WireOptions()
        self._fail_fast = fail_fast
        self._on_notice = on_notice
        self._stream: ReplicationStream | None = None
        self._own_spill = tempfile.TemporaryDirectory(prefix="pgcdc-pending-") if spill_dir is None else None
        if self._own_spill is not None:
            spill_dir = Path(self._own_spill.name)
        self._assembler = Assembler(
            relations if relations is not None else Relations(), start_lsn=start_lsn, spill_dir=spill_dir
        )
        self.wal_end = start_lsn  # The last WAL end that the server reported
        self.confirmed_lsn = 0
        """What the server may discard. Less than what is durable while transactions are prepared (two-phase commit)."""
        self._durable_lsn = confirmed_lsn
        self.target_lsn = 0  # When set, idle progress up to here is reported immediately instead of every 10 s
        self.received = 0  # Row changes and other messages received
        self.status_interval_s = STATUS_INTERVAL_S
        """Shorter if the server's wal_sender_timeout is short: while paused we do not see its requests."""
        self.is_drained = True
        """Whether the last `poll` read everything available. If not, poll again instead of waiting on the socket."""
        self._handed_out = max(start_lsn, confirmed_lsn)
        self._last_change = 0  # The end of the last batch with rows
        self._status_due = 0.0
        self._advance_due = 0.0
        self._reply_now = False

    def connect(self) -> None:
        """Connect and start the stream after the last change read. Raises ConnectionLost if the server is unreachable."""
        connection = connect(self._url, replication=True, application_name=self._application_name)
        try:
            if self._check is not None:
                self._check(connection)
            version = connection.info.server_version
            self._options.check_server(version)
            two_phase = self._options.two_phase
            if self._temporary:
                lsn = create_slot(connection, self._slot, temporary=True, two_phase=two_phase)
                self._assembler.begin_at(lsn)
                self._handed_out = self._durable_lsn = self.confirmed_lsn = lsn
            else:
                two_phase = self._check_two_phase(connection)
            if connection.info.parameter_status("server_encoding") == "SQL_ASCII":
                # The server does not know the encoding to convert from. If we asked for UTF-8, it would end the stream
                # at the first byte that does not fit. So it sends the bytes unchanged, and the code that builds events
                # decides.
                connection.pgconn.exec_(b"SET client_encoding = 'SQL_ASCII'")
            stream = ReplicationStream(connection, self._on_notice)
            options = self._options.but(two_phase=two_phase)
            mode = streaming_mode(version, options)
            self._assembler.begin(parallel=mode == "parallel", two_phase=two_phase, decoder=self._binary_decoder())
            # A transaction prepared before the position we have read is sent again only if we start before its PREPARE.
            start_lsn = 0 if two_phase else self._assembler.last_lsn
            stream.start(self._slot, start_lsn, plugin_options(version, self._publications, options))
        except BaseException:
            connection.close()
            raise
        self._stream = stream
        self.confirmed_lsn = max(self.confirmed_lsn, self._assembler.confirmable(self._durable_lsn))
        self._status_due = 0.0
        self._advance_due = time.monotonic() + ADVANCE_INTERVAL_S

    def _check_two_phase(self, connection: Connection) -> bool:
        """Whether the slot decodes prepared transactions, which is fixed when it is created."""
        two_phase = is_two_phase(connection, self._slot)
        self._options.check_slot(self._slot, two_phase)
        return two_phase

    def _binary_decoder(self) -> BinaryDecoder | None:
        """Converts binary values to text. It asks the server about types that are created later."""
        if not self._options.binary:
            return None
        from pgcdc.postgres.types.catalog import TypeCatalog
        from pgcdc.source.postgres.wire.binary.decoder import BinaryDecoder

        def load() -> TypeCatalog:
            with connect(self._url, application_name=self._application_name) as sql:
                return TypeCatalog.load(sql)

        return BinaryDecoder(load(), reload=load)

    def disconnect(self) -> None:
        """Close the connection immediately and drop the open transaction; committed changes stay available."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._assembler.abandon()

    def rename(self, before: Relation, after: Relation) -> None:
        """The catalog shows a new name for a table. For the root of partitions, the server does not announce it."""
        self._assembler.rename(before, after)

    @property
    def leaves(self) -> dict[int, set[int]]:
        """See `Assembler.leaves`."""
        return self._assembler.leaves

    @property
    def is_connected(self) -> bool:
        return self._stream is not None

    @property
    def last_lsn(self) -> int:
        """END lsn of the last transaction read, or the position the idle server has reached."""
        return self._assembler.last_lsn

    @property
    def handed_out_lsn(self) -> int:
        return self._handed_out

    def fileno(self) -> int:
        """The socket to wait on when `poll` has nothing."""
        assert self._stream is not None
        return self._stream.fileno()

    def poll(self, limit: int = 65_536, *, drain: bool = True) -> CaptureBatch | None:
        """Read what is available. None: wait on `fileno()` and call again. Without `drain` only full batches are
        returned, so that small transactions are combined."""
        self._assembler.limit(limit)
        batch = self._assembler.pop(drain=False)
        if batch is None:
            self.is_drained = self._pump()
            batch = self._assembler.pop(drain=self.is_drained and drain)
        return self._hand_out(batch if batch is not None else self._advance())

    def _hand_out(self, batch: CaptureBatch | None) -> CaptureBatch | None:
        if batch is not None:
            self._handed_out = max(self._handed_out, batch.last_lsn)
            self._last_change = self._handed_out if batch.rows else self._last_change
        return batch

    def keep_alive(self) -> float:
        """Send a status update if one is due; returns the seconds until the next. Also call it while reading is paused."""
        if self._stream is None:
            return self.status_interval_s
        now = time.monotonic()
        if self._reply_now or now >= self._status_due:
            self._send_status()
        return max(0.0, self._status_due - now)

    def ask_for_progress(self) -> None:
        """Ask the server how far it has come; its answer moves `wal_end`."""
        if self._stream is not None:
            self._stream.send_status(self._written_lsn(), self.confirmed_lsn, reply_requested=True)

    def send_feedback(self, lsn: int) -> None:
        """Tell the server that everything up to `lsn`, the `last_lsn` of a batch, is durable. While the outcome of a
        prepared transaction is not durable, less is confirmed: see `confirmed_lsn`."""
        if lsn > self._handed_out:
            raise ValueError(
                f"{format_lsn(lsn)} was never handed out: the last batch ended at {format_lsn(self._handed_out)}"
            )
        self._durable_lsn = max(self._durable_lsn, lsn)
        if self._stream is not None:
            self._send_status()

    def receive_batch(self, limit: int = 65_536, timeout_s: float = 1.0) -> CaptureBatch | None:
        """The next batch of about `limit` changes: it ends at a commit, or is a part of one huge transaction. Waits
        until there is data; returns None after `timeout_s` without any. Reconnects automatically unless `fail_fast`."""
        deadline = time.monotonic() + timeout_s
        attempt = 0
        while True:
            try:
                if self._stream is None:
                    self.connect()
                batch = self.poll(limit)
                status_due_s = self.keep_alive()
            except ConnectionLost:
                self.disconnect()
                if self._fail_fast or self._temporary:
                    raise
                time.sleep(min(reconnect_delay_s(attempt), max(0.0, deadline - time.monotonic())))
                attempt += 1
                if time.monotonic() >= deadline:
                    return self._hand_out(self._assembler.pop())
                continue
            remaining = deadline - time.monotonic()
            if batch is not None or remaining <= 0:
                return batch
            if self.is_drained:
                select.select([self.fileno()], [], [], min(remaining, status_due_s))

    def messages(self, timeout_s: float | None = None, limit: int = 65_536) -> Iterator[Message]:
        """The same as typed messages, one by one. Ends after `timeout_s` without any, or never. Confirm with the `lsn`
        of a Commit. Progress of an idle server is confirmed here, once everything before it is."""
        return typed_messages(self._receive_all(timeout_s, limit))

    def _receive_all(self, timeout_s: float | None, limit: int) -> Iterator[CaptureBatch]:
        while True:
            batch = self.receive_batch(limit, STATUS_INTERVAL_S if timeout_s is None else timeout_s)
            if batch is not None and batch.rows:
                yield batch
            elif batch is not None and self._durable_lsn >= self._last_change:
                self.send_feedback(batch.last_lsn)
            elif batch is None and timeout_s is not None:
                return

    def close(self) -> None:
        """Send a last status and close the connection. The slot stays, unless it is temporary."""
        if self._stream is not None:
            with contextlib.suppress(ConnectionLost):
                self._send_status()
            self._stream.close()
            self._stream = None
        if self._own_spill is not None:
            self._own_spill.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pump(self) -> bool:
        """Decode what the socket has; returns whether that was less than our limit."""
        stream, feed = self._stream, self._assembler.feed
        if stream is None:
            return True
        count = size = 0
        for data in stream.read_available(PUMP_MESSAGES):
            count += 1
            size += len(data)
            if data[0] == wire.XLOG_DATA:
                feed(data[wire.XLOG_DATA_HEADER_BYTES :], int.from_bytes(data[1:9], "big"))
            else:
                self._take_keepalive(data)
            if size >= PUMP_BYTES:  # large rows: return what is ready before reading more
                break
        stream.check_notices()
        self.received += count
        return count < PUMP_MESSAGES and size < PUMP_BYTES

    def _take_keepalive(self, data: memoryview | bytes) -> None:
        keepalive = wire.parse_keepalive(data)
        self.wal_end = max(self.wal_end, keepalive.wal_end)
        self._assembler.see(keepalive.wal_end)
        if keepalive.reply_requested:
            self._reply_now = True
            self._advance_due = 0.0

    def _advance(self) -> CaptureBatch | None:
        """Idle progress: at most every 10 s, or immediately if the server asks for a reply or somebody waits for it."""
        now = time.monotonic()
        if now < self._advance_due and not self._handed_out < self.target_lsn <= max(self.wal_end, self.last_lsn):
            return None
        batch = self._assembler.advance(self.wal_end)
        if batch is not None:
            self._advance_due = now + ADVANCE_INTERVAL_S
        return batch

    def _written_lsn(self) -> int:
        return max(self.last_lsn, self.confirmed_lsn)

    def _send_status(self) -> None:
        assert self._stream is not None
        self.confirmed_lsn = max(self.confirmed_lsn, self._assembler.confirmable(self._durable_lsn))
        self._stream.send_status(self._written_lsn(), self.confirmed_lsn)
        self._reply_now = False
        self._status_due = time.monotonic() + self.status_interval_s


def open_capture(
    url: str,
    *,
    slot: str,
    publication: str | Sequence[str],
    temporary: bool = False,
    streaming: bool | None = None,
    messages: bool = False,
    two_phase: bool = False,
    origin: str = "any",
    binary: bool = False,
    fail_fast: bool = False,
    spill_dir: Path | None = None,
) -> Capture:
    """Connect to an existing slot (a temporary one is created) and start reading it. The slot keeps our position: after
    a crash the next capture begins with what was not confirmed by `send_feedback`. `WireOptions` describes what to
    request from the server (`streaming`, `messages`, `two_phase`, `origin`, `binary`)."""
    names = [publication] if isinstance(publication, str) else list(publication)
    asked = {"streaming": streaming, "messages": messages, "two_phase": two_phase, "origin": origin, "binary": binary}
    options = make_options(WireOptions, asked, "open_capture", "Remove it for the default")
    capture = Capture(
        url, slot=slot, publications=names, temporary=temporary, options=options, fail_fast=fail_fast,
        spill_dir=spill_dir,
    )  # fmt: skip
    capture.connect()
    return capture
