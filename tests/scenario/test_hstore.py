"""hstore through a real stream. The embedded servers have none: Debian's PostgreSQL 15 has."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_type
from streams import SETTINGS, Stream, new_stream

from pgcdc.core.errors import ConfigError
from pgcdc.playground.postgres import EmbeddedPostgres, find_binaries
from pgcdc.postgres.database import connect
from pgcdc.postgres.types.catalog import TypeCatalog
from pgcdc.postgres.types.column import Exactness, TypeOptions
from pgcdc.postgres.types.mapping import map_type
from pgcdc.source.postgres.single_table import read_table_columns
from pgcdc.spark.tables import spark_type

VALUES = {
    "''": {},
    "'a=>1'": {"a": "1"},
    "'b=>NULL, a=>\"NULL\"'": {"a": "NULL", "b": None},
    "hstore(ARRAY['', 'a\"b', 'c\\d', 'e => f', 'é €', 'x,\"y\"'], ARRAY['', '\"', '\\', '=>', '😀', NULL])": {
        "": "", 'a"b': '"', "c\\d": "\\", "e => f": "=>", "é €": "😀", 'x,"y"': None,
    },
    "hstore(ARRAY['bb', 'a', 'ccc', 'ab'], ARRAY['1', '2', '3', '4'])": {"a": "2", "ab": "4", "bb": "1", "ccc": "3"},
    "(SELECT hstore(array_agg(g::text), array_agg(g::text)) FROM generate_series(1, 300) g)": {
        str(number): str(number) for number in range(1, 301)
    },
    "NULL": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def stream() -> Iterator[Stream]:
    try:
        find_binaries(15)
    except ConfigError as error:
        pytest.skip(str(error))
    with EmbeddedPostgres.temporary(version=15, settings=SETTINGS) as server, new_stream(server) as made:
        yield made


def test_hstore_becomes_a_map_from_text_and_from_binary(stream: Stream) -> None:
    rows = ", ".join(f"({number}, {literal}, ARRAY[{literal}]::hstore[])" for number, literal in enumerate(VALUES))
    stream.execute(
        "CREATE EXTENSION hstore",
        "CREATE DOMAIN tags AS hstore",
        "CREATE TABLE t (id int, v tags, many hstore[])",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    slots = stream.slot(), stream.slot()
    stream.execute(f"INSERT INTO t VALUES {rows}")
    with connect(stream.url) as conn:
        catalog = TypeCatalog.load(conn)
        _, one, many = [
            map_type(catalog, column.type_oid, column.typmod, column.ndims, TypeOptions())
            for column in read_table_columns(conn, "t")
        ]
    assert (spark_type(one.arrow).simpleString(), one.exactness) == ("map<string,string>", Exactness.EXACT)
    assert spark_type(many.arrow).simpleString() == "array<map<string,string>>"
    for slot, binary in zip(slots, (False, True), strict=True):
        changes = stream.read(slot, binary=binary).changes
        for kind, name in ((one, "v"), (many, "many")):
            found = kind.convert(pa.array([change.row[name] for change in changes], pa.binary()))
            assert found.type == kind.arrow == to_arrow_type(spark_type(kind.arrow), timezone="UTC")
            found.validate(full=True)
            maps = found.to_pylist(maps_as_pydicts="strict")
            assert maps == ([*VALUES.values()] if name == "v" else [[value] for value in VALUES.values()])
