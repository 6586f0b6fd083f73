"""Chains of simple transforms on the column buffers, before the JSON is rendered: no step per row in Python.

Leaving columns out, renaming, hiding, and choosing events by operation and channel depend on the shape of a table and on
whole columns only. Column transforms are for rows of tables: what is not one (a message, a marker) is left as it is.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.errors import TransformError
from pgcdc.core.relation import Column, Op, Relation
from pgcdc.event import masks
from pgcdc.event.frame import Frame, column_places

Bools = npt.NDArray[np.bool_]
Step = Mapping[str, Any]
TEXT_OID = 25
ENVELOPES = ("debezium", "cloudevents")


@dataclass(frozen=True, slots=True)
class Replaced:
    """Other texts for some values of a column of tuples."""

    where: npt.NDArray[np.int32]
    """For each item of the lists the index of its text, or -1."""
    texts: pa.Array


@dataclass(frozen=True, slots=True)
class Edit:
    """What a chain makes of one frame. None: nothing is different."""

    names: list[str] | None = None
    """Of all columns of all shapes."""
    dropped: npt.NDArray[np.uint8] | None = None
    keep: npt.NDArray[np.uint8] | None = None
    """Which events the chain has."""
    new: Replaced | None = None
    old: Replaced | None = None


@dataclass(frozen=True, slots=True)
class _Fate:
    """What becomes of the columns of one shape."""

    names: tuple[str | None, ...]
    """None: left out."""
    masks: tuple[tuple[Step, ...], ...]
    is_routed: bool
    problem: str = ""


@dataclass(slots=True)
class SimpleChain:
    """Channel patterns, then steps: specs of `transform.specs` as JSON, of the types that are done here."""

    routes: tuple[str, ...]
    steps: tuple[Step, ...]
    forms: tuple[str, ...] = ("lines",)
    """Which of `event.forms` are wanted of it; `shapes`: its events (`event_column`) say what their tables look like."""
    _fates: dict[Relation, _Fate] = field(default_factory=dict)
    _keys: dict[tuple[str | None, str | None], bytes] = field(default_factory=dict)

    def edit(self, frame: Frame) -> Edit:
        """What becomes of this frame. TransformError if two columns of a table would have the same name."""
        fates = [self._fate(shape) for shape in frame.shapes]
        keep = self._kept(frame, fates)
        present = np.unique(frame.version if keep is None else frame.version[keep])
        for version in present:
            if fates[version].problem:
                raise TransformError(fates[version].problem, "Drop the other column first, or choose another name")
        names = [name for shape in frame.shapes for name in (column.name for column in shape.columns)]
        after = [name for fate in fates for name in fate.names]
        dropped = np.array([name is None for name in after], np.uint8)
        masked = {int(version): fates[version].masks for version in present if any(fates[version].masks)}
        return Edit(
            [before if name is None else name for before, name in zip(names, after, strict=True)],
            dropped if dropped.any() else None,
            None if keep is None else keep.astype(np.uint8),
            self._replaced(frame, "new", keep, masked) if masked else None,
            self._replaced(frame, "old", keep, masked) if masked else None,
        )

    def apply(self, frame: Frame, edit: Edit) -> Frame:
        """The frame behind the edit, with all of its events."""
        described = [self.describe(*one) for one in zip(frame.shapes, frame.details, strict=True)]
        shapes = [shape for shape, _ in described]
        left = slice(None) if edit.dropped is None else edit.dropped == 0
        changes = {side: edited_lists(frame, edit, side) for side in ("new", "old")}
        first, names, is_key = column_places(shapes)
        return replace(
            frame,
            changes=pa.RecordBatch.from_pydict({**changes, "unchanged": edited_marks(frame, edit)}),
            shapes=shapes,
            first=first,
            names=names,
            is_key=is_key,
            details=[details for _, details in described],
            lacking={side: flags[left] for side, flags in frame.lacking.items()},
        )

    @property
    def envelope(self) -> Step | None:
        """The step that gives the whole event another form."""
        return next((step for step in self.steps if step["type"] in ENVELOPES), None)

    @property
    def needs_shapes(self) -> bool:
        """Whether what the catalog says about tables is wanted."""
        return self.envelope is not None or not {"tables", "shapes"}.isdisjoint(self.forms)

    def text_columns(self, shape: Relation) -> list[bool]:
        """For each column whether a mask has put text into it, whatever its type."""
        return [_is_text(steps) for steps in self._fate(shape).masks]

    def describe(self, shape: Relation, details: Mapping[str, Any] | None) -> tuple[Relation, Mapping[str, Any] | None]:
        """What a table looks like behind the chain, and what the catalog said about it.

        Hidden values are text. What is left of a key of which a column is dropped tells no rows apart: such a table has
        no replica identity (`event.forms.has_key`).
        """
        fate = self._fate(shape)
        fates = list(zip(shape.columns, fate.names, fate.masks, strict=True))
        has_key = not any(name is None and column.is_key for column, name, _ in fates)
        columns = tuple(
            Column(
                name,
                TEXT_OID if _is_text(steps) else column.type_oid,
                -1 if _is_text(steps) else column.typmod,
                column.is_key,
            )
            for column, name, steps in fates
            if name is not None
        )
        after = replace(shape, columns=columns, replica_identity=shape.replica_identity if has_key else "n")
        if details is None or after == shape:
            return after, details
        names = {column.name: name for column, name, _ in fates}
        texts = {name for _, name, steps in fates if _is_text(steps)}
        key = [names.get(name) for name in details["primary_key"]]
        described = [
            {**one, "name": names[one["name"]], **({"type": "text"} if names[one["name"]] in texts else {})}
            for one in details["columns"]
            if names.get(one["name"]) is not None
        ]
        return after, {**details, "columns": described, "primary_key": [] if None in key else key}

    def _fate(self, shape: Relation) -> _Fate:
        fate = self._fates.get(shape)
        if fate is None:
            fate = self._fates[shape] = self._follow(shape)
        return fate

    def _follow(self, shape: Relation) -> _Fate:
        """The way of each column through the steps."""
        is_routed = not self.routes or any(fnmatch.fnmatchcase(shape.channel, one) for one in self.routes)
        names: list[str | None] = [column.name for column in shape.columns]
        hidden: list[list[Step]] = [[] for _ in names]
        problem = ""
        for step in self.steps if shape.oid else ():
            if step["type"] == "drop_columns":
                names = [None if name in step["columns"] else name for name in names]
            elif step["type"] == "rename_fields":
                names = [None if name is None else step["fields"].get(name, name) for name in names]
                left = [name for name in names if name is not None]
                twice = next((name for name in left if left.count(name) > 1), None)
                if twice is not None and not problem:
                    problem = (
                        f"rename_fields gives two columns of table {shape.namespace}.{shape.name} the name {twice}"
                    )
            elif step["type"] == "mask":
                for index, name in enumerate(names):
                    if name in step["columns"]:
                        hidden[index].append(step)
        gone = [() if name is None else tuple(one) for name, one in zip(names, hidden, strict=True)]
        return _Fate(tuple(names), tuple(gone), is_routed, problem)

    def _kept(self, frame: Frame, fates: list[_Fate]) -> Bools | None:
        """Which events pass routes and filters; None: all."""
        keep: Bools | None = None
        if self.routes:
            keep = np.array([fate.is_routed for fate in fates], np.bool_)[frame.version]
        for step in self.steps:
            if step["type"] == "filter":
                passes = np.zeros(256, np.bool_)
                passes[[Op[name] for name in step["operations"]]] = True
                keep = passes[frame.op] if keep is None else keep & passes[frame.op]
        return keep

    def _replaced(
        self, frame: Frame, side: str, keep: Bools | None, masked: dict[int, tuple[tuple[Step, ...], ...]]
    ) -> Replaced | None:
        """The texts of hidden values. Only those are looked at."""
        lists = frame.changes.column(side)
        if lists.null_count == len(lists):
            return None
        begins: npt.NDArray[np.int32] = lists.offsets.to_numpy()[:-1]
        wanted: Bools = lists.is_valid().to_numpy(zero_copy_only=False)
        wanted = wanted if keep is None else wanted & keep
        groups: dict[str, tuple[tuple[Step, ...], list[npt.NDArray[np.int32]]]] = {}
        for version, columns in masked.items():
            starts = begins[wanted & (frame.version == version)]
            for index, steps in enumerate(columns):
                if steps and len(starts):
                    groups.setdefault(repr(steps), (steps, []))[1].append(starts + index)
        if not groups:
            return None
        where = np.full(len(lists.values), -1, np.int32)
        texts, done = [], 0
        for steps, found in groups.values():
            items = np.concatenate(found)
            texts.append(self._hide(lists.values.take(pa.array(items)).view(pa.string()), steps))
            where[items] = np.arange(done, done + len(items), dtype=np.int32)
            done += len(items)
        return Replaced(where, pa.concat_arrays(texts))

    def _hide(self, values: pa.Array, steps: tuple[Step, ...]) -> pa.Array:
        for step in steps:
            if step["mode"] == "hash":
                key = step.get("key") or self._key(step.get("key_env"), step.get("key_file"))
                values = masks.hmac_texts(values, key)
            else:
                values = masks.zero(values) if step["mode"] == "zero" else masks.redact(values)
        return values

    def _key(self, key_env: str | None, key_file: str | None) -> bytes:
        """Read where it is needed, and once: what travels to the executors says where the key is, never the key."""
        found = self._keys.get((key_env, key_file))
        if found is None:
            found = self._keys[key_env, key_file] = masks.read_key(key_env, key_file)
        return found


def _is_text(steps: tuple[Step, ...]) -> bool:
    """Whether a mask has put text into a column of whatever type."""
    return any(step["mode"] != "zero" for step in steps)


def dump_chains(chains: Iterable[SimpleChain]) -> str:
    """Chains as the option that tells a source of them."""
    return json.dumps([{"routes": one.routes, "steps": one.steps, "forms": one.forms} for one in chains])


def parse_chains(text: str) -> list[SimpleChain]:
    """The chains behind `dump_chains`."""
    read = json.loads(text) if text else []
    return [SimpleChain(tuple(one["routes"]), tuple(one["steps"]), tuple(one["forms"])) for one in read]


def full_pattern(pattern: str) -> str:
    """A channel pattern with its prefix: `orders` means `pgcdc:orders`."""
    return pattern if ":" in pattern else f"pgcdc:{pattern}"


# --- values as a chain shows them


def dropped_columns(frame: Frame, edit: Edit, side: str) -> npt.NDArray[np.uint8] | None:
    """Which columns of all shapes the rows of a side are shown without; None: none."""
    lacking = frame.lacking.get(side)
    if lacking is None or edit.dropped is None:
        return edit.dropped if lacking is None else lacking
    return lacking | edit.dropped


def edited_lists(frame: Frame, edit: Edit, side: str) -> pa.Array:
    """The rows as lists of texts."""
    lists = frame.changes.column(side)
    replaced: Replaced | None = getattr(edit, side)
    if replaced is None and edit.dropped is None:
        return _of_texts(lists.offsets, lists.values, lists)
    offsets: npt.NDArray[np.int32] = lists.offsets.to_numpy()
    first, last = int(offsets[0]), int(offsets[-1])
    values = lists.values.slice(first, last - first).view(pa.string())
    if replaced is not None:
        where = replaced.where[first:last]
        picked = np.where(where >= 0, len(values) + where, np.arange(len(values)))
        values = pa.concat_arrays([values, replaced.texts]).take(pa.array(picked))
    offsets = offsets - first
    if edit.dropped is not None:
        counts = np.diff(offsets)
        row_of = np.repeat(np.arange(len(counts)), counts)
        column = np.arange(len(values)) - offsets[:-1][row_of]
        keep: Bools = edit.dropped[frame.first[frame.version[row_of]] + column] == 0
        values = values.filter(pa.array(keep))
        kept = np.bincount(row_of[keep], minlength=len(counts))
        offsets = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)
    return _of_texts(pa.array(offsets), values, lists)


def _of_texts(offsets: pa.Array, values: pa.Array, lists: pa.Array) -> pa.Array:
    mask = lists.is_null() if lists.null_count else None
    whole = pa.array(offsets.to_numpy())  # with a mask Arrow takes no slice
    return pa.ListArray.from_arrays(whole, values.view(pa.string()), mask=mask)


def edited_marks(frame: Frame, edit: Edit) -> pa.Array:
    """Which values are unchanged TOAST, by the numbers that columns have behind the edit; -1-i: of the old row."""
    marks = frame.changes.column("unchanged")
    if edit.dropped is None or marks.null_count == len(marks):
        return marks
    rows = pc.list_parent_indices(marks).to_numpy()
    columns = pc.list_flatten(marks).to_numpy().astype(np.int64)
    gone = np.concatenate([[0], np.cumsum(edit.dropped)])
    first = frame.first[frame.version[rows]]
    number = np.where(columns < 0, -1 - columns, columns)
    after = number - (gone[first + number] - gone[first])
    keep: Bools = edit.dropped[first + number] == 0
    after = np.where(columns < 0, -1 - after, after)[keep].astype(np.int16)
    counts = np.bincount(rows[keep], minlength=len(marks))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(after), mask=marks.is_null())


def edited_column(
    frame: Frame, edit: Edit, side: str, index: int, rows: npt.NDArray[np.int64] | None = None
) -> pa.Array:
    """The texts of one column, in some rows or all; null where a row has none, or fewer columns."""
    lists = frame.changes.column(side)
    rows = np.arange(len(frame)) if rows is None else rows
    offsets: npt.NDArray[np.int32] = lists.offsets.to_numpy()
    items = offsets[:-1][rows] + index
    is_out: Bools = (items >= offsets[1:][rows]) | lists.is_null().to_numpy(zero_copy_only=False)[rows]
    if is_out.all():
        return pa.nulls(len(rows), pa.string())
    found = lists.values.view(pa.string()).take(pa.array(items, mask=is_out))
    replaced: Replaced | None = getattr(edit, side)
    if replaced is None:
        return found
    where = replaced.where[np.where(is_out, 0, items)]
    is_kept: Bools = (where < 0) | is_out
    return pc.if_else(pa.array(is_kept), found, replaced.texts.take(pa.array(where, mask=is_kept)))
