"""Pipelines with several sinks that a test can block and fail, in this process or in one that can be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from listening import wait_until
from running import run

from pgcdc import adapters
from pgcdc.config import Config
from pgcdc.core.errors import SinkUnavailable
from pgcdc.core.position import Position
from pgcdc.core.state import read_json
from pgcdc.event.batch import Batch
from pgcdc.run.member import Adapter
from pgcdc.run.pipeline import Pipeline
from pgcdc.sink.contract import Sink
from pgcdc.sink.file import FileSink
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import AdapterSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class TestSink(FileSink):
    """A file whose writing is controlled by another one beside it: `block`, `fail`, or nothing."""

    __test__ = False

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder / f"{name}.jsonl")
        self._control = folder / f"{name}.do"
        self._writers = 0
        self.most_writers = 0
        self.writes = 0

    def write(self, batch: Batch) -> None:
        self._writers += 1
        self.most_writers = max(self.most_writers, self._writers)
        self.writes += 1
        try:
            while (what := self._told()) == "block":
                time.sleep(0.01)
            if what == "fail":
                raise SinkUnavailable(f"{self.name} was told to fail")
            super().write(batch)
        finally:
            self._writers -= 1

    def _told(self) -> str:
        return self._control.read_text() if self._control.exists() else ""


class Sinks:
    """What several sinks in one folder have, seen from outside."""

    def __init__(self, folder: Path, state: Path) -> None:
        self.folder = folder
        self.state = state

    def tell(self, name: str, what: str) -> None:
        temporary = self.folder / f"{name}.tmp"
        temporary.write_text(what)
        os.replace(temporary, self.folder / f"{name}.do")

    def ack(self, name: str) -> Position | None:
        raw = read_json(self.state / "acks" / f"{name}.json")
        return Position.parse(raw["position"]) if raw else None

    def events(self, name: str) -> list[dict[str, Any]]:
        """What the ack covers."""
        raw = read_json(self.state / "acks" / f"{name}.json")
        data = (self.folder / f"{name}.jsonl").read_bytes()[: raw["detail"]["size"]] if raw else b""
        return [json.loads(line) for line in data.splitlines()]

    def keys(self, name: str) -> list[int]:
        """The keys of the rows that were inserted, in the order of delivery."""
        return [int(event["payload"]["row"]["id"]) for event in self.events(name) if event["operation"] == "INSERT"]

    def wait_for(self, name: str, last: int, timeout_s: float = 30.0) -> None:
        wait_until(lambda: self.keys(name)[-1:] == [last], timeout_s, f"{name} has {last}: {self.keys(name)[-3:]}")

    def lanes(self) -> dict[str, str]:
        raw = read_json(self.state / "lanes.json") or {"adapters": {}}
        return {name: one["lane"] for name, one in raw["adapters"].items()}

    def is_out(self, name: str) -> bool:
        return self.lanes()[name] != "main"

    def consumers(self) -> set[str]:
        return set((read_json(self.state / "consumers.json") or {"consumers": {}})["consumers"])


class Run(Pipeline):
    """A pipeline in a thread of this process, with the Spark of all tests."""

    def __init__(self, spark: SparkSession, url: str, folder: Path, names: Sequence[str], **more: Any) -> None:
        self.lines: list[str] = []
        raw = {"db": url, "slot_name": f"lanes_{folder.name[-20:]}".lower().replace("-", "_"), "all_tables": True,
               "state_dir": folder / "state", "snapshot_mode": "never", "warm_up": False}  # fmt: skip
        priorities = more.pop("priorities", {})
        specs = [adapters.noop(name=name, priority=priorities.get(name, "normal")) for name in names]
        super().__init__(Config.model_validate(raw | more), specs, say=self.lines.append)
        self.sinks = {name: TestSink(folder, name) for name in names}
        self._shared = spark
        self.folder = folder
        self.seen = Sinks(folder, self.state.path)

    def begin(self) -> Run:
        self.start()
        return self

    def end(self, timeout_s: float = 40.0) -> None:
        self.stop()
        assert self.wait(timeout_s), self.lines

    def said(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def run_sink(self, name: str) -> Runner:
        """The sink in a runner that leaves all to the lane."""
        sink: Sink | Runner = self.sinks[name]
        return sink if isinstance(sink, Runner) else run(sink, self.state.acks, name, timeout=600)

    def _make_adapters(self, specs: Sequence[AdapterSpec]) -> list[Adapter]:
        return [Adapter(one.name, self.run_sink(one.name), self._chains.of(one), one.priority) for one in specs]

    def _spark_options(self) -> dict[str, str]:
        return super()._spark_options() | {"url": self.config.db}  # the JVM is older than our variables

    def _start_spark(self) -> None:
        self._spark = self._shared

    def _close(self) -> None:
        if self._lanes is not None:
            for lane in list(self._lanes._moves.lanes.values()):
                if lane.query is not None and not lane.boundary.locked():
                    lane.query.stop()
        self._spark = None
        super()._close()


class Child:
    """The same in a process of its own, which can be killed at a failpoint."""

    def __init__(self, url: str, folder: Path, names: Sequence[str]) -> None:
        self.url, self.folder, self.names = url, folder, names
        self.seen = Sinks(folder, folder / "state")
        self.process: subprocess.Popen[bytes] | None = None
        self.log = folder / "child.log"

    def start(self, failpoints: str = "", *, wait: bool = True) -> None:
        before = self.log.stat().st_size if self.log.exists() else 0
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, self.url, str(self.folder), *self.names],
                stdout=log,
                stderr=log,
                env={**os.environ, "PGCDC_FAILPOINTS": failpoints},
            )
        if wait:
            wait_until(lambda: b"ready:" in self.log.read_bytes()[before:], 90, "the child is ready")

    def wait_exit(self, timeout_s: float = 60.0) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(40)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class _ChildPipeline(Pipeline):
    def __init__(self, config: Config, say: Callable[[str], None], folder: Path, names: Sequence[str]) -> None:
        super().__init__(config, [adapters.noop(name=name) for name in names], say=say)
        self._folder = folder

    def _make_adapters(self, specs: Sequence[AdapterSpec]) -> list[Adapter]:
        acks = self.state.acks
        return [Adapter(one.name, run(TestSink(self._folder, one.name), acks, one.name, timeout=600)) for one in specs]


def main() -> None:
    from pgcdc.cli.listen import _stop_on_signals

    url, folder, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    raw = {"db": url, "slot_name": "child", "all_tables": True, "state_dir": folder / "state", "snapshot_mode": "never",
           "warm_up": False}  # fmt: skip
    pipeline = _ChildPipeline(Config.model_validate(raw), lambda text: print(text, flush=True), folder, names)
    _stop_on_signals(pipeline)
    pipeline.run()


if __name__ == "__main__":
    main()
