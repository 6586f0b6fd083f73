"""One replication connection in COPY_BOTH: the only module that reads and writes the stream's socket.

`read_available` never blocks; whoever owns the connection waits on `fileno()`. Nothing here knows what the messages mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import psycopg
from psycopg import pq

from pgcdc.core.errors import ConnectionLost, GapError, SourceError
from pgcdc.postgres.database import quote_identifier
from pgcdc.postgres.lsn import format_lsn
from pgcdc.source.postgres.wire.messages import POSTGRES_EPOCH_US, encode_status_update

_LOST_PUBLICATION = "skipped loading publication"
_UNMAPPED = "could not map filenumber"
_REFUSED_OPTION = {"0A000", "22023", "42601", "XX000"}
"""How the plugin says that it does not know an option (an internal error, to it), its value, or the protocol version."""


class ReplicationStream:
    """A started stream. Raises ConnectionLost when the server ends it."""

    def __init__(self, connection: psycopg.Connection, on_notice: Callable[[str], None] | None = None) -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._on_notice = on_notice
        self._fatal_notice: str | None = None
        self._pgconn.notice_handler = self._take_notice

    def start(self, slot: str, lsn: int, options: Sequence[str]) -> None:
        """START_REPLICATION from `lsn` (0: from what the slot has confirmed), with these options of the plugin."""
        command = f"START_REPLICATION SLOT {quote_identifier(slot)} LOGICAL {format_lsn(lsn)} ({', '.join(options)})"
        result = self._pgconn.exec_(command.encode())
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise _start_error(slot, result)

    def fileno(self) -> int:
        """The socket to wait on."""
        return self._pgconn.socket

    def read_available(self, limit: int) -> Iterator[memoryview | bytes]:
        """Up to `limit` messages that are already here; reads the socket once when the buffer is empty."""
        get = self._pgconn.get_copy_data
        consumed = False
        for _ in range(limit):
            try:
                size, data = get(1)
                if size == 0:
                    if consumed:
                        return
                    self._pgconn.consume_input()
                    consumed = True
                    size, data = get(1)
                    if size == 0:
                        return
            except psycopg.Error as error:
                raise self._lost(str(error)) from error
            if size < 0:
                raise self._ended()
            consumed = False
            yield data

    def send_status(self, written: int, flushed: int, *, reply_requested: bool = False) -> None:
        """Tell the server how far we are; only `flushed` lets it discard WAL."""
        now_us = int(time.time() * 1_000_000) - POSTGRES_EPOCH_US
        message = encode_status_update(written, flushed, flushed, now_us, reply_requested)
        try:
            self._pgconn.put_copy_data(message)
            self._pgconn.flush()
        except psycopg.Error as error:
            raise self._lost(str(error)) from error

    def check_notices(self) -> None:
        """Raise if the server warned that it is leaving rows out."""
        if self._fatal_notice:
            raise self._publication_gap()

    def close(self) -> None:
        """Close at once, without waiting for the server."""
        self._connection.close()

    def _take_notice(self, result: pq.abc.PGresult) -> None:
        text = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode(errors="replace")
        if _LOST_PUBLICATION in text:
            self._fatal_notice = text
        if self._on_notice:
            self._on_notice(text)

    def _publication_gap(self) -> GapError:
        return GapError(
            f"the server leaves out rows: {self._fatal_notice}",
            "The publication did not exist when those changes were made, so their rows cannot be decoded. "
            "Nothing after that point was confirmed. Start with a publication that is older than the slot, or begin "
            "with a new slot and bring the sinks back: pgcdc resync --new-slot",
        )

    def _ended(self) -> Exception:
        """The error behind the end of the COPY stream."""
        try:
            result = self._pgconn.get_result()
        except psycopg.Error as error:
            return self._lost(str(error))
        if result is None or result.status == pq.ExecStatus.COMMAND_OK:
            return self._lost("the server ended the stream")
        state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
        text = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode(errors="replace")
        if state in {"42704", "42P01"} and "publication" in text:
            return GapError(
                f"the server cannot decode the stream: {text}",
                "The publication was dropped, or is younger than the slot. Changes made without it cannot be decoded: "
                "begin with a new slot and bring the sinks back: pgcdc resync --new-slot",
            )
        if state[:2] in {"08", "57", "53"} or not state:
            return self._lost(text or "the server ended the stream")
        advice = "See the server's log"
        if _UNMAPPED in text:
            advice = (
                "A server error with streamed transactions that alter a table and roll that back: give --no-streaming"
            )
        return SourceError(f"the server ended the stream: {text} (SQLSTATE {state})", advice)

    def _lost(self, text: str) -> Exception:
        if self._fatal_notice:
            return self._publication_gap()
        return ConnectionLost(f"the replication connection ended: {' '.join(text.split())}")


def _start_error(slot: str, result: pq.abc.PGresult) -> Exception:
    state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
    text = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode(errors="replace")
    if state == "55006":
        return SlotBusy(
            f"slot {slot!r} is in use: {text}",
            "Another consumer reads this slot. Stop it, or use another --slot-name",
        )
    if state == "42704":
        return GapError(
            f"slot {slot!r} does not exist any more: {text}",
            "Changes since our last position are gone. Bring the sinks back to the source: pgcdc resync",
        )
    if state == "55000":
        return GapError(
            f"slot {slot!r} cannot be read any more: {text}",
            "The server discarded WAL that was not delivered yet (see max_slot_wal_keep_size). "
            "Bring the sinks back to the source: pgcdc resync",
        )
    if state in _REFUSED_OPTION:
        return SourceError(
            f"the server refuses an option of the stream: {text} (SQLSTATE {state})",
            "Nothing was read. Leave the option out (streaming, messages, two_phase, origin, binary), or upgrade the server",
        )
    return SourceError(f"START_REPLICATION was refused: {text} (SQLSTATE {state})", "See the server's log")


class SlotBusy(SourceError):
    """The slot is active for another process: maybe our own, that just died."""
