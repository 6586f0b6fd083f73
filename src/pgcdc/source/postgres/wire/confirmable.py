"""How much of what is durable may be confirmed while transactions are prepared (two-phase commit).

A slot that has confirmed more than the LSN of a PREPARE never sends that transaction's rows again: after a restart only its
COMMIT PREPARED would come. So confirmation waits before the first PREPARE whose outcome is not durable yet.
"""

from __future__ import annotations

Name = tuple[int, str]
"""xid and gid of a prepared transaction."""


class Confirmable:
    """Knows which prepared transactions hold confirmation back. Without two-phase decoding nothing does."""

    def __init__(self) -> None:
        self._is_on = False
        self._open: dict[Name, int] = {}
        self._decided: list[tuple[int, int]] = []
        self._seen = 0

    def begin(self, *, two_phase: bool) -> None:
        """A new connection, which begins where the slot stands: what it has not told yet may be a PREPARE."""
        self._is_on = two_phase or bool(self._open or self._decided)
        self._seen = 0

    def see(self, lsn: int) -> None:
        """Everything before `lsn` has been told on this connection."""
        self._seen = max(self._seen, lsn)

    def prepare(self, name: Name, prepare_lsn: int) -> None:
        """A transaction was prepared by the record at `prepare_lsn`. Told again after a reconnect, it is still one."""
        self._is_on = True
        self._open[name] = prepare_lsn

    def commit(self, name: Name, end_lsn: int) -> None:
        """It was committed: it goes on to hold confirmation back until `end_lsn` is durable."""
        prepare_lsn = self._open.pop(name, None)
        if prepare_lsn is not None:
            self._decided.append((prepare_lsn, end_lsn))

    def roll_back(self, name: Name) -> None:
        """It was rolled back: nobody wants its rows."""
        self._open.pop(name, None)

    def below(self, durable_lsn: int) -> int:
        """What may be confirmed when everything up to `durable_lsn` is durable."""
        if not self._is_on:
            return durable_lsn
        self._decided = [one for one in self._decided if one[1] > durable_lsn]
        return min([durable_lsn, self._seen, *self._open.values(), *(lsn for lsn, _ in self._decided)])
