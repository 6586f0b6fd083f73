"""Adapters for pipelines in Python: each function says where events go, and what is done to them on the way.

    from pgcdc import adapters
    adapters.file("audit.jsonl", name="audit", routes=["orders"], priority="best-effort")

What is the same for all: `name` (two adapters of a type need one), `transforms` of its own behind those of the pipeline,
`routes` (channel patterns; none: everything), `priority`, and the settings of `DeliveryOptions` by their names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal

from pgcdc.config.fields import ADAPTER_NAME
from pgcdc.core.errors import ConfigError
from pgcdc.core.settings import make_options
from pgcdc.sink.exec.options import AckMode, ExecOptions
from pgcdc.sink.pg_table.options import PgTableOptions
from pgcdc.sink.registry import ADAPTERS
from pgcdc.sink.spec import AdapterSpec, DeliveryOptions, FileOptions, NoopOptions, Priority, SinkOptions, StdoutOptions
from pgcdc.sink.webhook.options import WebhookOptions

__all__ = ["exec", "file", "noop", "pg_table", "stdout", "webhook"]

_ADVICE = "See the documentation of the adapter"


def stdout(
    *,
    name: str = "stdout",
    format: Literal["auto", "json", "pretty"] = "auto",
    transforms: Sequence[Any] = (),
    routes: Sequence[str] = (),
    priority: Priority = "normal",
    **delivery: Any,
) -> AdapterSpec:
    """JSON lines on standard output; on a terminal a form for people, unless `format` says otherwise."""
    return _spec("stdout", name, StdoutOptions, {"format": format}, transforms, routes, priority, delivery)


def file(
    path: str | PathLike[str],
    *,
    name: str = "file",
    max_size: int | str = 0,
    max_files: int = 0,
    compress: Literal["none", "gzip", "zstd"] = "none",
    transforms: Sequence[Any] = (),
    routes: Sequence[str] = (),
    priority: Priority = "normal",
    **delivery: Any,
) -> AdapterSpec:
    """JSON lines in a file, or in the files of a folder (`path` ends with a slash, or is one).

    A file that would grow larger than `max_size` ("100MB") is rotated, and maybe compressed. All rotated files are kept,
    unless `max_files` says how many.
    """
    options = {"path": os.fspath(path), "max_size": max_size, "max_files": max_files, "compress": compress}
    return _spec("file", name, FileOptions, options, transforms, routes, priority, delivery)


def exec(
    command: str | Sequence[str] = "",
    *,
    argv: Sequence[str] = (),
    name: str = "exec",
    ack: AckMode = "exit",
    keep_env: Sequence[str] = (),
    transforms: Sequence[Any] = (),
    routes: Sequence[str] = (),
    priority: Priority = "normal",
    **delivery: Any,
) -> AdapterSpec:
    """JSON lines to the standard input of a command: a text for a shell, or a list of the command and its arguments."""
    text, words = (command, argv) if isinstance(command, str) else ("", (*command, *argv))
    values = {"command": text, "argv": words, "ack": ack, "keep_env": tuple(keep_env)}
    return _spec("exec", name, ExecOptions, values, transforms, routes, priority, delivery)


def noop(
    *,
    name: str = "noop",
    transforms: Sequence[Any] = (),
    routes: Sequence[str] = (),
    priority: Priority = "normal",
    **delivery: Any,
) -> AdapterSpec:
    """Takes everything and keeps nothing: to measure what the rest costs."""
    return _spec("noop", name, NoopOptions, {}, transforms, routes, priority, delivery)


def pg_table(
    db: str = "",
    *,
    name: str = "pg_table",
    mode: Literal["append", "apply"] = "append",
    transforms: Sequence[Any] = (),
    routes: Sequence[str] = (),
    priority: Priority = "normal",
    **more: Any,
) -> AdapterSpec:
    """Rows in PostgreSQL: a row per event, or (`mode="apply"`) the tables of the source, kept equal.

    Without `db` it is the source's database. `more` are the other options of pg_table, and those of `DeliveryOptions`.
    """
    options = {key: value for key, value in more.items() if key in PgTableOptions.model_fields}
    delivery = {key: value for key, value in more.items() if key not in options}
    values = {"db": db, "mode": mode, **options}
    return _spec("pg_table", name, PgTableOptions, values, transforms, routes, priority, delivery)


def webhook(
    url: str = "",
    *,
    name: str = "webhook",
    url_file: str | PathLike[str] | None = None,
    headers: Mapping[str, str] = {},
    headers_file: str | PathLike[str] | None = None,
    signing_key: str = "",
    signing_key_file: str | PathLike[str] | None = None,
    batch_size: int = 1,
    concurrency: int = 8,
    request_timeout: float = 10.0,
    gzip: bool = False,
    allow_private: bool = False,
    proxy_from_env: bool = False,
    ca_file: str | PathLike[str] | None = None,
    cert_file: str | PathLike[str] | None = None,
    key_file: str | PathLike[str] | None = None,
    transforms: Sequence[Any] = (),
    routes: Sequence[str] = (),
    priority: Priority = "normal",
    **delivery: Any,
) -> AdapterSpec:
    """HTTP requests to a URL: one event in each, or arrays of up to `batch_size`."""
    files = {
        "url_file": url_file, "headers_file": headers_file, "signing_key_file": signing_key_file, "ca_file": ca_file,
        "cert_file": cert_file, "key_file": key_file,
    }  # fmt: skip
    options = {
        "url": url, "headers": dict(headers), "signing_key": signing_key, "batch_size": batch_size,
        "concurrency": concurrency, "request_timeout": request_timeout, "gzip": gzip, "allow_private": allow_private,
        "proxy_from_env": proxy_from_env, **{key: os.fspath(path) for key, path in files.items() if path is not None},
    }  # fmt: skip
    return _spec("webhook", name, WebhookOptions, options, transforms, routes, priority, delivery)


def _spec(
    kind: str,
    name: str,
    model: type[SinkOptions],
    options: Mapping[str, Any],
    transforms: Sequence[Any],
    routes: Sequence[str],
    priority: Priority,
    delivery: Mapping[str, Any],
) -> AdapterSpec:
    if not re.fullmatch(ADAPTER_NAME, name) or name == "main":
        raise ConfigError(f"{name!r} is no name for an adapter", "Use letters, digits, _ and -, and not main")
    if priority not in ("critical", "normal", "best-effort"):
        raise ConfigError(f"adapter {name}: priority {priority!r} is not known", "critical, normal or best-effort")
    return AdapterSpec(
        name,
        kind,
        make_options(model, options, f"adapter {name}", _ADVICE),
        make_options(DeliveryOptions, delivery, f"adapter {name}", _ADVICE),
        tuple(transforms),
        (routes,) if isinstance(routes, str) else tuple(routes),
        priority,
    )


def __getattr__(name: str) -> Callable[..., AdapterSpec]:
    """The function of an adapter that another package has added: its options are keywords, like everything else."""
    if name.startswith("_") or name not in ADAPTERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    kind = name
    model = ADAPTERS.find(kind)

    def make(
        *,
        name: str = kind,
        transforms: Sequence[Any] = (),
        routes: Sequence[str] = (),
        priority: Priority = "normal",
        **more: Any,
    ) -> AdapterSpec:
        options = {key: value for key, value in more.items() if key in model.model_fields}
        delivery = {key: value for key, value in more.items() if key not in options}
        return _spec(kind, name, model, options, transforms, routes, priority, delivery)

    make.__name__, make.__doc__ = kind, model.__doc__
    return make
