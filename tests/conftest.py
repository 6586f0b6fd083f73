"""Shared by all tests: a real PostgreSQL, fresh databases on it, and a check that nothing is left running."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import psycopg
import pytest
from commands import end_server
from databases import Database, drop_database
from hypothesis import HealthCheck, settings
from psycopg import sql

from pgcdc.playground.postgres import EmbeddedPostgres

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Some containers set it: then each of the hundreds of processes that tests start compiles every module again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

_IN_CI = bool(os.environ.get("CI"))
# Inherited by every process that a test starts, so that orphans are found as well as children.
_RUN_VARIABLE, _RUN_ID = "TEST_RUN_OF_PGCDC", uuid.uuid4().hex
_NUMBERS = itertools.count(1)
_LEFT_BY_WORKERS: list[str] = []

_DURATIONS_FILE = Path(__file__).with_name("durations.json")
_SECONDS: defaultdict[str, float] = defaultdict(float)

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if _IN_CI else "default")


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    """One server for the run. Never stop or kill it: start your own with EmbeddedPostgres.temporary() for that."""
    quick = {"fsync": "off", "full_page_writes": "off", "autovacuum": "off", "checkpoint_timeout": "1h"}
    with EmbeddedPostgres.temporary(settings={**quick, "max_prepared_transactions": "10"}) as server:
        yield server


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One Spark session for the run."""
    from pgcdc.spark.session import session

    yield session(log_file=tmp_path_factory.mktemp("spark") / "spark.log")


@pytest.fixture
def database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    name = f"t_{next(_NUMBERS)}"
    with psycopg.connect(postgres.url(), autocommit=True) as admin:
        # a third less CPU time than by WAL, which is for servers that must not stop for a checkpoint
        admin.execute(sql.SQL("CREATE DATABASE {} STRATEGY file_copy").format(sql.Identifier(name)))
    try:
        yield Database(name, postgres.url(name), postgres)
    finally:
        with psycopg.connect(postgres.url(), autocommit=True) as admin:
            drop_database(admin, name)


def pytest_sessionstart() -> None:
    os.environ[_RUN_VARIABLE] = _RUN_ID
    # Most tests with Spark are over before its second compiler has paid off.
    os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1")
    if "PGCDC_CLASS_ARCHIVE" not in os.environ:
        os.environ["PGCDC_CLASS_ARCHIVE"] = str(Path(sys.prefix) / "classes")  # `make` made it
        from pgcdc.core.errors import ConfigError
        from pgcdc.spark.session import find_archive

        home, archive = os.environ.get("SPARK_HOME"), None
        with contextlib.suppress(ConfigError):  # without Java: the tests that need Spark say so
            archive = find_archive()
        if home is None:
            os.environ.pop("SPARK_HOME", None)
        if archive is None or archive.is_wanted:  # no test has another process make one beside it
            os.environ["PGCDC_CLASS_ARCHIVE"] = "off"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations", action="store_true", help="write tests/durations.json, which orders the files"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: a long one at the end would run alone, while other processes have nothing left to do."""
    known: dict[str, float] = json.loads(_DURATIONS_FILE.read_text())
    items.sort(key=lambda item: -known.get(_file_of(item.nodeid), 5.0))  # stable: the tests of a file keep their order


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _SECONDS[_file_of(report.nodeid)] += report.duration


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if _IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"skipped, which is a failure in CI: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if _IN_CI and report.skipped:
        report.outcome, report.longrepr = "failed", f"skipped, which is a failure in CI: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    yield  # session fixtures end here if the run was cut short
    end_server()
    _end_own_jvm()
    left = _processes_left(timeout_s=15.0)
    if hasattr(session.config, "workeroutput"):  # one of several processes that run the tests: the first one reports
        session.config.workeroutput["left"] = left
        return
    if session.config.getoption("--record-durations"):
        known = json.loads(_DURATIONS_FILE.read_text()) | {file: round(took, 1) for file, took in _SECONDS.items()}
        _DURATIONS_FILE.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n")
    left += _LEFT_BY_WORKERS
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        for line in left:
            if reporter is not None:
                reporter.write_line(f"left running by the tests: {line}", red=True)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _LEFT_BY_WORKERS.extend(getattr(node, "workeroutput", {}).get("left", []))


def _end_own_jvm() -> None:
    """The JVM of Spark in this process lives until the process ends, by design: end it before looking for leftovers."""
    try:
        from pyspark import SparkContext
    except ImportError:
        return
    gateway = SparkContext._gateway
    if gateway is not None:
        if SparkContext._active_spark_context is not None:
            SparkContext._active_spark_context.stop()
        gateway.shutdown()
        process = getattr(gateway, "proc", None)
        if process is not None:
            process.stdin.close()
            process.wait(30)
        SparkContext._gateway = None


def _processes_left(timeout_s: float) -> list[str]:
    """Processes of this run that still live after a grace period, as "pid command"."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = {process.pid: process for process in psutil.Process().children(recursive=True)}
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get(_RUN_VARIABLE) == _RUN_ID:
                    left[process.pid] = process
            except psutil.Error:
                continue
        lines = []
        for process in left.values():
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    lines.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
            except psutil.Error:
                continue
        if not lines or time.monotonic() > deadline:
            return lines
        time.sleep(0.1)
