"""A typed query to a no-op sink, in a process of its own: `SLOT CHANGES FOLDER`, the URL in PGCDC_DB. Prints a line of JSON.

The time counts from the walsender's connection to the end of the batch with the last change.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from usage import cpu_of_tree, cpu_since
from workload import PUBLICATION, wait_for_reader

import pgcdc
from pgcdc.run.warm import warm_up
from pgcdc.transform.program import compile_chains
from pgcdc.transform.specs import Chain


def main() -> None:
    """Drain the slot as typed rows and say how long it took."""
    slot, changes, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    url = os.environ["PGCDC_DB"]
    spark = pgcdc.session(log_file=folder / "spark.log")
    warm_up(spark, compile_chains([Chain()]))
    rows = pgcdc.read_table(
        spark, "backlog", slot=slot, publication=PUBLICATION, state_dir=str(folder / "state"), start_from="slot"
    )
    connected: list[float] = []
    watcher = threading.Thread(target=lambda: connected.append(wait_for_reader(url, slot)))
    watcher.start()
    before = cpu_of_tree(os.getpid())
    query = rows.writeStream.format("noop").option("checkpointLocation", str(folder / "checkpoint")).start()
    while _rows(query.recentProgress) < changes and query.isActive:
        time.sleep(0.05)
    used = cpu_since(before, cpu_of_tree(os.getpid()))
    progress = [json.loads(one.json) for one in query.recentProgress if one.numInputRows]
    last = progress[-1]
    ended = datetime.fromisoformat(last["timestamp"]).timestamp() + last["durationMs"]["triggerExecution"] / 1e3
    total = _rows(query.recentProgress)
    query.stop()
    watcher.join()
    spark.stop()
    answer = {"rows": total, "took_s": ended - connected[0], "cpu_s": sum(used.values()), "cpu_by_role": used}
    print(json.dumps(answer))


def _rows(progress: list[Any]) -> int:
    return sum(int(one.numInputRows) for one in progress)


if __name__ == "__main__":
    main()
