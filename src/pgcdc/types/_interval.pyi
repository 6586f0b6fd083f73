import pyarrow as pa

from pgcdc.types.interval import Intervals

# Gives the index of the first value that it refuses instead.
def split_intervals(values: pa.Array) -> Intervals | int: ...
