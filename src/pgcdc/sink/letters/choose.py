"""Which store a configuration means, and that a table of dead letters is not captured itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from pgcdc.core.errors import ConfigError
from pgcdc.core.settings import Options, setting
from pgcdc.core.state import Identity, StateDir
from pgcdc.postgres.database import connect, explain_errors, name_table, parse_url, split_table
from pgcdc.postgres.fields import DatabaseUrl, TableName
from pgcdc.sink.letters.file_store import FileDeadLetters
from pgcdc.sink.letters.pg_store import PgDeadLetters
from pgcdc.sink.letters.stores import DeadLetters, Dropped, StderrDeadLetters

__all__ = ["LetterSettings", "check_not_captured", "describe_store", "make_store", "name_pipeline"]


DEAD = "Dead letters"


class LetterSettings(Options):
    """What becomes of events that a target refuses."""

    dlq: Literal["file", "pg_table", "stderr", "none"] = setting(
        "file", "Where refused events go: file, pg_table, stderr, or none (they are lost).", DEAD, metavar="STORE"
    )
    dlq_file: Path | None = setting(
        None, "With --dlq file: this one. (default: dead_letters.jsonl in the state directory)", DEAD, metavar="PATH",
        example="dead_letters.jsonl",
    )  # fmt: skip
    dlq_db: DatabaseUrl = setting(
        "", "With --dlq pg_table: the database. Better in PGCDC_DLQ_DB. (default: the source)", DEAD, metavar="URL",
        example="postgresql://app@localhost:5432/ops", secret=True,
    )  # fmt: skip
    dlq_table: TableName = setting(
        "pgcdc_dead_letters", "With --dlq pg_table: the table; created if it is missing.", DEAD, metavar="NAME"
    )


class Letters(Protocol):
    """The settings of dead letters, and what of the source matters for them: `run.settings.PipelineSettings`."""

    @property
    def dlq(self) -> str: ...
    @property
    def dlq_file(self) -> Path | None: ...
    @property
    def dlq_db(self) -> str: ...
    @property
    def dlq_table(self) -> str: ...
    @property
    def db(self) -> str: ...
    @property
    def state_dir(self) -> Path: ...
    @property
    def temporary_slot(self) -> bool: ...
    @property
    def publication(self) -> str | None: ...
    @property
    def uses_existing(self) -> bool: ...


def make_store(config: Letters, say: Callable[[str], None] = lambda text: None) -> DeadLetters:
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


def describe_store(config: Letters) -> dict[str, Any]:
    """What `pgcdc dlq` has to know of the store of a run, without secrets."""
    file = str(Path(config.dlq_file).absolute()) if config.dlq_file is not None else None
    elsewhere = bool(config.dlq_db) and config.dlq_db != config.db
    return {"dlq": config.dlq, "dlq_file": file, "dlq_table": config.dlq_table, "dlq_elsewhere": elsewhere}


def check_not_captured(config: Letters) -> None:
    """Raise ConfigError if a publication of the user has the table of dead letters: each one would be an event, too."""
    if config.dlq != "pg_table" or not config.uses_existing or not _is_source(config):
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


def _is_source(config: Letters) -> bool:
    if not config.dlq_db:
        return True
    ours, source = parse_url(config.dlq_db), parse_url(config.db)
    return all(ours.get(key) == source.get(key) for key in ("host", "hostaddr", "port", "dbname"))
