"""Makes the target's tables follow those of the source.

It follows exactly, where the source's catalog proves what happened to existing rows. Otherwise it raises ReloadNeeded,
and the table comes whole. It only drops columns that the source has dropped, and only where their name is needed again.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import psycopg

from pgcdc.core.errors import ReloadNeeded, SinkError
from pgcdc.core.relation import ShapeChange
from pgcdc.event.edits import SimpleChain
from pgcdc.event.follow import Difference, behind, brings_rows, follow_shape
from pgcdc.event.shape import diff_shapes
from pgcdc.postgres.database import name_table, quote_identifier, quote_literal, quote_qualified
from pgcdc.sink.pg_table.options import TableName
from pgcdc.sink.pg_table.tables import SourceTable, Targets, TargetTable, describe_source

_CONSTRAINT = """
SELECT conname::text FROM pg_constraint WHERE conrelid = to_regclass(%s) AND contype = 'p'
"""
_SAME_INDEXES = """
SELECT c.relname::text FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
WHERE i.indrelid = to_regclass(%s) AND EXISTS (
    SELECT FROM pg_class o JOIN pg_namespace n ON n.oid = o.relnamespace WHERE n.nspname = %s AND o.relname = c.relname)
"""
_UNFIT = (
    psycopg.DataError,
    psycopg.IntegrityError,
    psycopg.errors.CannotCoerce,
    psycopg.errors.DatatypeMismatch,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.FeatureNotSupported,
)


def follow(
    targets: Targets,
    change: ShapeChange,
    chain: SimpleChain,
    history: Iterable[ShapeChange],
    taken: Collection[TableName],
    *,
    is_new: bool,
) -> None:
    """Repeat a change of a source table at the target.

    `history`: of this table; `taken`: the names of other tables there; `is_new`: no other table had its name before.
    Raises ReloadNeeded if the rows cannot follow.
    """
    if targets.options.evolve != "full" or not chain.is_routed(change.after):
        return
    name = targets.name_of((change.after.namespace, change.after.name))
    if change.before is None:
        if not is_new and targets.find(name) is None:
            targets.were_there.discard(name)
        elif not is_new:
            raise _needed(change, "it was dropped and created again")
        return
    old = targets.name_of((change.before.namespace, change.before.name))
    differences, reason = follow_shape(change, chain)
    if targets.find(old) is None and (old == name or targets.find(name) is None):
        if brings_rows(diff_shapes(change)):
            raise _needed(change, reason)
        return  # created with its first row
    if old != name:
        if old in taken:
            reason = f"it was renamed from {name_table(*old)}, a name that another table has now"
        elif targets.find(old) is None and not is_new:
            reason = f"it was renamed from {name_table(*old)}, and the target has the copy of another table there"
        with targets.together():
            reason = reason or _rename(targets, old, name)
    if reason:
        raise _needed(change, reason)
    target = targets.find(name)
    if target is not None:
        ours = {column.name for one in history for column in behind(one, chain).after.columns}
        mine = _in_the_way(target, differences) - ours
        made = {one["column"] for one in differences if one.get("column") in mine and _is_made(targets, target, one)}
        differences = [one for one in differences if one.get("column") not in made]  # another client added them first
        if mine := mine - made:
            raise _needed(change, f"the target has a column {', '.join(sorted(mine))} that the source lacked")
        with targets.together(target if _is_blind(differences) else None):
            _follow_columns(targets, target, differences, change)
            _follow_key(targets, name, change, chain)


def rebuild(
    targets: Targets,
    source: SourceTable,
    key: tuple[str, ...],
    history: Sequence[ShapeChange],
    taken: Collection[TableName],
    named: Sequence[ShapeChange],
) -> None:
    """Leave an empty table with the source's columns and key, whatever was there before.

    Keeps columns whose type the source never had: a user chose it. `named`: every shape of the tables that ever had one
    of its names.
    """
    name, columns = targets.name_of(source.name), list(source.types)
    for one in history:  # it was renamed while it was held
        old = targets.name_of((one.after.namespace, one.after.name))
        if old != name and old in targets.were_there and old not in taken and targets.find(name) is None:
            with targets.together():
                _rename(targets, old, name)
    target = targets.find(name)
    if target is None:
        targets.were_there.discard(name)
        targets.prepare(source, columns, key)
        return
    _truncate(targets, target)
    types, _ = targets.types(source, columns)
    ours = {column: {kind for one in named for kind in _types_of(one).get(column, ())} for column in columns}
    known = targets.existing(kind for kinds in ours.values() for kind in kinds)
    with targets.together():
        for column, kind in types.items():
            had = target.columns.get(column)
            was_ours = had is not None and (
                had.type in ours[column] or (had.type == "text" and not ours[column] <= known)
            )
            if had is not None and had.type != kind and was_ours:
                _alter(targets, target, f"DROP COLUMN {quote_identifier(column)}")
        left = targets.find(name)  # a dropped column took the key with it
        assert left is not None
        for column, had in left.columns.items():
            if column not in types and had.is_required and column not in left.primary_key:
                _alter(targets, left, f"ALTER COLUMN {quote_identifier(column)} DROP NOT NULL")
        target = targets.prepare(source, columns, key)
        _set_key(targets, target, key)
    targets.say(f"table {target.title} was emptied; its rows are read again")


def _types_of(change: ShapeChange) -> dict[str, tuple[str, ...]]:
    return dict(describe_source(change.after, change.details).types)


def _needed(change: ShapeChange, reason: str) -> ReloadNeeded:
    return describe_source(change.after, change.details).needs(reason)


def _truncate(targets: Targets, target: TargetTable) -> None:
    try:
        targets.truncate([target])
    except psycopg.errors.FeatureNotSupported:  # another table refers to it
        targets.conn.execute(f"DELETE FROM {target.sql}".encode())


# --- tables


def _rename(targets: Targets, old: TableName, new: TableName) -> str:
    """Rename the target's table. Returns why the new one has to be read again instead, if it cannot."""
    if targets.find(old) is None:
        return ""
    if targets.find(new) is not None:
        if new in targets.were_there:  # left by another table that was renamed as well
            return f"it was renamed from {name_table(*old)}, but the target still has a table with the new name"
        raise SinkError(
            f"table {name_table(*old)} was renamed to {name_table(*new)} at the source, but the target has "
            "another table with that name: their rows would be mixed",
            f"Rename that table: ALTER TABLE {quote_qualified(*new)} RENAME TO ...",
        )
    action = f"cannot rename table {name_table(*old)} at the target"
    targets.create_schema(new[0], action)
    in_the_way = targets.conn.execute(_SAME_INDEXES, (quote_qualified(*old), new[0])).fetchall()
    name = new[1]
    if old[0] != new[0] and _is_taken(targets, (old[0], name)):
        name = _free_name(name)
    if old[1] != name:
        targets.run(f"ALTER TABLE {quote_qualified(*old)} RENAME TO {quote_identifier(name)}", action)
    if old[0] != new[0]:
        moved = quote_qualified(old[0], name)
        for (index,) in in_the_way:
            free = quote_identifier(_free_name(index))
            targets.run(f"ALTER INDEX {quote_qualified(old[0], index)} RENAME TO {free}", action)
        targets.run(f"ALTER TABLE {moved} SET SCHEMA {quote_identifier(new[0])}", action)
        if name != new[1]:
            moved = quote_qualified(new[0], name)
            targets.run(f"ALTER TABLE {moved} RENAME TO {quote_identifier(new[1])}", action)
    targets.forget_all()
    targets.were_there.discard(old)
    targets.say(f"table {name_table(*old)} renamed to {name_table(*new)}")
    return ""


def _is_taken(targets: Targets, name: TableName) -> bool:
    found = targets.conn.execute("SELECT to_regclass(%s) IS NOT NULL", (quote_qualified(*name),)).fetchone()
    return found == (True,)


def _free_name(name: str) -> str:
    return f"{name[:40]}_{secrets.token_hex(4)}"


# --- columns


def _follow_columns(
    targets: Targets, target: TargetTable, differences: Sequence[Difference], change: ShapeChange
) -> None:
    found: dict[str, list[Any]] = {}
    for one in differences:
        found.setdefault(one["type"], []).append(one)
    for one in found.get("column_removed", ()):
        had = target.columns.get(one["column"])
        if had is not None and had.is_required and one["column"] not in target.primary_key:
            _alter(targets, target, f"ALTER COLUMN {quote_identifier(one['column'])} DROP NOT NULL")
            targets.say(f"table {target.title}: column {one['column']} is now nullable, because the source dropped it")
    renames = {one["from"]: one["to"] for one in found.get("column_renamed", ()) if one["from"] in target.columns}
    replaced = {one["column"]: one for one in found.get("column_replaced", ()) if one["column"] in target.columns}
    added = {one["column"]: one for one in [*found.get("column_added", ()), *replaced.values()]}
    for column in _in_the_way(target, differences):
        _alter(targets, target, f"DROP COLUMN {quote_identifier(column)}")
    aside = {old: f"pgcdc_moving_{number}" for number, old in enumerate(renames)} if _is_chained(renames) else {}
    for old, between in aside.items():
        _alter(targets, target, f"RENAME COLUMN {quote_identifier(old)} TO {quote_identifier(between)}")
    for old, new in renames.items():
        here = quote_identifier(aside.get(old, old))
        _alter(targets, target, f"RENAME COLUMN {here} TO {quote_identifier(new)}")
        targets.say(f"table {target.title}: column {old} renamed to {new}")
    for one in found.get("column_type_changed", ()):
        _retype(targets, target.name, one)
    if added:
        _add(targets, target, added, change)


def _is_chained(renames: Mapping[str, str]) -> bool:
    """Whether a new name is also an old one."""
    return bool(set(renames) & set(renames.values()))


def _is_blind(differences: Iterable[Difference]) -> bool:
    """Whether the target's columns look the same before and after."""
    renames = {one["from"]: one["to"] for one in differences if one["type"] == "column_renamed"}
    return _is_chained(renames) or any(one["type"] == "column_replaced" for one in differences)


def _in_the_way(target: TargetTable, differences: Iterable[Difference]) -> set[str]:
    """Columns of the target whose names are needed: the source dropped them earlier, or replaces them."""
    renames = {one["from"]: one["to"] for one in differences if one["type"] == "column_renamed"}
    added = {one["column"] for one in differences if one["type"] in ("column_added", "column_replaced")}
    return {*(new for old, new in renames.items() if old in target.columns), *added} & (
        set(target.columns) - set(renames)
    )


def _is_made(targets: Targets, target: TargetTable, one: Difference) -> bool:
    """Whether the target already has a column as the source now has it, including values in existing rows."""
    if one["type"] != "column_added":
        return False
    column, default = quote_identifier(one["column"]), one.get("default")
    value = "NULL" if default is None else f"{quote_literal(default)}::{target.columns[one['column']].type}"
    other = f"SELECT 1 FROM {target.sql} WHERE {column} IS DISTINCT FROM {value} LIMIT 1"
    return targets.conn.execute(other.encode()).fetchone() is None


def _add(targets: Targets, target: TargetTable, added: dict[str, Difference], change: ShapeChange) -> None:
    source = describe_source(change.after, change.details)
    wanted = {column: source.types.get(column) or (one["new_type"],) for column, one in added.items()}
    types, note = targets.types(SourceTable(source.name, wanted), added)
    for column, kind in types.items():
        quoted, default = quote_identifier(column), added[column].get("default")
        text = f"{quote_literal(default)}::{kind}" if default is not None else ""
        _alter(targets, target, f"ADD COLUMN {quoted} {kind}{f' DEFAULT {text}' if text else ''}")
        if text:  # existing rows have it now; new rows bring their own value
            _alter(targets, target, f"ALTER COLUMN {quoted} DROP DEFAULT")
    targets.say(f"table {target.title}: column {', '.join(added)} added{note}")


def _retype(targets: Targets, name: TableName, one: Difference) -> None:
    """Change a column's type, but only if it had the source's type: a user chose any other type."""
    target = targets.find(name)
    assert target is not None
    column, old, new = one["column"], one["old_type"], one["new_type"]
    known = targets.existing([old, new])
    old, new = (kind if kind in known else "text" for kind in (old, new))
    had = target.columns.get(column)
    if had is None or had.type != old or had.type == new:
        return
    quoted = quote_identifier(column)
    action = f"ALTER COLUMN {quoted} TYPE {new} USING"
    try:
        with targets.conn.transaction():
            _alter(targets, target, f"{action} ({quoted})::{new}")
    except (psycopg.errors.CannotCoerce, psycopg.errors.DatatypeMismatch):  # written as text, and read again
        _alter(targets, target, f"{action} ({quoted}::text)::{new}")
    targets.say(f"table {target.title}: type of column {column} changed from {old} to {new}")


# --- keys


def _follow_key(targets: Targets, name: TableName, change: ShapeChange, chain: SimpleChain) -> None:
    """Give the target's table the source's key, if it had the previous one. ReloadNeeded: its rows do not allow it."""
    shown, target = behind(change, chain), targets.find(name)
    assert target is not None and shown.before is not None
    old = describe_source(shown.before, shown.before_details).key
    new = describe_source(shown.after, shown.details).key
    renamed = {one["from"]: one["to"] for one in follow_shape(change, chain)[0] if one["type"] == "column_renamed"}
    had = tuple(renamed.get(column, column) for column in old)
    if set(had) == set(new) or set(target.primary_key) != set(had):
        return
    try:
        with targets.conn.transaction():
            _set_key(targets, target, new)
    except _UNFIT as error:
        raise _needed(change, f"the rows at the target do not fit its new key: {error.diag.message_primary}") from None


def _set_key(targets: Targets, target: TargetTable, key: tuple[str, ...]) -> None:
    if set(target.primary_key) == set(key):
        return
    found, actions = targets.conn.execute(_CONSTRAINT, (target.sql,)).fetchone(), list[str]()
    if found is not None:
        actions.append(f"DROP CONSTRAINT {quote_identifier(found[0])}")
        optional = [column for column in target.primary_key if column not in key and column in target.columns]
        actions += [f"ALTER COLUMN {quote_identifier(column)} DROP NOT NULL" for column in optional]
    if key:
        actions.append(f"ADD PRIMARY KEY ({', '.join(map(quote_identifier, key))})")
    _alter(targets, target, *actions)  # in one statement, which a user can also run without losing the key
    shown = ", ".join(key) if key else "none (rows are found by all their values)"
    targets.say(f"table {target.title}: key changed to {shown}")


def _alter(targets: Targets, target: TargetTable, *actions: str) -> None:
    """Run ALTER TABLE actions. Only the first of them may drop anything."""
    first, *more = actions
    statement = f"ALTER TABLE {target.sql} {first}"
    try:
        targets.run(", ".join([statement, *more]), f"cannot alter table {target.title} at the target")
    except psycopg.errors.DependentObjectsStillExist as error:
        raise SinkError(
            f"cannot alter table {target.title} at the target: {error.diag.message_primary}",
            f"Drop the objects that depend on it there, or run: {', '.join([f'{statement} CASCADE', *more])}",
        ) from error
    targets.forget(target.name)
