"""Signals: rows that somebody inserts into a captured table to ask for snapshots, by plain SQL.

They are read in the stream as any change is, and heeded before they become visible. The position of the last one is durable
together with what it asked for, so that each is heeded once, however often the stream is read again.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np

from pgcdc.capture.batch import CaptureBatch
from pgcdc.capture.database import quote_qualified, split_table
from pgcdc.capture.requests import RequestQueue, SnapshotRequest, new_id
from pgcdc.errors import ConfigError
from pgcdc.position import Position
from pgcdc.spool.schema import Op

__all__ = ["SIGNALS", "Signals", "parse_signal", "signal_table_ddl"]

logger = logging.getLogger("pgcdc.capture")

SIGNALS = ("execute-snapshot", "pause-snapshot", "resume-snapshot", "stop-snapshot")


def signal_table_ddl(name: str) -> str:
    """The statement that makes the table of signals."""
    return (
        f"CREATE TABLE IF NOT EXISTS {quote_qualified(*split_table(name))} "
        "(id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, signal text NOT NULL, payload jsonb)"
    )


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
        lsns = np.repeat(batch.transactions.column("lsn").to_numpy(), counts)
        for row in np.flatnonzero(mine).tolist():
            position = Position(int(lsns[row]), data.column("ordinal")[row].as_py())
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
