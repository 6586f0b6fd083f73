"""Where a batch ends: at a commit, as far as the limits allow, and always further than before."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgcdc.core.position import Position
from pgcdc.spool.index import IndexRecord
from pgcdc.spool.reader import plan_end

ANY = 1 << 62


def record(end: Position, rows: int, size: int = 1) -> IndexRecord:
    return IndexRecord(end, "seg-000000000001.arrow", (size, 0), rows)


def part(lsn: int, ordinal: int, rows: int, size: int = 1) -> IndexRecord:
    return record(Position.at(lsn, ordinal), rows, size)


def whole(lsn: int, rows: int, size: int = 1) -> IndexRecord:
    return record(Position.end(lsn), rows, size)


PLANS: dict[str, tuple[list[IndexRecord], Position, int, int, Position]] = {
    "nothing_but_progress": ([], Position.end(9), 10, ANY, Position.end(9)),
    "all_that_fits": ([whole(1, 5), whole(2, 5)], Position.end(2), 10, ANY, Position.end(2)),
    "all_that_fits_and_idle_progress": ([whole(1, 5)], Position.end(7), 10, ANY, Position.end(7)),
    "rows_limit": ([whole(1, 5), whole(2, 6)], Position.end(2), 10, ANY, Position.end(1)),
    "bytes_limit": ([whole(1, 1, 5), whole(2, 1, 6)], Position.end(2), ANY, 10, Position.end(1)),
    "first_is_over_the_limit": ([whole(1, 50), whole(2, 1)], Position.end(2), 10, ANY, Position.end(1)),
    "only_one_and_over_the_limit": ([whole(1, 50)], Position.end(1), 10, ANY, Position.end(1)),
    "a_transaction_in_parts_within_the_limit_is_whole": (
        [part(1, 4, 4), whole(1, 4)], Position.end(1), 10, ANY, Position.end(1),
    ),
    "rather_a_commit_than_a_part": (
        [whole(1, 2), part(2, 4, 4), whole(2, 9)], Position.end(2), 10, ANY, Position.end(1),
    ),
    "huge_transaction_at_the_start_is_split": (
        [part(1, 6, 6), part(1, 12, 6), whole(1, 6)], Position.end(1), 10, ANY, Position.at(1, 6),
    ),
    "its_last_part_goes_with_what_follows": ([whole(1, 6), whole(2, 2)], Position.end(2), 10, ANY, Position.end(2)),
    "spool_that_ends_inside_of_a_transaction": (
        [whole(1, 2), part(2, 4, 4)], Position.at(2, 4), 10, ANY, Position.end(1),
    ),
    "idle_progress_waits_for_the_rest_of_the_backlog": (
        [whole(1, 9), whole(2, 9)], Position.end(7), 10, ANY, Position.end(1),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("records", "end", "rows", "size", "expected"), PLANS.values(), ids=PLANS.keys())
def test_batch_ends(records: list[IndexRecord], end: Position, rows: int, size: int, expected: Position) -> None:
    assert plan_end(records, end, rows, size) == expected


@st.composite
def spools(draw: st.DrawFn) -> tuple[list[IndexRecord], Position]:
    """Records of some transactions, each in one or more parts, and where the spool ends: at or after a commit."""
    records, lsn = [], 0
    for _ in range(draw(st.integers(0, 6))):
        lsn += draw(st.integers(1, 3))
        sizes = draw(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 8)), min_size=1, max_size=4))
        ordinals = list(accumulate(max(rows, 1) for rows, _ in sizes))
        for ordinal, (rows, size) in zip(ordinals[:-1], sizes[:-1], strict=True):
            records.append(part(lsn, ordinal, rows, size))
        records.append(whole(lsn, *sizes[-1]))
    return records, Position.end(lsn + draw(st.integers(0, 2)))


limits = st.integers(1, 20)


@given(spools(), limits, limits)
def test_batches_reach_the_end_in_increasing_steps(
    spool: tuple[list[IndexRecord], Position], max_rows: int, max_bytes: int
) -> None:
    records, end = spool
    start = Position.at(0, 0)
    while start < end:
        cut = plan_end([one for one in records if one.end > start], end, max_rows, max_bytes)
        assert cut is not None
        assert start < cut <= end
        assert cut == end or cut in [one.end for one in records]
        start = cut


@given(spools(), limits, limits)
def test_only_a_transaction_beyond_the_limits_is_split(
    spool: tuple[list[IndexRecord], Position], max_rows: int, max_bytes: int
) -> None:
    records, end = spool
    start = Position.at(0, 0)
    while start < end:
        cut = plan_end([one for one in records if one.end > start], end, max_rows, max_bytes)
        assert cut is not None
        start = cut
        if not start.is_end:
            torn = [one for one in records if one.end.commit == start.commit]
            rows, size = sum(one.rows for one in torn), sum(one.written[0] for one in torn)
            assert rows > max_rows or size > max_bytes


@given(spools(), limits, limits)
def test_batch_of_several_segments_is_within_the_limits_and_takes_all_commits_that_are(
    spool: tuple[list[IndexRecord], Position], max_rows: int, max_bytes: int
) -> None:
    records, end = spool
    start = Position.at(0, 0)
    while start < end:
        ahead = [one for one in records if one.end > start]
        cut = plan_end(ahead, end, max_rows, max_bytes)
        assert cut is not None
        taken = [one for one in ahead if one.end <= cut]
        rows = accumulate((one.rows for one in ahead), initial=0)
        size = accumulate((one.written[0] for one in ahead), initial=0)
        fits = [count <= max_rows and held <= max_bytes for count, held in zip(rows, size, strict=True)]
        assert len(taken) <= 1 or fits[len(taken)]
        missed = [one for count, one in enumerate(ahead, 1) if count > len(taken) and fits[count] and one.end.is_end]
        assert not missed
        start = cut


def test_a_part_of_a_transaction_within_the_limits_waits_for_the_rest() -> None:
    part = IndexRecord(Position.at(110, 3), "seg-1.arrow", (10, 0), 3)
    assert plan_end([part], Position.at(110, 3), max_rows=100, max_bytes=100) is None
