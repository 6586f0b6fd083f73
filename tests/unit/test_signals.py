"""Signals that end the process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from pgcdc.core.signals import on_end_signals
from pgcdc.spark import session


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_child_that_would_start_spark_is_ended_before_it_does() -> None:
    before = {process.pid for process in session._children()}
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pause()
        os._exit(0)
    session._end_launched(before)
    assert not psutil.pid_exists(child)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_forked_child_leaves_the_signal_to_its_parent(number: signal.Signals) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    on_end_signals(interrupt)
    child = os.fork()
    if not child:
        try:
            os.kill(os.getpid(), number)
            os._exit(0)
        except KeyboardInterrupt:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
