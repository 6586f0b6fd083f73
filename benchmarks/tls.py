"""A server that speaks TLS, with a certificate of our own making."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
from backlog import Unavailable
from psycopg import sql
from workload import connect

from pgcdc.playground.postgres import Account, make_scratch_dir

__all__ = ["describe_tls", "tls_enabled", "with_tls"]

RELOAD_S = 10.0


@contextlib.contextmanager
def tls_enabled(url: str) -> Iterator[None]:
    """The running server accepts TLS until the context ends. Unavailable if it was built without."""
    with connect(url) as conn, _certificate() as settings:
        library = conn.execute("SHOW ssl_library").fetchone()
        if library is None or not library[0]:
            raise Unavailable(f"PostgreSQL {conn.info.server_version // 10_000} here is built without TLS")
        for name, value in settings.items():
            conn.execute(sql.SQL("ALTER SYSTEM SET {} = {}").format(sql.Identifier(name), sql.Literal(value)))
        conn.execute("SELECT pg_reload_conf()")
        _wait_for_tls(url)
        try:
            yield
        finally:
            for name in settings:
                conn.execute(sql.SQL("ALTER SYSTEM RESET {}").format(sql.Identifier(name)))
            conn.execute("SELECT pg_reload_conf()")


@contextlib.contextmanager
def _certificate() -> Iterator[dict[str, str]]:
    """The server settings for a new key and certificate, which are removed at the end."""
    if shutil.which("openssl") is None:
        raise Unavailable("there is no openssl on the PATH to make a certificate with")
    account = Account.current()
    folder = make_scratch_dir(account)
    key, cert = folder / "server.key", folder / "server.crt"
    try:
        command: list[str | Path] = ["openssl", "req", "-x509", "-nodes", "-newkey", "rsa:2048", "-days", "1"]
        command += ["-subj", "/CN=127.0.0.1", "-keyout", key, "-out", cert]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"openssl made no certificate: {done.stderr.strip()}")
        for path in (key, cert):
            path.chmod(0o600)
            account.own(path)
        yield {"ssl_cert_file": str(cert), "ssl_key_file": str(key), "ssl": "on"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_tls(url: str) -> None:
    """The server takes a moment to read its settings again."""
    deadline = time.monotonic() + RELOAD_S
    while True:
        try:
            connect(with_tls(url)).close()
            return
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def with_tls(url: str) -> str:
    """The same server, and only by TLS."""
    return f"{url}?sslmode=require"


def describe_tls(url: str) -> str:
    """Version and cipher that a connection gets."""
    with connect(with_tls(url)) as conn:
        row = conn.execute("SELECT version, cipher FROM pg_stat_ssl WHERE pid = pg_backend_pid() AND ssl").fetchone()
    if row is None:
        raise RuntimeError("the connection does not use TLS")
    return f"{row[0]}, {row[1]}"
