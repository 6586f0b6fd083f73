"""From what the user asked for to a slot that can be read: checks first, then publication, then slot, then identity.

A refusal comes before the first change. What fails later (a slot that cannot be created, say) leaves nothing behind that was
not there before: what was created on the way is removed again. But publications of ours that existed already and were
altered for the tables wanted now stay as altered; the next start alters them as it needs. Only one process at a time
prepares a state directory.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pgcdc.core.errors import ConfigError, GapError, SourceError, StateError
from pgcdc.core.failpoint import hit
from pgcdc.core.state import Identity, Lock, StateDir, check_identity
from pgcdc.postgres.database import Connection, connect
from pgcdc.postgres.lsn import format_lsn
from pgcdc.postgres.selection import Selection
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.postgres.setup.fingerprint import (
    Fingerprint,
    Narrowed,
    check_unchanged,
    forget_dropped,
    read_fingerprint,
)
from pgcdc.source.postgres.setup.preflight import ServerInfo, check
from pgcdc.source.postgres.setup.publications import PublicationInfo, drop_ours, ensure, pair_of, use_existing
from pgcdc.source.postgres.setup.slots import OpenTransaction, check_not_ahead, create_slot, drop_slot, get_slot
from pgcdc.source.postgres.snapshot.held import Hold, hold_for_long, let_all_go
from pgcdc.source.postgres.snapshot.plan import PLAN_FILE, begin_plan
from pgcdc.source.postgres.snapshot.planning import check_readable, request_all
from pgcdc.source.postgres.snapshot.signals import drop_signal_table, ensure_signal_table
from pgcdc.source.postgres.toast.identity_rules import check_cacheable, check_full
from pgcdc.source.postgres.wire.binary.columns import check_columns
from pgcdc.spool.consumers import Consumers, is_side_lane

__all__ = [
    "Prepared",
    "check_begin",
    "check_known",
    "check_others",
    "check_publications",
    "check_rejoin",
    "drop_publications",
    "follow_tables",
    "make_publications",
    "prepare",
    "publication_names",
]

LOCK_TIMEOUT_S = 120.0
"""How long we wait for another process that prepares the same state directory."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A source that can be read."""

    identity: Identity
    publications: tuple[PublicationInfo, ...]
    left_out: tuple[str, ...]
    """Tables that our publications had before and have no more: to be said."""
    created_publications: tuple[str, ...]
    """Publications that did not exist before (a trial drops them again)."""
    is_new: bool
    """Slot and state directory were created just now."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the publications."""
        return tuple(publication.name for publication in self.publications)

    @property
    def changed(self) -> list[str]:
        """What we have changed in our publications besides their tables: to be said."""
        return [change for publication in self.publications for change in publication.changed]

    @property
    def inserts_only(self) -> list[str]:
        """Tables whose updates and deletes do not reach us, because they have no replica identity."""
        return [table for publication in self.publications for table in publication.inserts_only]


def prepare(
    options: PostgresOptions,
    state: StateDir,
    *,
    consumer: str = "",
    on_wait: Callable[[list[OpenTransaction]], None] | None = None,
    is_resync: bool = False,
) -> Prepared:
    """Check server and state directory, create what is missing. Raises with advice, and then nothing new is left behind.

    `consumer` is who asks: it may leave out tables that it does not want any more, but not those of others. Only
    `pgcdc resync` itself (`is_resync`) may begin in a directory that it has not finished with.
    """
    options.check()
    lock = Lock(state.identity_lock)
    try:
        with state.claim(lock, LOCK_TIMEOUT_S) as taken:
            if not taken:
                raise StateError(f"another process prepares {state.path}", "Wait for it, or use another --state-dir")
            if not is_resync:
                state.check_whole()
            check_others(options, state, consumer)
            return _prepare(options, state, on_wait)
    finally:
        lock.release()


def check_others(options: PostgresOptions, state: StateDir, consumer: str) -> None:
    """Tables that other consumers were promised stay captured until these are forgotten."""
    known = state.identity()
    if known is None or known.asked is None or options.uses_existing:
        return
    names = Consumers(state.consumers_file).names()
    others = [name for name in names if name != consumer and not is_side_lane(name)]
    asked = Selection.from_json(known.asked)
    if others and not options.selection.covers(asked):
        said = ", ".join(f"{name}={value}" for name, value in known.asked.items() if value)
        raise ConfigError(
            f"slot {known.slot!r} captures {said} for {', '.join(others)} as well: they would lose what is left out",
            "Name all of it; or use another slot and state directory; or forget them first: "
            f"pgcdc consumer forget NAME --state-dir {state.path}",
        )


def check_known(options: PostgresOptions, state: StateDir, server: ServerInfo) -> Identity | None:
    """Who the state directory belongs to, if slot and server are the ones it knows. Raises with advice if not."""
    if server.slot is not None and not options.temporary_slot:
        options.check_slot(options.slot_name, server.slot.two_phase)
    check_not_taken(options, state, server)
    known = state.identity()
    if known is not None:
        check_identity(
            known,
            system_identifier=server.system_identifier,
            timeline=server.timeline,
            database=server.database,
            slot=options.slot_name,
        )
    return known


def _prepare(
    options: PostgresOptions,
    state: StateDir,
    on_wait: Callable[[list[OpenTransaction]], None] | None,
) -> Prepared:
    server = check(options.db, options.slot_name)
    options.check_server(server.version_num)
    known = check_known(options, state, server)
    # Every refusal comes before the first change: a refused start must not touch what a running pipeline uses.
    began = known is not None and known.created_lsn > 0
    with contextlib.ExitStack() as undo, connect(options.db, may_retry=False) as sql:
        names = publication_names(options, known if began else None)
        existing = [item["name"] for item in read_fingerprint(sql, names)]
        before = {table for name in existing for table in use_existing(sql, name, slot=options.slot_name).tables}
        if known is not None and began:
            check_rejoin(options, state, known, server)
            known = check_publications(sql, options, known, names)
            _prepare_signals(sql, options, names, undo)
            publications, identity = _bring_up_to_date(sql, options, state, known)
        else:
            check_begin(options, state, server)
            _prepare_signals(sql, options, names, undo)
            publications = make_publications(sql, options, names)
        created = tuple(info.name for info in publications if info.name not in existing)
        if not began and created:
            undo.callback(drop_publications, options, created)
        if not began:
            if options.effective_snapshot_mode != "never":
                check_readable(sql, names)
            identity = _begin(options, state, server, read_fingerprint(sql, names), undo, on_wait)
        elif options.effective_snapshot_mode == "always":
            request_all(sql, state, names)
        undo.pop_all()
    left = before - {table for publication in publications for table in publication.tables}
    return Prepared(identity, publications, tuple(sorted(left)), created, not began)


def _prepare_signals(
    sql: Connection, options: PostgresOptions, names: tuple[str, ...], undo: contextlib.ExitStack
) -> None:
    if options.incremental_snapshot and ensure_signal_table(
        sql, options.signal_table, names[0] if options.uses_existing else ""
    ):
        undo.callback(drop_signal_table, options.db, options.signal_table)


def check_not_taken(options: PostgresOptions, state: StateDir, server: ServerInfo) -> None:
    """Say at once if somebody else reads this slot; our own capture, or its dying walsender, is no reason."""
    if server.slot is None or not server.slot.active:
        return
    if options.temporary_slot:
        raise SourceError(f"slot {options.slot_name!r} is in use", "Choose another --slot-name for the temporary slot")
    known = state.identity()
    with connect(options.db, may_retry=False) as sql:
        row = sql.execute(
            "SELECT application_name FROM pg_stat_activity WHERE pid = %s", [server.slot.active_pid]
        ).fetchone()
    if row is not None and (known is None or row[0] != f"pgcdc {known.instance}"):
        raise SourceError(
            f"slot {options.slot_name!r} is in use by process {server.slot.active_pid} of the server ({row[0]})",
            "Another consumer reads this slot. Stop it, or use another --slot-name",
        )


def publication_names(options: PostgresOptions, known: Identity | None) -> tuple[str, ...]:
    """The publications to use: a pipeline that ran before stays with its own."""
    used = tuple(item["name"] for item in known.publications) if known else ()
    if options.uses_existing:
        assert options.publication is not None
        names: tuple[str, ...] = (options.publication,)
    elif options.publication is None and used and used == pair_of(used[0]):
        return used
    else:
        names = pair_of(options.publication or options.slot_name)
    if used and names != used:
        raise GapError(
            f"this state directory belongs to publication {used[0]}, not to {names[0]}",
            f"Give --publication {used[0]}, or start with a new slot and a new --state-dir",
        )
    return names


def make_publications(
    sql: Connection,
    options: PostgresOptions,
    names: tuple[str, ...],
    before_commit: Callable[[Fingerprint], None] = lambda made: None,
    review: bool = True,
) -> tuple[PublicationInfo, ...]:
    """Create our publications or bring them up to what is wanted, or read the user's; and check what they hold."""

    def check() -> None:
        if options.binary and review:
            check_columns(sql, names)
        if options.effective_toast == "full" and review:
            check_full(sql, names)
        if options.effective_toast == "cache" and review:
            check_cacheable(sql, names)

    if options.uses_existing:
        info = use_existing(sql, names[0], slot=options.slot_name)
        check()
        return (info,)
    return ensure(
        sql,
        names[0],
        options.selection,
        slot=options.slot_name,
        review=review,
        check=check,
        before_commit=before_commit,
    )


def check_publications(sql: Connection, options: PostgresOptions, known: Identity, names: tuple[str, ...]) -> Identity:
    """Refuse publications that somebody narrowed since we looked last, unless the user says that this was meant.

    What was accepted is written down later, when nothing else is refused.
    """
    try:
        check_unchanged(sql, known.publications, known.planned, is_open=known.is_open)
    except Narrowed:
        if not options.accept_publication:
            raise
        known = replace(known, publications=read_fingerprint(sql, names), planned=None)
    return known


def _bring_up_to_date(
    sql: Connection, options: PostgresOptions, state: StateDir, known: Identity, *, review: bool = True
) -> tuple[tuple[PublicationInfo, ...], Identity]:
    """Change our publications to what is wanted now, and remember them as they are then.

    The identity says durably what we are about to make before that becomes visible: a crash between the two looks
    neither like a change by somebody else, nor hides one.
    """
    expected = check_unchanged(sql, known.publications, known.planned, is_open=known.is_open)
    if not options.uses_existing:
        expected = forget_dropped(expected)

    def plan(made: Fingerprint) -> None:
        nonlocal expected
        state.save_identity(replace(known, publications=expected, planned=made))
        expected = made

    names = tuple(item["name"] for item in known.publications)
    infos = make_publications(sql, options, names, plan, review)
    hit("prepare.altered")
    now = check_unchanged(sql, expected, is_open=options.selection.is_open)
    updated = replace(known, publications=now, planned=None, asked=options.selection.to_json())
    if updated != state.identity():
        state.save_identity(updated)
    return infos, updated


def follow_tables(options: PostgresOptions, state: StateDir) -> tuple[PublicationInfo, ...]:
    """Bring our publications up to date with the tables that exist now (--all-tables, --schemas)."""
    lock = Lock(state.identity_lock)
    if lock.acquire(timeout_s=2.0) is None:
        raise StateError(f"another process prepares {state.path}", "It is tried again")
    try:
        known = state.identity()
        assert known is not None
        with connect(options.db) as sql:
            sql.execute("SET lock_timeout = '2s'")  # the pipeline must not wait behind a VACUUM FULL
            return _bring_up_to_date(sql, options, state, known, review=False)[0]
    finally:
        lock.release()


def drop_publications(options: PostgresOptions, names: Sequence[str]) -> None:
    """Drop publications that we have created and that nobody needs; one that cannot be dropped stays."""
    with contextlib.suppress(SourceError), connect(options.db, may_retry=False) as sql:
        drop_ours(sql, names, slot=options.slot_name)


def check_rejoin(options: PostgresOptions, state: StateDir, known: Identity, server: ServerInfo) -> None:
    """The pipeline ran before: slot and publications must be as we left them."""
    if options.temporary_slot:
        raise ConfigError(
            f"the state directory {state.path} belongs to the persistent slot {known.slot!r}",
            "Use another --state-dir with --temporary-slot",
        )
    if server.slot is None:
        raise GapError(
            f"slot {options.slot_name!r} does not exist any more: somebody dropped it",
            "Changes since then are gone. Bring the sinks back to the source: pgcdc resync",
        )
    consumers = Consumers(state.consumers_file)
    check_not_ahead(server.slot, consumers.confirmed_lsn)


def check_begin(options: PostgresOptions, state: StateDir, server: ServerInfo) -> None:
    """A slot that exists beside a state directory that is new: somebody has to say what that means."""
    if server.slot is not None and state.identity() is None and options.start_from != "slot":
        raise GapError(
            f"slot {options.slot_name!r} exists (it stands at {format_lsn(server.slot.confirmed_flush_lsn or 0)}), but the "
            f"state directory {state.path} is new: what was delivered is not known",
            "If the state directory was lost, restore it. To deliver everything that the slot still has, give "
            "--start-from slot. Otherwise use another --slot-name, or drop the slot: pgcdc slot drop",
        )


def _begin(
    options: PostgresOptions,
    state: StateDir,
    server: ServerInfo,
    publications: Fingerprint,
    undo: contextlib.ExitStack,
    on_wait: Callable[[list[OpenTransaction]], None] | None,
) -> Identity:
    """The first start. The identity is written before the slot is made: after a crash between, the slot is known as ours."""
    started = state.identity()
    identity = Identity(
        system_identifier=server.system_identifier,
        timeline=server.timeline,
        database=server.database,
        slot=options.slot_name,
        instance=started.instance if started else secrets.token_hex(8),
        publications=publications,
        created_lsn=0,
        asked=options.selection.to_json(),
    )
    if started is None:
        undo.callback(state.identity_file.unlink, missing_ok=True)
    state.save_identity(identity)
    let_all_go(state.snapshot)  # of an attempt that was killed
    (state.snapshot / PLAN_FILE).unlink(missing_ok=True)
    hold: Hold | None = None
    if options.temporary_slot:
        lsn = 1  # the capture creates the slot on its own connection and begins there
    elif server.slot is not None:
        lsn = server.slot.confirmed_flush_lsn or 0
    else:
        lsn, hold = _create_slot(options, state, undo, on_wait)
    hit("prepare.created")
    if options.effective_snapshot_mode != "never":
        begin_plan(state.snapshot, lsn, hold)
    if not options.temporary_slot:
        Consumers(state.consumers_file).begin(lsn)
    identity = replace(identity, created_lsn=lsn)
    state.save_identity(identity)
    return identity


def _create_slot(
    options: PostgresOptions,
    state: StateDir,
    undo: contextlib.ExitStack,
    on_wait: Callable[[list[OpenTransaction]], None] | None,
) -> tuple[int, Hold | None]:
    exported: list[str] | None = [] if options.effective_snapshot_mode != "never" else None
    with (
        connect(options.db, replication=True, may_retry=False) as replication,
        connect(options.db, may_retry=False) as sql,
    ):
        # Cleans up after itself if it fails.
        create_slot(
            replication,
            options.slot_name,
            two_phase=options.two_phase,
            monitor=sql,
            on_wait=on_wait,
            exported=exported,
        )
        undo.callback(_remove_slot, options.db, options.slot_name)
        hold = None
        if exported:  # while the connection of the slot is open
            limit_s = options.snapshot_hold_limit
            undo.callback(let_all_go, state.snapshot)
            hold = hold_for_long(options.db, state, 1, limit_s=limit_s, exported=exported[0])
        slot = get_slot(sql, options.slot_name)
        assert slot is not None
        return slot.confirmed_flush_lsn or 0, hold


def _remove_slot(url: str, name: str) -> None:
    with contextlib.suppress(SourceError), connect(url, may_retry=False) as sql:
        if get_slot(sql, name) is not None:
            drop_slot(sql, name)
