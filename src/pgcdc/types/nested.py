"""Types that hold other types."""

from __future__ import annotations

from collections.abc import Callable

from pgcdc.types.catalog import TypeCatalog, TypeInfo
from pgcdc.types.column import ColumnType, TypeOptions

__all__ = ["MapType", "nested_type"]

MapType = Callable[[TypeCatalog, int, int, int, TypeOptions], ColumnType]
"""What maps the types inside: `mapping.map_type`."""


def nested_type(
    catalog: TypeCatalog, info: TypeInfo, typmod: int, ndims: int, options: TypeOptions, map_type: MapType
) -> ColumnType | None:
    """What a type that holds others becomes; None if it holds none."""
    return None
