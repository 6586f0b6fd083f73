import pyarrow as pa

from pgcdc.postgres.types.interval import Intervals

# Gives the index of the first value that it refuses instead.
def split_intervals(values: pa.Array) -> Intervals | int: ...
