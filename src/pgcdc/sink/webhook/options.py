"""What the adapter `webhook` is told."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import BeforeValidator, WithJsonSchema, field_validator, model_validator

from pgcdc.core.errors import ConfigError
from pgcdc.core.settings import setting
from pgcdc.core.units import Seconds
from pgcdc.sink.spec import DeliveryOptions, SinkOptions

if TYPE_CHECKING:
    from pgcdc.sink.contract import Sink

__all__ = ["WebhookOptions", "is_secret_header", "parse_headers", "redact_url", "secrets_of"]

MAX_CONCURRENCY = 1024
LEAST_OF_URL = 8
"""Of a secret in a URL: a query has plain words, too, `?v=2`."""
MAX_BATCH_SIZE = 100_000
_IPV4 = re.compile(r"(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])(?:\.(?!$)|$)){4}")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e]*")
_OURS = re.compile(
    r"(?i)x-pgcdc-.*|content-(length|encoding)|transfer-encoding|connection|host|expect|te|trailer|upgrade"
)
_LONG_SEGMENT = re.compile(r"[^/]{16,}")
"""Of a path: a word that nobody can guess. Many services have the secret of a webhook there, and nowhere else."""
_SECRET_HEADER = re.compile(r"(?i)auth|cookie|token|secret|key|password|signature|credential")


def parse_headers(value: Any) -> Any:
    """A mapping in YAML; in flags, variables and files lines of `Name: value`, or a JSON object."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except ValueError:
            raise ValueError('this is no JSON object; write {"Name": "value"}, or lines of Name: value') from None
    found = {}
    for line in filter(str.strip, value.splitlines()):
        name, colon, text = line.partition(":")
        if not colon:
            raise ValueError("a header has no colon; write Name: value, one in each line")
        found[name.strip()] = text.strip()
    return found


Headers = Annotated[
    dict[str, str],
    BeforeValidator(parse_headers),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object", "additionalProperties": {"type": "string"}}]}),
]


class WebhookOptions(SinkOptions):
    """Events as HTTP requests to one URL."""

    url: str = setting(
        "", "where events are posted to, https://...; one with a secret better in PGCDC_WEBHOOK_URL", secret=True
    )
    url_file: str | None = setting(None, "the file that holds the URL, instead of url")
    headers: Headers = setting(
        {}, "more headers, a mapping in YAML, else lines of Name: value", secret=True, literal=False
    )
    headers_file: str | None = setting(None, "the file with more headers, lines of Name: value")
    signing_key: str = setting(
        "", "key of the signature X-PGCDC-Signature, better in PGCDC_WEBHOOK_SIGNING_KEY", secret=True, literal=False
    )
    signing_key_file: str | None = setting(None, "the file that holds the key of the signature")
    batch_size: int = setting(1, "events in a request; more than 1: as a JSON array", ge=1, le=MAX_BATCH_SIZE)
    concurrency: int = setting(
        8, "requests at the same time; events of one key stay in order", ge=1, le=MAX_CONCURRENCY
    )
    request_timeout: Seconds = setting(10.0, "time for one request and its answer", gt=0)
    gzip: bool = setting(False, "compress requests (Content-Encoding: gzip)")
    allow_private: bool = setting(False, "also private, loopback and link-local addresses, and those of cloud metadata")
    proxy_from_env: bool = setting(False, "use the proxy of HTTPS_PROXY, HTTP_PROXY and NO_PROXY")
    ca_file: str | None = setting(None, "certificates that are trusted, instead of the system's")
    cert_file: str | None = setting(None, "our own certificate, for servers that ask for one")
    key_file: str | None = setting(None, "the key of cert_file, if it is not in it")

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        return check_url(url) if url else url

    @field_validator("headers")
    @classmethod
    def _check_headers(cls, headers: dict[str, str]) -> dict[str, str]:
        return check_headers(headers)

    @model_validator(mode="after")
    def _check_together(self) -> WebhookOptions:
        if bool(self.url) == bool(self.url_file):
            raise ValueError("url or url_file is needed" if not self.url else "url and url_file are both given")
        if self.signing_key and self.signing_key_file:
            raise ValueError("signing_key and signing_key_file are both given")
        if self.key_file and not self.cert_file:
            raise ValueError("key_file is given without cert_file")
        return self

    def make(self) -> Sink:
        from pgcdc.sink.webhook.sink import WebhookSink

        return WebhookSink(self)

    def place(self) -> str:
        return self.read_url()

    def secrets(self) -> Collection[str]:
        headers = {name: value for name, value in self.read_headers().items() if is_secret_header(name)}
        of_url = {one for one in secrets_of(self.read_url(), {}, "") if len(one) >= LEAST_OF_URL}
        words = {*headers.values(), *(value.rpartition(" ")[2] for value in headers.values())}
        return of_url | words | {self.read_signing_key()}

    def check(self) -> None:
        if importlib.util.find_spec("aiohttp") is None:
            raise ConfigError("the adapter webhook needs the package aiohttp", "Run: pip install 'pgcdc[webhook]'")
        self.read_url()
        self.read_headers()
        self.read_signing_key()

    def check_delivery(self, delivery: DeliveryOptions) -> None:
        if self.request_timeout >= delivery.timeout:
            raise ConfigError(
                f"request_timeout is {self.request_timeout:g} s, and a write of several requests has "
                f"{delivery.timeout:g} s (timeout): it would never be given up by itself",
                "Make request_timeout less than timeout: --webhook-request-timeout, --webhook-timeout; in a mapping of the "
                "YAML file, request_timeout and timeout",
            )

    def read_url(self) -> str:
        """The URL, from where it is said to be. ConfigError: the file cannot be read, or has none."""
        if not self.url_file:
            return self.url
        return self._read(self.url_file, "the URL", lambda text: check_url(text.strip()))

    def read_signing_key(self) -> str:
        """The key of the signature; empty: none."""
        if not self.signing_key_file:
            return self.signing_key
        return self._read(self.signing_key_file, "the key of the signature", str)

    def read_headers(self) -> dict[str, str]:
        """All headers that the user wants; those of the file win."""
        if not self.headers_file:
            return dict(self.headers)
        path = Path(self.headers_file)
        try:
            found = check_headers(parse_headers(path.read_text()))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", "It is to hold headers") from None
        except ValueError as error:
            reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error
            raise ConfigError(f"{path}: {reason}", "It is to hold headers, lines of Name: value") from None
        return {**self.headers, **found}

    def _read(self, file: str, what: str, check: Any) -> str:
        from pgcdc.core.secrets import read_secret

        text = read_secret(Path(file), what)
        try:
            return str(check(text))
        except ValueError as error:
            raise ConfigError(f"{file}: {error}", f"It is to hold {what}") from None


def check_url(url: str) -> str:
    """The URL. ValueError: it is none that can be used; the text says nothing of what may be secret in it."""
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError:
        raise ValueError("this is no URL; write https://host/path") from None
    if parts.scheme not in ("http", "https") or not host or port == 0 or re.search(r"[\s\x00-\x1f\x7f]", url):
        raise ValueError("this is no URL of a webhook; write https://host/path")
    if re.search(r"(^|\.)(0x[0-9a-f]*|[0-9]+)\.?$", host) and ":" not in host and not _IPV4.fullmatch(host):
        raise ValueError("this is an address in a strange form; write it with four numbers")
    if parts.username is not None or parts.password is not None:
        raise ValueError("user and password stand in the URL; put them into headers, as Authorization")
    if parts.fragment:
        raise ValueError("a URL of a webhook has no #; leave it out, or write %23")
    return url


def check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers. ValueError: one that cannot be sent, or is ours; values are not told."""
    for name, value in headers.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r:.60} is no name of a header")
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            raise ValueError(f"the value of the header {name} cannot be sent")
        if _OURS.fullmatch(name):
            raise ValueError(f"the header {name} is set by pgcdc")
    return dict(headers)


def is_secret_header(name: str) -> bool:
    """Whether the value of a header with this name is likely a secret."""
    return bool(_SECRET_HEADER.search(name))


def redact_url(url: str) -> str:
    """A URL as it may be shown: neither user nor query nor long words of the path, which may be secret."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "***"
    host = f"[{host}]" if ":" in host else host
    path = _LONG_SEGMENT.sub("***", parts.path)
    return f"{parts.scheme}://{host}{port}{path}" + ("?***" if parts.query else "")


def secrets_of(url: str, headers: Mapping[str, str], signing_key: str) -> set[str]:
    """Texts that must not be seen in any message."""
    parts = urlsplit(url)
    query, words = parts.query, _LONG_SEGMENT.findall(parts.path)
    found = {url, query, unquote(query), signing_key, *(value for _, value in parse_qsl(query))}
    found.update(words, map(unquote, words))
    for value in headers.values():
        found |= {value, value.rpartition(" ")[2]}  # also without its `Bearer`
    return found - {""}
