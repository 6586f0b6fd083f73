"""What an answer means: delivered, refused, later, or stop."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum

__all__ = ["Answer", "Means", "Verdict", "judge", "parse_retry_after"]

MAX_RETRY_S = 3600.0
TEXT_CHARS = 200
_LATER = {408, 425, 429}
_BUSY = {429, 503}
"""Statuses that say nothing of the event: the receiver takes none now."""
_STOP = {
    401: "it does not accept our credentials. Check the headers (Authorization) and the signing key",
    405: "it takes no POST. Check the URL",
    407: "the proxy wants credentials. Check the proxy, or leave proxy_from_env out",
    410: "it is gone for good. Give the URL of the receiver that took its place, or remove the adapter",
}
"""Statuses that concern every event."""


class Means(Enum):
    """What becomes of the events of a request."""

    DELIVERED = "delivered"
    REFUSED = "refused"
    LATER = "later"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Answer:
    """As much of an answer as is looked at."""

    status: int
    body: bytes = b""
    retry_after: str = ""
    location: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of the events, and why."""

    means: Means
    kind: str = ""
    text: str = ""
    advice: str = ""
    retry_in_s: float = 0.0
    is_general: bool = False
    """Of LATER: any other event would have got it, too."""


def judge(answer: Answer, scrub: Callable[[str], str], now: datetime | None = None) -> Verdict:
    """The verdict on an answer. `scrub` takes secrets out of a text."""
    status = answer.status
    if 200 <= status < 300:
        return Verdict(Means.DELIVERED)
    said = shorten(answer.body.decode(errors="replace"), scrub)
    text = f"answer {status}" + (f": {said}" if said else "")
    kind = f"http_{status}"
    if status in _LATER or status >= 500:
        wait_s = parse_retry_after(answer.retry_after, now)
        return Verdict(Means.LATER, kind, text, retry_in_s=wait_s, is_general=status in _BUSY)
    if 300 <= status < 400:
        where = shorten(answer.location.partition("?")[0], scrub)
        advice = "Redirects are not followed, since they may lead anywhere. Give the URL of the receiver itself"
        return Verdict(Means.STOP, kind, f"answer {status}, a redirect" + (f" to {where}" if where else ""), advice)
    if status in _STOP:
        reason, _, advice = _STOP[status].partition(". ")
        return Verdict(Means.STOP, kind, f"{text} ({reason})", advice)
    if status < 200:
        return Verdict(Means.LATER, kind, text)
    return Verdict(Means.REFUSED, kind, text)


def shorten(text: str, scrub: Callable[[str], str]) -> str:
    """What a stranger said, in one line without secrets."""
    plain = re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", scrub(text)).strip()
    return plain if len(plain) <= TEXT_CHARS else f"{plain[:TEXT_CHARS]}..."


def parse_retry_after(text: str, now: datetime | None = None) -> float:
    """Seconds that Retry-After asks for, by a number or a date; 0 if it says nothing that can be understood."""
    text = text.strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return min(float(text), MAX_RETRY_S)
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError):
        return 0.0
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return min(max(0.0, (moment - (now or datetime.now(UTC))).total_seconds()), MAX_RETRY_S)
