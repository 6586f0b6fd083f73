"""For tests of TOAST: a table whose values are really out of line, and a capture with its TOAST step that can go back."""

from __future__ import annotations

import random
import string
import time
from pathlib import Path
from typing import Any

import psycopg
from databases import Database
from preparing import Wanted, prepare
from streams import Change, changes_of

from pgcdc.core.position import Position
from pgcdc.core.state import StateDir
from pgcdc.postgres.database import connect
from pgcdc.source.postgres.options import ToastOptions, WireOptions
from pgcdc.source.postgres.toast.resolver import ToastStep
from pgcdc.source.postgres.wire.stream import Capture

TABLE = """
CREATE TABLE docs (id int PRIMARY KEY, n int NOT NULL DEFAULT 0, body text, note text);
ALTER TABLE docs ALTER body SET STORAGE EXTERNAL, ALTER note SET STORAGE EXTERNAL
"""


def text(seed: int, size: int = 3000) -> str:
    """Long enough to be stored out of line, not to be compressed, and different for each seed."""
    return "".join(random.Random(seed).choices(string.ascii_letters + string.digits, k=size))


class Rig:
    """One slot, read through a TOAST step in this process; `restart` is a new process that goes on elsewhere."""

    def __init__(
        self, database: Database, folder: Path, mode: str = "cache", limit: int = 1000, **options: Any
    ) -> None:
        self.database = database
        self.url = database.url
        self.state = StateDir(folder / "state")
        self.slot = f"s_{database.name}"
        self.toast = ToastOptions.model_validate({"toast": mode, "toast_cache_max_entries": limit})
        source = Wanted(
            db=self.url,
            slot_name=f"s_{database.name}",
            state_dir=str(self.state.path),
            toast=mode,
            **({"toast_cache_max_entries": limit} if mode == "cache" else {}),
            **({"all_tables": True} | options),
        )
        ready = prepare(source)
        self.spec, self.publications = ready.spec, ready.names
        identity = self.state.identity()
        assert identity is not None
        self.instance, self.start_lsn = identity.instance, identity.created
        self.changes: list[Change] = []
        """Everything since the last start."""
        self.open(self.start_lsn)

    def open(self, resume_lsn: int, wire: WireOptions | None = None) -> None:
        self.changes = []
        self.step = ToastStep(
            self.toast, self.publications, self.state, resume=Position.end(resume_lsn), instance=self.instance
        )
        self.capture = Capture(
            self.url, slot=self.slot, publications=self.publications, start_lsn=resume_lsn, options=wire
        )
        self.sql = connect(self.url)
        self.step.look(self.sql)
        self.capture.connect()

    def restart(self, resume_lsn: int, *, orderly: bool = True, wire: WireOptions | None = None) -> None:
        """Go on behind `resume_lsn`. Not `orderly`: what is not on disk, as a kill finds it, is lost."""
        self.close(orderly=orderly)
        self.open(resume_lsn, wire)

    def close(self, *, orderly: bool = True) -> None:
        self.capture.close()
        self.sql.close()
        cache = self.step._cache
        if orderly or cache is None:
            self.step.close()
        else:
            cache._close_files()  # without a commit
        deadline = time.monotonic() + 10
        while self.database.query(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{self.slot}'")[0][0]:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def execute(self, *statements: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as conn:
            for statement in statements:
                conn.execute(statement.encode())

    def read(self, *statements: str, limit: int = 65_536) -> list[Change]:
        """Run the statements, and read everything up to now."""
        self.execute(*statements)
        target = int(self.database.query("SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn")[0][0])
        found: list[Change] = []
        self.capture.target_lsn = target
        deadline = time.monotonic() + 60
        while self.capture.handed_out_lsn < target:
            assert time.monotonic() < deadline, f"nothing came any more after {len(found)} changes"
            batch = self.capture.receive_batch(limit=limit, timeout_s=0.05)
            if batch is None:
                self.capture.ask_for_progress()
                continue
            for piece in self.step.resolve(batch, self.sql):
                found += changes_of(piece)
        self.changes += found
        return found

    def confirm(self, lsn: int) -> None:
        """As the process does it."""
        self.step.make_durable()
        self.capture.send_feedback(lsn)
        self.step.release(lsn)

    @property
    def counted(self) -> tuple[int, int, int]:
        """Hits, misses, entries."""
        status = self.step.status()
        return status["toast_cache_hits"], status["toast_cache_misses"], status["toast_cache_entries"]
