"""What a lane reads from Spark for its sinks: every batch is read and collected once, however many sinks there are.

`compile_chains` chooses the cheapest way. If all transforms are simple, the source applies them and events travel in
blocks (`BlockProgram`). With SQL conditions this still works, and Spark also gets the columns that the conditions read
(`AskProgram`). Otherwise Spark gets the events' columns for the steps that only Spark can do (`ColumnProgram`): the
source applies the steps before them, and this module the steps after them, with the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.errors import PgcdcError
from pgcdc.core.position import Position
from pgcdc.core.wording import counted
from pgcdc.event.batch import Batch, split_forms
from pgcdc.event.columns import CHANGEABLE, EVENT_COLUMNS, KEY_COLUMNS, SHAPE_COLUMNS, ColumnReader
from pgcdc.event.edits import SimpleChain, dump_chains
from pgcdc.event.events import BLOCKS, KEYED_BLOCKS, LINES, block_schema, events_of, pack_block, unpack_blocks
from pgcdc.event.forms import Form, event_column, form_column
from pgcdc.event.frame import EventOptions
from pgcdc.transform.failures import explain_failure
from pgcdc.transform.specs import Chain, Transform

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

POSITION_CHARACTERS = 30  # Without the number of a part
_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_ROW_OPTIONS = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    "timeZone": "UTC",
}


ToArrow = Callable[["DataFrame"], pa.Table]


def _to_arrow(batch: DataFrame) -> pa.Table:
    return batch.toArrow()


def compile_chains(chains: Sequence[Chain], *, transaction: bool = False, keyed: bool = False) -> Program:
    """The cheapest program for all these chains.

    `transaction`: events name their transaction (`--tx-metadata`). `keyed`: also read which events must stay in order,
    for executors that write (`stream.parallel`). Raises ConfigError for an invalid transform; `check_chains` also
    checks its SQL.
    """
    made = [chain.made() for chain in chains]
    distinct: list[Chain] = []
    for one in made:
        if one not in distinct:
            distinct.append(one)
    is_simple, asks = all(one.is_simple for one in distinct), all(one.only_asks for one in distinct)
    kind = BlockProgram if is_simple else AskProgram if asks else ColumnProgram
    return kind(tuple(chains), tuple(distinct), tuple(map(distinct.index, made)), transaction, keyed)


@dataclass(frozen=True)
class Program:
    """Chains prepared for one lane. Some may differ only in form."""

    chains: tuple[Chain, ...] = (Chain(),)  # One per sink that asked
    distinct: tuple[Chain, ...] = ()
    of_chain: tuple[int, ...] = ()  # The index of each chain's distinct chain
    transaction: bool = False
    keyed: bool = False

    def forms(self, number: int) -> list[Form]:
        return sorted({one.form for one, its in zip(self.chains, self.of_chain, strict=True) if its == number})

    def source_options(self) -> dict[str, str]:
        """The query's options for the Spark source. Never contains a secret, because Spark's plans show options."""
        return {}

    def source_schema(self) -> str:
        """The columns to read, as Spark DDL; none: the table decides."""
        return ""

    def settings(self) -> dict[str, str]:
        """Spark settings for the start of the query, which keeps them."""
        return {_RECORDS: "10000"}

    def project(self, events: DataFrame) -> DataFrame:
        """Turn the source's output into what is collected. Applied to the streaming DataFrame, where it is planned
        once."""
        return events

    def line_column(self, chain: Chain) -> str:
        """The column of a chain's lines inside keyed blocks."""
        return form_column(self.of_chain[self.chains.index(chain)])

    def keyed_blocks(self, batch: DataFrame, column: str) -> DataFrame:
        """A batch after `project` as KEYED_BLOCKS with this column of lines, made by the executors."""
        return batch

    def collect(self, batch: DataFrame, start: Position, end: Position, to_arrow: ToArrow | None = None) -> list[Batch]:
        """Each chain's events of (start, end] in its form, from a DataFrame after `project`.

        Runs one Spark job, or `to_arrow` instead. TransformError: a transform fails for an event.
        """
        from pyspark.errors import PySparkException

        try:
            collected = (to_arrow or _to_arrow)(batch)
        except PySparkException as error:
            found = self.explain(batch, error)
            if found is error:
                raise
            raise found from error
        return self._split(collected, start, end)

    def _split(self, collected: pa.Table, start: Position, end: Position) -> list[Batch]:
        raise NotImplementedError

    def explain(self, batch: DataFrame, error: Exception) -> Exception:
        """The error of the transform that failed in a job over a batch after `project`; if none did, the same error."""
        return error


class BlockProgram(Program):
    """The source does everything; Spark moves its blocks."""

    @cached_property
    def _pushed(self) -> tuple[SimpleChain, ...]:
        is_plain = all(not one.routes and not one.transforms for one in self.distinct)
        if is_plain and all(one.form == "lines" for one in self.chains):
            return ()
        return tuple(
            SimpleChain(one.routes, _simple_steps(one.transforms), tuple(self.forms(number)))
            for number, one in enumerate(self.distinct)
        )

    def source_options(self) -> dict[str, str]:
        return {"_chains": dump_chains(self._pushed)} if self._pushed else {}

    def source_schema(self) -> str:
        return KEYED_BLOCKS if self.keyed else BLOCKS

    def line_column(self, chain: Chain) -> str:
        return super().line_column(chain) if self._pushed else "line"

    def settings(self) -> dict[str, str]:
        # One block at a time through the JVM. Nothing is computed there, so generating code for it would be a waste.
        return {_RECORDS: "1", "spark.sql.codegen.wholeStage": "false"}

    def _split(self, collected: pa.Table, start: Position, end: Position) -> list[Batch]:
        events, beside = unpack_blocks(collected, self._pushed)
        if not self._pushed:
            return [Batch(start, end, events)] * len(self.chains)
        wanted = [(number, chain.form) for number, chain in zip(self.of_chain, self.chains, strict=True)]
        return split_forms(Batch(start, end, events, transaction=self.transaction), wanted, beside)


def _simple_steps(transforms: Iterable[Transform]) -> tuple[dict[str, Any], ...]:
    return tuple(one.step for one in transforms if one.is_simple)


class AskProgram(BlockProgram):
    """The source does everything except conditions in SQL.

    After each block, Spark gets a row for each of its events that contains only what the conditions read, and decides
    whether the event is kept.
    """

    @cached_property
    def _asks(self) -> list[tuple[int, Transform, SimpleChain]]:
        """Each condition with its distinct chain and the columns it reads, of the event as the previous steps leave
        it."""
        from pgcdc.transform.expressions import find_read

        found = []
        for number, chain in enumerate(self.distinct):
            for place, one in enumerate(chain.transforms):
                if not one.is_simple:
                    columns, values = find_read(one.sql)
                    columns |= {
                        "table",
                        "row",
                        *(["operation"] if one.step["operations"] else []),
                    }  # `filtered` reads them
                    steps = _simple_steps(step for step in chain.transforms[:place] if not step.is_envelope)
                    if values is not None:
                        steps = (*steps, {"type": "keep_columns", "columns": values})
                    asked = tuple(name for name in EVENT_COLUMNS if name in columns)
                    found.append((number, one, SimpleChain(chain.routes, steps, (), asked=asked)))
        return found

    @cached_property
    def _asking(self) -> list[SimpleChain]:
        """The same without duplicates: adapters may share conditions."""
        asking = [one for _, _, one in self._asks]
        return [one for place, one in enumerate(asking) if one not in asking[:place]]

    def _column(self, asking: SimpleChain) -> str:
        return event_column(len(self._pushed) + self._asking.index(asking))

    def source_options(self) -> dict[str, str]:
        return {"_chains": dump_chains([*self._pushed, *self._asking])}

    def source_schema(self) -> str:
        columns = ["lsn BIGINT", "ordinal BIGINT"]  # for the position of a failing event
        for asking in self._asking:
            fields = ",".join(f"`{name}`:{EVENT_COLUMNS[name]}" for name in asking.asked)
            columns.append(f"`{self._column(asking)}` struct<{fields}>")
        return ", ".join([super().source_schema(), *columns])

    def settings(self) -> dict[str, str]:
        return Program.settings(self)

    def project(self, events: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        from pgcdc.transform.steps import KEEP

        frame = events.withColumnsRenamed({"lsn": "_lsn", "ordinal": "_ordinal"})
        for number, one, asking in self._asks:
            kept, event = f"_kept_{number}", self._column(asking)
            is_asked = F.col(event).isNotNull() & (F.col(kept) if kept in frame.columns else F.lit(True))
            asked = one(frame.select("*", f"{event}.*").withColumn(KEEP, is_asked))
            frame = asked.select(*(name for name in frame.columns if name != kept), F.col(KEEP).alias(kept))
        return frame.drop(*map(self._column, self._asking))

    def _open(self, collected: pa.Table) -> tuple[pa.Table, list[dict[bytes, bytes]], dict[int, pa.ChunkedArray]]:
        """The events of blocks, the data next to them, and which of the events each distinct chain keeps."""
        is_block = collected.column(0).is_valid()
        blocks = collected.select([0, 1]).filter(is_block)
        asked = collected.filter(pc.invert(is_block))
        events, beside = unpack_blocks(blocks, self._pushed, keyed=self.keyed)
        _check_order(asked, events.column("position"))
        return events, beside, {number: asked.column(f"_kept_{number}") for number, _, _ in self._asks}

    def _split(self, collected: pa.Table, start: Position, end: Position) -> list[Batch]:
        events, beside, kept = self._open(collected)
        wanted = [(number, chain.form) for number, chain in zip(self.of_chain, self.chains, strict=True)]
        return split_forms(Batch(start, end, events, transaction=self.transaction), wanted, beside, kept)

    def keyed_blocks(self, batch: DataFrame, column: str) -> DataFrame:
        from pgcdc.transform.steps import map_in_arrow

        number = next(number for number in range(len(self.distinct)) if form_column(number) == column)

        def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            rows = list(batches)  # of one task
            if rows:
                events, _, kept = self._open(pa.Table.from_batches(rows))
                wanted = events.column(column).is_valid()
                wanted = pc.and_(wanted, kept[number]) if number in kept else wanted
                for part in events.select(["position", column, "key_hash", "is_barrier"]).filter(wanted).to_batches():
                    yield from pack_block(part, "keyed_block")

        return map_in_arrow(batch, pack, pa.schema([("keyed_block", pa.binary()), ("is_last", pa.bool_())]))

    def explain(self, batch: DataFrame, error: Exception) -> Exception:
        events = batch.where(batch["_lsn"].isNotNull()).withColumn("position", typed_position())
        return explain_failure(events, error, self.distinct)


def _check_order(asked: pa.Table, positions: pa.ChunkedArray) -> None:
    """Raise if the rows that Spark answered for are not the events, in their order: an answer would hit another one."""
    lsn, ordinal = (asked.column(name).to_numpy() for name in ("_lsn", "_ordinal"))
    is_behind = (lsn[1:] < lsn[:-1]) | ((lsn[1:] == lsn[:-1]) & (ordinal[1:] < ordinal[:-1]))
    texts = [f"{one:016X}/{place:013X}" for one, place in zip(lsn, ordinal, strict=True)] if is_behind.any() else None
    events = pc.utf8_slice_codeunits(positions, 0, POSITION_CHARACTERS).to_pylist() if texts is not None else None
    if len(asked) != len(positions) or texts != events:
        raise PgcdcError(
            f"Spark answered for {counted(len(asked), 'row')} of {counted(len(positions), 'event')}, or in another order",
            "Look for what changes Spark's plans, such as an extension. Nothing was delivered of this batch",
        )


class ColumnProgram(Program):
    """Spark has a column per distinct chain: the event after the steps so far. NULL: dropped."""

    def _needs_shapes(self, number: int) -> bool:
        is_debezium = any(one.type == "debezium" for one in self.distinct[number].transforms)
        return is_debezium or self.forms(number) != ["lines"]

    def source_options(self) -> dict[str, str]:
        chains = []
        for number, one in enumerate(self.distinct):
            steps = tuple(step.step for step in one.parts[0])
            chains.append(SimpleChain(one.routes, steps, ("shapes",) if self._needs_shapes(number) else ()))
        return {"_chains": dump_chains(chains)}

    def source_schema(self) -> str:
        columns = {name: kind for name, kind in EVENT_COLUMNS.items() if name not in CHANGEABLE}
        columns["table_ordinal"] = SHAPE_COLUMNS["table_ordinal"]
        columns |= {name: KEY_COLUMNS[name] for name in ("key_hash", "is_barrier")}
        fields = ",".join(f"`{name}`:{EVENT_COLUMNS[name]}" for name in CHANGEABLE)
        for number in range(len(self.distinct)):
            shape = f",shape:{SHAPE_COLUMNS['shape']}" if self._needs_shapes(number) else ""
            columns[event_column(number)] = f"struct<{fields}{shape}>"
        return ", ".join(f"`{name}` {kind}" for name, kind in columns.items())

    def project(self, events: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        hidden = [event_column(number) for number in range(len(self.distinct))]
        names, frame = events.columns, events.withColumnsRenamed({name: f"_{name}" for name in hidden})
        for number, chain in enumerate(self.distinct):
            if chain.parts[1]:
                frame = self._run(frame, f"_{event_column(number)}", chain.parts[1])
        return frame.select(*(F.col(f"_{name}").alias(name) if name in hidden else F.col(name) for name in names))

    def _run(self, frame: DataFrame, name: str, transforms: list[Transform]) -> DataFrame:
        from pyspark.sql import functions as F

        from pgcdc.transform.steps import KEEP, run_native

        fields = frame.select(f"{name}.*").columns
        events = frame.select("*", f"{name}.*").withColumn(KEEP, F.col(name).isNotNull())
        for is_native, some in groupby(transforms, lambda one: one.type not in ("filter", "sql")):
            if is_native:
                events = run_native(events, [one.worker_step for one in some])
            else:
                for one in some:
                    events = one(events)
        changed = F.when(F.col(KEEP), F.struct(*fields))
        return events.select(*(changed.alias(name) if one == name else F.col(one) for one in frame.columns))

    def keyed_blocks(self, batch: DataFrame, column: str) -> DataFrame:
        from pgcdc.transform.steps import map_in_arrow

        number = next(number for number in range(len(self.distinct)) if form_column(number) == column)

        def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for events in self._made(batches, number, ["lines"]):
                chosen = [*events.schema.names]
                chosen[chosen.index(form_column(0))] = column
                yield from pack_block(events.rename_columns(chosen), "keyed_block")

        return map_in_arrow(batch, pack, pa.schema([("keyed_block", pa.binary()), ("is_last", pa.bool_())]))

    def _split(self, collected: pa.Table, start: Position, end: Position) -> list[Batch]:
        found: dict[tuple[int, Form], Batch] = {}
        for number in range(len(self.distinct)):
            forms = self.forms(number)
            made = list(self._made(collected.to_batches(), number, forms))
            schema = block_schema([SimpleChain((), (), tuple(forms))], keyed=True)
            events = pa.Table.from_batches([one.replace_schema_metadata() for one in made], schema)
            whole = Batch(start, end, events, transaction=self.transaction)
            beside = [one.schema.metadata for one in made if one.schema.metadata]
            for form, one in zip(forms, split_forms(whole, [(0, form) for form in forms], beside), strict=True):
                found[number, form] = one
        return [found[number, chain.form] for number, chain in zip(self.of_chain, self.chains, strict=True)]

    def _made(self, batches: Iterable[pa.RecordBatch], number: int, forms: list[Form]) -> Iterator[pa.RecordBatch]:
        """The events of a distinct chain in these forms, as a chain numbered 0."""
        chain = SimpleChain((), tuple(one.step for one in self.distinct[number].parts[2]), tuple(forms))
        reader, schema = ColumnReader(), block_schema([chain], keyed=True)
        for batch in batches:
            mine = batch.filter(batch.column(event_column(number)).is_valid())
            event = pa.RecordBatch.from_struct_array(mine.column(event_column(number)))
            fixed = mine.select([name for name in mine.schema.names if name in _FIXED])
            if mine.num_rows:
                columns = [*fixed.columns, *event.columns]
                events = pa.RecordBatch.from_arrays(columns, [*fixed.schema.names, *event.schema.names])
                frame, given = reader.read(events)
                yield events_of(frame, None, schema, EventOptions(self.transaction), [chain], given)

    def explain(self, batch: DataFrame, error: Exception) -> Exception:
        return explain_failure(batch, error, self.distinct)


_FIXED = {*EVENT_COLUMNS, "table_ordinal", "key_hash", "is_barrier"} - set(CHANGEABLE)


class TypedProgram(Program):
    """Rows of one table with their own columns, as lines. Has a single chain: transforms are for events."""

    def project(self, events: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        line = F.concat(F.to_json(F.struct("*"), _ROW_OPTIONS), F.lit("\n"))
        return events.select(typed_position().alias("position"), line.alias("line"))

    def line_column(self, chain: Chain) -> str:
        return "line"

    def _split(self, collected: pa.Table, start: Position, end: Position) -> list[Batch]:
        return [Batch(start, end, collected.cast(LINES))]


def typed_position() -> Column:
    """The position of a typed row as text, as `str(Position)` writes it. `_ordinal` also contains the kind
    (`Position.place`)."""
    from pyspark.sql import functions as F

    return F.concat(F.lpad(F.hex("_lsn"), 16, "0"), F.lit("/"), F.lpad(F.hex("_ordinal"), 13, "0"))
