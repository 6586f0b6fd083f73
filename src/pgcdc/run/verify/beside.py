"""`verify: {every: 6h}`: regular comparisons beside a running pipeline, in a separate process."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

from pgcdc.core.state import StateDir, open_log
from pgcdc.run.chains import Chains
from pgcdc.run.progress import Every
from pgcdc.run.settings import PipelineSettings
from pgcdc.run.verify.report import describe_last

_END_S = 5.0


class VerifyBeside:
    """Called in the pipeline's loop; never waits."""

    def __init__(self, config: PipelineSettings, state: StateDir, say: Callable[[str], None]) -> None:
        self._every_s = config.verify_every or config.verify.every
        self._config, self._state, self._say = config.part(PipelineSettings), state, say
        self._is_due = Every(self._every_s, self._every_s)
        self._child: subprocess.Popen[bytes] | None = None

    def follow(self, chains: Chains) -> None:
        """Start a comparison when it is due, and report what the last one found."""
        if not self._every_s:
            return
        if self._child is None:
            if self._is_due():
                self._start(chains)
        elif self._child.poll() is not None:
            self._tell(self._child.returncode)
            self._child = None

    def _start(self, chains: Chains) -> None:
        try:
            job = pickle.dumps((self._config, chains))
        except Exception as error:  # another author's function may raise anything
            self._say(f"verify cannot run beside this pipeline: {error}")
            self._every_s = 0.0
            return
        with open_log(self._state.path / "verify.log") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "pgcdc.run.verify"], stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(job)  # through stdin rather than arguments: it contains passwords
            self._child.stdin.close()

    def _tell(self, code: int) -> None:
        if code == 1:
            self._say(f"verify: {describe_last(self._state)}. See pgcdc verify")
        elif code not in (0, 3):
            self._say(f"verify failed: see {self._state.path / 'verify.log'}")

    def close(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_END_S)


def run_child() -> int:
    """The other process. It reads its job from standard input."""
    from pgcdc.core.errors import PgcdcError
    from pgcdc.run.verify.job import Verify, VerifyOptions
    from pgcdc.sink.spec import keep_secrets

    os.nice(10)
    job: tuple[Any, Chains] = pickle.load(sys.stdin.buffer)
    config, chains = job
    keep_secrets([config.db, config.dlq_db], chains.specs, chains.transforms)
    try:
        report = Verify(config, chains, VerifyOptions(rate=config.verify.rate)).run()
    except Exception as error:  # exit code 1 means that something differs, but Python also uses it
        print(error if isinstance(error, PgcdcError) else traceback.format_exc(), flush=True)
        return 2
    print(json.dumps(report.to_json()), flush=True)
    return report.exit_code
