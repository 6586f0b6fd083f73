"""Random scripts of DDL and DML, for a campaign that compares a mirror with its source after each. A script depends on its
seed alone. It knows only roughly what the tables are like: PostgreSQL refuses some statements, and who runs it skips them.

Left out: `ALTER PUBLICATION` by hand, which stops the pipeline by design.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

SETUP = (
    "CREATE TYPE mood AS ENUM ('fine', 'so, so')",
    "CREATE TYPE pair AS (x int, y text)",
    "CREATE SEQUENCE u START 100000",
    "CREATE SCHEMA s1",
    'CREATE SCHEMA "Odd one"',
)
SCHEMAS = ("public", "public", "s1", "Odd one")
KEY_TYPES = ("int", "bigint", "text", "uuid", "numeric(10,2)", "varchar(40)")
VALUES = {
    "int": "{g}",
    "bigint": "{g} * 10000000000",
    "text": "'t''' || {g}",
    "varchar(40)": "'v' || {g}",
    "varchar(80)": "'w' || {g}",
    "numeric(10,2)": "{g} / 4.0",
    "numeric(12,2)": "{g} / 4.0",
    "float8": "{g} / 7.0",
    "timestamptz": "timestamptz '2026-01-01 00:00+00' + {g} * interval '1 minute'",
    "date": "date '2026-01-01' + ({g} % 9999)::int",
    "uuid": "md5(({g})::text)::uuid",
    "jsonb": "jsonb_build_object('g', {g}, 'n', NULL)",
    "boolean": "{g} % 2 = 0",
    "bytea": "decode(md5(({g})::text), 'hex')",
    "int[]": "ARRAY[{g}, NULL]::int[]",
    "mood": "'fine'::mood",
    "pair": "jsonb_populate_record(NULL::pair, jsonb_build_object('x', {g}, 'y', 'p, ' || {g}))",
}
CONSTANTS = {
    "int": "7", "bigint": "-1", "text": "'it''s {\"1\",2}'", "varchar(40)": "''", "numeric(10,2)": "1.50", "float8": "'NaN'",
    "timestamptz": "'2020-02-02 02:02+02'", "date": "'infinity'", "uuid": "'00000000-0000-0000-0000-000000000001'",
    "jsonb": "'{\"a\": [1]}'", "boolean": "true", "bytea": "'\\x00ff'", "int[]": "'{1,NULL,3}'", "mood": "'so, so'",
    "pair": "jsonb_populate_record(NULL::pair, '{\"x\": 5}')",
}  # fmt: skip
VOLATILE = {
    "float8": "random()", "timestamptz": "clock_timestamp()", "uuid": "gen_random_uuid()", "bigint": "nextval('u')",
    "text": "'r' || random()",
}  # fmt: skip
# From, to: what old rows get is their own cast, or USING.
WITHOUT_REWRITE = {"varchar(40)": "varchar(80)", "varchar(80)": "text", "numeric(10,2)": "numeric(12,2)"}
REWRITTEN = {
    "int": ("bigint", "numeric(10,2)", "float8", "text"), "bigint": ("text", "float8"), "date": ("timestamptz", "text"),
    "numeric(10,2)": ("text", "float8", "numeric(12,2)"), "text": ("varchar(80)",), "uuid": ("text",), "boolean": ("text",),
    "timestamptz": ("text",), "float8": ("text",), "mood": ("text",), "jsonb": ("text",), "int[]": ("text",),
}  # fmt: skip
NEXT = "nextval('u')"
PACES = ("", "", "", "step", "step", "pause", "follow", "look")
KILLS = ("capture", "restart", "unacknowledged", "capture in a reload", "restart in a reload")


@dataclass(frozen=True)
class Group:
    """Statements that belong together, and what the mirror does behind them."""

    statements: tuple[str, ...]
    how: str = "alone"
    """`alone`: each its own transaction; `whole`: one transaction; `rolled back`; `savepoint`: all but the first are rolled
    back, and the rest of the transaction is not; `held`: another session has it open for the next groups."""
    then: str = ""  # One of PACES
    kill: str = ""  # One of KILLS


@dataclass
class Column:
    name: str
    type: str
    is_written: bool = True  # Values may be given


@dataclass
class Table:
    schema: str
    name: str
    columns: list[Column]
    key: list[str]
    root: str = ""  # `id` decides on the partition
    partitions: list[tuple[str, int]] = field(default_factory=list)  # Name, and which hundred of ids
    places: int = 0  # Partitions ever made

    @property
    def sql(self) -> str:
        return f"{quote(self.schema)}.{quote(self.name)}"

    def find(self, name: str) -> Column | None:
        return next((one for one in self.columns if one.name == name), None)

    def free(self) -> list[Column]:
        """Columns that nothing depends on."""
        return [one for one in self.columns if one.name not in self.key and one.name != self.root]


def quote(name: str) -> str:
    return name if name.isidentifier() and name.islower() else f'"{name}"'


class Writer:
    """Writes one script."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.dice = random.Random(seed)
        self.tables: list[Table] = []
        self.labels = ["fine", "so, so"]
        self.attributes: list[str] = []  # Of `pair`, besides its first two
        self.number = 0  # For names
        self.row = 0  # For values: never the same twice

    def write(self) -> list[Group]:
        groups = [Group(SETUP), *(Group(tuple(self._create())) for _ in range(self.dice.randint(2, 6)))]
        groups.append(Group(tuple(one for table in self.tables for one in self._fill(table))))
        groups.append(Group((), then="settle"))
        for _ in range(self.dice.randint(4, 12)):
            groups.append(self._group())
        if self.seed % 3 == 0:
            first = next(place for place, one in enumerate(groups) if one.then == "settle") + 1
            for place in self.dice.sample(range(first, len(groups)), self.dice.randint(1, 3)):
                groups[place] = replace(groups[place], kill=self.dice.choice(KILLS))
        return groups

    def _group(self) -> Group:
        how = self.dice.choices(
            ("alone", "whole", "rolled back", "savepoint", "held"), weights=(45, 30, 8, 7, 10)
        )[0]  # fmt: skip
        then = self.dice.choice(PACES)
        before = copy.deepcopy((self.tables, self.labels, self.attributes))
        statements: list[str] = []
        if how == "held":
            statements += [one for _ in range(self.dice.randint(1, 3)) for one in self._change(self._pick())]
            # An open TRUNCATE would lock out everybody who looks at the publications, us included.
            return Group(tuple(one for one in statements if not one.startswith("TRUNCATE")), how, then)
        for _ in range(self.dice.randint(1, 4)):
            if self.dice.random() < 0.55:
                statements += self._alter()
            if self.dice.random() < 0.7:
                statements += [one for _ in range(self.dice.randint(1, 3)) for one in self._change(self._pick())]
        if how == "rolled back":
            self.tables, self.labels, self.attributes = before
        elif how == "savepoint":
            self.tables, self.labels, self.attributes = before
            first = self._change(self._pick())
            last = self._change(self._pick())
            return Group((*first, "SAVEPOINT away", *statements, "ROLLBACK TO away", *last), "whole", then)
        return Group(tuple(statements), how, then)

    # --- rows

    def _pick(self) -> Table:
        return self.dice.choice(self.tables)

    def _name(self, prefix: str) -> str:
        self.number += 1
        return f"{prefix}{self.number}" if self.dice.random() < 0.9 else f"{prefix.upper()} {self.number}"

    def _value(self, column: Column, g: str) -> str:
        if column.name.startswith("big"):
            return f"repeat(md5(({g})::text), 90)"
        if column.type == "mood":
            return f"'{self.dice.choice(self.labels)}'::mood"
        return VALUES[column.type].format(g=g)

    def _fill(self, table: Table) -> list[str]:
        return [self._insert(table, self.dice.randint(1, 60))] if self.dice.random() < 0.9 else []

    def _insert(self, table: Table, rows: int) -> str:
        first, self.row = self.row + 1, self.row + rows
        if table.root:  # ids stay within the partitions that there are, most of the time
            hundred = self.dice.choice([place for _, place in table.partitions] or [0])
            first = hundred * 100_000 + self.row
        columns = [
            one for one in table.columns
            if one.is_written and (one.name in table.key or one.name == table.root or self.dice.random() < 0.9)
        ]  # fmt: skip
        if not columns:
            return f"INSERT INTO {table.sql} DEFAULT VALUES"
        listed = ", ".join(quote(one.name) for one in columns)
        values = ", ".join("g" if one.name == table.root else self._value(one, "g") for one in columns)
        rows_of = f"generate_series({first}, {first + rows - 1}) g"
        return f"INSERT INTO {table.sql} ({listed}) SELECT {values} FROM {rows_of} ON CONFLICT DO NOTHING"

    def _some(self, table: Table, parts: int) -> str:
        """A condition that a part of the rows meets, whatever the columns are."""
        column = self.dice.choice(table.columns) if table.columns else None
        if column is None:
            return "true"
        return f"abs(hashtext({quote(column.name)}::text)) % {parts} = {self.dice.randrange(parts)}"

    def _change(self, table: Table) -> list[str]:
        what, free = self.dice.random(), [one for one in table.free() if one.is_written]
        keys = [one for name in table.key if (one := table.find(name)) is not None and one.is_written]
        if what < 0.3:
            return [self._insert(table, self.dice.choice([1, 1, 3, 20]))]
        if what < 0.6 and free:
            column = self.dice.choice(free)
            value = self._value(column, f"{self.dice.randint(1, 99)}") if self.dice.random() < 0.8 else "NULL"
            return [f"UPDATE {table.sql} SET {quote(column.name)} = {value} WHERE {self._some(table, 5)}"]
        if what < 0.72 and keys:
            column = self.dice.choice(keys)
            if column.name == table.root:  # to another partition
                places = [place for _, place in table.partitions]
                if len(places) < 2:
                    return []
                to = self.dice.choice(places) * 100_000
                move = f"{quote(column.name)} = {quote(column.name)} % 100000 + {to}"
                return [f"UPDATE {table.sql} SET {move} WHERE {self._some(table, 7)}"]
            value = self._value(column, NEXT)
            return [f"UPDATE {table.sql} SET {quote(column.name)} = {value} WHERE {self._some(table, 7)}"]
        if what < 0.9:
            return [f"DELETE FROM {table.sql} WHERE {self._some(table, 7)}"]
        if what < 0.93:
            both = [table, *(one for one in self.tables if one is not table and self.dice.random() < 0.2)]
            how = self.dice.choice(["", "", " CASCADE", " RESTART IDENTITY CASCADE"])
            return [f"TRUNCATE {', '.join(one.sql for one in both)}{how}"]
        if what < 0.95:
            return [f"TRUNCATE ONLY {table.sql}"]
        row = self._insert(table, 2)
        return [row, f"UPDATE {table.sql} SET {self._same(table)} WHERE {self._some(table, 3)}", row]

    def _same(self, table: Table) -> str:
        """Every row gets what it has: long values stay where they are."""
        names = [quote(one.name) for one in table.columns if one.is_written] or ["ctid"]
        return ", ".join(f"{one} = {one}" for one in names[:2])

    # --- tables

    def _columns(self) -> list[Column]:
        kinds = self.dice.sample(sorted(VALUES), self.dice.randint(1, 5))
        columns = [Column(self._name("c"), kind) for kind in kinds]
        return columns + (
            [Column(self._name("big").lower().replace(" ", ""), "text")] if self.dice.random() < 0.4 else []
        )

    def _create(self) -> list[str]:
        what = self.dice.random()
        if what < 0.22:
            return self._create_root()
        name, schema = self._name("t"), self.dice.choice(SCHEMAS)
        if what < 0.3 and self.tables:
            return self._create_child(name)
        return self._create_plain(schema, name)

    def _create_plain(self, schema: str, name: str) -> list[str]:
        key = Column(self.dice.choice(["id", "id", "Key"]), self.dice.choice(KEY_TYPES))
        table = Table(schema, name, [key, *self._columns()], [key.name])
        self.dice.shuffle(table.columns)
        if self.dice.random() < 0.12:
            table.key = []
        self.tables.append(table)
        return [self._definition(table), *self._extras(table)]

    def _definition(self, table: Table) -> str:
        parts = [f"{quote(one.name)} {one.type}" for one in table.columns]
        if table.key:
            parts.append(f"PRIMARY KEY ({', '.join(map(quote, table.key))})")
        by = f" PARTITION BY RANGE ({quote(table.root)})" if table.root else ""
        return f"CREATE TABLE {table.sql} ({', '.join(parts)}){by}"

    def _extras(self, table: Table) -> list[str]:
        big = [one.name for one in table.columns if one.name.startswith("big")]
        made = [f"ALTER TABLE {table.sql} ALTER COLUMN {quote(one)} SET STORAGE EXTERNAL" for one in big]
        if self.dice.random() < 0.15 and not table.root:
            made.append(f"ALTER TABLE {table.sql} REPLICA IDENTITY FULL")
        others = [one for one in self.tables if one is not table and len(one.key) == 1 and not one.root]
        if self.dice.random() < 0.1 and others:
            other = self.dice.choice(others)
            column = Column(self._name("ref"), other.find(other.key[0]).type, is_written=False)  # type: ignore[union-attr]
            table.columns.append(column)
            where = f"{other.sql} ({quote(other.key[0])})"
            made.append(f"ALTER TABLE {table.sql} ADD COLUMN {quote(column.name)} {column.type} REFERENCES {where}")
        return made

    def _create_root(self) -> list[str]:
        columns = [Column("id", self.dice.choice(["int", "bigint"])), *self._columns()]
        table = Table(self.dice.choice(SCHEMAS), self._name("p"), columns, ["id"], root="id")
        if self.dice.random() < 0.1:
            table.key = []
        self.tables.append(table)
        made = [self._definition(table)]
        for _ in range(self.dice.randint(1, 3)):
            made += self._create_partition(table)
        if self.dice.random() < 0.2:
            made.append(
                f"CREATE TABLE {quote(table.schema)}.{quote(self._name('rest'))} PARTITION OF {table.sql} DEFAULT"
            )
        return made + self._extras(table)

    def _create_partition(self, table: Table) -> list[str]:
        place, table.places = table.places, table.places + 1
        name = (
            f'{table.sql[:-1]}_{self.number}_{place}"'
            if table.sql.endswith('"')
            else f"{table.sql}_{self.number}_{place}"
        )
        self.number += 1
        table.partitions.append((name, place))
        made = f"CREATE TABLE {name} PARTITION OF {table.sql} FOR VALUES {_bounds(place)}"
        if self.dice.random() > 0.2:
            return [made]
        lower, middle, upper = place * 100_000, place * 100_000 + self.row + 20, (place + 1) * 100_000
        halves = [f"FROM ({lower}) TO ({middle})", f"FROM ({middle}) TO ({upper})"]
        leaves = [f"{quote(table.schema)}.{quote(self._name('leaf'))}" for _ in halves]
        parts = [
            f"CREATE TABLE {leaf} PARTITION OF {name} FOR VALUES {one}"
            for leaf, one in zip(leaves, halves, strict=True)
        ]
        return [f"{made} PARTITION BY RANGE ({quote(table.root)})", *parts]

    def _create_child(self, name: str) -> list[str]:
        parents = [one for one in self.tables if not one.root]
        if not parents:
            return self._create_plain("public", name)
        parent = self.dice.choice(parents)
        own = Column(self._name("own"), "int")
        table = Table(parent.schema, name, [*copy.deepcopy(parent.columns), own], list(parent.key))
        self.tables.append(table)
        key = f", PRIMARY KEY ({', '.join(map(quote, table.key))})" if table.key else ""
        return [f"CREATE TABLE {table.sql} ({quote(own.name)} int{key}) INHERITS ({parent.sql})"]

    # --- DDL

    def _alter(self) -> list[str]:
        table = self._pick()
        if table.root and self.dice.random() < 0.6:
            return self.dice.choice(self._partition_kinds())(table)
        kinds = self._kinds()
        return self.dice.choices(list(kinds), weights=list(kinds.values()))[0](table)

    def _kinds(self) -> dict[Callable[[Table], list[str]], int]:
        return {
            self._add: 10, self._add_constant: 12, self._add_computed: 10, self._drop: 8, self._rename: 10,
            self._swap_columns: 4, self._rename_and_more: 5, self._retype: 10, self._retype_using: 7, self._replace: 8,
            self._drop_key: 4, self._change_key: 8, self._key_from_new: 4, self._identity: 8, self._rename_table: 6,
            self._swap_tables: 4, self._move_table: 5, self._drop_table: 3, self._make_again: 6, self._new_table: 5,
            self._enum: 4, self._label: 3, self._composite: 4, self._shuffle: 8,
            self._storage: 6, self._default: 4, self._unlogged: 2, self._inherit: 2,
        }  # fmt: skip

    def _partition_kinds(self) -> list[Callable[[Table], list[str]]]:
        return [
            self._create_partition, self._attach, self._attach, self._attach_empty, self._detach, self._detach,
            self._truncate_partition, self._drop_partition, self._move_rows, self._write_partition,
        ]  # fmt: skip

    def _new_column(self, table: Table, kind: str = "") -> Column:
        column = Column(self._name("n"), kind or self.dice.choice(sorted(CONSTANTS)))
        table.columns.append(column)
        return column

    def _add(self, table: Table) -> list[str]:
        columns = [self._new_column(table) for _ in range(self.dice.choice([1, 1, 2]))]
        parts = ", ".join(f"ADD COLUMN {quote(one.name)} {one.type}" for one in columns)
        return [f"ALTER TABLE {table.sql} {parts}"]

    def _add_constant(self, table: Table) -> list[str]:
        kind = self.dice.choice(sorted(CONSTANTS))
        column = self._new_column(table, kind)
        value = "now()" if kind == "timestamptz" and self.dice.random() < 0.5 else CONSTANTS[kind]
        how = self.dice.choice(["", " NOT NULL"])
        made = [f"ALTER TABLE {table.sql} ADD COLUMN {quote(column.name)} {kind}{how} DEFAULT {value}"]
        if self.dice.random() < 0.3:
            made += self._default(table)
        return made

    def _add_computed(self, table: Table) -> list[str]:
        what = self.dice.random()
        if what < 0.4:
            kind = self.dice.choice(sorted(VOLATILE))
            column = self._new_column(table, kind)
            return [f"ALTER TABLE {table.sql} ADD COLUMN {quote(column.name)} {kind} DEFAULT {VOLATILE[kind]}"]
        column = self._new_column(table, "bigint")
        column.is_written = False
        name = quote(column.name)
        if what < 0.6:
            return [f"ALTER TABLE {table.sql} ADD COLUMN {name} bigserial"]
        if what < 0.8:
            how = self.dice.choice(["ALWAYS", "BY DEFAULT"])
            return [f"ALTER TABLE {table.sql} ADD COLUMN {name} bigint GENERATED {how} AS IDENTITY"]
        column.type = "text"
        of = self.dice.choice(table.columns[:-1]) if len(table.columns) > 1 else column
        expression = f"md5({quote(of.name)})" if of.type == "text" else f"{quote(of.name)} IS NULL"
        column.type = "text" if of.type == "text" else "boolean"
        return [f"ALTER TABLE {table.sql} ADD COLUMN {name} {column.type} GENERATED ALWAYS AS ({expression}) STORED"]

    def _drop(self, table: Table) -> list[str]:
        if not table.free():
            return []
        column = self.dice.choice(table.free())
        table.columns.remove(column)
        cascade = self.dice.choice(["", " CASCADE"])
        return [f"ALTER TABLE {table.sql} DROP COLUMN {quote(column.name)}{cascade}"]

    def _rename(self, table: Table, to: str = "") -> list[str]:
        if not table.columns:
            return []
        column = self.dice.choice(table.columns)
        return self._rename_one(table, column, to or self._name("r"))

    def _rename_one(self, table: Table, column: Column, to: str) -> list[str]:
        old, column.name = column.name, to
        table.key = [to if one == old else one for one in table.key]
        table.root = to if table.root == old else table.root
        return [f"ALTER TABLE {table.sql} RENAME COLUMN {quote(old)} TO {quote(to)}"]

    def _swap_columns(self, table: Table) -> list[str]:
        if len(table.columns) < 2:
            return []
        a, b = self.dice.sample(table.columns, 2)
        names = a.name, b.name
        return [
            *self._rename_one(table, a, "between"), *self._rename_one(table, b, names[0]),
            *self._rename_one(table, a, names[1]),
        ]  # fmt: skip

    def _rename_and_more(self, table: Table) -> list[str]:
        if not table.free():
            return []
        column = self.dice.choice(table.free())
        old = column.name
        made = self._rename_one(table, column, self._name("r"))
        what = self.dice.random()
        if what < 0.4:  # another one gets its name
            new = Column(old, self.dice.choice(["int", "text", "uuid"]))
            table.columns.append(new)
            how = self.dice.choice(["", f" DEFAULT {CONSTANTS[new.type]}"])
            return [*made, f"ALTER TABLE {table.sql} ADD COLUMN {quote(old)} {new.type}{how}"]
        return [*made, *self._change(table), *self._retype(table)]

    def _retype(self, table: Table) -> list[str]:
        some = [one for one in table.columns if one.type in WITHOUT_REWRITE or one.type in REWRITTEN]
        some = [one for one in some if one.name != table.root and one.is_written]
        if not some:
            return []
        column = self.dice.choice(some)
        kind = WITHOUT_REWRITE.get(column.type, "")
        if not kind or (column.type in REWRITTEN and self.dice.random() < 0.3):
            kind = self.dice.choice(REWRITTEN.get(column.type, (kind,)))
        column.type = kind
        return [f"ALTER TABLE {table.sql} ALTER COLUMN {quote(column.name)} TYPE {kind}"]

    def _retype_using(self, table: Table) -> list[str]:
        numbers = [one for one in table.free() if one.type in ("int", "bigint", "numeric(10,2)") and one.is_written]
        texts = [one for one in table.free() if one.type in ("text", "varchar(40)") and one.is_written]
        if numbers and self.dice.random() < 0.5:
            column = self.dice.choice(numbers)
            name = quote(column.name)
            return [f"ALTER TABLE {table.sql} ALTER COLUMN {name} TYPE {column.type} USING {name} * 2"]
        if texts:
            column = self.dice.choice(texts)
            name, kind = quote(column.name), self.dice.choice(["int", "bytea"])
            if column.name.startswith("big"):
                return []
            column.type = kind
            how = f"length({name})" if kind == "int" else f"convert_to({name}, 'UTF8')"
            return [
                f"ALTER TABLE {table.sql} ALTER COLUMN {name} DROP DEFAULT",
                f"ALTER TABLE {table.sql} ALTER COLUMN {name} TYPE {kind} USING {how}",
            ]
        return []

    def _replace(self, table: Table) -> list[str]:
        """Drop and add under the same name; also how columns get another order."""
        if not table.free():
            return []
        column = self.dice.choice(table.free())
        kind = column.type if self.dice.random() < 0.4 else self.dice.choice(sorted(CONSTANTS))
        how = self.dice.choice(["", f" DEFAULT {CONSTANTS[kind]}"]) if kind in CONSTANTS else ""
        table.columns.remove(column)
        table.columns.append(Column(column.name, kind))
        name = quote(column.name)
        made = [f"DROP COLUMN {name}", f"ADD COLUMN {name} {kind}{how}"]
        filled = [f"UPDATE {table.sql} SET {name} = {self._value(Column(column.name, kind), '5')}"]
        return [*(f"ALTER TABLE {table.sql} {one}" for one in made), *(filled if self.dice.random() < 0.3 else [])]

    # --- keys

    def _drop_key(self, table: Table) -> list[str]:
        table.key = []
        return [_drop_key(table)]

    def _change_key(self, table: Table) -> list[str]:
        some = [one for one in table.columns if one.type in KEY_TYPES and one.is_written and one.name not in table.key]
        if not some:
            return []
        column, old = self.dice.choice(some), table.key
        what = self.dice.random()
        key = [*old, column.name] if what < 0.4 and old else [column.name]
        if table.root and table.root not in key:
            key = [table.root, *key]
        made = [_drop_key(table)] if old else []
        if self.dice.random() < 0.8:
            made.append(f"UPDATE {table.sql} SET {quote(column.name)} = {self._value(column, NEXT)}")
        late = " DEFERRABLE" if self.dice.random() < 0.08 else ""
        table.key = key
        made.append(f"ALTER TABLE {table.sql} ADD PRIMARY KEY ({', '.join(map(quote, key))}){late}")
        return made

    def _key_from_new(self, table: Table) -> list[str]:
        if table.root:
            return []
        column = Column(self._name("sid"), "bigint", is_written=False)
        made = [_drop_key(table)] if table.key else []
        table.columns.append(column)
        table.key = [column.name]
        how = self.dice.choice(["bigserial", "bigint GENERATED ALWAYS AS IDENTITY"])
        made.append(f"ALTER TABLE {table.sql} ADD COLUMN {quote(column.name)} {how}")
        return [*made, f"ALTER TABLE {table.sql} ADD PRIMARY KEY ({quote(column.name)})"]

    def _identity(self, table: Table) -> list[str]:
        what = self.dice.random()
        if what < 0.35:
            return [f"ALTER TABLE {table.sql} REPLICA IDENTITY FULL"]
        if what < 0.65:
            return [f"ALTER TABLE {table.sql} REPLICA IDENTITY DEFAULT"]
        if what < 0.72:
            return [f"ALTER TABLE {table.sql} REPLICA IDENTITY NOTHING"]
        some = [one for one in table.columns if one.type in KEY_TYPES and one.is_written and not table.root]
        if not some:
            return []
        column, index = self.dice.choice(some), quote(self._name("x"))
        name = quote(column.name)
        return [
            *([f"UPDATE {table.sql} SET {name} = {self._value(column, NEXT)}"] if column.name not in table.key else []),
            f"ALTER TABLE {table.sql} ALTER COLUMN {name} SET NOT NULL",
            f"CREATE UNIQUE INDEX {index} ON {table.sql} ({name})",
            f"ALTER TABLE {table.sql} REPLICA IDENTITY USING INDEX {index}",
        ]

    # --- whole tables

    def _rename_table(self, table: Table) -> list[str]:
        old, table.name = table.sql, self._name("t")
        return [f"ALTER TABLE {old} RENAME TO {quote(table.name)}"]

    def _swap_tables(self, table: Table) -> list[str]:
        others = [one for one in self.tables if one is not table and one.schema == table.schema]
        if not others:
            return self._rename_table(table)
        other = self.dice.choice(others)
        between = f"{quote(table.schema)}.swapping"
        made = [
            f"ALTER TABLE {table.sql} RENAME TO swapping", f"ALTER TABLE {other.sql} RENAME TO {quote(table.name)}",
            f"ALTER TABLE {between} RENAME TO {quote(other.name)}",
        ]  # fmt: skip
        table.name, other.name = other.name, table.name
        return made

    def _move_table(self, table: Table) -> list[str]:
        old, table.schema = table.sql, self.dice.choice([one for one in SCHEMAS if one != table.schema])
        made = [f"ALTER TABLE {old} SET SCHEMA {quote(table.schema)}"]
        if self.dice.random() < 0.3:
            made += self._change(table)
            old, table.schema = table.sql, self.dice.choice([one for one in SCHEMAS if one != table.schema])
            made.append(f"ALTER TABLE {old} SET SCHEMA {quote(table.schema)}")
        return made

    def _drop_table(self, table: Table) -> list[str]:
        if len(self.tables) < 3:
            return []
        self.tables.remove(table)
        return [f"DROP TABLE {table.sql} CASCADE"]

    def _make_again(self, table: Table) -> list[str]:
        if table.root:
            return []
        self.tables.remove(table)
        made = [f"DROP TABLE {table.sql} CASCADE"]
        if self.dice.random() < 0.5:
            again = Table(table.schema, table.name, copy.deepcopy(table.columns), list(table.key))
            self.tables.append(again)
            made.append(self._definition(again))
        else:
            made += self._create_plain(table.schema, table.name)
        return [*made, *self._fill(self.tables[-1])]

    def _new_table(self, table: Table) -> list[str]:
        made = self._create()
        return [*made, *self._fill(self.tables[-1])]

    def _enum(self, table: Table) -> list[str]:
        label = f"l{self.number}'{len(self.labels)}"
        self.number += 1
        where = self.dice.choice(["", " BEFORE 'fine'"])
        self.labels.append(label.replace("'", "''"))
        made = [f"ALTER TYPE mood ADD VALUE '{self.labels[-1]}'{where}"]
        column = next((one for one in table.columns if one.type == "mood"), None)
        if column is None:
            column = self._new_column(table, "mood")
            made.append(f"ALTER TABLE {table.sql} ADD COLUMN {quote(column.name)} mood")
        used = f"UPDATE {table.sql} SET {quote(column.name)} = '{self.labels[-1]}' WHERE {self._some(table, 3)}"
        return [*made, used]

    def _label(self, table: Table) -> list[str]:
        """Another name for a label, also of rows that have it."""
        own = range(2, len(self.labels))
        if not own:
            return self._enum(table)
        place, self.number = self.dice.choice(own), self.number + 1
        old, self.labels[place] = self.labels[place], f"m{self.number}"
        return [f"ALTER TYPE mood RENAME VALUE '{old}' TO '{self.labels[place]}'"]

    def _composite(self, table: Table) -> list[str]:
        made = []
        if all(one.type != "pair" for one in table.columns):
            column = self._new_column(table, "pair")
            made = [f"ALTER TABLE {table.sql} ADD COLUMN {quote(column.name)} pair", *self._change(table)]
        if self.attributes and self.dice.random() < 0.4:
            return [*made, f"ALTER TYPE pair DROP ATTRIBUTE {self.attributes.pop()}"]
        if self.dice.random() < 0.2:
            return [*made, "ALTER TYPE pair RENAME ATTRIBUTE y TO z", "ALTER TYPE pair RENAME ATTRIBUTE z TO y"]
        self.number += 1
        self.attributes.append(f"a{self.number}")
        return [*made, f"ALTER TYPE pair ADD ATTRIBUTE {self.attributes[-1]} int"]

    def _shuffle(self, table: Table) -> list[str]:
        """Columns go, come and take each other's names, with rows in between: one may look like another."""
        made, names = list[str](), list[str]()
        kinds = sorted({one.type for one in table.free() if one.is_written and one.type in CONSTANTS} | {"text"})
        for _ in range(self.dice.randint(3, 6)):
            free, what = [one for one in table.free() if one.is_written], self.dice.random()
            if what < 0.3 and free:
                column = self.dice.choice(free)
                table.columns.remove(column)
                names.append(column.name)
                made.append(f"ALTER TABLE {table.sql} DROP COLUMN {quote(column.name)}")
            elif what < 0.5 and free and names:
                column = self.dice.choice(free)
                name = names.pop(self.dice.randrange(len(names)))
                names.append(column.name)
                made += self._rename_one(table, column, name)
            elif what < 0.75 and names:
                column = Column(names.pop(self.dice.randrange(len(names))), self.dice.choice(kinds))
                table.columns.append(column)
                how = self.dice.choice(["", "", f" DEFAULT {CONSTANTS[column.type]}"])
                made.append(f"ALTER TABLE {table.sql} ADD COLUMN {quote(column.name)} {column.type}{how}")
            else:
                made += self._change(table)
        return made

    def _storage(self, table: Table) -> list[str]:
        what = self.dice.random()
        if what < 0.6 or not table.key:
            return [f"VACUUM FULL {table.sql}"]
        index = quote(self._name("x"))
        return [
            f"CREATE INDEX {index} ON {table.sql} ({quote(table.key[0])})", f"CLUSTER {table.sql} USING {index}",
            f"DROP INDEX {quote(table.schema)}.{index}",
        ]  # fmt: skip

    def _default(self, table: Table) -> list[str]:
        some = [one for one in table.columns if one.type in CONSTANTS and one.is_written]
        if not some:
            return []
        column = self.dice.choice(some)
        how = self.dice.choice([
            f"SET DEFAULT {CONSTANTS[column.type]}", "DROP DEFAULT", "SET NOT NULL", "DROP NOT NULL",
        ])  # fmt: skip
        return [f"ALTER TABLE {table.sql} ALTER COLUMN {quote(column.name)} {how}"]

    def _unlogged(self, table: Table) -> list[str]:
        made = [f"ALTER TABLE {table.sql} SET UNLOGGED"]
        return [*made, *self._change(table), f"ALTER TABLE {table.sql} SET LOGGED"]

    def _inherit(self, table: Table) -> list[str]:
        if table.root:
            return []
        return self._create_child(self._name("t"))

    # --- partitions

    def _attach(self, table: Table) -> list[str]:
        place, table.places = table.places, table.places + 1
        name = f"{quote(table.schema)}.{quote(self._name('part'))}"
        table.partitions.append((name, place))
        return [
            f"CREATE TABLE {name} (LIKE {table.sql} INCLUDING ALL)",
            self._insert(replace_name(table, name), self.dice.randint(1, 20)),
            f"ALTER TABLE {table.sql} ATTACH PARTITION {name} FOR VALUES {_bounds(place)}",
        ]

    def _attach_empty(self, table: Table) -> list[str]:
        create, _, attach = self._attach(table)
        return [create, attach]

    def _detach(self, table: Table) -> list[str]:
        if not table.partitions:
            return []
        name, place = self.dice.choice(table.partitions)
        table.partitions.remove((name, place))
        how = self.dice.choice(["", " CONCURRENTLY"])
        made = [f"ALTER TABLE {table.sql} DETACH PARTITION {name}{how}"]
        what = self.dice.random()
        if what < 0.3:
            made.append(f"DELETE FROM {name} WHERE {self._some(table, 3)}")
        if what < 0.5:
            table.partitions.append((name, place))
            made.append(f"ALTER TABLE {table.sql} ATTACH PARTITION {name} FOR VALUES {_bounds(place)}")
        elif what < 0.7:
            made.append(f"DROP TABLE {name}")
        return made

    def _truncate_partition(self, table: Table) -> list[str]:
        return [f"TRUNCATE {self.dice.choice(table.partitions)[0]}"] if table.partitions else []

    def _drop_partition(self, table: Table) -> list[str]:
        if not table.partitions:
            return []
        one = self.dice.choice(table.partitions)
        table.partitions.remove(one)
        return [f"DROP TABLE {one[0]}"]

    def _move_rows(self, table: Table) -> list[str]:
        if len(table.partitions) < 2:
            return self._create_partition(table)
        to, root = self.dice.choice(table.partitions)[1] * 100_000, quote(table.root)
        return [f"UPDATE {table.sql} SET {root} = {root} % 100000 + {to} WHERE {self._some(table, 4)}"]

    def _write_partition(self, table: Table) -> list[str]:
        if not table.partitions:
            return []
        name = self.dice.choice(table.partitions)[0]
        return [self.dice.choice([
            f"DELETE FROM {name} WHERE {self._some(table, 4)}", f"UPDATE {name} SET {self._same(table)}",
            f"VACUUM FULL {name}",
        ])]  # fmt: skip


def replace_name(table: Table, name: str) -> Table:
    """The same table under the name of a partition to be: rows for the last one."""

    class Named(Table):
        @property
        def sql(self) -> str:
            return name

    return Named(table.schema, table.name, table.columns, table.key, table.root, table.partitions[-1:])


def _bounds(place: int) -> str:
    return f"FROM ({place * 100_000}) TO ({(place + 1) * 100_000})"


def _drop_key(table: Table) -> str:
    """The constraint has a name that nobody remembers after a rename."""
    find = f"SELECT conname FROM pg_constraint WHERE conrelid = '{table.sql}'::regclass AND contype = 'p'"
    drop = f"format('ALTER TABLE {table.sql} DROP CONSTRAINT %I CASCADE', ({find}))"
    return f"DO $$BEGIN EXECUTE {drop}; END$$"


def write_script(seed: int) -> list[Group]:
    return Writer(seed).write()
