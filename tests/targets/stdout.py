"""Standard output that goes to a file, or that another process reads."""

from __future__ import annotations

import array
import fcntl
import os
import select
import termios
import threading
from pathlib import Path

from pgcdc.sink.stdout import StdoutSink
from targets.base import BaseTarget


class RedirectedStdout(BaseTarget):
    """Standard output that goes to a file: `pgcdc listen > events.jsonl`."""

    type, repeats, before_ack = "stdout", True, "sink.before_ack"
    is_reference = True

    def __init__(self, folder: Path) -> None:
        self.acks, self._path = folder, folder / "stdout"
        self.stdout = str(self._path)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def make(self) -> StdoutSink:
        return StdoutSink(self._descriptor)

    def lines(self) -> list[str]:
        return self._path.read_text().splitlines(keepends=True)

    def close(self) -> None:
        os.close(self._descriptor)


class PipedStdout(BaseTarget):
    """Standard output that another process reads: `pgcdc listen | jq`. A pipe holds 64 KB, so somebody must read."""

    type, repeats, before_ack = "stdout", True, "sink.before_ack"

    def __init__(self, folder: Path) -> None:
        self.acks = folder
        self._reading, self._writing = os.pipe()
        self.stdout = f"/proc/{os.getpid()}/fd/{self._writing}"
        self._data = b""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            select.select([self._reading], [], [])
            with self._lock:
                piece = os.read(self._reading, 1 << 16)
                self._data += piece
            if not piece:
                return

    def make(self) -> StdoutSink:
        return StdoutSink(self._writing)

    def lines(self) -> list[str]:
        while True:
            with self._lock:
                waiting = array.array("i", [0])
                fcntl.ioctl(self._reading, termios.FIONREAD, waiting)
                if not waiting[0]:
                    return self._data.decode().splitlines(keepends=True)

    def close(self) -> None:
        os.close(self._writing)
        self._thread.join(5)
        os.close(self._reading)


TARGETS = {"stdout_to_file": RedirectedStdout, "stdout_to_pipe": PipedStdout}
