"""The options of the adapter `webhook`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import AfterValidator, model_validator

from pgcdc.core.errors import ConfigError
from pgcdc.core.secrets import read_secret
from pgcdc.core.settings import PathText, Seconds, setting
from pgcdc.sink.http import Headers, check_headers, check_url, is_secret_header, parse_headers, secrets_of
from pgcdc.sink.spec import DeliveryOptions, UrlOptions

if TYPE_CHECKING:
    from pgcdc.sink.contract import Sink

LEAST_OF_URL = 8
"""Of a secret in a URL: a query has plain words, too, `?v=2`."""


class WebhookOptions(UrlOptions):
    """Events as HTTP requests to one URL."""

    package: ClassVar[str] = "aiohttp"
    extra: ClassVar[str] = "webhook"
    url: Annotated[str, AfterValidator(lambda url: check_url(url) if url else url)] = setting(
        "", "where events are posted to, https://...; one with a secret better in PGCDC_WEBHOOK_URL", secret=True
    )
    headers: Headers = setting(
        {}, "more headers, a mapping in YAML, else lines of Name: value", secret=True, literal=False
    )
    headers_file: PathText | None = setting(None, "the file with more headers, lines of Name: value")
    signing_key: str = setting(
        "", "key of the signature X-PGCDC-Signature, better in PGCDC_WEBHOOK_SIGNING_KEY", secret=True, literal=False
    )
    signing_key_file: PathText | None = setting(None, "the file that holds the key of the signature")
    batch_size: int = setting(1, "events in a request; more than 1: as a JSON array", ge=1, le=100_000)
    concurrency: int = setting(8, "requests at the same time; events of one key stay in order", ge=1, le=1024)
    request_timeout: Seconds = setting(10.0, "time for one request and its answer", gt=0)
    gzip: bool = setting(False, "compress requests (Content-Encoding: gzip)")
    allow_private: bool = setting(False, "also private, loopback and link-local addresses, and those of cloud metadata")
    proxy_from_env: bool = setting(False, "use the proxy of HTTPS_PROXY, HTTP_PROXY and NO_PROXY")
    ca_file: PathText | None = setting(None, "certificates that are trusted, instead of the system's")
    cert_file: PathText | None = setting(None, "our own certificate, for servers that ask for one")
    key_file: PathText | None = setting(None, "the key of cert_file, if it is not in it")

    @model_validator(mode="after")
    def _check_together(self) -> WebhookOptions:
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
        super().check()
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
        return _read(self.url_file, "the URL", lambda text: check_url(text.strip())) if self.url_file else self.url

    def read_signing_key(self) -> str:
        """The key of the signature; empty: none."""
        return _read(self.signing_key_file, "the key of the signature") if self.signing_key_file else self.signing_key

    def read_headers(self) -> dict[str, str]:
        """All headers that the user wants; those of the file win."""
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
