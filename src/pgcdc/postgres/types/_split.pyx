# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The splitters of `split.py` in C. Read that one first: this file has the same steps in the same order.

No leaf is longer than its text, and there are never more of them than delimiters say, so that all room is made before
the first value is read. Each reader gives the place behind what it has read, or NULL if that is not as PostgreSQL writes
it; then the index of the value is all that is given back.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uintptr_t
from libc.string cimport memcmp, memcpy, memset

import numpy as np
import pyarrow as pa

from pgcdc.postgres.types.split import EMPTY as _EMPTY
from pgcdc.postgres.types.split import LOWER_INCLUSIVE as _LOWER_INCLUSIVE
from pgcdc.postgres.types.split import MAX_DIMENSIONS as _MAX_DIMENSIONS
from pgcdc.postgres.types.split import UPPER_INCLUSIVE as _UPPER_INCLUSIVE
from pgcdc.postgres.types.split import Lists, Ranges

cdef enum:
    LEVELS = 6
assert LEVELS == _MAX_DIMENSIONS

cdef uint8_t EMPTY = _EMPTY
cdef uint8_t LOWER_INCLUSIVE = _LOWER_INCLUSIVE
cdef uint8_t UPPER_INCLUSIVE = _UPPER_INCLUSIVE

cdef uint8_t IN_ROW[256]  # what stands only in quotes
cdef uint8_t IN_RANGE[256]
memset(IN_ROW, 0, sizeof(IN_ROW))
memset(IN_RANGE, 0, sizeof(IN_RANGE))
for _byte in bytearray(b'"\\(), \t\n\r\v\f'):
    IN_ROW[_byte] = IN_RANGE[_byte] = 1
for _byte in bytearray(b"[]"):
    IN_RANGE[_byte] = 1


cdef struct Texts:
    const uint8_t* data
    const int32_t* ends
    const uint8_t* valid
    int64_t offset
    int64_t count


cdef struct Leaves:
    uint8_t* to  # where the next byte goes
    uint8_t* data
    int32_t* ends
    uint8_t* valid
    int64_t count


cdef inline const uint8_t* address(object buffer) except? NULL:
    return NULL if buffer is None else <const uint8_t*><uintptr_t>buffer.address


cdef Texts texts_of(object values) except *:
    cdef Texts texts
    buffers = values.buffers()
    texts.valid = address(buffers[0])
    texts.ends = <const int32_t*>address(buffers[1])
    texts.data = address(buffers[2])
    texts.offset = values.offset
    texts.count = len(values)
    return texts


cdef inline bint is_valid(Texts* texts, int64_t row) noexcept:
    row += texts.offset
    return texts.valid == NULL or texts.valid[row >> 3] >> (row & 7) & 1


cdef int64_t size_of(Texts* texts) noexcept:
    """How many bytes all values have."""
    if texts.count == 0:
        return 0
    return texts.ends[texts.offset + texts.count] - texts.ends[texts.offset]


cdef int64_t count_of(Texts* texts, uint8_t byte) noexcept:
    cdef int64_t found = 0, index
    cdef int64_t size = size_of(texts)
    cdef const uint8_t* data
    if size:
        data = texts.data + texts.ends[texts.offset]
        for index in range(size):
            found += data[index] == byte
    return found


cdef class Flat:
    """The room for the leaves of one column."""

    cdef Leaves leaves
    cdef object data
    cdef object ends
    cdef object valid

    def __cinit__(self, int64_t size, int64_t count):
        self.data = pa.allocate_buffer(size)
        self.ends = pa.allocate_buffer(4 * (count + 1))
        self.valid = np.empty(count, np.uint8)
        cdef uint8_t[::1] valid = self.valid
        self.leaves.data = <uint8_t*>address(self.data)
        self.leaves.to = self.leaves.data
        self.leaves.ends = <int32_t*>address(self.ends)
        self.leaves.valid = &valid[0] if count else NULL
        self.leaves.ends[0] = 0
        self.leaves.count = 0

    cdef object finish(self):
        """The leaves as an array."""
        cdef int64_t count = self.leaves.count
        valid = self.valid[:count]
        nulls = count - int(np.count_nonzero(valid))
        bitmap = pa.py_buffer(np.packbits(valid, bitorder="little")) if nulls else None
        ends = self.ends.slice(0, 4 * (count + 1))
        data = self.data.slice(0, self.leaves.to - self.leaves.data)
        return pa.Array.from_buffers(pa.binary(), count, [bitmap, ends, data], nulls)


cdef inline void close_leaf(Leaves* leaves, uint8_t valid) noexcept:
    leaves.valid[leaves.count] = valid
    leaves.count += 1
    leaves.ends[leaves.count] = <int32_t>(leaves.to - leaves.data)


cdef inline void put(Leaves* leaves, const uint8_t* at, size_t size) noexcept:
    memcpy(leaves.to, at, size)
    leaves.to += size


cdef const uint8_t* read_quoted(const uint8_t* at, const uint8_t* end, Leaves* leaves) noexcept:
    """What stands in quotes, with backslashes before those inside; `at` is behind the first one."""
    cdef const uint8_t* run = at
    while at < end:
        if at[0] == c'"':
            put(leaves, run, at - run)
            close_leaf(leaves, 1)
            return at + 1
        if at[0] == c"\\":
            if at + 1 == end or (at[1] != c'"' and at[1] != c"\\"):
                return NULL
            put(leaves, run, at - run)
            run = at + 1
            at += 1
        at += 1
    return NULL


# Arrays


def split_arrays(values, int depth, bytes delimiter):
    cdef Texts texts = texts_of(values)
    cdef uint8_t comma = delimiter[0]
    cdef uint8_t special[256]
    cdef int32_t* ends[LEVELS]
    cdef int64_t filled[LEVELS]
    cdef int64_t row
    cdef int level
    cdef int32_t[::1] view
    cdef const uint8_t* data
    if not 1 <= depth <= LEVELS:
        raise ValueError(f"arrays have no {depth} dimensions")
    memset(special, 0, sizeof(special))
    for byte in bytearray(b'"\\{} \t\n\r\v\f'):
        special[byte] = 1
    special[comma] = 1
    cdef Flat flat = Flat(size_of(&texts), count_of(&texts, comma) + texts.count)
    rooms = []
    cdef int64_t opened = count_of(&texts, c"{") if depth > 1 else 0
    for level in range(depth):
        room = np.empty((opened if level else texts.count) + 1, np.int32)
        view = room
        ends[level] = &view[0]
        ends[level][0] = 0
        filled[level] = 0
        rooms.append(room)
    for row in range(texts.count):
        if is_valid(&texts, row):
            data = texts.data + texts.ends[texts.offset + row]
            if not read_array(
                data, texts.data + texts.ends[texts.offset + row + 1], depth, comma, special, ends, filled, &flat.leaves
            ):
                return row
        filled[0] += 1
        ends[0][filled[0]] = <int32_t>(filled[1] if depth > 1 else flat.leaves.count)
    return Lists([room[: filled[level] + 1] for level, room in enumerate(rooms)], flat.finish())


cdef bint read_array(
    const uint8_t* at, const uint8_t* end, int depth, uint8_t comma, const uint8_t* special, int32_t** ends,
    int64_t* filled, Leaves* leaves,
) noexcept:
    """The lists of all levels but the outermost, and the leaves."""
    cdef int64_t counts[LEVELS]
    cdef int64_t sizes[LEVELS]
    cdef int level
    if end - at == 2 and at[0] == c"{" and at[1] == c"}":
        return True
    for level in range(depth):
        if at == end or at[0] != c"{":
            return False
        at += 1
        counts[level] = 0
        sizes[level] = -1
    while True:
        at = read_element(at, end, special, leaves)
        if at == NULL or at == end:
            return False
        counts[depth - 1] += 1
        if at[0] == comma:
            at += 1
            continue
        level = depth - 1
        while True:
            if at == end or at[0] != c"}":
                return False
            at += 1
            if sizes[level] != -1 and sizes[level] != counts[level]:
                return False
            sizes[level] = counts[level]
            if level == 0:
                return at == end
            filled[level] += 1
            ends[level][filled[level]] = <int32_t>(filled[level + 1] if level + 1 < depth else leaves.count)
            counts[level] = 0
            level -= 1
            counts[level] += 1
            if at < end and at[0] == comma:
                at += 1
                break
        while level < depth - 1:
            if at == end or at[0] != c"{":
                return False
            at += 1
            level += 1


cdef const uint8_t* read_element(
    const uint8_t* at, const uint8_t* end, const uint8_t* special, Leaves* leaves
) noexcept:
    if at < end and at[0] == c'"':
        return read_quoted(at + 1, end, leaves)
    cdef const uint8_t* run = at
    while at < end and not special[at[0]]:
        at += 1
    if at == run:
        return NULL
    if at - run == 4 and (run[0] | 32) == c"n" and (run[1] | 32) == c"u" and (run[2] | 32) == c"l" and (run[3] | 32) == c"l":
        close_leaf(leaves, 0)
        return at if memcmp(run, <const char*>b"NULL", 4) == 0 else NULL
    put(leaves, run, at - run)
    close_leaf(leaves, 1)
    return at


# Rows and ranges


def split_rows(values, int count):
    cdef Texts texts = texts_of(values)
    cdef Flat flat = Flat(size_of(&texts), texts.count * count)
    cdef const uint8_t* at
    cdef const uint8_t* end
    cdef int64_t row
    cdef int index
    for row in range(texts.count):
        if not is_valid(&texts, row):
            for index in range(count):
                close_leaf(&flat.leaves, 0)
            continue
        at = texts.data + texts.ends[texts.offset + row]
        end = texts.data + texts.ends[texts.offset + row + 1]
        if at == end or at[0] != c"(":
            return row
        at += 1
        for index in range(count):
            if index:
                if at == end or at[0] != c",":
                    return row
                at += 1
            at = read_field(at, end, IN_ROW, &flat.leaves)
            if at == NULL:
                return row
        if end - at != 1 or at[0] != c")":
            return row
    return flat.finish()


cdef const uint8_t* read_field(const uint8_t* at, const uint8_t* end, const uint8_t* special, Leaves* leaves) noexcept:
    """An attribute or a bound. Nothing at all is NULL."""
    cdef const uint8_t* run
    if at == end or at[0] != c'"':
        run = at
        while at < end and not special[at[0]]:
            at += 1
        put(leaves, run, at - run)
        close_leaf(leaves, at > run)
        return at
    at += 1
    run = at
    while at < end:
        if at[0] == c'"' or at[0] == c"\\":
            if at + 1 < end and at[1] == at[0]:
                put(leaves, run, at + 1 - run)
                at += 1
                run = at + 1
            elif at[0] == c'"':
                put(leaves, run, at - run)
                close_leaf(leaves, 1)
                return at + 1
            else:
                return NULL
        at += 1
    return NULL


def split_ranges(values):
    cdef Texts texts = texts_of(values)
    cdef Flat flat = Flat(size_of(&texts), 2 * texts.count)
    cdef const uint8_t* at
    cdef const uint8_t* end
    cdef int64_t row
    kinds = np.empty(texts.count, np.uint8)
    cdef uint8_t[::1] kind = kinds
    for row in range(texts.count):
        if is_valid(&texts, row):
            at = texts.data + texts.ends[texts.offset + row]
            end = texts.data + texts.ends[texts.offset + row + 1]
            if end - at != 5 or memcmp(at, <const char*>b"empty", 5) != 0:
                if read_bounds(at, end, &kind[row], &flat.leaves) != end:
                    return row
                continue
        kind[row] = EMPTY
        close_leaf(&flat.leaves, 0)
        close_leaf(&flat.leaves, 0)
    return Ranges(np.arange(texts.count + 1, dtype=np.int32), kinds, flat.finish())


def split_multiranges(values):
    cdef Texts texts = texts_of(values)
    cdef int64_t most = count_of(&texts, c",") + texts.count
    cdef Flat flat = Flat(size_of(&texts), 2 * most)
    cdef const uint8_t* at
    cdef const uint8_t* end
    cdef int64_t row, found = 0
    kinds = np.empty(most, np.uint8)
    offsets = np.empty(texts.count + 1, np.int32)
    cdef uint8_t[::1] kind = kinds
    cdef int32_t[::1] ends = offsets
    ends[0] = 0
    for row in range(texts.count):
        if is_valid(&texts, row):
            at = texts.data + texts.ends[texts.offset + row]
            end = texts.data + texts.ends[texts.offset + row + 1]
            if end - at < 2 or at[0] != c"{":
                return row
            at += 1
            if at[0] != c"}":
                while True:
                    at = read_bounds(at, end, &kind[found], &flat.leaves)
                    if at == NULL:
                        return row
                    found += 1
                    if at == end or at[0] != c",":
                        break
                    at += 1
            if end - at != 1 or at[0] != c"}":
                return row
        ends[row + 1] = <int32_t>found
    return Ranges(offsets, kinds[:found], flat.finish())


cdef const uint8_t* read_bounds(const uint8_t* at, const uint8_t* end, uint8_t* kind, Leaves* leaves) noexcept:
    """One range that is not empty."""
    if at == end or (at[0] != c"[" and at[0] != c"("):
        return NULL
    kind[0] = LOWER_INCLUSIVE if at[0] == c"[" else 0
    at = read_field(at + 1, end, IN_RANGE, leaves)
    if at == NULL or at == end or at[0] != c",":
        return NULL
    if kind[0] and not leaves.valid[leaves.count - 1]:
        return NULL
    at = read_field(at + 1, end, IN_RANGE, leaves)
    if at == NULL or at == end or (at[0] != c"]" and at[0] != c")"):
        return NULL
    if at[0] == c"]":
        if not leaves.valid[leaves.count - 1]:
            return NULL
        kind[0] |= UPPER_INCLUSIVE
    return at + 1


# hstore


def split_pairs(values):
    cdef Texts texts = texts_of(values)
    cdef Flat flat = Flat(size_of(&texts), 2 * count_of(&texts, c"="))
    cdef int64_t row
    offsets = np.empty(texts.count + 1, np.int32)
    cdef int32_t[::1] ends = offsets
    ends[0] = 0
    for row in range(texts.count):
        if is_valid(&texts, row) and not read_hstore(
            texts.data + texts.ends[texts.offset + row], texts.data + texts.ends[texts.offset + row + 1], &flat.leaves
        ):
            return row
        ends[row + 1] = <int32_t>flat.leaves.count
    return Lists([offsets], flat.finish())


cdef bint read_hstore(const uint8_t* at, const uint8_t* end, Leaves* leaves) noexcept:
    cdef int64_t last = -1
    if at == end:
        return True
    while True:
        # Looked for before anything is written: there is room for as many leaves as there are signs of equality.
        if at == end or at[0] != c'"' or not has_value(at + 1, end):
            return False
        at = read_quoted(at + 1, end, leaves)
        if last >= 0 and not precedes(leaves, last, leaves.count - 1):
            return False
        last = leaves.count - 1
        at += 2
        if end - at >= 4 and memcmp(at, <const char*>b"NULL", 4) == 0:
            close_leaf(leaves, 0)
            at += 4
        elif at < end and at[0] == c'"':
            at = read_quoted(at + 1, end, leaves)
            if at == NULL:
                return False
        else:
            return False
        if at == end:
            return True
        if end - at < 2 or at[0] != c"," or at[1] != c" ":
            return False
        at += 2


cdef bint has_value(const uint8_t* at, const uint8_t* end) noexcept:
    """Whether what stands in quotes has an end, and => behind it."""
    while at < end and at[0] != c'"':
        if at[0] == c"\\":
            if at + 1 == end or (at[1] != c'"' and at[1] != c"\\"):
                return False
            at += 1
        at += 1
    return end - at >= 3 and at[1] == c"=" and at[2] == c">"


cdef bint precedes(Leaves* leaves, int64_t one, int64_t other) noexcept:
    """The order of hstore: by length, then by bytes."""
    cdef int64_t size = leaves.ends[one + 1] - leaves.ends[one]
    cdef int64_t other_size = leaves.ends[other + 1] - leaves.ends[other]
    if size != other_size:
        return size < other_size
    return memcmp(leaves.data + leaves.ends[one], leaves.data + leaves.ends[other], size) < 0
