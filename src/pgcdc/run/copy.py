"""A copy of tables as they are now, through the adapters, transforms, masks and routes of a pipeline.

One session reads table after table, in one snapshot (`copy_source.py`). Rows become events as those of a stream do, and go
to the sinks as batches: memory does not grow with the tables. Spark is needed only for transforms that are written in SQL or
Python. Around the rows of each table stand SNAPSHOT_STARTED and SNAPSHOT_COMPLETED. There is no state: the acks of the sinks
are in a folder that goes with the copy, and an event that a target refuses ends it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from pgcdc.core.errors import ConfigError, PgcdcError, SinkError
from pgcdc.core.operation import Op
from pgcdc.core.position import Position
from pgcdc.core.relation import Relations
from pgcdc.core.state import StateDir, fsync_folder
from pgcdc.event.edits import parse_chains
from pgcdc.event.events import block_schema, drop_unwanted, events_of, pack_block
from pgcdc.event.frame import EventOptions, make_frame
from pgcdc.event.texts import IdSeed
from pgcdc.run.copy_source import CopiedTable, Copy, Progress, Say, Wanted, explain_reading, open_copy
from pgcdc.sink.registry import check_adapters, make_sink
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import AdapterSpec, FileOptions
from pgcdc.source.postgres.setup.shapes import ShapeObserver
from pgcdc.source.postgres.snapshot.chunks import lock_chunks
from pgcdc.source.postgres.snapshot.copy import copy_rows, copy_statement
from pgcdc.source.postgres.snapshot.releases import number_rows, snapshot_mark, snapshot_rows
from pgcdc.spark.session import check_java, session
from pgcdc.spool.batch import CaptureBatch
from pgcdc.transform.check import check_chains
from pgcdc.transform.program import BlockProgram, Chain, Program, compile_chains

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["copy_to_adapters"]

KIND = "one-off"


def copy_to_adapters(
    wanted: Wanted,
    adapters: Sequence[AdapterSpec],
    transforms: Sequence[Any] = (),
    *,
    options: EventOptions = EventOptions(),  # noqa: B008 - frozen
    progress: Progress,
    say: Say = lambda text: None,
) -> int:
    """Copy the tables; the number of rows. `transforms` are for all adapters, before their own.

    A file has all of it or is not there. Other targets cannot be taken back: an error says which tables are whole.
    """
    wanted.check()
    check_adapters(adapters)
    with contextlib.ExitStack() as stack:
        state = StateDir(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgcdc-copy-"))))
        state.create()
        files = [_PartialFile(path) for spec in adapters if (path := _plain_file(spec)) is not None]
        sinks = [_make_sink(_beside(spec), state) for spec in adapters]
        pairs = zip(adapters, sinks, strict=True)
        chains = [Chain((*transforms, *spec.transforms), spec.routes, sink.sink.form) for spec, sink in pairs]
        check_chains(None, chains)
        program = compile_chains(chains)
        spark = None if isinstance(program, BlockProgram) else stack.enter_context(_spark(wanted.url, state, say))
        if spark is not None:
            check_chains(spark, chains)
        copy = stack.enter_context(open_copy(wanted, say))
        for file in files:
            stack.callback(file.remove)
        for sink in sinks:
            stack.callback(sink.close)
            sink.open(Position.end(copy.lsn))
        rows = _Copying(copy, wanted.where, sinks, program, spark, options, state, progress).run()
        for file in files:
            file.finish()
        return rows


def _make_sink(spec: AdapterSpec, state: StateDir) -> Runner:
    sink = Runner(make_sink(spec), state.acks, spec.name, spec.delivery)
    try:
        sink.check()
    except SinkError as error:
        raise ConfigError(error.message, error.advice) from error
    return sink


@contextlib.contextmanager
def _spark(url: str, state: StateDir, say: Say) -> Iterator[SparkSession]:
    check_java()
    say("starting Spark: a transform needs it")
    os.environ["PGCDC_DB"] = url
    spark = session("pgcdc snapshot", log_file=state.path / "spark.log")
    try:
        yield spark
    finally:
        with contextlib.suppress(Exception):
            spark.stop()


# --- files, which appear under their name when they are whole


def _plain_file(spec: AdapterSpec) -> Path | None:
    """The file that is all of a target: not a folder, and not one that rotates."""
    options = spec.options
    is_plain = isinstance(options, FileOptions) and not options.is_folder and not options.max_size
    return options.full_path if is_plain and isinstance(options, FileOptions) else None


def _beside(spec: AdapterSpec) -> AdapterSpec:
    path = _plain_file(spec)
    return spec if path is None else replace(spec, options=spec.options.model_copy(update={"path": f"{path}.partial"}))


class _PartialFile:
    """NAME, which is NAME.partial until it is whole. What a killed run has left there is cleared."""

    def __init__(self, path: Path) -> None:
        self._path, self._partial = path, Path(f"{path}.partial")
        self._check()
        self.remove()

    def _check(self) -> None:
        if self._path.exists() and (not self._path.is_file() or self._path.stat().st_size):
            what = "exists and is not empty" if self._path.is_file() else "is not a file"
            raise ConfigError(f"{self._path} {what}", "Move it away, or give another path")

    def finish(self) -> None:
        self._check()
        if self._partial.exists():
            os.replace(self._partial, self._path)
        else:
            self._path.touch()  # no event went there
        fsync_folder(self._path.absolute().parent)

    def remove(self) -> None:
        self._partial.unlink(missing_ok=True)


# --- from rows to sinks


@dataclass(frozen=True, slots=True)
class _Local:
    """Columns that were not made by Spark, where a program takes them from a DataFrame."""

    events: pa.Table

    def toArrow(self) -> pa.Table:
        return self.events


class _Copying:
    """Hands the rows of all tables to the sinks."""

    def __init__(
        self,
        copy: Copy,
        where: str,
        sinks: Sequence[Runner],
        program: Program,
        spark: SparkSession | None,
        options: EventOptions,
        state: StateDir,
        progress: Progress,
    ) -> None:
        self._copy, self._where, self._sinks, self._progress = copy, where, sinks, progress
        self._program, self._spark, self._options = program, spark, options
        self._chains = parse_chains(program.source_options().get("_chains", ""))
        self._name = uuid.uuid4().hex[:8]
        self._seed = IdSeed.of("snapshot", uuid.uuid4().hex)
        self._relations = Relations()
        self._shapes = ShapeObserver(state.shapes_file, Position.end(copy.lsn))
        self._end = Position.end(copy.lsn)
        self._ordinal = 0

    def run(self) -> int:
        total = 0
        for number, table in enumerate(self._copy.tables):
            try:
                total += self._copy_table(table)
            except PgcdcError as error:
                done = ", ".join(one.name for one in self._copy.tables[:number]) or "no table"
                advice = f"{error.advice}. " if error.advice else ""
                error.advice = f"{advice}What was delivered is not complete: {done} is whole, {table.name} is not"
                error.args = (error.message, error.advice)
                raise
        return total

    def _copy_table(self, table: CopiedTable) -> int:
        relation, rows = table.relation, 0
        columns = [column.name for column in relation.columns]
        self._progress.begin(table.name, table.estimated_rows)
        self._emit(snapshot_mark(Op.SNAPSHOT_STARTED, self._name, KIND, relation, 0), table)
        with explain_reading(table.name):
            lock_chunks(self._copy.conn, table.chunks)
            for chunk in table.chunks:
                conditions = [*chunk.conditions, *filter(None, (table.row_filter, self._where))]
                statement = copy_statement(columns, chunk.source, conditions)
                for values in copy_rows(self._copy.conn, statement, len(columns)):
                    batch = snapshot_rows(values, len(columns))
                    self._emit(batch, table)
                    rows += batch.num_rows
                    self._progress.advance(rows)
        self._emit(snapshot_mark(Op.SNAPSHOT_COMPLETED, self._name, KIND, relation, rows), table)
        self._progress.end(rows)
        return rows

    def _emit(self, rows: pa.RecordBatch, table: CopiedTable) -> None:
        """Rows to all sinks, as one batch."""
        batch = number_rows(
            rows, self._copy.lsn, self._ordinal, table.relation, self._relations, time_us=self._copy.time_us
        )
        self._ordinal += rows.num_rows
        self._shapes.observe(batch, self._copy.catalog)
        start, self._end = self._end, batch.end
        made = self._program.collect(self._frame(batch), start, self._end)
        for sink, one in zip(self._sinks, made, strict=True):
            sink.write(one)

    def _frame(self, batch: CaptureBatch) -> DataFrame:
        """The columns that the program asks for."""
        assert batch.part is not None and batch.part.batch is not None
        owners = batch.transactions.take(pa.array(np.zeros(batch.part.rows, np.int64)))
        relations = [self._relations[version] for version in range(len(self._relations))]
        frame = make_frame(batch.part.batch, owners, relations, self._options)
        if self._spark is None:
            events = events_of(frame, self._seed, block_schema(self._chains), self._options, self._chains)
            events = drop_unwanted(events) if self._chains else events
            return cast("DataFrame", _Local(pa.Table.from_batches(pack_block(events))))
        from pyspark.sql.pandas.types import to_arrow_schema
        from pyspark.sql.types import StructType

        schema = cast(StructType, StructType.fromDDL(self._program.source_schema()))
        events = events_of(frame, self._seed, to_arrow_schema(schema, timezone="UTC"), self._options, self._chains)
        made: DataFrame = self._spark.createDataFrame(pa.Table.from_batches([events]), schema)
        return made
