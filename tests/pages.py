"""Plays a page of the documentation: writes its files, runs its commands and statements, and compares what they print.

Blocks are played in their order, in one folder:

- `sh` runs in bash and must succeed; exported variables stay. `sql` runs at the source.
- `yaml`, `python`, `toml` and `text` with a `title="..."` are files.
- `text` and `json` without a title are output: each line must be in what the block before has printed, `…` is anything.

A comment before a block, `<!-- run: ... -->`, changes that; readers do not see it:

- `until TEXT` leaves the command running once it has printed this; a lone `stop` is Ctrl-C for the last such command,
  and a block of `kill` ends it with what it has started;
- `soon` repeats the command until the output fits, `exit N` expects this exit code;
- `instead COMMAND` runs this command, `not REASON` nothing;
- `at target` and `as superuser` say where a statement runs, which is else the source, as the owner of its tables.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psycopg
from listening import wait_until

_MARK = re.compile(r"<!-- run: (.*) -->")
_FENCE = re.compile(r"( *)```(\w*)(?: title=\"([^\"]+)\")?$")
_FILES, _OUTPUT = ("yaml", "python", "toml", "text"), ("text", "json")
_SOURCE = Path(__file__).parents[1] / "src"
_START_S, _SOON_S, _STOP_S = 120.0, 30.0, 30.0


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, or a lone `stop` (without a kind)."""

    line: int
    kind: str
    title: str
    mark: str
    text: str


def read_blocks(page: Path) -> list[Block]:
    """The blocks of a page, in their order."""
    blocks: list[Block] = []
    lines = page.read_text().splitlines()
    number, mark = 0, ""
    while number < len(lines):
        line = lines[number]
        if found := _MARK.fullmatch(line.strip()):
            mark = found[1]
            if mark == "stop":
                blocks.append(Block(number + 1, "", "", mark, ""))
                mark = ""
        elif found := _FENCE.fullmatch(line):
            end = next(at for at in range(number + 1, len(lines)) if lines[at].strip() == "```")
            body = [one.removeprefix(found[1]) for one in lines[number + 1 : end]]
            blocks.append(Block(number + 1, found[2], found[3] or "", mark, "\n".join(body) + "\n"))
            number, mark = end, ""
        number += 1
    return blocks


class Story:
    """Pages that are played one after the other in one folder, with the same servers and what runs already."""

    def __init__(
        self, folder: Path, values: Mapping[str, str], urls: Mapping[str, str], env: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self._values = values
        """Addresses on the pages, and those of the servers here."""
        self._urls = urls
        """`source`, `target` and `superuser`, for statements."""
        binaries = str(Path(sys.executable).parent)
        python_path = f"{_SOURCE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        paths = {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": python_path}
        self.env = {**os.environ, **paths, **env}
        self._running: list[tuple[subprocess.Popen[bytes], Path]] = []
        self._said, self._repeat = "", None

    _repeat: Callable[[], str] | None
    """Runs the last block again, if it may be repeated."""

    def play(self, page: Path) -> None:
        for block in read_blocks(page):
            try:
                self._play(block)
            except Exception as error:
                logs = "\n".join(log.read_text()[-3000:] for _, log in self._running)
                raise AssertionError(f"{page}:{block.line}: {error}\n{block.text}\nrunning:\n{logs}") from error

    def end(self) -> None:
        while self._running:
            self._stop()

    def _play(self, block: Block) -> None:
        word, _, rest = block.mark.partition(" ")
        if word == "not":
            return
        text = self._fill(rest if word == "instead" else block.text)
        if block.mark == "stop":
            self._said = self._stop()
        elif block.title:
            assert block.kind in _FILES, f"a file cannot be {block.kind}"
            path = self.folder / block.title
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        elif block.kind in _OUTPUT:
            self._compare(text)
        elif block.kind == "sql":
            url = self._urls[rest or "source"]
            with psycopg.connect(url, autocommit=True) as conn:
                for statement in text.split(";\n"):
                    conn.execute(statement.encode())
        elif block.mark == "kill":
            self._said = self._stop(signal.SIGTERM)
        elif block.kind == "sh" and word == "until":
            self._start(text, rest)
        elif block.kind == "sh":
            code = int(rest) if word == "exit" else 0
            self._repeat = partial(self._run, text, code) if word == "soon" else None
            if self._repeat is None:
                self._said = self._run(text, code)
            else:
                self._compare("")
        else:
            raise AssertionError(f"nobody knows how to play {block.kind or 'a block without a language'}")

    def _fill(self, text: str) -> str:
        for on_page, here in self._values.items():
            text = text.replace(on_page, here)
        return text

    def _run(self, script: str, code: int) -> str:
        """What it has printed."""
        kept = self.folder / ".env"
        script = f"set -euo pipefail\ntrap 'env -0 > {shlex.quote(str(kept))}' EXIT\n{script}"
        done = subprocess.run(
            ["bash", "-c", script], cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_START_S, check=False,
        )  # fmt: skip
        pairs = (entry.partition("=") for entry in kept.read_text().split("\0") if entry)
        self.env = {name: value for name, _, value in pairs if name not in ("_", "SHLVL")}
        assert done.returncode == code, f"exit code {done.returncode}, not {code}:\n{done.stdout}"
        return done.stdout

    def _start(self, script: str, awaited: str) -> None:
        log = self.folder / f".log-{time.monotonic_ns()}"
        with open(log, "wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"{script}\nwait"], cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL,
                stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        self._running.append((process, log))

        def is_there() -> bool:
            assert process.poll() is None or awaited in log.read_text(), f"it ended: {log.read_text()}"
            return awaited in log.read_text()

        wait_until(is_there, _START_S, lambda: f"{awaited!r} in {log.read_text()}")
        self._said, self._repeat = "", log.read_text

    def _stop(self, how: signal.Signals = signal.SIGINT) -> str:
        process, log = self._running.pop()
        if process.poll() is None:
            os.killpg(process.pid, how)
        try:
            process.wait(_STOP_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # what a shell has left in the background ignores Ctrl-C
                os.killpg(process.pid, signal.SIGKILL)
        self._repeat = None
        return log.read_text()

    def _compare(self, expected: str) -> None:
        if self._repeat is None:
            missing = missing_lines(expected, self._said)
            assert not missing, f"printed\n{self._said}\nwithout\n{missing}"
            return
        repeat = self._repeat

        def is_right() -> bool:
            try:
                return not missing_lines(expected, repeat())
            except AssertionError:
                return False

        wait_until(is_right, _SOON_S, lambda: f"printed\n{repeat()}")


def missing_lines(expected: str, printed: str) -> list[str]:
    """The expected lines that were not printed. How wide spaces are does not matter."""
    got = re.sub(r"[ \t]+", " ", printed)
    lines = [" ".join(line.split()) for line in expected.splitlines() if line.strip(" …")]
    return [line for line in lines if not re.search(re.escape(line).replace("…", r"[^\n]*"), got)]
