"""The messages of `Capture.messages()`.

from pgcdc.messages import Change, Commit
for message in capture.messages():
    match message:
        case Change(op=op, table=table, new=new): ...
"""

from pgcdc.source.postgres.message_stream import (
    UNCHANGED,
    Begin,
    Change,
    Commit,
    LogicalMessage,
    Message,
    Relation,
    Sentinel,
)

__all__ = ["UNCHANGED", "Begin", "Change", "Commit", "LogicalMessage", "Message", "Relation", "Sentinel"]
