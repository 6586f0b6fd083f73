"""A configuration as options of the Spark source."""

from __future__ import annotations

from pgcdc.config.model import TYPED_KEYS, Config
from pgcdc.core.state import StateDir

__all__ = ["spark_options"]

_PASSED_ON = (
    "spool_limit", "max_batch_rows", "fail_fast", "temporary_slot", "all_tables", "generated_columns", "streaming",
    "two_phase", "origin", "binary", "toast", "toast_cache_max_entries", "messages", "incremental_snapshot",
    "signal_table", "snapshot_chunk_size", "snapshot_chunk_delay", "tx_metadata", "tx_markers",
    "schema_events", "invalid_utf8",
)  # fmt: skip
"""Options of the Spark source that have the same name in the configuration."""


def spark_options(config: Config) -> dict[str, str]:
    """What the source of a lane's query is told: never a secret, because Spark shows it."""
    options = {
        "state_dir": str(StateDir(config.state_dir).path),
        "slot": config.slot_name,
    }
    for name in _PASSED_ON:
        value = getattr(config, name)
        if value is not None:
            options[name] = str(value).lower() if isinstance(value, bool) else str(value)
    options |= {
        "toast": config.effective_toast,
        "snapshot_mode": config.effective_snapshot_mode,
        "snapshot_hold_limit": str(config.snapshot_hold_limit),
    }
    if config.publication:
        options["publication"] = config.publication
    if config.tables:
        options["tables"] = ",".join(config.tables)
    if config.schemas:
        options["schemas"] = ",".join(config.schemas)
    if config.table:
        options |= {name: str(getattr(config, name)) for name in ("table", *TYPED_KEYS)}
    return options
