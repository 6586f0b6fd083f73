"""Makes .venv/spark.jsa: Spark's classes as the JVM has them after loading, for the many JVMs that the tests start.

    .venv/bin/python tools/spark_archive.py

With it the JVM of Spark starts in half the CPU time: nothing is unzipped, parsed and verified again. A JVM that cannot use
it (another Java, another PySpark) starts as without it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ARCHIVE = Path(sys.prefix) / "spark.jsa"


def main() -> int:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame

    import pgcdc

    written = ARCHIVE.with_suffix(".new")
    written.unlink(missing_ok=True)
    os.environ["SPARK_SUBMIT_OPTS"] = f'-XX:TieredStopAtLevel=1 "-XX:ArchiveClassesAtExit={written}"'

    def collect(batch: DataFrame, _: int) -> None:
        batch.selectExpr("value", "to_json(map('a', 'b')) AS json", "md5(cast(value AS string)) AS hash").toArrow()

    with tempfile.TemporaryDirectory() as folder:
        try:
            spark = pgcdc.session(log_file=Path(folder) / "spark.log")
        except pgcdc.PgcdcError as error:
            print(f"No archive of Spark's classes: {error}", file=sys.stderr)
            return 0
        gateway = SparkContext._gateway
        assert gateway is not None
        stream = spark.readStream.format("rate").load().writeStream.foreachBatch(collect)
        stream.option("checkpointLocation", f"{folder}/checkpoint").trigger(
            availableNow=True
        ).start().awaitTermination()
        spark.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()  # the JVM ends, and writes the archive
        gateway.proc.wait(120)
    if written.exists():
        written.replace(ARCHIVE)
    else:
        print("This Java makes no archive of classes: the tests run without one", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
