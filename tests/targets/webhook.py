"""A webhook: a real HTTP server that remembers what it got."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from receivers import How, Receiver, Request, answer, receiver

from pgcdc.core.position import Position
from pgcdc.core.relation import Column, Relation, ShapeChange, append_shapes
from targets.base import BaseTarget
from targets.events import event, position_of, to_line

ITEMS = Relation(
    16400, "public", "items", "d",
    (Column("id", 20, -1, True), Column("position", 25, -1, False), Column("text", 25, -1, False)),
)  # fmt: skip
_BAD = "never taken"


class WebhookTarget(BaseTarget):
    """One event in each request, several requests at a time."""

    is_reference = True
    type, repeats, before_ack, large = "webhook", True, "sink.before_ack", 400
    kill_points = ("webhook.before_request", "webhook.after_answer", "sink.before_ack")
    can_break, secret = True, "s3cr3t-in-query"
    batch_size = 1

    def __init__(self, folder: Path) -> None:
        self.acks = folder / "acks"
        self.acks.mkdir()
        append_shapes(folder / "shapes.jsonl", [ShapeChange(Position.at(101, 0), ITEMS)])
        self._stack = contextlib.ExitStack()
        self.receiver: Receiver = self._stack.enter_context(receiver())
        self.receiver.how = self._answer
        self._takes_bad = False
        self._limit: float = math.inf

    def _answer(self, request: Request) -> How | None:
        is_bad = not self._takes_bad and any(one["payload"]["row"].get("text") == _BAD for one in request.events)
        if is_bad:
            return answer(422, b"this text is never taken")
        is_over = self._limit < math.inf and len(self.receiver.lines) >= self._limit
        return answer(503) if is_over else None

    def options(self) -> Mapping[str, Any]:
        return {
            "url": self.receiver.url,
            "allow_private": True,
            "batch_size": self.batch_size,
            "headers": {"Authorization": f"Bearer {self.secret}"},
            "signing_key": self.secret,
        }

    def lines(self) -> list[str]:
        return sorted(self.receiver.lines, key=position_of)

    def arrived(self) -> list[str]:
        return self.receiver.lines

    def expect_many(self) -> None:
        """In large requests: the receiver of tests is slow."""
        self.batch_size = 500

    def break_target(self) -> None:
        self.receiver.is_broken = True

    def break_after(self, events: int) -> None:
        self._limit = events

    def heal_target(self) -> None:
        self._limit = math.inf
        self.receiver.is_broken = False

    def bad_line(self, position: Position) -> str | None:
        return to_line(event(position, text=_BAD))

    def accept_bad(self) -> None:
        self._takes_bad = True

    def wrong_options(self) -> Sequence[tuple[Mapping[str, Any], str]]:
        url = "https://example.com/hook"
        return [
            ({}, "url or url_file is required"),
            ({"url": "example.com"}, "not the URL of a webhook"),
            ({"url": "https://user:pw@example.com/"}, "Authorization"),
            ({"url": url, "batch_size": 0}, "batch_size"),
            ({"url": url, "headers": {"X-PGCDC-Event-ID": "1"}}, "set by pgcdc"),
            ({"url": url, "signing_key_file": str(self.acks / "missing")}, "cannot be read"),
            ({"url": url, "colour": "red"}, "unknown key colour"),
            ({"url": "http://127.0.0.1:1/"}, "private address"),
            ({"url": url, "ca_file": str(self.acks / "missing")}, "cannot be used for TLS"),
        ]

    def close(self) -> None:
        self._stack.close()


class BatchedWebhook(WebhookTarget):
    """Up to three events in a request."""

    batch_size, is_reference = 3, False


TARGETS = {"webhook": WebhookTarget, "webhook_batched": BatchedWebhook}
