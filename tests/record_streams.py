"""Records the streams in `tests/fixtures/streams` from real servers, for the fuzzing of decoders and assembler.

Run it when the corpus should show something new: `.venv/bin/python tests/record_streams.py`. A file is what one slot sent:
LSN and message of each XLogData, in hex.
"""

from __future__ import annotations

from pathlib import Path

from streams import SETTINGS, Stream, new_stream, save_messages

from pgcdc.playground.postgres import EmbeddedPostgres

FOLDER = Path(__file__).parent / "fixtures" / "streams"
# Every change becomes a block of its own, so that few rows show every message.
EARLY = {16: "debug_logical_replication_streaming", 18: "debug_logical_replication_streaming"}

SCRIPT = [
    "BEGIN", "INSERT INTO t VALUES (1, 'one', 'happy')", "UPDATE t SET v = 'uno' WHERE id = 1",
    "UPDATE t SET id = 2 WHERE id = 1", "DELETE FROM t WHERE id = 2", "COMMIT",
    "BEGIN", "INSERT INTO t VALUES (3, NULL, NULL), (4, '', 'sad')", "SAVEPOINT a", "INSERT INTO t VALUES (5, 'gone')",
    "SAVEPOINT b", "TRUNCATE t, u", "ROLLBACK TO a", "SELECT pg_logical_emit_message(true, 'p', 'inside')",
    "ALTER TABLE t ADD n int DEFAULT 7", "INSERT INTO t VALUES (6, 'six')", "UPDATE u SET v = 'z' WHERE id = 1", "COMMIT",
    "SELECT pg_logical_emit_message(false, 'p', 'outside')", "TRUNCATE u",
    "BEGIN", "INSERT INTO t VALUES (7, 'rolled back')", "ROLLBACK",
    "BEGIN", "INSERT INTO t VALUES (8, 'prepared')", "PREPARE TRANSACTION 'yes'", "INSERT INTO t VALUES (9, 'between')",
    "BEGIN", "INSERT INTO t VALUES (10, 'prepared')", "PREPARE TRANSACTION 'no'", "ROLLBACK PREPARED 'no'",
    "COMMIT PREPARED 'yes'",
]  # fmt: skip


def record_script(stream: Stream, path: Path, *, streaming: bool, two_phase: bool) -> None:
    slot = stream.slot(two_phase=two_phase)
    stream.execute(*SCRIPT)
    save_messages(path, stream.read(slot, streaming=streaming).messages)


def prepare(stream: Stream) -> None:
    stream.execute(
        "CREATE TYPE mood AS ENUM ('happy', 'sad')",
        "CREATE TABLE t (id int PRIMARY KEY, v text, m mood)",
        "CREATE TABLE u (id int PRIMARY KEY, v text, big text)",
        "ALTER TABLE u ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO u VALUES (1, 'x', repeat('b', 3000))",
        "CREATE PUBLICATION p FOR TABLE t, u",
    )


def record_stream_prepare() -> None:
    """A streamed transaction that is prepared, then ordinary changes of its table, as the installed PostgreSQL 15 sends it.

    The row filter keeps the recording short: the server streams because of the rows that it does not send.
    """
    with EmbeddedPostgres.temporary(version=15, settings=SETTINGS) as server, new_stream(server) as stream:
        stream.execute(
            "CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE PUBLICATION p FOR TABLE t WHERE (id < 10)"
        )
        slot = stream.slot(two_phase=True)
        wide = "INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series(100, 600) g"
        stream.execute(
            "BEGIN", wide, "INSERT INTO t VALUES (1, 'streamed')", wide.replace("100, 600", "700, 1200"),
            "PREPARE TRANSACTION 'g'", "INSERT INTO t VALUES (2, 'ordinary')", "COMMIT PREPARED 'g'",
        )  # fmt: skip
        minor = stream.query("SHOW server_version")[0][0].split(" ")[0]
        save_messages(FOLDER / f"{minor}-stream-prepare.txt", stream.read(slot, two_phase=True).messages)


def main() -> None:
    """Write every file; those of other minor releases of PostgreSQL 15 stay."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    record_stream_prepare()
    for version, setting in EARLY.items():
        with EmbeddedPostgres.temporary(version=version, settings={**SETTINGS, setting: "immediate"}) as server:
            for streaming, two_phase in [(True, False), (True, True), (False, True), (False, False)]:
                with new_stream(server) as stream:
                    prepare(stream)
                    name = f"{version}-{'streamed' if streaming else 'whole'}{'-prepared' if two_phase else ''}"
                    record_script(stream, FOLDER / f"{name}.txt", streaming=streaming, two_phase=two_phase)


if __name__ == "__main__":
    main()
