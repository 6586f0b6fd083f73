"""Write every change to Parquet files with the capture alone: no Spark, no spool, no state directory.

    export PGCDC_DB=postgresql://user:password@localhost:5432/shop
    psql "$PGCDC_DB" -c "CREATE PUBLICATION parquet FOR TABLE orders"
    psql "$PGCDC_DB" -c "SELECT pg_create_logical_replication_slot('parquet', 'pgoutput')"
    .venv/bin/python examples/capture_to_parquet.py --folder changes --seconds 60

The publication comes first: a slot cannot decode what happened before its publication existed. A file is complete and on
disk before PostgreSQL hears that it may forget those changes. After a crash in between the server sends them again, cut in
other places; they are recognised by their position, which is the name of the file that ends with them.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import pgcdc

OPERATIONS = {ord("I"): "INSERT", ord("U"): "UPDATE", ord("D"): "DELETE", ord("T"): "TRUNCATE"}
TEXTS = pa.list_(pa.string())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("changes"))
    parser.add_argument("--slot", default="parquet")
    parser.add_argument("--publication", default="parquet")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to run")
    options = parser.parse_args()

    options.folder.mkdir(parents=True, exist_ok=True)
    done = find_last_position(options.folder)
    until = time.monotonic() + options.seconds
    url = os.environ["PGCDC_DB"]
    with pgcdc.open_capture(url, slot=options.slot, publication=options.publication) as capture:
        while time.monotonic() < until:
            batch = capture.receive_batch(limit=50_000, timeout_s=1.0)
            if batch is None:
                continue
            table = flatten(batch, done)
            if table.num_rows:
                write_durably(table, options.folder / f"{str(batch.end).replace('/', '-')}.parquet")
                print(f"{table.num_rows} changes up to {batch.end}", flush=True)
            capture.send_feedback(batch.last_lsn)  # only now may PostgreSQL forget them


def find_last_position(folder: Path) -> pgcdc.Position:
    """How far an earlier run came: positions are written so that the order of their text is the order of the stream."""
    names = sorted(file.stem for file in folder.glob("*.parquet"))
    return pgcdc.Position.parse(names[-1].replace("-", "/")) if names else pgcdc.Position(0, 0)


def flatten(batch: pgcdc.CaptureBatch, done: pgcdc.Position) -> pa.Table:
    """The changes after `done`, one row each, with the facts of their transaction and table beside them."""
    changes = batch.data
    transactions = batch.transactions
    transaction = np.repeat(np.arange(transactions.num_rows), transactions.column("rows").to_numpy())
    lsn = transactions.column("commit").to_numpy()[transaction]
    ordinal = changes.column("ordinal").to_numpy()
    version = pa.array(changes.column("relation").to_numpy())
    relations = [batch.relations[number] for number in range(len(batch.relations))]
    names = pa.array([f"{relation.namespace}.{relation.name}" for relation in relations], pa.string())
    columns = pa.array([[column.name for column in relation.columns] for relation in relations], TEXTS)
    commit_time = transactions.column("commit_time").take(pa.array(transaction))
    table = pa.table(
        {
            "lsn": lsn,
            "ordinal": ordinal,
            "xid": transactions.column("xid").take(pa.array(transaction)),
            "commit_time": commit_time.cast(pa.timestamp("us", tz="UTC")),
            "operation": pa.array([OPERATIONS[op] for op in changes.column("op").to_pylist()], pa.string()),
            "table": names.take(version),
            "columns": columns.take(version),
            "new": changes.column("new").cast(TEXTS),  # PostgreSQL's text of every value, in the order of `columns`
            "old": changes.column("old").cast(TEXTS),
            "unchanged": changes.column("unchanged"),  # numbers of the columns whose value was not sent (TOAST)
        }
    )
    is_new = (lsn > done.lsn) | ((lsn == done.lsn) & (ordinal > done.ordinal))
    return table if is_new.all() else table.filter(pc.equal(pa.array(is_new), True))


def write_durably(table: pa.Table, path: Path) -> None:
    """The file has its name only when it is complete, and survives a crash of the machine when this returns."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        pq.write_table(table, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


if __name__ == "__main__":
    main()
