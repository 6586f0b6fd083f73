"""Shared by the HTTP adapters: URLs and headers as options, and a client. Decision 0018 explains why aiohttp.

The client follows no redirects and keeps no cookies. It uses a proxy or .netrc only on request, and checks
certificates. It reads only as much of an answer as an error message needs. It checks addresses when connecting rather
than when resolving, so a name server gains nothing by changing its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import re
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qsl, unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

from pgcdc.core.errors import SinkError, SinkRejected, SinkUnavailable
from pgcdc.core.settings import Options, PathText, Seconds, setting
from pgcdc.sink.spec import LONG_SEGMENT

if TYPE_CHECKING:
    import aiohttp

BODY_BYTES = 4096
BODY_S = 1.0  # How long to wait for the rest of an answer: only its status matters
CLOSED = "closed"  # The kind of a missing answer when the connection ended
KEEP_ALIVE_S = 4.0  # Many servers close a connection after 5 s: a POST must not run into that
MAX_RETRY_S = 3600.0
TEXT_CHARS = 200
_IPV4 = re.compile(r"(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])(?:\.(?!$)|$)){4}")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e]*")
_OURS = re.compile(
    r"(?i)x-pgcdc-.*|content-(length|encoding)|transfer-encoding|connection|host|expect|te|trailer|upgrade"
)
_SECRET_HEADER = re.compile(r"(?i)auth|cookie|token|secret|key|password|signature|credential")
_LATER = {408, 425, 429}
_BUSY = {429, 503}  # Statuses that are not about the event: the receiver is busy
_STOP = {
    401: ("it does not accept our credentials", "Check the headers (Authorization) and the signing key"),
    405: ("it does not accept POST", "Check the URL"),
    407: ("the proxy requires credentials", "Check the proxy, or remove proxy_from_env"),
    410: (
        "it is permanently gone",
        "Set the URL of the receiver that replaced it, or remove the adapter",
    ),
}
"""Statuses that apply to every event."""

Scrub = Callable[[str], str]  # Removes secrets from a text


def check_url(url: str) -> str:
    """Check a URL and return it. ValueError: it is unusable; the message reveals nothing that may be secret."""
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError:
        raise ValueError("this is not a URL; write https://host/path") from None
    if parts.scheme not in ("http", "https") or not host or port == 0 or re.search(r"[\s\x00-\x1f\x7f]", url):
        raise ValueError("this is not the URL of a webhook; write https://host/path")
    if re.search(r"(^|\.)(0x[0-9a-f]*|[0-9]+)\.?$", host) and ":" not in host and not _IPV4.fullmatch(host):
        raise ValueError("this address has an unusual form; write it as four numbers")
    if parts.username is not None or parts.password is not None:
        raise ValueError("the URL contains user and password; put them into headers, as Authorization")
    if parts.fragment:
        raise ValueError("the URL of a webhook cannot contain #; remove it, or write %23")
    return url


def secrets_of(url: str, headers: Mapping[str, str], signing_key: str) -> set[str]:
    parts = urlsplit(url)
    query, words = parts.query, LONG_SEGMENT.findall(parts.path)
    found = {url, query, unquote(query), signing_key, *(value for _, value in parse_qsl(query))}
    found.update(words, map(unquote, words))
    for value in headers.values():
        found |= {value, value.rpartition(" ")[2]}  # also without its `Bearer`
    return found - {""}


def parse_headers(value: Any) -> Any:
    """Accepts a mapping (YAML), or a text (flags, variables, files): lines of `Name: value`, or a JSON object."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except ValueError:
            raise ValueError('this is not a JSON object; write {"Name": "value"}, or lines of Name: value') from None
    found = {}
    for line in filter(str.strip, value.splitlines()):
        name, colon, text = line.partition(":")
        if not colon:
            raise ValueError("a header has no colon; write Name: value, one per line")
        found[name.strip()] = text.strip()
    return found


def check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Check headers and return them. ValueError: one cannot be sent, or is ours; its value is not shown."""
    for name, value in headers.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r:.60} is not a valid header name")
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            raise ValueError(f"the value of the header {name} cannot be sent")
        if _OURS.fullmatch(name):
            raise ValueError(f"the header {name} is set by pgcdc")
    return dict(headers)


def is_secret_header(name: str) -> bool:
    """Whether a header with this name probably holds a secret."""
    return bool(_SECRET_HEADER.search(name))


Headers = Annotated[
    dict[str, str],
    BeforeValidator(parse_headers),
    AfterValidator(check_headers),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object", "additionalProperties": {"type": "string"}}]}),
]


class ClientOptions(Options):
    """How requests are made."""

    concurrency: int = setting(8, "concurrent requests; events of one key stay in order", ge=1, le=1024)
    request_timeout: Seconds = setting(10.0, "time limit for one request and its answer", gt=0)
    allow_private: bool = setting(
        False, "allow private, loopback and link-local addresses, and those of cloud metadata"
    )
    proxy_from_env: bool = setting(False, "use the proxy of HTTPS_PROXY, HTTP_PROXY and NO_PROXY")
    ca_file: PathText | None = setting(None, "certificates to trust, instead of the system's")
    cert_file: PathText | None = setting(None, "our own certificate, for servers that require one")
    key_file: PathText | None = setting(None, "the key of cert_file, if that file does not contain it")

    def make_tls(self, url: str) -> ssl.SSLContext | None:
        """The TLS settings for a URL's server. SinkError: one of the files is unusable."""
        if not url.startswith("https:"):
            return None
        file = self.ca_file
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file:
                file = self.cert_file
                context.load_cert_chain(self.cert_file, self.key_file, password=_refuse_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = error.strerror if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) else ""
            raise SinkError(
                f"{file} cannot be used for TLS{f': {reason}' if reason else ''}",
                "It must contain certificates (or a key without a password) in PEM form",
            ) from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context

    def proxy(self, url: str) -> str | None:
        """The environment's proxy for a URL, if enabled."""
        parts = urlsplit(url)
        if not self.proxy_from_env or proxy_bypass_environment(parts.netloc):
            return None
        proxies = getproxies_environment()
        return proxies.get(parts.scheme) or proxies.get("all")


def _refuse_password() -> str:
    raise ValueError("the key has a password")  # otherwise OpenSSL would ask at the terminal


# --- responses


@dataclass(frozen=True, slots=True)
class Verdict:
    """What happens to the events of a request, and why."""

    error: type[SinkError] | None = None  # None: delivered. SinkError: all others would get the same answer
    kind: str = "ok"
    text: str = ""
    advice: str = ""
    retry_in_s: float = 0.0
    is_general: bool = False  # For SinkUnavailable: any other event would have failed too


def judge(status: int, headers: Mapping[str, str], body: bytes, scrub: Scrub, now: datetime | None = None) -> Verdict:
    if 200 <= status < 300:
        return Verdict()
    said = shorten(body.decode(errors="replace"), scrub)
    text, kind = f"answer {status}" + (f": {said}" if said else ""), f"http_{status}"
    if status < 200 or status in _LATER or status >= 500:
        wait_s = parse_retry_after(headers.get("Retry-After", ""), now)
        return Verdict(SinkUnavailable, kind, text, retry_in_s=wait_s, is_general=status in _BUSY)
    if status < 400:
        where = shorten(headers.get("Location", "").partition("?")[0], scrub)
        advice = "Redirects are not followed. Set the URL of the final receiver"
        return Verdict(SinkError, kind, f"answer {status}, a redirect" + (f" to {where}" if where else ""), advice)
    if status in _STOP:
        reason, advice = _STOP[status]
        return Verdict(SinkError, kind, f"{text} ({reason})", advice)
    return Verdict(SinkRejected, kind, text)


def shorten(text: str, scrub: Scrub) -> str:
    """Text from outside, on one line and without secrets."""
    plain = re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", scrub(text)).strip()
    return plain if len(plain) <= TEXT_CHARS else f"{plain[:TEXT_CHARS]}..."


def parse_retry_after(text: str, now: datetime | None = None) -> float:
    """The seconds of a Retry-After header, which holds a number or a date; 0 if invalid."""
    text = text.strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return min(float(text), MAX_RETRY_S)
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError):
        return 0.0
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return min(max(0.0, (moment - (now or datetime.now(UTC))).total_seconds()), MAX_RETRY_S)


class Client:
    """Posts to one URL, on the caller's event loop."""

    def __init__(self, options: ClientOptions, url: str, scrub: Scrub) -> None:
        self._options, self._url, self._scrub = options, url, scrub
        self._tls, self._proxy = options.make_tls(url), options.proxy(url)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open_session(self) -> aiohttp.ClientSession:
        import aiohttp

        is_guarded = not (self._options.allow_private or self._proxy)  # a proxy connects on its own
        connector = aiohttp.TCPConnector(
            limit=self._options.concurrency,
            ssl=self._tls or True,
            keepalive_timeout=KEEP_ALIVE_S,
            socket_factory=_guarded_socket if is_guarded else None,
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=self._options.request_timeout),
            auto_decompress=False,
            trust_env=False,
        )

    async def post(self, body: bytes, headers: Mapping[str, str]) -> Verdict:
        """Send one request and return the outcome. Retries if the server closes a kept connection just as we use it."""
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
                return judge(response.status, response.headers, await _read_some(response), self._scrub)
        except TimeoutError:
            return Verdict(SinkUnavailable, "timeout", f"no answer within {self._options.request_timeout:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return self._judge_error(error)

    def _judge_error(self, error: Exception) -> Verdict:
        import aiohttp

        def later(kind: str, text: str, *, is_general: bool = False) -> Verdict:
            return Verdict(SinkUnavailable, kind, text, is_general=is_general)

        reason: Any = getattr(error, "os_error", None)
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            said = getattr(error.certificate_error, "verify_message", "it cannot be verified")
            text = f"the certificate is not valid: {shorten(said, self._scrub)}"
            return Verdict(SinkError, "certificate", text, "Renew it, or name the certificates to trust with ca_file")
        if isinstance(reason, AddressRefused):
            advice = "Check where the name leads. If the receiver is inside your network, set allow_private"
            return Verdict(SinkError, "private_address", "the host resolves to a private address", advice)
        if isinstance(error, aiohttp.InvalidURL):
            return Verdict(SinkError, "url", "this URL cannot be used", "Correct the URL")
        if isinstance(error, aiohttp.ClientConnectorDNSError):
            return later("dns", "the host name cannot be resolved", is_general=True)
        if isinstance(error, aiohttp.ClientHttpProxyError):
            return later("proxy", f"the proxy answers {error.status}", is_general=True)
        if isinstance(error, aiohttp.ClientResponseError):
            return later("no_http", f"the answer is not HTTP: {shorten(error.message, self._scrub)}")
        if isinstance(error, aiohttp.ClientConnectorError):
            said = shorten(os.strerror(reason.errno) if reason.errno else str(reason), self._scrub)
            return later("network", f"no connection: {said}", is_general=True)
        if isinstance(error, (aiohttp.ServerDisconnectedError, OSError)):
            return later(CLOSED, "the connection was closed before the answer")
        return later("network", type(error).__name__)


async def _read_some(response: aiohttp.ClientResponse) -> bytes:
    """Read the start of the body. The connection is only reused if that was everything."""
    import aiohttp

    data, is_whole = b"", False
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(BODY_S):
            while len(data) <= BODY_BYTES and not is_whole:
                piece = await response.content.readany()
                data, is_whole = data + piece, not piece
    if not is_whole:
        response.close()
    return data[:BODY_BYTES]


# --- addresses inside networks, where requests to a stranger's URL must not go

_NEVER = [
    ipaddress.ip_network(text)
    for text in (
        "168.63.129.16/32",  # Azure's own services: a public address, but internal
        "192.0.0.0/24",  # of protocols, and a cloud's metadata; older Python versions know part of it
        "192.88.99.0/24",  # 6to4 relays
        "::/96",  # IPv4 in its oldest IPv6 form
        "64:ff9b:1::/48",  # translation inside networks
        "fec0::/10",  # site-local, now deprecated
    )
]
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class AddressRefused(OSError):
    """Raised instead of connecting. The text is always the same, so that several addresses of a name produce one
    message."""

    def __init__(self) -> None:
        super().__init__("the address is private")


def is_public(text: str) -> bool:
    """Whether an address is on the public internet."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if any(address in network for network in _NEVER):
        return False
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if address.teredo is not None:
            return False
        if inner is not None:
            return is_public(str(inner))
    return address.is_global and not address.is_multicast and not address.is_reserved


def _guarded_socket(info: tuple[Any, ...]) -> socket.socket:
    """Create a socket for this address (from `getaddrinfo`). AddressRefused: the address is not public."""
    family, kind, protocol, _, address = info
    if not is_public(str(address[0])):
        raise AddressRefused
    return socket.socket(family, kind, protocol)
