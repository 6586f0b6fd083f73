"""The playground: our own PostgreSQL under random traffic, captured through Spark, watched, and proved at the end.

    start PostgreSQL → start the pipeline → shop and traffic → watch → drain → stop in order → compare

The pipeline runs in its own thread; the main thread owns signals, measuring and output. The pipeline's callbacks only put
data into a queue, so measuring never makes delivery slower.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import psutil
import psycopg
import typer

from pgcdc.capture.control import ask
from pgcdc.capture.server import remove_socket
from pgcdc.config import Config
from pgcdc.core.errors import ConfigError, PgcdcError
from pgcdc.core.position import Position
from pgcdc.core.signals import on_end_signals
from pgcdc.core.state import Lock
from pgcdc.event.batch import Batch
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.playground.proof import Verdict, compare, read_tables
from pgcdc.playground.shop import KEYS, Traffic, add_first_rows, create_tables
from pgcdc.playground.view import Meter, open_view, summary_line
from pgcdc.postgres.database import connect
from pgcdc.postgres.lsn import format_lsn
from pgcdc.run.pipeline import Pipeline
from pgcdc.spark.session import check_java

NAME = "playground"
EVENTS_FILE = "events.jsonl"
TICK_S = 0.1
FIRST_EVENT_TIMEOUT_S = 120.0
DRAIN_TIMEOUT_S = 30.0
END_TIMEOUT_S = 60.0
GRACE_S = 2.0
LAST_ROUNDS = 3
SHOWN_FAULTS = 20
SHOWN_LOG_LINES = 12
AGAIN = "Start the playground again"


def run_playground(
    seconds: float | None = None, rate_per_s: float = 20.0, seed: int = 1, keep: Path | None = None
) -> int:
    """Play, compare, clean up; returns the exit code. `seconds` None: until Ctrl-C. `keep`: a folder for the delivered
    file.

    Raises KeyboardInterrupt, with everything cleaned up, if interrupted twice or before events came.
    """
    check_java()
    kept = _choose_file(keep)
    playground = _Playground(seconds)
    on_end_signals(playground.handle_signal)
    try:
        return playground.play(kept, seed, rate_per_s)
    except (KeyboardInterrupt, Exception) as error:
        if playground.signals:  # do not report failures caused by our own abrupt end
            raise KeyboardInterrupt from None
        if not isinstance(error, PgcdcError) or error.exit_code == 1:
            playground.show_logs()
        raise
    finally:
        playground.close()


def _choose_file(folder: Path | None) -> Path | None:
    """The kept path of the delivered file, if any."""
    if folder is None:
        return None
    path = folder.absolute() / EVENTS_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)
        path.unlink()
    except FileExistsError:
        raise ConfigError(f"--keep {folder} already contains {EVENTS_FILE}", "Choose another folder") from None
    except OSError as error:
        raise ConfigError(f"--keep {folder} cannot be written: {error.strerror}", "Choose another folder") from None
    return path


class _Playground:
    """One run. Call `play` once, then always `close`."""

    def __init__(self, seconds: float | None) -> None:
        self.signals = 0
        self._seconds = seconds
        self._began_s = time.time()
        self._scratch = Path(tempfile.mkdtemp(prefix=f"pgcdc-{NAME}-"))
        self._meter = Meter()
        self._ending = contextlib.ExitStack()
        self._server: EmbeddedPostgres | None = None
        self._pipeline: Pipeline | None = None
        self._delivered: queue.SimpleQueue[tuple[float, Batch]] = queue.SimpleQueue()
        self._position = Position.at(0, 0)
        self._is_flowing = False

    def handle_signal(self, number: int, _: FrameType | None) -> None:
        """Before events flow, the first signal interrupts. Later the first one stops cleanly, the second interrupts,
        and the third kills."""
        self.signals += 1
        if self.signals > 2:
            os._exit(128 + number)
        if self.signals == 2 or not self._is_flowing:
            raise KeyboardInterrupt

    # --- the run

    def play(self, kept: Path | None, seed: int, rate_per_s: float) -> int:
        """Run everything from the first process to the verdict."""
        path = kept or self._scratch / EVENTS_FILE
        say("starting PostgreSQL 18")
        self._server = self._ending.enter_context(EmbeddedPostgres.temporary())
        url = self._server.url()
        self._sql = self._ending.enter_context(connect(url, application_name="pgcdc playground"))
        create_tables(self._sql)  # empty: rows are added once the pipeline listens
        pipeline = self._start_pipeline(url, path)
        self._is_flowing = True
        say("opening the shop")
        add_first_rows(self._sql)
        traffic = Traffic(url, seed, rate_per_s)
        traffic.start()
        self._ending.callback(_quietly, traffic.stop)
        self._watch(pipeline)
        say("delivering the remaining events")
        traffic.stop()
        self._drain(pipeline)
        source = read_tables(self._sql, KEYS)
        say("stopping Spark")
        pipeline.stop()
        if not pipeline.wait(END_TIMEOUT_S):
            raise PgcdcError(f"the pipeline did not stop within {END_TIMEOUT_S:.0f} s", AGAIN)
        say("comparing source and delivered content")
        verdict = compare(path, source, KEYS)
        self._report(verdict, kept)
        return 0 if verdict.is_equal else 1

    def _start_pipeline(self, url: str, path: Path) -> Pipeline:
        given = {
            "db": url,
            "slot_name": NAME,
            "all_tables": True,
            "adapters": ("file",),
            "file_path": path,
            "state_dir": self._scratch / "state",
            "snapshot_mode": "never",  # no rows exist yet
        }
        config = Config.model_validate(given)
        config.check()
        pipeline = self._pipeline = Pipeline(config, say=say)
        pipeline.on_batch = lambda batch: self._delivered.put((time.time(), batch))
        self._ending.callback(_quietly, pipeline.wait, END_TIMEOUT_S)
        self._ending.callback(pipeline.stop)
        pipeline.start()
        return pipeline

    def _watch(self, pipeline: Pipeline) -> None:
        """Show what arrives until the time is over or the user stops."""
        opened_s = time.time()
        with open_view(self._meter, self._seconds) as show:
            while not self.signals:
                time.sleep(TICK_S)
                self._observe(pipeline)
                began_s, now_s = self._meter.began_s, time.time()  # time before the first event does not count
                if began_s is not None:
                    show(now_s)
                elif now_s - opened_s > FIRST_EVENT_TIMEOUT_S:
                    raise PgcdcError(f"no event came within {FIRST_EVENT_TIMEOUT_S:.0f} s", AGAIN)
                if began_s is not None and self._seconds and now_s - began_s >= self._seconds:
                    return

    def _drain(self, pipeline: Pipeline) -> None:
        """Wait until everything committed is in the file."""
        self._observe(pipeline)
        # when asked, the capture reports its position without waiting for its idle interval
        asked = ask(pipeline.state.capture_lock, {"do": "target"})
        target = Position.end(int(asked["lsn"]) if asked else self._meter.server_lsn)
        moved_s, position = time.monotonic(), self._position
        while self._position < target:
            time.sleep(TICK_S / 5)
            self._observe(pipeline)
            if self._position > position:
                moved_s, position = time.monotonic(), self._position
            if time.monotonic() - moved_s > DRAIN_TIMEOUT_S:
                raise PgcdcError(
                    f"nothing was delivered for {DRAIN_TIMEOUT_S:.0f} s: the file is at {format_lsn(position.commit)}, "
                    f"the database at {format_lsn(target.commit)}",
                    "This is a bug in pgcdc: run it again with --keep, and report it with the file",
                )

    # --- measuring and display

    def _observe(self, pipeline: Pipeline) -> None:
        """Measure the deliveries since the last call, and ask the server for its position."""
        if pipeline.wait(0):
            raise PgcdcError("the pipeline ended unexpectedly", AGAIN)
        with contextlib.suppress(queue.Empty):
            while True:
                delivered_s, batch = self._delivered.get_nowait()
                self._position = batch.end
                self._meter.add(batch.events, delivered_s)
                self._meter.delivered_lsn = batch.end.commit
        try:
            row = self._sql.execute("SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn").fetchone()
        except psycopg.Error as error:
            reason = " ".join(str(error).split())
            raise PgcdcError(f"the playground's PostgreSQL is gone: {reason}", AGAIN) from error
        self._meter.server_lsn = int(row[0]) if row else 0

    def _report(self, verdict: Verdict, kept: Path | None) -> None:
        for fault in verdict.faults[:SHOWN_FAULTS]:
            typer.echo(fault)
        if len(verdict.faults) > SHOWN_FAULTS:
            typer.echo(f"... and {len(verdict.faults) - SHOWN_FAULTS:,} more")
        typer.secho(str(verdict), fg="green" if verdict.is_equal else "red", bold=True)
        typer.echo(summary_line(self._meter.latencies))
        if self._meter.began_s is not None:
            typer.echo(f"first event {self._meter.began_s - self._began_s:.1f} s after the start")
        if kept is not None:
            typer.echo(f"the delivered events are in {kept}")

    def show_logs(self) -> None:
        """Show the end of Spark's and the capture's logs after a failure, because the files are deleted."""
        for log in sorted(self._scratch.glob("state/*.log")):
            for line in log.read_text(errors="replace").splitlines()[-SHOWN_LOG_LINES:]:
                typer.echo(f"{log.name}: {line}")

    # --- the end

    def close(self) -> None:
        """Leave nothing behind. Ends cleanly if there is time, otherwise immediately."""
        try:
            # interrupted before anything was delivered, so nothing can be lost
            if self.signals > 1 or (self.signals and not self._is_flowing):
                raise KeyboardInterrupt
            self._ending.close()
        except KeyboardInterrupt:
            self._end_at_once()
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _end_at_once(self) -> None:
        """Kill everything that we started, before exiting."""
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - threads of pyspark complain when their JVM dies
        if self._server is not None:
            self._server.kill()
            self._server.__exit__()
        if self._pipeline is not None:  # its thread is abandoned, but starts nothing new
            self._pipeline.stop()
            remove_socket(Lock.holder(self._pipeline.state.run_lock) or {})
        # Spark's JVM and its workers, the capture, and processes that these start at the last moment
        for _ in range(LAST_ROUNDS):
            processes = psutil.Process().children(recursive=True)
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.terminate()
            for process in psutil.wait_procs(processes, GRACE_S)[1]:
                with contextlib.suppress(psutil.Error):
                    process.kill()


def say(text: str) -> None:
    typer.echo(f"pgcdc: {text}")


def _quietly(end: Callable[..., object], *args: object) -> None:
    with contextlib.suppress(Exception):  # report what ended the run instead
        end(*args)
