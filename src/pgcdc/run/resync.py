"""`pgcdc resync`: brings sinks whose slot is lost back in line with the source, in the same files.

keys that the sinks have → note → drop the old slot and its state → new slot, with the existing rows → acks, TRUNCATEs,
requests for rows that vanished → note removed

Nothing is dropped before the keys are durable. From then on the note says what to do, every step is repeatable, and
only a resync can start in the state directory. After a crash at any point, run it again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pgcdc.capture.server import remove_socket
from pgcdc.core.errors import ConfigError, GapError, StateError
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.state import Identity, Lock, StateDir, fsync_folder, read_json, write_json_durably
from pgcdc.core.wording import counted
from pgcdc.postgres.database import Connection, connect, name_table, split_table
from pgcdc.postgres.lsn import format_lsn
from pgcdc.run.chains import why_unreadable
from pgcdc.run.table_reloads import ASKED_FOR
from pgcdc.sink.contract import Progress
from pgcdc.sink.file import FileOptions, FileSink
from pgcdc.sink.folder import FolderSink
from pgcdc.sink.holds import new_hold
from pgcdc.sink.line_files import KeyStore
from pgcdc.sink.runner import Runner
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.postgres.setup.fingerprint import SlotDetails, check_identity
from pgcdc.source.postgres.setup.prepare import prepare
from pgcdc.source.postgres.setup.slots import (
    SlotInfo,
    check,
    check_not_ahead,
    drop_slot,
    end_reader,
    get_slot,
    identify,
)
from pgcdc.source.postgres.setup.tables import PublishedTable, read_published, read_tables
from pgcdc.source.postgres.snapshot.releases import Releases, truncated_rows
from pgcdc.source.postgres.snapshot.requests import RequestQueue, SnapshotRequest, new_id
from pgcdc.spool.consumers import MAIN, Consumers, is_side_lane

WrittenFile = FileSink | FolderSink

_UNREADABLE = {"rows": "typed rows", "zset": "typed rows", "other": "lines in another form"}
_NOT_DELETED = "deletes of removed rows are not sent"
_TRUNCATE = " (with --truncate, a TRUNCATE precedes the rows)"


@dataclass
class Resync:
    """One resync. While it is open (a context manager) nobody else can use the state directory."""

    url: str
    state_dir: Path
    read_again: tuple[str, ...] = ()  # Only these tables, through the working slot
    new_slot: bool = False
    tables: tuple[str, ...] = ()  # Capture these tables from now on; (): as before
    truncate: bool = False
    two_phase: bool = False
    say: Callable[[str], None] = lambda text: None
    note: dict[str, Any] = field(default_factory=dict, init=False)
    """The note of a resync that has already dropped things: nothing is left to decide."""

    def __post_init__(self) -> None:
        self.state = StateDir(self.state_dir)
        self._slot: SlotInfo | None = None
        self._locks = contextlib.ExitStack()

    def __enter__(self) -> Resync:
        if not self.state.path.is_dir():
            raise StateError(
                f"{self.state.path} is not a state directory of pgcdc", "Set --state-dir to that of the pipeline"
            )
        with contextlib.ExitStack() as locks:
            for path in (self.state.run_lock, self.state.capture_lock):
                lock = Lock(path)
                if (previous := lock.acquire()) is None:
                    pid = (Lock.holder(path) or {}).get("pid", "?")
                    raise StateError(
                        f"the pipeline of {self.state.path} runs (process {pid})",
                        "Stop it first. To replace a copy while it runs, use: --table NAME --adapter NAME",
                    )
                locks.callback(lock.release)
                lock.write({"pid": os.getpid()})
                remove_socket(previous)
            self._locks = locks.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._locks.close()

    def plan(self) -> list[str]:
        """What will happen and what is lost, one line each. Raises if the resync is not allowed; changes nothing."""
        self.note = read_json(self.state.resync_note) or {}
        self.truncate = self.note.get("truncate", self.truncate)
        self.two_phase = self.two_phase or self.note.get("two_phase", False)
        self.tables = self.tables or tuple(self.note.get("tables", ()))
        if not self.note:
            return list(self._decide())
        if self.read_again:
            raise StateError(f"a resync of {self.state.path} is unfinished", "Run it again without --table")
        return [f"resuming the unfinished resync of slot {self._identity.stream}"]

    def run(self) -> None:
        """Carry out what `plan` described. Can be killed at any point and run again."""
        if self.read_again:
            self._read_again()
            return
        if not self.note:
            keys = self._collect(self._published())
            hit("resync.keys")
            self._save(
                phase="reset", identity=asdict(self._identity), keys=keys, truncate=self.truncate, two_phase=self.two_phase,
                tables=list(self.tables),
            )  # fmt: skip
        hit("resync.noted")
        if self.note["phase"] == "reset":
            self._reset()
            made = prepare(self._source_options(), self.state, consumer=MAIN, say=self.say, is_resync=True).identity
            hit("resync.prepared")
            self._save(**{**self.note, "phase": "begin", "lsn": made.created})
            self.say(f"slot {made.stream} begins at {format_lsn(made.created)}")
        self._begin()
        self.state.resync_note.unlink()
        fsync_folder(self.state.path)
        shutil.rmtree(self.state.resync, ignore_errors=True)

    def _save(self, **note: Any) -> None:
        write_json_durably(self.state.resync_note, note)
        self.note = note

    # --- what it works with

    def _connect(self, *, replication: bool = False) -> Connection:
        return connect(self.url, replication=replication, application_name="pgcdc resync", may_retry=False)

    @property
    def _identity(self) -> Identity:
        """The lost or abandoned slot's identity."""
        known = Identity(**self.note["identity"]) if self.note else self.state.identity()
        if known is None or (not self.note and known.created == 0):
            raise StateError(
                f"{self.state.path} has no slot yet",
                "Set --state-dir to that of the pipeline, or start it with: pgcdc listen",
            )
        return known

    def _source_options(self) -> PostgresOptions:
        """The previous capture's options, for a slot of the same name."""
        details = SlotDetails.of(self._identity)
        options = PostgresOptions(db=self.url, slot_name=self._identity.stream, two_phase=self.two_phase)
        options = options.but(tables=self.tables) if self.tables else details.as_before(options)
        return options.but(publication=details.names[0], snapshot_mode="initial")

    def _published(self) -> list[PublishedTable]:
        with self._connect() as sql:
            return read_published(sql, SlotDetails.of(self._identity).names)

    def _chosen(self) -> list[PublishedTable]:
        published = {(one.relation.namespace, one.relation.name): one for one in self._published()}
        names = list(dict.fromkeys(map(split_table, self.read_again)))
        for name in names:
            if name not in published:
                known = ", ".join(one.title for one in published.values()) or "none"
                raise ConfigError(
                    f"table {name_table(*name)} is not captured through slot {self._identity.stream}",
                    f"Captured tables: {known}",
                )
            if not published[name].key and any(not one.is_keyed for one in self._acks()):
                raise ConfigError(
                    f"table {published[name].title} has no key, so its rows cannot be read while it changes",
                    "Give it a primary key, or start over with all tables: pgcdc resync --new-slot",
                )
        return [published[name] for name in names]

    def _acks(self) -> list[Progress]:
        return [Progress(self.state.acks, path.stem) for path in sorted(self.state.acks.glob("*.json"))]

    def _files(self) -> list[tuple[WrittenFile, str]]:
        """The adapters' files, and why each cannot be read back; "" if it can."""
        found: list[tuple[WrittenFile, str]] = []
        for ack in self._acks():
            if "path" in ack.detail:
                sink = FileOptions(path=ack.detail["path"] + "/" * ("parts" in ack.detail)).make()
                sink.bind(ack)
                keys = [column for one in self._published() for column in one.key]
                reason = _UNREADABLE.get(sink.kind) or why_unreadable(self.state, sink.name, keys)
                found.append((sink, reason if sink.is_complete else "files that were removed (max_files)"))
        return found

    def _readable(self) -> list[WrittenFile]:
        return [sink for sink, reason in self._files() if sink.is_there and not reason]

    def _blind(self) -> list[str]:
        """The adapters whose targets cannot be read back: all except files."""
        return [one.name for one in self._acks() if "path" not in one.detail and not one.is_keyed]

    def _keyed(self) -> tuple[str, ...]:
        """The adapters that keep copies of tables, and replace them."""
        return tuple(one.name for one in self._acks() if one.is_keyed)

    # --- the decision

    def _decide(self) -> Iterator[str]:
        other, lost = self._look()
        confirmed, name = Consumers(self.state.consumers_file), self._identity.stream
        if self.read_again:
            yield from self._decide_tables(lost or other)
            return
        if other and not self.new_slot:
            raise GapError(other, "Check --db. If the targets are to follow this database from now on, add --new-slot")
        if not lost and not self.new_slot:
            raise ConfigError(
                f"slot {name} still works: no changes are lost",
                "Start pgcdc listen. To read a table again, use --table; to replace the slot anyway, --new-slot",
            )
        self._check_selection()
        yield other or lost or f"slot {name} will be replaced, as requested"
        if self._slot is not None:
            yield f"slot {name} will be dropped; changes that only it holds are lost"
        yield (
            f"changes between {format_lsn(confirmed.confirmed_lsn)} and the new slot are not delivered one by "
            "one. Instead, every table is delivered as it is now, each row as a SNAPSHOT, followed by the "
            "later changes"
        )
        if other:
            yield "events get positions of this server, which may be smaller than earlier ones"
        yield from self._decide_sinks()
        for consumer in confirmed.names():
            if consumer != MAIN and not is_side_lane(consumer):
                yield (
                    f"the query of consumer {consumer} cannot continue: start it again with a new checkpoint and target"
                )

    def _look(self) -> tuple[str, str]:
        """Why the server is not the known one, and why the slot cannot be resumed; "" if neither is a problem."""
        known, lost, other = self._identity, "", ""
        with self._connect() as sql:
            slot = self._slot = get_slot(sql, known.stream)
        self.two_phase = self.two_phase or bool(slot and slot.two_phase)
        try:
            server = check(self.url, known.stream)
            found = (server.system_identifier, server.timeline, server.database)
            if slot is not None:
                check_not_ahead(slot, Consumers(self.state.consumers_file).confirmed_lsn)
        except GapError as error:
            lost = error.message
            with self._connect(replication=True) as replication:
                found = (*identify(replication), replication.info.dbname)
        if slot is None:
            lost = lost or f"slot {known.stream} no longer exists"
        try:
            check_identity(known, *found, known.stream)
        except GapError as error:
            other = error.message
        return other, lost

    def _check_selection(self) -> None:
        """Refuse tables that cannot be captured before anything is dropped."""
        options = self._source_options()
        if options.tables and not SlotDetails.of(self._identity).selection.names_tables:
            raise ConfigError(
                f"publication {options.publication} is yours, so pgcdc does not change its tables",
                "Alter the publication instead of using --tables",
            )
        with self._connect() as sql:
            known = {(one.schema, one.table) for one in read_tables(sql)}
        for table in options.tables:
            if split_table(table) not in known:
                raise ConfigError(
                    f"table {table} no longer exists", "Name the tables to capture from now on: --tables a,b"
                )

    def _decide_sinks(self) -> Iterator[str]:
        for sink, reason in self._files():
            Runner(sink, self.state.acks, sink.name).check()
            where = f"adapter {sink.name} continues in {sink.path}"
            if self.truncate:
                yield f"{where}: a TRUNCATE of every table precedes its rows"
            elif sink.kind == "zset":
                raise ConfigError(
                    f"{sink.path} contains the rows of a Z-set, in which no row may be repeated",
                    "Add --truncate (and --truncate mark to pgcdc listen), or start with a new slot, "
                    "--state-dir and file",
                )
            elif reason:
                yield f"{where}, but {reason} cannot be read back: {_NOT_DELETED}{_TRUNCATE}"
            else:
                yield f"{where}; rows that the source no longer has are deleted by events"
        yield from (
            f"adapter {one} empties its copies of the tables and receives all rows again" for one in self._keyed()
        )
        if not self.truncate:
            yield from (f"adapter {one} cannot be read back: {_NOT_DELETED}{_TRUNCATE}" for one in self._blind())
            for table in self._published():
                if not table.key:
                    yield f"table {table.title} has no key: a TRUNCATE precedes its rows"

    def _decide_tables(self, lost: str) -> Iterator[str]:
        if self.new_slot or self.truncate or self.tables:
            raise ConfigError(
                "--table cannot be combined with --new-slot, --tables or --truncate", "Remove the other flags"
            )
        if lost:
            raise GapError(lost, "Repair all tables: pgcdc resync without --table")
        for table in self._chosen():
            yield f"table {table.title} is read again while pgcdc listen runs, each row as a SNAPSHOT"
        for sink, reason in self._files():
            if reason:
                yield f"{reason} in {sink.path} cannot be read back: {_NOT_DELETED}"
        yield from (f"adapter {one} cannot be read back: {_NOT_DELETED} for it" for one in self._blind())
        yield from (f"adapter {one} replaces its copy of the table" for one in self._keyed())

    # --- the steps

    def _collect(self, tables: Sequence[PublishedTable]) -> list[dict[str, Any]]:
        """Write each sink's keys to durable files."""
        self.say("reading what the targets have")
        shutil.rmtree(self.state.resync, ignore_errors=True)
        self.state.resync.mkdir()
        named = {(table.relation.namespace, table.relation.name): table for table in tables}
        wanted = {name: table.key for name, table in named.items() if table.key and not self.truncate}
        found: list[dict[str, Any]] = []
        for sink in self._readable() if wanted else []:
            with KeyStore(self.state.resync / "keys.sqlite", wanted) as store:
                sink.read_events(store)
                for number, (table, key) in enumerate(wanted.items()):
                    file = f"keys-{sink.name}-{number}.jsonl"
                    count = store.write_keys(table, self.state.resync / file)
                    found.append({"table": list(table), "key": list(key), "file": file, "count": count})
                self._tell_unread(sink, store, {table.relation.channel for table in tables})
        fsync_folder(self.state.path)
        return found

    def _tell_unread(self, sink: WrittenFile, store: KeyStore, captured: set[str]) -> None:
        for table, count in store.unread.items():
            self.say(
                f"{counted(count, 'row')} in {sink.path} of table {name_table(*table)} cannot be looked up in the source "
                "(the table had another key, or it is not UTF-8): if the source deleted them, they remain there"
            )
        others = sorted(store.others - captured)
        if others and not self.read_again:
            names = ", ".join(others[:20])
            self.say(f"rows of {names} in {sink.path} are left unchanged: these tables are no longer captured")

    def _reset(self) -> None:
        """Drop the slot and its state."""
        name = self._identity.stream
        with self._connect() as sql:
            slot = get_slot(sql, name)
            if slot is not None:
                # A walsender of an earlier run that died: the server may notice only after wal_sender_timeout.
                end_reader(sql, slot, f"pgcdc {(self.state.identity() or self._identity).instance}")
                drop_slot(sql, name)
        hit("resync.dropped")
        self.state.forget_slot()
        hit("resync.emptied")
        self.state.identity_file.unlink(missing_ok=True)
        fsync_folder(self.state.path)

    def _begin(self) -> None:
        """Set up the new slot, before its first reader."""
        lsn, tables, keys = int(self.note["lsn"]), self._published(), self.note["keys"]
        start = Position.end(lsn)
        now = {(one.relation.namespace, one.relation.name): list(one.key) for one in tables if one.key}
        known = {tuple(one["table"]): one["key"] for one in keys}
        if not self.truncate and self._readable() and now != known:
            keys = self._collect(tables)  # publications were already changed or dropped, so their current tables count
            self._save(**{**self.note, "keys": keys})
        self._release_truncates(start, tables)
        hit("resync.truncated")
        queue = RequestQueue(self.state.requests_file)
        queued = {one.id for one in queue.entries()}
        named = {f"resync-{lsn:X}-{number}": one for number, one in enumerate(keys)}
        self._request(queue, {name: one for name, one in named.items() if name not in queued})
        hit("resync.queued")
        for ack in self._acks():
            if ack.position is not None and ack.position > start:
                self.say(f"adapter {ack.name} was at {ack.position}, ahead of the new slot: its positions go back")
            ack.rewind(start)
        hit("resync.acked")

    def _release_truncates(self, start: Position, tables: Sequence[PublishedTable]) -> None:
        """Empty tables that cannot be compared by key at the sink before their rows come. Adapters that keep copies
        empty all tables."""
        releases, end, done = Releases(self.state.snapshot, start), start, set()
        for release in releases.after(start):  # left by a resync that was interrupted here
            end = release.end
            done.add((release.relation or {}).get("oid"))
        keyed = self._keyed()
        for table in tables:
            is_for_all = self.truncate or not table.key
            if table.relation.oid not in done and (is_for_all or keyed):
                whose = () if is_for_all else keyed
                end = releases.add(end, releases.stage([truncated_rows()]), table.relation, adapters=whose).end

    def _request(
        self, queue: RequestQueue, keys: dict[str, dict[str, Any]], before: Sequence[SnapshotRequest] = ()
    ) -> None:
        """Request the rows that vanished, by id and the sinks' keys. The key files are kept with the requests."""
        requests, folder = list(before), self.state.snapshot_keys
        for name, one in keys.items():
            if one["count"]:
                folder.mkdir(parents=True, exist_ok=True)
                target = folder / f"{name}.jsonl"
                with contextlib.suppress(FileNotFoundError):  # it was moved before a crash
                    os.replace(self.state.resync / one["file"], target)
                fsync_folder(folder)
                fsync_folder(folder.parent)
                requests.append(SnapshotRequest(name, name_table(*one["table"]), "vanished", keys_file=str(target)))
        hit("resync.kept")
        if requests:
            queue.add(*requests)

    def _read_again(self) -> None:
        """Request some tables of a working slot again: their rows, and those that vanished."""
        chosen = self._chosen()
        keys = self._collect(chosen)
        hit("resync.keys")
        for ack in self._acks():
            if ack.is_keyed:
                held = {one.relation.oid: new_hold(one.title, ASKED_FOR) for one in chosen}
                ack.hold({**ack.holds, **held})
        if len(self._keyed()) == len(self._acks()):
            return
        queue = RequestQueue(self.state.requests_file)
        needed = {one.request.keys_file for one in queue.entries() if not one.is_ended}
        for path in self.state.snapshot_keys.glob("*"):
            if str(path) not in needed:
                path.unlink()
        self._request(queue, {new_id(): one for one in keys}, [SnapshotRequest(new_id(), one.title) for one in chosen])
        shutil.rmtree(self.state.resync, ignore_errors=True)
