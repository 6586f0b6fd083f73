"""What `import pgcdc` gives, and that every module says truthfully what it offers."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import pgcdc

_FOUND = sorted(module.name for module in pkgutil.walk_packages(pgcdc.__path__, "pgcdc."))
MODULES = ["pgcdc", *(name for name in _FOUND if not name.endswith("__main__"))]


def sort_key(name: str) -> tuple[int, str]:
    """CONSTANTS, then Classes, then functions: the order that ruff's RUF022 keeps."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


@pytest.mark.parametrize("name", MODULES)
def test_all_is_sorted_without_repeats_and_every_name_exists(name: str) -> None:
    module = importlib.import_module(name)
    names: list[str] = getattr(module, "__all__", [])
    assert names == sorted(set(names), key=sort_key)
    missing = [item for item in names if not hasattr(module, item)]
    assert not missing
    assert not [item for item in names if item.startswith("_")]


def test_every_public_name_of_the_package_can_be_had() -> None:
    assert {name: getattr(pgcdc, name) is not None for name in pgcdc.__all__} == dict.fromkeys(pgcdc.__all__, True)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        pgcdc.nonsense  # noqa: B018


def test_import_alone_loads_neither_spark_nor_arrow_nor_a_driver() -> None:
    code = "import sys, pgcdc; print(sorted({'pyspark', 'pyarrow', 'psycopg', 'pydantic'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
