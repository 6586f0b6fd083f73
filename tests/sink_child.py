"""A process that has nothing but sinks, to be killed in the middle of a write.

One process imports everything once, and forks for each story: a child that makes the sink as a pipeline does, in the
wrapper that all sinks have, and writes batches. The one that is killed is the child.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from targets.base import Target

from pgcdc.core import failpoint
from pgcdc.event.batch import Batch


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    was_killed: bool
    written: int
    """Batches whose write returned."""
    error: str


class Children:
    """The process that forks. A context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)

    def write(self, target: Target, batches: list[Batch], killed_at: str, letters: Path | None = None) -> Ended:
        """Open the sink of a target, write batches, and be killed at a failpoint (`name`, or `name@3`) of the last one.

        With a file for `letters`, refused events go there.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        spec = target.spec()
        request = {
            "type": spec.type, "name": spec.name, "options": dict(target.options()), "acks": str(target.acks),
            "stdout": target.stdout, "killed_at": killed_at, "letters": str(letters) if letters else "",
            "batches": [
                [str(one.start), str(one.end), one.events.column("line").num_chunks, one.events.column("line").to_pylist()]
                for one in batches
            ],
        }  # fmt: skip
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))


# --- in the child


def _run(request: dict[str, Any], report: int) -> None:
    from sink_targets import START

    from pgcdc.core.settings import make_options
    from pgcdc.sink.letters.stores import FileDeadLetters
    from pgcdc.sink.runner import Runner
    from pgcdc.sink.spec import ADAPTERS, AdapterSpec, DeliveryOptions, make_sink

    if request["stdout"]:
        os.dup2(os.open(request["stdout"], os.O_WRONLY | os.O_APPEND), 1)
    else:
        os.dup2(2, 1)
    kind = request["type"]
    options = make_options(ADAPTERS[kind], request["options"], kind)
    acks = Path(request["acks"])
    sink = make_sink(AdapterSpec(request["name"], kind, options))
    letters = FileDeadLetters(Path(request["letters"])) if request["letters"] else None
    delivery = Runner(sink, acks, request["name"], DeliveryOptions(max_retries=0, timeout=20.0), dead_letters=letters)
    delivery.open(START)
    *first, last = (_batch(raw) for raw in request["batches"])
    for one in first:
        delivery.write(one)
        os.write(report, b"w")
    name, _, number = request["killed_at"].partition("@")
    failpoint._POINTS = failpoint._parse(f"{name}=kill@{number or 1}")
    delivery.write(last)
    os.write(report, b"w")


def _batch(raw: list[Any]) -> Batch:
    import pyarrow as pa
    from targets.events import batch_of

    from pgcdc.core.position import Position

    start, end, chunks, lines = raw
    made = batch_of(Position.parse(start), Position.parse(end), lines)
    size = -(-len(lines) // (chunks or 1)) or 1
    parts = [made.events.slice(begin, size) for begin in range(0, len(lines), size)]
    return Batch(made.start, made.end, pa.concat_tables(parts) if parts else made.events)


def _fork(request: dict[str, Any]) -> Ended:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            _run(request, writing)
        except BaseException as error:
            os.write(writing, f" {type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        said = file.read()
    _, status = os.waitpid(pid, 0)
    written, _, failure = said.decode().partition(" ")
    return Ended(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, len(written), failure)


def main() -> None:
    import sink_targets  # noqa: F401 - once, for all children

    answers = os.fdopen(os.dup(1), "w")
    for text in sys.stdin:
        ended = _fork(json.loads(text))
        answers.write(json.dumps(ended.__dict__) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
