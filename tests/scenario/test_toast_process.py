"""The TOAST cache in the capture process: killed at every step, with and without its spool, no value is wrong. No Spark."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from databases import Database
from listening import wait_until
from preparing import Wanted, prepare
from toasting import TABLE, text

from pgcdc.capture.control import CaptureLink, CaptureRequests, CaptureSpec
from pgcdc.cli.status import read_status
from pgcdc.core.errors import ConversionError
from pgcdc.core.position import Position
from pgcdc.core.state import StateDir
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.spool.reader import SpoolReader, read_slice

Row = tuple[Position, dict[str, bytes | None], list[int] | None]
WRITING = ("toast.after_write", "spool.before_index", "spool.after_index")
CONFIRMING = ("toast.after_sync", "capture.before_confirm", "capture.after_confirm")


class Consumer:
    """Reads the spool as a query does, whoever writes it."""

    def __init__(self, spec: CaptureSpec) -> None:
        self.state = StateDir(Path(spec.state_dir))
        self.link = CaptureLink(spec, is_restart=False, on_restart=self.join)
        self.join(self.link)

    def join(self, client: CaptureRequests) -> None:
        self.start, self.ack = client.join("one")

    def read(self, database: Database, after: Position) -> list[Row]:
        """Everything that was committed up to now, behind `after`."""
        target = Position.end(self.link.target())
        while True:
            reader = SpoolReader(self.state.spool)
            reader.refresh()
            if reader.end >= target:
                break
            self.link.wait(0.2, until=target)
        shapes = reader.relations()
        found: list[Row] = []
        for piece in reader.slices(after, target):
            changes, owners = read_slice(piece)
            for row, lsn in zip(changes.to_pylist(), owners.column("commit").to_pylist(), strict=True):
                names = [column.name for column in shapes[row["relation"]].columns]
                values = dict(zip(names, row["new"] or row["old"], strict=True))
                found.append((Position.at(lsn, row["ordinal"], row["sub"]), values, row["unchanged"]))
        return found

    def confirm(self, position: Position) -> None:
        for _ in range(2):  # the capture may have died between the two
            self.link.ack("one", position)
            self.link.confirm()

    def kill(self) -> None:
        process = psutil.Process(self.link.status()["pid"])
        process.kill()
        wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, 10, "it is dead")

    def close(self) -> None:
        self.link.stop()
        self.link.close()


def source(database: Database, folder: Path, mode: str = "cache") -> CaptureSpec:
    options = Wanted(
        db=database.url, slot_name=f"s_{database.name}", all_tables=True, state_dir=str(folder / "state"),
        toast=mode,
    )  # fmt: skip
    return prepare(options).spec


def hits(marks: Path) -> set[str]:
    return {path.stem for path in marks.iterdir()}


@pytest.mark.parametrize("points", [WRITING, CONFIRMING], ids=["writing", "confirming"])
def test_a_kill_at_every_step_between_cache_spool_and_confirmation(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, points: tuple[str, ...]
) -> None:
    database.execute(TABLE)
    marks = tmp_path / "marks"
    marks.mkdir()
    named = ",".join(f"{point}=kill@{2 + number}" for number, point in enumerate(points))
    monkeypatch.setenv("PGCDC_FAILPOINTS", named)
    monkeypatch.setenv("PGCDC_FAILPOINT_ONCE", str(marks))
    with closing(Consumer(source(database, tmp_path))) as consumer:
        seen: list[Row] = []
        expected: dict[int, str] = {}
        number = 0
        while hits(marks) != set(points):
            number += 1
            assert number < 60, f"hit so far: {hits(marks)}"
            key = number % 7
            if key not in expected:
                database.execute("INSERT INTO docs VALUES (%s, 0, %s)", [key, text(number)])
                expected[key] = text(number)
            elif number % 5 == 0:
                database.execute("UPDATE docs SET body = %s WHERE id = %s", [text(number), key])
                expected[key] = text(number)
            database.execute("UPDATE docs SET n = n + 1")
            new = consumer.read(database, seen[-1][0] if seen else consumer.start)
            seen += new
            for _, values, unchanged in new[-len(expected) :]:
                assert unchanged is None
                assert values["body"] == expected[int(values["id"] or b"")].encode()
            if number % 3 == 0:
                consumer.confirm(Position.end(seen[len(seen) // 2][0].commit))


@pytest.mark.parametrize("lost", ["spool", pytest.param("nothing", marks=pytest.mark.slow)])
def test_a_replay_after_a_kill_gives_identical_rows(database: Database, tmp_path: Path, lost: str) -> None:
    """Without its spool (a crash of the machine) the capture begins at what is confirmed; the cache is ahead of that."""
    database.execute(TABLE)
    with closing(Consumer(source(database, tmp_path))) as consumer:
        database.execute("INSERT INTO docs SELECT k, 0, %s || k, %s FROM generate_series(1, 5) k", [text(1), text(2)])
        database.execute("UPDATE docs SET n = 1")
        first = consumer.read(database, consumer.start)
        confirmed = first[-1][0]
        consumer.confirm(Position.end(confirmed.commit))
        database.execute("UPDATE docs SET n = 2")
        database.execute("UPDATE docs SET body = %s WHERE id < 3", [text(3)])
        database.execute("DELETE FROM docs WHERE id = 5")
        database.execute("UPDATE docs SET id = id + 10, note = %s WHERE id = 4", [text(4)])
        database.execute("UPDATE docs SET n = 3")
        rows = consumer.read(database, Position.end(confirmed.commit))
        assert [unchanged for _, _, unchanged in rows] == [None] * len(rows) and len(rows) == 5 + 2 + 1 + 1 + 4
        consumer.kill()
        if lost == "spool":
            shutil.rmtree(consumer.state.spool)
        assert consumer.read(database, Position.end(confirmed.commit)) == rows


def test_hits_misses_and_entries_are_shown(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    database.execute("INSERT INTO docs VALUES (1, 0, %s)", [text(1)])
    with closing(Consumer(source(database, tmp_path))) as consumer:
        database.execute("UPDATE docs SET n = 1")
        database.execute("INSERT INTO docs VALUES (2, 0, %s)", [text(2)])
        database.execute("UPDATE docs SET n = 2")
        consumer.read(database, consumer.start)

        def counted(report: dict[str, object]) -> list[object]:
            return [report[f"toast_cache_{name}"] for name in ("hits", "misses", "entries")]

        assert counted(consumer.link.status()) == [1, 2, 1]
        assert counted(read_status(consumer.state.path)) == [1, 2, 1]


def test_full_stops_the_capture_with_the_statement_that_helps(database: Database, tmp_path: Path) -> None:
    database.execute(TABLE)
    database.execute("ALTER TABLE docs REPLICA IDENTITY FULL")
    consumer = Consumer(source(database, tmp_path, "full"))
    database.execute("INSERT INTO docs VALUES (1, 0, %s)", [text(1)])
    database.execute("UPDATE docs SET n = 1")
    assert consumer.read(database, consumer.start)[-1][1]["body"] == text(1).encode()
    database.execute("ALTER TABLE docs REPLICA IDENTITY DEFAULT")
    database.execute("UPDATE docs SET n = 2")
    with pytest.raises(ConversionError, match=r"column body of table docs .*") as caught:
        consumer.read(database, consumer.start)
    assert 'ALTER TABLE "public"."docs" REPLICA IDENTITY FULL;' in caught.value.advice
    consumer.close()


@pytest.mark.parametrize("version", [16, pytest.param(15, marks=pytest.mark.slow)])
def test_older_servers(tmp_path: Path, version: int) -> None:
    with EmbeddedPostgres.temporary(version=version, settings={"fsync": "off"}) as server:
        database = Database("postgres", server.url(), server)
        database.execute(TABLE)
        with closing(Consumer(source(database, tmp_path))) as consumer:
            database.execute("INSERT INTO docs VALUES (1, 0, %s)", [text(1)])
            database.execute("UPDATE docs SET n = 1")
            rows = consumer.read(database, consumer.start)
            assert rows[-1][1]["body"] == text(1).encode() and rows[-1][2] is None
