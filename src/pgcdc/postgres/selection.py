"""What the user selects from the database: tables, rows and columns. Pure text, no server.

Also the types of settings that name database objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from pgcdc.core.errors import ConfigError
from pgcdc.core.settings import (
    Conflict,
    Options,
    Rules,
    checked,
    conflicts_of,
    setting,
    split_names,
    split_outside_quotes,
    text_or_list,
)
from pgcdc.postgres.database import parse_identifier, parse_url, quote_identifier, split_table

TABLES, SNAPSHOTS = "Tables", "Existing rows"

DatabaseUrl = Annotated[str, AfterValidator(lambda url: checked(parse_url, url) if url else url)]
TableName = Annotated[str, AfterValidator(partial(checked, split_table))]
TableNames = Annotated[tuple[TableName, ...], BeforeValidator(split_names), text_or_list()]
Identifiers = Annotated[
    tuple[Annotated[str, AfterValidator(partial(checked, parse_identifier))], ...],
    BeforeValidator(split_names),
    text_or_list(),
]


@dataclass(frozen=True, slots=True)
class Rule:
    row_filter: str | None = None  # An SQL expression over the table's columns
    columns: tuple[str, ...] = ()  # Empty: all columns

    def to_sql(self) -> str:
        """The part after the table's name in CREATE and ALTER PUBLICATION."""
        columns = f" ({', '.join(map(quote_identifier, self.columns))})" if self.columns else ""
        return columns + (f" WHERE ({self.row_filter})" if self.row_filter else "")


class Selection(Options):
    """Tables chosen by name, by schema, or all; with rules as `table=expression` and `table=a,b`."""

    tables: TableNames = setting(
        (), "Capture these tables: a,b,schema.c. Creates a publication.", TABLES, metavar="A,B", example="[orders]"
    )
    all_tables: bool = setting(False, "Capture all tables. Creates a publication.", TABLES)
    schemas: Identifiers = setting(
        (), "Capture all tables of these schemas: a,b. Creates a publication.", TABLES, metavar="A,B",
        example="[sales]",
    )  # fmt: skip
    row_filters: Rules = setting(
        (), "Capture only these rows: 'orders=total > 100'. Repeatable. PostgreSQL 15.", TABLES, flag="row-filter",
        metavar="TABLE=EXPR", is_repeated=True, example="{orders: total > 100}",
    )  # fmt: skip
    columns: Rules = setting(
        (), "Capture only these columns: orders=id,total. Repeatable. PostgreSQL 15.", TABLES, metavar="TABLE=A,B",
        is_repeated=True, example="{orders: [id, total]}",
    )  # fmt: skip
    partition_root: bool = setting(
        True, "Capture a partitioned table as one table; no: each partition under its own name. New slots.", TABLES
    )
    generated_columns: bool = setting(False, "Include stored generated columns. PostgreSQL 18.", TABLES)
    incremental_snapshot: bool = setting(False, "Capture the signal table; created if it is missing.", SNAPSHOTS)
    signal_table: TableName = setting(
        "pgcdc_signals", "Rows inserted there request snapshots.", SNAPSHOTS, metavar="NAME"
    )

    @property
    def also(self) -> tuple[str, ...]:
        """Our own tables that are also captured: the signal table."""
        return (self.signal_table,) if self.incremental_snapshot else ()

    @property
    def names_tables(self) -> bool:
        return bool(self.tables or self.schemas or self.all_tables)

    @property
    def is_open(self) -> bool:
        """Whether it includes tables that are created later."""
        return self.all_tables or bool(self.schemas)

    def to_json(self) -> dict[str, Any]:
        """For `Selection.model_validate`; empty if it selects nothing."""
        return self.part(Selection).model_dump(mode="json", exclude_defaults=True)

    def covers(self, other: Selection) -> bool:
        """Whether it selects everything the other one selects, in the same way."""
        schemas = set(self.schema_names)
        tables = {split_table(name) for name in self.tables}
        if not self.all_tables:
            named = {table for table in map(split_table, other.tables) if table[0] not in schemas}
            if other.all_tables or not schemas.issuperset(other.schema_names) or not named <= tables:
                return False
        if not set(other.also) <= {*self.also, *self.tables}:
            return False
        return self.rules() == other.rules() and (self.generated_columns or not other.generated_columns)

    def conflicts(self) -> Iterator[Conflict]:
        """Rules that cannot be parsed."""
        yield from conflicts_of(("row_filters",), self.but(columns=()).rules)
        yield from conflicts_of(("columns",), self.but(row_filters=()).rules)

    @property
    def schema_names(self) -> tuple[str, ...]:
        """The schemas, as the server knows them. Raises ConfigError for an invalid name."""
        return tuple(parse_identifier(name) for name in self.schemas)

    def rules(self) -> dict[tuple[str, str], Rule]:
        """Rules by table (schema, name). Raises ConfigError for an invalid rule."""
        filters = _by_table("--row-filter", self.row_filters)
        columns = {
            table: tuple(parse_identifier(name) for name in split_outside_quotes(text, ","))
            for table, text in _by_table("--columns", self.columns).items()
        }
        return {table: Rule(filters.get(table), columns.get(table, ())) for table in [*filters, *columns]}


def _by_table(flag: str, texts: Sequence[str]) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    for text in texts:
        name, equals, value = _partition(text)
        if not equals or not value.strip():
            example = "orders=total > 100" if flag == "--row-filter" else "orders=id,total"
            raise ConfigError(f"{flag} {text!r} is not table=...", f"Write it like {flag} '{example}'")
        table = split_table(name)
        if table in found:
            raise ConfigError(f"{flag} is set twice for table {name.strip()}", "Combine them in one")
        found[table] = value.strip()
    return found


def _partition(text: str) -> tuple[str, str, str]:
    """Like `partition("=")`, but splits at the first `=` outside a quoted name."""
    match = re.match(r'((?:[^="]|"(?:[^"]|"")*")*)(=)', text)
    return (match[1], match[2], text[match.end() :]) if match else (text, "", "")
