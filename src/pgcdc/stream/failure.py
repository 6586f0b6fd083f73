"""Which of our errors is behind a Spark query that failed."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pgcdc.errors import PgcdcError, Policy

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["QueryFailed", "explain_failure"]


class QueryFailed(PgcdcError):
    """The Spark query failed for a reason outside of pgcdc (a worker was killed, say): start it again."""

    policy = Policy.RETRY


def explain_failure(
    error: BaseException,
    raised: BaseException | None,
    capture_status: Callable[[], dict[str, Any]],
    spark: SparkSession,
) -> PgcdcError:
    """`error` is Spark's, `raised` what the lane's own code raised in the batch, if it did."""
    for one in (raised, error):
        if isinstance(one, PgcdcError):
            return one
    failed = capture_status()
    if failed.get("phase") == "failed":
        return PgcdcError.from_json(failed["last_error"])
    if _jvm_is_gone(error, spark):  # before anything is asked of the error: its text may come from the JVM
        return PgcdcError("the Spark JVM ended unexpectedly", "Start pgcdc again: nothing is lost")
    ours = re.search(r"pgcdc\.errors\.(\w+): ([^\n]*)", str(error))
    if ours:
        return PgcdcError.from_json({"kind": ours.group(1), "message": ours.group(2)})
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return QueryFailed(f"the Spark query failed: {lines[0][:300]}", "Start pgcdc again: nothing is lost")


def _jvm_is_gone(error: BaseException, spark: SparkSession) -> bool:
    from py4j.protocol import Py4JNetworkError

    process = getattr(spark.sparkContext._gateway, "proc", None)
    if process is None:
        return False
    if isinstance(error, (ConnectionError, Py4JNetworkError)):  # its sockets close some time before it is gone
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    return process.poll() is not None
