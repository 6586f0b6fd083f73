"""Which of our errors is behind a Spark query that failed."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pgcdc.core.errors import PgcdcError, Policy, SinkUnavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Explain = Callable[[Exception], Exception]
"""The error that is behind one of Spark, or the same one."""


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
    return find_ours(str(error)) or QueryFailed(
        f"the Spark query failed: {headline(error)}", "Start pgcdc again: nothing is lost"
    )


@contextlib.contextmanager
def explained(explain: Explain | None, what: str) -> Iterator[None]:
    """Around a Spark job of a sink: raises what an executor has raised there, in place of Spark's error with its text in it.

    What is none of ours may pass: a worker that was killed, a disk that is full. Then `what` says what failed.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        found: Exception | None = find_ours(str(error))
        if found is None and explain is not None and (other := explain(error)) is not error:
            found = other
        raise found or SinkUnavailable(f"{what}: {headline(error)}", "Is the target up and reachable?") from error


def find_ours(text: str) -> PgcdcError | None:
    """Our error in the text of one of Spark, which is all that comes from an executor."""
    ours = re.search(r"pgcdc\.core\.errors\.(\w+): ([^\n]*)", text)
    return PgcdcError.from_json({"kind": ours[1], "message": ours[2].rstrip(" ;")}) if ours else None


def headline(error: BaseException) -> str:
    """The first line of its text that says something."""
    lines = [line.strip(": ") for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith("An error occurred while calling")]
    return (telling or lines or [type(error).__name__])[0][:300]


def _jvm_is_gone(error: BaseException, spark: SparkSession) -> bool:
    from py4j.protocol import Py4JNetworkError

    process = getattr(spark.sparkContext._gateway, "proc", None)
    if process is None:
        return False
    if isinstance(error, (ConnectionError, Py4JNetworkError)):  # its sockets close some time before it is gone
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    return process.poll() is not None
