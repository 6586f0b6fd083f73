"""Sections that drain one backlog in several ways, taking turns."""

from __future__ import annotations

from backlog import (
    Contender,
    Unavailable,
    our_contenders,
    recvlogical,
    run_contenders,
    through_envelopes,
    through_transforms,
    typed,
)
from bench import MB, Bench, cpu_us, describe
from peers import peer_contenders
from tls import describe_tls, tls_enabled, with_tls

from pgcdc.core.errors import ConfigError
from pgcdc.playground.postgres import find_binaries

__all__ = [
    "measure_backlog",
    "measure_envelopes",
    "measure_peers",
    "measure_tls",
    "measure_transforms",
    "measure_typed",
]

PEER_VERSION = 15
"""Debian's (`make test-servers`) for what the embedded server lacks: TLS, test_decoding, wal2json."""


def _drain(bench: Bench, contenders: list[Contender]) -> dict[str, Contender]:
    found = run_contenders(bench.url(), bench.backlog(), contenders, bench.scale.rounds, bench.say)
    bench.forget_backlog()
    return found


def _speedup(one: Contender, base: Contender) -> float:
    return base.median("took_s") / one.median("took_s")


def measure_backlog(bench: Bench) -> None:
    """Three ways to drain one backlog."""
    found = _drain(bench, [recvlogical(), *our_contenders()])
    base, arrow, spark = found["recvlogical"], found["arrow"], found["spark"]
    roles = spark.runs[-1]["cpu_by_role_s"]
    by_role = ", ".join(f"{role} {used * 1e6 / bench.scale.changes:.1f}" for role, used in roles.items())
    rss = f"{spark.worst('capture_rss_bytes') / MB:.0f} MB at the end; open_capture alone: peak "
    cpu = f"{arrow.median('cpu_s'):.2f} s against {base.median('cpu_s'):.2f} s, user and system"
    bench.add(
        "backlog.recvlogical",
        base.median("rate") / 1e3,
        f"{base.median('took_s'):.2f} s, {cpu_us(base):.2f} µs CPU a change",
    )
    bench.add("backlog.arrow", _speedup(arrow, base), describe(arrow))
    bench.add("backlog.arrow-cpu", arrow.median("cpu_s") / base.median("cpu_s"), cpu)
    bench.add("backlog.spark", _speedup(spark, base), describe(spark))
    bench.add("backlog.spark-cpu", cpu_us(spark), f"the last round: {by_role}")
    bench.add("backlog.rate", spark.median("rate") / 1e3)
    bench.add(
        "backlog.capture-rss", spark.worst("capture_peak_rss_bytes") / MB,
        f"{rss}{arrow.worst('peak_rss_bytes') / MB:.0f} MB",
    )  # fmt: skip


def measure_typed(bench: Bench) -> None:
    """Typed rows of a table through Spark."""
    found = _drain(bench, [recvlogical(), typed()])
    bench.add("typed.rate", _speedup(found["typed"], found["recvlogical"]), describe(found["typed"]))


def measure_transforms(bench: Bench) -> None:
    """What transforms cost on the way to a file."""
    found = _drain(bench, through_transforms())
    base = found.pop("spark")
    for key, one in found.items():
        bench.add(f"transforms.{key}", _speedup(one, base), f"{describe(one)}; without: {describe(base)}")


def measure_envelopes(bench: Bench) -> None:
    """What envelopes cost on the way to a file."""
    found = _drain(bench, through_envelopes())
    base = found.pop("spark")
    for key, one in found.items():
        bench.add(f"envelopes.{key}", _speedup(one, base), f"{describe(one)}; plain: {describe(base)}")


def measure_tls(bench: Bench) -> None:
    """The capture over TLS, against pg_recvlogical without."""
    reasons = []
    for version in (18, PEER_VERSION):
        try:
            url = bench.url(version)
            with tls_enabled(url):
                _measure_tls(bench, url, version)
                return
        except (ConfigError, Unavailable) as error:
            reasons.append(str(error))
    bench.skip("tls.arrow", "; ".join(reasons))


def _measure_tls(bench: Bench, url: str, version: int) -> None:
    plain = our_contenders()[0]
    secure = Contender("arrow_tls", "capture to Arrow over TLS", lambda at, *rest: plain.run(with_tls(at), *rest))
    contenders = [recvlogical(), plain, secure]
    found = run_contenders(url, bench.backlog(version), contenders, bench.scale.rounds, bench.say)
    base = found["recvlogical"]
    note = f"{describe(secure)}; without TLS {_speedup(plain, base):.2f}x; PostgreSQL {version}, {describe_tls(url)}"
    bench.add("tls.arrow", _speedup(secure, base), note)


def measure_peers(bench: Bench) -> None:
    """Ours and others on one backlog, of pg_recvlogical's rate."""
    try:
        find_binaries(PEER_VERSION)
        version = PEER_VERSION
    except ConfigError:
        version = 18
    contenders = [recvlogical(), *our_contenders(), *peer_contenders()]
    found = run_contenders(bench.url(version), bench.backlog(version), contenders, bench.scale.rounds, bench.say)
    base = found["recvlogical"].median("rate")
    for key, one in found.items():
        if not one.runs:
            bench.skip(f"peers.{key}", one.reason)
            continue
        part = min(run["changes"] for run in one.runs)
        notes = [describe(one), f"peak RSS {one.worst('peak_rss_bytes') / MB:,.0f} MB", one.note]
        notes.append(f"gave up after {part:,} changes" if part < bench.scale.changes else "")
        bench.add(f"peers.{key}", one.median("rate") / base, ", ".join(filter(None, notes)))
    debezium, spark = found["debezium"], found["spark"]
    if not debezium.runs:
        bench.skip("peers.of-debezium", debezium.reason)
        return
    rates = f"{spark.median('rate') / 1e3:,.0f}k against {debezium.median('rate') / 1e3:,.0f}k changes/s"
    note = f"{rates}, {debezium.note}, on PostgreSQL {version}"
    bench.add("peers.of-debezium", spark.median("rate") / debezium.median("rate"), note)
