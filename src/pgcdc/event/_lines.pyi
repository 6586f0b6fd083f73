import pyarrow as pa

from pgcdc.event.lines import Keyed, Layout

def render(frame: Keyed, changes: pa.RecordBatch, layout: Layout) -> pa.StringArray: ...
