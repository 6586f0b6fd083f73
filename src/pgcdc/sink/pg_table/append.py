"""The mode `append`: a row per event, by COPY.

The line of an event has the columns in the order of the table. So a row for COPY is that line with tabs in the place of
what stands between its values: one regular expression over thousands of lines, and nothing is parsed. What does not look
like that (a name with a quote, an event in another form) is parsed one by one.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator

import pyarrow as pa

from pgcdc.core.errors import SinkError
from pgcdc.event.batch import line_buffers
from pgcdc.postgres.database import Connection, name_table, quote_identifier, quote_qualified, split_table

COLUMNS = {
    "id": "uuid",
    "channel": "text",
    "operation": "text",
    "payload": "jsonb",
    "source": "text",
    "created_at": "timestamptz",
    "position": "text",
    "transaction": "jsonb",
}
"""In the order of an event."""
SLICE_ROWS = 4096
"""So many lines at a time: Python runs nothing else meanwhile."""
_IDS = uuid.UUID("6f1c7a54-2f0e-4c0f-9d5e-8a1d7f5a9c11")
"""For the ids of what comes without one."""

_TEXT = rb'[^"\\]*'
_EVENT = (
    rb'^\{"id":"([0-9a-f-]{36})","channel":"(' + _TEXT + rb')","operation":"(' + _TEXT + rb')","payload":(\{.*\}),'
    rb'"source":"(' + _TEXT + rb')","created_at":"(' + _TEXT + rb')","position":"([0-9A-F/.]+)"'
)
_PLAIN = re.compile(_EVENT + rb"\}\n", re.MULTILINE)
_IN_TRANSACTION = re.compile(_EVENT + rb',"transaction":(\{[^{}]*\})\}\n', re.MULTILINE)
_ROW = rb"\1\t\2\t\3\t\4\t\5\t\6\t\7"
_FORMS = ((_PLAIN, _ROW + b"\t\\\\N\n"), (_IN_TRANSACTION, _ROW + rb"\t\8" + b"\n"))
_DECODER = json.JSONDecoder()
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def copy_rows(events: pa.Table) -> Iterator[bytes]:
    """The events as rows of COPY's text format, some thousand at a time."""
    for begin in range(0, events.num_rows, SLICE_ROWS):
        piece = events.slice(begin, SLICE_ROWS)
        lines = b"".join(line_buffers(piece.column("line").chunks)).replace(b"\\", b"\\\\")
        for form, row in _FORMS:
            rows, count = form.subn(row, lines)
            if count == piece.num_rows:
                yield rows
                break
        else:
            yield copy_rows_one_by_one(piece)


def copy_rows_one_by_one(events: pa.Table) -> bytes:
    """The same, whatever stands in the lines."""
    rows = []
    before, number = "", 0
    for position, line in zip(*(events.column(name).to_pylist() for name in ("position", "line")), strict=True):
        number = number + 1 if position == before else 0
        before = position
        values = _event_values(line) or [str(uuid.uuid5(_IDS, f"{position}#{number}")), None, None, line.rstrip("\n")]
        values = [*values, *[None] * (len(COLUMNS) - len(values))]
        values[6] = position
        rows.append("\t".join("\\N" if value is None else value.translate(_ESCAPES) for value in values))
    return "".join(f"{row}\n" for row in rows).encode()


def _event_values(line: str) -> list[str | None] | None:
    """The values of an event in its own form; None for what a transform made of it."""
    try:
        event = json.loads(line)
        uuid.UUID(event["id"])
        texts = [event[name] for name in ("id", "channel", "operation", "source")]
        created_at, transaction = event["created_at"], event.get("transaction")
        payload = _written(line, "payload", event["payload"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not event.keys() <= COLUMNS.keys() or not all(isinstance(one, str) for one in texts):
        return None  # a value of its own that has no column: the whole line is kept
    if not isinstance(created_at, str | None):
        return None
    block = None if transaction is None else json.dumps(transaction)
    return [*texts[:3], payload, texts[3], created_at, None, block]


def _written(line: str, key: str, value: object) -> str:
    """A value as it stands in the line: a number may have more digits than Python keeps."""
    begin = line.find(f'"{key}":') + len(key) + 3
    try:
        found, end = _DECODER.raw_decode(line, begin)
        if found == value:
            return line[begin:end]
    except ValueError:
        pass
    return json.dumps(value, ensure_ascii=False)


class Appender:
    """The table that gets the events."""

    def __init__(self, name: str) -> None:
        self.schema, self.table = split_table(name)
        self.title = name_table(self.schema, self.table)
        """The name, for people."""
        self.quoted = quote_qualified(self.schema, self.table)
        """The name, for SQL."""

    def ddl(self) -> str:
        """The statement that makes the table."""
        more = {"id": " PRIMARY KEY", "position": ' COLLATE "C"'}
        columns = ", ".join(f"{quote_identifier(name)} {kind}{more.get(name, '')}" for name, kind in COLUMNS.items())
        return f"CREATE TABLE IF NOT EXISTS {self.quoted} ({columns})"

    def look(self, conn: Connection) -> bool:
        """Whether the table is there. SinkError: it has another shape, or may not be written to."""
        rows = conn.execute(
            "SELECT attname::text, format_type(atttypid, NULL), attgenerated::text FROM pg_attribute "
            "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped",
            (self.quoted,),
        ).fetchall()
        if not rows:
            return False
        kinds = {name: kind for name, kind, generated in rows if not generated}
        missing = [name for name in COLUMNS if name not in kinds]
        if missing:
            add = ", ".join(f"ADD COLUMN {quote_identifier(name)} {COLUMNS[name]}" for name in missing)
            raise SinkError(
                f"table {self.title} of the target has no column {', '.join(missing)} for events",
                f"Run: ALTER TABLE {self.quoted} {add}; or give another --pg-table-table, which is created",
            )
        row = conn.execute("SELECT has_table_privilege(%s, 'INSERT')", (self.quoted,)).fetchone()
        if row is None or not row[0]:
            raise SinkError(
                f"the role {conn.info.user} may not insert into table {self.title} of the target",
                f"Run: GRANT INSERT, SELECT ON {self.quoted} TO {quote_identifier(conn.info.user)}",
            )
        return True

    def copy(self, conn: Connection, rows: Iterable[bytes], table: str = "") -> None:
        """Append rows, in the caller's transaction; `table`: to another one."""
        names = ", ".join(map(quote_identifier, COLUMNS))
        with conn.cursor() as cursor, cursor.copy(f"COPY {table or self.quoted} ({names}) FROM STDIN".encode()) as copy:
            for piece in rows:
                copy.write(piece)

    def insert_missing(self, conn: Connection, events: pa.Table) -> None:
        """Append events of the past, unless they are there."""
        stage = f"pgcdc_again_{uuid.uuid4().hex[:12]}"
        names = ", ".join(map(quote_identifier, COLUMNS))
        conn.execute(
            f"CREATE TEMP TABLE {stage} ON COMMIT DROP AS SELECT {names} FROM {self.quoted} WHERE false".encode()
        )
        self.copy(conn, [copy_rows_one_by_one(events)], stage)
        conn.execute(
            f"INSERT INTO {self.quoted} ({names}) SELECT {names} FROM {stage} n WHERE NOT EXISTS "
            f'(SELECT FROM {self.quoted} t WHERE t."id" = n."id")'.encode()
        )
