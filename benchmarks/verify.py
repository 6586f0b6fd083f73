"""`pgcdc verify` of a large table between two servers, against one full checksum on both; differences found; memory.

python benchmarks/verify.py SOURCE TARGET STATE   the process that is measured
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workload import connect, start_server

from pgcdc.core.position import Position
from pgcdc.core.state import Identity, StateDir
from pgcdc.postgres.lsn import parse_lsn
from pgcdc.run.chains import Chains
from pgcdc.run.settings import PipelineSettings
from pgcdc.run.verify.job import Verify, VerifyOptions
from pgcdc.sink.contract import Progress
from pgcdc.sink.pg_table.options import PgTableOptions
from pgcdc.sink.spec import AdapterSpec

if TYPE_CHECKING:
    from bench import Bench

__all__ = ["measure_verify"]

TABLE = "CREATE TABLE compared (id bigint PRIMARY KEY, name text, price numeric(12,2), at timestamptz, ok bool)"
ROWS = (
    "INSERT INTO compared SELECT n, md5(n::text), n / 7.0, 'epoch'::timestamptz + n * interval '1 s', n % 3 = 0 "
    "FROM generate_series(1, {}) n"
)
CHECKSUM = "SELECT count(*), sum(hashtextextended(c::text, 0)) FROM compared c"
DIFFERENCES = 100


def measure_verify(bench: Bench) -> None:
    """pgcdc verify of equal rows against one checksum on both servers, of 100 differences, and its memory."""
    source, rows = bench.url(), bench.scale.existing_rows[1]
    with start_server() as server, tempfile.TemporaryDirectory() as folder:
        target = server.url()
        for url in (source, target):
            with connect(url) as conn:
                conn.execute(TABLE)
                conn.execute(ROWS.format(rows))
                conn.execute("VACUUM ANALYZE compared")
        state = _make_state(source, Path(folder))
        plain, ours, found = list[float](), list[float](), dict[str, Any]()
        for _ in range(bench.scale.rounds):
            plain.append(_checksum(source) + _checksum(target))
            found = _verify(source, target, state)
            ours.append(found["seconds"])
            bench.say(f"checksums {plain[-1]:.2f} s, verify {ours[-1]:.2f} s, {found['peak_mb']:.0f} MB")
        assert found["wrong"] == 0
        with connect(target) as conn:
            _spoil(conn, rows)
        spoiled = _verify(source, target, state)
        with connect(source) as conn:
            conn.execute("DROP PUBLICATION compared")
            conn.execute("DROP TABLE compared")
    times = statistics.median(ours) / statistics.median(plain)
    note = f"{statistics.median(ours):.2f} s against {statistics.median(plain):.2f} s"
    bench.add("verify.time", times, f"{rows:,} rows: {note}")
    bench.add("verify.found", spoiled["wrong"], f"{spoiled['seconds']:.2f} s, lost deletes among them")
    bench.add("verify.memory", found["peak_mb"], "the whole process, imports included")


def _checksum(url: str) -> float:
    begun = time.perf_counter()
    with connect(url) as conn:
        conn.execute(CHECKSUM)
    return time.perf_counter() - begun


def _spoil(conn: Any, rows: int) -> None:
    keys = random.Random(1).sample(range(1, rows), DIFFERENCES)
    third = DIFFERENCES // 3
    conn.execute("DELETE FROM compared WHERE id = ANY (%s)", [keys[:third]])
    conn.execute("UPDATE compared SET price = price + 0.01 WHERE id = ANY (%s)", [keys[third : 2 * third]])
    extra = [-key for key in keys[2 * third :]]
    conn.execute("INSERT INTO compared (id, name) SELECT unnest(%s::bigint[]), 'a lost delete'", [extra])


def _make_state(url: str, folder: Path) -> Path:
    """As a pipeline leaves it that has delivered everything."""
    with connect(url) as conn:
        conn.execute("CREATE PUBLICATION compared FOR TABLE compared")
        row = conn.execute(
            "SELECT system_identifier::text, pg_current_wal_insert_lsn()::text, current_database() FROM pg_control_system()"
        ).fetchone()
    assert row is not None
    system, lsn, database = row
    state = StateDir(folder / "state")
    state.create()
    details = {"timeline": 1, "publications": [{"name": "compared"}], "asked": {}}
    state.save_identity(Identity("postgres", system, database, "compared", "1", 1, details))
    Progress(state.acks, "mirror").save(Position.end(parse_lsn(lsn)))
    return state.path


def _verify(source: str, target: str, state: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, source, target, str(state)], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _child(source: str, target: str, state: str) -> None:
    spec = AdapterSpec("mirror", "pg_table", PgTableOptions(db=target, mode="apply"))
    config = PipelineSettings(db=source, state_dir=Path(state))
    report = Verify(config, Chains([spec], ()), VerifyOptions(at_rest=True)).run()
    (peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    peak_mb = int(peak.split()[1]) / 1024  # getrusage would count what the process was before exec
    wrong = sum(one.wrong for one in report.tables)
    print(json.dumps({"seconds": report.seconds, "peak_mb": peak_mb, "wrong": wrong, "rows": report.tables[0].rows}))


if __name__ == "__main__":
    _child(*sys.argv[1:])
