"""A standalone Spark cluster on this machine: master and workers, each a process of its own, from the installed PySpark."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from pathlib import Path

import psutil
import pyspark
from listening import wait_until

import pgcdc

CLUSTER_TIMEOUT_S = 60.0


class Cluster:
    """Use it as a context manager."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self._folder = folder
        self._count = workers
        self._port = free_port()
        self._master: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self._port}"

    def __enter__(self) -> Cluster:
        self._folder.mkdir()
        try:
            self._master = self._start("master", "master.Master", "--port", str(self._port))
            wait_until(self._is_up, CLUSTER_TIMEOUT_S, "the master listens")
            for number in range(self._count):
                self.start_worker(number)
            wait_until(
                lambda: self._log("master").count("Registering worker") >= self._count,
                CLUSTER_TIMEOUT_S,
                "the workers are registered",
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(len(self.workers)):
            self.kill_worker(number)
        if self._master is not None:
            self._master.kill()
            self._master.wait()

    def start_worker(self, number: int) -> None:
        work = self._folder / f"work-{number}"
        arguments = ("--cores", "1", "--memory", "1g", "--work-dir", str(work), self.url)
        self.workers.append(self._start(f"worker-{number}", "worker.Worker", *arguments))

    def executors(self, number: int) -> list[psutil.Process]:
        """The JVMs that run tasks for a worker, and their Python processes."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.workers[number].pid).children(recursive=True)
        return []

    def kill_worker(self, number: int) -> int:
        """kill -9 of a worker with everything that runs on it: a machine that is gone. How many processes that were."""
        executors = self.executors(number)
        self.workers[number].kill()
        for process in executors:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.workers[number].wait()
        psutil.wait_procs(executors, 10)
        return len(executors)

    def _start(self, name: str, kind: str, *arguments: str) -> subprocess.Popen[bytes]:
        home = Path(pyspark.__file__).parent
        environment = {
            **os.environ,
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_NO_DAEMONIZE": "1",
            # Executors inherit it: they import this pgcdc.
            "PYTHONPATH": str(Path(pgcdc.__file__).parents[1]),
        }
        environment.pop("PGCDC_DB", None)
        place = ("--host", "127.0.0.1", "--webui-port", "0")
        command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}", *place, *arguments]
        with open(self._folder / f"{name}.log", "wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def _is_up(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
            return True
        return False

    def _log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
