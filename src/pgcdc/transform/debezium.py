"""Events as the JSON documents that Debezium's PostgreSQL connector writes: the end of a chain of transforms.

What is different from Debezium is in docs/envelopes.md, and compared with its own output in test_envelopes.py.
"""

from __future__ import annotations

import importlib.metadata
import json
from functools import cache
from typing import TYPE_CHECKING

from pgcdc.core.errors import ConfigError
from pgcdc.transform.debezium_values import absent, placeholder, quote, value

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from pgcdc.transform.specs import DebeziumSpec

__all__ = ["debezium", "debezium_key"]

_OPERATIONS = {"INSERT": "c", "UPDATE": "u", "DELETE": "d", "TRUNCATE": "t", "SNAPSHOT": "r"}


def debezium(df: DataFrame, spec: DebeziumSpec) -> DataFrame:
    """The events with a column `_text`: the document, or NULL for events that Debezium has none for (see docs/envelopes.md).

    `df` needs the column `shape` (`stream.events.SHAPE_COLUMNS`), and with `transaction` also `table_ordinal`.
    """
    from pyspark.sql import functions as F

    needed = ["shape", "table_ordinal"] if spec.transaction else ["shape"]
    _check_columns(df, needed)
    return df.withColumn("_text", F.expr(_document(spec.topic_prefix, spec.transaction)))


def debezium_key(df: DataFrame) -> DataFrame:
    """The events with a column `_key`: what Debezium makes the key of the message; NULL for tables without a key."""
    from pyspark.sql import functions as F

    _check_columns(df, ["shape"])
    return df.withColumn("_key", F.expr(_key()))


def _check_columns(df: DataFrame, needed: list[str]) -> None:
    missing = [name for name in needed if name not in df.columns]
    if missing:
        raise ConfigError(
            f"Debezium's documents need the column {missing[0]} of events",
            "Ask for it when the stream is loaded: .schema(EVENT_SCHEMA + SHAPE_SCHEMA), both of pgcdc.event.events",
        )


@cache
def _document(prefix: str, transaction: bool) -> str:
    source = _source(prefix)
    operation = "CASE operation " + " ".join(f"WHEN '{name}' THEN '{op}'" for name, op in _OPERATIONS.items()) + " END"
    block = _transaction() if transaction else "'null'"
    now = "unix_micros(current_timestamp())"
    change = f"""concat('{{"before":', {_before_and_after()}, ',"source":', {source}, ',"transaction":', {block},
        ',"op":"', {operation}, '","ts_ms":', {now} div 1000, ',"ts_us":', {now}, ',"ts_ns":', {now}, '000}}')"""
    content = "replace(base64(encode(row['content'], 'UTF-8')), '\r\n', '')"
    message = f"""concat('{{"op":"m","ts_ms":', {now} div 1000, ',"source":', {source}, ',"transaction":', {block},
        ',"message":{{"prefix":', {quote("row['prefix']")}, ',"content":"', {content}, '"}}}}')"""
    mark = """concat('{"status":"', if(operation = 'BEGIN', 'BEGIN', 'END'), '","id":"', xid, ':', lsn, '","event_count":',
        if(operation = 'BEGIN', 'null', CAST(ordinal AS STRING)), ',"data_collections":null,"ts_ms":',
        unix_millis(created_at), '}')"""
    names = ", ".join(f"'{name}'" for name in _OPERATIONS)
    return f"""CASE WHEN operation IN ({names}) THEN {change} WHEN operation = 'MESSAGE' THEN {message}
        WHEN operation IN ('BEGIN', 'COMMIT') THEN {mark} END"""


def _source(prefix: str) -> str:
    version = json.dumps(importlib.metadata.version("pgcdc"))
    micros = "coalesce(unix_micros(created_at), unix_micros(current_timestamp()))"
    name = json.dumps(prefix).replace("'", r"\u0027")
    return f"""concat('{{"version":', '{version}', ',"connector":"postgresql","name":', r'{name}', ',"ts_ms":',
        {micros} div 1000, ',"snapshot":"', if(operation = 'SNAPSHOT', 'true', 'false'), '","db":',
        {quote("shape.database")}, r',"sequence":"[\\"', lsn, r'\\",\\"', ordinal, r'\\"]","ts_us":',
        {micros}, ',"ts_ns":', {micros}, '000,"schema":',
        coalesce({quote("schema")}, '""'), ',"table":', coalesce({quote("table")}, '""'), ',"txId":',
        if(xid = 0, 'null', CAST(xid AS STRING)),
        ',"lsn":', lsn, ',"xmin":null,"origin":', coalesce({quote("origin")}, 'null'), ',"origin_lsn":null}}')"""


def _transaction() -> str:
    order = "coalesce(CAST(table_ordinal AS STRING), 'null')"
    return f"""if(xid = 0, 'null', concat('{{"id":"', xid, ':', lsn, '","total_order":', ordinal,
        ',"data_collection_order":', {order}, '}}'))"""


def _before_and_after() -> str:
    """From behind `"before":` to the end of the row after the change. Both rows go through one expression."""
    rows = f"transform(array(row, old), (m, side) -> {_row()})"
    texts = """if(operation = 'DELETE', concat(rows[0], ',"after":null'),
        concat(coalesce(rows[1], 'null'), ',"after":', coalesce(rows[0], 'null')))"""
    return f"transform(array({rows}), rows -> {texts})[0]"


def _row() -> str:
    """The JSON of the map `m`: the row (`side` 0) or the old row (1)."""
    entries = f"arrays_zip(map_keys(m), map_values(m), {_aligned('codes', 0)}, {_aligned('modifiers', 4095)})"
    field = f"concat({quote('f.`0`')}, ':', {value('f.`1`', 'f.`2`', 'f.`3`')})"
    fields = f"transform({entries}, f -> {field})"
    # Only the key of an old row was sent; only what changed of a long new row.
    code, modifier = _of("codes", "c"), _of("modifiers", "c")
    others = (
        f"transform(array_except(shape.names, map_keys(m)), c -> concat({quote('c')}, ':', {absent(code, modifier)}))"
    )
    unchanged = f"transform(unchanged_toast_columns, c -> concat({quote('c')}, ':', {placeholder(code)}))"
    more = f"""CASE WHEN side = 1 OR operation = 'DELETE' THEN if(size(m) < size(shape.names), {others}, NULL)
        ELSE {unchanged} END"""
    everything = f"concat({fields}, coalesce({more}, CAST(array() AS ARRAY<STRING>)))"
    return f"concat('{{', array_join({everything}, ','), '}}')"


def _aligned(name: str, default: int) -> str:
    """Codes or modifiers in the order of the map: that of the table, if no transform has changed the row."""
    found = _of(name, "k")
    return f"if(map_keys(m) = shape.names, shape.{name}, transform(map_keys(m), k -> coalesce({found}, {default})))"


def _of(name: str, column: str) -> str:
    return f"get(shape.{name}, CAST(array_position(shape.names, {column}) AS INT) - 1)"


@cache
def _key() -> str:
    code, modifier = _of("codes", "k"), _of("modifiers", "k")
    found = f"if(map_contains_key(row, k), {value('row[k]', code, modifier)}, {absent(code, modifier)})"
    fields = f"transform(shape.key, k -> concat({quote('k')}, ':', {found}))"
    message = f"""concat('{{"prefix":', {quote("row['prefix']")}, '}}')"""
    return f"""CASE WHEN operation = 'MESSAGE' THEN {message}
        WHEN row IS NOT NULL AND schema IS NOT NULL AND size(shape.key) > 0
        THEN concat('{{', array_join({fields}, ','), '}}') END"""
