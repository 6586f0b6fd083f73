"""Signals: rows that somebody inserts into a captured table to ask for snapshots, by plain SQL.

They are read in the stream as any change is, and heeded before they become visible. The position of the last one is durable
together with what it asked for, so that each is heeded once, however often the stream is read again.
"""

from __future__ import annotations

import contextlib
import json
import logging
from typing import Any

import numpy as np
import psycopg

from pgcdc.core.errors import ConfigError, SourceError
from pgcdc.core.operation import Op
from pgcdc.core.position import Position
from pgcdc.postgres.database import Connection, connect, name_table, quote_identifier, quote_qualified, split_table
from pgcdc.source.postgres.snapshot.requests import RequestQueue, SnapshotRequest, new_id
from pgcdc.spool.batch import CaptureBatch

__all__ = ["SIGNALS", "Signals", "drop_signal_table", "ensure_signal_table", "parse_signal", "signal_table_ddl"]

logger = logging.getLogger("pgcdc.capture")

SIGNALS = ("execute-snapshot", "pause-snapshot", "resume-snapshot", "stop-snapshot")


def signal_table_ddl(name: str) -> str:
    """The statement that makes the table of signals."""
    return (
        f"CREATE TABLE IF NOT EXISTS {quote_qualified(*split_table(name))} "
        "(id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, signal text NOT NULL, payload jsonb)"
    )


def ensure_signal_table(sql: Connection, name: str, publication: str = "") -> bool:
    """Make the table if it is missing: True if it was. `publication` is one that is not ours, and must have it already."""
    table = name_table(*split_table(name))
    exists = sql.execute("SELECT to_regclass(%s) IS NOT NULL", [quote_qualified(*split_table(name))]).fetchone()
    is_there = bool(exists and exists[0])
    if publication:
        row = sql.execute(
            "SELECT count(*) FROM pg_publication_tables WHERE pubname = %s AND schemaname = %s AND tablename = %s",
            [publication, *split_table(name)],
        ).fetchone()
        if not row or not row[0]:
            add = f"ALTER PUBLICATION {quote_identifier(publication)} ADD TABLE {quote_qualified(*split_table(name))}"
            raise SourceError(
                f"publication {publication} is yours and does not have the table of signals, {table}",
                f"Run: {'' if is_there else signal_table_ddl(name) + '; '}{add}",
            )
    if is_there:
        return False
    try:
        sql.execute(signal_table_ddl(name).encode())
    except psycopg.errors.InsufficientPrivilege:
        advice = f"Run as the database's owner: {signal_table_ddl(name)}"
        raise SourceError(f"no right to create the table of signals, {table}", advice) from None
    except psycopg.Error as error:
        raise SourceError(f"the table of signals cannot be created: {error.diag.message_primary}") from error
    return True


def drop_signal_table(url: str, name: str) -> None:
    """Undo what `ensure_signal_table` did."""
    with contextlib.suppress(SourceError), connect(url, may_retry=False) as sql:
        sql.execute(f"DROP TABLE IF EXISTS {quote_qualified(*split_table(name))}".encode())


def parse_signal(signal: str, payload: str | None) -> tuple[list[SnapshotRequest], str]:
    """The requests that a signal makes, or the id that it names ("" for none). ConfigError if it is not a signal."""
    try:
        content: Any = json.loads(payload) if payload else {}
    except ValueError:
        raise ConfigError("the payload is not JSON") from None
    if not isinstance(content, dict):
        raise ConfigError("the payload is not a JSON object")
    if signal not in SIGNALS:
        raise ConfigError(f"there is no signal {signal!r}", f"Signals: {', '.join(SIGNALS)}")
    if signal != "execute-snapshot":
        return [], str(content.get("id") or "")
    tables = content.get("tables") or ([content["table"]] if content.get("table") else [])
    where = content.get("where") or ""
    if not tables or not isinstance(tables, list) or not all(isinstance(one, str) for one in (*tables, where)):
        raise ConfigError("the payload names no table", 'Write {"table": "orders"} or {"tables": ["orders", "items"]}')
    for table in tables:
        split_table(table)
    return [SnapshotRequest(new_id(), table, where=where) for table in tables], ""


class Signals:
    """Looks for signals in the stream. A bad one is counted and logged, and stops nothing."""

    def __init__(self, queue: RequestQueue, table: str) -> None:
        self._queue = queue
        self._table = split_table(table)
        self._versions: list[int] = []
        self._looked = 0

    def see(self, batch: CaptureBatch) -> None:
        """Changes of the stream, before they become visible."""
        for version in range(self._looked, len(batch.relations)):
            relation = batch.relations[version]
            if (relation.namespace, relation.name) == self._table:
                self._versions.append(version)
        self._looked = len(batch.relations)
        if self._versions and batch.part is not None:
            self._find(batch)

    def _find(self, batch: CaptureBatch) -> None:
        assert batch.part is not None
        data = batch.part.batch
        if data is None:
            data = batch.part.load().combine_chunks().to_batches()[0]
        versions = data.column("relation").to_numpy()
        mine = np.isin(versions, self._versions) & (data.column("op").to_numpy() == Op.INSERT)
        if not mine.any():
            return
        counts = batch.transactions.column("rows").to_numpy()
        lsns = np.repeat(batch.transactions.column("commit").to_numpy(), counts)
        for row in np.flatnonzero(mine).tolist():
            position = Position.at(int(lsns[row]), data.column("ordinal")[row].as_py())
            if position > self._queue.heeded:
                names = [column.name for column in batch.relations[int(versions[row])].columns]
                values = data.column("new")[row].as_py()
                self._heed(position, dict(zip(names, values, strict=True)))

    def _heed(self, position: Position, row: dict[str, bytes | None]) -> None:
        signal = (row.get("signal") or b"").decode("utf-8", "replace")
        payload = row.get("payload")
        try:
            requests, name = parse_signal(signal, payload.decode("utf-8", "replace") if payload else None)
            if not requests:
                getattr(self._queue, signal.removesuffix("-snapshot"))(name)
        except ConfigError as error:
            logger.warning("signal at %s is not heeded: %s", position, error)
            self._queue.heed(position, bad=1)
            return
        logger.info("signal at %s: %s", position, signal)
        self._queue.heed(position, requests)
