"""`pgcdc ...` as a process of its own, without the second that Python needs to import everything.

A server per test process has the command's modules imported, and forks for each command: the same program in a process
that ends, with its own environment, folder, standard output and error. For commands that are over soon: a pipeline that is
watched, killed or has failpoints in Spark's processes starts as users start it (`listening.Listener`).
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TIMEOUT_S = 120.0


class CommandServer:
    """Forks commands. `end` it before the test process ends."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        ours.settimeout(_TIMEOUT_S)
        self._socket, self._answers = ours, ours.makefile("rb")

    def run(self, arguments: tuple[str, ...], env: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as scratch:
            out, err = Path(scratch) / "out", Path(scratch) / "err"
            request = {
                "arguments": arguments,
                "env": dict(env),
                "folder": str(folder),
                "out": str(out),
                "err": str(err),
            }
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            answer = self._answers.readline()
            if not answer:
                raise AssertionError(f"the server of commands ended while it ran {arguments}")
            return subprocess.CompletedProcess(arguments, json.loads(answer), out.read_text(), err.read_text())

    def end(self) -> None:
        self._answers.close()
        self._socket.close()
        self._process.wait(30)


_SERVER: CommandServer | None = None


def pgcdc(
    *arguments: str, env: Mapping[str, str] | None = None, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in the folder (else in ours), with these variables besides ours."""
    global _SERVER
    if _SERVER is None:
        _SERVER = CommandServer()
    return _SERVER.run(arguments, {**os.environ, **(env or {})}, folder or Path.cwd())


def end_server() -> None:
    global _SERVER
    if _SERVER is not None:
        _SERVER.end()
        _SERVER = None


def _serve(connection: socket.socket) -> None:
    import pgcdc.cli.config
    import pgcdc.cli.dlq
    import pgcdc.cli.listen
    import pgcdc.cli.main
    import pgcdc.cli.snapshot
    import pgcdc.cli.source
    import pgcdc.cli.status
    import pgcdc.run.pipeline
    import pgcdc.spark.session
    from pgcdc.cli.flags import _make_params
    from pgcdc.core import failpoint

    _make_params()
    gc.freeze()  # what is shared stays shared: a collection in a fork would touch all of it
    for line in connection.makefile("rb"):
        request: dict[str, Any] = json.loads(line)
        pid = os.fork()
        if pid == 0:
            connection.close()
            os.environ.clear()
            os.environ.update(request["env"])
            os.chdir(request["folder"])
            for stream, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), stream)
            failpoint._POINTS = failpoint._parse(os.environ.get("PGCDC_FAILPOINTS", ""))
            sys.argv = ["pgcdc", *request["arguments"]]
            pgcdc.cli.main.main()  # its SystemExit ends the loop, and this process as it ends any
        _, status = os.waitpid(pid, 0)
        connection.sendall(json.dumps(os.waitstatus_to_exitcode(status)).encode() + b"\n")


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
