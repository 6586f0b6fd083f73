# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""`PythonCopyBuffer` in C. Read that one first: this file has the same steps in the same order.

A line is written after the held rows, and counted only when it is complete. Removing escapes never makes a
value longer, so room for the whole line is made before its first value is copied.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, uint8_t, uintptr_t
from libc.stdlib cimport free, realloc
from libc.string cimport memchr, memcpy, memset

cimport cython

import numpy as np
import pyarrow as pa

from pgcdc.source.postgres.snapshot.copy import column_count_error, escape_error, no_end_error

cdef enum:
    FIRST_ROOM = 4096
    KEPT_ROOM = 16 * 1024 * 1024  # a region above this size, grown by one huge row, is freed

cdef uint8_t MEANT[256]  # the character that an escaped letter stands for; 0: none
memset(MEANT, 0, sizeof(MEANT))
for _letter, _byte in zip(b"bfnrtv\\", b"\b\f\n\r\t\v\\"):
    MEANT[_letter] = _byte


cdef struct Region:
    uint8_t* at
    size_t room


cdef int grow(Region* region, size_t size) except -1:
    cdef size_t room = max(region.room * 2, <size_t>FIRST_ROOM, size)
    cdef void* at = realloc(region.at, room)
    if at == NULL:
        raise MemoryError(f"no memory for {room} bytes of rows")
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


cdef object copied(const void* at, size_t size):
    made = pa.allocate_buffer(size)
    memcpy(<void*><uintptr_t>made.address, at, size)
    return made


@cython.final
cdef class CompiledCopyBuffer:
    """The buffer in C: same results and errors as `PythonCopyBuffer`."""

    cdef int32_t _columns
    cdef Region _data
    cdef Region _ends  # int32: where each value's bytes end in the data
    cdef Region _valid  # one byte per value; take() turns them into bits
    cdef size_t _rows
    cdef size_t _size  # bytes of the data in use
    cdef size_t _nulls
    cdef size_t _nbytes

    def __cinit__(self, int32_t columns):
        if columns < 1:
            raise ValueError(f"rows have at least one column, not {columns}")
        self._columns = columns

    def __dealloc__(self):
        self._trim(0)

    cdef void _trim(self, size_t kept) noexcept:
        trim(&self._data, kept)
        trim(&self._ends, kept)
        trim(&self._valid, kept)

    @property
    def rows(self):
        """The number of rows held."""
        return self._rows

    def fill(self, get, size_t nbytes):
        """Take lines until about `nbytes` are held (1), none is available yet (0), or there are no more (-1)."""
        cdef Py_buffer view
        cdef Py_ssize_t size
        while self._nbytes < nbytes:
            answer = get(1)
            size = answer[0]
            if size <= 0:
                return size
            PyObject_GetBuffer(answer[1], &view, PyBUF_SIMPLE)
            try:
                self._add(<const uint8_t*>view.buf, view.len)
            finally:
                PyBuffer_Release(&view)
            self._nbytes += size
        return 1

    cdef int _add(self, const uint8_t* at, size_t size) except -1:
        cdef size_t items = self._rows * self._columns
        make_room(&self._data, self._size + size)
        make_room(&self._ends, (items + self._columns) * sizeof(int32_t))
        make_room(&self._valid, items + self._columns)
        cdef uint8_t* data = self._data.at
        cdef uint8_t* to = data + self._size
        cdef int32_t* ends = <int32_t*>self._ends.at + items
        cdef uint8_t* valid = self._valid.at + items
        cdef const uint8_t* end = at + size - 1
        cdef const uint8_t* next
        cdef int32_t index
        cdef size_t nulls = 0, length
        if size == 0 or end[0] != c"\n":
            raise no_end_error()
        cdef bint plain = memchr(at, c"\\", size) == NULL
        for index in range(self._columns):
            if index + 1 < self._columns:
                next = <const uint8_t*>memchr(at, c"\t", end - at)
                if next == NULL:
                    raise column_count_error(index + 1, self._columns)
            else:
                if memchr(at, c"\t", end - at) != NULL:
                    raise column_count_error(index + 1 + bytes(at[: end - at]).count(b"\t"), self._columns)
                next = end
            valid[index] = 1
            if plain:
                length = next - at
                memcpy(to, at, length)
                to += length
            elif next - at == 2 and at[0] == c"\\" and at[1] == c"N":
                valid[index] = 0
                nulls += 1
            else:
                to = unescape(to, at, next)
            ends[index] = <int32_t>(to - data)
            at = next + 1
        self._size = to - data
        self._nulls += nulls
        self._rows += 1
        return 0

    def take(self):
        """All held values as one flat array; empties the buffer."""
        cdef size_t items = self._rows * self._columns
        cdef const uint8_t[::1] valid
        ends = pa.allocate_buffer((items + 1) * sizeof(int32_t))
        cdef int32_t* starts = <int32_t*><uintptr_t>ends.address
        starts[0] = 0
        bits = None
        if items:
            memcpy(starts + 1, self._ends.at, items * sizeof(int32_t))
            if self._nulls:
                valid = <uint8_t[:items]>self._valid.at
                bits = pa.py_buffer(np.packbits(np.asarray(valid), bitorder="little"))
        made = pa.Array.from_buffers(pa.binary(), items, [bits, ends, copied(self._data.at, self._size)], self._nulls)
        self._rows = self._size = self._nulls = self._nbytes = 0
        self._trim(KEPT_ROOM)
        return made


cdef uint8_t* unescape(uint8_t* to, const uint8_t* at, const uint8_t* end) except NULL:
    cdef const uint8_t* next
    cdef size_t length
    while True:
        next = <const uint8_t*>memchr(at, c"\\", end - at) if at < end else NULL
        length = (end if next == NULL else next) - at
        memcpy(to, at, length)
        to += length
        if next == NULL:
            return to
        if next + 1 == end:
            raise escape_error(b"")
        if MEANT[next[1]] == 0:
            raise escape_error(bytes(next[1:2]))
        to[0] = MEANT[next[1]]
        to += 1
        at = next + 2
