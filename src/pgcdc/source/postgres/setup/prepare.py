"""From the user's settings to a readable slot: checks first, then publication, slot, identity.

A refusal comes before the first change. A later failure (for example, the slot cannot be created) removes whatever was
created on the way. Only changes to our existing publications stay: they were altered for the wanted tables, and the
next start alters them as needed. Only one process at a time prepares a state directory.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

from pgcdc.core.errors import ConfigError, GapError, SourceError, StateError
from pgcdc.core.failpoint import hit
from pgcdc.core.state import Identity, Lock, StateDir
from pgcdc.postgres.database import Connection, connect, explain_errors
from pgcdc.postgres.lsn import format_lsn
from pgcdc.source.postgres.options import PostgresOptions, pair_of
from pgcdc.source.postgres.setup.fingerprint import (
    Fingerprint,
    Narrowed,
    SlotDetails,
    check_identity,
    check_unchanged,
    forget_dropped,
    read_fingerprint,
)
from pgcdc.source.postgres.setup.publications import PublicationInfo, drop_ours, ensure, use_existing
from pgcdc.source.postgres.setup.slots import (
    ServerInfo,
    check,
    check_not_ahead,
    create_slot,
    drop_slot,
    get_slot,
    slot_gone,
)
from pgcdc.source.postgres.setup.tables import PublishedTable, read_published
from pgcdc.source.postgres.snapshot.asking import check_readable, drop_signal_table, ensure_signal_table, request_all
from pgcdc.source.postgres.snapshot.held import Hold, hold_for_long, let_go
from pgcdc.source.postgres.snapshot.requests import RequestQueue
from pgcdc.source.postgres.toast.identity_rules import check_cacheable, check_full
from pgcdc.source.postgres.wire.binary.decoder import check_columns
from pgcdc.source.protocol import Prepared
from pgcdc.spool.consumers import Consumers, is_side_lane

Say = Callable[[str], object]

LOCK_TIMEOUT_S = 120.0  # How long to wait for another process that is preparing the same state directory


def prepare(
    options: PostgresOptions,
    state: StateDir,
    *,
    consumer: str = "",
    say: Say = lambda text: None,
    is_resync: bool = False,
) -> Prepared:
    """Check server and state directory, and create what is missing. Raises with advice and then leaves nothing new
    behind. `consumer` may drop tables that it no longer wants, but not those of others. Only `pgcdc resync`
    (`is_resync`) may start in a directory with an unfinished resync."""
    options.check()
    lock = Lock(state.identity_lock)
    try:
        with state.claim(lock, LOCK_TIMEOUT_S) as taken:
            if not taken:
                raise StateError(
                    f"another process is preparing {state.path}",
                    "Wait until it has finished, or use another --state-dir",
                )
            if not is_resync:
                state.check_whole()
            check_others(options, state, consumer)
            server = check(options.db, options.slot_name)
            options.check_server(server.version_num)
            return _prepare(options, state, server, check_slot(options, state, server), say)
    finally:
        lock.release()


def _prepare(
    options: PostgresOptions, state: StateDir, server: ServerInfo, known: Identity | None, say: Say
) -> Prepared:
    # Every refusal comes before the first change: a refused start must not touch anything that a running pipeline uses.
    with contextlib.ExitStack() as undo, connect(options.db, may_retry=False) as sql:
        names = _publication_names(options, known)
        existing = [item["name"] for item in read_fingerprint(sql, names)]
        before = {table for name in existing for table in use_existing(sql, name, slot=options.slot_name).tables}
        if known is not None:
            known = _check_publications(sql, options, known, names)
        if _ensure_signals(sql, options, names):
            undo.callback(drop_signal_table, options.db, options.signal_table)
        if known is not None:
            publications, identity = _bring_up_to_date(sql, options, state, known)
            if options.effective_snapshot_mode == "always":
                request_all(sql, state, names)
        else:
            publications = _make_publications(sql, options, names)
        created = tuple(info.name for info in publications if info.name not in existing)
        if known is None:
            undo.callback(drop_publications, options, created)
            if options.effective_snapshot_mode != "never":
                check_readable(sql, names)
            identity = _begin(options, state, server, read_fingerprint(sql, names), undo, say)
        undo.pop_all()
    tables = frozenset(table for one in publications for table in one.tables)
    notes = (
        *(f"{text}; this applies to what is written from now on" for one in publications for text in one.changed),
        *(text for one in publications for text in one.kept),
        *(f"table {table} is no longer captured: it was removed from --tables" for table in sorted(before - tables)),
        *partly_captured(publications),
    )
    return Prepared(identity, tables, notes, partial(drop_publications, options, created))


# --- slot and state directory


def check_others(options: PostgresOptions, state: StateDir, consumer: str) -> None:
    """Refuse to drop tables of other consumers: they stay captured until those consumers are forgotten."""
    known = state.identity()
    if known is None:
        return
    details = SlotDetails.of(known)
    names = Consumers(state.consumers_file).names()
    others = [name for name in names if name != consumer and not is_side_lane(name)]
    if others and not options.uses_existing and not options.covers(details.selection):
        said = ", ".join(f"{name}={value}" for name, value in details.asked.items())
        raise ConfigError(
            f"slot {known.stream!r} also captures {said} for {', '.join(others)}, which would lose what is removed",
            "Name all of it; or use another slot and state directory; or forget them first: pgcdc consumer "
            f"forget NAME --state-dir {state.path}",
        )


def check_slot(options: PostgresOptions, state: StateDir, server: ServerInfo) -> Identity | None:
    """Raise unless slot, server and state directory belong together. Returns the identity if the pipeline has run
    before."""
    known, slot, name = state.identity(), server.slot, options.slot_name
    if slot is not None and not options.temporary_slot:
        options.check_slot(name, slot.two_phase)
    if slot is not None and slot.active:
        if options.temporary_slot:
            raise SourceError(f"slot {name!r} is in use", "Choose another --slot-name for the temporary slot")
        # Our own capture, or its dying walsender, is no reason to refuse.
        if slot.reader is not None and (known is None or slot.reader != f"pgcdc {known.instance}"):
            raise SourceError(
                f"slot {name!r} is in use by process {slot.active_pid} of the server ({slot.reader})",
                "Another consumer reads this slot. Stop it, or use another --slot-name",
            )
    if known is not None:
        check_identity(known, server.system_identifier, server.timeline, server.database, name)
    if known is not None and known.created > 0:
        if options.temporary_slot:
            raise ConfigError(
                f"the state directory {state.path} belongs to the persistent slot {known.stream!r}",
                "Use another --state-dir with --temporary-slot",
            )
        if slot is None:
            raise slot_gone(name)
        check_not_ahead(slot, Consumers(state.consumers_file).confirmed_lsn)
        return known
    if slot is not None and known is None and options.start_from != "slot":
        raise GapError(
            f"slot {name!r} exists (at {format_lsn(slot.confirmed_flush_lsn or 0)}), but the state directory "
            f"{state.path} is new: it is unknown what was delivered",
            "If the state directory was lost, restore it. To deliver everything that the slot still has, use "
            "--start-from slot. Otherwise use another --slot-name, or drop the slot: pgcdc slot drop",
        )
    return None


# --- publications


def _ensure_signals(sql: Connection, options: PostgresOptions, names: tuple[str, ...]) -> bool:
    """Create the signal table if wanted; returns whether it was created."""
    publication = names[0] if options.uses_existing else ""
    return options.incremental_snapshot and ensure_signal_table(sql, options.signal_table, publication)


def _publication_names(options: PostgresOptions, known: Identity | None) -> tuple[str, ...]:
    """The publications to use: a pipeline that has run before keeps its own."""
    used, names = SlotDetails.of(known).names if known else (), options.publications
    if options.publication is None and used and used == pair_of(used[0]):
        return used
    if used and names != used:
        raise GapError(
            f"this state directory belongs to publication {used[0]}, not to {names[0]}",
            f"Use --publication {used[0]}, or start with a new slot and a new --state-dir",
        )
    return names


def _make_publications(
    sql: Connection,
    options: PostgresOptions,
    names: tuple[str, ...],
    before_commit: Callable[[Fingerprint], None] = lambda made: None,
    review: bool = True,
) -> tuple[PublicationInfo, ...]:
    """Create or update our publications, or read the user's, and check their content."""

    def check() -> None:
        if options.binary and review:
            check_columns(sql, names)
        if options.effective_toast == "full" and review:
            check_full(sql, names)
        if options.effective_toast == "cache" and review:
            check_cacheable(sql, names)

    slot = options.slot_name
    if options.uses_existing:
        info = use_existing(sql, names[0], slot=slot)
        check()
        return (info,)
    return ensure(sql, names[0], options, slot=slot, review=review, check=check, before_commit=before_commit)


def _check_publications(sql: Connection, options: PostgresOptions, known: Identity, names: tuple[str, ...]) -> Identity:
    """Refuse publications that were narrowed since our last look, unless the user accepts it. The acceptance is
    recorded later, when every other check has passed."""
    details = SlotDetails.of(known)
    try:
        check_unchanged(sql, details.publications, details.planned, is_open=details.selection.is_open)
    except Narrowed:
        if not options.accept_publication:
            raise
        known = details.put_into(known, publications=read_fingerprint(sql, names), planned=None)
    return known


def _bring_up_to_date(
    sql: Connection, options: PostgresOptions, state: StateDir, known: Identity, *, review: bool = True
) -> tuple[tuple[PublicationInfo, ...], Identity]:
    """Make our publications match the settings, and remember the result. The identity durably records the plan before it
    becomes visible. So after a crash in between, the change is not mistaken for somebody else's and does not hide one."""
    details = SlotDetails.of(known)
    expected = check_unchanged(sql, details.publications, details.planned, is_open=details.selection.is_open)
    if not options.uses_existing:
        expected = forget_dropped(expected)

    def plan(made: Fingerprint) -> None:
        nonlocal expected
        state.save_identity(details.put_into(known, publications=expected, planned=made))
        expected = made

    infos = _make_publications(sql, options, details.names, plan, review)
    hit("prepare.altered")
    now = check_unchanged(sql, expected, is_open=options.is_open)
    updated = details.put_into(known, publications=now, planned=None, asked=options.to_json())
    if updated != state.identity():
        state.save_identity(updated)
    return infos, updated


def partly_captured(publications: Sequence[PublicationInfo]) -> tuple[str, ...]:
    """Notes for the user about tables that are captured only in part."""
    return tuple(
        f"table {table} has no primary key or other replica identity: only its inserts and truncates are captured"
        for one in publications
        for table in one.inserts_only
    )


def follow_tables(options: PostgresOptions, state: StateDir) -> tuple[PublicationInfo, ...]:
    """Add newly created tables to our publications (--all-tables, --schemas)."""
    lock = Lock(state.identity_lock)
    if lock.acquire(timeout_s=2.0) is None:
        raise StateError(f"another process is preparing {state.path}", "It is retried")
    try:
        known = state.identity()
        assert known is not None
        with connect(options.db) as sql:
            sql.execute("SET lock_timeout = '2s'")  # the pipeline must not queue behind a VACUUM FULL
            return _bring_up_to_date(sql, options, state, known, review=False)[0]
    finally:
        lock.release()


def drop_publications(options: PostgresOptions, names: Sequence[str]) -> None:
    """Drop our publications that are no longer needed; one that cannot be dropped stays."""
    if not names:
        return
    with contextlib.suppress(SourceError), connect(options.db, may_retry=False) as sql:
        drop_ours(sql, names, slot=options.slot_name)


# --- the slot


def _begin(
    options: PostgresOptions, state: StateDir, server: ServerInfo, publications: Fingerprint, undo: contextlib.ExitStack,
    say: Say,
) -> Identity:  # fmt: skip
    """The first start. The identity is written before the slot is created, so that after a crash the slot is known to
    be ours."""
    started = state.identity()
    details = SlotDetails(server.timeline, publications, options.to_json())
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
    let_go(state.snapshot)  # left by an attempt that was killed
    hold: Hold | None = None
    if options.temporary_slot:
        lsn = 1  # the capture creates the slot on its own connection and starts there
    elif server.slot is not None:
        lsn = server.slot.confirmed_flush_lsn or 0
    else:
        lsn, hold = _create_slot(options, state, undo, say)
    hit("prepare.created")
    RequestQueue(state.requests_file).begin_initial(lsn if options.effective_snapshot_mode != "never" else 0, hold)
    if not options.temporary_slot:
        Consumers(state.consumers_file).begin(lsn)
    identity = replace(identity, created=lsn)
    state.save_identity(identity)
    return identity


def _create_slot(
    options: PostgresOptions, state: StateDir, undo: contextlib.ExitStack, say: Say
) -> tuple[int, Hold | None]:
    url, name, two_phase = options.db, options.slot_name, options.two_phase
    exported: list[str] | None = [] if options.effective_snapshot_mode != "never" else None
    with connect(url, replication=True, may_retry=False) as replication, connect(url, may_retry=False) as sql:
        # create_slot cleans up after itself if it fails.
        lsn = create_slot(replication, name, two_phase=two_phase, monitor=sql, say=say, exported=exported)
        undo.callback(_remove_slot, url, name)
        if not exported:
            return lsn, None
        undo.callback(let_go, state.snapshot)
        # while the connection that created the slot is still open
        hold = hold_for_long(url, state, 1, limit_s=options.snapshot_hold_limit, exported=exported[0])
        return lsn, hold


def _remove_slot(url: str, name: str) -> None:
    with contextlib.suppress(SourceError), connect(url, may_retry=False) as sql:
        if get_slot(sql, name) is not None:
            drop_slot(sql, name)


# --- trial run: the same checks, and the publications created in a transaction that is rolled back


@explain_errors("try the publications")
def try_publications(
    options: PostgresOptions, state: StateDir, *, reads_rows: bool = False
) -> tuple[tuple[PublicationInfo, ...], list[PublishedTable], SourceError | None]:
    """Create the publications (and the signal table) as a start would, then roll back. Returns the publications, the
    tables with their captured columns, and with `reads_rows` why rows cannot be read."""
    known, unreadable = state.identity(), None
    if known is not None and known.created == 0:
        known = None
    with connect(options.db, may_retry=False) as sql, sql.transaction(force_rollback=True):
        sql.execute("SET LOCAL lock_timeout = '5s'")  # do not wait for somebody altering a captured table
        names = _publication_names(options, known)
        if known is not None:
            _check_publications(sql, options, known, names)
        _ensure_signals(sql, options, names)
        publications = _make_publications(sql, options, names)
        if reads_rows:
            try:
                check_readable(sql, names)
            except SourceError as error:
                unreadable = error
        return publications, read_published(sql, names), unreadable
