"""Spark's Python daemon, with everything our tasks import already loaded. Workers are forked from it, warm.

Spark ends workers that are idle for a minute; without this, the next batch would pay for the imports again. Workers
collect garbage after every task, so imported objects are frozen first: scanning them took 20 ms each time.
"""

from __future__ import annotations

import gc
import sys

import pyarrow.compute
import pyarrow.ipc
import pyspark.worker
from pyspark.daemon import manager

import pgcdc.spark.source
from pgcdc.source.protocol import find_source

__all__ = ["manager"]

_PRELOADED = (pyarrow.compute, pyarrow.ipc, pyspark.worker, pgcdc.spark.source, find_source("wal"))

if __name__ == "__main__":
    if sys.argv[1:] == ["pyspark.worker"]:  # the workers of tasks; each kind of worker has its own daemon
        import pgcdc.spark.tables
        import pgcdc.spark.typed_reader
    gc.collect()
    gc.freeze()
    manager()
