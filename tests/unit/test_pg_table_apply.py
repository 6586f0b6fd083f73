"""What pg_table's apply mode does without a server: names, and rows in the text of COPY."""

from __future__ import annotations

import re

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgcdc.config import load_config
from pgcdc.core.errors import ConfigError
from pgcdc.sink.pg_table import writer
from pgcdc.sink.pg_table.fold import Rows
from pgcdc.sink.pg_table.options import TargetNames
from pgcdc.sink.pg_table.writer import copy_texts

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
nasty = st.text('\\\t\n\r\b\f\x01"/Nnu.', max_size=6)


# --- names


def test_tables_are_renamed_by_rules_for_tables_then_schemas_then_the_one_schema() -> None:
    names = TargetNames(("public.orders=mirror.orders2", "sales.*=archive.*", '"We.ird"."a=b"=plain'), "rest")
    assert names(("public", "orders")) == ("mirror", "orders2")
    assert names(("sales", "items")) == ("archive", "items")
    assert names(("public", "other")) == ("rest", "other")
    assert names(("We.ird", "a=b")) == ("rest", "plain")
    assert TargetNames()(("sales", "items")) == ("sales", "items")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (("orders",), "is not source=target"),
        (("sales.*=orders",), "names a table on one side"),
        (("orders=a", "public.orders=b"), "public.orders has two rules"),
        (("orders=a", "items=a"), "orders and items would both be written to a"),
        (("or ders=a",), "is not a table name"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TargetNames(rules)


def test_tables_that_would_feed_themselves_are_found() -> None:
    tables = [("public", "a"), ("public", "b"), ("mirror", "a")]
    assert TargetNames().loops(tables) == sorted(tables)
    assert TargetNames(schema="mirror").loops(tables) == [("mirror", "a"), ("public", "a")]
    assert TargetNames(schema="mirror").loops(tables[:2]) == []


@pytest.mark.parametrize("envelope", ["debezium_envelope", "cloudevents_envelope"])
def test_an_envelope_is_refused_before_anything_starts(envelope: str) -> None:
    values = {"db": "postgresql:///x", "all_tables": True, "adapters": ["pg_table"], envelope: True}
    with pytest.raises(
        ConfigError, match=r"adapter pg_table applies pgcdc's own events .* or use --pg-table-mode append"
    ):
        load_config(values | {"pg_table_mode": "apply"}, {}, None)
    load_config(values | {"pg_table_mode": "append"}, {}, None)


# --- COPY


def read_value(text: bytes) -> str | None:
    """As PostgreSQL reads it."""
    letters = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}
    if text == b"\\N":
        return None
    return re.sub(rb"\\(.)", lambda match: letters.get(match[1], match[1]), text, flags=re.S).decode()


@given(st.lists(st.lists(st.none() | texts | nasty, min_size=3, max_size=3), max_size=6), st.integers(1, 40))
def test_values_survive_the_text_of_copy(rows: list[list[str | None]], piece: int) -> None:
    columns = [pa.array([None, *(row[number] for row in rows)], pa.string()).slice(1) for number in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "PIECE_BYTES", piece)
        written = b"".join(copy_texts(Rows(("a", "b", "c"), columns)))
    assert written.count(b"\n") == len(rows) and b"\r" not in written
    assert [[read_value(text) for text in line.split(b"\t")] for line in written.split(b"\n")[:-1]] == rows


def test_a_row_of_one_column_is_no_end_of_data() -> None:
    assert b"".join(copy_texts(Rows(("a",), [pa.array(["\\.", None, ""])]))) == b"\\\\.\n\\N\n\n"
