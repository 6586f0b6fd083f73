"""Dead letters, a sink that refuses some events until it is mended, and a pipeline with it that can be killed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pgcdc import adapters
from pgcdc.config import Config
from pgcdc.core.errors import Reject, SinkRejected
from pgcdc.core.position import Position
from pgcdc.event.batch import Batch
from pgcdc.run.member import Adapter
from pgcdc.run.pipeline import Pipeline
from pgcdc.sink.file import FileSink
from pgcdc.sink.letters.record import DeadLetter, make_letter
from pgcdc.sink.spec import AdapterSpec

PIPELINE = "7/slot"


def at(*numbers: int) -> list[str]:
    return [str(Position.at(101, number)) for number in numbers]


def letter(number: int, adapter: str = "file", event: str | None = None, **other: Any) -> DeadLetter:
    line = event or json.dumps({"id": f"e{number}", "channel": "pgcdc:o", "operation": "INSERT"})
    made = make_letter(PIPELINE, adapter, [line + "\n"], Reject(at(number)[0], "http_400", "bad"), 1)
    return replace(made, **other)


class PickyFile(FileSink):
    """Refuses events with `bad` in them, as long as there is no file `mended` beside it."""

    def write(self, batch: Batch) -> None:
        self._refuse(batch)
        super().write(batch)

    def redeliver(self, batch: Batch) -> Collection[str]:
        self._refuse(batch)
        return super().redeliver(batch)

    def _refuse(self, batch: Batch) -> None:
        if (self.path.parent / "mended").exists():
            return
        rows = zip(batch.events.column("position").to_pylist(), batch.events.column("line").to_pylist(), strict=True)
        if rejects := [Reject(position, "bad_row", "it says bad") for position, line in rows if "bad" in line]:
            raise SinkRejected("refused", "", rejects)


class PickyPipeline(Pipeline):
    """One adapter, `file`, that refuses some events."""

    def __init__(self, config: Config, say: Callable[[str], None], folder: Path) -> None:
        super().__init__(config, [adapters.file(folder / "file.jsonl")], say=say)
        self._folder = folder

    def _make_adapters(self, specs: Sequence[AdapterSpec]) -> list[Adapter]:
        runner = self._letters.run(specs[0], self.state.acks)
        runner.sink = PickyFile(self._folder / "file.jsonl")
        return [Adapter("file", runner)]


def main() -> None:
    from pgcdc.cli.listen import _stop_on_signals

    url, folder, more = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    raw = {"db": url, "slot_name": "picky", "all_tables": True, "state_dir": folder / "state", "snapshot_mode": "never",
           "warm_up": False, **more}  # fmt: skip
    pipeline = PickyPipeline(Config.model_validate(raw), lambda text: print(text, flush=True), folder)
    _stop_on_signals(pipeline)
    pipeline.run()


if __name__ == "__main__":
    main()
