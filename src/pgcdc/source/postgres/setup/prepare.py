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
from dataclasses import asdict, dataclass, replace
from functools import partial

from pgcdc.core.errors import GapError, SourceError, StateError
from pgcdc.core.failpoint import hit
from pgcdc.core.state import Identity, Lock, StateDir
from pgcdc.postgres.database import Connection, connect, explain_errors
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.postgres.setup.fingerprint import (
    Fingerprint,
    Narrowed,
    SlotDetails,
    check_unchanged,
    forget_dropped,
    read_fingerprint,
)
from pgcdc.source.postgres.setup.preflight import (
    ServerInfo,
    check,
    check_begin,
    check_known,
    check_others,
    check_rejoin,
)
from pgcdc.source.postgres.setup.publications import PublicationInfo, drop_ours, ensure, pair_of, use_existing
from pgcdc.source.postgres.setup.slots import OpenTransaction, create_slot, drop_slot, get_slot
from pgcdc.source.postgres.setup.tables import PublishedTable, read_published
from pgcdc.source.postgres.snapshot.asking import check_readable, drop_signal_table, ensure_signal_table, request_all
from pgcdc.source.postgres.snapshot.held import Hold, hold_for_long, let_all_go
from pgcdc.source.postgres.snapshot.plan import PLAN_FILE, begin_plan
from pgcdc.source.postgres.toast.identity_rules import check_cacheable, check_full
from pgcdc.source.postgres.wire.binary.decoder import check_columns
from pgcdc.source.protocol import Prepared
from pgcdc.spool.consumers import Consumers

LOCK_TIMEOUT_S = 120.0
"""How long we wait for another process that prepares the same state directory."""


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


def _prepare(
    options: PostgresOptions,
    state: StateDir,
    on_wait: Callable[[list[OpenTransaction]], None] | None,
) -> Prepared:
    server = check(options.db, options.slot_name)
    options.check_server(server.version_num)
    known = check_known(options, state, server)
    # Every refusal comes before the first change: a refused start must not touch what a running pipeline uses.
    began = known is not None and known.created > 0
    with contextlib.ExitStack() as undo, connect(options.db, may_retry=False) as sql:
        names = _publication_names(options, known if began else None)
        existing = [item["name"] for item in read_fingerprint(sql, names)]
        before = {table for name in existing for table in use_existing(sql, name, slot=options.slot_name).tables}
        if known is not None and began:
            check_rejoin(options, state, known, server)
            known = _check_publications(sql, options, known, names)
            _prepare_signals(sql, options, names, undo)
            publications, identity = _bring_up_to_date(sql, options, state, known)
        else:
            check_begin(options, state, server)
            _prepare_signals(sql, options, names, undo)
            publications = _make_publications(sql, options, names)
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
    tables = frozenset(table for one in publications for table in one.tables)
    notes = (
        *(f"{text}; this holds for what is written from now on" for one in publications for text in one.changed),
        *(f"table {table} is no longer captured: it was left out of --tables" for table in sorted(before - tables)),
        *(
            f"table {table} has no primary key or other replica identity: only its inserts and truncates are captured"
            for one in publications
            for table in one.inserts_only
        ),
    )
    return Prepared(identity, tables, notes, partial(drop_publications, options, created))


def _prepare_signals(
    sql: Connection, options: PostgresOptions, names: tuple[str, ...], undo: contextlib.ExitStack
) -> None:
    if options.incremental_snapshot and ensure_signal_table(
        sql, options.signal_table, names[0] if options.uses_existing else ""
    ):
        undo.callback(drop_signal_table, options.db, options.signal_table)


def _publication_names(options: PostgresOptions, known: Identity | None) -> tuple[str, ...]:
    """The publications to use: a pipeline that ran before stays with its own."""
    used = SlotDetails.of(known).names if known else ()
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


def _make_publications(
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


def _check_publications(sql: Connection, options: PostgresOptions, known: Identity, names: tuple[str, ...]) -> Identity:
    """Refuse publications that somebody narrowed since we looked last, unless the user says that this was meant.

    What was accepted is written down later, when nothing else is refused.
    """
    details = SlotDetails.of(known)
    try:
        check_unchanged(sql, details.publications, details.planned, is_open=details.is_open)
    except Narrowed:
        if not options.accept_publication:
            raise
        known = details.put_into(known, publications=read_fingerprint(sql, names), planned=None)
    return known


def _bring_up_to_date(
    sql: Connection, options: PostgresOptions, state: StateDir, known: Identity, *, review: bool = True
) -> tuple[tuple[PublicationInfo, ...], Identity]:
    """Change our publications to what is wanted now, and remember them as they are then.

    The identity says durably what we are about to make before that becomes visible: a crash between the two looks
    neither like a change by somebody else, nor hides one.
    """
    details = SlotDetails.of(known)
    expected = check_unchanged(sql, details.publications, details.planned, is_open=details.is_open)
    if not options.uses_existing:
        expected = forget_dropped(expected)

    def plan(made: Fingerprint) -> None:
        nonlocal expected
        state.save_identity(details.put_into(known, publications=expected, planned=made))
        expected = made

    infos = _make_publications(sql, options, details.names, plan, review)
    hit("prepare.altered")
    now = check_unchanged(sql, expected, is_open=options.selection.is_open)
    updated = details.put_into(known, publications=now, planned=None, asked=options.selection.to_json())
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
    if not names:
        return
    with contextlib.suppress(SourceError), connect(options.db, may_retry=False) as sql:
        drop_ours(sql, names, slot=options.slot_name)


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
    details = SlotDetails(server.timeline, publications, asked=options.selection.to_json())
    identity = Identity(
        kind=options.kind,
        system=server.system_identifier,
        database=server.database,
        stream=options.slot_name,
        instance=started.instance if started else secrets.token_hex(8),
        created=0,
        details=asdict(details),
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
    identity = replace(identity, created=lsn)
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


# --- tried out: the same checks, and the publications made in a transaction that is rolled back


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What there would be."""

    publications: tuple[PublicationInfo, ...]
    is_new: bool
    unreadable: SourceError | None
    """Why the rows that are there could not be read, if they are wanted."""
    published: tuple[PublishedTable, ...] = ()
    """The tables with the columns that would be captured."""


@explain_errors("try the publications")
def rehearse(options: PostgresOptions, state: StateDir, *, reads_rows: bool = True) -> Rehearsal:
    """Make the publications (and the table of signals) as a start would, see what they hold, and take all of it back."""
    known = state.identity()
    began = known is not None and known.created > 0
    with connect(options.db, may_retry=False) as sql, sql.transaction(force_rollback=True):
        sql.execute("SET LOCAL lock_timeout = '5s'")  # who alters a captured table at this moment is not waited for
        names = _publication_names(options, known if began else None)
        if began:
            assert known is not None
            _check_publications(sql, options, known, names)
        if options.incremental_snapshot:
            ensure_signal_table(sql, options.signal_table, names[0] if options.uses_existing else "")
        publications = _make_publications(sql, options, names)
        unreadable = None
        if not began and reads_rows and options.effective_snapshot_mode != "never":
            try:
                check_readable(sql, names)
            except SourceError as error:
                unreadable = error
        published = tuple(read_published(sql, names))
    return Rehearsal(publications, not began, unreadable, published)
