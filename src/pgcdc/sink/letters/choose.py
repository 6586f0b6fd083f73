"""Which store a configuration means, and that a table of dead letters is not captured itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from pgcdc.core.errors import ConfigError
from pgcdc.core.state import Identity, StateDir
from pgcdc.postgres.database import connect, explain_errors, name_table, parse_url, split_table
from pgcdc.sink.letters.file_store import FileDeadLetters
from pgcdc.sink.letters.pg_store import PgDeadLetters
from pgcdc.sink.letters.stores import DeadLetters, Dropped, StderrDeadLetters

__all__ = ["LetterSettings", "check_not_captured", "describe_store", "make_store", "name_pipeline"]


class LetterSettings(Protocol):
    """Where letters go. The names are those of the configuration."""

    @property
    def dlq(self) -> str:
        """file, pg_table, stderr or none."""

    @property
    def dlq_file(self) -> Path | None:
        """Of `file`; None: in the state directory."""

    @property
    def dlq_db(self) -> str:
        """Of `pg_table`; empty: the source's."""

    @property
    def dlq_table(self) -> str:
        """Of `pg_table`."""

    @property
    def db(self) -> str:
        """The source's database."""

    @property
    def publication(self) -> str | None:
        """What the source reads."""

    @property
    def temporary_slot(self) -> bool:
        """The state directory ends with the run."""

    @property
    def state_dir(self) -> Path:
        """The state directory."""


def make_store(config: LetterSettings, say: Callable[[str], None] = lambda text: None) -> DeadLetters:
    """The store; nothing is touched yet."""
    if config.dlq == "none":
        return Dropped(say)
    if config.dlq == "pg_table":
        return PgDeadLetters(config.dlq_db or config.db, config.dlq_table)
    if config.dlq == "stderr" or (config.temporary_slot and config.dlq_file is None):
        return StderrDeadLetters()  # the state directory of a temporary slot ends with it
    if config.dlq_file is not None:
        return FileDeadLetters(config.dlq_file)
    return FileDeadLetters(StateDir(config.state_dir).letters_file, makes_folder=True)


def name_pipeline(identity: Identity) -> str:
    """Under which name the letters of a pipeline stand in a store that others may use, too."""
    return f"{identity.system_identifier}/{identity.slot}"


def describe_store(config: LetterSettings) -> dict[str, Any]:
    """What `pgcdc dlq` has to know of the store of a run, without secrets."""
    file = str(Path(config.dlq_file).absolute()) if config.dlq_file is not None else None
    elsewhere = bool(config.dlq_db) and config.dlq_db != config.db
    return {"dlq": config.dlq, "dlq_file": file, "dlq_table": config.dlq_table, "dlq_elsewhere": elsewhere}


def check_not_captured(config: LetterSettings, *, uses_existing: bool) -> None:
    """Raise ConfigError if a publication of the user has the table of dead letters: each one would be an event, too."""
    if config.dlq != "pg_table" or not uses_existing or not _is_source(config):
        return
    schema, table = split_table(config.dlq_table)
    with (
        explain_errors(f"read publication {config.publication}"),
        connect(config.db, application_name="pgcdc dead letters", may_retry=False) as conn,
    ):
        found = conn.execute(
            """SELECT 1 FROM pg_publication p WHERE pubname = %s AND (puballtables OR EXISTS (
                   SELECT FROM pg_publication_tables t
                   WHERE t.pubname = p.pubname AND t.schemaname = %s AND t.tablename = %s))""",
            [config.publication, schema, table],
        ).fetchone()
    if found is not None:
        raise ConfigError(
            f"publication {config.publication} has table {name_table(schema, table)}: each dead letter would be an event",
            "Use --dlq file, another database (--dlq-db), or a publication that names its tables",
        )


def _is_source(config: LetterSettings) -> bool:
    if not config.dlq_db:
        return True
    ours, source = parse_url(config.dlq_db), parse_url(config.db)
    return all(ours.get(key) == source.get(key) for key in ("host", "hostaddr", "port", "dbname"))
