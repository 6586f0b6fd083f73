"""Rows as keys of Redis or Valkey, exactly once: deleted whenever they change (invalidate), or kept as JSON (sync).

A script changes keys and the position in one step, or not at all. Whoever opens the position's record gets a higher
token; a writer with an older token is refused. Refused events are recorded next to it: a replay only changes keys
without newer changes, and values that a refused event would have changed are never merged into a newer row.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import parse_qsl, urlsplit

import orjson
import pyarrow as pa

from pgcdc.core.errors import ConfigError, Reject, ReloadNeeded, SinkError, SinkRejected, SinkUnavailable
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.relation import Op, Relation, ShapeChange
from pgcdc.core.settings import setting
from pgcdc.event.batch import Batch
from pgcdc.event.changes import check_keys, key_columns, keyed_changes, parts_of
from pgcdc.event.follow import behind, follow_shape
from pgcdc.event.forms import Form
from pgcdc.event.shape import TableShape
from pgcdc.postgres.database import name_table
from pgcdc.sink.contract import Sink, SinkContext, explained
from pgcdc.sink.row_store import RowStore
from pgcdc.sink.spec import SourceView, UrlOptions

PART_EVENTS, PART_BYTES = 1000, 4 << 20
_HARMLESS = {"columns_reordered", "replica_identity_changed", "types_changed", "partitions_changed"}
_Change = tuple[str, str, str, tuple[str, ...], bytes]
"""Position, key, the row's previous key (empty: only a deletion), columns that were not sent, value (empty: delete)."""
_OPEN = """
local at = redis.call('HGET', KEYS[1], 'position')
if ARGV[2] == 'rewind' then redis.call('DEL', KEYS[2]) end
if ARGV[2] == 'rewind' or ARGV[2] == 'begin' and not at then at = ARGV[1] end
if not at then return false end
redis.call('HSET', KEYS[1], 'position', at)
return {redis.call('HINCRBY', KEYS[1], 'token', 1), at}
"""
_WRITE = Path(__file__).with_name("redis.lua").read_text()
_MAY = """
local may, key = redis.acl_check_cmd, KEYS[1]
return not may or may('SET', key, '') and may('UNLINK', key) and may('HSET', key, '', '') and may('SCAN', '0')
"""
_POLICIES = (
    ("AuthenticationError NoPermissionError", False, "Check the user, password and rights of redis_url"),
    (
        "MovedError AskError ClusterCrossSlotError",
        False,
        "This is a cluster: see docs/adapters/redis.md for the prefix it needs",
    ),
    ("OutOfMemoryError", True, "The server is full: raise its maxmemory, or delete keys"),
    ("ReadOnlyError", True, "This server is a replica: set redis_url to the primary"),
    ("ConnectionError TimeoutError ClusterDownError TryAgainError", True, "Check that the server runs, and redis_url"),
    ("MISCONF NOREPLICAS BUSY UNKILLABLE UNBLOCKED WAITAOF", True, "Fix what the server reports"),
    ("", False, "Check the server's version and settings: docs/adapters/redis.md"),
)


class RedisOptions(UrlOptions):
    """Rows as keys of Redis or Valkey: deleted when they change, or kept as JSON."""

    package: ClassVar[str] = "redis"
    is_by_table: ClassVar[bool] = True
    schemes: ClassVar[tuple[str, ...]] = ("redis", "rediss", "unix")
    url: str = setting("", "redis://host:6379/0, rediss:// with TLS; better in PGCDC_REDIS_URL", secret=True)
    mode: Literal["invalidate", "sync"] = setting(
        ..., "invalidate: delete keys of changed rows; sync: keep rows as JSON"
    )
    id_column: str = setting("", "the key column of all tables (default: the key of each table)")
    key_prefix: str = setting("", "prefix of all keys, before TABLE:KEY")

    def make(self) -> Sink:
        return RedisSink(self)

    def target(self) -> str:
        parts = urlsplit(self.read_url())
        return f"keys {self.key_prefix}* in database {self._database} of {parts.netloc.rpartition('@')[2]}"

    @property
    def _database(self) -> str:
        parts = urlsplit(self.read_url())
        in_path = parts.path.strip("/") if parts.scheme != "unix" else ""
        return dict(parse_qsl(parts.query)).get("db") or in_path or "0"

    def check_source(self, adapter: str, source: SourceView) -> None:
        check_keys(adapter, source.relations, self.id_column)

    def check(self) -> None:
        super().check()
        from redis import ConnectionPool

        if not re.fullmatch("[0-9]+", self._database):  # the client would use another one
            raise ConfigError("redis_url: its database is not a number", "Write redis://host:6379/0")
        try:
            ConnectionPool.from_url(self.read_url()).make_connection()  # this does not connect
        except (TypeError, ValueError) as error:
            what = str(error).rpartition("__() ")[2]
            raise ConfigError(f"redis_url: {what}", "Check the part after ?: docs/adapters/redis.md") from error


class RedisSink(Sink):
    """Writes a batch in parts, each with its position."""

    form: Form = "tables"
    keeps_position: ClassVar[bool] = True

    def __init__(self, options: RedisOptions) -> None:
        self._options, self._is_sync, self._client = options, options.mode == "sync", None  # type: RedisOptions, bool, Any
        self.reads_back = self._is_sync
        self._noted = set[tuple[str, str]]()  # Keys and positions of refused events that the server must still record
        self._is_warned = False

    def check(self, context: SinkContext) -> None:
        with self._explained(context.name):
            client = self._connect(context)
            client.ping()
            if not client.eval(_MAY, 1, self._options.key_prefix):
                raise SinkError(f"adapter {context.name}: this user cannot write its keys", _POLICIES[0][2])
            client.close()

    def open(self, context: SinkContext) -> Position | None:
        from redis import ResponseError

        self.close()
        progress, options, self._name, self._say = context.progress, self._options, context.name, context.say
        self._context = context
        whose = f"{progress.owner}:{context.stream}:{options.mode}:{options.id_column}"  # others left other keys
        self._keys = [f"{options.key_prefix}:pgcdc:{kind}:{whose}" for kind in ("position", "refused")]
        # Where keys are only deleted, a server without them needs nothing else.
        how = "rewind" if progress.is_rewound else "begin" if progress.written is None or not self._is_sync else ""
        self._max_bytes, self._waits_ms = 512 << 20, 0
        with self._explained(self._name):
            self._client = self._connect(context)
            with suppress(ResponseError):  # no permission to ask
                config = self._client.config_get("proto-max-bulk-len", "appendonly", "appendfsync")
                self._max_bytes = int(config["proto-max-bulk-len"])
                if config["appendonly"] == "yes" and config["appendfsync"] != "no":
                    self._waits_ms = int(context.timeout_s * 400)
            said = self._client.eval(_OPEN, 2, *self._keys, str(context.start), how)
            self._script = self._client.register_script(_WRITE)
        self._token, self._at = said or (0, "")  # type: int, str
        self._settle()  # the position may be from a write that failed before its fsync
        return Position.parse(self._at) if said else None

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def write(self, batch: Batch) -> None:
        self._follow(batch)
        for part in parts_of(batch.after(Position.parse(self._at)), PART_EVENTS, PART_BYTES):
            hit("redis.before_write")
            self._write(part, str(part.end))
        hit("redis.before_fsync")
        self._settle()

    def _follow(self, batch: Batch) -> None:
        """Delete a table's keys when its name, key or columns change. ReloadNeeded: its rows must come again in the new
        form."""
        chain, needed = self._context.chain(), dict[int, tuple[str, str]]()
        self._context.shapes.refresh()
        for change in self._context.shapes.between(batch.start, batch.end):
            is_held, after = change.after.oid in self._context.progress.holds, change.after
            if is_held or not chain.is_routed(after):
                continue
            differences, reason = follow_shape(change, chain)
            if change.before is None:
                reason = "it was dropped and created again" if self._context.shapes.takes_name(change) else ""
            kinds = {one["type"] for one in differences}
            has_new_key = "replica_identity_changed" in kinds and self._has_new_key(change)
            if not reason and kinds <= _HARMLESS and not has_new_key:
                continue
            old = change.before or after
            is_ours = "table_renamed" in kinds and not self._context.shapes.is_taken(old, change.position)
            if not self._is_sync or is_ours:
                self._clear(self._prefix(old), str(change.position))
            if self._is_sync:
                needed[after.oid] = (
                    name_table(after.namespace, after.name),
                    reason or "its name, key or columns changed",
                )
        if needed:
            raise ReloadNeeded(tables=needed)

    def _has_new_key(self, change: ShapeChange) -> bool:
        shown = behind(change, self._context.chain())
        assert shown.before is not None
        keys = set[tuple[str, ...]]()
        for one, details in ((shown.before, shown.before_details), (shown.after, shown.details)):
            with suppress(SinkError):  # reported with a row, if one comes
                keys.add(tuple(key_columns(one, details, self._options.id_column)))
        return len(keys) > 1

    def redeliver(self, batch: Batch) -> Collection[str]:
        left = self._write(batch, self._at, "replay" if self._is_sync else "")
        self._settle()
        return left

    def _settle(self) -> None:
        """Wait until everything written is on the server's disk. A server that cannot wait is reported once."""
        from redis.exceptions import NoPermissionError, ResponseError

        with self._explained(self._name):
            try:
                if self._waits_ms and not self._client.execute_command("WAITAOF", 1, 0, self._waits_ms)[0]:
                    raise SinkUnavailable(f"adapter {self._name}: the server does not fsync its file", "Check its disk")
            except ResponseError as error:
                if not isinstance(error, NoPermissionError) and not str(error).startswith("unknown command"):
                    raise
                if not self._is_warned:
                    self._say(
                        f"writes do not wait for fsync ({error}): if the server crashes, the last ones may be lost"
                    )
                self._waits_ms, self._is_warned = 0, True

    def _write(self, batch: Batch, end: str, how: str = "") -> list[str]:
        """Write all changes together. For a replay, returns the positions that were skipped."""
        changes: list[_Change] = []
        left, rejects = list[str](), list[Reject]()
        for one in keyed_changes(batch, self._options.id_column):
            prefix = self._prefix(one.table)
            if one.op is Op.TRUNCATE:
                left += [one.position] if how else self._clear(prefix, one.position)
                continue
            is_gone = one.op is Op.DELETE or not self._is_sync
            value = b"" if is_gone else orjson.dumps(one.row)
            key, old = (prefix + _join(":", values) for values in (one.key, one.old_key))
            fault = "missing_key" if None in one.key else "too_large" if len(value) >= self._max_bytes else ""
            if fault:
                rejects.append(Reject(one.position, fault, f"{fault}: {key:.100}, {len(value)} bytes"))
            changes.append((one.position, key, old, () if is_gone else one.lacks, value))
            if old != key:
                changes.append((one.position, old, "", (), b""))
        if not rejects:
            left += self._send(changes, end, how, rejects)
        if rejects:
            refused = {one.position for one in rejects}
            self._noted |= {(key, position) for position, key, *_ in changes if position in refused and not how}
            advice = "Fix the value of that key, then run: pgcdc dlq replay"
            raise SinkRejected(f"adapter {self._name}: {rejects[0].text}", advice, rejects)
        return left

    def read_back(self, context: SinkContext, shape: TableShape, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Rows that the JSON under the table's keys contains. The key decides: a row at a wrong key is a wrong row."""
        prefix = self._prefix(shape.relation)
        key = key_columns(shape.relation, shape.details, self._options.id_column)
        with self._explained(context.name), RowStore(shape, key) as store:
            client = self._connect(context)
            try:
                found = client.scan_iter(_pattern(prefix), PART_EVENTS, "STRING")
                while part := list(islice(found, PART_EVENTS)):  # SCAN may return a key twice: the store keeps it once
                    for name, text in zip(part, client.mget(part), strict=True):
                        if text is not None:  # deleted meanwhile
                            parts = [_unescape(one) for one in name.removeprefix(prefix).split(":")]
                            store.put(name, {**_read_row(text), **dict(zip(key, parts, strict=False))})
            finally:
                client.close()
            yield from store.rows(columns)

    def _prefix(self, table: Relation) -> str:
        names = (table.name,) if table.namespace == "public" else (table.namespace, table.name)
        return f"{self._options.key_prefix}{_join('.', names)}:"

    def _clear(self, prefix: str, position: str) -> list[str]:
        """Delete all keys of a table. The position stays, so a crash repeats this. Skips nothing."""
        with self._explained(self._name):
            noted = {*self._client.hkeys(self._keys[1]), *(key for key, _ in self._noted)}
            waiting = (key for key in noted if key.startswith(prefix))
            keys = chain(
                waiting, self._client.scan_iter(_pattern(prefix), PART_EVENTS, "STRING" if self._is_sync else None)
            )
            while part := list(islice(keys, PART_EVENTS)):
                self._send([(position, key, "", (), b"") for key in part], self._at, "", [])
        return []

    def _send(self, changes: list[_Change], end: str, how: str, rejects: list[Reject]) -> list[str]:
        """Send changes and return the skipped positions. If the server refuses any, it writes nothing, and they are
        added to `rejects`."""
        head = [self._token, self._at, end, self._options.mode, how, len(self._noted)]
        notes = [text for pair in sorted(self._noted) for text in pair]
        args = [text for *names, lacks, value in changes for text in (*names, len(lacks), *lacks, value)]
        with self._explained(self._name):
            state, *found = self._script(self._keys, [*head, *notes, *args])
        if state == "moved":
            kind = SinkError if int(found[0]) > self._token else SinkUnavailable  # then `open` looks again
            raise kind(f"adapter {self._name}: another process has written to this target", "Stop one of the two")
        if state == "refused":
            rejects += [Reject(at, "wrong_type", f"its key has the type {kind}") for at, kind in map(str.split, found)]
            return []
        self._at, self._noted = end, set()
        return list(found)

    def _connect(self, context: SinkContext) -> Any:
        """A client that never repeats a command on its own."""
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        times = {"socket_timeout": context.timeout_s / 2, "socket_connect_timeout": context.timeout_s / 4}
        texts = {"decode_responses": True, "encoding_errors": "surrogateescape", "single_connection_client": True}
        return Redis.from_url(self._options.read_url(), protocol=2, retry=Retry(NoBackoff(), 0), **times, **texts)

    def _explained(self, name: str) -> AbstractContextManager[None]:
        from redis import RedisError

        return explained(name, RedisError, _POLICIES)


def _join(separator: str, parts: Iterable[str | None]) -> str:
    """Join texts unambiguously."""
    return separator.join(re.sub(f"[%:{separator}]", lambda one: f"%{ord(one[0]):02X}", part or "") for part in parts)


def _unescape(part: str) -> str:
    return re.sub("%([0-9A-F]{2})", lambda one: chr(int(one[1], 16)), part)


def _pattern(prefix: str) -> str:
    return re.sub(r"([\\*?\[\]])", r"\\\1", prefix) + "*"


def _read_row(text: str) -> dict[str, str | None]:
    """A value that is not a row of ours has no columns, so it differs from every row."""
    with suppress(ValueError):
        found = orjson.loads(text)
        if isinstance(found, dict):
            return {name: one if one is None or isinstance(one, str) else str(one) for name, one in found.items()}
    return {}
