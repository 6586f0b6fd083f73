"""Every line of docs/types.md against a real stream, in text and in binary form."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nested_type_cases
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import VariantVal
from streams import Stream, new_stream
from type_cases import CASES, Case

from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.postgres.database import Connection, connect
from pgcdc.postgres.types.catalog import BUILT_IN, TypeCatalog
from pgcdc.postgres.types.column import ColumnType, Rejected, TypeOptions
from pgcdc.postgres.types.mapping import map_type
from pgcdc.source.postgres.setup.tables import TableColumn
from pgcdc.source.postgres.single_table import describe, read_table_columns
from pgcdc.source.postgres.wire.binary.decoder import unsupported
from pgcdc.spark.tables import spark_name, spark_type

ALL_CASES = [*CASES, *nested_type_cases.CASES]

_PAGE = Path(__file__).parents[2] / "docs" / "types.md"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of docs/types.md."""

    name: str
    spark: str
    exactness: str
    rule: str
    refused: str


def lines_of(heading: str) -> list[Line]:
    section = re.split(r"^## ", _PAGE.read_text().partition(f"\n## {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [Line(*(cell.strip().replace("`", "") for cell in row.strip("|").split("|"))) for row in rows]


LINES = [*lines_of("Single values"), *lines_of("Types that hold others"), *lines_of("Options")]
# The embedded server has none: test_hstore.py.
TESTED = [line for line in LINES if line.name != "hstore"]


def line_name(case: Case) -> str:
    return (case.line or case.pg_type).replace("`", "")


@dataclass(slots=True)
class Sent:
    """What came out of the stream for every case, and what the catalog says about its column."""

    catalog: TypeCatalog
    columns: dict[str, TableColumn]
    text: dict[str, list[bytes | None]]
    binary: dict[str, list[bytes | None]]
    """Without the types that have no binary form."""

    def type_of(self, case: Case) -> ColumnType:
        column = self.columns[case.pg_type]
        return map_type(self.catalog, column.type_oid, column.typmod, column.ndims, case.options)


def cases_of(pg_type: str) -> list[Case]:
    return [case for case in ALL_CASES if case.pg_type == pg_type]


_TYPES = list(dict.fromkeys(case.pg_type for case in ALL_CASES))


def send(stream: Stream, pg_types: Sequence[str], *, binary: bool) -> list[dict[str, list[bytes | None]]]:
    """The values of each type's cases, and a NULL behind them, as a capture gives them: as text, and in binary form."""
    stream.execute("CREATE PUBLICATION p FOR ALL TABLES")
    slots = [stream.slot() for _ in range(1 + binary)]
    for number, pg_type in enumerate(pg_types):
        literals = [case.sql_literal for case in cases_of(pg_type)] + ["NULL"]
        rows = ", ".join(f"({index}, {literal})" for index, literal in enumerate(literals))
        stream.execute(f"CREATE TABLE t_{number} (id int, v {pg_type})", f"INSERT INTO t_{number} VALUES {rows}")
    found = []
    for number, slot in enumerate(slots):
        values: dict[str, list[bytes | None]] = {pg_type: [] for pg_type in pg_types}
        for change in stream.read(slot, binary=number > 0).changes:
            assert int(change.row["id"] or b"") == len(values[pg_types[int(change.table[2:])]])
            values[pg_types[int(change.table[2:])]].append(change.row["v"])
        found.append(values)
    return found


def prepare(stream: Stream) -> None:
    for setup in dict.fromkeys(case.setup for case in ALL_CASES if case.setup):
        stream.execute(setup)


@pytest.fixture(scope="module")
def sent(postgres: EmbeddedPostgres) -> Iterator[Sent]:
    with new_stream(postgres) as stream, new_stream(postgres) as text_only:
        prepare(stream)
        prepare(text_only)
        stream.execute("CREATE TABLE every (" + ", ".join(f"c{n} {one}" for n, one in enumerate(_TYPES)) + ")")
        with connect(stream.url) as conn:
            catalog = TypeCatalog.load(conn)
            columns = dict(zip(_TYPES, read_table_columns(conn, "every"), strict=True))
        refused = unsupported(catalog, [column.type_oid for column in columns.values()])
        without = [one for one in _TYPES if columns[one].type_oid in refused]
        text, binary = send(stream, [one for one in _TYPES if one not in without], binary=True)
        (more,) = send(text_only, without, binary=False)
        yield Sent(catalog, columns, text | more, binary)


def read_values(kind: ColumnType, values: list[bytes | None]) -> list[Any]:
    array = kind.convert(pa.array(values, pa.binary()))
    assert array.type == kind.arrow
    array.validate(full=True)
    found: list[Any] = array.to_pylist()
    if spark_type(kind.arrow).simpleString() == "variant":
        return [None if one is None else VariantVal(one["value"], one["metadata"]).toPython() for one in found]
    return found


@pytest.mark.parametrize(
    "case", ALL_CASES, ids=lambda case: f"{case.pg_type} {case.sql_literal} {case.spark_type}"[:70]
)
def test_value(case: Case, sent: Sent) -> None:
    kind = sent.type_of(case)
    assert spark_type(kind.arrow).simpleString() == case.spark_type
    assert to_arrow_type(spark_type(kind.arrow), timezone="UTC") == kind.arrow
    index = cases_of(case.pg_type).index(case)
    for values in (sent.text, sent.binary):
        if case.pg_type not in values:
            continue
        value = values[case.pg_type][index]
        if case.expected is Rejected:
            with pytest.raises(Rejected) as refused:
                kind.convert(pa.array([None, value, value, None], pa.binary()))
            assert refused.value.index == 1
            assert refused.value.advice
        else:
            found = read_values(kind, [value, None])
            assert repr(found) == repr([case.expected, None]) or found == [case.expected, None]
            assert type(found[0]) is type(case.expected)


@pytest.mark.parametrize("pg_type", _TYPES)
def test_a_column_is_converted_as_its_values_are(pg_type: str, sent: Sent) -> None:
    for options in {case.options for case in cases_of(pg_type)}:
        kind = next(sent.type_of(case) for case in cases_of(pg_type) if case.options == options)
        for values in (sent.text, sent.binary):
            if pg_type not in values:
                continue
            assert values[pg_type][-1] is None
            pairs = zip(cases_of(pg_type), values[pg_type], strict=False)
            good = [value for case, value in pairs if case.options == options and case.expected is not Rejected]
            good.append(None)
            alone = [read_values(kind, [value])[0] for value in good]
            assert repr(read_values(kind, good * 3)) == repr(alone * 3)


def test_types_without_a_binary_form_are_those_that_the_page_names(sent: Sent) -> None:
    without = {line_name(case) for case in ALL_CASES if case.pg_type not in sent.binary}
    assert without == {line.name for line in TESTED if "with binary" in line.refused}


@pytest.mark.parametrize("line", TESTED, ids=lambda line: line.name)
def test_line_of_the_page(line: Line, sent: Sent) -> None:
    cases = [case for case in ALL_CASES if line_name(case) == line.name]
    assert cases
    for case in cases:
        kind = sent.type_of(case)
        if line.name != "domain" and not ("=" in line.name and "out_of_range" in line.name):
            assert re.match(r"\w+", line.spark)[0].lower() == re.match(r"\w+", case.spark_type)[0]  # type: ignore[index]
        if not line.exactness.startswith("as its"):
            assert line.exactness == kind.exactness.value
        if "=" in line.name:
            name, _, value = line.name.partition("=")
            assert getattr(case.options, name) == value
        else:
            assert case.options == TypeOptions() or not line.exactness
    refused = line.refused not in ("", "with binary") and "SQL_ASCII" not in line.refused
    assert refused == any(case.expected is Rejected for case in cases)


def test_every_case_belongs_to_a_line() -> None:
    assert {line_name(case) for case in ALL_CASES} <= {line.name for line in LINES}


def test_every_type_of_the_server_has_a_line(sent: Sent) -> None:
    """What a table's column can have, but for the statistics that only the catalog has."""
    tested = {sent.columns[one].type_oid for one in _TYPES}
    forgotten = {
        info.name for info in sent.catalog.types.values()
        if info.oid < 10_000 and info.kind == "base" and info.oid not in tested
    }  # fmt: skip
    assert forgotten == {
        "pg_node_tree", "pg_ndistinct", "pg_dependencies", "pg_mcv_list", "gtsvector",
        "pg_brin_bloom_summary", "pg_brin_minmax_multi_summary",
    }  # fmt: skip


def test_description_says_what_the_columns_become(sent: Sent) -> None:
    columns = list(sent.columns.values())
    found = describe(columns, sent.catalog, TypeOptions(), spark_name)
    assert [one.pg_type for one in found] == [one.pg_type for one in columns]
    expected = {case.pg_type: case.spark_type for case in ALL_CASES if case.options == TypeOptions()}
    described = {name: one.spark_type for name, one in zip(sent.columns, found, strict=True)}
    assert {name: described[name] for name in expected} == expected


# Any value, against what psycopg reads of it.

_ANY_MOMENT = st.datetimes(timezones=st.none())
_RANDOM: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "smallint": st.integers(-(2**15), 2**15 - 1),
    "integer": st.integers(-(2**31), 2**31 - 1),
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "oid": st.integers(0, 2**32 - 1),
    "real": st.floats(width=32),
    "double precision": st.floats(),
    "numeric(38,10)": st.decimals(places=10, min_value=-(10**27), max_value=10**27),
    "numeric(9,4)": st.decimals(places=4, min_value=-99999, max_value=99999),
    "text": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    "varchar": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    "char(9)": st.text(st.characters(codec="latin-1", exclude_characters="\0"), max_size=9),
    "bytea": st.binary(),
    "date": st.dates(),
    "timestamp": _ANY_MOMENT,
    "timestamptz": _ANY_MOMENT.map(lambda one: one.replace(tzinfo=UTC)),
}  # fmt: skip


@pytest.fixture(scope="module")
def session(postgres: EmbeddedPostgres) -> Iterator[Connection]:
    with connect(postgres.url()) as conn:
        yield conn


@pytest.mark.parametrize("pg_type", _RANDOM)
@settings(max_examples=25)
@given(data=st.data())
def test_any_value_is_what_psycopg_reads(pg_type: str, session: Connection, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.none() | _RANDOM[pg_type], min_size=1, max_size=30))
    plain = pg_type.partition("(")[0]
    query = f"SELECT u.v::{pg_type} FROM unnest(%s::{plain}[]) WITH ORDINALITY AS u(v, n) ORDER BY n"
    cursor = session.execute(query.encode(), [values])
    result = cursor.pgresult
    assert result is not None
    texts = [result.get_value(row, 0) for row in range(result.ntuples)]
    read = [as_spark(row[0], result.ftype(0)) for row in cursor.fetchall()]
    kind = map_type(BUILT_IN, result.ftype(0), result.fmod(0), 0, TypeOptions())
    found = [as_spark(value, 0) for value in kind.convert(pa.array(texts, pa.binary())).to_pylist()]
    assert repr(found) == repr(read)


def as_spark(value: Any, oid: int) -> Any:
    """psycopg reads the digits of a real as a double; and both have their own object for UTC."""
    if oid == 700 and value is not None:
        return struct.unpack("f", struct.pack("f", value))[0]
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) and value.tzinfo else value
