"""Configuration of `pgcdc listen`: flags, then `PGCDC_*` variables, then `pgcdc.yaml`, then defaults.

Everything is checked here, before anything starts; an error names the place (flag, variable, or file with line) and the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from pgcdc.capture.holder import DEFAULT_HOLD_LIMIT_S
from pgcdc.capture.prepare import DEFAULT_SPOOL_LIMIT_BYTES, SourceOptions
from pgcdc.capture.protocol import WireOptions
from pgcdc.capture.selection import split_outside_quotes
from pgcdc.capture.snapshot_mode import choose_snapshot_mode
from pgcdc.capture.toast import DEFAULT_CACHE_ENTRIES, ToastOptions
from pgcdc.errors import ConfigError
from pgcdc.stream.options import DEFAULT_MAX_BATCH_ROWS, parse_bytes, parse_seconds

__all__ = ["TYPED_KEYS", "Config", "load_config"]

DEFAULT_FILE = "pgcdc.yaml"
TYPED_KEYS = ("changelog", "truncate", "numeric", "out_of_range", "arrays", "composites")
"""What only typed rows (`table`) have; the same names are options of the Spark source."""


class Config(BaseModel):
    """What a pipeline is told. The names are those of the flags, with underscores."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    db: str = ""
    detector: Literal["wal"] = "wal"
    slot_name: str = "pgcdc"
    persistent_slot: bool = True
    temporary_slot: bool = False
    publication: str | None = None
    tables: tuple[str, ...] = ()
    all_tables: bool = False
    schemas: tuple[str, ...] = ()
    table: str | None = None
    changelog: Literal["changes", "zset"] = "changes"
    truncate: Literal["error", "mark"] = "error"
    numeric: Literal["decimal", "string", "double"] = "decimal"
    out_of_range: Literal["error", "clamp", "string"] = "error"
    arrays: Literal["array", "string"] = "array"
    composites: Literal["struct", "string"] = "struct"
    row_filters: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    generated_columns: bool = False
    streaming: bool = True
    two_phase: bool = False
    origin: Literal["any", "none"] = "any"
    binary: bool = False
    toast: Literal["full", "cache", "mark"] = "mark"
    toast_cache_max_entries: int = Field(DEFAULT_CACHE_ENTRIES, ge=1)
    messages: bool = False
    tx_metadata: bool = False
    tx_markers: bool = False
    schema_events: bool = False
    invalid_utf8: Literal["error", "replace", "base64"] = "error"
    adapters: tuple[Literal["stdout", "file"], ...] = ("stdout",)
    file_path: Path | None = None
    state_dir: Path = Path(".pgcdc")
    snapshot_mode: Literal["initial", "never", "always", "initial_only"] | None = None
    snapshot_hold_limit: float = Field(DEFAULT_HOLD_LIMIT_S, ge=1)
    incremental_snapshot: bool = False
    signal_table: str = "pgcdc_signals"
    snapshot_chunk_size: int = Field(0, ge=0)
    snapshot_chunk_delay: float = Field(0.0, ge=0)
    spool_limit: int = Field(DEFAULT_SPOOL_LIMIT_BYTES, ge=1 << 20)
    max_batch_rows: int = Field(DEFAULT_MAX_BATCH_ROWS, ge=1)
    start_from: Literal["slot"] | None = None
    once: bool = False
    fail_fast: bool = False
    accept_publication: bool = False
    warm_up: bool = True
    spark_master: str | None = Field(None, pattern=r"^(local(\[.+\])?|spark://.+|yarn|k8s://.+)$")

    @field_validator("row_filters", "columns", mode="before")
    @classmethod
    def _rules(cls, value: Any) -> Any:
        """A mapping or list in YAML; `a=...; b=...` in a variable."""
        if isinstance(value, str):
            return tuple(split_outside_quotes(value, ";"))
        if isinstance(value, Mapping):
            return tuple(
                f"{key}={','.join(map(str, one)) if isinstance(one, list) else one}" for key, one in value.items()
            )
        return value

    @field_validator("tables", "schemas", "adapters", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(item.strip() for item in value.split(",") if item.strip()) if isinstance(value, str) else value

    @field_validator("spool_limit", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return parse_bytes(value)
        except ValueError:
            raise ValueError("not a size like 512MB or 1GB") from None

    @field_validator("snapshot_hold_limit", mode="before")
    @classmethod
    def _seconds(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return parse_seconds(value)
        except ValueError:
            raise ValueError("not a time like 30m or 6h") from None

    def check(self) -> None:
        """Raise ConfigError for what cannot go together."""
        if not self.adapters:
            raise ConfigError("no adapter is given", "Use --adapter stdout or --adapter file")
        if len(set(self.adapters)) != len(self.adapters):
            raise ConfigError("an adapter is given twice", "Name each --adapter once")
        if "file" in self.adapters and self.file_path is None:
            raise ConfigError("--adapter file needs a path", "Add --file-path events.jsonl")
        if self.file_path is not None and "file" not in self.adapters:
            raise ConfigError("--file-path is given without --adapter file", "Add --adapter file")
        if self.file_path is not None and not self.file_path.absolute().parent.is_dir():
            raise ConfigError(f"the folder of --file-path {self.file_path} does not exist", "Create it first")
        if self.temporary_slot and self.adapters != ("stdout",):
            raise ConfigError(
                "--temporary-slot is for trials with stdout: it loses its place when the connection ends",
                "Leave --temporary-slot out to deliver to other adapters",
            )
        self._check_typed()
        self.source_options().check()

    def _check_typed(self) -> None:
        if self.table:
            for name in ("tx_metadata", "tx_markers", "schema_events"):
                if getattr(self, name):
                    flag = _flag_name(name)
                    raise ConfigError(
                        f"--{flag} is for events, not for typed rows",
                        f"Leave --table or --{flag} out; rows have _xid and _ts",
                    )
            return
        for name in TYPED_KEYS:
            if getattr(self, name) != Config.model_fields[name].default:
                raise ConfigError(f"--{_flag_name(name)} is for typed rows", "Add --table, or leave it out")

    @property
    def effective_snapshot_mode(self) -> str:
        """What was said, or the default for such a slot."""
        return choose_snapshot_mode(self.snapshot_mode, temporary_slot=self.temporary_slot, start_from=self.start_from)

    def source_options(self) -> SourceOptions:
        """The part that concerns the source."""
        options = SourceOptions(
            url=self.db,
            slot=self.slot_name,
            publication=self.publication,
            tables=self.tables,
            all_tables=self.all_tables,
            schemas=self.schemas,
            row_filters=self.row_filters,
            columns=self.columns,
            generated_columns=self.generated_columns,
            state_dir=str(self.state_dir),
            spool_limit_bytes=self.spool_limit,
            temporary_slot=self.temporary_slot,
            start_from=self.start_from,
            fail_fast=self.fail_fast,
            accept_publication=self.accept_publication,
            wire=WireOptions(self.streaming, self.messages, self.two_phase, self.origin, self.binary),
            toast=ToastOptions(self.toast, self.toast_cache_max_entries),
            snapshot_mode=self.effective_snapshot_mode,
            snapshot_hold_limit_s=self.snapshot_hold_limit,
            incremental_snapshot=self.incremental_snapshot,
            signal_table=self.signal_table,
            snapshot_chunk_size=self.snapshot_chunk_size,
            snapshot_chunk_delay_s=self.snapshot_chunk_delay,
        )
        return replace(options, tables=(self.table,)) if self.table and not options.has_selection else options


def load_config(flags: Mapping[str, Any], environ: Mapping[str, str], path: Path | None) -> Config:
    """Merge the layers and check every value. `flags` holds only what was given; `path` None means pgcdc.yaml, if there."""
    lines: dict[str, int] = {}
    file = path or (Path(DEFAULT_FILE) if Path(DEFAULT_FILE).exists() else None)
    layers: dict[str, tuple[Any, str]] = {}
    if file is not None:
        content, lines = _read_yaml(file)
        for key, value in content.items():
            layers[key] = (value, f"{file}, line {lines[key]}: {key}")
    for name in Config.model_fields:
        variable = f"PGCDC_{name.upper()}"
        if environ.get(variable):
            layers[name] = (environ[variable], variable)
    for key, value in flags.items():
        layers[key] = (value, f"--{_flag_name(key)}")
    try:
        config = Config.model_validate({key: value for key, (value, _) in layers.items()})
    except ValidationError as error:
        raise _explain(error, layers) from None
    config.check()
    return config


def _flag_name(key: str) -> str:
    return {"adapters": "adapter", "row_filters": "row-filter"}.get(key, key.replace("_", "-"))


def _explain(error: ValidationError, layers: Mapping[str, tuple[Any, str]]) -> ConfigError:
    first = error.errors()[0]
    key = str(first["loc"][0])
    value, where = layers.get(key, (None, key))
    if first["type"] == "extra_forbidden" and key == "adapter":
        return ConfigError(f"{where}: this key is not known", "The key is `adapters`, a list")
    if first["type"] == "extra_forbidden":
        return ConfigError(f"{where}: this key is not known", f"Known keys: {', '.join(Config.model_fields)}")
    reason = str(first["msg"]).removeprefix("Value error, ")
    shown = "" if key == "db" else f" (got {value!r})"
    return ConfigError(f"{where}: {reason}{shown}", "See `pgcdc listen --help`")


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The file's top-level keys, and the line of each."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {reason}", "Check --config") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise ConfigError(f"{where}: {problem}", "Correct the file") from None
    if content is None:
        return {}, {}
    if not isinstance(content, dict) or not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}, line 1: the file must be a list of `key: value`", "See docs/listen.md")
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key, value in content.items():
        if not isinstance(key, str):
            raise ConfigError(f"{path}: the key {key!r} is not a name", "Known keys stand in docs/listen.md")
        values[key.replace("-", "_")] = value
    for key_node, _ in node.value:
        name = str(key_node.value).replace("-", "_")
        line = key_node.start_mark.line + 1
        if name in lines:
            raise ConfigError(f"{path}, line {line}: {name} is given twice", f"It stands in line {lines[name]} already")
        lines[name] = line
    return values, {name: lines.get(name, 1) for name in values}
