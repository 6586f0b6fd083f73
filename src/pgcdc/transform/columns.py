"""The program of a lane with transforms that only Spark can do: events as columns, chains as projections."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from pgcdc.core.errors import PgcdcError, TransformError
from pgcdc.core.position import Position
from pgcdc.event.batch import Batch
from pgcdc.event.columns import records_of, tables_of
from pgcdc.event.edits import SimpleChain, dump_chains
from pgcdc.event.events import EVENT_COLUMNS, KEY_COLUMNS, RELATION_COLUMNS, SHAPE_COLUMNS
from pgcdc.event.forms import Form, form_column
from pgcdc.transform.event_json import event_json
from pgcdc.transform.expressions import KEEP, is_routed
from pgcdc.transform.program import RECORDS, Chain, Steps, split_forms
from pgcdc.transform.python_function import CHANGEABLE
from pgcdc.transform.transforms import TEXT

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["ColumnProgram"]

_BASE = "_base"
_KEYS = ("key_hash", "is_barrier")
_ROWS = 10_000
_OF_EVENTS = ("id", "created_at", "ordinal", "xid", "relation", *_KEYS)
"""What forms other than lines need besides what a chain may change."""
_INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.subexpressionElimination.enabled": "false",
}
"""The expression of an envelope is too large for Java: Spark would compile it in vain, for two seconds in every batch."""
_ALWAYS = ("position", "channel", "operation", "table", "row")
"""What conditions are asked of."""


@dataclass(frozen=True)
class ColumnProgram:
    """Each distinct chain is a column of lines, NULL where the chain does not have the event."""

    chains: tuple[Chain, ...]
    distinct: tuple[Steps, ...]
    of_chain: tuple[int, ...]
    transaction: bool
    keyed: bool = False

    @property
    def _rendered(self) -> list[Steps]:
        return [one for one in self.distinct if one.is_rendered]

    @property
    def _has_envelope(self) -> bool:
        """Whether Spark has to make one: the source does, if Spark changes nothing in events."""
        return any(one.is_envelope for chain in self.distinct if not chain.is_rendered for one in chain.transforms)

    @property
    def _has_forms(self) -> bool:
        return any(chain.form != "lines" for chain in self.chains)

    def _forms(self, number: int) -> set[Form]:
        """What is wanted of a distinct chain."""
        return {chain.form for chain, its in zip(self.chains, self.of_chain, strict=True) if its == number}

    def source_options(self) -> dict[str, str]:
        chains = [SimpleChain(one.routes, tuple(one.simple)) for one in self._rendered]
        return {"_chains": dump_chains(chains)} if chains else {}

    def source_schema(self) -> str:
        columns = {name: kind for name, kind in EVENT_COLUMNS.items() if name in self._wanted()}
        if self._has_envelope:
            columns |= SHAPE_COLUMNS
        if self._has_forms:
            columns |= RELATION_COLUMNS
        columns |= {name: KEY_COLUMNS[name] for name in _KEYS if self.keyed or self._has_forms}
        columns |= {form_column(number): "string" for number in range(len(self._rendered))}
        return ", ".join(f"`{name}` {kind}" for name, kind in columns.items())

    def _wanted(self) -> set[str]:
        """The columns of events that are read: all, or those of the conditions if these are all that Spark has to do."""
        if len(self._rendered) < len(self.distinct) or self._has_forms:
            return set(EVENT_COLUMNS)
        texts = " ".join(text for chain in self.distinct for one in chain.transforms for text in one.sql)
        words = set(re.findall(r"\w+", texts.lower()))
        return {*_ALWAYS, *(name for name in EVENT_COLUMNS if name in words)}

    def settings(self) -> dict[str, str]:
        return {RECORDS: str(_ROWS), **(_INTERPRETED if self._has_envelope else {})}

    def project(self, events: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        lines = [form_column(number) for number in range(len(self._rendered))]
        base = F.struct(*(F.col(name) for name in events.columns if name not in lines))
        frame = events.select(base.alias(_BASE), *(F.col(name).alias(f"_{name}") for name in lines))
        made: list[str] = []
        rendered = 0
        for number, chain in enumerate(self.distinct):
            given = f"_{form_column(rendered)}" if chain.is_rendered else None
            rendered += chain.is_rendered
            if given is not None and chain.is_simple and self._forms(number) == {"lines"}:
                made.append(given)
                continue
            name = f"_made_{number}"
            frame = self._run(frame, chain, given, name)
            made.append(name)
        columns = [F.col(name).alias(form_column(number)) for number, name in enumerate(made)]
        events_of = {f"{name}_event": f"event_{number}" for number, name in enumerate(made)}
        columns += [F.col(name).alias(alias) for name, alias in events_of.items() if name in frame.columns]
        of_base = ("position", *(_OF_EVENTS if self._has_forms else _KEYS if self.keyed else ()))
        return frame.select(*(F.col(f"{_BASE}.{name}").alias(name) for name in of_base), *columns)

    def line_column(self, chain: Chain) -> str:
        return form_column(self.of_chain[self.chains.index(chain)])

    def _run(self, frame: DataFrame, chain: Steps, given: str | None, name: str) -> DataFrame:
        """`frame` with one column more: the lines of this chain."""
        from pyspark.sql import functions as F

        others = [column for column in frame.columns if column != _BASE]
        keep = is_routed(chain.routes) if chain.routes else F.lit(True)
        events = frame.select(f"{_BASE}.*", _BASE, *others).withColumn(KEEP, keep)
        for one in chain.transforms:
            if given is None or not one.is_envelope:
                events = one(events)
        line = F.col(given) if given is not None else F.concat(self._text(events), F.lit("\n"))
        changed = [F.when(F.col(KEEP), line).alias(name)]
        if self._has_forms:
            event = F.struct(*(F.col(one) for one in CHANGEABLE))
            changed.append(F.when(F.col(KEEP), event).alias(f"{name}_event"))
        return events.select(_BASE, *others, *changed)

    def _text(self, events: DataFrame) -> Column:
        """What an envelope made of the event (NULL: it has no form for it, and the chain does not have it), or JSON."""
        from pyspark.sql import functions as F

        return F.col(TEXT) if TEXT in events.columns else event_json(transaction=self.transaction)

    def collect(self, batch: DataFrame, start: Position, end: Position) -> list[Batch]:
        from pyspark.errors import PySparkException

        projected = self.project(batch) if "channel" in batch.columns else batch
        try:
            collected = projected.toArrow()
        except PySparkException as error:
            raise self.explain(projected, error) from error
        schema = pa.schema([(name, pa.string()) for name in ("position", *map(form_column, range(len(self.distinct))))])
        events = Batch(start, end, collected.select(schema.names).cast(schema), transaction=self.transaction)
        lines = split_forms(events, [(number, "lines") for number in self.of_chain])
        return [
            one if chain.form == "lines" else self._other_form(one, collected, number, chain.form)
            for one, number, chain in zip(lines, self.of_chain, self.chains, strict=True)
        ]

    def _other_form(self, lines: Batch, collected: pa.Table, number: int, form: Form) -> Batch:
        """Records or tables, of the columns that Spark has made."""
        mine = collected.filter(collected.column(form_column(number)).is_valid())
        events = mine.column(f"event_{number}").to_pylist(maps_as_pydicts="strict")
        chain = SimpleChain((), tuple(self.distinct[number].simple))
        if form == "records":
            return replace(lines, events=records_of(mine, events, lines.events.column("line"), chain))
        table, shapes = tables_of(mine, events, chain)
        return replace(lines, events=table, shapes=shapes)

    def explain(self, batch: DataFrame, error: Exception) -> Exception:
        text = str(error)
        ours = re.search(r"pgcdc\.core\.errors\.(\w+): ([^\n]*)", text)
        if ours is not None:
            return PgcdcError.from_json({"kind": ours[1], "message": ours[2].rstrip(" ;"), "advice": ""})
        for chain in self.distinct:
            for number, one in enumerate(chain.transforms, 1):
                written = next((sql for sql in one.sql if " ".join(sql.split()) in " ".join(text.split())), None)
                if written is not None:
                    place = _find_failing(batch)
                    where = f" at position {place}" if place else ""
                    return TransformError(
                        f"transform {number} ({one.name}) failed{where}: {written}: {_reason(text)}",
                        "Correct the expression: try_cast gives NULL for what cannot be cast",
                    )
        return error


def _reason(text: str) -> str:
    """Spark's first sentence without its advice."""
    first = next((line for line in text.splitlines() if line.strip()), "").strip()
    return re.split(r" (?:Use|If necessary) ", first)[0].rstrip(". ")


def _find_failing(projected: DataFrame) -> str | None:
    """The position of the first event that fails, by halves: Spark's errors do not say."""
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F

    def fails(low: str, high: str) -> bool:
        chosen = projected.where((F.col("position") >= low) & (F.col("position") <= high))
        try:
            chosen.write.format("noop").mode("overwrite").save()
        except PySparkException:
            return True
        return False

    try:
        places = [row.position for row in projected.select("position").collect()]
        if not places:
            return None
        low, high = 0, len(places) - 1
        while low < high:
            middle = (low + high) // 2
            if fails(places[low], places[middle]):
                high = middle
            else:
                low = middle + 1
        return str(places[low]) if fails(places[low], places[low]) else None
    except PySparkException:
        return None
