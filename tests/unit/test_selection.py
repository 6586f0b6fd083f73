"""What of the database is wanted, in words: rules for tables, schemas, and where they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from preparing import Wanted

from pgcdc.config import load_config
from pgcdc.core.errors import ConfigError
from pgcdc.core.settings import make_options, split_outside_quotes
from pgcdc.postgres.selection import Rule, Selection
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.spark.options import parse_options

URL = "postgresql://h/d"


def test_rules_are_read_by_table() -> None:
    wanted = Selection(
        row_filters=("orders=total >= 10", "Sales.\"We=ird\"= note = 'a;b'"), columns=('orders=id, "Total Sum"',)
    )
    assert wanted.rules() == {
        ("public", "orders"): Rule("total >= 10", ("id", "Total Sum")),
        ("sales", "We=ird"): Rule("note = 'a;b'"),
    }
    assert wanted.rules()["public", "orders"].to_sql() == ' ("id", "Total Sum") WHERE (total >= 10)'
    assert Rule().to_sql() == ""


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"row_filters": ("orders",)}, "--row-filter 'orders' is not table="),
        ({"row_filters": ("orders=",)}, "--row-filter 'orders=' is not table="),
        ({"row_filters": ("a b=c",)}, "is not a table name"),
        ({"row_filters": ("a=x", "public.a=y")}, "--row-filter is set twice for table public.a"),
        ({"columns": ("a=x y",)}, "'x y' is not a valid name"),
        ({"columns": ("=x",)}, "is not a table name"),
        ({"schemas": ("a.b",), "tables": ()}, "'a.b' is not a valid name"),
        ({"schemas": ("a",)}, "cannot be combined: both select"),
        ({"publication": "p", "tables": (), "row_filters": ("a=x",)}, "publication p is yours"),
        ({"publication": "p", "tables": (), "generated_columns": True}, "publication p is yours"),
    ],
)
def test_what_cannot_be_read_is_refused_before_anything_starts(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_options(Wanted, {"db": URL, "tables": ("a",), **more}, "source").check()
    assert caught.value.advice


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a=x > 1; b=y", ["a=x > 1", "b=y"]),
        ("a=x = ';'; b=\"c;d\" > 1;", ["a=x = ';'", 'b="c;d" > 1']),
        ("a=x = 'it''s;'", ["a=x = 'it''s;'"]),
        ("", []),
    ],
)
def test_several_rules_in_one_text_are_separated_outside_of_quotes(text: str, parts: list[str]) -> None:
    assert split_outside_quotes(text, ";") == parts


def test_rules_come_from_flags_variables_yaml_and_options_of_spark(tmp_path: Path) -> None:
    filters, columns = ("orders=total > 100", "items=sku = 'a;b'"), ("orders=id,total", "items=id")
    variables = {"PGCDC_DB": URL, "PGCDC_ROW_FILTERS": "; ".join(filters), "PGCDC_COLUMNS": "; ".join(columns)}
    by_variables = load_config({"tables": "orders,items"}, variables, None)
    by_flags = load_config(
        {"tables": "orders,items", "row_filters": filters, "columns": columns}, {"PGCDC_DB": URL}, None
    )
    file = tmp_path / "pgcdc.yaml"
    file.write_text(
        "tables: [orders, items]\nrow_filters:\n  orders: total > 100\n  items: sku = 'a;b'\n"
        "columns:\n  orders: [id, total]\n  items: id\n"
    )
    by_file = load_config({}, {"PGCDC_DB": URL}, file)
    by_options = parse_options({
        "url": URL, "tables": "orders,items", "row_filters": "; ".join(filters), "columns": "; ".join(columns),
    })  # fmt: skip
    found = [one.source_options().part(Selection) for one in (by_variables, by_flags, by_file)] + [
        cast(PostgresOptions, by_options.source).part(Selection)
    ]
    assert found == [Selection(tables=("orders", "items"), row_filters=filters, columns=columns)] * 4


def test_schemas_and_generated_columns_come_the_same_ways() -> None:
    wanted = Selection(schemas=("sales", "shop"), generated_columns=True)
    by_variables = load_config(
        {}, {"PGCDC_DB": URL, "PGCDC_SCHEMAS": "sales, shop", "PGCDC_GENERATED_COLUMNS": "true"}, None
    )
    by_options = parse_options({"url": URL, "schemas": "sales,shop", "generated_columns": "true"})
    found = [one.part(Selection) for one in (by_variables.source_options(), cast(PostgresOptions, by_options.source))]
    assert found == [wanted, wanted]
    assert wanted.is_open and wanted.schema_names == ("sales", "shop")


def test_a_wrong_value_names_the_flag() -> None:
    with pytest.raises(ConfigError, match="--row-filter"):
        load_config({"tables": "a", "row_filters": 7}, {"PGCDC_DB": URL}, None)
