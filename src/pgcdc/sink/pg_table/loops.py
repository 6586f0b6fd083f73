"""A table that is captured must not get the events of its own changes: each would make another one, for ever."""

from __future__ import annotations

from collections.abc import Collection

from pgcdc.core.errors import ConfigError, PgcdcError, SinkError
from pgcdc.postgres.database import connect, explain_errors, name_table, parse_url, split_table
from pgcdc.sink.pg_table.options import PgTableOptions
from pgcdc.sink.pg_table.positions import TargetName
from pgcdc.sink.pg_table.tables import TableName, TargetNames, find_loops
from pgcdc.sink.spec import SourceView

__all__ = ["check_captured", "check_source"]


def check_captured(options: PgTableOptions, adapter: str, captured: Collection[TableName]) -> None:
    """Raise SinkError if the adapter writes to one of these tables, which its pipeline captures, in the same database."""
    if options.mode == "append":
        table = split_table(options.table)
        if table in captured:
            raise SinkError(
                f"adapter {adapter} writes to table {name_table(*table)}, which this pipeline captures: each event "
                "would make another one",
                "Give another --pg-table-table, one that begins with pgcdc_ say, or leave the table out of --tables",
            )
        return
    for table in find_loops(TargetNames(options.tables, options.target_schema), captured):
        raise SinkError(
            f"adapter {adapter} would apply the rows of {name_table(*table)} to a table that it captures",
            "Give the URL of another database with --pg-table-db, or other names with --pg-table-tables or "
            "--pg-table-target-schema, and capture only the source's tables",
        )


def check_source(options: PgTableOptions, adapter: str, source: SourceView) -> None:
    """The same for tables that a start would capture, before anything is made for it. ConfigError: it must not begin.

    A database that cannot be asked is no matter of this check: who needs it says so.
    """
    options = options.resolved()
    try:
        target = _name(options.db)
        if target != _name(source.url) or (not target.system and not _is_same_address(options.db, source.url)):
            return
        tables = source.tables()
    except PgcdcError:
        return
    try:
        check_captured(options, adapter, tables)
    except SinkError as error:
        raise ConfigError(error.message, error.advice) from None


def _is_same_address(one: str, other: str) -> bool:
    """For roles that may not ask which server it is: databases of two servers can have the same oid."""
    first, second = parse_url(one), parse_url(other)
    return all(first.get(key) == second.get(key) for key in ("host", "hostaddr", "port", "dbname"))


def _name(url: str) -> TargetName:
    with explain_errors("ask which database it is"), connect(url, may_retry=False) as conn:
        return TargetName.of(conn)
