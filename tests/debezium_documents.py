"""Documents of pgcdc and of Debezium side by side: which belong together, and what may be different."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
from databases import Database
from debezium_cases import CHANGES, SETUP, TYPES
from debezium_engine import PREFIX
from event_streams import SCHEMA
from pyspark.sql.pandas.types import from_arrow_schema
from queries import Query

from pgcdc.event.edits import SimpleChain, dump_chains

__all__ = ["DIFFERENT", "LEFT_OUT", "Document", "EventQuery", "differences", "make_changes", "set_up"]

Document = tuple[Any, dict[str, Any]]
"""Key and value of a message."""

# Of a value of a type: what pgcdc writes. Debezium has no document for the row at all, or something that is not the value.
_TEXT_OF_A_MATRIX = "Debezium writes [null, null], or the address of a Java object"
DIFFERENT: dict[tuple[str, str], tuple[Any, str]] = {
    ("numeric(3,-2)", "'12345'"): ("MAw=", "Debezium takes -2 for 2046 and pads with as many zeros"),
    ("numeric(3,-2)", "'-99900'"): ("/nnE", "the same"),
    ("numeric(30,-9)", f"'1{'0' * 38}'"): ("SztMqFqGxHoJiiJAAAAAAA==", "the same"),
    ("name", "'Odd name'"): ("Odd name", "Debezium writes null"),
    ("timetz", "'24:00:00-15:59:59'"): ("15:59:59Z", "Debezium stops"),
    ("interval", "'9223372036854775807 microseconds'"): (2**63 - 1, "Debezium stops"),
    ("interval", "'-9223372036854775808 microseconds'"): (-(2**63), "Debezium stops"),
    ("numeric(10,2)[]", "'{1,NaN}'"): (["ZA==", None], "Debezium makes the whole array null"),
    ("date[]", "'{2024-02-29,infinity}'"): ([19782, -2147472692], "Debezium has another infinity in arrays"),
    ("date[]", "'{infinity,NULL}'"): ([-2147472692, None], "the same"),
    ("feeling[]", r"""'{ok,"sad, very","NULL","",NULL}'"""): (["ok", "sad, very", "NULL", "", None], "Debezium stops"),
    **{
        (pg_type, literal): (literal.strip("'"), _TEXT_OF_A_MATRIX)
        for pg_type in ("int4[]", "int4[][]", "int8[][][]", "text[]", "matrix")
        for literal in TYPES[pg_type]
        if "{{" in literal
    },
}
LEFT_OUT = {"vector(2)[]", "int2vector[]", "tsvector[]", "bit(3)[]", "int2vector", "oidvector"}
"""Types whose columns pgcdc leaves out. Debezium stops at a value of them, or writes []."""
NOT_NULL_ONLY = {"sparsevec"}
"""Debezium stops at a delete of a table that has such a column, NOT NULL."""
UNAVAILABLE = {"amount", "amounts", "prices", "ratios", "flags", "moments", "ids", "bits", "place"}
"""Columns of the table `long`: unchanged TOAST for which Debezium has no placeholder. It writes null (for uuid[] something
else), which says that the value is NULL; pgcdc leaves the field out."""


CHAINS = [
    SimpleChain((), ({"type": "debezium", "topic_prefix": PREFIX, "transaction": True},)),
    SimpleChain((), ({"type": "cloudevents", "source": "/shop", "type_prefix": "com.example"},)),
]


class EventQuery(Query):
    """Keeps the batches of events as they are."""

    def __init__(self, database: Database, folder: Path, **options: str) -> None:
        super().__init__(database, folder, publication="p", messages="true", **options)
        self.events: list[pa.RecordBatch] = []

    def begin(self) -> None:
        """Also with the shapes of tables, and with what the source makes of its chains."""
        names = ("shape", "line_0", "line_1")
        more = [("table_ordinal", pa.int64()), *((name, pa.string()) for name in names)]
        self.load(from_arrow_schema(pa.schema([*SCHEMA, *more])), _chains=dump_chains(CHAINS))

    def replay(self, start: dict[str, Any] | None, end: dict[str, Any]) -> list[dict[str, Any]]:
        for partition in self.reader.partitions(start, end):
            self.events += self.reader.read(partition)
        return []

    def rows(self) -> list[dict[str, Any]]:
        """All events so far."""
        found: list[dict[str, Any]] = pa.Table.from_batches(self.events).to_pylist(maps_as_pydicts="strict")
        return found


def set_up(database: Database) -> None:
    with database.connect() as conn:
        for statement in SETUP:
            conn.execute(statement.encode())


def make_changes(database: Database) -> None:
    with database.connect() as conn:
        for statement in CHANGES:
            conn.execute(statement.encode())


def by_table(documents: list[Document]) -> dict[str, list[Document]]:
    found: dict[str, list[Document]] = defaultdict(list)
    for key, value in documents:
        found[value["source"]["table"]].append((key, value))
    return found


def as_updates(documents: list[Document]) -> list[Document]:
    """Debezium makes two records of an update that changes the key (d, c); pgcdc makes one (u) with both rows."""
    found: list[Document] = []
    for key, value in documents:
        last = found[-1][1] if found else None
        if last and (last["op"], value["op"]) == ("d", "c") and last["source"]["lsn"] == value["source"]["lsn"]:
            found[-1] = key, {**value, "op": "u", "before": last["before"]}
        else:
            found.append((key, value))
    return found


def differences(theirs: list[Document], ours: list[Document], *, same_server: bool) -> list[str]:
    """What is not the same, besides what is named above."""
    found: list[str] = []
    tables, mine = by_table(theirs), by_table(ours)
    nothing = {f"t_{list(TYPES).index('bit(3)[]')}"}  # Debezium stops at every row of it
    if tables.keys() | nothing != mine.keys():
        found.append(f"tables: {tables.keys() ^ mine.keys()}")
    for table in mine:
        expected = as_updates(tables[table])
        if table.startswith("t_"):
            found += _typed(table, expected, mine[table])
            pairs = _pairs(expected, mine[table])
        else:
            if len(expected) != len(mine[table]):
                found.append(f"{table}: {len(expected)} documents, not {len(mine[table])}")
            pairs = list(zip(expected, mine[table], strict=False))
            for (key, their), (our_key, our) in pairs:
                if key != our_key:
                    found.append(f"{table}: key {key}, not {our_key}")
                for side in ("before", "after", "message"):
                    found += _rows(table, _known(table, their.get(side)), our.get(side))
        for (_, their), (_, our) in pairs:
            found += [f"{table}: {one}" for one in _around(their, our, same_server=same_server)]
    return found


def _known(table: str, row: Any) -> Any:
    is_update = table == "long" and row and row["n"] > 1
    if not is_update:
        return row
    # The one type of text whose arrays Debezium has no placeholder for.
    known = {name: one for name, one in row.items() if name not in UNAVAILABLE}
    return {**known, "network": ["__debezium_unavailable_value"]}


def _rows(where: str, expected: Any, found: Any) -> list[str]:
    if expected is None or found is None:
        return [] if expected == found else [f"{where}: {expected!r}, not {found!r}"]
    return [
        f"{where}.{name}: {str(expected.get(name, 'nothing'))[:200]}, not {str(found.get(name, 'nothing'))[:200]}"
        for name in dict.fromkeys([*expected, *found])
        if name not in expected or name not in found or expected[name] != found[name]
        or type(expected[name]) is not type(found[name])
    ]  # fmt: skip


def _id(document: dict[str, Any]) -> tuple[str, int]:
    return document["op"], (document["after"] or document["before"])["id"]


def _pairs(theirs: list[Document], ours: list[Document]) -> list[tuple[Document, Document]]:
    known = {_id(value): (key, value) for key, value in theirs}
    return [(known[_id(one[1])], one) for one in ours if _id(one[1]) in known]


def _typed(table: str, theirs: list[Document], ours: list[Document]) -> list[str]:
    """Rows of a table with one type."""
    pg_type, literals = list(TYPES.items())[int(table[2:])]
    known = {_id(value): (key, value) for key, value in theirs}
    found = [f"{pg_type}: no document {one}" for one in known.keys() - {_id(value) for _, value in ours}]
    for key, value in ours:
        op, number = _id(value)
        literal = literals[number] if number < len(literals) else "NULL"
        where = f"{pg_type} {literal[:50]} {op}"
        row = value["after"] if op == "c" else value["before"]
        their_key, their = known.get((op, number), (None, None))
        if their is None:
            stops = (pg_type, literal) in DIFFERENT or (pg_type, literals[0]) in DIFFERENT
            if not (stops or pg_type in LEFT_OUT or (op == "d" and pg_type in NOT_NULL_ONLY)):
                found.append(f"{where}: Debezium has no such document")
            their_row = {"id": number, "v": None, "w": None}
        else:
            their_row = their["after"] if op == "c" else their["before"]
            if key != their_key:
                found.append(f"{where}: key {their_key}, not {key}")
        if pg_type in LEFT_OUT:
            their_row = {"id": number}
        elif op == "c":
            for name, one in (("v", literal), ("w", literals[0])):
                if (pg_type, one) in DIFFERENT:
                    their_row = {**their_row, name: DIFFERENT[pg_type, one][0]}
                elif their is None:
                    their_row = {**their_row, name: row[name]}
        found += _rows(where, their_row, row)
    return found


def _around(their: dict[str, Any], our: dict[str, Any], *, same_server: bool) -> list[str]:
    """The fields besides the row. Not compared:

    - ts_ms, ts_us, ts_ns of the document: when it was made
    - source.version: pgcdc's own
    - source.lsn, source.sequence, transaction.id: pgcdc has the end of the transaction, and the number of the change
    - source.snapshot of the first and last rows of a snapshot, which pgcdc does not tell apart; their txId and time
    - transaction of messages and key updates, and behind them: Debezium counts messages, and a key update twice; it does not
      count rows at which it stopped
    - source times of a message that is in no transaction: Debezium repeats those of the transaction before
    """
    found = [f"fields: {their.keys() ^ our.keys()}"] if their.keys() != our.keys() else []
    found += [f"op {their['op']}, not {our['op']}"] if their["op"] != our["op"] else []
    source, ours = their["source"], our["source"]
    if source.keys() != ours.keys():
        found.append(f"fields of source: {source.keys() ^ ours.keys()}")
    is_snapshot = their["op"] == "r"
    compared = ["connector", "name", "schema", "table", "xmin", "origin", "origin_lsn"]
    compared += [] if is_snapshot else ["snapshot"]
    if same_server:
        compared += ["db"] if is_snapshot or ours["txId"] is None else ["db", "txId", "ts_ms", "ts_us", "ts_ns"]
    found += [f"source.{name} {source[name]!r}, not {ours[name]!r}" for name in compared if source[name] != ours[name]]
    if is_snapshot and ours["snapshot"] != "true":
        found.append(f"source.snapshot {ours['snapshot']}")
    if (their["transaction"] is None) != (our["transaction"] is None):
        found.append(f"transaction {their['transaction']}, not {our['transaction']}")
    is_counted_twice = (
        our["op"] == "m" or (our.get("before") and our.get("after")) or ours["table"] in ("keyed", "whole")
    )
    if our["transaction"] and not is_counted_twice:
        for name in ("total_order", "data_collection_order"):
            is_behind_a_gap = our["transaction"][name] > their["transaction"][name] and ours["table"].startswith("t_")
            if their["transaction"][name] != our["transaction"][name] and not is_behind_a_gap:
                found.append(f"transaction.{name} {their['transaction'][name]}, not {our['transaction'][name]}")
    if our["source"]["name"] != PREFIX:
        found.append(f"source.name {ours['name']}")
    return found
