"""What the user wants of the database: which tables, and of these which rows and columns. Only words, no server.

Also the types of settings that name things of a database.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from pgcdc.core.errors import ConfigError
from pgcdc.core.settings import checked, split_names, split_outside_quotes, text_or_list
from pgcdc.postgres.database import parse_identifier, parse_url, quote_identifier, split_table

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
    """What of a table is published."""

    row_filter: str | None = None
    """An SQL expression over its columns."""
    columns: tuple[str, ...] = ()
    """Empty: all of them."""

    def to_sql(self) -> str:
        """What follows the table's name in CREATE and ALTER PUBLICATION."""
        columns = f" ({', '.join(map(quote_identifier, self.columns))})" if self.columns else ""
        return columns + (f" WHERE ({self.row_filter})" if self.row_filter else "")


@dataclass(frozen=True, slots=True)
class Selection:
    """The tables by name, those of some schemas, or all; with rules as `table=expression` and `table=a,b`."""

    tables: tuple[str, ...] = ()
    schemas: tuple[str, ...] = ()
    all_tables: bool = False
    row_filters: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    generated_columns: bool = False
    also: tuple[str, ...] = ()
    """Tables of ours that are captured with the others: the one for signals."""

    @property
    def is_open(self) -> bool:
        """Whether tables that are created later belong to it."""
        return self.all_tables or bool(self.schemas)

    def to_json(self) -> dict[str, Any]:
        """As it is read back from JSON."""
        found = {name: getattr(self, name) for name in self.__slots__ if name != "also" or self.also}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Selection:
        """The selection behind `to_json()`."""
        values: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in raw.items()}
        return cls(**values)

    def covers(self, other: Selection) -> bool:
        """Whether everything that the other one selects is selected here, in the same way."""
        schemas = set(self.schema_names)
        tables = {split_table(name) for name in self.tables}
        if not self.all_tables:
            named = {table for table in map(split_table, other.tables) if table[0] not in schemas}
            if other.all_tables or not schemas.issuperset(other.schema_names) or not named <= tables:
                return False
        if not set(other.also) <= {*self.also, *self.tables}:
            return False
        return self.rules() == other.rules() and (self.generated_columns or not other.generated_columns)

    def check(self) -> None:
        """Raise ConfigError for what cannot be read."""
        self.rules()
        tuple(self.schema_names)

    @property
    def schema_names(self) -> tuple[str, ...]:
        """The schemas as the server knows them. Raises ConfigError for what is no name."""
        return tuple(parse_identifier(name) for name in self.schemas)

    def rules(self) -> dict[tuple[str, str], Rule]:
        """What of which table (schema, name). Raises ConfigError for what cannot be read."""
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
            raise ConfigError(f"{flag} is given twice for table {name.strip()}", "Put it into one")
        found[table] = value.strip()
    return found


def _partition(text: str) -> tuple[str, str, str]:
    """Like `partition("=")`, at the first one that is not inside of a quoted name."""
    match = re.match(r'((?:[^="]|"(?:[^"]|"")*")*)(=)', text)
    return (match[1], match[2], text[match.end() :]) if match else (text, "", "")
