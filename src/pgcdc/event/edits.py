"""Chains of simple transforms on column buffers, applied before the JSON is rendered, without a Python step per row.
Dropping, renaming and masking columns, and filtering by operation and channel, depend only on a table's shape and on
whole columns. Column transforms apply to table rows; other events (messages, markers) pass unchanged."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.errors import ConfigError, TransformError
from pgcdc.core.relation import Column, Op, Relation, ShapeChange
from pgcdc.core.secrets import read_secret
from pgcdc.event.frame import Bools, Edit, Frame, reshaped, rewritten
from pgcdc.spool.schema import ADDRESSED

Step = Mapping[str, Any]
TEXT_OID = 25
ENVELOPES = ("debezium", "cloudevents")


@dataclass(frozen=True, slots=True)
class _Fate:
    """What happens to the columns of one shape."""

    names: tuple[str | None, ...]  # None: dropped
    masks: tuple[tuple[Step, ...], ...]
    is_routed: bool
    is_same: bool  # No column changes
    problem: str = ""


@dataclass(slots=True)
class SimpleChain:
    """Channel patterns and steps: specs of `transform.specs` as JSON, limited to the types implemented here."""

    routes: tuple[str, ...]
    steps: tuple[Step, ...]
    forms: tuple[str, ...] = ("lines",)
    """The wanted `event.forms`. `shapes`: the events (`event_column`) include their tables' descriptions."""
    is_partial: bool = False  # The chain also transforms rows in ways not known here
    hides_reloads: bool = False  # A filter of the chain would drop rows of a reload
    asked: tuple[str, ...] = ()
    """The columns that a condition in Spark reads; the chain exists only to supply them."""
    _fates: dict[Relation, _Fate] = field(default_factory=dict)
    _keys: dict[tuple[str | None, str | None], bytes] = field(default_factory=dict)

    def edit(self, frame: Frame) -> Edit:
        """The edit for this frame. Raises TransformError if two columns of a table would get the same name."""
        fates = [self._fate(shape) for shape in frame.shapes]
        keep = self._kept(frame, fates)
        present = np.unique(frame.version if keep is None else frame.version[keep])
        for version in present:
            if fates[version].problem:
                raise TransformError(fates[version].problem, "Drop the other column first, or choose another name")
        names = [column.name for shape in frame.shapes for column in shape.columns]
        after = [name for fate in fates for name in fate.names]
        dropped = np.array([name is None for name in after], np.uint8)
        masked = [steps for fate in fates for steps in fate.masks]
        is_masked = np.array([bool(steps) for steps in masked], np.bool_)

        def hide(number: int, values: pa.Array) -> tuple[slice, pa.Array]:
            return slice(None), self._hide(values, masked[number])

        return Edit(
            [before if name is None else name for before, name in zip(names, after, strict=True)],
            dropped if dropped.any() else None,
            None if keep is None else keep.astype(np.uint8),
            *(rewritten(frame, side, keep, is_masked, hide) for side in ("new", "old")),
        )

    def apply(self, frame: Frame, edit: Edit) -> Frame:
        described = [self.describe(*one) for one in zip(frame.shapes, frame.details, strict=True)]
        details, lacking = [details for _, details in described], frame.lacking
        if lacking is not None and edit.dropped is not None:
            lacking = lacking[edit.dropped == 0]
        return replace(reshaped(frame, edit, [shape for shape, _ in described]), details=details, lacking=lacking)

    @property
    def envelope(self) -> Step | None:
        """The step that changes the whole event's form."""
        return next((step for step in self.steps if step["type"] in ENVELOPES), None)

    @property
    def needs_shapes(self) -> bool:
        """Whether the chain needs the catalog's description of tables."""
        return self.envelope is not None or not {"tables", "changes", "shapes"}.isdisjoint(self.forms)

    def describe(self, shape: Relation, details: Mapping[str, Any] | None) -> tuple[Relation, Mapping[str, Any] | None]:
        """A table after the chain, and its catalog description. Masked values are text. A key with a dropped column
        identifies no rows: such a table has no replica identity (`event.forms.has_key`)."""
        fate = self._fate(shape)
        if fate.is_same:
            return shape, details
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
        if details is None:
            return after, None
        names = {column.name: name for column, name, _ in fates}
        texts = {name for _, name, steps in fates if _is_text(steps)}
        key = [names.get(name) for name in details["primary_key"]]
        masks = {column.name: steps for column, _, steps in fates}
        described = [
            {**one, "name": names[one["name"]], **({"type": "text"} if names[one["name"]] in texts else {})}
            for one in (self._hide_missing(one, masks.get(one["name"], ())) for one in details["columns"])
            if names.get(one["name"]) is not None
        ]
        return after, {**details, "columns": described, "primary_key": [] if None in key else key}

    def _hide_missing(self, column: Mapping[str, Any], steps: tuple[Step, ...]) -> Mapping[str, Any]:
        """A column's description. The constant that old rows have in it is masked like any other value."""
        if not steps or "missing" not in column:
            return column
        return {**column, "missing": self._hide(pa.array([column["missing"]], pa.string()), steps)[0].as_py()}

    def fates(self, shape: Relation) -> list[tuple[str | None, bool]]:
        """For each column of a table: its name after the chain (None: dropped), and whether it is masked."""
        fate = self._fate(shape)
        return [(name, bool(steps)) for name, steps in zip(fate.names, fate.masks, strict=True)]

    def is_routed(self, shape: Relation) -> bool:
        return self._fate(shape).is_routed

    def columns(self, shape: Relation, values: Iterable[pa.Array]) -> list[pa.Array]:
        """Whole columns of a table's rows after the chain."""
        fate = self._fate(shape)
        fates = zip(values, fate.names, fate.masks, strict=True)
        return [
            self._hide(one.cast(pa.string()), steps) if steps else one for one, name, steps in fates if name is not None
        ]

    def _fate(self, shape: Relation) -> _Fate:
        fate = self._fates.get(shape)
        if fate is None:
            fate = self._fates[shape] = self._follow(shape)
        return fate

    def _follow(self, shape: Relation) -> _Fate:
        is_routed = not self.routes or any(fnmatch.fnmatchcase(shape.channel, one) for one in self.routes)
        names: list[str | None] = [column.name for column in shape.columns]
        hidden: list[list[Step]] = [[] for _ in names]
        problem = ""
        for step in self.steps if shape.oid else ():
            if step["type"] == "drop_columns":
                names = [None if name in step["columns"] else name for name in names]
            elif step["type"] == "keep_columns":
                names = [name if name in step["columns"] else None for name in names]
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
        is_same = names == [column.name for column in shape.columns] and not any(gone)
        return _Fate(tuple(names), tuple(gone), is_routed, is_same, problem)

    def _kept(self, frame: Frame, fates: list[_Fate]) -> Bools | None:
        """Which events pass routes and filters; None: all of them."""
        keep: Bools | None = None
        if self.routes:
            keep = np.array([fate.is_routed for fate in fates], np.bool_)[frame.version]
        for step in self.steps:
            if step["type"] == "filter":
                passes = np.zeros(256, np.bool_)
                passes[[Op[name] for name in step["operations"]]] = True
                passed: Bools = passes[frame.op] | _is_reload(frame)
                keep = passed if keep is None else keep & passed
        return keep

    def _hide(self, values: pa.Array, steps: tuple[Step, ...]) -> pa.Array:
        for step in steps:
            if step["mode"] == "hash":
                key = step.get("key") or self._key(step.get("key_env"), step.get("key_file"))
                values = hmac_texts(values, key)
            else:
                values = zero(values) if step["mode"] == "zero" else redact(values)
        return values

    def _key(self, key_env: str | None, key_file: str | None) -> bytes:
        """The hash key, read once and only where needed: executors get the key's location, never the key itself."""
        found = self._keys.get((key_env, key_file))
        if found is None:
            found = self._keys[key_env, key_file] = read_key(key_env, key_file)
        return found


def _is_reload(frame: Frame) -> Bools:
    """Rows with which an adapter replaces its copy. Filters must not remove them: the copy would be incomplete."""
    if "origin" not in frame.owners.schema.names:
        return np.zeros(len(frame), np.bool_)
    is_addressed = pc.fill_null(pc.equal(frame.owners.column("origin"), ADDRESSED), False)
    result: Bools = is_addressed.to_numpy(zero_copy_only=False)
    return result


def _is_text(steps: tuple[Step, ...]) -> bool:
    """Whether a mask turned a column of another type into text."""
    return any(step["mode"] != "zero" for step in steps)


def without_hidden(change: ShapeChange, chains: Iterable[SimpleChain]) -> ShapeChange:
    """The change without values of columns that any of the chains drops or masks."""
    columns = [column.name for column in change.after.columns]
    fates = (zip(columns, one.fates(change.after), strict=True) for one in chains if not one.asked)
    hidden = {name for one in fates for name, (after, is_masked) in one if after is None or is_masked}
    if change.details is None or not hidden:
        return change
    shown = [
        {key: value for key, value in one.items() if key != "missing" or one["name"] not in hidden}
        for one in change.details["columns"]
    ]
    return replace(change, details={**change.details, "columns": shown})


def dump_chains(chains: Iterable[SimpleChain]) -> str:
    """Serialize chains for the source's option."""
    names = ("routes", "steps", "forms", "asked")
    return json.dumps([{name: getattr(one, name) for name in names} for one in chains])


def parse_chains(text: str) -> list[SimpleChain]:
    read = json.loads(text) if text else []
    return [
        SimpleChain(tuple(one["routes"]), tuple(one["steps"]), tuple(one["forms"]), asked=tuple(one["asked"]))
        for one in read
    ]


def full_pattern(pattern: str) -> str:
    """A channel pattern with its prefix: `orders` becomes `pgcdc:orders`."""
    return pattern if ":" in pattern else f"pgcdc:{pattern}"


# --- masks: a whole column at once, from text to text. NULL stays NULL.

REDACTED = "***REDACTED***"
DEFAULT_KEY_VARIABLE = "PGCDC_MASK_KEY"
MINIMUM_KEY_BYTES = 16
_BLOCK = 64

_DATE, _TIME = r"[0-9]{4,7}-[0-9]{2}-[0-9]{2}", r"[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?"
_OFFSET, _BC, _HEX = r"[+-][0-9]{2}(?::[0-9]{2}){0,2}", r"(?: BC)?", "[0-9a-fA-F]"
_COUNT = r"[+-]?[0-9]+(?:\.[0-9]+)?"
LOOKS: tuple[tuple[str, str], ...] = tuple(
    (rf"\A(?:{look})\z", zero_text)
    for look, zero_text in (
        (r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|NaN|-?Infinity", "0"),
        ("[tf]", "f"),
        (rf"{_DATE}{_BC}|-?infinity", "1970-01-01"),
        (rf"{_DATE} {_TIME}{_BC}", "1970-01-01 00:00:00"),
        (rf"{_DATE} {_TIME}{_OFFSET}{_BC}", "1970-01-01 00:00:00+00"),
        (_TIME, "00:00:00"),
        (rf"{_TIME}{_OFFSET}", "00:00:00+00"),
        (f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}", "00000000-0000-0000-0000-000000000000"),
        (rf"P(?:{_COUNT}[YMWD])*T(?:{_COUNT}[HMS])+|P(?:{_COUNT}[YMWD])+", "PT0S"),
        (rf"\\x(?:{_HEX}{_HEX})*", r"\x"),
        (r"\{[\s\S]*\}", "{}"),
        (r"\[[\s\S]*\]", "[]"),
    )
)
r"""Formats of values (regular expressions for RE2), each with its zero value. Events carry PostgreSQL's text without
the type, so the format decides. Values that match none become empty."""


def zero(values: pa.Array) -> pa.Array:
    look_of = np.zeros(len(values), np.int32)
    left = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
    for number, (look, _) in enumerate(LOOKS, 1):
        if not len(left):
            break
        found = pc.match_substring_regex(values.take(pa.array(left)), look).to_numpy(zero_copy_only=False)
        look_of[left[found]] = number
        left = left[~found]
    return _pick(["", *(text for _, text in LOOKS)], look_of, values)


def redact(values: pa.Array) -> pa.Array:
    return _pick([REDACTED], np.zeros(len(values), np.int32), values)


def _pick(texts: list[str], number_of: np.ndarray[tuple[int], np.dtype[np.int32]], values: pa.Array) -> pa.Array:
    mask = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
    return pa.array(texts, pa.string()).take(pa.array(number_of, mask=mask))


def hmac_texts(values: pa.Array, key: bytes) -> pa.Array:
    """HMAC-SHA256 of each text under `key`, in hexadecimal: equal values get equal results in every column. Both halves of
    an HMAC begin with a block made from the key, which is hashed once, not per value."""
    block = (hashlib.sha256(key).digest() if len(key) > _BLOCK else key).ljust(_BLOCK, b"\0")
    inner, outer = (hashlib.sha256(bytes(byte ^ pad for byte in block)).copy for pad in (0x36, 0x5C))
    digests: list[str | None] = []
    for value in values.view(pa.binary()).to_pylist():
        if value is None:
            digests.append(None)
            continue
        message, digest = inner(), outer()
        message.update(value)
        digest.update(message.digest())
        digests.append(digest.hexdigest())
    return pa.array(digests, pa.string())


def read_key(key_env: str | None, key_file: str | None) -> bytes:
    """A hash's key, from this host's environment or a file. Raises ConfigError if it is missing or too short."""
    if key_file:
        key, where = (
            read_secret(Path(os.path.expanduser(key_file)), "the key of the mask").strip().encode(),
            f"the file {key_file}",
        )
    else:
        name = key_env or DEFAULT_KEY_VARIABLE
        key = os.environ.get(name, "").strip().encode()
        where = f"the variable {name}"
        if not key:
            raise ConfigError(
                f"mask with mode hash needs a key, but {where} is not set",
                "Set it for pgcdc and for Spark's executors (for example to the output of: openssl rand -hex "
                "32), or use key_file",
            )
    if len(key) < MINIMUM_KEY_BYTES:
        raise ConfigError(
            f"the key of a mask in {where} has only {len(key)} bytes and could be guessed",
            f"Use {MINIMUM_KEY_BYTES} bytes or more, for example the output of: openssl rand -hex 32",
        )
    return key
