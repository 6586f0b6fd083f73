"""Looks again at keys that seem to differ, until they settle: most only changed while they were compared.

    the source → everything committed by then is at the target → the target → the source again

The target is wrong only if the source had the same row before and after, and the target has another. A row that is not
at the source has no mark that would show a change: it must look the same twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal, Protocol

from pgcdc.run.verify.hashing import Key, Seen

ROUNDS = 10
PAUSE_S, MAX_PAUSE_S = 0.1, 3.0

Verdict = Literal["equal", "missing", "extra", "different", "unsettled"]
WRONG: tuple[Verdict, ...] = ("missing", "extra", "different")


class Finder(Protocol):
    """One side of a table."""

    def find(self, keys: Collection[Key]) -> Mapping[Key, Seen]:
        """What this side has under these keys now; may include other keys."""


def settle(
    keys: Collection[Key],
    source: Finder,
    target: Finder,
    barrier: Callable[[], object],
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[Key, Verdict]]:
    """Each key with its verdict. `barrier` returns when everything committed before its call is at the target."""
    left, doubts = set(keys), dict[Key, tuple[Seen | None, Seen | None]]()
    for number in range(ROUNDS):
        if not left:
            return
        if number:
            sleep(min(MAX_PAUSE_S, PAUSE_S * 2 ** (number - 1)))
        before = source.find(left)
        barrier()
        there, after = target.find(left), source.find(left)
        for key in sorted(left):
            verdict = judge(before.get(key), there.get(key), after.get(key), doubts.get(key))
            doubts[key] = (after.get(key), there.get(key))
            if verdict is not None:
                left.discard(key)
                yield key, verdict
    for key in sorted(left):
        yield key, "unsettled"


def judge(
    before: Seen | None, there: Seen | None, after: Seen | None, doubt: tuple[Seen | None, Seen | None] | None
) -> Verdict | None:
    """The verdict on one key. None: look again. `doubt` is what the last look ended with."""
    found = there.content if there else None
    # At the barrier the target had at least `before`. If it has that or what came after, it was equal at some position.
    if found in [one.content if one else None for one in (before, after)]:
        return "equal"
    if before != after or (not (after and after.mark) and doubt != (after, there)):
        return None
    return "missing" if there is None else "extra" if after is None else "different"
