"""What a lane asks of Spark for its sinks: every batch is read once and collected once, whatever its sinks want of it.

`compile_chains` chooses the cheapest form. Where all transforms are simple, the source does them itself and events travel in
blocks (`BlockProgram`). Else Spark has the columns of the events (`ColumnProgram`); chains whose text the source can
render still get it from there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from pgcdc.core.errors import ConfigError
from pgcdc.event.edits import dump_chains, full_pattern
from pgcdc.event.events import BLOCKS, KEYED_BLOCKS, LINES, chain_column, unpack_blocks
from pgcdc.transform.row_json import row_lines

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from pgcdc.transform.transforms import Transform

__all__ = ["RECORDS", "BlockProgram", "Chain", "Program", "Steps", "TypedProgram", "compile_chains", "split_lines"]

RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"


@dataclass(frozen=True)
class Chain:
    """What one sink wants: channel patterns (none: all channels), then transforms in order (`transform.specs`)."""

    transforms: tuple[Any, ...] = ()
    routes: tuple[str, ...] = ()


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

    def collect(self, batch: DataFrame) -> list[pa.Table]:
        """For each chain its events in stream order (`stream.events.LINES`), of a batch before or behind `project`.

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
        return BlockProgram(tuple(chains), tuple(distinct), tuple(of_chain), keyed)
    from pgcdc.transform.columns import ColumnProgram

    return ColumnProgram(tuple(chains), tuple(distinct), tuple(of_chain), transaction, keyed)


@dataclass(frozen=True)
class BlockProgram:
    """The source does everything: Spark moves blocks of finished lines."""

    chains: tuple[Chain, ...]
    distinct: tuple[Steps, ...]
    of_chain: tuple[int, ...]
    """Which of the distinct ones each chain is."""
    keyed: bool = False

    @property
    def _is_plain(self) -> bool:
        return all(not one.routes and not one.transforms for one in self.distinct)

    def source_options(self) -> dict[str, str]:
        return {} if self._is_plain else {"_chains": dump_chains((one.routes, one.simple) for one in self.distinct)}

    def source_schema(self) -> str:
        return KEYED_BLOCKS if self.keyed else BLOCKS

    def line_column(self, chain: Chain) -> str:
        return "line" if self._is_plain else chain_column(self.of_chain[self.chains.index(chain)])

    def settings(self) -> dict[str, str]:
        return {RECORDS: "1"}  # one block at a time through the JVM

    def project(self, events: DataFrame) -> DataFrame:
        return events

    def collect(self, batch: DataFrame) -> list[pa.Table]:
        blocks = batch.toArrow()
        if self._is_plain:
            return [unpack_blocks(blocks)] * len(self.chains)
        tables = split_lines(unpack_blocks(blocks, len(self.distinct)))
        return [tables[number] for number in self.of_chain]

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

    def collect(self, batch: DataFrame) -> list[pa.Table]:
        return [batch.toArrow().cast(LINES)]

    def explain(self, batch: DataFrame, error: Exception) -> Exception:
        return error


def split_lines(events: pa.Table) -> list[pa.Table]:
    """For each column of lines the events that it has, in the schema LINES."""
    positions = events.column("position")
    tables = []
    for number in range(events.num_columns - 1):
        lines = events.column(chain_column(number))
        table = pa.Table.from_arrays([positions, lines], schema=LINES)
        tables.append(table.filter(lines.is_valid()) if lines.null_count else table)
    return tables


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
