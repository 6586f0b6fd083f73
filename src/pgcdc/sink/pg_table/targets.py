"""The tables of the target as they are and as they must be: created, and altered when those of the source are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import psycopg

from pgcdc.core.errors import SinkError
from pgcdc.core.shapes import ShapeChange
from pgcdc.event.shape_diff import diff_shapes
from pgcdc.postgres.database import Connection, name_table, quote_identifier, quote_qualified
from pgcdc.sink.pg_table.options import PgTableOptions
from pgcdc.sink.pg_table.tables import SourceTable, TableName, TargetNames, TargetTable, find_types, load_target

__all__ = ["Targets"]

Say = Callable[[str], None]


class Targets:
    """What one session knows of the target's tables. After a rollback it must be made anew."""

    def __init__(
        self,
        conn: Connection,
        options: PgTableOptions,
        names: TargetNames,
        say: Say,
        were_there: Collection[TableName] = (),
    ) -> None:
        """`were_there`: tables that the target had. One that is gone is not made again as if it were new: it lacks rows."""
        self._conn = conn
        self._options = options
        self._names = names
        self._say = say
        self._known: dict[TableName, TargetTable | None] = {}
        self.were_there = set(were_there)
        """With what is there now; without names that are free by right."""

    def see(self) -> set[TableName]:
        """Tables that are or were there."""
        return self.were_there | {name for name, target in self._known.items() if target is not None}

    def find(self, name: TableName) -> TargetTable | None:
        """The table of this name at the target; None if there is none."""
        if name not in self._known:
            self._known[name] = load_target(self._conn, name)
        return self._known[name]

    def of(self, source: SourceTable) -> TargetTable | None:
        """The target of a table of the source; None if it is not there."""
        return self.find(self._names(source.name))

    def prepare(self, source: SourceTable, columns: Iterable[str], key: tuple[str, ...]) -> TargetTable:
        """The target's table, with all these columns: what is missing is made, if that is allowed."""
        name = self._names(source.name)
        target = self.find(name)
        if target is None:
            return self._create(source, name, columns, key)
        missing = [column for column in columns if column not in target.columns]
        if not missing:
            return target
        statement, without = self._statement(source, missing, lambda types: _add_columns(name, types))
        if self._options.evolve == "none":
            raise SinkError(
                f"table {target.title} at the target has no column {', '.join(missing)}, which rows of {source.title} have",
                f"Run there: {statement}; or set evolve to add",
            )
        self._run(statement, f"cannot add columns to table {target.title} at the target")
        self._say(
            f"table {target.title}: column {', '.join(missing)} added{_say_without(without)}; rows that are there have "
            "NULL in it until they change or a snapshot brings them"
        )
        return self._load_again(name)

    def _create(
        self, source: SourceTable, name: TableName, columns: Iterable[str], key: tuple[str, ...]
    ) -> TargetTable:
        statement, without = self._statement(source, columns, lambda types: _create_table(name, types, key))
        if not self._options.create:
            raise SinkError(
                f"table {name_table(*name)} is not at the target",
                f"Run there: {statement}; or set create to true",
            )
        if name in self.were_there:
            raise SinkError(
                f"table {name_table(*name)} is not at the target any more: made anew, it would lack all rows but those that "
                "change",
                f"Restore it, or run there: {statement}; and take a snapshot of the table: pgcdc snapshot",
            )
        action = f"cannot create table {name_table(*name)} at the target"
        if not self._conn.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (name[0],)).fetchone():
            self._run(_create_schema(name[0]), action)
        self._run(statement, action)
        self._say(f"table {name_table(*name)} created{_say_without(without)}")
        return self._load_again(name)

    def _statement(
        self, source: SourceTable, columns: Iterable[str], write: Callable[[Mapping[str, str]], str]
    ) -> tuple[str, list[str]]:
        """What a transform has added is text. Also returns the columns whose types the target does not have."""
        types, without = find_types(self._conn, {column: source.types.get(column, ()) for column in columns})
        return write(types), without

    def _load_again(self, name: TableName) -> TargetTable:
        target = self._known[name] = load_target(self._conn, name)
        assert target is not None
        return target

    def _run(self, statement: str, action: str) -> None:
        try:
            self._conn.execute(statement.encode())
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidSchemaName) as error:
            raise SinkError(
                f"{action}: {error.diag.message_primary}", f"Run there, as its owner: {statement}"
            ) from error

    # --- after ALTER TABLE at the source

    def follow(self, change: ShapeChange) -> None:
        """Do to the target's table what was done to the source's. New columns come with the first row that has them."""
        if self._options.evolve != "full" or change.before is None:
            return
        old = self._names((change.before.namespace, change.before.name))
        name = self._names((change.after.namespace, change.after.name))
        for one in diff_shapes(change):
            if one["type"] == "table_renamed":
                self._rename(old, name)
            target = self.find(name)
            if target is not None:
                self._follow_column(target, one)

    def say_anew(self, source: TableName) -> None:
        """A table that was dropped and made again: nothing tells the target which rows are gone."""
        target = self.find(self._names(source))
        if target is None:
            self.were_there.discard(self._names(source))
        else:
            self._say(
                f"table {name_table(*source)} was made anew at the source; the rows of the one before stay in "
                f"{target.title}: TRUNCATE that, and take a snapshot of the table, if they should not"
            )

    def _rename(self, old: TableName, new: TableName) -> None:
        if old == new or self.find(old) is None:
            return
        if self.find(new) is not None:
            olds, news = quote_qualified(*old), quote_qualified(*new)
            raise SinkError(
                f"table {name_table(*old)} was renamed to {name_table(*new)} at the source, but the target has both: rows "
                "of two tables would be mixed",
                f"Do at the target what was done at the source, like: ALTER TABLE {news} RENAME TO ...; ALTER TABLE {olds} "
                f"RENAME TO {quote_identifier(new[1])}",
            )
        action = f"cannot rename table {name_table(*old)} at the target"
        if not self._conn.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (new[0],)).fetchone():
            self._run(_create_schema(new[0]), action)
        for statement in _move_table(old, new):
            self._run(statement, action)
        self._known.clear()
        self.were_there.discard(old)
        self._say(f"table {name_table(*old)} renamed to {name_table(*new)}")

    def _follow_column(self, target: TargetTable, one: Mapping[str, Any]) -> None:
        if one["type"] == "column_renamed":
            if one["from"] in target.columns and one["to"] not in target.columns:
                self._alter(target, _rename_column(target.name, one["from"], one["to"]))
                self._say(f"table {target.title}: column {one['from']} renamed to {one['to']}")
        elif one["type"] == "column_removed":
            column = target.columns.get(one["column"])
            if column is not None and column.is_required and one["column"] not in target.primary_key:
                self._alter(target, _drop_not_null(target.name, one["column"]))
                self._say(
                    f"table {target.title}: column {one['column']} may be empty, the source does not have it any more"
                )
        elif one["type"] == "column_type_changed":
            self._retype(target, one["column"], one["old_type"], one["new_type"])

    def _retype(self, target: TargetTable, column: str, old: str, new: str) -> None:
        """Only what had the source's type before: another one was chosen by somebody."""
        types, _ = find_types(self._conn, {"old": (old,), "new": (new,)})
        had = target.columns.get(column)
        if had is None or had.type != types["old"] or had.type == types["new"]:
            return
        try:
            with self._conn.transaction():
                self._conn.execute(_retype_column(target.name, column, types["new"], by_text=False).encode())
        except (psycopg.errors.CannotCoerce, psycopg.errors.DatatypeMismatch):
            self._alter(target, _retype_column(target.name, column, types["new"], by_text=True))
        except psycopg.DataError as error:
            raise self._cannot_retype(target, column, types["new"], error) from error
        self._known.pop(target.name, None)
        self._say(f"table {target.title}: column {column} is {types['new']} now, it was {types['old']}")

    def _alter(self, target: TargetTable, statement: str) -> None:
        try:
            self._run(statement, f"cannot alter table {target.title} at the target")
        except psycopg.DataError as error:
            raise SinkError(
                f"cannot alter table {target.title} at the target as the source's was: {error.diag.message_primary}",
                f"Do it by hand, like: {statement}",
            ) from error
        self._known.pop(target.name, None)

    def _cannot_retype(self, target: TargetTable, column: str, kind: str, error: psycopg.Error) -> SinkError:
        statement = _retype_column(target.name, column, kind, by_text=False)
        return SinkError(
            f"column {column} of table {target.title} at the target cannot become {kind}: {error.diag.message_primary}",
            f"Do by hand what was done at the source, like: {statement}",
        )


def _say_without(columns: list[str]) -> str:
    """What people should know of types that are only text."""
    return f" ({', '.join(columns)} as text: the target does not have the type)" if columns else ""


# --- statements


def _create_schema(name: str) -> str:
    """A schema, if it is not there."""
    return f"CREATE SCHEMA IF NOT EXISTS {quote_identifier(name)}"


def _create_table(name: TableName, types: Mapping[str, str], key: Sequence[str]) -> str:
    """A table with the columns and the primary key. Nothing but the key is NOT NULL: what the source allows may change."""
    columns = [f"{quote_identifier(column)} {kind}" for column, kind in types.items()]
    if key:
        columns.append(f"PRIMARY KEY ({', '.join(map(quote_identifier, key))})")
    return f"CREATE TABLE {quote_qualified(*name)} ({', '.join(columns)})"


def _add_columns(name: TableName, types: Mapping[str, str]) -> str:
    """More columns."""
    added = ", ".join(f"ADD COLUMN {quote_identifier(column)} {kind}" for column, kind in types.items())
    return f"ALTER TABLE {quote_qualified(*name)} {added}"


def _rename_column(name: TableName, old: str, new: str) -> str:
    """Another name for a column."""
    return f"ALTER TABLE {quote_qualified(*name)} RENAME COLUMN {quote_identifier(old)} TO {quote_identifier(new)}"


def _retype_column(name: TableName, column: str, kind: str, *, by_text: bool) -> str:
    """Another type for a column; its values are cast, or written as text and read again."""
    quoted = quote_identifier(column)
    value = f"{quoted}::text" if by_text else quoted
    return f"ALTER TABLE {quote_qualified(*name)} ALTER COLUMN {quoted} TYPE {kind} USING ({value})::{kind}"


def _drop_not_null(name: TableName, column: str) -> str:
    """Let a column be empty."""
    return f"ALTER TABLE {quote_qualified(*name)} ALTER COLUMN {quote_identifier(column)} DROP NOT NULL"


def _move_table(old: TableName, new: TableName) -> Iterable[str]:
    """Another name, and another schema, for a table."""
    if old[1] != new[1]:
        yield f"ALTER TABLE {quote_qualified(*old)} RENAME TO {quote_identifier(new[1])}"
    if old[0] != new[0]:
        yield f"ALTER TABLE {quote_qualified(old[0], new[1])} SET SCHEMA {quote_identifier(new[0])}"
