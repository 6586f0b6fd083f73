"""Names that the manual has and we do not: what is here instead, or that it is not built yet."""

from __future__ import annotations

__all__ = ["NAMES", "advise", "advise_detector"]

_STATE = "Leave it out: progress stands in the state directory (state_dir), not in a database"
_PAUSE = "Use spool_limit: the capture stops reading when this much is undelivered"
_NO_PLUGINS = (
    "Plugins are not built yet. For code of your own, use a python transform, the adapter exec, or pgcdc in Python"
)
_NO_METRICS = "Metrics are not served yet. Numbers of a run: pgcdc status --json"

NAMES = {
    "channel": "LISTEN/NOTIFY is not built yet. Use the detector wal with tables, or messages for what an application sends",
    "heartbeat_interval": "Leave it out: an idle database is confirmed every 10 s without writing to it",
    "slot_lag_warn": "Not built yet. See the lag with: pgcdc status, pgcdc slot list",
    "backpressure": "Leave it out: the capture stops reading when spool_limit is undelivered",
    "bp_warn_threshold": _PAUSE,
    "bp_critical_threshold": _PAUSE,
    "bp_max_throttle": _PAUSE,
    "bp_poll_interval": _PAUSE,
    "plugin_transform": _NO_PLUGINS,
    "plugin_adapter": _NO_PLUGINS,
    "dlq_plugin": "Plugins are not built yet. Use dlq: file, pg_table, stderr or none",
    "checkpoint_plugin": _STATE,
    "skip_validation": "Leave it out: a start checks everything that it needs. To check only: pgcdc validate",
    "skip_migrations": "Leave it out: tables of ours are created when they are missing, and nothing else is changed",
    "schema_registry_url": "The adapter kafka and its schema registry are not built yet",
    "view_query": "Views are not built yet. Use a query of your own on spark.readStream.format('pgcdc')",
    "checkpoint_db": _STATE,
    "snapshot_progress_db": _STATE,
    "checkpoint_path": "Use state_dir: it has checkpoints, spool and acks",
    "metrics_addr": _NO_METRICS,
    "password": "Use password_file, or ${NAME} inside of db: a password does not stand in this file",
}
"""Settings of the manual, with underscores, and of others that people try."""

_PREFIXES = {
    "outbox_": "The detector outbox is not built yet. Capture its table with tables, and delete rows yourself",
    "mysql_": "MySQL is not built yet; there is the detector wal, for PostgreSQL",
    "mongodb_": "MongoDB is not built yet; there is the detector wal, for PostgreSQL",
    "kafka_": "The adapter kafka is not built yet. Use webhook, or exec with a Kafka client",
    "kafkaserver_": "The Kafka server is not built yet",
    "nats_": "The adapter nats is not built yet. Use webhook or exec",
    "s3_": "The adapter s3 is not built yet. Use file with a folder and file_max_size, and copy the files",
    "redis_": "The adapter redis is not built yet. Use webhook or exec",
    "embedding_": "The adapter embedding is not built yet. Use webhook or exec",
    "search_": "The adapter search is not built yet. Use webhook or exec",
    "ws_": "WebSocket endpoints are not built yet",
    "sse_": "SSE endpoints are not built yet",
    "grpc_": "gRPC endpoints are not built yet",
    "otel_": _NO_METRICS,
}
_DETECTORS = ("listen_notify", "outbox", "mysql", "mongodb")


def advise(name: str) -> str:
    """What to do instead of a setting with this name; empty: the manual does not have it."""
    name = name.replace("-", "_")
    return NAMES.get(name) or next((text for prefix, text in _PREFIXES.items() if name.startswith(prefix)), "")


def advise_detector(name: str, known: str) -> str:
    """The same for a detector."""
    return f"This detector is not built yet; there is: {known}" if name.replace("-", "_") in _DETECTORS else ""
