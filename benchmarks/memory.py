"""Sections about memory: one huge transaction, and the TOAST cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from bench import MB, Bench
from large import drop_large, prepare_large, run_capture, run_pipeline
from toast import drop_toast, prepare_toast, run_toast

__all__ = ["measure_large", "measure_large_spark", "measure_toast"]


def measure_large(bench: Bench) -> None:
    """Memory of the capture with one huge transaction."""
    peaks, note = _run_large(bench, run_capture, lambda run: float(run["peak_rss_bytes"]))
    bench.add("large.peak", peaks[-1] / MB, note)
    bench.add("large.growth", peaks[-1] / peaks[0])


def measure_large_spark(bench: Bench) -> None:
    """Memory of driver and workers with one huge transaction."""

    def outside_capture(run: dict[str, Any]) -> float:
        return float(sum(peak for role, peak in run["peaks_bytes"].items() if role != "capture"))

    peaks, note = _run_large(bench, run_pipeline, outside_capture)
    bench.add("large-spark.growth", peaks[-1] / peaks[0], note)


def _run_large(
    bench: Bench, run: Callable[[str, str, int], dict[str, Any]], peak_of: Callable[[dict[str, Any]], float]
) -> tuple[list[float], str]:
    """Peak memory of each size of the transaction, the smallest first, and what each run was like."""
    url = bench.url()
    peaks, notes = [], []
    for rows in sorted(bench.scale.large_rows):
        bench.say(f"making one transaction of {rows:,} rows")
        slot = prepare_large(url, rows)
        try:
            found = run(url, slot, rows)
        finally:
            drop_large(url, slot)
        peaks.append(peak_of(found))
        notes.append(f"{rows:,} rows: {peaks[-1] / MB:,.0f} MB, {rows / found['took_s'] / 1e3:,.0f}k rows/s")
        by_role = found.get("peaks_bytes", {})
        bench.say(notes[-1] + "".join(f", {role} {peak / MB:,.0f} MB" for role, peak in by_role.items()))
    return peaks, ", ".join(notes)


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
    bench.add("toast.memory", own, f"{held}{last['disk_bytes'] / MB:,.0f} MB on disk")
    bench.add("toast.rate", took_s["mark"] / took_s["cache"], f"{rates}; {hits}")
