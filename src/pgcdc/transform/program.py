"""What a lane asks of Spark for its sinks: every batch is read once and collected once, whatever its sinks want of it.

`compile_chains` chooses the cheapest form. Where all transforms are simple, the source does them itself and events travel in
blocks (`BlockProgram`). Else Spark has the columns of the events (`ColumnProgram`); chains whose text the source can
render still get it from there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from pgcdc.core.errors import ConfigError
from pgcdc.core.position import Position
from pgcdc.event.batch import Batch
from pgcdc.event.edits import SimpleChain, dump_chains, full_pattern
from pgcdc.event.events import BLOCKS, KEYED_BLOCKS, LINES, unpack_blocks
from pgcdc.event.forms import Form, form_column, read_shapes
from pgcdc.transform.row_json import row_lines

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from pgcdc.transform.transforms import Transform

__all__ = ["RECORDS", "BlockProgram", "Chain", "Program", "Steps", "TypedProgram", "compile_chains", "split_forms"]

RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"


@dataclass(frozen=True)
class Chain:
    """What one sink wants: channel patterns (none: all channels), transforms in order (`transform.specs`), and the form."""

    transforms: tuple[Any, ...] = ()
    routes: tuple[str, ...] = ()
    form: Form = "lines"


class Program(Protocol):
    """Chains, made ready for one lane."""

    @property
    def chains(self) -> Sequence[Chain]:
        """One for each sink that asked."""

    def source_options(self) -> dict[str, str]:
        """Options of the Spark source that the query needs (never a secret: they stand in Spark's plans)."""

    def source_schema(self) -> str:
        """The columns to read, as Spark DDL."""

    def settings(self) -> dict[str, str]:
        """Settings of Spark with which the query is started, and which it keeps."""

    def project(self, events: DataFrame) -> DataFrame:
        """What the source gives, as it is collected. Meant for the streaming DataFrame, where it is planned once."""

    def line_column(self, chain: Chain) -> str:
        """Which column has a chain's lines, behind `project` and inside of blocks."""

    def collect(self, batch: DataFrame, start: Position, end: Position) -> list[Batch]:
        """For each chain its events of (start, end] in its form, of a DataFrame before or behind `project`.

        Runs one Spark job. TransformError: a transform cannot do what it is told with an event.
        """

    def explain(self, batch: DataFrame, error: Exception) -> Exception:
        """What failed in a job over a batch behind `project`, if it is a transform; else the same error."""


@dataclass(frozen=True)
class Steps:
    """A chain with its transforms made, and what can be done where."""

    routes: tuple[str, ...]
    transforms: tuple[Transform, ...]

    @property
    def is_simple(self) -> bool:
        """The source can do all of it."""
        return all(one.is_simple for one in self.transforms)

    @property
    def is_rendered(self) -> bool:
        """The source can make the text; only which events there are needs Spark."""
        return all(one.is_simple or one.name == "filter" for one in self.transforms)

    @property
    def simple(self) -> list[dict[str, Any]]:
        """What the source does, as JSON."""
        return [one.spec.model_dump(mode="json") for one in self.transforms if one.is_simple]

    def check(self) -> None:
        """Raise ConfigError if something follows an envelope that does not fit there, or names what an earlier step took."""
        closed = ""
        gone: dict[str, str] = {}
        for one in self.transforms:
            _check_names(one.name, one.spec, gone)
            if closed and one.name != "filter":
                raise ConfigError(
                    f"transform {one.name} stands behind {closed}, which has made text of the event",
                    f"Put {closed} last, or give it to the adapters that want it; only filters may follow",
                )
            closed = one.name if one.is_envelope else closed


def _check_names(kind: str, spec: Any, gone: dict[str, str]) -> None:
    """`gone`: columns that no event has at this step, and where they went ("": they were dropped)."""
    if kind == "python":  # it may add what it likes
        gone.clear()
    elif kind == "sql":
        for name in spec.set:
            gone.pop(name, None)
    if kind not in ("drop_columns", "mask", "rename_fields"):
        return
    names = tuple(spec.fields) if kind == "rename_fields" else spec.columns
    for name in names:
        if gone.get(name):
            raise ConfigError(
                f"{kind} names the column {name}, which an earlier rename_fields calls {gone[name]}",
                f"Write {gone[name]}, or put {kind} first",
            )
        if name in gone and kind != "drop_columns":  # twice dropped is what was wanted
            raise ConfigError(
                f"{kind} names the column {name}, which an earlier drop_columns leaves out", "Leave it out here"
            )
    if kind == "drop_columns":
        gone.update(dict.fromkeys(names, ""))
    elif kind == "rename_fields":
        gone.update(spec.fields)
        for name in spec.fields.values():
            gone.pop(name, None)


def compile_chains(chains: Sequence[Chain], *, transaction: bool = False, keyed: bool = False) -> Program:
    """The cheapest way to all these chains. `transaction`: events say which transaction they belong to (`--tx-metadata`).

    `keyed`: what is read also says which events must stay in order, for executors that write (`stream.parallel`).

    Raises ConfigError for a transform that cannot be made; `check_chains` also looks at its SQL.
    """
    made = [_steps(chain) for chain in chains]
    distinct: list[Steps] = []
    for one in made:
        if one not in distinct:
            distinct.append(one)
    of_chain = [distinct.index(one) for one in made]
    if all(one.is_simple for one in distinct):
        return BlockProgram(tuple(chains), tuple(distinct), tuple(of_chain), transaction, keyed)
    from pgcdc.transform.columns import ColumnProgram

    return ColumnProgram(tuple(chains), tuple(distinct), tuple(of_chain), transaction, keyed)


@dataclass(frozen=True)
class BlockProgram:
    """The source does everything: Spark moves blocks of what it made."""

    chains: tuple[Chain, ...]
    distinct: tuple[Steps, ...]
    of_chain: tuple[int, ...]
    """Which of the distinct ones each chain is."""
    transaction: bool = False
    keyed: bool = False

    @property
    def _is_plain(self) -> bool:
        plain = all(not one.routes and not one.transforms for one in self.distinct)
        return plain and all(one.form == "lines" for one in self.chains)

    @cached_property
    def _pushed(self) -> tuple[SimpleChain, ...]:
        if self._is_plain:
            return ()
        forms = [
            {one.form for one, its in zip(self.chains, self.of_chain, strict=True) if its == number}
            for number in range(len(self.distinct))
        ]
        pairs = zip(self.distinct, forms, strict=True)
        return tuple(SimpleChain(one.routes, tuple(one.simple), tuple(sorted(wanted))) for one, wanted in pairs)

    def source_options(self) -> dict[str, str]:
        return {"_chains": dump_chains(self._pushed)} if self._pushed else {}

    def source_schema(self) -> str:
        return KEYED_BLOCKS if self.keyed else BLOCKS

    def line_column(self, chain: Chain) -> str:
        return form_column(self.of_chain[self.chains.index(chain)]) if self._pushed else "line"

    def settings(self) -> dict[str, str]:
        return {RECORDS: "1"}  # one block at a time through the JVM

    def project(self, events: DataFrame) -> DataFrame:
        return events

    def collect(self, batch: DataFrame, start: Position, end: Position) -> list[Batch]:
        events, beside = unpack_blocks(batch.toArrow(), self._pushed)
        if not self._pushed:
            return [Batch(start, end, events)] * len(self.chains)
        wanted = [(number, chain.form) for number, chain in zip(self.of_chain, self.chains, strict=True)]
        return split_forms(Batch(start, end, events, transaction=self.transaction), wanted, beside)

    def explain(self, batch: DataFrame, error: Exception) -> Exception:
        return error


class TypedProgram:
    """Rows of one table with their own columns, as lines. There is one chain: transforms are for events."""

    chains: Sequence[Chain] = (Chain(),)

    def source_options(self) -> dict[str, str]:
        return {}

    def source_schema(self) -> str:
        """None: the table says which columns there are."""
        return ""

    def settings(self) -> dict[str, str]:
        return {RECORDS: "10000"}

    def project(self, events: DataFrame) -> DataFrame:
        return row_lines(events)

    def line_column(self, chain: Chain) -> str:
        return "line"

    def collect(self, batch: DataFrame, start: Position, end: Position) -> list[Batch]:
        return [Batch(start, end, batch.toArrow().cast(LINES))]

    def explain(self, batch: DataFrame, error: Exception) -> Exception:
        return error


def split_forms(
    batch: Batch, wanted: Sequence[tuple[int, Form]], beside: Sequence[Mapping[bytes, bytes]] = ()
) -> list[Batch]:
    """The events that chains have, in their forms: of a batch with a column for each (`form_column`)."""
    made: dict[tuple[int, Form], Batch] = {}
    for number, form in wanted:
        if (number, form) not in made:
            name = form_column(number, form)
            column, positions = batch.events.column(name), batch.positions()
            if column.null_count:
                positions, column = positions.filter(column.is_valid()), column.drop_null()
            fields = [("line", column)] if form == "lines" else zip(column.type.names, column.flatten(), strict=True)
            texts = (one[name.encode()].decode() for one in beside if form == "tables")
            events = pa.table({"position": positions, **dict(fields)})
            made[number, form] = replace(batch, events=events, shapes=read_shapes(texts))
    return [made[one] for one in wanted]


def _steps(chain: Chain) -> Steps:
    from pgcdc.transform.transforms import from_spec

    for pattern in chain.routes:
        if not pattern or re.search(r"\s", pattern):
            raise ConfigError(
                f"route {pattern!r} is no channel pattern", "Write names such as orders, sales.* or pgcdc:_txn"
            )
    steps = Steps(tuple(map(full_pattern, chain.routes)), tuple(map(from_spec, chain.transforms)))
    steps.check()
    return steps
