"""Where replayed dead letters go: what a configuration and flags say of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pgcdc.config.adapters import FLAT_KEYS
from pgcdc.config.layers import Loaded, load
from pgcdc.core.errors import ConfigError
from pgcdc.core.settings import make_options
from pgcdc.run.offline_letters import Destination
from pgcdc.sink.registry import ADAPTERS, check_options, keep_secrets
from pgcdc.sink.spec import AdapterSpec, DeliveryOptions


def own_options(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Of flags, those that say where an adapter delivers to, and not how."""
    return {
        key: value
        for key, value in flags.items()
        if key in FLAT_KEYS and FLAT_KEYS[key][1] not in DeliveryOptions.model_fields
    }


def plan_destinations(flags: Mapping[str, Any], file: Path | None, adapters: list[str]) -> dict[str, Destination]:
    """By adapter. An option that is given as a flag names another target, if the configuration has one for the adapter."""
    others = own_options(flags)
    base = load({key: value for key, value in flags.items() if key not in others}, os.environ, file)
    known = base.config.adapter_names if ("adapters",) in base.origins else ()
    specs = {spec.name: spec for spec in base.config.adapter_specs} if known else {}
    keep_secrets([base.config.db, base.config.dlq_db], list(specs.values()), base.config.global_transforms)
    shared = base.config.global_transforms
    found: dict[str, Destination] = {}
    for name in adapters:
        if name in specs:
            given = {FLAT_KEYS[key][1]: one for key, one in others.items() if FLAT_KEYS[key][0] == specs[name].type}
            spec = _change(specs[name], given) if given else specs[name]
            found[name] = Destination(spec, [*shared, *specs[name].transforms], is_other=bool(given))
        elif name in ADAPTERS:  # there is no file: the flags are the configuration
            spec = _only(flags, file, name)
            found[name] = Destination(spec, [*shared, *spec.transforms], is_other=False)
        else:
            raise ConfigError(
                f"the configuration has no adapter {name}", "Give the file of its pipeline with --config, or --adapter"
            )
    return found


def _only(flags: Mapping[str, Any], file: Path | None, name: str) -> AdapterSpec:
    loaded: Loaded = load({**flags, "adapters": [name]}, os.environ, file)
    return loaded.config.adapter_specs[0]


def _change(spec: AdapterSpec, given: Mapping[str, Any]) -> AdapterSpec:
    kept = {
        name: value
        for name, value in spec.options
        if name in spec.options.model_fields_set
        and name.removesuffix("_file") not in given
        and f"{name}_file" not in given
    }
    options = make_options(
        type(spec.options), {**kept, **given}, f"adapter {spec.name}", "See the documentation of the adapter"
    )
    changed = AdapterSpec(spec.name, spec.type, options, spec.delivery)
    check_options(changed)
    return changed
