"""One adapter's configuration from flags, YAML or Python; how to display it; and the registry of types.

Adapter types are entry points of the group `pgcdc.sinks`, ours and those of other packages. An entry point names a
type's options (`SinkOptions`), which create its sink. Types are loaded on demand. A type that breaks the contract is
refused with its name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, model_validator

from pgcdc.core.errors import ConfigError, PgcdcError
from pgcdc.core.secrets import literal_part, read_secret, redact_text, remember_secrets
from pgcdc.core.settings import Options, PathText, Seconds, setting, setting_of, suggest
from pgcdc.postgres.database import url_passwords

if TYPE_CHECKING:
    from pgcdc.core.relation import Relation
    from pgcdc.event.forms import Form
    from pgcdc.sink.contract import Sink

GROUP = "pgcdc.sinks"
LONG_SEGMENT = re.compile(r"[^/]{16,}")
"""A part of a path that nobody can guess. Many services put a webhook's secret only there."""
Priority = Literal["critical", "normal", "best-effort"]


class DeliveryOptions(Options):
    """Delivery settings that every adapter accepts: `<adapter>_<field>` in the configuration."""

    max_retries: int = setting(5, "retries before the adapter counts as failed", ge=0)
    backoff_base: Seconds = setting(0.1, "each pause is random between 0 and base * 2^retries", gt=0)
    backoff_cap: Seconds = setting(30.0, "the longest pause", gt=0)
    timeout: Seconds = setting(30.0, "time limit for one write", gt=0)
    cb_max_failures: int = setting(
        5, "failures in a row that open the circuit breaker; 0: never", ge=0, aliases=("cb_failures",)
    )
    cb_reset: Seconds = setting(60.0, "time until an open circuit breaker allows one attempt", gt=0)
    rate_limit: float = setting(0.0, "events per second; 0: no limit", ge=0)
    rate_limit_burst: int = setting(0, "events at once; 0: those of one second", ge=0, aliases=("rate_burst",))
    on_exhausted: Literal["wait", "dead_letter"] = setting(
        "wait", "when retries run out: wait for the event, or send it to the dead letters"
    )
    dead_letter_limit: int = setting(1000, "stop the pipeline after more refused events in a row; 0: no limit", ge=0)
    on_drift: Literal["reload", "stop"] = setting(
        "reload", "when a copy of a table cannot follow its source: replace the copy, or stop the adapter"
    )


@dataclass(frozen=True, slots=True)
class SourceView:
    """What an adapter may know about the source before anything is created."""

    url: str  # Its database's URL, which may hold a secret; empty if there is none
    tables: Callable[[], Collection[tuple[str, str]]]
    """Schema and name of each table that a start would capture. PgcdcError: unknown."""
    relations: Callable[[], Collection[Relation]] = tuple
    """The relations whose changes this adapter would get, after its transforms."""


class SinkOptions(Options):
    """The options of one type of adapter, named by an entry point of the group `pgcdc.sinks`.

    Flags, variables, keys of the YAML file, the JSON schema and the reference are generated from its fields.
    """

    is_by_table: ClassVar[bool] = False
    """Its target stores each table separately, so adapters with different routes may share it."""

    def make(self) -> Sink:
        """Create the sink. Imports its dependencies here."""
        raise NotImplementedError

    def form(self) -> Form:
        """The form of events that its sink reads."""
        return self.make().form

    def target(self) -> str:
        """What no other adapter of a pipeline may write to, for people; empty if it does not matter."""
        return ""

    def place(self) -> str:
        """Where it delivers to, exactly. May contain a secret."""
        return self.target()

    def secrets(self) -> Collection[str]:
        """Texts that must never be displayed. Reads those that are in files."""
        return ()

    def check(self) -> None:
        """Raise ConfigError for options that cannot work, without contacting the target."""
        return None

    def check_delivery(self, delivery: DeliveryOptions) -> None:
        """Raise ConfigError for options that do not fit these delivery settings."""
        return None

    def check_source(self, adapter: str, source: SourceView) -> None:
        """Raise ConfigError if it must not receive the events of this source. Asks both source and target, and leaves
        nothing behind."""
        return None


class UrlOptions(SinkOptions):
    """Options of a target with a URL, which may hold a password and may be read from a file."""

    package: ClassVar[str] = ""
    """The client package to import. It is also the name of the pgcdc extra, unless `extra` is set."""
    extra: ClassVar[str] = ""
    schemes: ClassVar[tuple[str, ...]] = ()
    url: str = setting("", "URL of the target", secret=True)
    url_file: PathText | None = setting(None, "the file that contains the URL, instead of url")

    @model_validator(mode="after")
    def _check_one_url(self) -> Self:
        if bool(self.url) == bool(self.url_file):
            raise ValueError("url and url_file cannot be combined" if self.url else "url or url_file is required")
        return self

    def read_url(self) -> str:
        """The URL, from the option or its file. ConfigError: the file cannot be read or is empty."""
        url = read_secret(Path(self.url_file), "the URL").strip() if self.url_file else self.url
        with contextlib.suppress(ValueError):
            parts = urlsplit(url)
            if parts.scheme in self.schemes and parts.port != 0:  # raises if the port is not a number
                return url
        raise ConfigError(
            f"this is not a URL of {self.package}", f"Write {' or '.join(f'{one}://...' for one in self.schemes)}"
        )

    def place(self) -> str:
        return repr((self.read_url().rpartition("@")[2], self.model_dump(exclude={"url", "url_file"})))

    def secrets(self) -> Collection[str]:
        parts = urlsplit(self.read_url())
        return {one for one in (parts.password, unquote(parts.password or ""), parts.query) if one}

    def check(self) -> None:
        self.read_url()
        if importlib.util.find_spec(self.package) is None:
            raise ConfigError(
                f"this adapter needs the package {self.package}",
                f"Run: pip install 'pgcdc[{self.extra or self.package}]'",
            )


@dataclass(frozen=True)
class AdapterSpec:
    """One adapter of a pipeline. Its `transforms` are applied after the global ones; empty `routes` mean everything."""

    name: str
    type: str
    options: SinkOptions
    delivery: DeliveryOptions = field(default_factory=DeliveryOptions)
    transforms: tuple[Any, ...] = ()
    routes: tuple[str, ...] = ()
    priority: Priority = "normal"

    def check_beside(self, others: Iterable[AdapterSpec]) -> None:
        """Raise ConfigError if another adapter of the pipeline writes to the same target."""
        target = self.options.target()
        for other in others:
            is_apart = self.options.is_by_table and self.routes and other.routes
            if target == other.options.target() != "" and not (is_apart and set(self.routes).isdisjoint(other.routes)):
                raise ConfigError(
                    f"adapters {other.name} and {self.name} write to the same target: {target}",
                    "Give each its own target",
                )


def with_source_db(spec: Any, db: str) -> Any:
    """Apply the same cascade to an adapter made in Python; anything else is unchanged."""
    if not isinstance(spec, AdapterSpec):
        return spec
    fields = type(spec.options).model_fields
    missing = {
        name: db
        for name, info in fields.items()
        if setting_of(name, info).cascade == "db"
        and not getattr(spec.options, name)
        and not getattr(spec.options, f"{name}_file", None)
    }
    return replace(spec, options=spec.options.model_copy(update=missing)) if missing else spec


# --- display without secrets


def redact_url(url: str) -> str:
    """A URL that is safe to show: without user, query and long path segments, which may be secret."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", f":{parts.port}" if parts.port else ""
    except ValueError:
        return "***"
    host = f"[{host}]" if ":" in host else host
    path = LONG_SEGMENT.sub("***", parts.path)
    return f"{parts.scheme}://{host}{port}{path}" + ("?***" if parts.query else "")


def describe_options(options: BaseModel) -> str:
    """The options of an adapter for people, `, path a.jsonl, max_files 3`: without secrets and defaults."""
    said = ""
    for name, value in options:
        info = type(options).model_fields[name]
        if value == info.default:
            continue
        shown = hide_value(value) if setting_of(name, info).secret else value
        if isinstance(shown, tuple):
            shown = shlex.join(map(str, shown))
        if isinstance(shown, (str, int, float, Path)) and shown != "":
            said += f", {name} {shown}"
    return redact_text(said)


def hide_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: "***" if isinstance(one, str) and "${" not in one else one for key, one in value.items()}
    if not isinstance(value, str) or not value:
        return value
    if "${" in value:
        return _hide_between(value)
    if value.startswith(("http://", "https://")):
        return redact_url(value)
    return redact_text(value) if "://" in value else "***"


def _hide_between(text: str) -> str:
    """A text with variables. In a URL's query and in long words only the variables are shown."""
    if not literal_part(text).startswith(("http://", "https://", "/", "?")):
        return text
    before, mark, query = text.partition("?")
    path = "/".join("***" if LONG_SEGMENT.fullmatch(literal_part(word)) else word for word in before.split("/"))
    return path + (mark and ("?***" if literal_part(query) else f"?{query}"))


# --- the registry of types


class Adapters(Mapping[str, type[SinkOptions]]):
    """The options of each type, by its name. ConfigError: the type registered under a name cannot be used."""

    def __init__(self) -> None:
        self._loaded: dict[str, type[SinkOptions]] = {}

    @cached_property
    def _points(self) -> dict[str, EntryPoint]:
        found = {one.name: one for one in (*entry_points(group=GROUP), *_of_checkout())}
        return dict(sorted(found.items()))

    def __getitem__(self, name: str) -> type[SinkOptions]:
        if name not in self._loaded:
            self._loaded[name] = _load(self._points[name])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)

    def usable(self) -> dict[str, type[SinkOptions]]:
        """The types without unusable ones: requesting one of those by name says why."""
        found = {}
        for name in self:
            with contextlib.suppress(ConfigError):
                found[name] = self[name]
        return found

    def find(self, name: str) -> type[SinkOptions]:
        """Like `[]`. ConfigError lists the types and the closest name."""
        if name in self._points:
            return self[name]
        raise ConfigError(f"adapter {name!r} does not exist", suggest(name, self))


def own_adapters() -> dict[str, type[SinkOptions]]:
    """This source tree's adapters, without other packages: for its documents and tests."""
    return {one.name: ADAPTERS[one.name] for one in sorted(_of_checkout(), key=lambda one: one.name)}


def _of_checkout() -> list[EntryPoint]:
    """A source tree's adapters, which may be newer than the installed ones."""
    import tomllib

    project = Path(__file__).parents[3] / "pyproject.toml"
    try:
        raw = tomllib.loads(project.read_text())["project"]
    except (OSError, ValueError, KeyError):
        return []
    points = raw.get("entry-points", {}).get(GROUP, {}) if raw.get("name") == "pgcdc" else {}
    return [EntryPoint(name, value, GROUP) for name, value in points.items()]


def _load(point: EntryPoint) -> type[SinkOptions]:
    whose = f" of the package {point.dist.name} {point.dist.version}" if point.dist is not None else ""
    title = f"the adapter {point.name}{whose} ({point.value})"
    try:
        found: Any = point.load()
    except Exception as error:  # another package's module may raise anything
        raise ConfigError(
            f"{title} cannot be loaded: {type(error).__name__}: {error}", "Install another version of it, or remove it"
        ) from error
    if not (isinstance(found, type) and issubclass(found, SinkOptions)):
        raise ConfigError(
            f"{title} breaks the contract: its options do not derive from SinkOptions", "See docs/contract.md"
        )
    return found


def make_sink(spec: AdapterSpec) -> Sink:
    """The sink of one adapter. ConfigError: it breaks the contract."""
    from pgcdc.event.forms import FORMS
    from pgcdc.sink.contract import Sink

    keep_secrets([], [spec])
    sink = spec.options.make()
    if Sink not in type(sink).__mro__ or sink.form not in FORMS:
        what = f"{type(sink).__name__} does not derive from Sink, or has a form that does not exist"
        raise ConfigError(f"the adapter {spec.type} breaks the contract: {what}", "See docs/contract.md")
    return sink


def keep_secrets(urls: Iterable[str | None], specs: Sequence[AdapterSpec], transforms: Iterable[Any] = ()) -> None:
    """Remember the passwords of database URLs, and the secrets of adapters and transforms, read from files if
    needed."""
    for url in urls:
        remember_secrets(url_passwords(url))
    for spec in specs:
        with contextlib.suppress(PgcdcError):  # reported elsewhere
            remember_secrets(spec.options.secrets())
    for one in (*transforms, *(one for spec in specs for one in spec.transforms)):
        name = getattr(one, "key_env", None)
        if name and os.environ.get(name):
            remember_secrets([os.environ[name]])


def check_options(spec: AdapterSpec) -> None:
    """Raise ConfigError for an invalid adapter, without contacting its target."""
    spec.options.check()
    spec.options.check_delivery(spec.delivery)


def check_adapters(specs: Sequence[AdapterSpec]) -> None:
    """Raise ConfigError for adapters that cannot share a pipeline."""
    if not specs:
        raise ConfigError("no adapter is configured", "Use one of pgcdc.adapters")
    for spec in specs:
        if not isinstance(spec, AdapterSpec):
            raise ConfigError(
                f"{spec!r} is not an adapter", "Make one with pgcdc.adapters, such as adapters.file(path)"
            )
    for number, spec in enumerate(specs):
        if any(spec.name == other.name for other in specs[:number]):
            raise ConfigError(f"two adapters are named {spec.name}", "Give each its own name: name=...")
        check_options(spec)
        spec.check_beside(specs[:number])


ADAPTERS = Adapters()  # The types by name
