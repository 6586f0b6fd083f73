"""`pgcdc listen` with pg_table in the mode apply, and the commands that users run beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from listening import Listener


class ListeningMirror(Listener):
    """Applies the changes of one database to another."""

    adapter = "pg_table"

    def __init__(
        self,
        source: str,
        target: str,
        folder: Path,
        *flags: str,
        slot: str = "s1",
        env: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(source, folder, *flags, slot=slot, env={"PGCDC_PG_TABLE_DB": target, **(env or {})})
        self.target = target

    def adapter_flags(self) -> tuple[str, ...]:
        return "--pg-table-mode", "apply"

    def command(self, *words: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """`pgcdc <words> --state-dir ...`, as a user runs it."""
        environment = {**os.environ, "PGCDC_DB": self.url, **self.env}
        command = [sys.executable, "-m", "pgcdc", *words, "--state-dir", str(self.state.path)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)

    def verify(self, *flags: str) -> subprocess.CompletedProcess[str]:
        return self.command("verify", "--adapter", "pg_table", *self.adapter_flags(), *flags)
