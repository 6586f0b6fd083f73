# made by tools/adapter_reference.py from the options of adapters: change those, and run it again
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict, Unpack

from pgcdc.sink.spec import AdapterSpec, Priority

class Delivery(TypedDict, total=False):
    max_retries: int
    backoff_base: float | str
    backoff_cap: float | str
    timeout: float | str
    cb_max_failures: int
    cb_reset: float | str
    rate_limit: float
    rate_limit_burst: int
    on_exhausted: Literal["wait", "dead_letter"]
    dead_letter_limit: int

def exec(
    command: str | Sequence[str] = ...,
    *,
    argv: str | Sequence[str] = ...,
    ack: Literal["exit", "line", "write"] = ...,
    keep_env: str | Sequence[str] = ...,
    name: str = ...,
    transforms: Sequence[Any] = ...,
    routes: str | Sequence[str] = ...,
    priority: Priority = ...,
    **delivery: Unpack[Delivery],
) -> AdapterSpec:
    """JSON lines to the standard input of a command."""

def file(
    path: str | PathLike[str],
    *,
    max_size: int | str = ...,
    max_files: int = ...,
    compress: Literal["none", "gzip", "zstd"] = ...,
    name: str = ...,
    transforms: Sequence[Any] = ...,
    routes: str | Sequence[str] = ...,
    priority: Priority = ...,
    **delivery: Unpack[Delivery],
) -> AdapterSpec:
    """JSON lines in a file, or in part files in a folder."""

def noop(
    *,
    name: str = ...,
    transforms: Sequence[Any] = ...,
    routes: str | Sequence[str] = ...,
    priority: Priority = ...,
    **delivery: Unpack[Delivery],
) -> AdapterSpec:
    """Takes everything and keeps nothing: for measurements, and for a look at what a pipeline costs."""

def pg_table(
    db: str = ...,
    *,
    db_file: str | None = ...,
    mode: Literal["append", "apply"] = ...,
    table: str = ...,
    target_schema: str | None = ...,
    tables: str | Sequence[str] = ...,
    create: bool = ...,
    evolve: Literal["full", "add", "none"] = ...,
    origin: str = ...,
    triggers: Literal["off", "on"] = ...,
    name: str = ...,
    transforms: Sequence[Any] = ...,
    routes: str | Sequence[str] = ...,
    priority: Priority = ...,
    **delivery: Unpack[Delivery],
) -> AdapterSpec:
    """Events as rows of a table in PostgreSQL, or applied to tables like those of the source."""

def redis(
    url: str = ...,
    *,
    url_file: str | PathLike[str] | None = ...,
    mode: Literal["invalidate", "sync"],
    id_column: str = ...,
    key_prefix: str = ...,
    name: str = ...,
    transforms: Sequence[Any] = ...,
    routes: str | Sequence[str] = ...,
    priority: Priority = ...,
    **delivery: Unpack[Delivery],
) -> AdapterSpec:
    """Rows as keys of Redis or Valkey: deleted when they change, or kept as JSON."""

def stdout(
    format: Literal["auto", "json", "pretty"] = ...,
    *,
    name: str = ...,
    transforms: Sequence[Any] = ...,
    routes: str | Sequence[str] = ...,
    priority: Priority = ...,
    **delivery: Unpack[Delivery],
) -> AdapterSpec:
    """Events on standard output, for programs or for people."""

def webhook(
    url: str = ...,
    *,
    url_file: str | PathLike[str] | None = ...,
    headers: str | Mapping[str, str] = ...,
    headers_file: str | PathLike[str] | None = ...,
    signing_key: str = ...,
    signing_key_file: str | PathLike[str] | None = ...,
    batch_size: int = ...,
    concurrency: int = ...,
    request_timeout: float | str = ...,
    gzip: bool = ...,
    allow_private: bool = ...,
    proxy_from_env: bool = ...,
    ca_file: str | PathLike[str] | None = ...,
    cert_file: str | PathLike[str] | None = ...,
    key_file: str | PathLike[str] | None = ...,
    name: str = ...,
    transforms: Sequence[Any] = ...,
    routes: str | Sequence[str] = ...,
    priority: Priority = ...,
    **delivery: Unpack[Delivery],
) -> AdapterSpec:
    """Events as HTTP requests to one URL."""

def __getattr__(name: str) -> Callable[..., AdapterSpec]: ...
