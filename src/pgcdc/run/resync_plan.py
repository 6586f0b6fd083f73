"""What a resync is going to do and what is lost by it, and what must not be. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgcdc.core.errors import ConfigError, GapError, StateError
from pgcdc.core.state import Identity, StateDir, read_json
from pgcdc.postgres.database import Connection, connect, name_table, quote_qualified, split_table
from pgcdc.postgres.lsn import format_lsn
from pgcdc.run.chains import why_unreadable
from pgcdc.sink.contract import Progress
from pgcdc.sink.file import FileOptions, FileSink
from pgcdc.sink.folder import FolderSink
from pgcdc.sink.runner import Runner
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.postgres.setup.fingerprint import SlotDetails, check_identity
from pgcdc.source.postgres.setup.preflight import check, identify
from pgcdc.source.postgres.setup.slots import check_not_ahead, get_slot
from pgcdc.source.postgres.setup.tables import PublishedTable, read_published
from pgcdc.spool.consumers import MAIN, Consumers, is_side_lane

WrittenFile = FileSink | FolderSink

_UNREADABLE = {"rows": "typed rows", "zset": "typed rows", "other": "lines of another form"}
_NOT_DELETED = "deletes of rows that vanished are not sent (with --truncate, a TRUNCATE comes before the rows)"


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

    def connect(self) -> Connection:
        """To the source."""
        return connect(self.url, application_name="pgcdc resync", may_retry=False)


class Plan:
    """What is known of the slot, the server and the sinks, and what is to be done."""

    def __init__(self, options: ResyncOptions, state: StateDir) -> None:
        self.options = options
        self.state = state
        self.note: dict[str, Any] = read_json(state.resync_note) or {}
        """Of a resync that has thrown things away and was interrupted: there is nothing left to decide."""
        known = Identity(**self.note["identity"]) if self.note else state.identity()
        if known is None or (not self.note and known.created == 0):
            raise StateError(f"{state.path} has no slot yet", "Give --state-dir, or start: pgcdc listen")
        self.identity = known
        self.two_phase: bool = options.two_phase or self.note.get("two_phase", False)

    def decide(self) -> list[str]:
        """What is going to happen and what is lost, one line each. Refuses what must not be."""
        if not self.note:
            return list(self._decide())
        if self.options.read_again:
            raise StateError(f"a resync of {self.state.path} is not finished", "Run it again, without --table")
        return [f"goes on with the resync of slot {self.identity.stream} that was begun and not finished"]

    # --- what it works with

    @property
    def truncates(self) -> bool:
        """Whether tables are emptied at the sinks instead of compared."""
        return bool(self.note.get("truncate", self.options.truncate))

    def source_options(self) -> PostgresOptions:
        """What was captured before, through a slot of the same name."""
        known = self.identity
        options = PostgresOptions(db=self.options.url, slot_name=known.stream, two_phase=self.two_phase)
        tables = self.options.tables or tuple(self.note.get("tables", ()))
        options = options.but(tables=tables) if tables else SlotDetails.of(known).as_before(options)
        return options.but(publication=SlotDetails.of(known).names[0], snapshot_mode="initial")

    def published(self) -> list[PublishedTable]:
        """The captured tables, as they are now."""
        with self.options.connect() as sql:
            return read_published(sql, SlotDetails.of(self.identity).names)

    def chosen(self) -> list[PublishedTable]:
        """The tables of --table."""
        published = {(one.relation.namespace, one.relation.name): one for one in self.published()}
        chosen = []
        for name in dict.fromkeys(map(split_table, self.options.read_again)):
            table = published.get(name)
            if table is None:
                known = ", ".join(one.title for one in published.values()) or "none"
                raise ConfigError(
                    f"table {name_table(*name)} is not captured through slot {self.identity.stream}", f"Known: {known}"
                )
            if not table.key:
                raise ConfigError(
                    f"table {table.title} has no key: its rows cannot be read while it changes",
                    "Give it a primary key; or begin again with all tables: pgcdc resync --new-slot",
                )
            chosen.append(table)
        return chosen

    def acks(self) -> list[Progress]:
        """Of all adapters."""
        return [Progress(self.state.acks, path.stem) for path in sorted(self.state.acks.glob("*.json"))]

    def files(self) -> list[tuple[WrittenFile, str]]:
        """What adapters have written to files, and why that cannot be read back; "" if it can."""
        found: list[tuple[WrittenFile, str]] = []
        for ack in self.acks():
            if "path" in ack.detail:
                sink = FileOptions(path=ack.detail["path"] + "/" * ("parts" in ack.detail)).make()
                sink.bind(ack)
                found.append((sink, self._why_unreadable(sink)))
        return found

    def _why_unreadable(self, sink: WrittenFile) -> str:
        if not sink.is_complete:
            return "files that were removed (max_files)"
        keys = [column for one in self.published() for column in one.key]
        return _UNREADABLE.get(sink.kind) or why_unreadable(self.state, sink.name, keys)

    # --- the decision

    def _decide(self) -> Iterator[str]:
        slot, other, lost = self._look()
        options, confirmed = self.options, Consumers(self.state.consumers_file)
        if options.read_again:
            yield from self._decide_tables(lost or other)
            return
        if other and not options.new_slot:
            raise GapError(other, "Check --db. If the sinks are to follow this database from now on, give --new-slot")
        if not lost and not options.new_slot:
            raise ConfigError(
                f"slot {self.identity.stream} is as it was left: nothing is lost",
                "Start pgcdc listen. To read a table again give --table; to give the slot up nevertheless, --new-slot",
            )
        self._check_selection()
        yield other or lost or f"slot {self.identity.stream} is given up, as you ask"
        if slot:
            yield f"slot {self.identity.stream} is dropped: what it holds is lost"
        yield (
            f"changes after {format_lsn(confirmed.confirmed_lsn)} and before the new slot are not delivered one by one: "
            "every table is delivered as it is now, each row as a SNAPSHOT, and the changes after that"
        )
        if other:
            yield "positions of events are those of this server: they can be smaller than those before"
        yield from self._decide_sinks()
        for name in confirmed.names():
            if name != MAIN and not is_side_lane(name):
                yield f"the query of consumer {name} cannot go on: begin it again, with a new checkpoint and target"

    def _look(self) -> tuple[bool, str, str]:
        """Whether the slot is there, why this is another server than the one we know, and why the slot cannot be read on."""
        known, url, lost, other = self.identity, self.options.url, "", ""
        with self.options.connect() as sql:
            slot = get_slot(sql, known.stream)
        try:
            server = check(url, known.stream)
            found = (server.system_identifier, server.timeline, server.database)
            if slot is not None:
                check_not_ahead(slot, Consumers(self.state.consumers_file).confirmed_lsn)
        except GapError as error:
            lost = error.message
            with connect(url, replication=True, application_name="pgcdc resync", may_retry=False) as replication:
                found = (*identify(replication), replication.info.dbname)
        if slot is None:
            lost = lost or f"slot {known.stream} no longer exists"
        self.two_phase = self.two_phase or (slot is not None and slot.two_phase)
        try:
            identifier, timeline, database = found
            check_identity(
                known, system=identifier, timeline=timeline, database=database, slot=known.stream
            )  # fmt: skip
        except GapError as error:
            other = error.message
        return slot is not None, other, lost

    def _check_selection(self) -> None:
        """What cannot be captured is refused before anything is thrown away."""
        options = self.source_options()
        if options.tables and not any((SlotDetails.of(self.identity).asked or {"tables": True}).values()):
            raise ConfigError(f"publication {options.publication} is yours", "Alter it instead of giving --tables")
        with self.options.connect() as sql:
            for table in options.tables:
                name = quote_qualified(*split_table(table))
                if sql.execute("SELECT to_regclass(%s)", [name]).fetchone() == (None,):
                    raise ConfigError(
                        f"table {table} no longer exists", "Name what to capture from now on: --tables a,b"
                    )

    def _decide_sinks(self) -> Iterator[str]:
        for sink, reason in self.files():
            Runner(sink, self.state.acks, sink.name).check()
            where = f"adapter {sink.name} goes on in {sink.path}"
            if self.truncates:
                yield f"{where}: a TRUNCATE of every table comes before its rows"
            elif sink.kind == "zset":
                raise ConfigError(
                    f"{sink.path} has the rows of a Z-set, in which a row must not come again",
                    "Add --truncate (and --truncate mark to pgcdc listen), or begin with a new slot, --state-dir and file",
                )
            elif reason:
                yield f"{where}, but {reason} cannot be read back: {_NOT_DELETED}"
            else:
                yield f"{where}; rows that the source no longer has are deleted by events"
        if not self.truncates:
            yield from (f"adapter {name} cannot be read back: {_NOT_DELETED}" for name in self._blind())
            for table in self.published():
                if not table.key:
                    yield f"table {table.title} has no key: a TRUNCATE of it comes before its rows"

    def _decide_tables(self, lost: str) -> Iterator[str]:
        if self.options.new_slot or self.options.truncate or self.options.tables:
            raise ConfigError("--table reads tables again through the slot that there is", "Give it alone")
        if lost:
            raise GapError(lost, "All tables need it: pgcdc resync without --table")
        for table in self.chosen():
            yield f"table {table.title} is read again while pgcdc listen runs, each row as a SNAPSHOT"
        for sink, reason in self.files():
            if reason:
                yield f"{reason} in {sink.path} cannot be read back: deletes of rows that vanished are not sent"
        for name in self._blind():
            yield f"adapter {name} cannot be read back: deletes of rows that vanished are not sent for it"

    def _blind(self) -> list[str]:
        """The adapters whose targets nobody reads back: all but files."""
        return [one.name for one in self.acks() if "path" not in one.detail]
