"""The HTTP client: aiohttp on a loop in a thread of its own. Decision 0018 says why this one.

No redirects, no cookies, no proxy and no .netrc that nobody asked for; certificates are checked; of an answer no more is
read than an error message needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

from pgcdc.core.errors import SinkError
from pgcdc.sink.webhook.address import AddressRefused, guarded_socket
from pgcdc.sink.webhook.answer import Answer, Means, Verdict, judge, shorten
from pgcdc.sink.webhook.options import WebhookOptions

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Client", "make_tls", "proxy_of"]

BODY_BYTES = 4096
BODY_S = 1.0
"""How long the rest of an answer is waited for: what counts is its status."""
CLOSED = "closed"
"""The kind of an answer that never came, because the connection ended."""
KEEP_ALIVE_S = 4.0
"""Less than the 5 s after which many servers close a connection: a POST must not meet that."""

_T = TypeVar("_T")


class Client:
    """Posts to one URL. `start` before, `close` behind; `post` runs on the loop."""

    def __init__(self, options: WebhookOptions, url: str, name: str, scrub: Callable[[str], str]) -> None:
        self._options, self._url, self._name, self._scrub = options, url, name, scrub
        self._tls = make_tls(options) if url.startswith("https:") else None
        self._proxy = proxy_of(url) if options.proxy_from_env else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._session: aiohttp.ClientSession | None = None

    def start(self) -> None:
        """Start the loop; nothing is connected yet."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name=f"webhook-{self._name}", daemon=True)
            self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the loop, and wait for it."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Close connections and end the loop."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        with contextlib.suppress(Exception):
            self.run(self._close_session())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        if not thread.is_alive():
            loop.close()
        self._loop = self._thread = None

    async def _close_session(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open_session(self) -> aiohttp.ClientSession:
        import aiohttp

        options = self._options
        is_guarded = not (options.allow_private or self._proxy)  # behind a proxy, it is the proxy that connects
        connector = aiohttp.TCPConnector(
            limit=options.concurrency,
            ssl=self._tls if self._tls is not None else True,
            keepalive_timeout=KEEP_ALIVE_S,
            socket_factory=guarded_socket if is_guarded else None,
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=options.request_timeout),
            auto_decompress=False,
            trust_env=False,
        )

    async def post(self, body: bytes, headers: Mapping[str, str]) -> Verdict:
        """What became of one request. The server may close a kept connection just when we use it: that is tried again."""
        verdict = await self._post(body, headers)
        return await self._post(body, headers) if verdict.kind == CLOSED else verdict

    async def _post(self, body: bytes, headers: Mapping[str, str]) -> Verdict:
        import aiohttp

        if self._session is None:
            self._session = self._open_session()
        try:
            async with self._session.post(
                self._url, data=body, headers=headers, allow_redirects=False, proxy=self._proxy
            ) as response:
                answer = Answer(
                    response.status,
                    await _read_some(response),
                    response.headers.get("Retry-After", ""),
                    response.headers.get("Location", ""),
                )
            return judge(answer, self._scrub)
        except TimeoutError:
            return Verdict(Means.LATER, "timeout", f"no answer within {self._options.request_timeout:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return self._judge_error(error)

    def _judge_error(self, error: Exception) -> Verdict:
        import aiohttp

        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            reason = getattr(error.certificate_error, "verify_message", "") or "it cannot be verified"
            return Verdict(
                Means.STOP,
                "certificate",
                f"the certificate is not valid: {shorten(reason, self._scrub)}",
                "Renew it, or name the certificates to trust with ca_file",
            )
        if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, AddressRefused):
            return Verdict(
                Means.STOP,
                "private_address",
                "it leads to a private address",
                "Check where the name leads to. If the receiver is inside of your network: allow_private",
            )
        if isinstance(error, aiohttp.ClientConnectorDNSError):
            return Verdict(Means.LATER, "dns", "the name of the host cannot be resolved", is_general=True)
        if isinstance(error, aiohttp.ClientHttpProxyError):
            return Verdict(Means.LATER, "proxy", f"the proxy answers {error.status}", is_general=True)
        if isinstance(error, aiohttp.ClientResponseError):
            return Verdict(Means.LATER, "no_http", f"the answer is not HTTP: {shorten(error.message, self._scrub)}")
        if isinstance(error, aiohttp.InvalidURL):
            return Verdict(Means.STOP, "url", "this is no URL that can be used", "Correct it")
        if isinstance(error, aiohttp.ClientConnectorError):
            number = error.os_error.errno
            said = os.strerror(number) if number else str(error.os_error)
            said = f"no connection: {shorten(said, self._scrub)}"
            return Verdict(Means.LATER, "network", said, is_general=True)
        if isinstance(error, (aiohttp.ServerDisconnectedError, OSError)):
            return Verdict(Means.LATER, CLOSED, "the connection was closed before there was an answer")
        return Verdict(Means.LATER, "network", type(error).__name__)


async def _read_some(response: aiohttp.ClientResponse) -> bytes:
    """The beginning of the body. The connection is used again only if that was all."""
    import aiohttp

    data, is_whole = b"", False
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(BODY_S):
            while len(data) <= BODY_BYTES:
                piece = await response.content.readany()
                if not piece:
                    is_whole = True
                    break
                data += piece
    if not is_whole:
        response.close()
    return data[:BODY_BYTES]


def make_tls(options: WebhookOptions) -> ssl.SSLContext:
    """How servers are verified. SinkError: a file of it cannot be used."""
    file = options.ca_file
    try:
        context = ssl.create_default_context(cafile=options.ca_file)
        if options.cert_file:
            file = options.cert_file
            context.load_cert_chain(options.cert_file, options.key_file, password=_refuse_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = error.strerror if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) else ""
        raise SinkError(
            f"{file} cannot be used for TLS{f': {reason}' if reason else ''}",
            "It is to hold certificates (or a key without a password) in the form PEM",
        ) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _refuse_password() -> str:
    raise ValueError("the key has a password")  # else OpenSSL would ask at the terminal


def proxy_of(url: str) -> str | None:
    """The proxy that the environment has for a URL."""
    parts = urlsplit(url)
    if proxy_bypass_environment(parts.netloc):
        return None
    proxies = getproxies_environment()
    return proxies.get(parts.scheme) or proxies.get("all")
