# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""`render_python` of `lines.py` in C. Read that one first: this file has the same steps in the same order."""

from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uintptr_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset

import numpy as np
import pyarrow as pa

from pgcdc.core.errors import DecodeError

cdef enum:
    MAX_OFFSET = 0x7FFFFFFF
    LONGEST_ESCAPE = 6  # \u001F
    TEXT = 0  # how a value is written: see `lines.py`
    INTEGER = 1
    BOOLEAN = 2
    RAW = 3
    MOMENT = 4
    DECIMAL = 5
    NUMBER = 6

cdef uint8_t ESCAPES[256]  # 0: written unchanged; u: as \u and its code; else the letter after the backslash
memset(ESCAPES, 0, sizeof(ESCAPES))
memset(ESCAPES, c"u", 32)
for _byte, _letter in ((0x08, "b"), (0x09, "t"), (0x0A, "n"), (0x0C, "f"), (0x0D, "r"), (0x22, '"'), (0x5C, "\\")):
    ESCAPES[_byte] = ord(_letter)
cdef const char* HEX = "0123456789ABCDEF"


cdef struct Output:
    uint8_t* at
    size_t size
    size_t room


cdef int grow(Output* out, size_t needed) except -1:
    cdef size_t room = out.room * 2
    if room < out.size + needed:
        room = out.size + needed
    cdef void* at = realloc(out.at, room)
    if at == NULL:
        raise MemoryError(f"no memory for {room} bytes of events")
    out.at = <uint8_t*>at
    out.room = room
    return 0


cdef inline int put(Output* out, const void* data, size_t size) except -1:
    if out.room - out.size < size:
        grow(out, size)
    memcpy(out.at + out.size, data, size)
    out.size += size
    return 0


cdef int put_text(Output* out, const uint8_t* data, size_t size) except -1:
    """A JSON string. Runs without anything to escape are copied whole."""
    if out.room - out.size < size * LONGEST_ESCAPE + 2:
        grow(out, size * LONGEST_ESCAPE + 2)
    cdef uint8_t* to = out.at + out.size
    cdef const uint8_t* end = data + size
    cdef const uint8_t* run = data
    cdef uint8_t letter
    to[0] = c'"'
    to += 1
    while data < end:
        letter = ESCAPES[data[0]]
        if letter == 0:
            data += 1
            continue
        memcpy(to, run, data - run)
        to += data - run
        to[0] = c"\\"
        to[1] = letter
        to += 2
        if letter == c"u":
            to[0] = to[1] = c"0"
            to[2] = HEX[data[0] >> 4]
            to[3] = HEX[data[0] & 15]
            to += 4
        data += 1
        run = data
    memcpy(to, run, data - run)
    to += data - run
    to[0] = c'"'
    out.size = to + 1 - out.at
    return 0


cdef struct Texts:
    # A string or binary array.
    const uint8_t* valid  # NULL: no nulls
    const int32_t* ends
    const uint8_t* data
    int64_t offset


cdef struct Lists:
    # A list array and its items.
    const uint8_t* valid
    const int32_t* ends
    int64_t offset


cdef const uint8_t* address(buffer):
    return NULL if buffer is None else <const uint8_t*><uintptr_t>buffer.address


cdef Texts texts_of(array):
    cdef Texts texts
    valid, ends, data = array.buffers()
    texts.valid = address(valid) if array.null_count else NULL
    texts.ends = <const int32_t*>address(ends)
    texts.data = address(data)
    texts.offset = array.offset
    return texts


cdef Lists lists_of(array):
    cdef Lists lists
    buffers = array.buffers()
    lists.valid = address(buffers[0]) if array.null_count else NULL
    lists.ends = <const int32_t*>address(buffers[1])
    lists.offset = array.offset
    return lists


cdef inline bint is_valid(const uint8_t* bits, int64_t index) noexcept:
    return bits == NULL or (bits[index >> 3] >> (index & 7)) & 1


cdef inline int put_item(Output* out, Texts* texts, int64_t index) except -1:
    index += texts.offset
    return put(out, texts.data + texts.ends[index], texts.ends[index + 1] - texts.ends[index])


cdef struct Unchanged:
    const int16_t* at
    int32_t count


cdef inline bint is_unchanged(Unchanged* unchanged, int16_t column) noexcept:
    cdef int32_t index
    for index in range(unchanged.count):
        if unchanged.at[index] == column:
            return True
    return False


cdef struct Side:
    # One of the two columns of tuples.
    Lists lists
    Texts items
    const int32_t* where  # NULL: nothing is replaced; else, for each item, the index of its text in `texts`, or -1
    Texts texts


cdef struct Typed:
    # How values are written when columns have types; `kinds` NULL: every value is text.
    const uint8_t* kinds
    Texts absent
    Texts placeholders


cdef int put_number(Output* out, const uint8_t* data, size_t size) except -1:
    """An integer, written unchanged if it is one."""
    cdef size_t place = 1 if size > 1 and data[0] == c"-" else 0
    cdef bint is_number = 0 < size < 21
    while is_number and place < size:
        is_number = c"0" <= data[place] <= c"9"
        place += 1
    return put(out, data, size) if is_number else put_text(out, data, size)


cdef const char* BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


cdef int put_base64(Output* out, int64_t number) except -1:
    """The bytes of a number as a JSON string: as few as possible, most significant first."""
    cdef uint8_t data[9]
    cdef uint8_t text[14]
    cdef int size = 1, place, to = 1
    while size < 8 and (number >> (8 * size - 1)) != 0 and (number >> (8 * size - 1)) != -1:
        size += 1
    for place in range(size):
        data[place] = <uint8_t>(number >> (8 * (size - 1 - place)))
    data[size] = 0
    text[0] = c'"'
    for place in range(0, size, 3):
        text[to] = BASE64[data[place] >> 2]
        text[to + 1] = BASE64[((data[place] & 3) << 4) | (data[place + 1] >> 4 if place + 1 < size else 0)]
        text[to + 2] = c"="
        text[to + 3] = c"="
        if place + 1 < size:
            text[to + 2] = BASE64[((data[place + 1] & 15) << 2) | (data[place + 2] >> 6 if place + 2 < size else 0)]
        if place + 2 < size:
            text[to + 3] = BASE64[data[place + 2] & 63]
        to += 4
    text[to] = c'"'
    return put(out, text, to + 1)


cdef int put_decimal(Output* out, const uint8_t* data, size_t size, bint has_scale) except -1:
    """A number of at most 18 digits, with or without a decimal point."""
    cdef size_t place, scale = 0
    cdef bint is_behind = False
    cdef int64_t number = 0
    cdef uint8_t digit
    if has_scale:  # the scale it needs
        for place in range(size):
            is_behind = is_behind or data[place] == c"."
        while is_behind and data[size - 1] == c"0":
            size -= 1
        size -= data[size - 1] == c"."
    is_behind = False
    for place in range(1 if data[0] == c"-" else 0, size):
        if data[place] == c".":
            is_behind = True
        else:
            number = number * 10 + (data[place] - c"0")
            scale += is_behind
    if data[0] == c"-":
        number = -number
    if not has_scale:
        return put_base64(out, number)
    put(out, <const char*>b'{"scale":', 9)
    if scale >= 10:
        digit = <uint8_t>(c"0" + scale // 10)
        put(out, &digit, 1)
    digit = <uint8_t>(c"0" + scale % 10)
    put(out, &digit, 1)
    put(out, <const char*>b',"value":', 9)
    put_base64(out, number)
    return put(out, <const char*>b"}", 1)


cdef int put_moment(Output* out, const uint8_t* data, size_t size) except -1:
    """2026-11-16 00:46:06.5+00 as "2026-11-16T00:46:06.500000Z"."""
    cdef size_t fraction = size - 22
    put(out, <const char*>b'"', 1)
    put(out, data, 10)
    put(out, <const char*>b"T", 1)
    put(out, data + 11, 8)
    if fraction:
        put(out, data + 19, fraction)
    else:
        put(out, <const char*>b".", 1)
        fraction = 1
    put(out, <const char*>b"000000", 7 - fraction)
    return put(out, <const char*>b'Z"', 2)


cdef int put_value(Output* out, uint8_t kind, const uint8_t* data, size_t size) except -1:
    if kind == INTEGER:
        return put_number(out, data, size)
    if kind == RAW:
        return put(out, data, size)
    if kind == MOMENT:
        return put_moment(out, data, size)
    if kind == DECIMAL or kind == NUMBER:
        return put_decimal(out, data, size, kind == NUMBER)
    if kind == BOOLEAN and size == 1 and data[0] == c"t":
        return put(out, <const char*>b"true", 4)
    if kind == BOOLEAN and size == 1 and data[0] == c"f":
        return put(out, <const char*>b"false", 5)
    return put_text(out, data, size)


cdef inline bint put_instead(Output* out, Texts* names, Texts* texts, int64_t name, bint is_first) except -1:
    """Write the replacement for a value that was not sent, if there is one; returns whether the object is still empty."""
    cdef int64_t index = name + texts.offset
    if texts.ends[index] == texts.ends[index + 1]:
        return is_first
    if not is_first:
        put(out, <const char*>b",", 1)
    put_item(out, names, name)
    put_item(out, texts, name)
    return False


cdef int put_values(
    Output* out, Side* side, int64_t row, Texts* names, int64_t first, const uint8_t* keys, const uint8_t* dropped,
    Unchanged* unchanged, bint is_old, Typed* typed
) except -1:
    """Write one tuple as a JSON object. `keys` not NULL: only these columns were sent; `dropped` not NULL: omit these."""
    cdef int32_t begin, end, index, column
    cdef int64_t item
    cdef Lists* lists = &side.lists
    cdef Texts* items
    cdef bint is_first = True
    cdef uint8_t kind
    row += lists.offset
    if not is_valid(lists.valid, row):
        return put(out, <const char*>b"null", 4)
    begin, end = lists.ends[row], lists.ends[row + 1]
    put(out, <const char*>b"{", 1)
    for index in range(begin, end):
        column = index - begin
        if dropped != NULL and dropped[first + column]:
            continue
        if keys != NULL and not keys[first + column]:
            if typed.kinds != NULL:
                is_first = put_instead(out, names, &typed.absent, first + column, is_first)
            continue
        if unchanged.count and is_unchanged(unchanged, <int16_t>(-1 - column if is_old else column)):
            if typed.kinds != NULL:
                is_first = put_instead(
                    out, names, &typed.absent if is_old else &typed.placeholders, first + column, is_first
                )
            continue
        if not is_first:
            put(out, <const char*>b",", 1)
        is_first = False
        put_item(out, names, first + column)
        if side.where != NULL and side.where[index] >= 0:
            items = &side.texts
            item = side.where[index] + items.offset
        else:
            items = &side.items
            item = index + items.offset
        if is_valid(items.valid, item):
            kind = TEXT if typed.kinds == NULL else typed.kinds[first + column]
            if kind > RAW and items == &side.texts:
                kind = RAW
            put_value(out, kind, items.data + items.ends[item], items.ends[item + 1] - items.ends[item])
        else:
            put(out, <const char*>b"null", 4)
    put(out, <const char*>b"}", 1)
    return 0


cdef Side side_of(lists, replaced):
    cdef Side side
    cdef const int32_t[::1] where
    side.lists = lists_of(lists)
    side.items = texts_of(lists.values)
    side.where = NULL
    if replaced is not None:
        where = replaced.where
        side.where = &where[0] if where.shape[0] else NULL
        side.texts = texts_of(replaced.texts)
    return side


cdef const uint8_t* bytes_of(const uint8_t[::1] array):
    return NULL if array is None or not array.shape[0] else &array[0]


def render(frame, changes, layout):
    """The events of `changes` as JSON, one after another, in a string array."""
    ids, begin = layout.ids, layout.begin
    cdef const uint8_t* begin_text = begin
    cdef size_t begin_size = len(begin)
    cdef Texts id_texts = texts_of(layout.heads if ids is None else ids)
    cdef bint has_ids = ids is not None
    cdef Texts head_texts = texts_of(layout.heads)
    cdef const int32_t[::1] head_of = layout.head_of
    cdef Texts tail_texts = texts_of(layout.tails)
    cdef const uint8_t* whole = bytes_of(layout.whole)
    cdef Typed typed
    cdef const uint8_t[::1] kinds = layout.kinds
    typed.kinds = NULL
    if layout.kinds is not None and kinds.shape[0]:
        typed.kinds = &kinds[0]
        typed.absent, typed.placeholders = texts_of(layout.absent), texts_of(layout.placeholders)
    cdef Texts names = texts_of(frame.keys)
    cdef const int64_t[::1] first = frame.first
    cdef const uint8_t[::1] is_key = frame.is_key
    new, old, marks, edit = changes.column("new"), changes.column("old"), changes.column("unchanged"), frame.edit
    # keeps them alive while their buffers are read
    new_values, old_values, mark_values = new.values, old.values, marks.values
    cdef Side news = side_of(new, edit.new)
    cdef Side olds = side_of(old, edit.old)
    cdef const uint8_t* dropped_new = bytes_of(frame.dropped["new"])
    cdef const uint8_t* dropped_old = bytes_of(frame.dropped["old"])
    cdef const uint8_t* keep = bytes_of(edit.keep)
    cdef Lists mark_lists = lists_of(marks)
    cdef const int16_t* mark_items = <const int16_t*>address(mark_values.buffers()[1]) + <int64_t>mark_values.offset
    cdef const int32_t[::1] version = frame.version
    cdef const uint8_t[::1] op = frame.op
    cdef const uint8_t[::1] old_kind = frame.old_kind
    cdef int64_t count = changes.num_rows
    offsets = pa.allocate_buffer(4 + count * 4)
    cdef int32_t* ends = <int32_t*><uintptr_t>offsets.address
    cdef Output out
    cdef Unchanged unchanged
    cdef const uint8_t* keys
    cdef int64_t row, mark, at
    cdef bint layout_is_typed = layout.kinds is not None
    cdef bint any_key = is_key.shape[0] > 0
    out.at, out.size, out.room = NULL, 0, 0
    try:
        grow(&out, 4096 + count * 256)
        ends[0] = 0
        for row in range(count):
            if keep != NULL and not keep[row]:
                ends[row + 1] = <int32_t>out.size
                continue
            unchanged.count = 0
            mark = row + mark_lists.offset
            if is_valid(mark_lists.valid, mark):
                unchanged.at = mark_items + mark_lists.ends[mark]
                unchanged.count = mark_lists.ends[mark + 1] - mark_lists.ends[mark]
            keys = &is_key[0] if old_kind[row] == c"K" and any_key else NULL
            if whole == NULL or not whole[row]:
                put(&out, begin_text, begin_size)
                if has_ids:
                    put_item(&out, &id_texts, row)
                put_item(&out, &head_texts, head_of[row])
                at = first[version[row]]
                if layout_is_typed:
                    put_values(&out, &olds, row, &names, at, keys, dropped_old, &unchanged, True, &typed)
                    put(&out, <const char*>b',"after":', 9)
                    if op[row] == c"D":
                        put(&out, <const char*>b"null", 4)
                    else:
                        put_values(&out, &news, row, &names, at, NULL, dropped_new, &unchanged, False, &typed)
                else:
                    if op[row] == c"D":
                        put_values(&out, &olds, row, &names, at, keys, dropped_old, &unchanged, True, &typed)
                        put(&out, <const char*>b',"old":null', 11)
                    else:
                        put_values(&out, &news, row, &names, at, NULL, dropped_new, &unchanged, False, &typed)
                        put(&out, <const char*>b',"old":', 7)
                        put_values(&out, &olds, row, &names, at, keys, dropped_old, &unchanged, True, &typed)
                    if unchanged.count:
                        put_unchanged(&out, &unchanged, &names, at, dropped_new)
            put_item(&out, &tail_texts, row)
            if out.size > MAX_OFFSET:
                raise too_large(out.size)
            ends[row + 1] = <int32_t>out.size
        data = pa.allocate_buffer(out.size)
        memcpy(<void*><uintptr_t>data.address, out.at, out.size)
    finally:
        free(out.at)
    if keep == NULL:
        return pa.StringArray.from_buffers(count, offsets, data)
    valid = np.packbits(np.asarray(edit.keep), bitorder="little")
    return pa.StringArray.from_buffers(count, offsets, data, pa.py_buffer(valid))


cdef int put_unchanged(
    Output* out, Unchanged* unchanged, Texts* names, int64_t first, const uint8_t* dropped
) except -1:
    """The names of the new row's unchanged columns, if any. A key ends with a colon, which is omitted here."""
    cdef int32_t index
    cdef int64_t name
    cdef bint is_first = True
    for index in range(unchanged.count):
        if unchanged.at[index] < 0 or (dropped != NULL and dropped[first + unchanged.at[index]]):
            continue
        if is_first:
            put(out, <const char*>b',"_unchanged_toast_columns":[', 29)
        else:
            put(out, <const char*>b",", 1)
        is_first = False
        name = first + unchanged.at[index] + names.offset
        put(out, names.data + names.ends[name], names.ends[name + 1] - names.ends[name] - 1)
    if not is_first:
        put(out, <const char*>b"]", 1)
    return 0


cdef object too_large(size):
    return DecodeError(
        f"the events of one batch take more than {MAX_OFFSET} bytes as JSON",
        "One row is too large for the JSON event: leave its largest column out of the publication",
    )
