"""Whether a copy of a table can follow a change of its shape exactly, or must be read again.

The content of old rows after ALTER TABLE is known only if the catalog proves it: it identifies columns by number,
records the constant that old rows have in a new column, and shows that the table was not rewritten meanwhile. Rewrites
come from a default computed for each row, from USING, or from a type with a different binary form. If anything is
unproven, the table must be read again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pgcdc.core.relation import ShapeChange
from pgcdc.event.edits import SimpleChain
from pgcdc.event.shape import NEW_VALUES, diff_shapes, is_late

Difference = dict[str, Any]
Details = Mapping[str, Any]

_FREE = {"table_renamed", "columns_reordered", "replica_identity_changed", "types_changed"}
"""Differences that leave the values of all rows alone."""
_ADDED = ("column_added", "column_replaced")
_DROPPED = {"column_removed", "column_replaced"}
_LENGTHS = {
    16: 1, 21: 2, 23: 4, 700: 4, 1082: 4, 20: 8, 701: 8, 1083: 8, 1114: 8, 1184: 8, 1186: 16, 2950: 16,
    **dict.fromkeys((17, 25, 114, 1042, 1043, 1700, 3802), -1),
}  # fmt: skip
"""Lengths of values of the usual types, by oid; -1: variable. A column can change to a type of another length only
through a rewrite."""


def behind(change: ShapeChange, chain: SimpleChain) -> ShapeChange:
    """The same change after an adapter's transforms."""
    after, details = chain.describe(change.after, change.details)
    before, old = chain.describe(change.before, change.before_details) if change.before else (None, None)
    return replace(change, after=after, before=before, details=_plain(details), before_details=_plain(old))


def _plain(details: Details | None) -> dict[str, Any] | None:
    return None if details is None else dict(details)


def why_reload(change: ShapeChange, differences: Sequence[Difference], *, is_partial: bool = False) -> str:
    """Why a copy cannot follow these differences (from `diff_shapes`); "" if it can. `is_partial`: the transforms also
    do something that is not known here."""
    kinds = {one["type"] for one in differences}
    old, new = change.before_details, change.details
    moved = next((one for one in differences if one["type"] == "partitions_changed"), None)
    if moved is not None and (moved["removed"] or moved["rewritten"] or moved["attached"]):
        return "partitions with rows were attached, detached, truncated or rewritten, which no event reports"
    if "rewritten" in kinds:
        return "its rows were rewritten by ALTER TABLE (a computed default, a type change)"
    if any(one.get("is_rewriting") for one in differences):
        return "a label or attribute of a type changed, so its old values are written differently"
    if "published_changed" in kinds:
        return "the row filter or column list of its publication changed"
    if "updates_published" in kinds:
        return "its updates and deletes were not published for a while"
    if old is None or new is None or is_late(old):
        return "it was altered again before its catalog could be read, so the shape of its old rows is unknown"
    if kinds <= _FREE | {"partitions_changed"}:
        return ""
    # Later rows may have had the previous shape and arrived before the replacement was noticed.
    if any(one["type"] == "column_replaced" and one["old_type"] == one["new_type"] for one in differences):
        return "a column was dropped and added again, and rows arrived before that was noticed"
    if _may_be_mistaken(change, differences):
        return "columns were dropped and added, and rows that arrived before that was noticed may have either"
    tells_key = change.before is None or (change.before.replica_identity == "d" and change.before != change.after)
    if not tells_key and any(one["type"] == "primary_key_changed" and one["old"] for one in differences):
        return "its key changed, and rows arrived before that was noticed"
    if is_partial and kinds.intersection(NEW_VALUES):
        return "its columns changed, and only the transforms know what becomes of old rows"
    added = sum(one["type"] in _ADDED for one in differences)
    if "natts" in old and "natts" in new and new["natts"] - old["natts"] != added:
        return "columns were added and dropped in between"
    if any(one["type"] in _ADDED and one["column"] in new.get("mixed", ()) for one in differences):
        return "its partitions have different values in a new column"
    if kinds.intersection(NEW_VALUES) and not _is_same_file(old, new):
        return "its rows were rewritten by ALTER TABLE (a computed default, a type change)"
    return ""


def _may_be_mistaken(change: ShapeChange, differences: Sequence[Difference]) -> bool:
    """Whether rows of either shape may have been mistaken for rows of the other because names and types of columns
    agree. In rows of the previous shape, a new column (always the last) looked like the previous last column. In rows
    of the next shape, a dropped column was at the place of the new one. Either may have been renamed or changed its
    type meanwhile."""
    dropped = {one["column"] for one in differences if one["type"] in _DROPPED}
    if change.before is None or not dropped:
        return False
    added = {one["column"] for one in differences if one["type"] in _ADDED}
    *others, last = change.before.columns
    olds = {last.type_oid, *(one.type_oid for one in others if one.name in dropped)}
    news = [one.type_oid for one in change.after.columns if one.name in added]
    return any(_may_become(old, new) for old in olds for new in news)


def _may_become(old: int, new: int) -> bool:
    """Whether a column can change to this type without a rewrite, as far as is known here."""
    return old not in _LENGTHS or new not in _LENGTHS or _LENGTHS[old] == _LENGTHS[new]


def brings_rows(differences: Sequence[Difference]) -> bool:
    """Whether the table may have gained rows that no event reports: a copy made from the events would miss them, too."""
    kinds = {one["type"] for one in differences}
    is_attached = any(
        one["type"] == "partitions_changed" and (one["attached"] or one["rewritten"]) for one in differences
    )
    return is_attached or bool(kinds & {"published_changed", "updates_published"})


def _is_same_file(old: Details, new: Details) -> bool:
    """Whether the table was not rewritten between two looks, so that the catalog still describes its old rows."""
    if new.get("is_proven"):
        return False
    if "leaves" in old and "leaves" in new:
        return all(old["leaves"].get(oid, file) == file for oid, file in new["leaves"].items())
    return old.get("filenode") is not None and old.get("filenode") == new.get("filenode")


def follow_shape(change: ShapeChange, chain: SimpleChain) -> tuple[list[Difference], str]:
    """The differences after an adapter's transforms, and why its copy cannot follow them."""
    shown = behind(change, chain)
    differences = diff_shapes(shown)
    return differences, why_reload(change, diff_shapes(change), is_partial=chain.is_partial)
