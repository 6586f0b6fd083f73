"""Keys that a sink has, and the table perhaps no more: the candidates of requests of the kind vanished."""

from __future__ import annotations

import json

from pgcdc.core.errors import SourceError
from pgcdc.source.postgres.setup.published import PublishedTable
from pgcdc.source.postgres.snapshot.requests import SnapshotRequest

__all__ = ["read_candidates"]


def read_candidates(
    request: SnapshotRequest, begin: int, count: int, table: PublishedTable
) -> tuple[tuple[tuple[str, ...], ...], int]:
    """The next keys in the file of a request, each once, and how many bytes are done then. No keys: it is at its end."""
    found: dict[tuple[str, ...], None] = {}
    try:
        with open(request.keys_file, "rb") as file:
            file.seek(begin)
            while len(found) < count and (line := file.readline()):
                key = json.loads(line)
                if (
                    not isinstance(key, list)
                    or len(key) != len(table.key)
                    or not all(isinstance(one, str) for one in key)
                ):
                    raise ValueError(f"not a key of {len(table.key)} texts: {line[:80]!r}")
                found[tuple(key)] = None
                begin += len(line)
    except (OSError, ValueError) as error:
        raise SourceError(
            f"the keys of table {table.title} in {request.keys_file} cannot be read: {error}", "Make the file again"
        ) from error
    return tuple(found), begin
