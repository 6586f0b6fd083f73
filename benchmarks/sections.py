"""The sections of `make bench`, in the order of the page: each measures one thing and adds its figures."""

from __future__ import annotations

from collections.abc import Callable

from bench import Bench
from covered import measure_coverage
from delivering import measure_hot_reload, measure_one_blocked, measure_webhooks
from draining import (
    measure_backlog,
    measure_envelopes,
    measure_peers,
    measure_tls,
    measure_transforms,
    measure_typed,
)
from existing import measure_incremental, measure_initial_snapshot, measure_snapshot
from key_change import measure_key_change
from live import (
    measure_busy,
    measure_capture_latency,
    measure_demo,
    measure_idle_cost,
    measure_listen_latency,
    measure_recovery,
    measure_six,
    measure_sql,
    measure_starts,
)
from memory import measure_large, measure_large_spark, measure_toast
from mirrors import measure_append, measure_apply, measure_three
from parts import measure_cast, measure_cli, measure_decoder
from sentinel import measure_sentinel
from size import measure_size
from verify import measure_verify
from verify_beside import measure_verify_beside

__all__ = ["SECTIONS"]

SECTIONS: dict[str, Callable[[Bench], None]] = {
    "latency": measure_listen_latency,
    "sinks": measure_six,
    "sql": measure_sql,
    "busy": measure_busy,
    "arrow": measure_capture_latency,
    "start": measure_starts,
    "demo": measure_demo,
    "idle": measure_idle_cost,
    "recovery": measure_recovery,
    "backlog": measure_backlog,
    "typed": measure_typed,
    "transforms": measure_transforms,
    "envelopes": measure_envelopes,
    "apply": measure_apply,
    "append": measure_append,
    "three": measure_three,
    "webhook": measure_webhooks,
    "peers": measure_peers,
    "tls": measure_tls,
    "snapshot": measure_snapshot,
    "initial": measure_initial_snapshot,
    "incremental": measure_incremental,
    "toast": measure_toast,
    "large": measure_large,
    "large-spark": measure_large_spark,
    "decode": measure_decoder,
    "cast": measure_cast,
    "cli": measure_cli,
    "sentinel": measure_sentinel,
    "blocked": measure_one_blocked,
    "reload": measure_hot_reload,
    "verify": measure_verify,
    "verify-beside": measure_verify_beside,
    "key-change": measure_key_change,
    "size": measure_size,
    "coverage": measure_coverage,
}
