"""Sections about adapters under way: one that blocks, hot reloads, and webhooks."""

from __future__ import annotations

from bench import RATE_PER_S, Bench, percentiles
from fanout import measure_blocked
from reloads import measure_reloads
from webhook import BATCH_SIZE, WORKERS, Posted, measure_webhook

__all__ = ["measure_hot_reload", "measure_one_blocked", "measure_webhooks"]


def measure_one_blocked(bench: Bench) -> None:
    """What the others notice of a sink that blocks."""
    scale = bench.scale
    found = measure_blocked(bench.url(), warm_s=scale.warm_s, rows=scale.changes // 5, rate_per_s=RATE_PER_S)
    note = f"{len(found.move_ms)} commits; it was out after {found.left_s:.1f} s; longest {max(found.move_ms):.0f} ms"
    rates = f"{found.rows / found.after_s / 1e3:,.0f}k against {found.rows / found.before_s / 1e3:,.0f}k rows/s"
    bench.add("blocked.p99", percentiles(found.move_ms)[2] / 1e3, note)
    bench.add("blocked.rate", found.before_s / found.after_s, rates)


def measure_hot_reload(bench: Bench) -> None:
    """Other transforms, again and again, under load."""
    found = measure_reloads(bench.url(), reloads=bench.scale.reloads, rate_per_s=RATE_PER_S)
    note = (
        f"{found.reloads} reloads, {found.rows:,} rows to two adapters at {RATE_PER_S:.0f} commits/s: {found.lost} lost, "
        f"{found.repeated} repeated, {found.halves} by half; the longest reload took {found.longest_s:.1f} s"
    )
    bench.add("reload.wrong", found.lost + found.repeated + found.halves, note)


def measure_webhooks(bench: Bench) -> None:
    """Events to a receiver in another process, one by one and in arrays."""
    for key, size, events in (
        ("webhook.single", 1, bench.scale.posted),
        ("webhook.batch", BATCH_SIZE, bench.scale.posted * 10),
    ):
        rounds: list[Posted] = [measure_webhook(events, size) for _ in range(bench.scale.rounds)]
        wrong = sum(one.wrong for one in rounds)
        if wrong:
            raise AssertionError(f"{key}: {wrong} events are missing or have overtaken others of their key")
        found = sorted(rounds, key=lambda one: one.rate)[len(rounds) // 2]
        note = f"{WORKERS} at a time, signed; {found.cpu_us:.0f} µs CPU an event; each key in order"
        bench.add(key, found.rate, note)
