"""Events as HTTP requests. A receiver cannot take back: after a crash the last events come again, with their ids.

What of a batch was delivered is remembered until the ack has passed it, so that another try sends only the rest.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from pgcdc.core.counters import WEBHOOK_REQUESTS, counters
from pgcdc.core.errors import SinkError, SinkRejected, SinkUnavailable
from pgcdc.core.failpoint import hit
from pgcdc.core.secrets import hide
from pgcdc.event.batch import Batch
from pgcdc.sink.contract import Sink, SinkContext
from pgcdc.sink.webhook.address import is_public
from pgcdc.sink.webhook.answer import Verdict
from pgcdc.sink.webhook.client import Client, make_tls, proxy_of
from pgcdc.sink.webhook.events import Event, ShapeKeys, read_events
from pgcdc.sink.webhook.options import WebhookOptions, redact_url, secrets_of
from pgcdc.sink.webhook.request import Requests
from pgcdc.sink.webhook.round import Round

__all__ = ["WebhookSink"]


class WebhookSink(Sink):
    """Posts every event, or several in one request, and counts it as delivered when the answer is 2xx."""

    def __init__(self, options: WebhookOptions) -> None:
        self._options = options
        self._keys = ShapeKeys()
        self._url = options.read_url()
        headers, key = options.read_headers(), options.read_signing_key()
        self._secrets = secrets_of(self._url, headers, key)
        self._requests = Requests(headers, key, is_batched=options.batch_size > 1, is_zipped=options.gzip)
        self._is_known = False
        """The history of shapes was read."""
        self._client: Client | None = None
        self.part_events = 4 * options.concurrency * options.batch_size

    @property
    def shown(self) -> str:
        """The URL, without what may be secret in it."""
        return redact_url(self._url)

    def check(self, context: SinkContext) -> None:
        parts = urlsplit(self._url)
        if parts.scheme == "https":
            make_tls(self._options)
        if self._options.proxy_from_env and proxy_of(self._url):
            return  # it is the proxy that resolves names
        try:
            found = socket.getaddrinfo(parts.hostname, parts.port or parts.scheme, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise SinkError(
                f"adapter {context.name}: the host of {self.shown} cannot be resolved", "Check the name in the URL"
            ) from None
        if not self._options.allow_private and not any(is_public(str(info[4][0])) for info in found):
            raise SinkError(
                f"adapter {context.name}: {self.shown} leads to a private address",
                "Check the URL. If the receiver is inside of your network, say so: allow_private",
            )

    def open(self, context: SinkContext) -> None:
        self._context = context
        if self._client is None:
            self._client = Client(self._options, self._url, context.name, self._scrub)
            self._client.start()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def write(self, batch: Batch) -> None:
        """Also of dead letters: none is left out, since only the receiver knows what it has."""
        events = self._read(batch)
        if not events:
            return
        assert self._client is not None, "open() comes first"
        one = Round(self._post, self._options.concurrency, self._options.batch_size, self._context.delivered)
        self._client.run(one.run(events))
        self._tell(one)

    # --- one round

    def _read(self, batch: Batch) -> list[Event]:
        shapes = self._context.shapes
        if shapes.refresh() or not self._is_known:
            self._keys.set(shapes.changes)
            self._is_known = True
        return read_events(batch.positions().to_pylist(), batch.events.column("line").to_pylist(), self._keys)

    async def _post(self, events: Sequence[Event]) -> Verdict:
        assert self._client is not None
        hit("webhook.before_request")
        verdict = await self._client.post(*self._requests.make(events))
        counters.add(WEBHOOK_REQUESTS, adapter=self._context.name, answer=verdict.kind or "ok")
        hit("webhook.after_answer")
        return verdict

    def _tell(self, one: Round) -> None:
        """Raise what the round has come to: what concerns all first, then what is refused for ever."""
        if one.stop is not None:
            raise SinkError(f"adapter {self._context.name}: {self.shown}: {one.stop.text}", one.stop.advice)
        if one.rejects:
            first, more = one.rejects[0], len(one.rejects) - 1
            raise SinkRejected(
                f"adapter {self._context.name}: {self.shown} refuses the event at {first.position}"
                f"{f' and {more} others' if more else ''}: {first.text}",
                "Look at what the receiver says, put it or the event right",
                one.rejects,
            )
        if one.later is not None:
            raise SinkUnavailable(
                f"adapter {self._context.name}: {self.shown}: {one.later.text}",
                "Is the receiver up and reachable?",
                retry_in_s=one.later.retry_in_s,
                positions=() if one.is_general else one.failed,
            )

    def _scrub(self, text: str) -> str:
        return hide(text, self._secrets)
