"""Every command and snippet of Start and Tasks works, on real servers, and prints what its page says."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest
import trustme
from databases import Database, drop_database
from pages import Story, read_blocks
from psycopg import sql
from receivers import How, Receiver, Request, answer, free_port, receiver

from pgcdc.playground.postgres import EmbeddedPostgres

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(
    path.relative_to(DOCS).as_posix() for folder in ("start", "tasks") for path in (DOCS / folder).glob("*.md")
)
STORIES = (
    ("start/demo.md",),
    ("start/database.md", "tasks/lost-slot.md"),
    ("start/spark.md",),
    ("tasks/index.md", "start/pipeline.md", "tasks/mask.md", "tasks/reload.md", "tasks/backfill.md"),
    ("tasks/copy.md", "tasks/ddl.md", "tasks/verify.md"),
    ("tasks/webhook.md", "tasks/dead-letters.md"),
    ("tasks/schedule.md", "tasks/sink.md"),
    ("tasks/debezium.md",),
    ("tasks/tls.md",),
    ("tasks/rights.md",),
)
"""Pages that continue with what the ones before have left running."""
SLOW_STORIES = (("tasks/cluster.md",),)
BEFORE_DEBEZIUM = (
    "CREATE PUBLICATION dbz_publication FOR TABLE orders",
    "SELECT pg_create_logical_replication_slot('debezium', 'pgoutput')",
    "INSERT INTO orders (customer, total) VALUES ('Edsger', 3.00)",
)


def test_every_page_is_played_once() -> None:
    assert sorted(page for story in (*STORIES, *SLOW_STORIES) for page in story) == PAGES


def test_every_block_can_be_played() -> None:
    """A block without a language, or of an unknown one, would be no part of the test."""
    for page in PAGES:
        for block in read_blocks(DOCS / page):
            assert block.kind in ("sh", "sql", "text", "json", "yaml", "python", "toml", ""), f"{page}:{block.line}"
            assert block.kind not in ("yaml", "python", "toml") or block.title or "not" in block.mark, (
                f"{page}:{block.line}"
            )


@pytest.fixture
def copy(database: Database) -> Iterator[str]:
    """The URL of a second database."""
    name = f"{database.name}_copy"
    with psycopg.connect(database.server.url(), autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {} STRATEGY file_copy").format(sql.Identifier(name)))
        try:
            yield database.server.url(name)
        finally:
            drop_database(admin, name)


def refuse_mallory(one: Receiver) -> None:
    """400 for the first order of one customer."""
    refused: list[Request] = []

    def how(request: Request) -> How | None:
        if b"Mallory" not in request.body or refused:
            return None
        refused.append(request)
        return answer(400, b"no such customer")

    one.how = how


@pytest.mark.parametrize(
    "story",
    [*STORIES, *(pytest.param(story, marks=pytest.mark.slow) for story in SLOW_STORIES)],
    ids=lambda story: Path(story[-1]).stem,
)
def test_pages(story: tuple[str, ...], database: Database, copy: str, tmp_path: Path) -> None:
    with ExitStack() as ending:
        hook = ending.enter_context(receiver())
        refuse_mallory(hook)
        server, name = database.server, database.name
        if "tasks/tls.md" in story:
            server, name = ending.enter_context(make_secure_server(tmp_path)), "shop"
        ending.enter_context(prepare(server, name))
        values = {
            "@db.example.com/shop": f"@localhost:{server.port}/{name}",
            "@127.0.0.1/shop": f"@127.0.0.1:{server.port}/{name}",
            "@localhost:5432/shop": f"@127.0.0.1:{server.port}/{name}",
            "@warehouse:5432/copy": f"@127.0.0.1:{server.port}/{name}_copy",
            "DATABASE shop": f"DATABASE {name}",
            "database shop": f"database {name}",
            "webhook_url: https://hooks.example.com/orders": f"webhook_allow_private: true\nwebhook_url: {hook.url}",
            "127.0.0.1:7077": f"127.0.0.1:{(port := free_port())}",
            "--port 7077": f"--port {port}",
        }
        urls = {"source": server.url(name, "app"), "target": copy, "superuser": server.url(name)}
        env = {"PGCDC_DB": urls["source"], "PGCDC_WARM_UP": "false"}
        one = Story(tmp_path, values, urls, env)
        ending.callback(one.end)
        if "tasks/debezium.md" in story:
            with psycopg.connect(urls["source"], autocommit=True) as conn:
                for statement in BEFORE_DEBEZIUM:
                    conn.execute(statement)
        for page in story:
            one.play(DOCS / page)
    if "tasks/webhook.md" in story:
        check_requests(hook)


@contextmanager
def prepare(server: EmbeddedPostgres, name: str) -> Iterator[None]:
    """The role and the tables with which the pages begin."""
    tables = next(block for block in read_blocks(DOCS / "start/database.md") if "CREATE TABLE" in block.text)
    with psycopg.connect(server.url(), autocommit=True) as admin:
        admin.execute("CREATE ROLE app LOGIN REPLICATION PASSWORD 'password'")
        try:
            for database in (name, f"{name}_copy"):
                admin.execute(sql.SQL("ALTER DATABASE {} OWNER TO app").format(sql.Identifier(database)))
            with psycopg.connect(server.url(name, "app"), autocommit=True) as conn:
                conn.execute(tables.text.encode())
            yield
        finally:
            for database in (name, f"{name}_copy"):
                drop_database(admin, database)
                admin.execute(sql.SQL("CREATE DATABASE {} STRATEGY file_copy").format(sql.Identifier(database)))
            admin.execute("DROP ROLE IF EXISTS app, reader")


@contextmanager
def make_secure_server(folder: Path) -> Iterator[EmbeddedPostgres]:
    """With a certificate for `localhost`, whose root is in the folder. The server of other tests has no TLS."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "root.crt"))
    certificate = authority.issue_cert("localhost")
    with EmbeddedPostgres.temporary(version=15, settings={"fsync": "off"}) as server:
        owner = server.data_dir.stat()
        for name, blobs in (
            ("server.crt", certificate.cert_chain_pems),
            ("server.key", [certificate.private_key_pem]),
        ):
            path = server.data_dir / name
            path.write_bytes(b"".join(blob.bytes() for blob in blobs))
            path.chmod(0o600)
            os.chown(path, owner.st_uid, owner.st_gid)
        with psycopg.connect(server.url(), autocommit=True) as admin:
            admin.execute("ALTER SYSTEM SET ssl = on")
            admin.execute("SELECT pg_reload_conf()")
            for database in ("shop", "shop_copy"):
                admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(database)))
        yield server


def check_requests(hook: Receiver) -> None:
    """The headers on the page, and the signature."""
    shown = next(block for block in read_blocks(DOCS / "tasks/webhook.md") if block.title == "request.txt")
    names = [line.partition(":")[0] for line in shown.text.partition("\n\n")[0].splitlines()[1:]]
    for request in hook.accepted:
        assert [name for name in names if name not in request.headers] == []
        signature = hmac.new(b"change-me", request.body, hashlib.sha256).hexdigest()
        assert request.headers["X-PGCDC-Signature"] == f"sha256={signature}"
        assert request.headers["Authorization"] == "Bearer t0ken"
    assert sum("Mallory" in line for line in hook.lines) == 1


def test_readme_shows_what_the_pages_run() -> None:
    """So its commands and files are played, too."""
    known = {line for page in PAGES for block in read_blocks(DOCS / page) for line in block.text.splitlines()}
    blocks = read_blocks(DOCS.parent / "README.md")
    shown = [line for block in blocks if block.kind not in ("text", "json") for line in block.text.splitlines()]
    assert len(shown) > 20
    assert [line for line in shown if line not in known] == []
