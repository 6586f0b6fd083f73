"""`pgcdc listen` with more sinks than one: `SLOT FOLDER NOOPS [block]`. The URL is in PGCDC_DB.

With `block` there is one more sink, which takes nothing while the file `block` is in the folder.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from workload import PUBLICATION

from pgcdc import adapters, sources
from pgcdc.cli.listen import _stop_on_signals
from pgcdc.core.log import say
from pgcdc.event.batch import Batch
from pgcdc.run.member import Adapter
from pgcdc.run.pipeline import Pipeline
from pgcdc.sink.noop import NoopSink
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import AdapterSpec


class BlockedSink(NoopSink):
    """Waits as long as a file is there."""

    def __init__(self, sign: Path) -> None:
        self._sign = sign

    def write(self, batch: Batch) -> None:
        while self._sign.exists():
            time.sleep(0.05)
        super().write(batch)


class SinksPipeline(Pipeline):
    """The sink `blocked` waits when it is told to."""

    def _make_adapters(self, specs: Sequence[AdapterSpec]) -> list[Adapter]:
        made = super()._make_adapters(specs)
        sign = self.state.path.parent / "block"
        return [
            replace(one, sink=Runner(BlockedSink(sign), self.state.acks, one.name)) if one.name == "blocked" else one
            for one in made
        ]


def main() -> None:
    slot, folder, noops, *more = sys.argv[1:]
    place = Path(folder)
    source = sources.postgres(
        os.environ["PGCDC_DB"], slot_name=slot, publication=PUBLICATION, state_dir=place / "state", start_from="slot"
    )
    others = [f"noop{number}" for number in range(int(noops))] + (["blocked"] if more else [])
    sinks = [adapters.file(place / "events.jsonl"), *(adapters.noop(name=name) for name in others)]
    pipeline = SinksPipeline(source, sinks, say=say)
    _stop_on_signals(pipeline)
    pipeline.run()


if __name__ == "__main__":
    main()
