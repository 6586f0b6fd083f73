"""What is secret in this process: the commands of adapters must not find it in their environment.

One set for the whole process, as there is one environment. It is asked when a command starts, so that what became known
after its sink was made counts, too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pgcdc.core.errors import PgcdcError
from pgcdc.postgres.database import parse_url
from pgcdc.sink.pg_table.options import PgTableOptions
from pgcdc.sink.webhook.options import WebhookOptions, is_secret_header, secrets_of

if TYPE_CHECKING:
    from pgcdc.config.model import Config
    from pgcdc.sink.spec import AdapterSpec

__all__ = ["keep_secrets", "known_secrets"]

LEAST_OF_URL = 8
"""A query has plain words, too: `?v=2`."""
_known: set[str] = set()


def known_secrets() -> frozenset[str]:
    """All that this process was told."""
    return frozenset(_known)


def keep_secrets(config: Config | None, specs: Sequence[AdapterSpec], transforms: Iterable[Any] = ()) -> None:
    """Remember the secrets of a configuration and of adapters; those in files are read, where they can be."""
    if config is not None:
        _known.update(_passwords(config.db), _passwords(config.dlq_db))
    for spec in specs:
        with contextlib.suppress(PgcdcError):  # which is told elsewhere
            _known.update(_of_options(spec.options))
    for one in (*transforms, *(one for spec in specs for one in spec.transforms)):
        name = getattr(getattr(one, "spec", one), "key_env", None)
        if name and os.environ.get(name):
            _known.add(os.environ[name])


def _of_options(options: Any) -> set[str]:
    if isinstance(options, PgTableOptions):
        return _passwords(options.resolved().db)
    if isinstance(options, WebhookOptions):
        headers = {name: value for name, value in options.read_headers().items() if is_secret_header(name)}
        of_url = {one for one in secrets_of(options.read_url(), {}, "") if len(one) >= LEAST_OF_URL}
        return (
            of_url
            | {*headers.values(), *(value.rpartition(" ")[2] for value in headers.values())}
            | {options.read_signing_key()}
        )
    return set()


def _passwords(url: str | None) -> set[str]:
    with contextlib.suppress(PgcdcError):
        return {str(value) for key, value in parse_url(url or "").items() if "password" in key and value}
    return set()
