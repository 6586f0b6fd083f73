"""`pgcdc listen` with more sinks than one: `SLOT FOLDER NOOPS [block]`. The URL is in PGCDC_DB.

With `block` there is one more sink, which takes nothing while the file `block` is in the folder.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from workload import PUBLICATION

from pgcdc.cli.listen import _say, _stop_on_signals
from pgcdc.config import Config
from pgcdc.pipeline import Pipeline
from pgcdc.position import Position
from pgcdc.sink.ack import AckFile
from pgcdc.sink.base import Batch
from pgcdc.stream.member import Adapter


class NoopSink:
    """Takes everything and keeps nothing but its ack."""

    def __init__(self, acks: Path, name: str) -> None:
        self.name = name
        self._ack = AckFile(acks, name)

    @property
    def ack(self) -> Position:
        assert self._ack.position is not None
        return self._ack.position

    def check(self) -> None:
        pass

    def open(self, start: Position) -> None:
        if self._ack.position is None:
            self._ack.save(start, {})

    def write(self, batch: Batch) -> None:
        self._ack.save(batch.end, {})

    def close(self) -> None:
        pass


class BlockedSink(NoopSink):
    """Waits as long as a file is there."""

    def __init__(self, acks: Path, name: str, sign: Path) -> None:
        super().__init__(acks, name)
        self._sign = sign

    def write(self, batch: Batch) -> None:
        while self._sign.exists():
            time.sleep(0.05)
        super().write(batch)


class SinksPipeline(Pipeline):
    """The file, and others."""

    others: list[Adapter]

    def _check_sinks(self) -> list[Adapter]:
        return [*super()._check_sinks(), *self.others]


def main() -> None:
    slot, folder, noops, *more = sys.argv[1:]
    place = Path(folder)
    raw = {
        "db": os.environ["PGCDC_DB"], "slot_name": slot, "publication": PUBLICATION, "adapters": ("file",),
        "file_path": place / "events.jsonl", "state_dir": place / "state", "start_from": "slot",
    }  # fmt: skip
    pipeline = SinksPipeline(Config.model_validate(raw), say=_say)
    acks = pipeline.state.acks
    sinks: list[NoopSink] = [NoopSink(acks, f"noop{number}") for number in range(int(noops))]
    sinks += [BlockedSink(acks, "blocked", place / "block")] if more else []
    pipeline.others = [Adapter(sink.name, sink) for sink in sinks]
    _stop_on_signals(pipeline)
    pipeline.run()


if __name__ == "__main__":
    main()
