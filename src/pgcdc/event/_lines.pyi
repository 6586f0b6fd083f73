import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgcdc.event.lines import Keyed

def render(
    frame: Keyed,
    changes: pa.RecordBatch,
    ids: pa.Array,
    heads: pa.Array,
    head_of: npt.NDArray[np.int32],
    tails: pa.Array,
) -> pa.Array: ...
