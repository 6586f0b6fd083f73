"""One replication connection in COPY_BOTH: the only module that reads and writes the stream's socket.

`read_available` never blocks; the owner waits on `fileno()`. Nothing here interprets messages. The server's version
determines pgoutput's protocol: 14 streams running transactions (protocol 2), 15 decodes two-phase commits (3), 16 says
more about rollbacks (4). `WireOptions.check_server` refuses options that a server does not support, before anything
starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import psycopg
from psycopg import pq

from pgcdc.core.errors import ConnectionLost, GapError, PgcdcError, SourceError
from pgcdc.postgres.database import quote_identifier, quote_literal
from pgcdc.postgres.lsn import format_lsn
from pgcdc.source.postgres.options import WireOptions
from pgcdc.source.postgres.wire.messages import POSTGRES_EPOCH_US, encode_status_update

_LOST_PUBLICATION = "skipped loading publication"
_UNMAPPED = "could not map filenumber"
_REFUSED_OPTION = {"0A000", "22023", "42601", "XX000"}
"""SQLSTATEs with which the plugin refuses an option (for it, an internal error), a value, or the protocol version."""


def protocol_version(server_version: int, options: WireOptions) -> int:
    """The server's highest version, or 1 if no option needs more."""
    if not options.streams and not options.two_phase:
        return 1
    return {14: 2, 15: 3}.get(server_version // 10000, 4 if server_version >= 160000 else 1)


def streaming_mode(server_version: int, options: WireOptions) -> str:
    """`off`, `on`, or `parallel`. With `parallel`, an abort includes its LSN and time."""
    if not options.streams or server_version < 140000:
        return "off"
    return "parallel" if server_version >= 160000 else "on"


def plugin_options(server_version: int, publications: Sequence[str], options: WireOptions) -> list[str]:
    names = quote_literal(",".join(quote_identifier(name) for name in publications))
    given = [f"proto_version '{protocol_version(server_version, options)}'", f"publication_names {names}"]
    mode = streaming_mode(server_version, options)
    if mode != "off":
        given.append(f"streaming '{mode}'")
    if options.messages:
        given.append("messages 'true'")
    if options.two_phase:
        given.append("two_phase 'on'")
    if options.origin != "any":
        given.append(f"origin {quote_literal(options.origin)}")
    if options.binary:
        given.append("binary 'true'")
    return given


class ReplicationStream:
    """A started stream. Raises ConnectionLost when the server ends it."""

    def __init__(self, connection: psycopg.Connection, on_notice: Callable[[str], None] | None = None) -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._on_notice = on_notice
        self._fatal_notice: str | None = None
        self._pgconn.notice_handler = self._take_notice

    def start(self, slot: str, lsn: int, options: Sequence[str]) -> None:
        """START_REPLICATION from `lsn` (0: from the slot's confirmed position), with these plugin options."""
        command = f"START_REPLICATION SLOT {quote_identifier(slot)} LOGICAL {format_lsn(lsn)} ({', '.join(options)})"
        result = self._pgconn.exec_(command.encode())
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise _start_error(slot, result)

    def fileno(self) -> int:
        return self._pgconn.socket

    def read_available(self, limit: int) -> Iterator[memoryview | bytes]:
        """Up to `limit` messages that are already here. Reads the socket once when the buffer is empty."""
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
        """Tell the server how far we are. Only `flushed` lets it discard WAL."""
        now_us = int(time.time() * 1_000_000) - POSTGRES_EPOCH_US
        message = encode_status_update(written, flushed, flushed, now_us, reply_requested)
        try:
            self._pgconn.put_copy_data(message)
            self._pgconn.flush()
        except psycopg.Error as error:
            raise self._lost(str(error)) from error

    def check_notices(self) -> None:
        """Raise if the server warned that it omits rows."""
        if self._fatal_notice:
            raise self._publication_gap()

    def close(self) -> None:
        self._connection.close()

    def _take_notice(self, result: pq.abc.PGresult) -> None:
        _, text = _read_error(result)
        if _LOST_PUBLICATION in text:
            self._fatal_notice = text
        if self._on_notice:
            self._on_notice(text)

    def _publication_gap(self) -> GapError:
        return GapError(
            f"the server skips rows: {self._fatal_notice}",
            "The publication did not exist when those changes were made, so their rows cannot be decoded. "
            "Nothing after that point was confirmed. Start with a publication that is older than the slot, "
            "or repair the targets with a new slot: pgcdc resync --new-slot",
        )

    def _ended(self) -> Exception:
        """The error that ended the COPY stream."""
        try:
            result = self._pgconn.get_result()
        except psycopg.Error as error:
            return self._lost(str(error))
        if result is None or result.status == pq.ExecStatus.COMMAND_OK:
            return self._lost("the server ended the stream")
        state, text = _read_error(result)
        if state in {"42704", "42P01"} and "publication" in text:
            return GapError(
                f"the server cannot decode the stream: {text}",
                "The publication was dropped, or is younger than the slot. Changes made without it cannot be "
                "decoded: repair the targets with a new slot: pgcdc resync --new-slot",
            )
        if state[:2] in {"08", "57", "53"} or not state:
            return self._lost(text or "the server ended the stream")
        advice = "See the server's log"
        if _UNMAPPED in text:
            advice = (
                "The server fails on streamed transactions that alter a table and roll that back: use --no-streaming"
            )
        return SourceError(f"the server ended the stream: {text} (SQLSTATE {state})", advice)

    def _lost(self, text: str) -> Exception:
        if self._fatal_notice:
            return self._publication_gap()
        return ConnectionLost(f"the replication connection ended: {' '.join(text.split())}")


class SlotBusy(SourceError):
    """The slot is active for another process: maybe our own that just died."""


_START_ERRORS: dict[str, tuple[type[PgcdcError], str, str]] = {
    "55006": (SlotBusy, "is in use", "Another consumer reads this slot. Stop it, or use another --slot-name"),
    "42704": (
        GapError,
        "does not exist",
        "Changes since our last position are gone. Repair the targets: pgcdc resync",
    ),
    "55000": (
        GapError,
        "can no longer be read",
        "The server discarded WAL that was not delivered yet (see max_slot_wal_keep_size). Repair the "
        "targets: pgcdc resync",
    ),
}
"""By SQLSTATE: the error, the slot's problem, and the advice."""


def _start_error(slot: str, result: pq.abc.PGresult) -> Exception:
    state, text = _read_error(result)
    if state in _START_ERRORS:
        kind, problem, advice = _START_ERRORS[state]
        return kind(f"slot {slot!r} {problem}: {text}", advice)
    if state in _REFUSED_OPTION:
        return SourceError(
            f"the server refuses an option of the stream: {text} (SQLSTATE {state})",
            "Nothing was read. Remove the option (streaming, messages, two_phase, origin, binary), or "
            "upgrade the server",
        )
    return SourceError(f"START_REPLICATION was refused: {text} (SQLSTATE {state})", "See the server's log")


def _read_error(result: pq.abc.PGresult) -> tuple[str, str]:
    fields = pq.DiagnosticField.SQLSTATE, pq.DiagnosticField.MESSAGE_PRIMARY
    state, text = ((result.error_field(one) or b"").decode(errors="replace") for one in fields)
    return state, text
