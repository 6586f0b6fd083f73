"""What adapters that speak HTTP share: URLs and headers as options, and how they are shown without secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

_IPV4 = re.compile(r"(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])(?:\.(?!$)|$)){4}")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e]*")
_OURS = re.compile(
    r"(?i)x-pgcdc-.*|content-(length|encoding)|transfer-encoding|connection|host|expect|te|trailer|upgrade"
)
LONG_SEGMENT = re.compile(r"[^/]{16,}")
"""Of a path: a word that nobody can guess. Many services have the secret of a webhook there, and nowhere else."""
_SECRET_HEADER = re.compile(r"(?i)auth|cookie|token|secret|key|password|signature|credential")


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


def redact_url(url: str) -> str:
    """A URL as it may be shown: neither user nor query nor long words of the path, which may be secret."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", f":{parts.port}" if parts.port else ""
    except ValueError:
        return "***"
    host = f"[{host}]" if ":" in host else host
    path = LONG_SEGMENT.sub("***", parts.path)
    return f"{parts.scheme}://{host}{port}{path}" + ("?***" if parts.query else "")


def secrets_of(url: str, headers: Mapping[str, str], signing_key: str) -> set[str]:
    """Texts that must not be seen in any message."""
    parts = urlsplit(url)
    query, words = parts.query, LONG_SEGMENT.findall(parts.path)
    found = {url, query, unquote(query), signing_key, *(value for _, value in parse_qsl(query))}
    found.update(words, map(unquote, words))
    for value in headers.values():
        found |= {value, value.rpartition(" ")[2]}  # also without its `Bearer`
    return found - {""}


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


Headers = Annotated[
    dict[str, str],
    BeforeValidator(parse_headers),
    AfterValidator(check_headers),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object", "additionalProperties": {"type": "string"}}]}),
]
