"""`make bench`: the bars of the project, measured in one run.

    python benchmarks/run.py                               everything; writes docs/benchmarks.json and the page made from it
    python benchmarks/run.py --only backlog,peers          some sections, with the figures of the page beside; writes nothing
    python benchmarks/run.py --write --only backlog,peers  the same, and replaces the figures of these sections
    python benchmarks/run.py --small                       a smaller workload to try the benchmark itself; writes nothing
    python benchmarks/run.py --page                        only makes the page again
    python benchmarks/run.py --list                        the sections

A missed bar, a peer that is not here and a section that fails are reported. Exit code 1: a section failed, or a fast path
is not in use.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from dataclasses import replace
from functools import partial

from bars import BARS
from bench import SMALL, Bench, Scale, describe_machine, prepare
from figures import Run, load, save, update
from report import print_table, write_page
from rich.console import Console
from sections import SECTIONS


def main() -> int:
    """Measure, print, and keep the figures if the workload was the full one."""
    arguments = _parse()
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    data = load()
    if arguments.list:
        for name, section in SECTIONS.items():
            console.print(f"{name:13} {section.__doc__}")
        return 0
    if arguments.page:
        write_page(data)
        return 0
    prepare()
    wanted = {"changes": arguments.changes, "rounds": arguments.rounds, "large_rows": arguments.large}
    changed = {name: value for name, value in wanted.items() if value is not None}
    scale = replace(SMALL if arguments.small else Scale(), **changed)
    machine = describe_machine()
    with Bench(scale, partial(console.print, markup=False)) as bench:
        failed = _measure(bench, arguments.only or list(SECTIONS), console)
        print_table(
            bench.figures, data["figures"], ", ".join(f"{name} {value}" for name, value in machine.items()), console
        )
    if failed:
        console.print(f"[bold red]Failed: {', '.join(failed)}[/]")
    if arguments.small or changed or (arguments.only and not arguments.write):
        console.print(
            "docs/benchmarks.json is left as it is" + ("." if arguments.small or changed else ": no --write.")
        )
    else:
        flags = f'"--write --only {",".join(arguments.only)}"' if arguments.only else ""
        run = Run.now(f"make bench ARGS={flags}" if flags else "make bench")
        data |= {"figures": update(data["figures"], bench.figures, run), "machine": machine}
        save(data)
        write_page(data)
        console.print("docs/benchmarks.json and the page are written.")
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure pgcdc against its bars.")
    parser.add_argument("--small", action="store_true", help="a smaller workload, to try the benchmark; writes nothing")
    parser.add_argument(
        "--write", action="store_true", help="keep the figures, even if only some sections were measured"
    )
    parser.add_argument("--only", type=_names, metavar="A,B", help="some sections (see --list)")
    parser.add_argument("--list", action="store_true", help="show the sections")
    parser.add_argument(
        "--page", action="store_true", help="make the page from the figures that are kept; measure nothing"
    )
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


def _measure(bench: Bench, chosen: list[str], console: Console) -> list[str]:
    """The sections that failed; the others are measured all the same."""
    failed = []
    for number, name in enumerate(chosen, 1):
        began, known = time.monotonic(), len(bench.figures)
        console.print(f"[bold]{number} of {len(chosen)}: {name}[/]")
        try:
            # Drawn seldom: the machine is busy with being measured.
            with console.status(f"{name}: {SECTIONS[name].__doc__}", refresh_per_second=2):
                SECTIONS[name](bench)
            forgotten = {key for key in BARS if key.startswith(f"{name}.")} - {one.key for one in bench.figures[known:]}
            if forgotten:
                raise AssertionError(f"not measured: {', '.join(sorted(forgotten))}")
        except Exception:
            failed.append(name)
            console.print(traceback.format_exc(), style="red", markup=False)
        console.print(f"{name} took {time.monotonic() - began:.0f} s")
    return failed


if __name__ == "__main__":
    sys.exit(main())
