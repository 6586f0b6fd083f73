"""Sections about parts alone: the decoder, the cast to Spark's types, the command line."""

from __future__ import annotations

import resource
import subprocess
import sys

from bench import Bench
from cast import SMALL_ROWS, measure_casting
from decode import measure_decoding

__all__ = ["measure_cast", "measure_cli", "measure_decoder"]

ROUNDS = 5


def measure_decoder(bench: Bench) -> None:
    """Rows per CPU second of the decoder alone."""
    found = sorted(measure_decoding(bench.url(), bench.scale.decoded_rows, ROUNDS))
    middle = found[ROUNDS // 2]
    note = f"10 text columns; {ROUNDS} rounds from {found[0] / 1e6:.2f}M to {found[-1] / 1e6:.2f}M"
    bench.add("decode.rate", middle / 1e6, note)
    bench.add("decode.parse", 1e6 / middle)


def measure_cast(bench: Bench) -> None:
    """Rows of a segment into columns of Spark's types."""
    found = measure_casting(bench.url(), bench.scale.decoded_rows, ROUNDS)
    whole = sorted(found.whole_us)
    note = (
        f"10 columns of 10 types; {ROUNDS} rounds from {whole[0]:.2f} to {whole[-1]:.2f} µs, {found.split_us:.2f} of it for "
        f"taking columns out of rows; in batches of {SMALL_ROWS} rows {found.small_us:.2f} µs"
    )
    bench.add("cast.row", whole[ROUNDS // 2], note)
    bench.add("cast.batch", found.batch_us, "all ten columns, from the server's text")


def measure_cli(bench: Bench) -> None:
    """How long the command line takes to say what it can do."""
    for key, name in (("cli.help", "--help"), ("cli.version", "version")):
        found = sorted(_cpu_s([sys.executable, "-m", "pgcdc", name]) for _ in range(ROUNDS))
        bench.add(key, found[ROUNDS // 2], f"{ROUNDS} rounds from {found[0]:.2f} to {found[-1]:.2f} s")


def _cpu_s(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
