"""Replaces copies of tables: what adapters hold (`sink/holds.py`) becomes requests to the capture, even after a crash.

Users can also hold tables, in a pipeline that runs or one that has stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from pgcdc.capture.control import CaptureLink, ask
from pgcdc.core.errors import ConfigError, ConnectionLost, PgcdcError, StateError
from pgcdc.core.relation import Relation
from pgcdc.core.state import Lock, StateDir
from pgcdc.postgres.database import name_table, split_table
from pgcdc.run.member import Member, WriteFuture
from pgcdc.run.progress import Every
from pgcdc.sink.contract import Progress
from pgcdc.sink.holds import Hold, new_hold

if TYPE_CHECKING:
    from pgcdc.run.supervisor import Lanes

INTERVAL_S, RETRY_S = 0.25, 5.0
HOLD_TIMEOUT_S = 30.0
MAX_ROUNDS = 10  # The most rounds of a bounded run, for copies that are being replaced
ASKED_FOR = "requested with pgcdc resync"


class TableReloads:
    """Asks the capture to reread held tables, in the thread that watches the lanes."""

    def __init__(self, link: CaptureLink, lanes: Lanes, say: Callable[[str], None]) -> None:
        self._link, self._lanes, self._say = link, lanes, say
        self._asked: set[str] = set()
        self._handed_over: dict[str, list[WriteFuture]] = {}  # By request: what adapters do instead
        self._refused: dict[str, Every] = {}  # When to ask again: the table may have been locked
        self._is_due = Every(INTERVAL_S)
        self._rounds = 0

    def follow(self, *, at_once: bool = False) -> None:
        if not self._is_due() and not at_once:
            return
        snapshots = {one["id"]: one for one in self._link.last_status().get("snapshots", ())}
        self._hold_added(snapshots.values())
        for name in self._asked & snapshots.keys():
            if snapshots[name]["status"] in ("stopped", "failed"):  # otherwise its copy would never continue
                self._asked.discard(name)
                self._refused.setdefault(name, Every(RETRY_S, RETRY_S))
        for member in self._lanes.members():
            for oid, hold in list(member.sink.progress.holds.items()):
                is_new = hold.table and hold.id not in self._asked
                if is_new and (hold.id not in self._refused or self._refused[hold.id]()):
                    self._ask(member, oid, hold)

    def _hold_added(self, snapshots: Iterable[dict[str, Any]]) -> None:
        """Hold a new table without a key: it cannot be read row by row beside the stream, but copies of it can be made
        as a whole."""
        for one in snapshots:
            if one["kind"] != "added" or one["status"] != "failed":
                continue
            if one["id"] not in self._handed_over:
                held = {one["oid"]: new_hold(one["table"], "it has no key, and had rows before it was captured")}
                keyed = [member for member in self._lanes.members() if member.sink.progress.is_keyed]
                done = [member.submit_other(partial(member.sink.hold, held)) for member in keyed]
                self._handed_over[one["id"]] = done
                for member in keyed:
                    self._say(f"adapter {member.name}: table {one['table']} has no key. It is read again as a whole")
            elif (done := self._handed_over[one["id"]]) and all(write.done() for write in done):
                if any(write.exception() for write in done):
                    del self._handed_over[one["id"]]
                    continue
                self._handed_over[one["id"]] = []
                with suppress(PgcdcError):  # the next start holds it again
                    self._link.request({"do": "snapshot", "action": "stop", "id": one["id"]})

    def is_done(self) -> bool:
        """At the end of a bounded run: whether all copies are complete. If not, the run continues with the tables to be
        reread. Raises if that does not come to an end."""
        held = [one.table for member in self._lanes.members() for one in member.sink.progress.holds.values()]
        if not held:
            return True
        if self._rounds == MAX_ROUNDS:
            raise PgcdcError(
                f"everything is delivered, but the copy of table {', '.join(held)} still has to be replaced",
                "See pgcdc status for the reason, then run it again: it starts with that",
            )
        self._rounds += 1
        self.follow(at_once=True)
        self._lanes.begin_again()
        return False

    def _ask(self, member: Member, oid: int, hold: Hold) -> None:
        adapter = member.name
        wanted = {"id": hold.id, "table": hold.table, "kind": "reload", "oid": oid, "adapters": [adapter]}
        try:
            self._link.request({"do": "snapshot", "action": "add", **wanted})
        except ConnectionLost:
            return  # the next look tries again
        except PgcdcError as error:
            if "is no longer captured" in error.message:  # it was dropped, so its reload would never end
                member.submit_other(lambda: member.sink.hold({}, without=oid))
            if hold.id not in self._refused:
                self._say(f"adapter {adapter}: table {hold.table} cannot be read again: {error}")
            self._refused.setdefault(hold.id, Every(RETRY_S, RETRY_S))
            return
        self._asked.add(hold.id)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Hold tables of an adapter, between two of its batches."""
        member = next((one for one in self._lanes.members() if one.name == request["adapter"]), None)
        if member is None:
            names = ", ".join(one.name for one in self._lanes.members())
            raise ConfigError(f"adapter {request['adapter']!r} does not exist", f"Known adapters: {names}")
        _check_keyed(member.sink.progress)
        held = {int(oid): new_hold(table, ASKED_FOR) for oid, table in request["tables"].items()}
        member.submit_other(lambda: member.sink.hold(held))
        return {"ids": [one.id for one in held.values()]}


def find_tables(
    state: StateDir, captured: Sequence[Relation], tables: Sequence[str], adapters: Sequence[str]
) -> dict[int, str]:
    """The names of these tables by their oids. ConfigError: a table is not captured, or an adapter does not exist."""
    known = {(one.namespace, one.name): one for one in captured}
    wanted = {}
    for name in dict.fromkeys(map(split_table, tables)):
        if name not in known:
            names = ", ".join(name_table(*one) for one in known) or "none"
            raise ConfigError(f"table {name_table(*name)} is not captured", f"Captured tables: {names}")
        wanted[known[name].oid] = name_table(*name)
    for adapter in adapters:
        if not (state.acks / f"{adapter}.json").exists():
            names = ", ".join(sorted(one.stem for one in state.acks.glob("*.json"))) or "none"
            raise ConfigError(f"adapter {adapter!r} does not exist in {state.path}", f"Known adapters: {names}")
    return wanted


def hold_tables(state: StateDir, wanted: Mapping[int, str], adapters: Sequence[str]) -> None:
    """Have these adapters replace their copies of these tables. If the pipeline is stopped, it does so at its next
    start."""
    if Lock.holder(state.run_lock) is not None:
        for adapter in adapters:
            request = {"do": "hold", "adapter": adapter, "tables": {str(oid): name for oid, name in wanted.items()}}
            said = ask(state.run_lock, request)
            if not said:
                raise StateError("the pipeline is starting or stopping", "Try again in a moment")
            _await_holds(state, adapter, set(said["ids"]))
        return
    lock = Lock(state.run_lock)
    if lock.acquire() is None:
        raise StateError("the pipeline is starting", "Try again in a moment")
    try:
        for adapter in adapters:
            progress = Progress(state.acks, adapter)
            _check_keyed(progress)
            progress.hold({**progress.holds, **{oid: new_hold(name, ASKED_FOR) for oid, name in wanted.items()}})
    finally:
        lock.release()


def _await_holds(state: StateDir, adapter: str, ids: set[str]) -> None:
    """Wait until the adapter has the holds on disk: it may be in the middle of a batch."""
    deadline = time.monotonic() + HOLD_TIMEOUT_S
    while not ids <= {one.id for one in Progress(state.acks, adapter).holds.values()}:
        if time.monotonic() > deadline:
            raise StateError(
                f"adapter {adapter} is busy with a batch and has not accepted the request",
                "See its last error in pgcdc status. Or stop the pipeline and run this again: then it takes "
                "effect before any batch",
            )
        time.sleep(0.05)


def _check_keyed(progress: Progress) -> None:
    if not progress.is_keyed:
        raise ConfigError(
            f"adapter {progress.name} keeps no copies of tables",
            "Deliver the rows to all adapters instead: pgcdc resync --table without --adapter",
        )
