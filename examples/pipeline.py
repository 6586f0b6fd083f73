"""A pipeline in Python: two files, each with its own form of the events, and an adapter that comes later.

export PGCDC_DB=postgresql://app@localhost:5432/shop
.venv/bin/python examples/pipeline.py orders
"""

from __future__ import annotations

import sys
import time

from pgcdc import Pipeline, adapters, sources, transform


def main() -> None:
    """Deliver changes for a while, and show what becomes of them."""
    table = sys.argv[1] if len(sys.argv) > 1 else "orders"
    pipeline = Pipeline(
        sources.postgres(tables=[table], slot_name="example", state_dir="example-state"),
        adapters=[
            adapters.file("example-events.jsonl"),
            adapters.file("example-debezium.jsonl", name="debezium", transforms=[transform.debezium_envelope()]),
        ],
        transforms=[transform.drop_columns("password")],
        say=print,
    )
    pipeline.start()
    pipeline.add_adapter(
        adapters.file("example-deletes.jsonl", name="deletes", transforms=[transform.filter(operations=["DELETE"])])
    )
    try:
        while pipeline.status()["phase"] in ("streaming", "restarting the query"):
            for one in pipeline.status()["lanes"]:
                print(f"{one['adapter']:10} up to {one['ack']}, {one['lag_bytes']} bytes behind")
            time.sleep(5)
    except KeyboardInterrupt:
        pass
    pipeline.stop()
    pipeline.wait()


if __name__ == "__main__":
    main()
