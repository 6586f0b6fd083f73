"""Records what Debezium writes for the changes of debezium_cases.py into `tests/fixtures/debezium.jsonl.gz`.

Run it when the cases or Debezium's version change: `.venv/bin/python tests/record_debezium.py`, with the extra
`bench-peers`.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path

import psycopg
from debezium_cases import CHANGES, SETUP, TYPES
from debezium_engine import engine

from pgcdc.playground.postgres import EmbeddedPostgres

FILE = Path(__file__).parent / "fixtures" / "debezium.jsonl.gz"


def main() -> None:
    """Write the file anew."""
    with EmbeddedPostgres.temporary(settings={"fsync": "off"}) as server, tempfile.TemporaryDirectory() as folder:
        with psycopg.connect(server.url(), autocommit=True) as conn:
            conn.execute("CREATE DATABASE shop")
        url = server.url("shop")
        with psycopg.connect(url, autocommit=True) as conn:
            for statement in SETUP:
                conn.execute(statement.encode())
            with engine(url, Path(folder), "dbz", f"public.t_{len(TYPES) - 1}") as records:
                for statement in CHANGES:
                    conn.execute(statement.encode())
                found = records()
    kept = [one for one in found if not one["topic"].endswith(".transaction")]
    FILE.write_bytes(gzip.compress("".join(json.dumps(one) + "\n" for one in kept).encode(), mtime=0))
    print(f"{len(found)} records")


if __name__ == "__main__":
    main()
