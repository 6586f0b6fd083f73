"""A receiver for the adapter `webhook`: checks the signature, takes every event once, and says what it will never take.

    SIGNING_KEY=change-me python examples/webhook_receiver.py 8080

    PGCDC_WEBHOOK_SIGNING_KEY=change-me pgcdc listen --tables orders --adapter webhook \\
        --webhook-url http://127.0.0.1:8080/hook --webhook-allow-private

Only the standard library. What matters:

1. The signature is over the bytes of the body as they came: check it before anything else is done with them.
2. An event may come twice, with the same id. Remember ids, and the effect of an event, in one transaction; here: SQLite.
3. Answer 2xx only when the event is durable. 5xx means "later", 4xx means "never": such an event becomes a dead letter.
"""

from __future__ import annotations

import gzip
import hashlib
import hmac
import json
import os
import sqlite3
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MAX_BODY = 16 << 20


class Inbox:
    """Events by their ids, durable when `take` returns."""

    def __init__(self, path: str | Path) -> None:
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, check_same_thread=False)
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("CREATE TABLE IF NOT EXISTS events (id TEXT PRIMARY KEY, channel TEXT, event TEXT)")

    def take(self, events: list[dict]) -> int:  # type: ignore[type-arg]
        """Keep the events that are new; how many they were. All of a request, or none."""
        rows = [(event["id"], event["channel"], json.dumps(event)) for event in events]
        with self._lock, self._db:
            before = self._db.total_changes
            self._db.executemany("INSERT OR IGNORE INTO events VALUES (?, ?, ?)", rows)
            return self._db.total_changes - before


def is_genuine(body: bytes, signature: str, key: str) -> bool:
    """Whether who sent this knows the key. Compared in constant time."""
    expected = "sha256=" + hmac.new(key.encode(), body, hashlib.sha256).hexdigest()
    return hmac.compare_digest(expected.encode(), signature.encode())


def make_server(port: int, key: str, inbox: Inbox) -> ThreadingHTTPServer:
    """A server on this port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length", 0))
            if size > MAX_BODY:
                self.close_connection = True
                return self.answer(413)
            body = self.rfile.read(size)
            if not is_genuine(body, self.headers.get("X-PGCDC-Signature", ""), key):
                return self.answer(401)
            try:
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                content = json.loads(body)
                events = content if isinstance(content, list) else [content]
                new = inbox.take(events)
            except (ValueError, KeyError, TypeError):
                return self.answer(400)  # never
            except sqlite3.Error:
                return self.answer(503)  # later
            print(f"{len(events)} events, {new} new", flush=True)
            return self.answer(204)

        def answer(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    server = make_server(int(sys.argv[1]), os.environ["SIGNING_KEY"], Inbox("inbox.db"))
    print(f"listening on http://127.0.0.1:{server.server_address[1]}/", flush=True)
    server.serve_forever()
