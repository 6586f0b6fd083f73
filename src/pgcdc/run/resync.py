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
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from pgcdc.capture.server import remove_socket
from pgcdc.core.errors import StateError
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.state import Lock, StateDir, fsync_folder, write_json_durably
from pgcdc.postgres.database import name_table
from pgcdc.postgres.lsn import format_lsn
from pgcdc.run.resync_plan import Plan, ResyncOptions, WrittenFile
from pgcdc.sink.line_files import KeyStore
from pgcdc.source.postgres.setup.prepare import prepare
from pgcdc.source.postgres.setup.slots import OpenTransaction, SlotInfo, drop_slot, get_slot
from pgcdc.source.postgres.setup.tables import PublishedTable
from pgcdc.source.postgres.snapshot.releases import Releases, truncated_rows
from pgcdc.source.postgres.snapshot.requests import RequestQueue, SnapshotRequest, new_id
from pgcdc.spool.consumers import MAIN

__all__ = ["Resync", "ResyncOptions"]

RELEASE_TIMEOUT_S = 10.0
_OF_THE_SLOT = ("spool", "checkpoints", "consumers.json", "shapes.jsonl", "toast", "typed", "snapshot", "capture.json",
                "run.json", "lanes.json")  # fmt: skip
"""What begins again with the slot. Locks, logs and acks stay."""

Say = Callable[[str], None]


class Resync:
    """One resync. While it is open (a context manager) nobody else can use the state directory."""

    def __init__(self, options: ResyncOptions, say: Say = lambda text: None) -> None:
        self.options = options
        self.state = StateDir(options.state_dir)
        self._say = say
        self._locks = contextlib.ExitStack()
        self._plan: Plan

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

    def plan(self) -> list[str]:
        """What is going to happen and what is lost, one line each. Refuses what must not be; changes nothing."""
        self._plan = Plan(self.options, self.state)
        return self._plan.decide()

    @property
    def is_begun(self) -> bool:
        """Whether an earlier one was interrupted when it had thrown things away: there is nothing left to decide."""
        return bool(self._plan.note)

    def run(self, on_wait: Callable[[list[OpenTransaction]], None] | None = None) -> None:
        """Do what `plan` said. May be killed anywhere and run again."""
        plan = self._plan
        if self.options.read_again:
            self._read_again()
            return
        if not plan.note:
            keys = self._collect(plan.published())
            hit("resync.keys")
            self._save(
                phase="reset", identity=asdict(plan.identity), keys=keys, truncate=self.options.truncate,
                two_phase=plan.two_phase, tables=list(self.options.tables),
            )  # fmt: skip
        hit("resync.noted")
        if plan.note["phase"] == "reset":
            self._reset()
            prepared = prepare(plan.source_options(), self.state, consumer=MAIN, on_wait=on_wait, is_resync=True)
            hit("resync.prepared")
            self._save(**{**plan.note, "phase": "begin", "lsn": prepared.identity.created})
            self._say(f"slot {plan.identity.stream} begins at {format_lsn(prepared.identity.created)}")
        self._begin()
        self.state.resync_note.unlink()
        fsync_folder(self.state.path)
        shutil.rmtree(self.state.resync, ignore_errors=True)

    def _save(self, **note: Any) -> None:
        write_json_durably(self.state.resync_note, note)
        self._plan.note = note

    def _collect(self, tables: Sequence[PublishedTable]) -> list[dict[str, Any]]:
        """Which keys each sink has, as durable files; what they are."""
        self._say("reading what the sinks have")
        shutil.rmtree(self.state.resync, ignore_errors=True)
        self.state.resync.mkdir()
        named = {(table.relation.namespace, table.relation.name): table for table in tables}
        wanted = {name: table.key for name, table in named.items() if table.key and not self._plan.truncates}
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

    def _readable(self) -> list[WrittenFile]:
        return [sink for sink, reason in self._plan.files() if sink.is_there and not reason]

    def _tell_unread(self, sink: WrittenFile, store: KeyStore, captured: set[str]) -> None:
        for table, count in store.unread.items():
            self._say(
                f"{count} rows of table {name_table(*table)} in {sink.path} have no key to look for in the source "
                "(the table had another key, or it is not UTF-8): if they vanished, they stay there"
            )
        others = sorted(store.others - captured)
        if others and not self.options.read_again:
            names = ", ".join(others[:20])
            self._say(f"what {sink.path} has of {names} stays as it is: these tables are no longer captured")

    def _reset(self) -> None:
        """Throw away the slot and what belongs to it."""
        name = self._plan.identity.stream
        with self.options.connect() as sql:
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
        """A walsender of an earlier run that died: the server may notice only after wal_sender_timeout."""
        instance = (self.state.identity() or self._plan.identity).instance
        deadline = time.monotonic() + RELEASE_TIMEOUT_S
        with self.options.connect() as sql:
            sql.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND application_name = %s",
                [slot.active_pid, f"pgcdc {instance}"],
            )
            while time.monotonic() < deadline and (now := get_slot(sql, slot.name)) is not None and now.active:
                time.sleep(0.05)

    def _begin(self) -> None:
        """The slot is new and nobody has read it yet: what its first reader finds."""
        plan, lsn = self._plan, int(self._plan.note["lsn"])
        start, tables, keys = Position.end(lsn), plan.published(), plan.note["keys"]
        now = {(one.relation.namespace, one.relation.name): list(one.key) for one in tables if one.key}
        known = {tuple(one["table"]): one["key"] for one in keys}
        if not plan.truncates and self._readable() and now != known:
            keys = self._collect(tables)  # publications were changed or dropped before: what they have now counts
            self._save(**{**plan.note, "keys": keys})
        self._release_truncates(start, [table for table in tables if plan.truncates or not table.key])
        hit("resync.truncated")
        queue = RequestQueue(self.state.requests_file)
        queued = {one.id for one in queue.entries()}
        names = [f"resync-{lsn:X}-{number}" for number in range(len(keys))]
        self._request(queue, [(name, one) for name, one in zip(names, keys, strict=True) if name not in queued])
        hit("resync.queued")
        for ack in plan.acks():
            if ack.position is not None and ack.position > start:
                self._say(f"adapter {ack.name} stood at {ack.position}: positions go back from there")
            ack.rewind(start)
        hit("resync.acked")

    def _release_truncates(self, start: Position, tables: Sequence[PublishedTable]) -> None:
        """Tables that a sink cannot be compared with by key are emptied there, before their rows come."""
        releases, end, done = Releases(self.state.snapshot, start), start, set()
        for release in releases.after(start):  # of a resync that was interrupted here
            end = release.end
            done.add((release.relation or {}).get("oid"))
        for table in tables:
            if table.relation.oid not in done:
                end = releases.add(end, releases.stage([truncated_rows()]), table.relation).end

    def _request(
        self, queue: RequestQueue, keys: Sequence[tuple[str, dict[str, Any]]], *, prefix: str = "",
        before: Sequence[SnapshotRequest] = (),
    ) -> None:  # fmt: skip
        """Ask for the rows that vanished, by ids and the keys that sinks have; their files stand where the requests are."""
        requests, folder = list(before), self.state.snapshot_keys
        for name, one in keys:
            if one["count"]:
                folder.mkdir(parents=True, exist_ok=True)
                target = folder / f"{prefix}{one['file']}"
                with contextlib.suppress(FileNotFoundError):  # it was moved before a crash
                    os.replace(self.state.resync / one["file"], target)
                fsync_folder(folder)
                fsync_folder(folder.parent)
                requests.append(SnapshotRequest(name, name_table(*one["table"]), "vanished", keys_file=str(target)))
        hit("resync.kept")
        if requests:
            queue.add(*requests)

    def _read_again(self) -> None:
        """Requests for some tables of a slot that works: their rows, and those that vanished."""
        chosen = self._plan.chosen()
        keys = self._collect(chosen)
        hit("resync.keys")
        queue = RequestQueue(self.state.requests_file)
        needed = {one.request.keys_file for one in queue.entries() if not one.is_ended}
        for path in self.state.snapshot_keys.glob("*"):
            if str(path) not in needed:
                path.unlink()
        rows = [SnapshotRequest(new_id(), table.title) for table in chosen]
        self._request(queue, [(new_id(), one) for one in keys], prefix=f"{new_id()}-", before=rows)
        shutil.rmtree(self.state.resync, ignore_errors=True)
