"""`pgcdc resync`: sinks whose slot is lost are brought back to the source, in the same files.

keys that the sinks have → note → the old slot and its state are thrown away → new slot, with the rows that are there
→ acks, TRUNCATEs, requests for rows that vanished → note removed

Nothing is thrown away before the keys are durable. From then on the note says what to do, every step can be done again, and
nothing but a resync can begin in the state directory: a crash anywhere is finished by running it once more.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pgcdc.capture.server import remove_socket
from pgcdc.core.errors import ConfigError, GapError, StateError
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.state import Identity, Lock, StateDir, check_identity, fsync_folder, read_json, write_json_durably
from pgcdc.postgres.database import connect, name_table, quote_qualified, split_table
from pgcdc.postgres.lsn import format_lsn
from pgcdc.run.rewritten_columns import why_unreadable
from pgcdc.sink.contract import Progress
from pgcdc.sink.file import FileSink
from pgcdc.sink.folder import FolderSink, file_sink
from pgcdc.sink.runner import Runner
from pgcdc.sink.state import KeyStore, TableName
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.postgres.setup.preflight import check, identify
from pgcdc.source.postgres.setup.prepare import prepare
from pgcdc.source.postgres.setup.published import PublishedTable, read_published
from pgcdc.source.postgres.setup.slots import OpenTransaction, SlotInfo, check_not_ahead, drop_slot, get_slot
from pgcdc.source.postgres.snapshot.releases import Releases, stage_rows, truncated_rows
from pgcdc.source.postgres.snapshot.requests import RequestQueue, SnapshotRequest, new_id
from pgcdc.spool.consumers import MAIN, Consumers, is_side_lane

__all__ = ["Resync", "ResyncOptions"]

RELEASE_TIMEOUT_S = 10.0
_OF_THE_SLOT = ("spool", "checkpoints", "consumers.json", "shapes.jsonl", "toast", "typed", "snapshot", "capture.json",
                "run.json", "lanes.json")  # fmt: skip
"""What is begun anew with the slot. Locks, logs and acks stay."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ResyncOptions:
    """What the user asks for."""

    url: str
    state_dir: Path
    read_again: tuple[str, ...] = ()
    """Only these tables, through the slot that works."""
    new_slot: bool = False
    tables: tuple[str, ...] = ()
    """Capture these from now on; () for what was captured before."""
    truncate: bool = False
    two_phase: bool = False


@dataclass(frozen=True, slots=True)
class _Server:
    """The source as it is now, against what we know of it."""

    slot: SlotInfo | None
    lost: str
    """Why the slot cannot be read on; "" if it can."""
    other: str
    """Why this is not the server or database that the state directory belongs to; "" if it is."""


class Resync:
    """One resync. While it is open (a context manager) nobody else can use the state directory."""

    def __init__(self, options: ResyncOptions, say: Say = lambda text: None) -> None:
        self.options = options
        self.state = StateDir(options.state_dir)
        self._say = say
        self._locks = contextlib.ExitStack()
        self._note: dict[str, Any] = {}
        self._identity: Identity
        self._two_phase = options.two_phase

    def __enter__(self) -> Resync:
        if not self.state.path.is_dir():
            raise StateError(f"{self.state.path} is not a state directory of pgcdc", "Give --state-dir")
        with contextlib.ExitStack() as locks:
            for path in (self.state.run_lock, self.state.capture_lock):
                lock = Lock(path)
                previous = lock.acquire()
                if previous is None:
                    holder = Lock.holder(path) or {}
                    raise StateError(
                        f"the pipeline of {self.state.path} runs (process {holder.get('pid', '?')})", "Stop it first"
                    )
                locks.callback(lock.release)
                lock.write({"pid": os.getpid()})
                remove_socket(previous)
            self._locks = locks.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._locks.close()

    # --- the plan

    @property
    def is_begun(self) -> bool:
        """Whether an earlier one was interrupted when it had thrown things away: there is nothing to decide any more."""
        return bool(self._note)

    @property
    def _truncates(self) -> bool:
        return bool(self._note.get("truncate", self.options.truncate))

    def plan(self) -> list[str]:
        """What is going to happen and what is lost, one line each. Refuses what must not be; changes nothing."""
        self._note = read_json(self.state.resync_note) or {}
        known = Identity(**self._note["identity"]) if self._note else self.state.identity()
        if known is None or (not self._note and known.created_lsn == 0):
            raise StateError(f"{self.state.path} has no slot yet", "Give --state-dir, or start: pgcdc listen")
        self._identity = known
        if self._note:
            if self.options.read_again:
                raise StateError(f"a resync of {self.state.path} is not finished", "Run it again, without --table")
            return [f"goes on with the resync of slot {known.slot} that was begun and not finished"]
        server = self._look()
        if server.slot is not None and server.slot.two_phase:
            self._two_phase = True
        if self.options.read_again:
            return self._plan_tables(server)
        self._check_needed(server)
        self._check_selection()
        lines = [server.other or server.lost or f"slot {known.slot} is given up, as you ask"]
        if server.slot is not None:
            lines.append(f"slot {known.slot} is dropped: what it holds is lost")
        confirmed = format_lsn(Consumers(self.state.consumers_file).confirmed_lsn)
        lines.append(
            f"changes after {confirmed} and before the new slot are not delivered one by one: every table is delivered "
            "as it is now, each row as a SNAPSHOT, and the changes after that"
        )
        if server.other:
            lines.append("positions of events are those of this server: they can be smaller than those before")
        lines += self._plan_sinks()
        for name in Consumers(self.state.consumers_file).names():
            if name != MAIN and not is_side_lane(name):
                lines.append(
                    f"the query of consumer {name} cannot go on: begin it anew, with a new checkpoint and target"
                )
        return lines

    def _look(self) -> _Server:
        known, url = self._identity, self.options.url
        with connect(url, application_name="pgcdc resync", may_retry=False) as sql:
            slot, lost = get_slot(sql, known.slot), ""
        if slot is None:
            lost = f"slot {known.slot} does not exist any more"
        try:
            server = check(url, known.slot)
            found = (server.system_identifier, server.timeline, server.database)
        except GapError as error:
            lost = error.message
            with connect(url, replication=True, application_name="pgcdc resync", may_retry=False) as replication:
                found = (*identify(replication), replication.info.dbname)
        if slot is not None and not lost:
            try:
                check_not_ahead(slot, Consumers(self.state.consumers_file).confirmed_lsn)
            except GapError as error:
                lost = error.message
        other = ""
        try:
            check_identity(
                known, system_identifier=found[0], timeline=found[1], database=found[2], slot=known.slot
            )  # fmt: skip
        except GapError as error:
            other = error.message
        return _Server(slot, lost, other)

    def _check_needed(self, server: _Server) -> None:
        if server.other and not self.options.new_slot:
            raise GapError(
                server.other, "Check --db. If the sinks are to follow this database from now on, give --new-slot"
            )
        if not server.lost and not self.options.new_slot:
            raise ConfigError(
                f"slot {self._identity.slot} is as it was left: nothing is lost",
                "Start pgcdc listen. To read a table again give --table; to give the slot up nevertheless, --new-slot",
            )

    def _check_selection(self) -> None:
        """What cannot be captured any more is refused before anything is thrown away."""
        options = self._source_options()
        if options.tables and not any((self._identity.asked or {"tables": True}).values()):
            raise ConfigError(f"publication {options.publication} is yours", "Alter it instead of giving --tables")
        with connect(self.options.url, application_name="pgcdc resync", may_retry=False) as sql:
            for table in options.tables:
                name = quote_qualified(*split_table(table))
                if sql.execute("SELECT to_regclass(%s)", [name]).fetchone() == (None,):
                    raise ConfigError(
                        f"table {table} does not exist any more", "Name what to capture from now on: --tables a,b"
                    )

    def _plan_sinks(self) -> list[str]:
        lines = []
        for sink in self._sinks():
            Runner(sink, self.state.acks, sink.name).check()
            kind = sink.kind
            where = f"adapter {sink.name} goes on in {sink.path}"
            if kind == "zset" and not self.options.truncate:
                raise ConfigError(
                    f"{sink.path} has the rows of a Z-set, in which a row must not come again",
                    "Add --truncate (and --truncate mark to pgcdc listen), or begin with a new slot, --state-dir and file",
                )
            if self.options.truncate:
                lines.append(f"{where}: a TRUNCATE of every table comes before its rows")
            elif reason := self._why_unreadable(sink):
                lines.append(f"{where}, but {reason} cannot be read back: {_NOT_DELETED}")
            else:
                lines.append(f"{where}; rows that it has and the source has not any more are deleted by events")
        if not self.options.truncate:
            lines += [f"adapter {name} cannot be read back: {_NOT_DELETED}" for name in _blind(self.state.acks)]
        if not self.options.truncate:
            for table in self._published():
                if not table.key:
                    lines.append(f"table {table.title} has no key: a TRUNCATE of it comes before its rows")
        return lines

    def _plan_tables(self, server: _Server) -> list[str]:
        if self.options.new_slot or self.options.truncate or self.options.tables:
            raise ConfigError("--table reads tables again through the slot that there is", "Give it alone")
        if server.lost or server.other:
            raise GapError(server.lost or server.other, "All tables need it: pgcdc resync without --table")
        lines = []
        for table in self._chosen():
            lines.append(f"table {table.title} is read again while pgcdc listen runs, each row as a SNAPSHOT")
        for sink in self._sinks():
            if reason := self._why_unreadable(sink):
                lines.append(f"{reason} in {sink.path} cannot be read back: deletes of rows that vanished are not sent")
        for name in _blind(self.state.acks):
            lines.append(f"adapter {name} cannot be read back: deletes of rows that vanished are not sent for it")
        return lines

    def _chosen(self) -> list[PublishedTable]:
        published = {(one.relation.namespace, one.relation.name): one for one in self._published()}
        chosen = []
        for name in dict.fromkeys(map(split_table, self.options.read_again)):
            table = published.get(name)
            if table is None:
                known = ", ".join(one.title for one in published.values()) or "none"
                raise ConfigError(
                    f"table {name_table(*name)} is not captured through slot {self._identity.slot}", f"Known: {known}"
                )
            if not table.key:
                raise ConfigError(
                    f"table {table.title} has no key: its rows cannot be read while it changes",
                    "Give it a primary key; or begin anew with all tables: pgcdc resync --new-slot",
                )
            chosen.append(table)
        return chosen

    # --- the work

    def run(self, on_wait: Callable[[list[OpenTransaction]], None] | None = None) -> None:
        """Do what `plan` said. May be killed anywhere and run again."""
        if self.options.read_again:
            self._read_again()
            return
        if not self._note:
            self._say("reading what the sinks have")
            keys = self._collect(self._published())
            hit("resync.keys")
            self._save(
                phase="reset", identity=asdict(self._identity), keys=keys, truncate=self.options.truncate,
                two_phase=self._two_phase, tables=list(self.options.tables),
            )  # fmt: skip
        hit("resync.noted")
        if self._note["phase"] == "reset":
            self._reset()
            prepared = prepare(self._source_options(), self.state, consumer=MAIN, on_wait=on_wait, is_resync=True)
            hit("resync.prepared")
            self._save(**{**self._note, "phase": "begin", "lsn": prepared.identity.created_lsn})
            self._say(f"slot {self._identity.slot} begins at {format_lsn(prepared.identity.created_lsn)}")
        self._begin()
        self.state.resync_note.unlink()
        fsync_folder(self.state.path)
        shutil.rmtree(self.state.resync, ignore_errors=True)

    def _save(self, **note: Any) -> None:
        write_json_durably(self.state.resync_note, note)
        self._note = note

    def _collect(self, tables: Sequence[PublishedTable]) -> list[dict[str, Any]]:
        """Which keys each sink has, as durable files; what they are."""
        shutil.rmtree(self.state.resync, ignore_errors=True)
        self.state.resync.mkdir()
        wanted = {_name(table): table.key for table in tables if table.key and not self._truncates}
        found: list[dict[str, Any]] = []
        for sink in self._readable() if wanted else []:
            with KeyStore(self.state.resync / "keys.sqlite", wanted) as store:
                sink.read_back(store)
                for number, (table, key) in enumerate(wanted.items()):
                    file = f"keys-{sink.name}-{number}.jsonl"
                    count = store.write_keys(table, self.state.resync / file)
                    found.append({"table": list(table), "key": list(key), "file": file, "count": count})
                self._tell_unread(sink, store, {table.relation.channel for table in tables})
        fsync_folder(self.state.path)
        return found

    def _tell_unread(self, sink: FileSink | FolderSink, store: KeyStore, captured: set[str]) -> None:
        for table, count in store.unread.items():
            self._say(
                f"{count} rows of table {name_table(*table)} in {sink.path} have no key to look for in the source "
                "(the table had another key, or it is not UTF-8): if they vanished, they stay there"
            )
        others = sorted(store.others - captured)
        if others and not self.options.read_again:
            names = ", ".join(others[:20])
            self._say(f"what {sink.path} has of {names} stays as it is: these tables are not captured any more")

    def _reset(self) -> None:
        """Throw away the slot and what belongs to it."""
        name, url = self._identity.slot, self.options.url
        with connect(url, application_name="pgcdc resync", may_retry=False) as sql:
            slot = get_slot(sql, name)
            if slot is not None:
                if slot.active:
                    self._end_own_reader(slot)
                drop_slot(sql, name)
        hit("resync.dropped")
        for item in _OF_THE_SLOT:
            path = self.state.path / item
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        hit("resync.emptied")
        self.state.identity_file.unlink(missing_ok=True)
        fsync_folder(self.state.path)

    def _end_own_reader(self, slot: SlotInfo) -> None:
        """A walsender of a run of ours that died: the server may notice only after wal_sender_timeout."""
        instance = (self.state.identity() or self._identity).instance
        deadline = time.monotonic() + RELEASE_TIMEOUT_S
        with connect(self.options.url, application_name="pgcdc resync", may_retry=False) as sql:
            sql.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND application_name = %s",
                [slot.active_pid, f"pgcdc {instance}"],
            )
            while time.monotonic() < deadline and (now := get_slot(sql, slot.name)) is not None and now.active:
                time.sleep(0.05)

    def _begin(self) -> None:
        """The slot is new and nobody has read it yet: what its first reader finds."""
        lsn: int = self._note["lsn"]
        tables = self._published()
        keys = self._note["keys"]
        now = {_name(table): list(table.key) for table in tables if table.key}
        known = {tuple(one["table"]): one["key"] for one in keys}
        if not self._truncates and self._readable() and now != known:
            keys = self._collect(tables)  # publications were changed or dropped before: what they have now counts
            self._save(**{**self._note, "keys": keys})
        self._release_truncates(lsn, [table for table in tables if self._truncates or not table.key])
        hit("resync.truncated")
        self._request_vanished(lsn, keys)
        hit("resync.queued")
        for path in sorted(self.state.acks.glob("*.json")):
            ack = Progress(self.state.acks, path.stem)
            if ack.position is not None and ack.position > Position.end(lsn):
                self._say(f"adapter {path.stem} stood at {ack.position}: positions go back from there")
            ack.save(Position.end(lsn), ack.detail)
        hit("resync.acked")

    def _release_truncates(self, lsn: int, tables: Sequence[PublishedTable]) -> None:
        """Tables that a sink cannot be compared with by key are emptied there, before their rows come."""
        releases = Releases(self.state.snapshot, Position.end(lsn))
        end, done = Position.end(lsn), set()
        for release in releases.after(end):  # of a resync that was interrupted here
            end = release.end
            done.add((release.relation or {}).get("oid"))
        for table in tables:
            if table.relation.oid not in done:
                file = self.state.snapshot / "truncate"
                rows, written = stage_rows(file, [truncated_rows()])
                time_us = time.time_ns() // 1000
                release = releases.add(
                    end, file, rows=rows, written=written, relation=table.relation, time_us=time_us
                )  # fmt: skip
                end = release.end

    def _request_vanished(self, lsn: int, keys: Sequence[dict[str, Any]]) -> None:
        queue = RequestQueue(self.state.requests_file)
        known = {one.id for one in queue.entries()}
        wanted = []
        for number, one in enumerate(keys):
            name = f"resync-{lsn:X}-{number}"
            if one["count"] and name not in known:
                file = self._keep(one["file"])
                wanted.append(SnapshotRequest(name, name_table(*one["table"]), "vanished", keys_file=str(file)))
        hit("resync.kept")
        if wanted:
            queue.add(*wanted)

    def _keep(self, file: str, prefix: str = "") -> Path:
        """Keys that a request needs stand where the requests are."""
        folder = self.state.snapshot_keys
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{prefix}{file}"
        with contextlib.suppress(FileNotFoundError):  # it was moved before a crash
            os.replace(self.state.resync / file, target)
        fsync_folder(folder)
        fsync_folder(folder.parent)
        return target

    def _read_again(self) -> None:
        """Requests for some tables of a slot that works: their rows, and those that vanished."""
        chosen = self._chosen()
        self._say("reading what the sinks have")
        keys = self._collect(chosen)
        hit("resync.keys")
        run, queue = new_id(), RequestQueue(self.state.requests_file)
        needed = {one.request.keys_file for one in queue.entries() if not one.is_ended}
        for path in self.state.snapshot_keys.glob("*"):
            if str(path) not in needed:
                path.unlink()
        requests = [SnapshotRequest(new_id(), table.title) for table in chosen]
        for one in keys:
            if one["count"]:
                file = self._keep(one["file"], f"{run}-")
                requests.append(SnapshotRequest(new_id(), name_table(*one["table"]), "vanished", keys_file=str(file)))
        hit("resync.kept")
        queue.add(*requests)
        shutil.rmtree(self.state.resync, ignore_errors=True)

    # --- what it works with

    def _source_options(self) -> PostgresOptions:
        """What was captured before, through a slot of the same name."""
        note, known = self._note, self._identity
        two_phase = self._two_phase or note.get("two_phase", False)
        options = PostgresOptions(db=self.options.url, slot_name=known.slot, two_phase=two_phase)
        tables = self.options.tables or tuple(note.get("tables", ()))
        options = options.but(tables=tables) if tables else options.as_before(known)
        return options.but(publication=known.publications[0]["name"], snapshot_mode="initial")

    def _published(self) -> list[PublishedTable]:
        names = [item["name"] for item in self._identity.publications]
        with connect(self.options.url, application_name="pgcdc resync", may_retry=False) as sql:
            return read_published(sql, names)

    def _sinks(self) -> list[FileSink | FolderSink]:
        """The sinks that wrote a file."""
        return list(_file_sinks(self.state.acks))

    def _readable(self) -> list[FileSink | FolderSink]:
        return [one for one in self._sinks() if one.is_there and not self._why_unreadable(one)]

    def _why_unreadable(self, sink: FileSink | FolderSink) -> str:
        """Which lines of a sink do not tell the keys of its rows; "" if all do."""
        if not sink.is_complete:
            return "files that were removed (max_files)"
        if (kind := sink.kind) in _UNREADABLE:
            return _UNREADABLE[kind]
        noted = (read_json(self.state.transforms_file) or {}).get(sink.name)
        return why_unreadable(noted, [column for one in self._published() for column in one.key]) if noted else ""


_UNREADABLE = {"rows": "typed rows", "zset": "typed rows", "other": "lines of another form"}
_NOT_DELETED = "deletes of rows that vanished are not sent (with --truncate, a TRUNCATE comes before the rows)"


def _name(table: PublishedTable) -> TableName:
    return table.relation.namespace, table.relation.name


def _file_sinks(acks: Path) -> Iterator[FileSink | FolderSink]:
    for path in sorted(acks.glob("*.json")):
        ack = Progress(acks, path.stem)
        if "path" in ack.detail:
            sink = file_sink(ack.detail["path"], is_folder="parts" in ack.detail)
            sink.bind(ack)
            yield sink


def _blind(acks: Path) -> Iterator[str]:
    """The adapters whose events are gone when they are delivered."""
    for path in sorted(acks.glob("*.json")):
        if path.stem == "stdout" or Progress(acks, path.stem).detail.get("type") == "exec":
            yield path.stem
