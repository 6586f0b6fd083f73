"""Events as HTTP requests. A receiver cannot undo, so after a crash the last events are repeated with the same ids."""

from __future__ import annotations

import gzip
import hashlib
import hmac
import socket
import string
from collections.abc import Callable, Collection, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, ClassVar
from urllib.parse import quote, urlsplit

from pydantic import AfterValidator, model_validator

from pgcdc.core.counters import WEBHOOK_REQUESTS, counters
from pgcdc.core.errors import ConfigError, SinkError, SinkRejected, SinkUnavailable
from pgcdc.core.failpoint import hit
from pgcdc.core.secrets import hide, read_secret
from pgcdc.core.settings import PathText, setting
from pgcdc.sink.contract import Sink, SinkContext
from pgcdc.sink.groups import GroupSink, Record
from pgcdc.sink.http import (
    Client,
    ClientOptions,
    Headers,
    check_headers,
    check_url,
    is_public,
    is_secret_header,
    parse_headers,
    secrets_of,
)
from pgcdc.sink.spec import DeliveryOptions, UrlOptions, redact_url

LEAST_OF_URL = 8  # Shorter parts of a URL are probably plain words, as in `?v=2`
try:
    _AGENT = f"pgcdc/{version('pgcdc')}"
except PackageNotFoundError:  # run from source
    _AGENT = "pgcdc/0"
_PLAIN = "".join(one for one in string.printable[:94] if one != "%")


class WebhookOptions(ClientOptions, UrlOptions):
    """Events as HTTP requests to one URL."""

    package: ClassVar[str] = "aiohttp"
    extra: ClassVar[str] = "webhook"
    url: Annotated[str, AfterValidator(lambda url: check_url(url) if url else url)] = setting(
        "", "where to post events, https://...; if it contains a secret, better in PGCDC_WEBHOOK_URL", secret=True
    )
    headers: Headers = setting(
        {}, "additional headers: a mapping in YAML, otherwise lines of Name: value", secret=True, literal=False
    )
    headers_file: PathText | None = setting(None, "the file that contains additional headers, lines of Name: value")
    signing_key: str = setting(
        "", "key of the signature X-PGCDC-Signature; better in PGCDC_WEBHOOK_SIGNING_KEY", secret=True, literal=False
    )
    signing_key_file: PathText | None = setting(None, "the file that contains the key of the signature")
    batch_size: int = setting(1, "events per request; more than 1: as a JSON array", ge=1, le=100_000)
    gzip: bool = setting(False, "compress requests (Content-Encoding: gzip)")

    @model_validator(mode="after")
    def _check_together(self) -> WebhookOptions:
        if self.signing_key and self.signing_key_file:
            raise ValueError("signing_key and signing_key_file cannot be combined")
        if self.key_file and not self.cert_file:
            raise ValueError("key_file needs cert_file")
        return self

    def make(self) -> Sink:
        return WebhookSink(self)

    def place(self) -> str:
        return self.read_url()

    def secrets(self) -> Collection[str]:
        headers = {name: value for name, value in self.read_headers().items() if is_secret_header(name)}
        of_url = {one for one in secrets_of(self.read_url(), {}, "") if len(one) >= LEAST_OF_URL}
        return of_url | secrets_of("", headers, self.read_signing_key())

    def check(self) -> None:
        super().check()
        self.read_headers()
        self.read_signing_key()

    def check_delivery(self, delivery: DeliveryOptions) -> None:
        if self.request_timeout >= delivery.timeout:
            raise ConfigError(
                f"request_timeout is {self.request_timeout:g} s, but timeout, for a write of several "
                f"requests, is only {delivery.timeout:g} s",
                "Make request_timeout less than timeout: --webhook-request-timeout, --webhook-timeout; in a "
                "mapping of the YAML file, request_timeout and timeout",
            )

    def read_url(self) -> str:
        return _read(self.url_file, "the URL", lambda text: check_url(text.strip())) if self.url_file else self.url

    def read_signing_key(self) -> str:
        return _read(self.signing_key_file, "the key of the signature") if self.signing_key_file else self.signing_key

    def read_headers(self) -> dict[str, str]:
        """All headers of the user. Those from the file take precedence."""
        if not self.headers_file:
            return dict(self.headers)
        path = Path(self.headers_file)
        try:
            found = check_headers(parse_headers(path.read_text()))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", "It must contain headers") from None
        except ValueError as error:
            reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error
            raise ConfigError(f"{path}: {reason}", "It must contain headers, lines of Name: value") from None
        return {**self.headers, **found}


def _read(file: str, what: str, check: Callable[[str], str] = str) -> str:
    text = read_secret(Path(file), what)
    try:
        return check(text)
    except ValueError as error:
        raise ConfigError(f"{file}: {error}", f"It must contain {what}") from None


class WebhookSink(GroupSink):
    """Posts every event, or several in one request; delivered when the answer is 2xx."""

    def __init__(self, options: WebhookOptions) -> None:
        self._options, self._url = options, options.read_url()
        headers, self._key = options.read_headers(), options.read_signing_key()
        self._secrets = secrets_of(self._url, headers, self._key)
        ours = {"Content-Type": "application/json", "User-Agent": _AGENT, "Accept-Encoding": "identity"}
        if options.gzip:
            ours["Content-Encoding"] = "gzip"
        given = {name.lower() for name in headers}
        self._headers = {**{name: value for name, value in ours.items() if name.lower() not in given}, **headers}
        self._client: Client | None = None
        self.concurrency, self.group_events = options.concurrency, options.batch_size
        self.part_events = 4 * options.concurrency * options.batch_size

    def check(self, context: SinkContext) -> None:
        parts, title = urlsplit(self._url), f"adapter {context.name}"
        self._options.make_tls(self._url)
        if self._options.proxy(self._url):
            return  # the proxy resolves names
        try:
            found = socket.getaddrinfo(parts.hostname, parts.port or parts.scheme, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise SinkError(
                f"{title}: the host of {redact_url(self._url)} cannot be resolved", "Check the name in the URL"
            ) from None
        if not self._options.allow_private and not any(is_public(str(info[4][0])) for info in found):
            raise SinkError(
                f"{title}: {redact_url(self._url)} resolves to a private address",
                "Check the URL. If the receiver is inside your network, set allow_private",
            )

    async def send(self, group: Sequence[Record]) -> None:
        if self._client is None:
            self._client = Client(self._options, self._url, lambda text: hide(text, self._secrets))
        hit("webhook.before_request")
        verdict = await self._client.post(*self.make_request(group))
        counters.add(WEBHOOK_REQUESTS, adapter=self.context.name, answer=verdict.kind)
        hit("webhook.after_answer")
        if verdict.error is None:
            return
        title = f"adapter {self.context.name}: {redact_url(self._url)}"
        if verdict.error is SinkUnavailable:
            raise SinkUnavailable(
                f"{title}: {verdict.text}",
                "Is the receiver up and reachable?",
                retry_in_s=verdict.retry_in_s,
                positions=() if verdict.is_general else [record.position for record in group],
            )
        if verdict.error is SinkRejected:
            raise SinkRejected(
                f"{title} refuses an event: {verdict.text}",
                "See what the receiver says, and fix it or the event",
                kind=verdict.kind,
                text=verdict.text,
            )
        raise SinkError(f"{title}: {verdict.text}", verdict.advice)

    def make_request(self, group: Sequence[Record]) -> tuple[bytes, dict[str, str]]:
        first, options = group[0], self._options
        if options.batch_size > 1:
            body = b"[%s]" % b",".join(record.value for record in group)
            own = {"X-PGCDC-Batch-Size": str(len(group))}
        else:
            body = first.value
            own = {"X-PGCDC-Event-ID": _header(first.id), "X-PGCDC-Channel": _header(first.channel), **first.headers}
        if options.gzip:
            body = gzip.compress(body, 6, mtime=0)
        if self._key:  # of the body as it is sent
            own["X-PGCDC-Signature"] = f"sha256={hmac.new(self._key.encode(), body, hashlib.sha256).hexdigest()}"
        return body, {**self._headers, **own}

    async def disconnect(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


def _header(text: str) -> str:
    """A header-safe text: percent-encodes everything else, and % itself."""
    return text if text.isascii() and text.isprintable() and "%" not in text else quote(text, safe=_PLAIN)
