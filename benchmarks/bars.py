"""The one table of figures: what is measured, by section, and its bar. A key is `section.figure` and never changes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BARS", "Bar"]


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure's name and unit, and what it has to be; without a limit it is only reported."""

    name: str
    unit: str
    sign: str = ""
    limit: float = 0.0
    digits: int = 1

    @property
    def text(self) -> str:
        return f"{self.sign} {self.limit:,g}{self._unit}" if self.sign else ""

    def show(self, value: float) -> str:
        return f"{value:,.{self.digits}f}{self._unit}"

    def is_met(self, value: float) -> bool | None:
        """None: there is no limit."""
        return {"": None, "<=": value <= self.limit, ">=": value >= self.limit, "=": value == self.limit}[self.sign]

    @property
    def _unit(self) -> str:
        return self.unit if self.unit in ("", "x", "M") or self.unit.startswith("k ") else f" {self.unit}"


def most(name: str, limit: float, unit: str = "x", digits: int = 1) -> Bar:
    return Bar(name, unit, "<=", limit, 2 if unit == "x" else digits)


def least(name: str, limit: float, unit: str = "x", digits: int = 2) -> Bar:
    return Bar(name, unit, ">=", limit, digits)


def exactly(name: str, limit: float) -> Bar:
    return Bar(name, "", "=", limit, 0)


def told(name: str, unit: str, digits: int = 1) -> Bar:
    return Bar(name, unit, digits=2 if unit == "x" else digits)


BARS: dict[str, Bar] = {
    "latency.p50": most("commit to the file, p50", 50, "ms"),
    "latency.p99": most("commit to the file, p99", 120, "ms"),
    "latency.target": most("spec 003: commit to the file, p50", 20, "ms"),
    "sinks.p50": most("with six adapters: commit to the file, p50", 65, "ms"),
    "sinks.ratio": most("the same, of that with one", 1.5),
    "sinks.idle": most("five more adapters: idle CPU, of one core", 5, "%"),
    "sql.p50": most("with one SQL transform: commit to the file, p50", 70, "ms"),
    "busy.p50": told("beside a load that keeps one core busy: commit to the file, p50", "ms"),
    "busy.p99": told("the same, p99", "ms"),
    "arrow.p99": most("commit to Arrow in the capture, p99", 5, "ms", 2),
    "start.first": most("start of `pgcdc listen` to the first event, the first time (no class archive)", 14, "s"),
    "start.second": most("start of `pgcdc listen` to the first event, from the second time on", 10, "s"),
    "start.once": most("`pgcdc listen --once` with nothing to do", 9, "s"),
    "demo.first": most("`make demo`: first event on the screen", 13, "s"),
    "idle.cpu": most("idle with one adapter, of one core", 4, "%"),
    "idle.pss": most("memory with one adapter: sum of PSS", 750, "MB", 0),
    "idle.capture": most("spec 003: memory of a connector: PSS of the capture", 50, "MB", 0),
    "recovery.capture": most("spec 003: kill -9 of the capture to the next event in the file", 5, "s", 2),
    "recovery.confirm": most("spec 003: LSN commit: a confirmed position is the server's, p50", 1, "ms", 2),
    "backlog.recvlogical": told("anchor: `pg_recvlogical`", "k changes/s", 0),
    "backlog.arrow": least("capture to Arrow, of `pg_recvlogical`", 0.95),
    "backlog.arrow-cpu": most("the same: CPU, of `pg_recvlogical`'s", 1.5),
    "backlog.spark": least("through Spark to a file, of `pg_recvlogical`", 0.85),
    "backlog.spark-cpu": most("the same: CPU of all processes a change", 15, "µs", 2),
    "backlog.rate": least("spec 003: the same, changes a second", 50, "k changes/s", 0),
    "backlog.capture-rss": most("the same: peak RSS of the capture", 150, "MB", 0),
    "typed.rate": least("typed rows through Spark to a no-op sink, of `pg_recvlogical`", 0.6),
    "transforms.simple": least("drop, rename, mask (hash, redact) and filter together, of the rate without", 0.8),
    "transforms.where": least("a condition in SQL (`where`), of the rate without", 0.7),
    "transforms.both": told("the five transforms and the condition, of the rate without", "x"),
    "envelopes.debezium": least("Debezium's envelope, of the rate of the plain event", 0.6),
    "envelopes.cloudevents": told("CloudEvents, of the rate of the plain event", "x"),
    "apply.subscription": told("anchor: PostgreSQL's own subscription", "k changes/s", 0),
    "apply.rate": least("`pg_table` apply, of PostgreSQL's own subscription", 0.7),
    "apply.cpu": told("the same: CPU a change without the servers", "µs"),
    "append.rate": least("`pg_table` append, of COPY FROM of the same rows", 0.3),
    "three.rate": told("file, `pg_table` append and webhook on one slot: events together", "k events/s", 0),
    "three.cpu": told("the same: CPU an event, all our processes, no servers", "µs"),
    "webhook.single": least("webhook: one event in a request", 2_000, "events/s", 0),
    "webhook.batch": least("webhook: 100 events in a request", 15_000, "events/s", 0),
    "peers.recvlogical": told("anchor: `pg_recvlogical > /dev/null`", "x"),
    "peers.arrow": told("capture to Arrow", "x"),
    "peers.spark": told("through Spark to a file, all processes", "x"),
    "peers.debezium": told("anchor: Debezium engine, records dropped", "x"),
    "peers.debezium_json": told("anchor: Debezium engine, JSON to a file", "x"),
    "peers.wal2json": told("wal2json by `pg_recvlogical > /dev/null`", "x"),
    "peers.polling_1000": told("polling with `test_decoding`, 1,000 a look", "x"),
    "peers.polling_100000": told("polling with `test_decoding`, 100,000 a look", "x"),
    "peers.of-debezium": least("through Spark to a file, of Debezium's rate (records dropped)", 2),
    "tls.arrow": least("capture to Arrow over TLS, of `pg_recvlogical` without", 0.6),
    "snapshot.psql": told("anchor: `psql` COPY to /dev/null", "k rows/s", 0),
    "snapshot.arrow": least("a table to Arrow in two tasks, of `psql` COPY", 0.65),
    "snapshot.arrow-jdbc": least("the same, of Spark's JDBC reader", 1.1),
    "snapshot.parquet-jdbc": least("a table to Parquet in two tasks, of Spark's JDBC reader", 1.2),
    "initial.rate": least("spec 003: initial snapshot through Spark to a file", 100, "k rows/s", 0),
    "initial.capture-rss": most("the same: peak RSS of the capture, of that with a quarter of the rows", 1.2),
    "initial.worker-rss": most("the same: peak RSS of a Spark worker, of that with a quarter of the rows", 1.2),
    "incremental.latency": most("incremental snapshot: commit to the file beside it, p50, of that without", 2),
    "incremental.capture-rss": most("the same: peak RSS of the capture, of that with a quarter of the rows", 1.2),
    "incremental.worker-rss": most("the same: peak RSS of a Spark worker, of that with a quarter of the rows", 1.2),
    "toast.memory": most("TOAST cache of a million keys: memory of the capture", 300, "MB", 0),
    "toast.rate": least("the same: rate, of that with `mark`", 0.8),
    "large.peak": most("one transaction of ten million rows: peak RSS of the capture", 300, "MB", 0),
    "large.growth": most("the same, of that with a tenth of the rows", 1.2),
    "large-spark.growth": most("the same through Spark to a file: driver, JVM and workers", 1.2),
    "decode.rate": least("decoder alone, rows a CPU second", 1, "M"),
    "decode.parse": most("spec 003: parse one row", 5, "µs", 2),
    "cast.row": most("cast to Spark's types, CPU a row", 1, "µs", 2),
    "cast.batch": most("spec 003: 1,024 rows of ten types to Arrow columns", 10, "µs", 0),
    "cli.help": most("`pgcdc --help`, CPU", 0.4, "s", 2),
    "cli.version": most("`pgcdc version`, CPU", 0.4, "s", 2),
    "sentinel.command": most("`pgcdc sentinel --wait` at rest, the command", 0.5, "s", 2),
    "blocked.p99": most("one sink blocks: commit to the file during the move, p99", 2, "s", 2),
    "blocked.rate": least("the same: throughput afterwards, of that before", 0.9),
    "reload.wrong": exactly("hot reloads under load: events lost, repeated or transformed by half", 0),
    "verify.time": most("verify of equal rows, of one checksum on both servers", 3),
    "verify.found": exactly("verify: random differences found", 100),
    "verify.memory": told("verify: memory at its peak", "MB", 0),
    "verify-beside.alarms": exactly("verify beside traffic: false alarms in 20 runs", 0),
    "verify-beside.mirror": exactly("differences found in a mirror", 50),
    "verify-beside.one_file": exactly("differences found in a file", 50),
    "verify-beside.parts": exactly("differences found in a folder of files", 50),
    "verify-beside.cache": exactly("differences found in Redis", 50),
    "key-change.time": most("another key: mirror equal again, of the time of a fresh snapshot", 2),
    "size.code": most("code lines (no comments, docstrings, blanks)", 29_500, "lines", 0),
    "size.all": most("all lines", 40_000, "lines", 0),
    "size.modules": most("modules, without empty `__init__`", 180, "files", 0),
    "size.core": most("lines of `core`", 3_000, "lines", 0),
    "coverage.lines": least("spec 003: lines that tests run", 80, "%", 0),
}  # fmt: skip
