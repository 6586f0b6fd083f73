"""The decoder alone: recorded messages into a row buffer and out as Arrow, without server, socket and assembly."""

from __future__ import annotations

import time

from workload import PUBLICATION, connect, drop_slot, new_slot

from pgcdc.source.postgres.wire.messages import INSERT
from pgcdc.source.postgres.wire.rows import new_row_buffer

__all__ = ["measure_decoding"]

COLUMNS = 10
BATCH_ROWS = 65_536
SLOT = "bench_decode"


def record_messages(url: str, rows: int) -> list[bytes]:
    """Insert messages of the server, as they come in the stream."""
    values = ", ".join(f"left(md5((k * 10 + {n})::text), 16)" for n in range(COLUMNS))
    with connect(url) as conn:
        new_slot(conn, SLOT)
        try:
            conn.execute(f"INSERT INTO texts SELECT {values} FROM generate_series(1, {rows}) k".encode())
            found = conn.execute(
                "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '1', "
                "'publication_names', %s)",
                [SLOT, PUBLICATION],
                binary=True,
            )
            return [data for (data,) in found if data[0] == INSERT]
        finally:
            drop_slot(conn, SLOT)
            conn.execute("TRUNCATE texts")


def measure_decoding(url: str, rows: int, rounds: int) -> list[float]:
    """Rows per CPU second of each round."""
    messages = record_messages(url, rows)
    if len(messages) != rows:
        raise RuntimeError(f"{len(messages)} rows were recorded, {rows} were inserted")
    oid = int.from_bytes(messages[0][1:5], "big")
    found = []
    for _ in range(rounds):
        buffer = new_row_buffer()
        buffer.define(oid, 1, COLUMNS)
        decoded = 0
        began = time.thread_time()
        for first in range(0, rows, BATCH_ROWS):
            for ordinal, message in enumerate(messages[first : first + BATCH_ROWS], first):
                buffer.add(message, ordinal)
            decoded += buffer.take().num_rows
        found.append(rows / (time.thread_time() - began))
        if decoded != rows:
            raise RuntimeError(f"{decoded} rows were decoded, {rows} were recorded")
    return found
