"""Random scripts of DDL and DML against a mirror: after each the mirror is equal, or it stopped with advice.

    python tests/campaign_ddl.py --seed 1 --minutes 10 --server both

`.campaign/ddl.json` knows which seeds are done, so a later slice goes on; each appends a line to docs/reliability.md. A
script whose mirror differs is printed, made as short as it still differs, and the slice ends with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import psycopg
from databases import Database, drop_database
from ddl_scripts import Group, write_script
from mirroring import NAME, Mirror, compare
from psycopg import sql

from pgcdc.core.errors import ConnectionLost, GapError, PgcdcError
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.postgres.database import name_table
from pgcdc.run.chains import Chains
from pgcdc.run.settings import PipelineSettings
from pgcdc.run.verify.job import Verify, VerifyOptions
from pgcdc.sink.pg_table.options import PgTableOptions
from pgcdc.sink.spec import AdapterSpec, DeliveryOptions
from pgcdc.source.protocol import make_source

ROOT = Path(__file__).parents[1]
STATE = ROOT / ".campaign" / "ddl.json"
PAGE = ROOT / "docs" / "reliability.md"
QUICK = {
    "fsync": "off", "full_page_writes": "off", "autovacuum": "off", "checkpoint_timeout": "1h", "max_wal_size": "4GB",
    "max_replication_slots": "1000",
}  # fmt: skip


def settings_of(version: int) -> dict[str, str]:
    # Every script leaves an origin.
    return {**QUICK, **({"max_active_replication_origins": "1000"} if version >= 18 else {})}


LOOK_S = 1.3  # The catalog is looked at every second
SETTLE_S = 90.0  # Eight scripts at a time on two cores
LATE_S = 45.0  # New tables are looked for every ten seconds, and the catalog less often under load
_CHANGED = re.compile(r"""(?:UPDATE|DELETE FROM)\s+(?:ONLY\s+)?((?:"[^"]+"|\w+)\.(?:"[^"]+"|\w+))""")

_TABLES = """
SELECT format('%I.%I', n.nspname, c.relname), c.oid::int8 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND NOT c.relispartition AND n.nspname !~ '^(pg_|information_)'
ORDER BY 1
"""
_INSERTS_ONLY = """
SELECT r.prrelid::int8 FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid WHERE NOT p.pubupdate
"""
# A table, its root, and the tables that inherit from it.
_CHANGED_TABLES = """
WITH RECURSIVE tree AS (
    SELECT coalesce(pg_partition_root(to_regclass(%s)), to_regclass(%s))::oid AS oid
    UNION SELECT i.inhrelid FROM pg_inherits i JOIN tree t ON t.oid = i.inhparent)
SELECT oid::int8 FROM tree
"""


@dataclass
class Outcome:
    """What became of one script."""

    seed: int
    server: int
    verdict: str = "equal"  # or stopped, different
    told: str = ""  # The advice, or the difference
    statements: int = 0
    refused: int = 0
    reloads: int = 0
    kills: int = 0
    letters: int = 0  # Dead letters, although it is equal
    late: int = 0  # Equal only after waiting
    was: str = ""  # And what was different before
    inserts_only: int = 0  # Tables without an identity, whose updates nobody publishes: not compared
    seconds: float = 0.0
    refusals: dict[str, int] = field(default_factory=dict)


class Stopped(Exception):
    """The pipeline stopped with advice."""


class _Crash(BaseException):
    """As if the process had died here."""


class ScriptRun:
    """One script on a mirror of its own."""

    def __init__(self, mirror: Mirror, outcome: Outcome, patience_s: float = LATE_S) -> None:
        self.mirror, self.outcome, self.patience_s = mirror, outcome, patience_s
        self.untold: set[int] = set()  # Tables with updates or deletes while only inserts of them were published
        self.kill_in_reload = ""
        self.held: list[tuple[int, psycopg.Connection[Any]]] = []
        self.is_started = False

    def run(self, groups: Sequence[Group]) -> None:
        with self.mirror.database.connect() as conn:
            conn.execute("SET lock_timeout = '1s'")
            try:
                for place, group in enumerate(groups):
                    self._release(place)
                    self._execute(conn, group, place)
                    if group.then == "settle":
                        self.start()
                    if self.is_started:
                        self._pace(group)
            finally:
                self._release(None)
        if self.is_started:
            self.finish()

    def start(self) -> None:
        self.is_started = True
        with _stopping():
            self.mirror.start()
        self.settle()

    # --- statements

    def _execute(self, conn: psycopg.Connection[Any], group: Group, place: int) -> None:
        if group.how == "alone":
            for one in group.statements:
                self._one(conn, one)
        elif group.how == "held":
            other = self.mirror.database.connect()
            other.execute("SET lock_timeout = '1s'")
            other.execute("BEGIN")
            self.held.append((place + 2, other))
            for one in group.statements:
                self._one(other, one, within=True)
        else:
            for has_savepoints in (False, True):
                untold = set(self.untold)
                conn.execute("BEGIN")
                is_done = self._all(conn, group.statements, has_savepoints)
                is_kept = is_done and group.how != "rolled back"
                conn.execute("COMMIT" if is_kept else "ROLLBACK")
                self.untold = self.untold if is_kept else untold
                if is_done:
                    return

    def _all(self, conn: psycopg.Connection[Any], statements: Sequence[str], has_savepoints: bool) -> bool:
        for one in statements:
            if has_savepoints:
                self._one(conn, one, within=True)
                continue
            try:
                self._note(conn, one, conn.execute(one.encode()).rowcount)
            except psycopg.Error:
                return False
        if not has_savepoints:
            self.outcome.statements += len(statements)
        return True

    def _one(self, conn: psycopg.Connection[Any], statement: str, *, within: bool = False) -> None:
        is_inner = within and "away" not in statement
        if is_inner:
            conn.execute("SAVEPOINT one")
        try:
            done = conn.execute(statement.encode())
        except psycopg.Error as error:
            if within:
                conn.execute("ROLLBACK TO one" if is_inner else "SELECT 1")
            self.outcome.refused += 1
            reason = f"{' '.join(statement.split()[:3])[:40]}: {error.diag.message_primary or error}"[:120]
            self.outcome.refusals[reason] = self.outcome.refusals.get(reason, 0) + 1
            return
        if is_inner:
            conn.execute("RELEASE one")
        self.outcome.statements += 1
        self._note(conn, statement, done.rowcount)

    def _note(self, conn: psycopg.Connection[Any], statement: str, rows: int) -> None:
        """Remember what is not published by rule."""
        if (found := _CHANGED.match(statement)) and rows > 0:
            changed = {oid for (oid,) in conn.execute(_CHANGED_TABLES, [found[1], found[1]])}
            self.untold |= changed & {oid for (oid,) in conn.execute(_INSERTS_ONLY)}

    def _release(self, place: int | None) -> None:
        for until, conn in list(self.held):
            if place is None or until <= place:
                self.held.remove((until, conn))
                conn.execute("COMMIT")
                conn.close()

    # --- the mirror

    def _pace(self, group: Group) -> None:
        if group.kill.endswith("in a reload"):
            self.kill_in_reload = group.kill
        elif group.kill:
            self._kill(group.kill)
        if group.then == "follow":
            self.follow()
        if group.then in ("step", "follow"):
            self.step()
        elif group.then:
            self.turn({"pause": 0.2, "look": LOOK_S}.get(group.then, 0.0))

    def turn(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.step():
                time.sleep(0.02)

    def step(self) -> bool:
        with _stopping():
            try:
                found = self.mirror.step()
            except ConnectionLost:
                return False
        if self.kill_in_reload and self.mirror.runner.progress.holds:
            kill, self.kill_in_reload = self.kill_in_reload, ""
            self.outcome.kills += 1
            if kill.startswith("capture"):
                self.mirror.kill_capture()
            else:
                self._restart()
        return found

    def _kill(self, kill: str) -> None:
        """While a change is on its way."""
        mirror = self.mirror
        with mirror.database.connect() as conn:
            conn.execute("CREATE TABLE IF NOT EXISTS on_its_way (n int PRIMARY KEY)")
            conn.execute("INSERT INTO on_its_way SELECT count(*) FROM on_its_way")
            row = conn.execute("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn").fetchone()
        assert row is not None and mirror.runner.ack.commit < int(row[0]), "nothing is in flight"
        self.outcome.kills += 1
        if kill == "capture":
            mirror.kill_capture()
        elif kill == "restart":
            self._restart()
        else:
            self._crash_before_ack()

    def _crash_before_ack(self) -> None:
        """The target has a batch, and the ack does not say so."""
        runner = self.mirror.runner

        def crash(*_: Any) -> None:
            raise _Crash

        runner._acknowledge = crash
        with contextlib.suppress(_Crash):
            self.turn(0.5)
        self._restart()

    def _restart(self) -> None:
        with _stopping():
            self.mirror.restart()

    def follow(self) -> None:
        """What the driver does every ten seconds."""
        with _stopping():
            try:
                make_source(self.mirror.reader._options.source).follow_tables(self.mirror.state)
            except GapError:
                raise
            except PgcdcError as error:
                self.mirror.said.append(f"new tables cannot be published: {error}")

    def settle(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        target = 0
        while True:
            if time.monotonic() > deadline:
                mirror = self.mirror
                holds, asked = mirror.runner.progress.holds, mirror.snapshots()
                raise TimeoutError(f"it does not settle: holds {holds}, ack {mirror.runner.ack}, requests {asked}")
            with _stopping(), contextlib.suppress(ConnectionLost):
                target = target or self.mirror.reader._open().target()
                is_idle = not self.step()
                if is_idle and self.mirror.runner.ack.commit >= target and self._is_quiet():
                    return
            time.sleep(0.01)

    def _is_quiet(self) -> bool:
        going = [one for one in self.mirror.snapshots() if one["status"] not in ("done", "stopped", "failed")]
        holds = list(self.mirror.runner.progress.holds)
        if going or not holds:
            return not going
        # One that was dropped is let go when its reload is refused.
        return not self.mirror.database.query("SELECT FROM pg_class WHERE oid = ANY (%s::int8[]::oid[])", [holds])

    # --- the end

    def finish(self) -> None:
        """Settle, and compare until it is equal or there is no hope."""
        begun = time.monotonic()
        self.follow()
        self.turn(LOOK_S)
        self.settle()
        differences = self.differences()
        while differences and time.monotonic() < begun + self.patience_s:
            self.outcome.late = 1
            self.outcome.was = self.outcome.was or differences[0][:200]
            self.follow()
            self.turn(0.5)
            self.settle()
            differences = self.differences()
        letters = self.mirror.dead_letters()
        self.outcome.reloads = sum("It is read again" in one for one in self.mirror.said)
        self.outcome.letters = len(letters)
        if differences:
            said = [*self.mirror.said[-25:], *(f"dead letter {one[:300]}" for one in letters[:3])]
            failed = [one for one in self.mirror.snapshots() if one["status"] == "failed"]
            raise AssertionError("\n".join([*differences, *said, *map(str, failed)]))

    def tables(self) -> list[str]:
        found = self.mirror.database.query(_TABLES)
        inserts = {oid for (oid,) in self.mirror.database.query(_INSERTS_ONLY)}
        # Rows that a new table without a key has already are not read: its request says so.
        unread = {
            one["table"] for one in self.mirror.snapshots() if one["status"] == "failed" and one["kind"] == "added"
        }
        left_out = {
            name for name, oid in found
            if oid in inserts and (oid in self.untold or name_table(*_parts(name)) in unread)
        }  # fmt: skip
        self.outcome.inserts_only = len(left_out)
        return [name for name, _ in found if name not in left_out]

    def differences(self) -> list[str]:
        """By SQL; if there are none, by `pgcdc verify`, which also knows a type that was not told yet."""
        return compare(self.mirror.database.url, self.mirror.target, self.tables()) or self._verify()

    def _verify(self) -> list[str]:
        mirror = self.mirror
        config = PipelineSettings(db=mirror.database.url, state_dir=mirror.state.path)
        options = PgTableOptions(db=mirror.target, mode="apply")
        spec = AdapterSpec(NAME, "pg_table", options, DeliveryOptions(), (), ())
        report = Verify(config, Chains((spec,), ()), VerifyOptions(at_rest=True)).run()
        wrong = [one for one in report.tables if one.outcome != "equal"]
        compared = {name_table(*_parts(name)) for name in self.tables()}
        return [f"only verify says: {one.to_json()}" for one in wrong if one.table in compared]


def _parts(name: str) -> tuple[str, str]:
    """The schema and table of a quoted name."""
    found = re.findall(r'"([^"]+)"|(\w+)', name)
    return found[0][0] or found[0][1], found[1][0] or found[1][1]


@contextlib.contextmanager
def _stopping() -> Iterator[None]:
    try:
        yield
    except ConnectionLost:
        raise
    except PgcdcError as error:
        raise Stopped(f"{type(error).__name__}: {error}") from error


def run_script(admin_url: str, server: int, seed: int, groups: Sequence[Group], patience_s: float = LATE_S) -> Outcome:
    """Run a script on new databases of a server."""
    outcome = Outcome(seed, server)
    began = time.monotonic()
    name = f"d{seed}_{os.getpid()}"
    folder = Path(tempfile.mkdtemp(prefix="pgcdc-campaign-"))
    with psycopg.connect(admin_url, autocommit=True) as admin:
        for one in (name, f"{name}_copy"):
            admin.execute(sql.SQL("CREATE DATABASE {} STRATEGY file_copy").format(sql.Identifier(one)))
        url, target = (admin_url.rpartition("/")[0] + f"/{one}" for one in (name, f"{name}_copy"))
        mirror = Mirror(Database(name, url, cast(EmbeddedPostgres, None)), target, folder)
        try:
            ScriptRun(mirror, outcome, patience_s).run(groups)
        except Stopped as stop:
            outcome.verdict, outcome.told = "stopped", str(stop)
        except AssertionError as difference:
            outcome.verdict, outcome.told = "different", str(difference)
        except Exception:
            outcome.verdict, outcome.told = "different", traceback.format_exc()
        finally:
            outcome.seconds = time.monotonic() - began
            with contextlib.suppress(Exception):
                mirror.end()
            for one in (name, f"{name}_copy"):
                drop_database(admin, one)
            shutil.rmtree(folder, ignore_errors=True)
    return outcome


def minimise(admin_url: str, server: int, seed: int, groups: list[Group], limit_s: float = 240.0) -> list[Group]:
    """The shortest script that still differs, found by leaving out groups, then statements."""
    deadline = time.monotonic() + limit_s

    def still_fails(some: list[Group]) -> bool:
        if time.monotonic() > deadline:
            return False
        return run_script(admin_url, server, seed, some, 6.0).verdict == "different"

    place = len(groups) - 1
    while place > 0:
        if groups[place].then != "settle" and still_fails(shorter := groups[:place] + groups[place + 1 :]):
            groups = shorter
        place -= 1
    for place in range(len(groups) - 1, 0, -1):
        for number in range(len(groups[place].statements) - 1, -1, -1):
            one = groups[place]
            less = replace(one, statements=one.statements[:number] + one.statements[number + 1 :])
            if still_fails(shorter := [*groups[:place], less, *groups[place + 1 :]]):
                groups = shorter
    return groups


def show(groups: Sequence[Group]) -> str:
    lines = []
    for one in groups:
        if one.statements or one.then or one.kill:
            lines.append(
                f"-- {one.how}{', then ' + one.then if one.then else ''}{', KILL ' + one.kill if one.kill else ''}"
            )
            lines += [f"{statement};" for statement in one.statements]
    return "\n".join(lines)


# --- a slice


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "?"


def _work(admin_url: str, server: int, seed: int) -> Outcome:
    logging.disable(logging.CRITICAL)
    return run_script(admin_url, server, seed, write_script(seed))


def run_slice(version: int, first: int, minutes: float, scripts: int, jobs: int, shorten: bool) -> list[Outcome]:
    state: dict[str, list[int]] = json.loads(STATE.read_text()) if STATE.exists() else {}
    done = set(state.get(str(version), []))
    deadline, seed, found = time.monotonic() + minutes * 60, first, list[Outcome]()
    with (
        EmbeddedPostgres.temporary(version=version, settings=settings_of(version)) as server,
        ProcessPoolExecutor(jobs, get_context("spawn")) as pool,
    ):
        going: dict[Future[Outcome], int] = {}
        while True:
            while len(going) < jobs and time.monotonic() < deadline and len(found) + len(going) < scripts:
                while seed in done:
                    seed += 1
                going[pool.submit(_work, server.url(), version, seed)] = seed
                seed += 1
            if not going:
                break
            for future in wait(going, return_when=FIRST_COMPLETED).done:
                going.pop(future)
                outcome = future.result()
                found.append(outcome)
                _report(outcome)
                if outcome.verdict != "different":
                    done.add(outcome.seed)
                    STATE.parent.mkdir(exist_ok=True)
                    STATE.write_text(json.dumps({**state, str(version): sorted(done)}))
        for one in [one for one in found if one.verdict == "different"][:3] if shorten else []:
            print(f"--- seed {one.seed}, as short as it still differs", flush=True)
            print(show(minimise(server.url(), version, one.seed, write_script(one.seed))), flush=True)
    return found


def _report(outcome: Outcome) -> None:
    late = " (late)" if outcome.late else ""
    line = (
        f"{outcome.server} seed {outcome.seed}: {outcome.verdict}, {outcome.statements} statements, "
        f"{outcome.refused} refused, {outcome.reloads} reloads, {outcome.kills} kills, {outcome.seconds:.1f} s{late}"
    )
    print(line, flush=True)
    if outcome.verdict != "equal":
        print(f"    {outcome.told}", flush=True)


_HEAD = """\
# Reliability

Campaigns of random DDL and DML against a `pg_table` apply mirror (`make campaign-ddl`): after each script the mirror equals
its source, by SQL and by `pgcdc verify`, or the pipeline stopped with advice. Kills: `kill -9` of the capture, restarts of
the runner, and crashes between a write and its ack, each with a change on its way.

| date | commit | server | seeds | scripts | statements | refused | reloads | kills | stops | differences | seconds |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def append_summary(version: int, found: Sequence[Outcome]) -> None:
    if not PAGE.exists():
        PAGE.write_text(_HEAD)
    verdicts, seeds = Counter(one.verdict for one in found), [one.seed for one in found]
    cells = [
        time.strftime("%Y-%m-%d"), _commit(), version, f"{min(seeds)} to {max(seeds)}",
        len(found), sum(one.statements for one in found), sum(one.refused for one in found),
        sum(one.reloads for one in found), sum(one.kills for one in found), verdicts["stopped"], verdicts["different"],
        f"{sum(one.seconds for one in found):.0f}",
    ]  # fmt: skip
    with PAGE.open("a") as page:
        page.write(f"| {' | '.join(map(str, cells))} |\n")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--seed", type=int, default=1, help="the first one")
    options.add_argument("--minutes", type=float, default=10)
    options.add_argument("--scripts", type=int, default=1_000_000, help="at most so many")
    options.add_argument("--server", default="both", choices=["15", "16", "18", "both"])
    options.add_argument("--jobs", type=int, default=3, help="scripts at a time: they wait most of the time")
    options.add_argument("--only", action="store_true", help="this seed alone, with its script")
    options.add_argument("--no-shorten", action="store_true")
    options.add_argument("--no-page", action="store_true")
    asked = options.parse_args()
    versions = [18, 15] if asked.server == "both" else [int(asked.server)]
    if asked.only:
        print(show(write_script(asked.seed)))
        with EmbeddedPostgres.temporary(version=versions[0], settings=settings_of(versions[0])) as server:
            outcome = run_script(server.url(), versions[0], asked.seed, write_script(asked.seed))
        _report(outcome)
        print(json.dumps(asdict(outcome), indent=1))
        return int(outcome.verdict == "different")
    is_bad = False
    for version in versions:
        minutes = asked.minutes / len(versions)
        found = run_slice(version, asked.seed, minutes, asked.scripts, asked.jobs, not asked.no_shorten)
        if not found:
            continue
        if not asked.no_page:
            append_summary(version, found)
        refusals = Counter[str]()
        for one in found:
            refusals.update(one.refusals)
        print("most refused:", *(f"{count} {reason}" for reason, count in refusals.most_common(8)), sep="\n  ")
        bad = [one.seed for one in found if one.verdict == "different"]
        stops = [one.seed for one in found if one.verdict == "stopped"]
        print(f"PostgreSQL {version}: {len(found)} scripts, stopped {stops}, different {bad}", flush=True)
        is_bad = is_bad or bool(bad)
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
