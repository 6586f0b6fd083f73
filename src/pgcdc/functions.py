"""Functions on DataFrames of typed changes: `from pgcdc import functions as C`.

They work on what `option("table", ...)` returns: the columns of one table, and the metadata columns of `METADATA`. They
are made only of Spark expressions, so nothing runs in Python, and `explain()` shows the plan. Each docstring says
whether the function works on batch DataFrames (including those in `foreachBatch`), on streams, or on both.

Keys are columns that are never NULL and whose old values PostgreSQL sends: the primary key, the index of the replica
identity, or any NOT NULL columns with REPLICA IDENTITY FULL.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructType, VariantType

from pgcdc.core.errors import ConfigError
from pgcdc.core.position import Position
from pgcdc.core.settings import suggest
from pgcdc.postgres.lsn import parse_lsn
from pgcdc.transform.program import typed_position

__all__ = [
    "METADATA",
    "as_of",
    "current_state",
    "latest_per_key",
    "only_inserts",
    "sequence",
    "split_key_updates",
    "with_sequence",
    "with_watermark",
    "without_metadata",
]

METADATA = ("_op", "_lsn", "_ordinal", "_xid", "_ts", "_before", "_unchanged_toast_columns", "_weight")
"""The columns that a typed table has besides its own; `_weight` only with `changelog=zset`."""

_MAX_LSN = (1 << 63) - 1  # the largest BIGINT
_PART, _ROW, _TRUNCATED, _COUNT = "__pgcdc_part", "__pgcdc_row", "__pgcdc_truncated", "__pgcdc_count"
_WHOLE, _OLD, _NEW = 0, 1, 2  # which part of a change a row is


def sequence() -> Column:
    """`struct(_lsn, _ordinal)`: the place of a change in the stream, as a column that can be compared.

    Unlike commit times, it is unique for every change of a table. Batch and streaming.
    """
    return F.struct(F.col("_lsn"), F.col("_ordinal"))


def with_sequence(df: DataFrame, name: str = "_sequence") -> DataFrame:
    """`df` with `sequence()` as an extra column, for `sequence_by` in AUTO CDC. Batch and streaming.

    In a Z-set both halves of an UPDATE have the same place. There `_weight` is a third field, so that the old row sorts
    before the new one.
    """
    found = _schema_with(df, "with_sequence", "_lsn", "_ordinal")
    if "_weight" in found.fieldNames():
        return df.withColumn(name, F.struct(F.col("_lsn"), F.col("_ordinal"), F.col("_weight")))
    return df.withColumn(name, sequence())


def only_inserts(df: DataFrame) -> DataFrame:
    """Only the inserted rows, as they were when inserted. Batch and streaming."""
    _schema_with(df, "only_inserts", "_op")
    return df.filter(F.col("_op") == "INSERT")


def as_of(df: DataFrame, position: Position | str) -> DataFrame:
    """The changes up to and including a position. Batch and streaming (a stream does not end there).

    `position` is a `pgcdc.Position`, its text (as events carry it), or an LSN as PostgreSQL writes it, such as
    `0/16B3748`. An LSN includes every transaction that ended at or before it.
    """
    _schema_with(df, "as_of", "_lsn", "_ordinal")
    end = _parse_position(position)
    lsn = F.lit(min(end.commit, _MAX_LSN)).cast("bigint")
    inside = (F.col("_lsn") == lsn) & (F.col("_ordinal") <= F.lit(end.place).cast("bigint"))
    return df.filter((F.col("_lsn") < lsn) | inside)


def split_key_updates(df: DataFrame, keys: str | Sequence[str]) -> DataFrame:
    """`df` in which an UPDATE that changed a key is two rows: a DELETE of the old key, then an INSERT of the new one.

    This lets a sink that identifies rows by key remove the old key. Both rows have the position of the UPDATE. The
    DELETE has the old values, as far as PostgreSQL sent them. All other rows are unchanged. Batch and streaming.
    """
    schema = _schema_with(df, "split_key_updates", "_op", "_before")
    _refuse_zset(schema, "split_key_updates", "An UPDATE of a Z-set is already a pair: use it as it is")
    names = _check_keys(schema, keys, "split_key_updates")
    old = schema["_before"].dataType
    known = old.fieldNames() if isinstance(old, StructType) else []
    for name in names:
        if name not in known:
            raise ConfigError(
                f"split_key_updates: _before has no field {name!r}, so the old key is unknown",
                "Rename or compute columns after split_key_updates, not before",
            )
    changed = F.lit(False)
    for name in names:
        before = F.col("_before")[name]
        # A key is never NULL: if _before has no value for it, PostgreSQL sent none because the key did not change.
        changed = changed | (before.isNotNull() & ~before.eqNullSafe(_column(name)))
    parts = F.when((F.col("_op") == "UPDATE") & changed, F.array(F.lit(_OLD), F.lit(_NEW))).otherwise(
        F.array(F.lit(_WHOLE))
    )
    part = F.col(_PART)
    columns = []
    for name in schema.fieldNames():
        value = _column(name)
        if name == "_op":
            value = F.when(part == _OLD, "DELETE").when(part == _NEW, "INSERT").otherwise(value)
        elif name == "_before":
            value = F.when(part != _NEW, value)
        elif name == "_unchanged_toast_columns":
            value = F.when(part != _OLD, value)
        elif name in known:
            value = F.when(part == _OLD, F.col("_before")[name]).otherwise(value)
        else:  # unchanged, so that a column with a watermark keeps it
            columns.append(value)
            continue
        columns.append(value.alias(name))
    return df.select("*", F.explode(parts).alias(_PART)).select(*columns)


def latest_per_key(df: DataFrame, keys: str | Sequence[str], *, keep_deletes: bool = False) -> DataFrame:
    """The last row of each key. Batch only; for a stream, call it in `foreachBatch`.

    Leaves out keys whose last change is a DELETE, keys that an UPDATE changed to another key, and rows from before the
    last TRUNCATE. With `keep_deletes` the result says how to update a keyed copy of the table: first the last TRUNCATE,
    if there is one, then one row per key, where DELETE means that the key must be removed.

    It does not look up columns in `_unchanged_toast_columns` in older rows: read the table with `toast` `cache` or
    `full`.
    """
    schema = _schema_with(df, "latest_per_key", "_op", "_lsn", "_ordinal", "_before")
    _refuse_zset(schema, "latest_per_key", "Use current_state, or read the table without option('changelog', 'zset')")
    names = _check_keys(schema, keys, "latest_per_key")
    _check_can_be_grouped(schema, names, "latest_per_key")
    if df.isStreaming:
        raise ConfigError(
            "latest_per_key cannot read a stream", "Call it in foreachBatch, on the DataFrame of each batch"
        )
    changes = split_key_updates(df.filter(F.col("_op") != "HEARTBEAT"), names)
    latest = changes.groupBy(*(_sent_key(name).alias(f"__pgcdc_key{i}") for i, name in enumerate(names))).agg(
        F.max_by(F.struct(*(_column(name) for name in schema.fieldNames())), sequence()).alias(_ROW)
    )
    # Filter the result rather than the input, so that Spark reads the input only once.
    row = F.col(_ROW)
    place = F.struct(row["_lsn"], row["_ordinal"])
    truncated = latest.filter(row["_op"] == "TRUNCATE").agg(F.max(place).alias(_TRUNCATED))
    rows = latest.crossJoin(F.broadcast(truncated))
    rows = rows.filter(F.col(_TRUNCATED).isNull() | (place >= F.col(_TRUNCATED)))
    if not keep_deletes:
        rows = rows.filter(~row["_op"].isin("DELETE", "TRUNCATE"))
    return rows.select(f"{_ROW}.*")


def current_state(df: DataFrame) -> DataFrame:
    """The rows of the table that a Z-set (`changelog=zset`) adds up to, without metadata. Batch and streaming.

    A row appears as often as the table contains it. A stream needs the output mode `complete`, which returns the whole
    state each time. `update` returns only existing rows whose count changed, and does not show which rows are gone.

    In a batch, rows from before a TRUNCATE are gone; a stream stops at a TRUNCATE, because sums cannot be taken back.
    """
    schema = _schema_with(df, "current_state", "_op", "_lsn", "_ordinal", "_weight")
    names = [name for name in schema.fieldNames() if name not in METADATA]
    _check_can_be_grouped(schema, names, "current_state")
    rows = _stop_at_truncate(df) if df.isStreaming else _after_truncate(df)
    counted = rows.groupBy(*(_column(name) for name in names)).agg(F.sum("_weight").alias(_COUNT))
    repeated = F.explode(F.array_repeat(F.lit(0), F.col(_COUNT).cast("int"))).alias(_PART)
    return counted.filter(F.col(_COUNT) > 0).select("*", repeated).drop(_COUNT, _PART)


def with_watermark(df: DataFrame, delay: str) -> DataFrame:
    """`df` with a watermark on the commit time `_ts`, and without HEARTBEAT rows. Batch and streaming.

    Read the table with `option("heartbeats", "true")`: HEARTBEAT rows move the watermark while there are no changes, so
    that the windows of an idle table close. Call this before your own filters, which would remove the HEARTBEAT rows
    too early.
    """
    _schema_with(df, "with_watermark", "_op", "_ts")
    # Spark pushes filters below a watermark, where they would remove HEARTBEAT rows before those move it. That affects
    # this filter and every later one. Spark does not push a non-deterministic filter, nor any filter past one. A
    # partition number counts as non-deterministic, and costs nothing.
    stays = F.spark_partition_id() >= 0
    return df.withWatermark("_ts", delay).filter(F.when(F.col("_op") == "HEARTBEAT", False).otherwise(stays))


def without_metadata(df: DataFrame, keep: Iterable[str] = ()) -> DataFrame:
    """The table's own columns, and the metadata columns listed in `keep`. Batch and streaming."""
    kept = set(keep)
    unknown = sorted(kept.difference(METADATA))
    if unknown:
        raise ConfigError(
            f"without_metadata: {unknown[0]!r} is not a metadata column",
            suggest(unknown[0], METADATA),
        )
    return df.drop(*(name for name in METADATA if name not in kept))


# --- building blocks


def _after_truncate(df: DataFrame) -> DataFrame:
    """A batch without the rows from before its last TRUNCATE."""
    truncated = df.filter(F.col("_op") == "TRUNCATE").agg(F.max(sequence()).alias(_TRUNCATED))
    later = F.col(_TRUNCATED).isNull() | (sequence() > F.col(_TRUNCATED))
    return df.filter(F.col("_weight").isNotNull()).crossJoin(F.broadcast(truncated)).filter(later)


def _stop_at_truncate(df: DataFrame) -> DataFrame:
    """A stream that fails with advice when it meets a TRUNCATE."""
    reason = F.raise_error(
        F.concat(
            F.lit("current_state: the table was truncated at "),
            typed_position(),
            F.lit(
                ", which a stream of sums cannot follow. Start the query again with a new checkpoint and start position"
            ),
        )
    )
    weight = F.when(F.col("_op") == "TRUNCATE", reason).otherwise(F.col("_weight"))
    return df.withColumn("_weight", weight).filter(F.col("_op") != "HEARTBEAT")


def _sent_key(name: str) -> Column:
    """The key of a row. A DELETE without a key is an error: it would silently leave its row in place."""
    missing = F.raise_error(
        F.lit(
            f"latest_per_key: a DELETE has no value of the key {name!r}. Use the columns of the replica "
            "identity as keys, or run: ALTER TABLE ... REPLICA IDENTITY FULL"
        )
    )
    return F.when((F.col("_op") == "DELETE") & _column(name).isNull(), missing).otherwise(_column(name))


def _parse_position(position: Position | str) -> Position:
    if isinstance(position, Position):
        return position
    try:
        return Position.parse(position)
    except (TypeError, ValueError):
        pass
    try:
        return Position.end(parse_lsn(position))
    except (TypeError, ValueError):
        raise ConfigError(
            f"as_of: {position!r} is not a position",
            "Use a pgcdc.Position, its text (the column position of an event), or an LSN such as '0/16B3748'",
        ) from None


def _schema_with(df: DataFrame, function: str, *needed: str) -> StructType:
    """The schema of `df`, after checking that it has these metadata columns."""
    schema = df.schema
    missing = [name for name in needed if name not in schema.fieldNames()]
    if "_weight" in missing:
        raise ConfigError(
            f"{function} needs the column _weight, which the DataFrame lacks",
            "Read the table with option('changelog', 'zset'); without it, latest_per_key gives the rows of a table",
        )
    if missing:
        raise ConfigError(
            f"{function} needs the column {missing[0]}, which the DataFrame lacks",
            suggest(
                missing[0],
                schema.fieldNames(),
                "Read the table with option('table', ...), and keep its metadata columns until after this function",
            ),
        )
    return schema


def _check_keys(schema: StructType, keys: str | Sequence[str], function: str) -> list[str]:
    names = [keys] if isinstance(keys, str) else list(keys)
    columns = [name for name in schema.fieldNames() if name not in METADATA]
    if not names:
        raise ConfigError(f"{function} needs at least one key", suggest("", columns))
    for name in names:
        if name not in columns:
            raise ConfigError(f"{function}: the table has no column {name!r}", suggest(name, columns))
    return names


def _check_can_be_grouped(schema: StructType, names: Sequence[str], function: str) -> None:
    for name in names:
        if _has_variant(schema[name].dataType):
            raise ConfigError(
                f"{function}: Spark cannot compare column {name!r}, which is or contains a VARIANT",
                f"Read it as text with option('json', 'string'), or remove it with drop({name!r})",
            )


def _has_variant(kind: DataType) -> bool:
    if isinstance(kind, ArrayType):
        return _has_variant(kind.elementType)
    if isinstance(kind, MapType):
        return _has_variant(kind.valueType)
    if isinstance(kind, StructType):
        return any(_has_variant(field.dataType) for field in kind)
    return isinstance(kind, VariantType)


def _refuse_zset(schema: StructType, function: str, advice: str) -> None:
    if "_weight" in schema.fieldNames():
        raise ConfigError(f"{function} cannot read a Z-set", advice)


def _column(name: str) -> Column:
    """The column with that name, whatever characters the name contains."""
    return F.col("`" + name.replace("`", "``") + "`")
