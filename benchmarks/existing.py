"""Sections about existing rows: tables read at once, and snapshots before a stream and beside it."""

from __future__ import annotations

from bench import MB, Bench, percentiles
from incremental import Beside, Initial, measure_beside, measure_initial
from snapshot import measure_reading

__all__ = ["measure_incremental", "measure_initial_snapshot", "measure_snapshot"]

BESIDE_RATE_PER_S = 500


def measure_snapshot(bench: Bench) -> None:
    """Existing rows of a table through Spark, once."""
    rows = bench.scale.changes
    runs = measure_reading(bench.url(), rows, bench.scale.rounds)
    note = f"{rows / runs.took_s('ours') / 1e3:,.0f}k rows/s, {runs.cpu_s('ours') * 1e6 / rows:.2f} µs CPU a row"
    bench.add("snapshot.psql", rows / runs.took_s("psql") / 1e3, f"{rows:,} rows, one connection")
    bench.add("snapshot.arrow", runs.took_s("psql") / runs.took_s("ours"), note)
    for key, way in (("snapshot.arrow-jdbc", ""), ("snapshot.parquet-jdbc", "_parquet")):
        if f"jdbc{way}" not in runs.found:
            bench.skip(key, "no JDBC driver here (`make test-servers`)")
            continue
        ours_s, jdbc_s = runs.took_s(f"ours{way}"), runs.took_s(f"jdbc{way}")
        ours_us, jdbc_us = (runs.cpu_s(f"{who}{way}") * 1e6 / rows for who in ("ours", "jdbc"))
        note = f"{ours_s:.2f} s against {jdbc_s:.2f} s, {ours_us:.2f} µs CPU a row against {jdbc_us:.2f} µs"
        bench.add(key, jdbc_s / ours_s, note)


def measure_incremental(bench: Bench) -> None:
    """A snapshot of a table beside a stream that runs."""
    scale, url = bench.scale, bench.url()
    small, large = (
        measure_beside(url, rows, warm_s=scale.warm_s, seconds=scale.latency_s, rate_per_s=BESIDE_RATE_PER_S)
        for rows in sorted(scale.existing_rows)
    )
    before, during = percentiles(large.without_ms), percentiles(large.with_ms)
    note = (
        f"{large.rows:,} rows; p50 {during[0]:.1f} ms against {before[0]:.1f} ms, p99 {during[2]:.0f} ms against "
        f"{before[2]:.0f} ms at {large.commits_per_s:.0f} commits/s; {large.rows / large.took_s / 1e3:,.0f}k rows/s"
    )
    bench.add("incremental.latency", during[0] / before[0], note)
    _add_growth(bench, "incremental", small, large)


def measure_initial_snapshot(bench: Bench) -> None:
    """A snapshot before the stream begins."""
    small, large = (measure_initial(bench.url(), rows) for rows in sorted(bench.scale.existing_rows))
    bench.add("initial.rate", large.rows / large.took_s / 1e3, f"{large.rows:,} rows")
    _add_growth(bench, "initial", small, large)


def _add_growth(bench: Bench, section: str, small: Beside | Initial, large: Beside | Initial) -> None:
    """That memory does not grow with the table."""
    for role, key in (("capture", "capture-rss"), ("Spark's Python workers", "worker-rss")):
        few, many = small.peaks_bytes[role], large.peaks_bytes[role]
        bench.add(f"{section}.{key}", many / few, f"{many / MB:,.0f} MB against {few / MB:,.0f} MB")
