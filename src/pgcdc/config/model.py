"""The one model of a pipeline's configuration: flags, `PGCDC_*` variables, `pgcdc.yaml` and Python all become this.

Flags with their help, the file of `pgcdc config init` and the JSON schema are made from it: a setting is written once, here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from pgcdc.config.adapters import AdapterItem, AdapterKeys, adapter_specs
from pgcdc.config.fields import Operations, Priorities, Routes
from pgcdc.core.errors import ConfigErrors
from pgcdc.core.settings import Conflict, Names, Options, setting
from pgcdc.event.options import TypedSettings
from pgcdc.run.settings import PipelineSettings
from pgcdc.sink.registry import ADAPTERS as TYPES
from pgcdc.sink.spec import AdapterSpec
from pgcdc.source.rate.options import RATE
from pgcdc.transform.specs import DropColumnsSpec, FilterSpec, TransformSpec

TYPED_KEYS = tuple(name for name in TypedSettings.model_fields if name != "table")
"""What only typed rows (`table`) have; the same names are options of the Spark source."""

DATABASE, TABLES, SNAPSHOTS = "Database", "Tables", "Rows that are there"
EVENTS, TYPED, ADAPTERS, TRANSFORMS, RUNNING = "Events", "Typed rows", "Adapters", "Transforms", "Running"
DEAD = "Dead letters"
GROUPS = (DATABASE, TABLES, ADAPTERS, DEAD, TRANSFORMS, SNAPSHOTS, EVENTS, TYPED, RATE, RUNNING)
"""In the order in which they are shown."""


class Transforms(Options):
    """What is done to events: by all adapters, then by one of them."""

    global_: tuple[TransformSpec, ...] = Field(
        default=(), alias="global", description="for all adapters, in this order"
    )
    adapter: dict[str, tuple[TransformSpec, ...]] = Field(
        default={}, description="by the adapter's name, behind the global ones"
    )


class Config(PipelineSettings, AdapterKeys):
    """What a pipeline is told. The names are those of the flags, with underscores."""

    db_file: Path | None = setting(
        None, "The file that holds the database URL.", DATABASE, metavar="PATH", example="/run/secrets/pgcdc_db"
    )
    password_file: Path | None = setting(
        None, "The file that holds the password; the URL then has none.", DATABASE, metavar="PATH",
        example="/run/secrets/pgcdc_password",
    )  # fmt: skip

    # --- where events go

    adapters: tuple[AdapterItem, ...] = setting(
        ("stdout",), f"Where events go: {', '.join(TYPES)}. Repeatable.", ADAPTERS, flag="adapter", metavar="NAME",
        is_repeated=True, example="[stdout]",
    )  # fmt: skip
    routes: Routes = setting(
        {}, "Only channels that match, for an adapter: file=orders,sales.*. Repeatable.", ADAPTERS, flag="route",
        metavar="NAME=PATTERN,...", is_repeated=True, example="{file: [orders, sales.*]}",
    )  # fmt: skip
    adapter_priority: Priorities = setting(
        {}, "critical, normal or best-effort: file=critical. Repeatable.", ADAPTERS, metavar="NAME=PRIORITY",
        is_repeated=True, example="{file: critical}",
    )  # fmt: skip
    cooperative_checkpoint: bool | None = setting(
        None, "Accepted; PostgreSQL hears of an event when every adapter has it.", ADAPTERS, example="true"
    )

    # --- what becomes of events that a target refuses

    dlq_db_file: Path | None = setting(
        None, "The file that holds the URL of that database.", DEAD, metavar="PATH", example="/run/secrets/pgcdc_dlq_db"
    )

    # --- what is done to them

    drop_columns: Names = setting(
        (), "Leave these columns out of every event: a,b.", TRANSFORMS, metavar="A,B", example="[password]"
    )
    filter_operations: Operations = setting(
        (), "Deliver only these operations: INSERT,UPDATE.", TRANSFORMS, metavar="A,B", example="[INSERT, UPDATE]"
    )
    debezium_envelope: bool = setting(False, "Events as Debezium's PostgreSQL connector writes them.", TRANSFORMS)
    cloudevents_envelope: bool = setting(False, "Events as CloudEvents 1.0 in structured JSON.", TRANSFORMS)
    transforms: Transforms = setting(
        Transforms.model_validate({}), "Transforms, for all adapters and for one.", TRANSFORMS, flag=None
    )

    @field_validator("adapters", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(item.strip() for item in value.split(",") if item.strip()) if isinstance(value, str) else value

    def conflicts(self) -> Iterator[Conflict]:
        """What cannot go together."""
        from pgcdc.config.rules import find_conflicts

        return find_conflicts(self)

    def check(self) -> None:
        """Raise ConfigError for all that cannot go together."""
        if found := list(self.conflicts()):
            raise ConfigErrors.of(found)

    # --- for the pipeline

    @property
    def adapter_specs(self) -> tuple[AdapterSpec, ...]:
        """The adapters, each with its options, own transforms, routes, priority and delivery."""
        return adapter_specs(self)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of the adapters."""
        return tuple(item if isinstance(item, str) else item.name for item in self.adapters)

    @property
    def global_transforms(self) -> tuple[Any, ...]:
        """What every event goes through first: the flags' transforms, then the global ones of the file."""
        drop = (DropColumnsSpec.model_validate({"columns": self.drop_columns}),) if self.drop_columns else ()
        keep = (FilterSpec.model_validate({"operations": self.filter_operations}),) if self.filter_operations else ()
        return (*drop, *keep, *self.transforms.global_)
