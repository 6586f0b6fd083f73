"""Where the rows of a source table go: names of tables at the target. Only words, no server."""

from __future__ import annotations

from collections.abc import Iterable

from pgcdc.core.errors import ConfigError
from pgcdc.core.settings import split_outside_quotes
from pgcdc.postgres.database import name_table, parse_identifier, split_table

__all__ = ["TableName", "TargetNames", "find_loops", "source_name"]

TableName = tuple[str, str]
"""Schema and table."""

_ADVICE = "Write public.orders=mirror.orders2 for a table, sales.*=archive.* for a schema"


class TargetNames:
    """Rules for tables win over rules for schemas, and these over the one schema for all."""

    def __init__(self, rules: Iterable[str] = (), schema: str | None = None) -> None:
        """ConfigError: a rule cannot be read, or two tables would become one."""
        self._schema = schema
        self._tables: dict[TableName, TableName] = {}
        self._schemas: dict[str, str] = {}
        for rule in rules:
            self._add(rule)
        targets: dict[TableName, TableName] = {}
        for source, target in self._tables.items():
            if target in targets:
                both = f"{name_table(*targets[target])} and {name_table(*source)}"
                raise ConfigError(f"{both} would both go to {name_table(*target)}", "Give one of them another name")
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
            raise ConfigError(f"there are two rules for {source}", "Leave one of them out")

    def __call__(self, table: TableName) -> TableName:
        """The table at the target."""
        if table in self._tables:
            return self._tables[table]
        schema, name = table
        return self._schemas.get(schema, self._schema or schema), name


def find_loops(names: TargetNames, captured: Iterable[TableName]) -> list[TableName]:
    """Captured tables of a database whose rows would go to a captured table of the same database."""
    tables = set(captured)
    return sorted(table for table in tables if names(table) in tables)


def source_name(channel: str, table: str) -> TableName:
    """The table behind the channel of an event and `payload.table`. Names may have dots: only both together tell."""
    full = channel.partition(":")[2]
    return ("public", table) if full == table else (full[: -len(table) - 1], table)
