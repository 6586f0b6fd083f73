"""Events as HTTP requests. A receiver cannot take back: after a crash the last events come again, with their ids."""

from __future__ import annotations

import gzip
import hashlib
import hmac
import socket
import string
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from urllib.parse import quote, urlsplit

from pgcdc.core.counters import WEBHOOK_REQUESTS, counters
from pgcdc.core.errors import SinkError, SinkRejected, SinkUnavailable
from pgcdc.core.failpoint import hit
from pgcdc.core.secrets import hide
from pgcdc.sink.contract import SinkContext
from pgcdc.sink.groups import GroupSink, Record
from pgcdc.sink.http import redact_url, secrets_of
from pgcdc.sink.webhook.client import Client, Means, is_public, make_tls, proxy_of
from pgcdc.sink.webhook.options import WebhookOptions

_PLAIN = "".join(one for one in string.printable[:94] if one != "%")


class WebhookSink(GroupSink):
    """Posts every event, or several in one request, and counts it as delivered when the answer is 2xx."""

    def __init__(self, options: WebhookOptions) -> None:
        self._options, self._url = options, options.read_url()
        headers, key = options.read_headers(), options.read_signing_key()
        self._secrets = secrets_of(self._url, headers, key)
        self._requests = Requests(headers, key, is_batched=options.batch_size > 1, is_zipped=options.gzip)
        self._client: Client | None = None
        self.concurrency, self.group_events = options.concurrency, options.batch_size
        self.part_events = 4 * options.concurrency * options.batch_size

    def check(self, context: SinkContext) -> None:
        parts, title = urlsplit(self._url), f"adapter {context.name}"
        if parts.scheme == "https":
            make_tls(self._options)
        if self._options.proxy_from_env and proxy_of(self._url):
            return  # it is the proxy that resolves names
        try:
            found = socket.getaddrinfo(parts.hostname, parts.port or parts.scheme, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise SinkError(
                f"{title}: the host of {redact_url(self._url)} cannot be resolved", "Check the name in the URL"
            ) from None
        if not self._options.allow_private and not any(is_public(str(info[4][0])) for info in found):
            raise SinkError(
                f"{title}: {redact_url(self._url)} leads to a private address",
                "Check the URL. If the receiver is inside of your network, say so: allow_private",
            )

    async def send(self, group: Sequence[Record]) -> None:
        if self._client is None:
            self._client = Client(self._options, self._url, lambda text: hide(text, self._secrets))
        hit("webhook.before_request")
        verdict = await self._client.post(*self._requests.make(group))
        counters.add(WEBHOOK_REQUESTS, adapter=self.context.name, answer=verdict.kind)
        hit("webhook.after_answer")
        title = f"adapter {self.context.name}: {redact_url(self._url)}"
        if verdict.means is Means.STOP:
            raise SinkError(f"{title}: {verdict.text}", verdict.advice)
        if verdict.means is Means.REFUSED:
            raise SinkRejected(
                f"{title} refuses an event: {verdict.text}",
                "Look at what the receiver says, put it or the event right",
                kind=verdict.kind,
                text=verdict.text,
            )
        if verdict.means is Means.LATER:
            positions = () if verdict.is_general else [record.position for record in group]
            raise SinkUnavailable(
                f"{title}: {verdict.text}",
                "Is the receiver up and reachable?",
                retry_in_s=verdict.retry_in_s,
                positions=positions,
            )

    async def disconnect(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


class Requests:
    """Makes the requests: body, signature and headers of one event or several."""

    def __init__(self, headers: Mapping[str, str], signing_key: str, *, is_batched: bool, is_zipped: bool) -> None:
        self._key, self._is_batched, self._is_zipped = signing_key, is_batched, is_zipped
        try:
            number = version("pgcdc")
        except PackageNotFoundError:  # used from its source
            number = "0"
        ours = {"Content-Type": "application/json", "User-Agent": f"pgcdc/{number}", "Accept-Encoding": "identity"}
        if is_zipped:
            ours["Content-Encoding"] = "gzip"
        given = {name.lower() for name in headers}
        self._common = {**{name: value for name, value in ours.items() if name.lower() not in given}, **headers}

    def make(self, group: Sequence[Record]) -> tuple[bytes, dict[str, str]]:
        """Body and headers."""
        first = group[0]
        if self._is_batched:
            body = b"[%s]" % b",".join(record.value for record in group)
            own = {"X-PGCDC-Batch-Size": str(len(group))}
        else:
            body = first.value
            own = {"X-PGCDC-Event-ID": _header(first.id), "X-PGCDC-Channel": _header(first.channel), **first.headers}
        if self._is_zipped:
            body = gzip.compress(body, 6, mtime=0)
        if self._key:  # of the body as it is sent
            own["X-PGCDC-Signature"] = f"sha256={hmac.new(self._key.encode(), body, hashlib.sha256).hexdigest()}"
        return body, {**self._common, **own}


def _header(text: str) -> str:
    """What a header can carry: everything else is percent-encoded, and % itself."""
    return text if text.isascii() and text.isprintable() and "%" not in text else quote(text, safe=_PLAIN)
