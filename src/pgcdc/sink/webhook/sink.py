"""Events as HTTP requests. A receiver cannot take back: after a crash the last events come again, with their ids.

What of a batch was delivered is remembered until the ack has passed it, so that another try sends only the rest.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from pgcdc.core.counters import WEBHOOK_REQUESTS, counters
from pgcdc.core.errors import PgcdcError, SinkError, SinkRejected, SinkUnavailable, StateError
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.shapes import ShapeHistory
from pgcdc.core.state import StateDir
from pgcdc.sink.ack import AckFile
from pgcdc.sink.base import Batch
from pgcdc.sink.webhook.address import is_public
from pgcdc.sink.webhook.answer import Verdict
from pgcdc.sink.webhook.client import Client, make_tls, proxy_of
from pgcdc.sink.webhook.events import Event, Place, ShapeKeys, read_events
from pgcdc.sink.webhook.options import WebhookOptions, redact_url, secrets_of
from pgcdc.sink.webhook.request import Requests
from pgcdc.sink.webhook.round import Round

__all__ = ["WebhookSink"]

PART_OF_TIMEOUT = 0.25
"""How much of the time for one write a part of a batch is to take, by how fast the last one was."""
MAX_PART = 50_000


class WebhookSink:
    """Posts every event, or several in one request, and counts it as delivered when the answer is 2xx."""

    def __init__(
        self, options: WebhookOptions, acks: Path, name: str = "webhook", write_timeout_s: float = 30.0
    ) -> None:
        self.name = name
        self._options = options
        self._ack = AckFile(acks, name)
        self._shapes = ShapeHistory(StateDir(acks.parent).shapes_file)
        self._keys = ShapeKeys()
        self._url = options.read_url()
        headers, key = options.read_headers(), options.read_signing_key()
        self._secrets = secrets_of(self._url, headers, key)
        self._requests = Requests(headers, key, is_batched=options.batch_size > 1, is_zipped=options.gzip)
        self._client: Client | None = None
        self._delivered: set[Place] = set()
        """What the receiver has behind the ack."""
        self._again: set[Place] = set()
        """What it has of redeliveries that were interrupted."""
        self._part_s = write_timeout_s * PART_OF_TIMEOUT
        self._part = 4 * options.concurrency * options.batch_size

    @property
    def ack(self) -> Position:
        assert self._ack.position is not None
        return self._ack.position

    @property
    def shown(self) -> str:
        """The URL, without what may be secret in it."""
        return redact_url(self._url)

    def check(self) -> None:
        parts = urlsplit(self._url)
        if parts.scheme == "https":
            make_tls(self._options)
        if self._options.proxy_from_env and proxy_of(self._url):
            return  # it is the proxy that resolves names
        try:
            found = socket.getaddrinfo(parts.hostname, parts.port or parts.scheme, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise SinkError(
                f"adapter {self.name}: the host of {self.shown} cannot be resolved", "Check the name in the URL"
            ) from None
        if not self._options.allow_private and not any(is_public(str(info[4][0])) for info in found):
            raise SinkError(
                f"adapter {self.name}: {self.shown} leads to a private address",
                "Check the URL. If the receiver is inside of your network, say so: allow_private",
            )

    def open(self, start: Position) -> None:
        if self._client is None:
            self._client = Client(self._options, self._url, self.name, self._scrub)
            self._client.start()
        if self._ack.position is None:
            self._save(start)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def write(self, batch: Batch) -> None:
        if batch.end <= self.ack:
            return
        batch = batch.after(self.ack)
        events = self._read(batch)
        began, sent = time.monotonic(), len(self._delivered)
        try:
            self._send(events, self._delivered)
        except SinkError:
            self._save_prefix(events)
            raise
        self._learn(len(self._delivered) - sent, time.monotonic() - began)
        hit("webhook.before_ack")
        self._save(batch.end)

    def redeliver(self, batch: Batch) -> Collection[str]:
        """Post events of the past again. None is left out: only the receiver knows what it has."""
        events = self._read(batch)
        self._send(events, self._again)
        self._again.difference_update(event.place for event in events)
        return ()

    def first_part(self, batch: Batch) -> Batch:
        """As much of a batch as is likely done in good time: `sink/delivery.py` gives it in such parts."""
        return batch.first(self._part)

    # --- one round

    def _read(self, batch: Batch) -> list[Event]:
        if self._shapes.refresh():
            self._keys.set(self._shapes.changes)
        return read_events(
            batch.events.column("position").to_pylist(), batch.events.column("line").to_pylist(), self._keys
        )

    def _send(self, events: Sequence[Event], delivered: set[Place]) -> None:
        left = [event for event in events if event.place not in delivered]
        if not left:
            return
        assert self._client is not None, "open() comes first"
        one = Round(self._post, self._options.concurrency, self._options.batch_size, delivered)
        self._client.run(one.run(left))
        self._tell(one)

    async def _post(self, events: Sequence[Event]) -> Verdict:
        assert self._client is not None
        hit("webhook.before_request")
        verdict = await self._client.post(*self._requests.make(events))
        counters.add(WEBHOOK_REQUESTS, adapter=self.name, answer=verdict.kind or "ok")
        hit("webhook.after_answer")
        return verdict

    def _tell(self, one: Round) -> None:
        """Raise what the round has come to: what concerns all first, then what is refused for ever."""
        if one.stop is not None:
            raise SinkError(f"adapter {self.name}: {self.shown}: {one.stop.text}", one.stop.advice)
        if one.rejects:
            first, more = one.rejects[0], len(one.rejects) - 1
            raise SinkRejected(
                f"adapter {self.name}: {self.shown} refuses the event at {first.position}"
                f"{f' and {more} others' if more else ''}: {first.text}",
                "Look at what the receiver says, put it or the event right",
                one.rejects,
            )
        if one.later is not None:
            error = SinkUnavailable(
                f"adapter {self.name}: {self.shown}: {one.later.text}", "Is the receiver up and reachable?"
            )
            error.retry_in_s = one.later.retry_in_s
            error.positions = () if one.is_general else tuple(one.failed)
            raise error

    def _scrub(self, text: str) -> str:
        from pgcdc.core.secrets import hide

        return hide(text, self._secrets)

    # --- the ack

    def _save(self, position: Position) -> None:
        try:
            self._ack.save(position, {})
        except StateError as error:
            raise SinkUnavailable(error.message, error.advice) from error
        self._delivered = {place for place in self._delivered if place[0] > str(position)}

    def _save_prefix(self, events: Sequence[Event]) -> None:
        """Move the ack as far as everything is delivered: after a crash that much less comes again."""
        missing = next((event.position for event in events if event.place not in self._delivered), None)
        done = [event.position for event in events if missing is None or event.position < missing]
        if done:
            with contextlib.suppress(PgcdcError):  # the error that is on its way says more
                self._save(Position.parse(done[-1]))

    def _learn(self, events: int, seconds: float) -> None:
        if events:
            rate = events / max(seconds, 1e-3)
            floor = self._options.concurrency * self._options.batch_size
            self._part = min(max(floor, int(rate * self._part_s)), 4 * self._part, MAX_PART)
