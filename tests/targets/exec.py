"""A command that keeps its events in a file, for each way to acknowledge them."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import shlex
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from pgcdc.core.position import Position
from targets.base import BaseTarget
from targets.events import event, to_line

__all__ = ["ExecByExit", "ExecByLine", "ExecByWrite"]

_REFUSED = "this one is refused"
_BY_EXIT = """\
test -e {out}.broken && exit 1
cat > {out}.new
if grep -q {refused} {out}.new && ! test -e {out}.accepts; then exit 65; fi
cat {out}.new >> {out}
"""
_BY_LINE = """\
import os, sys
out, refused = sys.argv[1], sys.argv[2].encode()
if os.path.exists(out + ".broken"):
    sys.exit(1)
with open(out, "ab") as file:
    for line in sys.stdin.buffer:
        if os.path.exists(out + ".limit") and len(open(out).readlines()) >= int(open(out + ".limit").read()):
            sys.exit(1)
        if os.path.exists(out + ".broken"):
            sys.exit(1)
        if refused in line and not os.path.exists(out + ".accepts"):
            sys.exit(65)
        file.write(line)
        file.flush()
        print("done", flush=True)
"""


class _ExecTarget(BaseTarget):
    type, repeats, before_ack, can_break, large = "exec", True, "sink.before_ack", True, 4_000
    kill_points = ("exec.half_sent", "sink.before_ack")

    def __init__(self, folder: Path) -> None:
        self.acks, self.out = folder / "acks", folder / "out"
        self.acks.mkdir()

    def lines(self) -> list[str]:
        return self.out.read_text().splitlines(keepends=True) if self.out.exists() else []

    def break_target(self) -> None:
        self.out.with_name("out.broken").touch()

    def heal_target(self) -> None:
        self.out.with_name("out.broken").unlink()

    def wrong_options(self) -> Sequence[tuple[Mapping[str, Any], str]]:
        return [
            ({}, "command or argv"),
            ({"command": "cat", "argv": ["cat"]}, "command and argv cannot be combined"),
            ({"command": "  "}, "command or argv"),
            ({"argv": "'"}, "not a list of words"),
            ({"argv": [""]}, "is empty"),
            ({"command": "cat", "ack": "maybe"}, "ack"),
            ({"argv": ["/does/not/exist"]}, "/does/not/exist does not exist"),
            ({"argv": [str(self.acks)]}, "does not exist or is not executable"),
            ({"command": "does-not-exist-at-all --now"}, "does-not-exist-at-all does not exist"),
            ({"command": "cat 'x"}, "the shell cannot parse the command"),
        ]


class _Refusing(_ExecTarget):
    def bad_line(self, position: Position) -> str | None:
        return to_line(event(position, text=_REFUSED))

    def accept_bad(self) -> None:
        self.out.with_name("out.accepts").touch()


class ExecByExit(_Refusing):
    """One process for each batch."""

    def options(self) -> Mapping[str, Any]:
        return {"command": _BY_EXIT.format(out=shlex.quote(str(self.out)), refused=shlex.quote(_REFUSED))}


class ExecByLine(_Refusing):
    """One process, which says of each event that it is done."""

    is_reference = True

    def options(self) -> Mapping[str, Any]:
        return {"argv": [sys.executable, "-I", "-S", "-c", _BY_LINE, str(self.out), _REFUSED], "ack": "line"}

    def break_after(self, events: int) -> None:
        self.out.with_name("out.limit").write_text(str(events))

    def heal_target(self) -> None:
        for name in ("out.limit", "out.broken"):
            self.out.with_name(name).unlink(missing_ok=True)


class ExecByWrite(_ExecTarget):
    """One process, which says nothing."""

    def options(self) -> Mapping[str, Any]:
        out = shlex.quote(str(self.out))
        return {"command": f"test -e {out}.broken && exit 1; exec cat >> {out}", "ack": "write"}

    def lines(self) -> list[str]:
        while not all(map(_is_idle, self._commands())):
            pass
        return super().lines()

    def break_target(self) -> None:
        super().break_target()
        for command in self._commands():  # it does not look at the file again
            command.kill()
            while command.is_running() and command.status() != psutil.STATUS_ZOMBIE:
                pass

    def _commands(self) -> list[psutil.Process]:
        """Those of this target that run."""
        found = []
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error, OSError):
                words = " ".join(process.cmdline())
                if str(self.out) in words or os.readlink(f"/proc/{process.pid}/fd/1") == str(self.out):
                    found.append(process)
        return found


def _is_idle(process: psutil.Process) -> bool:
    """Whether a command has read all its input and waits for more."""
    try:
        with open(f"/proc/{process.pid}/fd/0", "rb", buffering=0) as pipe:
            waiting = array.array("i", [0])
            fcntl.ioctl(pipe, termios.FIONREAD, waiting)
        return process.name() == "cat" and not waiting[0] and process.status() == psutil.STATUS_SLEEPING
    except (psutil.NoSuchProcess, OSError):
        return True


TARGETS = {"exec_by_exit": ExecByExit, "exec_by_line": ExecByLine, "exec_by_write": ExecByWrite}
