"""The options of the adapter `pg_table`, the table names they lead to, and checks against writing to captured
tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import psycopg
from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

from pgcdc.core.errors import ConfigError, PgcdcError, SinkError, SourceError
from pgcdc.core.settings import checked, setting, split_outside_quotes
from pgcdc.postgres.database import (
    Connection,
    connect,
    explain_errors,
    name_table,
    parse_identifier,
    parse_url,
    split_table,
    url_passwords,
)
from pgcdc.sink.spec import SinkOptions, SourceView

if TYPE_CHECKING:
    from pgcdc.sink.contract import Sink

TableName = tuple[str, str]  # Schema and table
NO_ORIGIN = "none"
_ADVICE = "Write public.orders=mirror.orders2 for a table, sales.*=archive.* for a schema"
_APPLY_ONLY = ("target_schema", "tables", "evolve", "triggers")


def _split_rules(value: Any) -> Any:
    """Accepts `a=b, c.*=d.*` (flag or variable), or a list of these or a mapping (YAML)."""
    if isinstance(value, str):
        return tuple(split_outside_quotes(value, ","))
    if isinstance(value, Mapping):
        return tuple(f"{source}={target}" for source, target in value.items())
    return value


TableRules = Annotated[
    tuple[str, ...],
    BeforeValidator(_split_rules),
    WithJsonSchema({
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}},
            {"type": "object", "additionalProperties": {"type": "string"}},
        ]
    }),
]  # fmt: skip


class TargetNames:
    """Rules for tables override rules for schemas, which override the one schema for all."""

    def __init__(self, rules: Iterable[str] = (), schema: str | None = None) -> None:
        """ConfigError: a rule is invalid, or two tables would get the same name."""
        self._schema = schema
        self._tables: dict[TableName, TableName] = {}
        self._schemas: dict[str, str] = {}
        for rule in rules:
            self._add(rule)
        targets: dict[TableName, TableName] = {}
        for source, target in self._tables.items():
            if target in targets:
                both = f"{name_table(*targets[target])} and {name_table(*source)}"
                raise ConfigError(
                    f"{both} would both be written to {name_table(*target)}", "Map one of them to another name"
                )
            targets[target] = source

    def _add(self, rule: str) -> None:
        sides = split_outside_quotes(rule, "=")
        if len(sides) != 2:
            raise ConfigError(f"{rule!r} is not source=target", _ADVICE)
        source, target = sides
        whole = [side.endswith(".*") for side in sides]
        if all(whole):
            known, name = self._schemas, parse_identifier(source[:-2])
            again = name in known
            known[name] = parse_identifier(target[:-2])
        elif any(whole):
            raise ConfigError(f"{rule!r} names a table on one side and a schema on the other", _ADVICE)
        else:
            table = split_table(source)
            again = table in self._tables
            self._tables[table] = split_table(target, self._schema or "public")
        if again:
            raise ConfigError(f"{source} has two rules", "Remove one of them")

    def __call__(self, table: TableName) -> TableName:
        if table in self._tables:
            return self._tables[table]
        schema, name = table
        return self._schemas.get(schema, self._schema or schema), name

    def loops(self, captured: Collection[TableName]) -> list[TableName]:
        """Captured tables of a database whose rows would go to a captured table of the same database."""
        return sorted(table for table in captured if self(table) in captured)


class PgTableOptions(SinkOptions):
    """Events as rows of a table in PostgreSQL, or applied to tables like those of the source."""

    db: str = setting(
        "", "database URL of the target (default: the source's); better in PGCDC_PG_TABLE_DB", cascade="db", secret=True
    )
    db_file: str | None = setting(None, "the file that contains the target's database URL")
    mode: Literal["append", "apply"] = setting(
        "append", "append: one row per event; apply: keep copies of the source's tables"
    )
    table: Annotated[str, AfterValidator(partial(checked, split_table))] = setting(
        "pgcdc_events", "append: the table that receives the events"
    )
    target_schema: str | None = setting(
        None, "apply: write all tables to this schema (default: as in the source)", min_length=1
    )
    tables: TableRules = setting((), "apply: rename tables: public.orders=mirror.orders2,sales.*=archive.*")
    create: bool = setting(True, "create missing tables")
    evolve: Literal["full", "add", "none"] = setting(
        "full", "apply: follow changes of tables: full, add (new columns only) or none"
    )
    origin: str = setting(
        "", "name of the replication origin; none: no origin (apply has one by default)", max_length=512
    )
    triggers: Literal["off", "on"] = setting("off", "whether triggers and foreign keys of the target fire")

    @property
    def names(self) -> TargetNames:
        """Table names at the target. ConfigError: invalid rules."""
        return TargetNames(self.tables, self.target_schema)

    @property
    def own_schema(self) -> str:
        """The schema of our own tables: `pgcdc_positions` and others."""
        if self.mode == "append":
            return split_table(self.table)[0]
        return self.target_schema or "public"

    def resolved(self) -> PgTableOptions:
        if self.db_file is None:
            return self
        from pgcdc.core.secrets import read_secret  # it imports the registry of all adapters

        url = read_secret(Path(self.db_file), "the database URL of the target").strip()
        return self.model_copy(update={"db": url, "db_file": None})

    def target(self) -> str:
        """The table that no other adapter of a pipeline may write to. In apply mode it depends on routes."""
        if self.mode == "apply":
            return ""
        host, port, database = self._address()
        return f"table {name_table(*split_table(self.table))} in {host}:{port}/{database}"

    def place(self) -> str:
        """Where rows go, however we connect."""
        tables = (self.table,) if self.mode == "append" else (self.target_schema, self.tables)
        return repr((*self._address(), self.mode, *tables))

    def _address(self) -> list[Any]:
        params = parse_url(self.resolved().db)
        return [params.get(one, "") for one in ("host", "port", "dbname")]

    def check(self) -> None:
        if self.db and self.db_file is not None:
            raise ConfigError("db and db_file cannot be combined", "Remove one of them")
        if self.db_file is not None and "://" in self.db_file:
            raise ConfigError(
                "db_file is not the path of a file",
                "Name the file that contains the URL; the URL itself goes into `db`",
            )
        if not self.db and self.db_file is None:
            raise ConfigError("pg_table needs a database", "Set --pg-table-db, or --db: the source's is the default")
        try:
            parse_url(self.resolved().db)
        except SourceError as error:
            raise ConfigError(f"pg_table: {error.message}", error.advice) from None
        if self.mode == "append":
            for name in _APPLY_ONLY:
                if getattr(self, name) != type(self).model_fields[name].default:
                    flag = f"--pg-table-{name}".replace("_", "-")
                    raise ConfigError(f"{flag} needs --pg-table-mode apply", "Add that, or remove it")
            return
        if self.table != type(self).model_fields["table"].default:
            raise ConfigError(
                "--pg-table-table needs --pg-table-mode append", "To rename tables, use --pg-table-tables"
            )
        _ = self.names

    def secrets(self) -> Collection[str]:
        return url_passwords(self.resolved().db)

    def make(self) -> Sink:
        from pgcdc.sink.pg_table.sink import PgTableSink

        return PgTableSink(self.resolved())

    def check_source(self, adapter: str, source: SourceView) -> None:
        check_source(self, adapter, source)


def database_of(conn: Connection) -> tuple[str, str]:
    """The server and database, independent of the server's address. The server is empty if the role may not ask for
    it."""
    try:
        row = conn.execute("SELECT system_identifier::text FROM pg_control_system()").fetchone()
    except psycopg.errors.InsufficientPrivilege:
        row = None
    return row[0] if row else "", conn.info.dbname


# --- loops: a captured table must not receive the events of its own changes, since each would cause another one,
# forever


def check_source(options: PgTableOptions, adapter: str, source: SourceView) -> None:
    """ConfigError if the adapter writes to tables that a start would capture. Runs before anything is created. Ignores
    an unreachable database, which others report."""
    if not source.url:
        return
    options, found = options.resolved(), set()
    try:
        for url in (options.db, source.url):
            with explain_errors("ask which database it is"), connect(url, may_retry=False) as conn:
                found.add(database_of(conn))
        if len(found) == 2 or not all(system for system, _ in found):
            return
        tables = source.tables()
    except PgcdcError:
        return
    try:
        check_captured(options, adapter, tables)
    except SinkError as error:
        raise ConfigError(error.message, error.advice) from None


def check_captured(options: PgTableOptions, adapter: str, captured: Collection[TableName]) -> None:
    if options.mode == "append":
        table = split_table(options.table)
        if table in captured:
            raise SinkError(
                f"adapter {adapter} writes to table {name_table(*table)}, which this pipeline captures: each "
                "event would create another one",
                "Choose another --pg-table-table (for example one that begins with pgcdc_), or remove the "
                "table from --tables",
            )
        return
    for table in options.names.loops(captured):
        raise SinkError(
            f"adapter {adapter} would write the rows of {name_table(*table)} to a table that this pipeline captures",
            "Set the URL of another database with --pg-table-db, or other names with --pg-table-tables or "
            "--pg-table-target-schema, and capture only the source's tables",
        )
