# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""`PythonRowBuffer` in C. Read that one first: this file has the same steps in the same order.

A row is written after the held rows, and counted only when it is complete. So a message that turns out to be damaged
leaves nothing to undo: the next row overwrites what was written.

Everything from the wire is untrusted. A length is compared with the rest of the message before it is used, and room is
made for the rest of the message before its values are copied, so the loop over the columns needs no further checks for
room. This code does not describe what is wrong with a message: it asks the Python version.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset

cimport cython

import numpy as np
import pyarrow as pa

from pgcdc.source.postgres.wire.rows import PythonRowBuffer, explain_damage
from pgcdc.spool.schema import CHANGES

cdef enum:
    ROW_BYTES = 32  # this and the next: as in rows.py
    NULL_BYTES = 4
    MAX_OFFSET = 0x7FFFFFFF
    FIRST_ROOM = 4096
    KEPT_ROOM = 16 * 1024 * 1024  # a region above this size, grown by one huge row, is freed
    RECENT_TABLES = 64  # a power of two


cdef struct Region:
    uint8_t* at
    size_t room


cdef struct Values:
    # One column of value lists: the items of its lists, end to end.
    Region data
    Region ends  # int32: where each item's bytes end in `data`
    Region valid  # one byte per item; take() turns them into bits
    size_t items
    size_t size  # bytes of `data` in use
    size_t next_items  # the same two, including the row that is being read
    size_t next_size


cdef struct Row:
    int64_t ordinal
    int32_t relation
    int32_t new_end  # the number of items held up to and including this row: the end offset of its list
    int32_t old_end
    int32_t unchanged_end
    int32_t sub
    uint8_t op
    uint8_t old_kind


cdef struct Run:
    # Changes of one (sub)transaction in a row.
    uint32_t first
    uint32_t xid


cdef struct Table:
    uint32_t oid
    int32_t relation
    int32_t columns  # -1: this entry is empty


cdef struct Scan:
    const uint8_t* at
    const uint8_t* end
    int32_t columns
    uint8_t op
    uint8_t old_kind
    size_t nulls
    size_t unchanged  # the number held, including those of this row


cdef int grow(Region* region, size_t size) except -1:
    cdef size_t room = region.room * 2
    if room < FIRST_ROOM:
        room = FIRST_ROOM
    if room < size:
        room = size
    cdef void* at = realloc(region.at, room)
    if at == NULL:
        raise MemoryError(f"no memory for {room} bytes of changes")
    region.at = <uint8_t*>at
    region.room = room
    return 0


cdef inline int make_room(Region* region, size_t size) except -1:
    if size > region.room:
        grow(region, size)
    return 0


cdef void trim(Region* region, size_t kept) noexcept:
    if region.room > kept:
        free(region.at)
        region.at = NULL
        region.room = 0


cdef inline int16_t load_i16(const uint8_t* at) noexcept:
    return <int16_t>((at[0] << 8) | at[1])


cdef inline uint32_t load_u32(const uint8_t* at) noexcept:
    return (<uint32_t>at[0] << 24) | (<uint32_t>at[1] << 16) | (<uint32_t>at[2] << 8) | at[3]


cdef int read_values(Scan* scan, Values* values, Region* unchanged, bint is_new) except -1:
    """Write one tuple after the content of `values`. Returns 0, or 1 if the message is damaged."""
    cdef int32_t columns = scan.columns
    if scan.end - scan.at < 2 or load_i16(scan.at) != columns:
        return 1
    scan.at += 2

    make_room(&values.data, values.size + (scan.end - scan.at))
    make_room(&values.ends, (values.items + columns) * sizeof(int32_t))
    make_room(&values.valid, values.items + columns)
    cdef uint8_t* data = values.data.at
    cdef int32_t* ends = <int32_t*>values.ends.at + values.items
    cdef uint8_t* valid = values.valid.at + values.items
    cdef size_t size = values.size
    cdef const uint8_t* at = scan.at
    cdef const uint8_t* end = scan.end
    cdef int32_t index, length
    cdef uint8_t kind
    for index in range(columns):
        if at == end:
            return 1
        kind = at[0]
        at += 1
        if kind == c"t":
            if end - at < 4:
                return 1
            length = <int32_t>load_u32(at)
            at += 4
            if length < 0 or length > end - at:
                return 1
            memcpy(data + size, at, length)
            size += length
            at += length
            valid[index] = 1
        else:
            if kind == c"u":
                make_room(unchanged, (scan.unchanged + 1) * sizeof(int16_t))
                (<int16_t*>unchanged.at)[scan.unchanged] = <int16_t>(index if is_new else -1 - index)
                scan.unchanged += 1
            elif kind != c"n":
                return 1
            valid[index] = 0
            scan.nulls += 1
        ends[index] = <int32_t>size  # at most max_held: the caller has checked that
    scan.at = at
    values.next_items = values.items + columns
    values.next_size = size
    return 0


@cython.final
cdef class CompiledRowBuffer:
    """The row buffer in C: same results and errors as `PythonRowBuffer`."""

    cdef readonly dict _tables
    cdef Table _recent[RECENT_TABLES]  # saves making a Python int per row
    cdef Region _table
    cdef size_t _count
    cdef Values _new
    cdef Values _old
    cdef Region _unchanged
    cdef size_t _unchanged_count
    cdef Region _runs
    cdef size_t _run_count
    cdef size_t _full_rows
    cdef size_t _full_bytes
    cdef list _prefixes  # (row, prefix): messages are rare
    cdef readonly size_t _wire_bytes
    cdef size_t _nulls
    cdef readonly size_t _max_held

    def __cinit__(self, max_held=MAX_OFFSET):
        if not 0 <= max_held <= MAX_OFFSET:
            raise ValueError(f"max_held is 0 to {MAX_OFFSET}, not {max_held}")
        self._tables = {}
        self._prefixes = []
        self._max_held = max_held
        self._full_rows = self._full_bytes = <size_t>1 << 62
        self.forget()

    def __dealloc__(self):
        self._trim(0)

    @property
    def rows(self):
        """The number of changes held."""
        return self._count

    @property
    def nbytes(self):
        """The approximate number of bytes held."""
        return self._held()

    cdef inline size_t _held(self) noexcept:
        return self._wire_bytes + NULL_BYTES * self._nulls + ROW_BYTES * self._count

    def define(self, uint32_t oid, int32_t relation, int16_t columns):
        """From now on the rows of table `oid` have this relation version."""
        self._tables[oid] = (relation, columns)
        self._recent[oid & (RECENT_TABLES - 1)] = Table(oid, relation, columns)

    def forget(self):
        """Undefine all tables."""
        cdef int index
        self._tables.clear()
        for index in range(RECENT_TABLES):
            self._recent[index].columns = -1

    def limit(self, size_t rows, size_t nbytes):
        """Set the size at which the buffer is full."""
        self._full_rows = rows
        self._full_bytes = nbytes

    def add(self, message, int64_t ordinal, uint64_t lsn=0, bint streamed=False):
        """Append the change of one Insert, Update or Delete message."""
        cdef Py_buffer view
        cdef bint is_damaged
        if PyBytes_CheckExact(message):
            is_damaged = self._add(
                <const uint8_t*>PyBytes_AS_STRING(message), PyBytes_GET_SIZE(message), ordinal, streamed
            )
        else:
            PyObject_GetBuffer(message, &view, PyBUF_SIMPLE)
            try:
                is_damaged = self._add(<const uint8_t*>view.buf, view.len, ordinal, streamed)
            finally:
                PyBuffer_Release(&view)
        if is_damaged:
            raise explain_damage(self._tables, self._wire_bytes, self._max_held, message, lsn, streamed)
        return self._count >= self._full_rows or self._held() >= self._full_bytes

    cdef int _add(self, const uint8_t* data, Py_ssize_t size, int64_t ordinal, bint streamed) except -1:
        """Returns 0, or 1 if the message is damaged: then nothing has changed."""
        cdef Scan scan
        if size == 0 or <size_t>size > self._max_held - self._wire_bytes:
            return 1
        scan.op = data[0]
        if scan.op != c"I" and scan.op != c"U" and scan.op != c"D":
            return 1
        scan.at = data + 1
        scan.end = data + size
        scan.old_kind = 0
        scan.nulls = 0
        scan.unchanged = self._unchanged_count
        cdef uint32_t xid = 0
        if streamed:
            if size < 5:
                return 1
            xid = load_u32(scan.at)
            if xid == 0:
                return 1
            scan.at += 4
        if scan.end - scan.at < 4:
            return 1
        cdef Table* table = self._find(load_u32(scan.at))
        if table == NULL:
            return 1
        scan.columns = table.columns
        scan.at += 4

        self._new.next_items = self._new.items
        self._new.next_size = self._new.size
        self._old.next_items = self._old.items
        self._old.next_size = self._old.size
        cdef uint8_t tag = scan.at[0] if scan.at < scan.end else 0
        if (tag == c"K" or tag == c"O") and scan.op != c"I":
            scan.old_kind = tag
            scan.at += 1
            if read_values(&scan, &self._old, &self._unchanged, False):
                return 1
        elif tag != c"N" or scan.op == c"D":
            return 1
        if scan.op != c"D":
            if scan.at == scan.end or scan.at[0] != c"N":
                return 1
            scan.at += 1
            if read_values(&scan, &self._new, &self._unchanged, True):
                return 1
        if scan.at != scan.end:
            return 1

        make_room(&self._table, (self._count + 1) * sizeof(Row))
        self._mark(xid)
        # Nothing can fail after this point: the row counts.
        self._unchanged_count = scan.unchanged
        self._new.items = self._new.next_items
        self._new.size = self._new.next_size
        self._old.items = self._old.next_items
        self._old.size = self._old.next_size
        self._put(Row(ordinal, table.relation, 0, 0, 0, 0, scan.op, scan.old_kind))
        self._wire_bytes += size
        self._nulls += scan.nulls
        return 0

    cdef Table* _find(self, uint32_t oid) except? NULL:
        cdef Table* table = &self._recent[oid & (RECENT_TABLES - 1)]
        if table.oid == oid and table.columns >= 0:
            return table
        if oid not in self._tables:
            return NULL
        relation, columns = self._tables[oid]
        table[0] = Table(oid, relation, columns)
        return table

    cdef inline int _mark(self, uint32_t xid) except -1:
        # The next change belongs to this (sub)transaction; 0: it was not streamed. This is the last step that can fail,
        # so there is nothing to undo.
        cdef Run* last = <Run*>self._runs.at + self._run_count - 1
        if xid == 0 or (self._run_count and last.xid == xid):
            return 0
        make_room(&self._runs, (self._run_count + 1) * sizeof(Run))
        (<Run*>self._runs.at)[self._run_count] = Run(<uint32_t>self._count, xid)
        self._run_count += 1
        return 0

    cdef void _put(self, Row row) noexcept:
        # The caller has made room for it, and has counted the items of its lists.
        row.new_end = <int32_t>self._new.items
        row.old_end = <int32_t>self._old.items
        row.unchanged_end = <int32_t>self._unchanged_count
        (<Row*>self._table.at)[self._count] = row
        self._count += 1

    def add_truncate(self, uint32_t oid, int64_t ordinal, uint64_t lsn=0, uint32_t xid=0):
        """Append the truncation of one table."""
        relation, _ = PythonRowBuffer._find(self, oid, "Truncate", lsn)
        make_room(&self._table, (self._count + 1) * sizeof(Row))
        self._mark(xid)
        self._put(Row(ordinal, relation, 0, 0, 0, 0, c"T", 0))

    def add_message(
        self, str prefix not None, bytes content not None, int64_t ordinal, int32_t sub, uint64_t lsn=0, uint32_t xid=0
    ):
        """Append a logical message."""
        cdef size_t length = PyBytes_GET_SIZE(content)
        cdef size_t size = 1 + len(prefix.encode()) + length
        PythonRowBuffer._check_room(self, "Message", size, lsn)
        make_room(&self._table, (self._count + 1) * sizeof(Row))
        make_room(&self._new.data, self._new.size + length)
        make_room(&self._new.ends, (self._new.items + 1) * sizeof(int32_t))
        make_room(&self._new.valid, self._new.items + 1)
        self._mark(xid)
        self._prefixes.append((self._count, prefix))
        if length:
            memcpy(self._new.data.at + self._new.size, PyBytes_AS_STRING(content), length)
        self._new.size += length
        (<int32_t*>self._new.ends.at)[self._new.items] = <int32_t>self._new.size
        self._new.valid.at[self._new.items] = 1
        self._new.items += 1
        self._put(Row(ordinal, -1, 0, 0, 0, sub, c"M", 0))
        self._wire_bytes += size

    def runs(self):
        """The (sub)transactions to which the held changes belong."""
        size = self._run_count * sizeof(Run)
        found = PyBytes_FromStringAndSize(<char*>self._runs.at, size) if size else b""
        return np.frombuffer(found, np.uint32).reshape(-1, 2)

    def take(self):
        """All held changes, in the schema CHANGES; empties the buffer."""
        cdef size_t count = self._count
        cdef size_t index
        cdef Row* row = <Row*>self._table.at
        cdef Bits new_bits = Bits(count)
        cdef Bits old_bits = Bits(count)
        cdef Bits unchanged_bits = Bits(count)
        ordinal, sub, op = _allocate(count * 8), _allocate(count * 4), _allocate(count)
        relation, old_kind = _allocate(count * 4), _allocate(count)
        new, old, unchanged = _allocate(4 + count * 4), _allocate(4 + count * 4), _allocate(4 + count * 4)
        cdef int64_t* ordinals = <int64_t*>_address(ordinal)
        cdef int32_t* subs = <int32_t*>_address(sub)
        cdef uint8_t* ops = <uint8_t*>_address(op)
        cdef int32_t* relations = <int32_t*>_address(relation)
        cdef uint8_t* old_kinds = <uint8_t*>_address(old_kind)
        cdef int32_t* new_ends = <int32_t*>_address(new)
        cdef int32_t* old_ends = <int32_t*>_address(old)
        cdef int32_t* unchanged_ends = <int32_t*>_address(unchanged)
        new_ends[0] = old_ends[0] = unchanged_ends[0] = 0
        for index in range(count):
            ordinals[index] = row.ordinal
            subs[index] = row.sub
            ops[index] = row.op
            relations[index] = row.relation
            old_kinds[index] = row.old_kind
            new_ends[index + 1] = row.new_end
            old_ends[index + 1] = row.old_end
            unchanged_ends[index + 1] = row.unchanged_end
            # By operation rather than length: the list of a table without columns is empty, not null.
            new_bits.put(index, row.op != c"D" and row.op != c"T")
            old_bits.put(index, row.old_kind != 0)
            unchanged_bits.put(index, row.unchanged_end != unchanged_ends[index])
            row += 1

        type_of = CHANGES.types
        items = pa.Array.from_buffers(
            pa.int16(),
            self._unchanged_count,
            [None, _copy(self._unchanged.at, self._unchanged_count * sizeof(int16_t))],
            0,
        )
        batch = pa.RecordBatch.from_arrays(
            [
                pa.Array.from_buffers(type_of[0], count, [None, ordinal], 0),
                pa.Array.from_buffers(type_of[1], count, [None, sub], 0),
                pa.Array.from_buffers(type_of[2], count, [None, op], 0),
                pa.Array.from_buffers(type_of[3], count, [None, relation], 0),
                new_bits.lists(type_of[4], new, _items(&self._new)),
                old_bits.lists(type_of[5], old, _items(&self._old)),
                pa.Array.from_buffers(type_of[6], count, [None, old_kind], 0),
                unchanged_bits.lists(type_of[7], unchanged, items),
                self._prefix_column(),
            ],
            schema=CHANGES,
        )
        self._discard()
        return batch

    cdef object _prefix_column(self):
        if not self._prefixes:
            return pa.nulls(self._count, pa.string())
        column = [None] * <Py_ssize_t>self._count
        for index, prefix in self._prefixes:
            column[index] = prefix
        return pa.array(column, pa.string())

    cdef void _discard(self):
        self._count = 0
        self._unchanged_count = 0
        self._run_count = 0
        self._new.items = self._new.size = 0
        self._old.items = self._old.size = 0
        self._wire_bytes = 0
        self._nulls = 0
        self._prefixes.clear()
        self._trim(KEPT_ROOM)

    cdef void _trim(self, size_t kept) noexcept:
        trim(&self._table, kept)
        trim(&self._unchanged, kept)
        trim(&self._runs, kept)
        trim(&self._new.data, kept)
        trim(&self._new.ends, kept)
        trim(&self._new.valid, kept)
        trim(&self._old.data, kept)
        trim(&self._old.ends, kept)
        trim(&self._old.valid, kept)


# From C to Arrow. The data is copied into Arrow's own memory: that has the exact size, and our regions stay warm for
# the next rows.


cdef object _allocate(size_t size):
    return pa.allocate_buffer(size)


cdef void* _address(object buffer) except? NULL:
    return <void*><uintptr_t>buffer.address


cdef object _copy(const uint8_t* at, size_t size):
    buffer = _allocate(size)
    if size:
        memcpy(_address(buffer), at, size)
    return buffer


cdef object _items(Values* values):
    cdef size_t index
    cdef Bits bits = Bits(values.items)
    for index in range(values.items):
        bits.put(index, values.valid.at[index])
    offsets = _allocate(4 + values.items * 4)
    cdef int32_t* ends = <int32_t*>_address(offsets)
    ends[0] = 0
    if values.items:
        memcpy(ends + 1, values.ends.at, values.items * sizeof(int32_t))
    data = _copy(values.data.at, values.size)
    return pa.Array.from_buffers(pa.binary(), values.items, [bits.buffer(), offsets, data], bits.nulls)


@cython.final
cdef class Bits:
    """A validity bitmap under construction."""

    cdef object _buffer
    cdef uint8_t* _at
    cdef size_t _count
    cdef readonly size_t nulls

    def __cinit__(self, size_t count):
        cdef size_t size = (count + 7) // 8
        self._buffer = _allocate(size)
        self._at = <uint8_t*>_address(self._buffer)
        self._count = count
        self.nulls = 0
        if size:
            memset(self._at, 0, size)

    cdef inline void put(self, size_t index, bint valid) noexcept:
        self._at[index >> 3] |= <uint8_t>(valid << (index & 7))
        self.nulls += not valid

    cdef object buffer(self):
        return self._buffer if self.nulls else None

    cdef object lists(self, kind, offsets, items):
        return pa.Array.from_buffers(kind, self._count, [self.buffer(), offsets], self.nulls, 0, [items])
