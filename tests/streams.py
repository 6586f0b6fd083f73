"""For scenario tests of the wire: read a slot to its end, and see what came, and in which messages."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from databases import drop_database
from listening import wait_until
from psycopg import sql

import pgcdc
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.source.postgres.wire.stream import Capture

SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "logical_decoding_work_mem": "64kB",
    "max_prepared_transactions": "10",
}
_NUMBERS = itertools.count(1)


class Change(NamedTuple):
    """Everything that is known about one change, whatever the batches were cut like."""

    lsn: int
    ordinal: int
    sub: int
    op: str
    table: str
    columns: tuple[str, ...]
    new: list[bytes | None] | None
    old: list[bytes | None] | None
    old_kind: int
    unchanged: list[int] | None
    prefix: str | None
    xid: int
    commit_time: int
    origin: str | None

    @property
    def row(self) -> dict[str, bytes | None]:
        """The new values by name (of a delete: the old ones)."""
        return dict(zip(self.columns, self.new or self.old or [], strict=False))


def changes_of(batch: pgcdc.CaptureBatch) -> list[Change]:
    found = []
    rows = iter(batch.data.to_pylist())
    for one in batch.transactions.to_pylist():
        for row in itertools.islice(rows, one["rows"]):
            shape = batch.relations[row["relation"]] if row["relation"] >= 0 else None
            found.append(
                Change(
                    one["commit"],
                    row["ordinal"],
                    row["sub"],
                    chr(row["op"]),
                    shape.name if shape else "",
                    tuple(column.name for column in shape.columns) if shape else (),
                    row["new"],
                    row["old"],
                    row["old_kind"],
                    row["unchanged"],
                    row["prefix"],
                    one["xid"],
                    one["commit_time"],
                    one["origin"],
                )
            )
    assert next(rows, None) is None
    return found


@dataclass
class Read:
    """What one capture gave."""

    changes: list[Change] = field(default_factory=list)
    messages: list[tuple[int, bytes]] = field(default_factory=list)
    """(LSN, message) as the server sent them."""

    @property
    def tags(self) -> Counter[str]:
        """How many messages of each kind came."""
        return Counter(chr(message[0]) for _, message in self.messages)


def record(capture: Capture, into: list[tuple[int, bytes]]) -> None:
    """Keep every message that the capture gets from now on."""
    assembler: Any = capture._assembler
    feed = assembler.feed

    def keep(message: memoryview | bytes, lsn: int) -> None:
        into.append((lsn, bytes(message)))
        feed(message, lsn)

    assembler.feed = keep


class Stream:
    """A database on a server that streams early, with a publication `p` and slots."""

    def __init__(self, server: EmbeddedPostgres, name: str) -> None:
        self.server = server
        self.name = name
        self.url = server.url(name)
        self.slots: list[str] = []

    def connect(self, *, autocommit: bool = True) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(self.url, autocommit=autocommit)

    def execute(self, *statements: str) -> None:
        with self.connect() as conn:
            for statement in statements:
                conn.execute(statement.encode())

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with self.connect() as conn:
            return conn.execute(statement.encode()).fetchall()

    def slot(self, *, two_phase: bool = False) -> str:
        """A new slot; make the publication before."""
        name = f"{self.name}_{len(self.slots)}"
        more = ", false, true" if two_phase else ""
        self.execute(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput'{more})")
        self.slots.append(name)
        return name

    def copy(self, slot: str) -> str:
        name = f"{self.name}_{len(self.slots)}"
        self.execute(f"SELECT pg_copy_logical_replication_slot('{slot}', '{name}')")
        self.slots.append(name)
        return name

    def confirmed(self, slot: str) -> int:
        query = f"SELECT confirmed_flush_lsn - '0/0'::pg_lsn FROM pg_replication_slots WHERE slot_name = '{slot}'"
        return int(self.query(query)[0][0])

    def wal_end(self) -> int:
        written = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
        flushed = "SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn"
        # A message outside of transactions is flushed a little later. 40 bytes: a page's header, which may come next.
        end = int(self.query(written)[0][0]) - 40
        wait_until(lambda: int(self.query(flushed)[0][0]) >= end, 10, "the server's log is flushed")
        return int(self.query(flushed)[0][0])

    def open(self, slot: str, **options: Any) -> Capture:
        return pgcdc.open_capture(self.url, slot=slot, publication="p", **options)

    def read(self, slot: str, *, limit: int = 65_536, feedback: bool = False, **options: Any) -> Read:
        """Everything that was committed up to now."""
        read = Read()
        with self.open(slot, **{"messages": True, "streaming": True, **options}) as capture:
            record(capture, read.messages)
            read.changes = drain(capture, self.wal_end(), limit=limit, feedback=feedback)
        return read


def drain(
    capture: Capture,
    target_lsn: int,
    *,
    limit: int = 65_536,
    feedback: bool = False,
    until: Callable[[list[Change]], bool] | None = None,
) -> list[Change]:
    """What the capture gives up to `target_lsn` (or until enough is here)."""
    found: list[Change] = []
    capture.target_lsn = target_lsn
    deadline = time.monotonic() + 60
    while capture.handed_out_lsn < target_lsn and not (until and until(found)):
        assert time.monotonic() < deadline, f"nothing came any more after {len(found)} changes"
        batch = capture.receive_batch(limit=limit, timeout_s=0.05)
        if batch is None:
            capture.ask_for_progress()
            continue
        found += changes_of(batch)
        if feedback:
            capture.send_feedback(batch.last_lsn)
    return found


@contextmanager
def new_stream(server: EmbeddedPostgres) -> Iterator[Stream]:
    """A database of its own, gone afterwards."""
    stream = Stream(server, f"w_{next(_NUMBERS)}")
    with psycopg.connect(server.url(), autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(stream.name)))
        try:
            yield stream
        finally:
            for (gid,) in admin.execute("SELECT gid FROM pg_prepared_xacts").fetchall():
                stream.execute(f"ROLLBACK PREPARED '{gid}'")
            drop_database(admin, stream.name)


def save_messages(path: Path, messages: list[tuple[int, bytes]]) -> None:
    """A recorded stream: LSN and message in hex, a line for each."""
    path.write_text("".join(f"{lsn:X} {message.hex()}\n" for lsn, message in messages))


def load_messages(path: Path) -> list[tuple[int, bytes]]:
    lines = (line.split(" ") for line in path.read_text().splitlines())
    return [(int(lsn, 16), bytes.fromhex(message)) for lsn, message in lines]
