"""The sections of `make bench`: each measures one thing and adds its figures."""

from __future__ import annotations

import contextlib
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from backlog import (
    Contender,
    Unavailable,
    our_contenders,
    recvlogical,
    run_child,
    run_contenders,
    through_envelopes,
    through_transforms,
    typed,
)
from cast import SMALL_ROWS, measure_casting
from decode import measure_decoding
from fanout import MORE_SINKS, measure_blocked, measure_sinks
from incremental import measure_beside, measure_initial
from key_change import measure_key_change
from large import drop_large, prepare_large, run_capture, run_pipeline
from latency import measure_idle, measure_latency, measure_start
from mirrors import measure_append, measure_apply, measure_three
from peers import peer_contenders
from reloads import measure_reloads
from report import Figure, at_least, at_most, skipped
from sentinel import measure_sentinel
from size import measure_size
from snapshot import measure_reading
from tls import describe_tls, tls_enabled, with_tls
from toast import drop_toast, prepare_toast, run_toast
from verify import measure_verify
from verify_beside import measure_verify_beside
from webhook import BATCH_SIZE, WORKERS, Posted, measure_webhook
from workload import Backlog, Writer, connect, drop_slot, new_slot, prepare_backlog, start_server

from pgcdc.core.errors import ConfigError
from pgcdc.playground.postgres import EmbeddedPostgres, find_binaries

__all__ = ["ARROW_RATE_PER_S", "BESIDE_RATE_PER_S", "RATE_PER_S", "SECTIONS", "Bench", "Scale", "percentiles"]

ROOT = Path(__file__).parent.parent
RATE_PER_S = 50
ARROW_RATE_PER_S = 100
BESIDE_RATE_PER_S = 500
PEER_VERSION = 15
"""Debian's (`make test-servers`) for what the embedded server lacks: TLS, test_decoding, wal2json."""
MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    changes: int = 1_000_000
    rounds: int = 3
    decoded_rows: int = 200_000
    large_rows: tuple[int, int] = (1_000_000, 10_000_000)
    toast_keys: int = 1_000_000
    warm_s: float = 15
    latency_s: float = 60
    starts: int = 3
    settle_s: float = 15
    idle_s: float = 30
    reloads: int = 100
    existing_rows: tuple[int, int] = (250_000, 1_000_000)
    posted: int = 20_000


@dataclass(slots=True)
class Bench:
    """One run: its servers, which start when first needed, and what it has found."""

    scale: Scale
    say: Callable[[str], None]
    figures: list[Figure] = field(default_factory=list)
    contenders: dict[str, Contender] = field(default_factory=dict)
    peers: dict[str, Contender] = field(default_factory=dict)
    peer_server: str = ""
    """On which server the peers were measured."""
    latencies_ms: list[float] = field(default_factory=list)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _servers: dict[int, EmbeddedPostgres] = field(default_factory=dict)
    _backlogs: dict[int, Backlog] = field(default_factory=dict)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def url(self, version: int = 18) -> str:
        """Where the server of this version is."""
        if version not in self._servers:
            self._servers[version] = self._stack.enter_context(start_server(version))
        return self._servers[version].url()

    def backlog(self, version: int = 18) -> Backlog:
        """The backlog on that server, made once."""
        if version not in self._backlogs:
            self.say(f"making {self.scale.changes:,} changes on PostgreSQL {version}")
            made = prepare_backlog(self.url(version), self.scale.changes)
            size = f"{made.changes:,} changes in {made.transactions:,} transactions"
            self.say(f"backlog: {size}, {made.wal_bytes / 1e6:,.0f} MB of WAL")
            self._backlogs[version] = made
        return self._backlogs[version]

    def forget_backlog(self, version: int = 18) -> None:
        """Let the server remove its WAL."""
        made = self._backlogs.pop(version)
        with connect(self.url(version)) as conn:
            drop_slot(conn, made.slot)
            conn.execute("TRUNCATE backlog")
            conn.execute("DROP PROCEDURE fill_backlog")


def measure_backlog(bench: Bench) -> None:
    """Three ways to drain one backlog."""
    made = bench.backlog()
    contenders = [recvlogical(), *our_contenders()]
    found = run_contenders(bench.url(), made, contenders, bench.scale.rounds, bench.say)
    bench.forget_backlog()
    bench.contenders = found
    base, arrow, spark = found["recvlogical"], found["arrow"], found["spark"]
    to_arrow, to_file = (base.median("took_s") / one.median("took_s") for one in (arrow, spark))
    took = f"{base.median('took_s'):.2f} s"
    bench.figures += [
        Figure("backlog: pg_recvlogical, the yardstick", "", took, None, _describe(base)),
        at_least("backlog: capture to Arrow", to_arrow, 0.95, "x", _describe(arrow)),
        at_most("backlog: CPU of the capture, of pg_recvlogical's", arrow.median("cpu_s") / base.median("cpu_s"), 1.5, "x",
            f"{arrow.median('cpu_s'):.2f} s against {base.median('cpu_s'):.2f} s, user and system", 2),
        at_least("backlog: through Spark to a file", to_file, 0.5, "x", _describe(spark)),
        at_most("capture process: peak RSS, backlog through Spark", spark.worst("capture_peak_rss_bytes") / MB, 150, "MB",
            f"{spark.worst('capture_rss_bytes') / MB:.0f} MB at the end; open_capture alone: "
            f"peak {arrow.worst('peak_rss_bytes') / MB:.0f} MB", 0),
    ]  # fmt: skip


def measure_typed(bench: Bench) -> None:
    """Typed rows of a table through Spark."""
    found = run_contenders(bench.url(), bench.backlog(), [recvlogical(), typed()], bench.scale.rounds, bench.say)
    bench.forget_backlog()
    ratio = found["recvlogical"].median("took_s") / found["typed"].median("took_s")
    name = "backlog: typed rows through Spark to a no-op sink"
    bench.figures.append(at_least(name, ratio, 0.6, "x", _describe(found["typed"])))


def measure_transforms(bench: Bench) -> None:
    """What transforms cost on the way to a file."""
    found = run_contenders(bench.url(), bench.backlog(), through_transforms(), bench.scale.rounds, bench.say)
    bench.forget_backlog()
    base, simple, where = found["spark"], found["transforms"], found["where"]
    kept, asked = (base.median("took_s") / one.median("took_s") for one in (simple, where))
    name = "transforms: drop, rename, mask (hash, redact) and filter together, of the rate to a file without"
    bench.figures += [
        at_least(name, kept, 0.8, "x", f"{_describe(simple)}; without: {_describe(base)}"),
        Figure("transforms: with a condition in Spark SQL behind them", "", f"{asked:.2f}x", None, _describe(where)),
    ]


def measure_envelopes(bench: Bench) -> None:
    """What envelopes cost on the way to a file."""
    found = run_contenders(bench.url(), bench.backlog(), through_envelopes(), bench.scale.rounds, bench.say)
    bench.forget_backlog()
    base, debezium, cloudevents = found["spark"], found["debezium"], found["cloudevents"]
    kept, cloud = (base.median("took_s") / one.median("took_s") for one in (debezium, cloudevents))
    name = "envelopes: Debezium's, of the rate of the plain event to a file"
    bench.figures += [
        at_least(name, kept, 0.5, "x", f"{_describe(debezium)}; plain: {_describe(base)}"),
        Figure("envelopes: CloudEvents", "", f"{cloud:.2f}x", None, _describe(cloudevents)),
    ]


def measure_snapshot(bench: Bench) -> None:
    """Rows that are there already, through Spark."""
    rows = bench.scale.changes
    runs = measure_reading(bench.url(), rows, bench.scale.rounds)
    note = f"{rows / runs.took_s('ours') / 1e3:,.0f}k rows/s, {runs.cpu_s('ours') * 1e6 / rows:.2f} µs CPU a row"
    took = f"{runs.took_s('psql'):.2f} s"
    bench.figures += [
        Figure("table: psql COPY to /dev/null, the yardstick", "", took, None, f"{rows:,} rows, one connection"),
        at_least("table: to Arrow in two tasks", runs.took_s("psql") / runs.took_s("ours"), 0.65, "x", note),
    ]
    for key, target, bar in (("", "Arrow", 1.1), ("_parquet", "Parquet", 1.2)):
        name = f"table: to {target} in two tasks, of Spark's JDBC reader"
        if f"jdbc{key}" not in runs.found:
            bench.figures.append(skipped(name, f">= {bar:g}x", "no JDBC driver here (`make test-servers`)"))
            continue
        ours_s, jdbc_s = runs.took_s(f"ours{key}"), runs.took_s(f"jdbc{key}")
        ours_us, jdbc_us = (runs.cpu_s(f"{way}{key}") * 1e6 / rows for way in ("ours", "jdbc"))
        note = f"{ours_s:.2f} s against {jdbc_s:.2f} s, {ours_us:.2f} µs CPU a row against {jdbc_us:.2f} µs"
        bench.figures.append(at_least(name, jdbc_s / ours_s, bar, "x", note))


def measure_incremental(bench: Bench) -> None:
    """A snapshot of a table beside a stream that runs."""
    scale, url = bench.scale, bench.url()
    small, large = (
        measure_beside(url, rows, warm_s=scale.warm_s, seconds=scale.latency_s, rate_per_s=BESIDE_RATE_PER_S)
        for rows in sorted(scale.existing_rows)
    )
    before, during = percentiles(large.without_ms), percentiles(large.with_ms)
    note = (
        f"p50 {during[0]:.1f} ms against {before[0]:.1f} ms, p99 {during[2]:.0f} ms against {before[2]:.0f} ms at "
        f"{large.commits_per_s:.0f} commits/s; {large.rows / large.took_s / 1e3:,.0f}k rows/s"
    )
    name = f"incremental snapshot of {large.rows:,} rows: commit to the file, p50, of that without"
    bench.figures.append(at_most(name, during[0] / before[0], 2, "x", note, 2))
    bench.figures += _flat("incremental snapshot", small.rows, small.peaks_bytes, large.rows, large.peaks_bytes)


def measure_initial_snapshot(bench: Bench) -> None:
    """A snapshot before the stream begins."""
    small, large = (measure_initial(bench.url(), rows) for rows in sorted(bench.scale.existing_rows))
    rate = f"{large.rows / large.took_s / 1e3:,.0f}k rows/s"
    bench.figures.append(Figure("initial snapshot: through Spark to a file", "", rate, None, f"{large.rows:,} rows"))
    bench.figures += _flat("initial snapshot", small.rows, small.peaks_bytes, large.rows, large.peaks_bytes)


def _flat(what: str, few: int, small: dict[str, int], many: int, large: dict[str, int]) -> list[Figure]:
    """That memory does not grow with the table."""
    return [
        at_most(f"{what} of {many:,} rows: peak RSS of {title}, of that with {few:,}", large[role] / small[role], 1.2, "x",
            f"{large[role] / MB:,.0f} MB against {small[role] / MB:,.0f} MB", 2)
        for role, title in (("capture", "the capture"), ("Spark's Python workers", "a Spark worker"))
    ]  # fmt: skip


def measure_decoder(bench: Bench) -> None:
    """Rows per CPU second of the decoder alone."""
    found = sorted(measure_decoding(bench.url(), bench.scale.decoded_rows, 5))
    note = f"10 text columns; 5 rounds from {found[0] / 1e6:.2f}M to {found[-1] / 1e6:.2f}M"
    bench.figures.append(at_least("decoder alone, rows per CPU second", found[2] / 1e6, 1, "M", note))


def measure_cast(bench: Bench) -> None:
    """Rows of a segment into columns of Spark's types."""
    found = measure_casting(bench.url(), bench.scale.decoded_rows, 5)
    whole = sorted(found.whole_us)
    note = (
        f"10 columns of 10 types; 5 rounds from {whole[0]:.2f} to {whole[-1]:.2f} µs, {found.split_us:.2f} of it for taking "
        f"columns out of rows; in batches of {SMALL_ROWS} rows {found.small_us:.2f} µs"
    )
    bench.figures.append(at_most("cast to Spark's types, CPU a row", whole[2], 1, "µs", note, 2))


def measure_cli(bench: Bench) -> None:
    """How long the command line takes to say what it can do."""
    for name in ("--help", "version"):
        found = sorted(_cpu_s([sys.executable, "-m", "pgcdc", name]) for _ in range(5))
        note = f"5 rounds from {found[0]:.2f} to {found[-1]:.2f} s"
        bench.figures.append(at_most(f"pgcdc {name}, CPU", found[2], 0.4, "s", note, 2))


def _cpu_s(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure_tls(bench: Bench) -> None:
    """The capture over TLS, against pg_recvlogical without."""
    name = "backlog: capture to Arrow over TLS"
    reasons = []
    for version in (18, PEER_VERSION):
        try:
            url = bench.url(version)
            with tls_enabled(url):
                bench.figures.append(_measure_tls(bench, name, url, version))
                return
        except (ConfigError, Unavailable) as error:
            reasons.append(str(error))
    bench.figures.append(skipped(name, ">= 0.6x", "; ".join(reasons)))


def _measure_tls(bench: Bench, name: str, url: str, version: int) -> Figure:
    plain = our_contenders()[0]
    secure = Contender("arrow_tls", "capture to Arrow over TLS", lambda at, *rest: plain.run(with_tls(at), *rest))
    contenders = [recvlogical(), plain, secure]
    found = run_contenders(url, bench.backlog(version), contenders, bench.scale.rounds, bench.say)
    base = found["recvlogical"].median("took_s")
    without = f"without TLS {base / plain.median('took_s'):.2f}x"
    note = f"{_describe(secure)}; {without}; PostgreSQL {version}, {describe_tls(url)}"
    return at_least(name, base / secure.median("took_s"), 0.6, "x", note)


def measure_peers(bench: Bench) -> None:
    """Ours and others on one backlog."""
    try:
        find_binaries(PEER_VERSION)
        version = PEER_VERSION
    except ConfigError:
        version = 18
    contenders = [recvlogical(), *our_contenders(), *peer_contenders()]
    found = run_contenders(bench.url(version), bench.backlog(version), contenders, bench.scale.rounds, bench.say)
    bench.peers, bench.peer_server = found, f"PostgreSQL {version}"
    debezium, spark = found["debezium"], found["spark"]
    name = "backlog: through Spark to a file, of Debezium's rate"
    if not debezium.runs:
        bench.figures.append(skipped(name, ">= 2x", debezium.reason))
        return
    note = (
        f"{spark.median('rate') / 1e3:,.0f}k against {debezium.median('rate') / 1e3:,.0f}k changes/s, {debezium.note}"
    )
    bench.figures.append(at_least(name, spark.median("rate") / debezium.median("rate"), 2, "x", note))


def measure_large(bench: Bench) -> None:
    """Memory of the capture with one huge transaction."""
    peaks, notes = _run_large(bench, run_capture, lambda run: float(run["peak_rss_bytes"]))
    rows, peak = list(peaks.items())[-1]
    name = f"one transaction of {rows:,} rows: peak RSS of the capture"
    bench.figures += [
        at_most(name, peak / MB, 300, "MB", ", ".join(notes), 0),
        at_most(f"{name}, of that with {min(peaks):,}", peak / peaks[min(peaks)], 1.2, "x", "", 2),
    ]


def measure_large_spark(bench: Bench) -> None:
    """Memory of driver and workers with one huge transaction."""

    def outside_capture(run: dict[str, Any]) -> float:
        return float(sum(peak for role, peak in run["peaks_bytes"].items() if role != "capture"))

    peaks, notes = _run_large(bench, run_pipeline, outside_capture)
    rows, peak = list(peaks.items())[-1]
    name = f"one transaction of {rows:,} rows: driver and workers, of those with {min(peaks):,}"
    bench.figures.append(at_most(name, peak / peaks[min(peaks)], 1.2, "x", ", ".join(notes), 2))


def _run_large(
    bench: Bench, run: Callable[[str, str, int], dict[str, Any]], peak_of: Callable[[dict[str, Any]], float]
) -> tuple[dict[int, float], list[str]]:
    """Peak memory by size of the transaction, and what each run was like."""
    url = bench.url()
    peaks: dict[int, float] = {}
    notes = []
    for rows in sorted(bench.scale.large_rows):
        bench.say(f"making one transaction of {rows:,} rows")
        slot = prepare_large(url, rows)
        try:
            found = run(url, slot, rows)
        finally:
            drop_large(url, slot)
        peaks[rows] = peak_of(found)
        told = f"{rows:,} rows: {peaks[rows] / MB:,.0f} MB, {rows / found['took_s'] / 1e3:,.0f}k rows/s"
        by_role = found.get("peaks_bytes", {})
        bench.say(told + "".join(f", {role} {peak / MB:,.0f} MB" for role, peak in by_role.items()))
        notes.append(told)
    return peaks, notes


def measure_toast(bench: Bench) -> None:
    """What `--toast cache` costs the capture."""
    url, keys = bench.url(), bench.scale.toast_keys
    bench.say(f"making {2 * keys:,} changes of {keys:,} rows with values out of line")
    prepare_toast(url, keys)
    runs: dict[str, list[dict[str, Any]]] = {"mark": [], "cache": []}
    try:
        for number in range(bench.scale.rounds):
            for mode in ("mark", "cache") if number % 2 == 0 else ("cache", "mark"):
                found = run_toast(url, mode, keys, number)
                runs[mode].append(found)
                rate = f"{found['rows'] / found['took_s'] / 1e3:,.0f}k changes/s"
                used = f"{found['cpu_s'] * 1e6 / found['rows']:.1f} µs CPU a change"
                bench.say(f"round {number + 1}, --toast {mode}: {found['took_s']:.1f} s, {rate}, {used}")
    finally:
        drop_toast(url)
    took_s = {mode: float(np.median([one["took_s"] for one in found])) for mode, found in runs.items()}
    last = runs["cache"][-1]
    looked_up = last["toast_cache_hits"] + last["toast_cache_misses"]
    own, own_mark = (max(one["peak_anonymous_bytes"] for one in runs[mode]) / MB for mode in ("cache", "mark"))
    rates = f"{2 * keys / took_s['cache'] / 1e3:,.0f}k against {2 * keys / took_s['mark'] / 1e3:,.0f}k changes/s"
    hits = f"{last['toast_cache_hits'] / looked_up:.1%} of {looked_up:,} values found"
    held = f"{own_mark:,.0f} MB with mark; {last['peak_rss_bytes'] / MB:,.0f} MB with the pages of its file; "
    disk = f"{last['disk_bytes'] / MB:,.0f} MB on disk"
    name = f"TOAST cache of {keys:,} keys"
    bench.figures += [
        at_most(f"{name}: memory of the capture", own, 300, "MB", f"{held}{disk}", 0),
        at_least(f"{name}: rate, of that with mark", took_s["mark"] / took_s["cache"], 0.8, "x", f"{rates}; {hits}"),
    ]


def measure_listen_latency(bench: Bench) -> None:
    """Commit to the line in the file."""
    scale = bench.scale
    found = measure_latency(bench.url(), warm_s=scale.warm_s, seconds=scale.latency_s, rate_per_s=RATE_PER_S)
    p50, p95, p99 = percentiles(found)
    bench.latencies_ms = found
    note = f"{len(found):,} commits, p95 {p95:.1f} ms, longest {max(found):.0f} ms"
    bench.figures += [
        at_most("commit to the file, p50", p50, 100, "ms", note),
        at_most("commit to the file, p99", p99, 300, "ms"),
    ]


def measure_capture_latency(bench: Bench) -> None:
    """Commit to Arrow."""
    url = bench.url()
    amounts = (str(bench.scale.warm_s), str(bench.scale.latency_s))
    with connect(url) as conn:
        new_slot(conn, "bench_arrow")
        with Writer(url, ARROW_RATE_PER_S) as writer:
            began = time.monotonic()
            found = run_child("capture_child.py", "trickle", "bench_arrow", *amounts, url=url)["latencies_ms"]
            rate = writer.commits / (time.monotonic() - began)
        drop_slot(conn, "bench_arrow")
    p50, p95, p99 = percentiles(found)
    note = f"{len(found):,} commits at {rate:.0f}/s, p50 {p50:.2f} ms, p95 {p95:.2f} ms, longest {max(found):.1f} ms"
    bench.figures.append(at_most("commit to Arrow in the capture, p99", p99, 5, "ms", note, 2))


def measure_starts(bench: Bench) -> None:
    """Process start to first event."""
    found = sorted(measure_start(bench.url(), f"bench_start_{number}") for number in range(bench.scale.starts))
    note = f"median of {len(found)}: {', '.join(f'{one:.1f}' for one in found)}"
    middle = found[len(found) // 2]
    bench.figures.append(at_most("start of `pgcdc listen` to the first event", middle, 25, "s", note))


def measure_idle_cpu(bench: Bench) -> None:
    """What waiting costs."""
    found = measure_idle(bench.url(), settle_s=bench.scale.settle_s, seconds=bench.scale.idle_s)
    note = ", ".join(f"{name} {value:.1f}%" for name, value in sorted(found.items(), key=lambda item: -item[1]))
    bench.figures.append(at_most("idle with one adapter, of one core", sum(found.values()), 10, "%", note))


def measure_more_sinks(bench: Bench) -> None:
    """What five more sinks cost the first."""
    scale = bench.scale
    found = measure_sinks(
        bench.url(), warm_s=scale.warm_s, seconds=scale.latency_s, rate_per_s=RATE_PER_S, settle_s=scale.settle_s,
        idle_s=scale.idle_s,
    )  # fmt: skip
    (alone, idle), (together, busier) = found[0], found[MORE_SINKS]
    before, after = percentiles(alone), percentiles(together)
    note = f"p50 {after[0]:.1f} ms against {before[0]:.1f} ms, p99 {after[2]:.0f} ms against {before[2]:.0f} ms"
    name = f"{MORE_SINKS} more sinks (no-op)"
    bench.figures += [
        at_most(f"{name}: commit to the file, p50, of that without", after[0] / before[0], 1.5, "x", note, 2),
        at_most(f"{name}: more idle CPU, of one core", busier - idle, 5, "%", f"{busier:.1f}% against {idle:.1f}%"),
    ]


def measure_one_blocked(bench: Bench) -> None:
    """What the others notice of a sink that blocks."""
    scale = bench.scale
    found = measure_blocked(bench.url(), warm_s=scale.warm_s, rows=scale.changes // 5, rate_per_s=RATE_PER_S)
    p99 = percentiles(found.move_ms)[2] / 1e3
    note = f"{len(found.move_ms)} commits; it was out after {found.left_s:.1f} s; longest {max(found.move_ms):.0f} ms"
    rates = f"{found.rows / found.after_s / 1e3:,.0f}k against {found.rows / found.before_s / 1e3:,.0f}k rows/s"
    bench.figures += [
        at_most("one sink blocks: commit to the file during the move, p99", p99, 2, "s", note, 2),
        at_least(
            "one sink blocks: throughput afterwards, of that before", found.before_s / found.after_s, 0.9, "x", rates
        ),
    ]


def measure_hot_reload(bench: Bench) -> None:
    """Other transforms, again and again, under load."""
    found = measure_reloads(bench.url(), reloads=bench.scale.reloads, rate_per_s=RATE_PER_S)
    wrong = found.lost + found.repeated + found.halves
    note = (
        f"{found.rows:,} rows to two adapters at {RATE_PER_S:.0f} commits/s: {found.lost} lost, {found.repeated} repeated, "
        f"{found.halves} transformed by half; the longest reload took {found.longest_s:.1f} s"
    )
    bench.figures.append(at_most(f"{found.reloads} hot reloads under load: wrong events", wrong, 0, "", note))


def measure_webhooks(bench: Bench) -> None:
    """Events to a receiver in another process, one by one and in arrays."""
    for name, size, events, bar in (
        ("one event in a request", 1, bench.scale.posted, 2_000),
        (f"{BATCH_SIZE} events in a request", BATCH_SIZE, bench.scale.posted * 10, 15_000),
    ):
        rounds: list[Posted] = [measure_webhook(events, size) for _ in range(bench.scale.rounds)]
        wrong = sum(one.wrong for one in rounds)
        if wrong:
            raise AssertionError(f"webhook, {name}: {wrong} events are missing or have overtaken others of their key")
        found = sorted(rounds, key=lambda one: one.rate)[len(rounds) // 2]
        note = f"{WORKERS} at a time, signed; {found.cpu_us:.0f} µs CPU an event; each key in order"
        rate, passed = f"{found.rate:,.0f} events/s", found.rate >= bar
        bench.figures.append(Figure(f"webhook: {name}", f">= {bar:,} events/s", rate, passed, note))


def measure_demo(bench: Bench) -> None:
    """What the playground says about its own first event."""
    began = time.monotonic()
    command = [str(Path(sys.executable).parent / "pgcdc"), "playground", "--seconds", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    told = re.search(r"first event ([\d.]+) s after the start", done.stdout + done.stderr)
    name = "playground: first event on the screen"
    if done.returncode or told is None:
        took_s = time.monotonic() - began
        note = f"`pgcdc playground` ended with {done.returncode} after {took_s:.0f} s"
        bench.figures.append(Figure(name, "<= 30 s", "not told", None, note))
        return
    bench.figures.append(at_most(name, float(told.group(1)), 30, "s", "packages installed"))


def percentiles(values: list[float]) -> tuple[float, float, float]:
    """p50, p95 and p99."""
    p50, p95, p99 = (float(value) for value in np.percentile(values, [50, 95, 99]))
    return p50, p95, p99


def _describe(one: Contender) -> str:
    return f"{one.median('rate') / 1e3:,.0f}k changes/s, {cpu_us(one):.2f} µs CPU a change"


def cpu_us(one: Contender) -> float:
    """Microseconds of CPU for each change, of all its processes on the client's side."""
    return one.median("cpu_s") * 1e6 / one.median("changes")


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "size": measure_size,
    "backlog": measure_backlog,
    "typed": measure_typed,
    "transforms": measure_transforms,
    "envelopes": measure_envelopes,
    "snapshot": measure_snapshot,
    "initial": measure_initial_snapshot,
    "incremental": measure_incremental,
    "decode": measure_decoder,
    "cast": measure_cast,
    "cli": measure_cli,
    "latency": measure_listen_latency,
    "arrow": measure_capture_latency,
    "start": measure_starts,
    "idle": measure_idle_cpu,
    "sentinel": measure_sentinel,
    "sinks": measure_more_sinks,
    "blocked": measure_one_blocked,
    "reload": measure_hot_reload,
    "apply": measure_apply,
    "append": measure_append,
    "three": measure_three,
    "webhook": measure_webhooks,
    "verify": measure_verify,
    "verify-beside": measure_verify_beside,
    "key-change": measure_key_change,
    "tls": measure_tls,
    "peers": measure_peers,
    "large": measure_large,
    "large-spark": measure_large_spark,
    "toast": measure_toast,
    "demo": measure_demo,
}
