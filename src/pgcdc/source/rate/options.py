"""Every setting of the source `rate`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pgcdc.core.settings import Conflict, setting
from pgcdc.source.protocol import SourceOptions

RATE = "Made-up changes"


class RateOptions(SourceOptions):
    """Made-up tables, and how they change."""

    kind: ClassVar[str] = "rate"

    rate_rows_per_second: float = setting(100.0, "Made-up changes a second.", RATE, metavar="N", gt=0, le=10_000_000)
    rate_tables: int = setting(3, "How many made-up tables there are.", RATE, metavar="N", ge=1, le=1000)
    rate_row_width: int = setting(20, "Letters in the text of a made-up row.", RATE, metavar="N", ge=0, le=1_000_000)
    rate_seed: int = setting(1, "Another number gives other changes.", RATE, metavar="N", ge=0, le=2**32 - 1)
    rate_transaction_rows: int = setting(5, "Changes in each transaction.", RATE, metavar="N", ge=1, le=1_000_000)
    rate_existing_rows: int = setting(0, "Rows that each table has before the first change.", RATE, metavar="N", ge=0)
    rate_inserts: int = setting(6, "Of so many changes of a table, as many INSERTs.", RATE, metavar="N", ge=1, le=1000)
    rate_updates: int = setting(3, "The same for UPDATEs.", RATE, metavar="N", ge=0, le=1000)
    rate_deletes: int = setting(1, "The same for DELETEs: fewer than INSERTs.", RATE, metavar="N", ge=0, le=1000)
    rate_transactions: int = setting(
        0, "After so many transactions there are no more; 0: there always are.", RATE, ge=0
    )

    def conflicts(self) -> Iterator[Conflict]:
        """What cannot go together."""
        if self.rate_deletes >= self.rate_inserts:
            yield Conflict(
                ("rate_deletes",),
                f"{self.rate_deletes} deletes for {self.rate_inserts} inserts would leave no rows",
                "Give fewer deletes than inserts",
            )
