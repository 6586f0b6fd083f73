"""The settings of a pipeline: those of every layer below, and its own. A configuration adds adapters and transforms."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Literal

from pgcdc.capture.control import CaptureOptions
from pgcdc.core.log import Format
from pgcdc.core.relation import Relation
from pgcdc.core.settings import Options, Seconds, setting
from pgcdc.core.state import StateDir
from pgcdc.event.edits import full_pattern
from pgcdc.sink.letters.record import LetterSettings
from pgcdc.sink.spec import AdapterSpec, SourceView, with_source_db
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.protocol import SourceOptions, find_options, make_source
from pgcdc.source.rate.options import RateOptions
from pgcdc.spark.options import EventSettings, ReaderSettings, TypedSettings
from pgcdc.transform.specs import Chain, column_chain, from_spec

ADAPTERS, RUNNING = "Adapters", "Running"


class VerifySettings(Options):
    """`pgcdc verify` beside a running pipeline."""

    every: Seconds = setting(0.0, "how often, such as 6h; 0: never", ge=0)
    rate: float = setting(0.0, "read at most this many rows a second at the source; 0: no limit", ge=0)


class PipelineSettings(
    PostgresOptions, RateOptions, CaptureOptions, EventSettings, TypedSettings, ReaderSettings, LetterSettings
):
    """Everything except adapters and transforms, which `pgcdc.config` reads from flags and files, or Python
    provides."""

    bus_mode: Literal["reliable", "fast"] = setting(
        "reliable", "fast: an adapter that falls behind by --bus-buffer events skips ahead and loses them.", ADAPTERS
    )
    bus_buffer: int = setting(
        100_000, "With --bus-mode fast: how many events an adapter may fall behind.", ADAPTERS, metavar="N", ge=1
    )
    spark_master: str | None = setting(
        None, "Spark cluster: spark://host:7077, yarn, k8s://... (default: local)", RUNNING, metavar="URL",
        example="spark://10.0.0.5:7077", pattern=r"^(local(\[.+\])?|spark://.+|yarn|k8s://.+)$",
    )  # fmt: skip
    once: bool = setting(False, "Deliver everything committed up to now, confirm it and exit.", RUNNING)
    verify_every: Seconds = setting(
        0.0, "Compare the targets with the source this often, like pgcdc verify; 0: never.", RUNNING, ge=0, example="6h"
    )  # fmt: skip
    verify: VerifySettings = setting(
        VerifySettings(), "The same as a mapping, with a rate: {every: 6h, rate: 5000}.", RUNNING, flag=None,
        example="{every: 6h}",
    )  # fmt: skip
    log_format: Format = setting("text", "Lines on stderr: text with the time, or json, one object per line.", RUNNING)
    warm_up: bool = setting(True, "Warm up Spark before reporting ready; --once does not.", RUNNING)

    @property
    def adapter_specs(self) -> tuple[AdapterSpec, ...]:
        return ()

    @property
    def global_transforms(self) -> tuple[Any, ...]:
        return ()

    def source_options(self) -> PostgresOptions:
        """The source's part; typed rows capture their table by default."""
        options = self.part(PostgresOptions)
        return options.but(tables=(self.table,)) if self.table and not options.has_selection else options

    @property
    def source(self) -> SourceOptions:
        model = find_options(self.detector)
        return self.source_options() if model is PostgresOptions else self.part(model)


def choose_specs(settings: PipelineSettings, given: Any) -> tuple[Any, ...]:
    """The adapters of a pipeline: those made in Python (one or several), otherwise the configured ones."""
    specs = settings.adapter_specs if given is None else given if isinstance(given, (list, tuple)) else (given,)
    return tuple(with_source_db(one, settings.db) for one in specs)


def view_source(settings: PipelineSettings, state: StateDir, chain: Chain) -> SourceView:
    """What an adapter may know about a source before anything is created. Reads tables on demand."""

    def tables() -> set[tuple[str, str]]:
        return {(one.namespace, one.name) for one in make_source(source).tables(state)}

    def relations() -> list[Relation]:
        if any(from_spec(one).type in ("sql", "python") for one in chain.transforms):
            return []  # the columns they produce are not known
        edits, routes = column_chain(chain), [full_pattern(one) for one in chain.routes or ("*:*",)]
        found = (one for one in make_source(source).tables(state) if any(fnmatchcase(one.channel, r) for r in routes))
        return [edits.describe(one, None)[0] for one in found]

    source = settings.source
    return SourceView(source.db if isinstance(source, PostgresOptions) else "", tables, relations)
