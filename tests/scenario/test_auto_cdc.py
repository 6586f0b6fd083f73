"""The example examples/auto_cdc with Spark Declarative Pipelines: a keyed copy and a history that end up right.

It needs the extra `pipelines`, a JDK, and Iceberg's jar from Maven Central.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest
from typed_changes import change, schema

ROOT = Path(__file__).parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
ICEBERG = (
    "https://repo1.maven.org/maven2/org/apache/iceberg/iceberg-spark-runtime-4.1_2.13/1.12.0/"
    "iceberg-spark-runtime-4.1_2.13-1.12.0.jar"
)
READ = """
import json
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").getOrCreate()
tables = {"orders": "id, name", "orders_history": "id, name, __START_AT, __END_AT"}
found = {name: spark.sql(f"SELECT {columns} FROM lake.shop.{name} ORDER BY ALL") for name, columns in tables.items()}
print(json.dumps({name: df.collect() for name, df in found.items()}))
"""


def run(command: list[str], folder: Path, **variables: str) -> str:
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable, **variables}
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The example in a folder of its own, with its jars."""
    pytest.importorskip("grpc", reason="needs pip install 'pgcdc[pipelines]'")
    if not shutil.which("javac"):
        pytest.skip("needs javac: install a JDK")
    folder = tmp_path / "auto_cdc"
    shutil.copytree(ROOT / "examples" / "auto_cdc", folder)
    urllib.request.urlretrieve(ICEBERG, folder / "iceberg.jar")
    classpath = f"{SPARK_HOME}/jars/*:iceberg.jar"
    run(["javac", "-nowarn", "-d", "classes", "-cp", classpath, "LakeCatalog.java"], folder)
    run(["jar", "cf", "lake.jar", "-C", "classes", "."], folder)
    spec = folder / "spark-pipeline.yml"
    spec.write_text(spec.read_text().replace("file:///tmp/orders_auto_cdc", folder.as_uri()))
    (folder / "warehouse" / "shop").mkdir(parents=True)
    return folder


@pytest.mark.slow
def test_auto_cdc_keeps_a_copy_and_a_history(example: Path) -> None:
    def row(number: int, name: str) -> dict[str, Any]:
        return {"id": number, "name": name}

    runs = [
        [
            change("UPDATE", 20, row(1, "c"), ordinal=2, second=0),  # not in order, and all with the same time
            change("UPDATE", 20, row(1, "b"), ordinal=1, second=0),
            change("INSERT", 10, row(1, "a"), second=0),
            change("INSERT", 10, row(2, "x"), ordinal=2, second=0),
        ],
        [
            change("UPDATE", 30, row(3, "c"), before={"id": 1}, second=0),
            change("DELETE", 40, {"id": 2}, second=0),
            change("INSERT", 40, row(4, "y"), ordinal=2, second=0),
        ],
    ]
    (example / "files").mkdir()
    settings = {"SPARK_HOME": str(SPARK_HOME), "SPARK_CONF_DIR": "conf", "ORDERS_FILES": str(example / "files")}
    for number, changes in enumerate(runs):
        pq.write_table(pa.Table.from_pylist(changes, schema()), example / "files" / f"{number}.parquet")
        run([str(SPARK_HOME / "bin" / "spark-pipelines"), "run"], example, **settings)
    found = json.loads(run([sys.executable, "-c", READ], example, SPARK_CONF_DIR="conf").splitlines()[-1])
    assert found["orders"] == [[3, "c"], [4, "y"]]
    assert found["orders_history"] == [
        [1, "a", [10, 1], [20, 1]],
        [1, "b", [20, 1], [20, 2]],
        [1, "c", [20, 2], [30, 1]],
        [2, "x", [10, 2], [40, 1]],
        [3, "c", [30, 1], None],
        [4, "y", [40, 2], None],
    ]
