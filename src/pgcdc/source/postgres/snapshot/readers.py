"""The processes that read chunks for the capture, so that the stream never waits for a table, nor one chunk for another.

A process gets one order at a time through a pipe and answers through another, both pickled: with what was read, or with
the error. It ends with the capture. One that dies counts as a lost connection: its order is given again.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from pgcdc.core.errors import ConnectionLost
from pgcdc.core.failpoint import hit
from pgcdc.source.postgres.snapshot.held import keep_files
from pgcdc.source.postgres.snapshot.reader import Answer, Order, Reader

__all__ = ["Readers"]

PARENT_POLL_S = 1.0


@dataclass(slots=True)
class _Worker:
    pid: int
    orders: IO[bytes]
    answers: IO[bytes]
    order: Order | None = None


class Readers:
    """The processes, as the capture has them; they are started when they are needed. `fileno` becomes readable when `take`
    has something."""

    def __init__(self, url: str, publications: Sequence[str], application_name: str, count: int = 1) -> None:
        self._setup = (url, tuple(publications), application_name)
        self._count = count
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()

    @property
    def is_busy(self) -> bool:
        """Whether something is being read."""
        return any(one.order is not None for one in self._workers)

    @property
    def is_free(self) -> bool:
        """Whether one more order can be given."""
        return sum(one.order is not None for one in self._workers) < self._count

    def fileno(self) -> int:
        """For a selector."""
        return self._selector.fileno()

    def start(self, order: Order) -> None:
        """Read this, by a process that is free."""
        worker = next((one for one in self._workers if one.order is None), None) or self._new_worker()
        worker.order = order
        with contextlib.suppress(OSError):  # it is dead, which `take` will tell
            _send(worker.orders, order)

    def take(self) -> tuple[Order, Answer] | None:
        """What became of an order; None if none is done."""
        for key, _ in self._selector.select(0):
            worker: _Worker = key.data
            order, worker.order = worker.order, None
            try:
                answer: Answer = pickle.load(worker.answers)
            except (EOFError, OSError, pickle.UnpicklingError):
                self._end(worker)
                answer = ConnectionLost("a process that reads tables has ended")
            if order is not None:
                return order, answer
        return None

    def close(self) -> None:
        """End the processes; what is being read is given up."""
        for worker in list(self._workers):
            self._end(worker)

    def _new_worker(self) -> _Worker:
        """By a fork: everything is imported. What the objects of the capture hold belongs to the capture."""
        orders, to_worker = os.pipe()
        from_worker, answers = os.pipe()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                keep_files(orders, answers)
                _serve(Reader(*self._setup), parent, os.fdopen(orders, "rb"), os.fdopen(answers, "wb"))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)  # nothing is cleaned up
        os.close(orders)
        os.close(answers)
        worker = _Worker(pid, os.fdopen(to_worker, "wb"), os.fdopen(from_worker, "rb"))
        self._workers.append(worker)
        self._selector.register(worker.answers, selectors.EVENT_READ, worker)
        return worker

    def _end(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.answers)
        os.kill(worker.pid, signal.SIGKILL)
        os.waitpid(worker.pid, 0)
        for pipe in (worker.orders, worker.answers):
            with contextlib.suppress(OSError):
                pipe.close()


def _send(pipe: IO[bytes], content: object) -> None:
    pickle.dump(content, pipe, pickle.HIGHEST_PROTOCOL)
    pipe.flush()


def _serve(reader: Reader, parent: int, orders: IO[bytes], answers: IO[bytes]) -> None:
    """In the process: read what is ordered, one after the other, until nobody orders any more."""
    threading.Thread(target=_end_with, args=[parent], daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            order: Order = pickle.load(orders)
            hit("reader.ordered")
            answer = reader.read(order)
            hit("reader.read")
            _send(answers, answer)


def _end_with(parent: int) -> None:
    """A read may wait for a lock for hours: that must not outlive whoever ordered it."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(0)
