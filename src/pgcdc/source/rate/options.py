"""Every setting of the source `rate`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pgcdc.core.settings import Conflict, setting
from pgcdc.source.protocol import SourceOptions

RATE = "Generated changes"


class RateOptions(SourceOptions):
    """Made-up tables, and how they change."""

    kind: ClassVar[str] = "rate"

    rate_rows_per_second: float = setting(
        100.0, "Changes per second, over all generated tables together.", RATE, metavar="N", gt=0, le=10_000_000
    )
    rate_tables: int = setting(3, "Number of generated tables: rate_1, rate_2 ...", RATE, metavar="N", ge=1, le=1000)
    rate_row_width: int = setting(
        20, "Length of the text column note, in characters.", RATE, metavar="N", ge=0, le=1_000_000
    )
    rate_seed: int = setting(
        1, "Seed of the values: the same seed gives the same changes.", RATE, metavar="N", ge=0, le=2**32 - 1
    )
    rate_transaction_rows: int = setting(5, "Changes per transaction.", RATE, metavar="N", ge=1, le=1_000_000)
    rate_existing_rows: int = setting(
        0, "Rows in each table before the first change, for the initial snapshot.", RATE, metavar="N", ge=0
    )
    rate_inserts: int = setting(
        6, "INSERTs per cycle of a table, followed by its UPDATEs and DELETEs.", RATE, metavar="N", ge=1, le=1000
    )
    rate_updates: int = setting(3, "UPDATEs per cycle of a table.", RATE, metavar="N", ge=0, le=1000)
    rate_deletes: int = setting(
        1, "DELETEs per cycle of a table; fewer than its INSERTs.", RATE, metavar="N", ge=0, le=1000
    )
    rate_transactions: int = setting(
        0, "Stop generating changes after this many transactions. (default: 0, never)", RATE, metavar="N", ge=0
    )

    def conflicts(self) -> Iterator[Conflict]:
        """What cannot go together."""
        if self.rate_deletes >= self.rate_inserts:
            yield Conflict(
                ("rate_deletes",),
                f"{self.rate_deletes} deletes for {self.rate_inserts} inserts would leave no rows",
                "Use fewer deletes than inserts",
            )
