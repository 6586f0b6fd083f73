"""The catalog of types, as it travels."""

from __future__ import annotations

import json

from pgcdc.postgres.types.catalog import BUILT_IN, TypeCatalog, TypeInfo

PAIR = TypeInfo(
    90_001, "public.pair", "record_out", "record_send", 0, "composite",
    attributes=(1700, 90_002), attribute_names=("a", "b, c"), attribute_typmods=(786438, -1), attribute_ndims=(0, 2),
)  # fmt: skip
PRICE = TypeInfo(90_003, "public.price", "numeric_out", "numeric_send", 1700, "domain", typmod=786438)
PRICES = TypeInfo(90_002, "public._price", "array_out", "array_send", 90_003, "array")
TREE = TypeInfo(90_004, "public.tree", "record_out", "record_send", 0, "composite", attributes=(23, 90_005))
TREES = TypeInfo(90_005, "public._tree", "array_out", "array_send", 90_004, "array")
CATALOG = TypeCatalog({**BUILT_IN.types, **{one.oid: one for one in (PAIR, PRICE, PRICES, TREE, TREES)}}, 160004)


def test_a_subset_has_what_its_types_are_made_of() -> None:
    assert list(CATALOG.subset([90_001, 25]).types) == [25, 1700, 90_001, 90_002, 90_003]
    assert CATALOG.subset([90_001]).types[90_001] == PAIR
    assert CATALOG.subset([]).types == {}
    assert CATALOG.subset([4_000_000_000]).types == {}  # unknown types are read as text


def test_a_subset_of_a_type_that_holds_itself_ends() -> None:
    assert list(CATALOG.subset([90_004]).types) == [23, 90_004, 90_005]


def test_a_catalog_is_the_same_after_a_journey_as_json() -> None:
    assert TypeCatalog.from_json(json.loads(json.dumps(CATALOG.to_json()))) == CATALOG
