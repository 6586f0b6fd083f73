"""The requests: body, signature and headers of one event or several."""

from __future__ import annotations

import gzip
import hashlib
import hmac
import string
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from urllib.parse import quote

from pgcdc.sink.webhook.events import Event

__all__ = ["Requests", "sign"]

_PLAIN = "".join(one for one in string.printable[:94] if one != "%")


def sign(body: bytes, key: str) -> str:
    """The value of X-PGCDC-Signature: HMAC-SHA256 of the body as it is sent."""
    return f"sha256={hmac.new(key.encode(), body, hashlib.sha256).hexdigest()}"


class Requests:
    """Makes them all, the same way."""

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

    def make(self, events: Sequence[Event]) -> tuple[bytes, dict[str, str]]:
        """Body and headers."""
        body = b"[%s]" % b",".join(event.body for event in events) if self._is_batched else events[0].body
        if self._is_zipped:
            body = gzip.compress(body, 6, mtime=0)
        if self._is_batched:
            headers = {**self._common, "X-PGCDC-Batch-Size": str(len(events))}
        else:
            event = events[0]
            headers = {
                **self._common,
                "X-PGCDC-Event-ID": _header(event.id),
                "X-PGCDC-Channel": _header(event.channel),
                **event.trace,
            }
        if self._key:
            headers["X-PGCDC-Signature"] = sign(body, self._key)
        return body, headers


def _header(text: str) -> str:
    """What a header can carry: everything else is percent-encoded, and % itself."""
    return text if text.isascii() and text.isprintable() and "%" not in text else quote(text, safe=_PLAIN)
