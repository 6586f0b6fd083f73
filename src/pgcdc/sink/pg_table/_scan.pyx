# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Events to COPY text in C: the same results as `lines.scan_python`, which is the one to read first.

Only lines exactly as pgcdc writes them are taken apart here. Any other (unchanged TOAST, a value that is no text, another
envelope) is handed on as it is.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdlib cimport free, realloc
from libc.string cimport memchr, memcmp, memcpy

import orjson


cdef struct Buffer:
    char *data
    Py_ssize_t size
    Py_ssize_t room


cdef int reserve(Buffer *buffer, Py_ssize_t more) except -1:
    cdef Py_ssize_t wanted = buffer.size + more
    cdef char *moved
    if wanted > buffer.room:
        wanted += wanted // 2 + 4096
        moved = <char *> realloc(buffer.data, wanted)
        if moved == NULL:
            raise MemoryError()
        buffer.data = moved
        buffer.room = wanted
    return 0


cdef inline const char *expect(const char *at, const char *end, const char *text, Py_ssize_t size) noexcept nogil:
    """Behind `text`, or NULL if it is not there."""
    if end - at < size or memcmp(at, text, size) != 0:
        return NULL
    return at + size


cdef inline const char *skip_string(const char *at, const char *end) noexcept nogil:
    """Behind the quote that ends a string, of which `at` is inside."""
    while at < end:
        if at[0] == 34:  # "
            return at + 1
        at += 2 if at[0] == 92 else 1  # a backslash
    return NULL


cdef inline int hex_digit(char c) noexcept nogil:
    if 48 <= c <= 57:
        return c - 48
    if 65 <= c <= 70:
        return c - 55
    if 97 <= c <= 102:
        return c - 87
    return -1


cdef inline long read_hex(const char *at, const char *end) noexcept nogil:
    """The number of four digits; -1 if there are none."""
    cdef int digit, count
    cdef long code = 0
    if end - at < 4:
        return -1
    for count in range(4):
        digit = hex_digit(at[count])
        if digit < 0:
            return -1
        code = code * 16 + digit
    return code


cdef inline char *write_code(char *out, long code) noexcept nogil:
    """A character in UTF-8, as COPY takes it."""
    if code == 9 or code == 10 or code == 13 or code == 92:
        out[0] = 92
        out[1] = 116 if code == 9 else (110 if code == 10 else (114 if code == 13 else 92))
        return out + 2
    if code < 0x80:
        out[0] = <char> code
        return out + 1
    if code < 0x800:
        out[0] = <char> (0xC0 | (code >> 6))
        out[1] = <char> (0x80 | (code & 0x3F))
        return out + 2
    if code < 0x10000:
        out[0] = <char> (0xE0 | (code >> 12))
        out[1] = <char> (0x80 | ((code >> 6) & 0x3F))
        out[2] = <char> (0x80 | (code & 0x3F))
        return out + 3
    out[0] = <char> (0xF0 | (code >> 18))
    out[1] = <char> (0x80 | ((code >> 12) & 0x3F))
    out[2] = <char> (0x80 | ((code >> 6) & 0x3F))
    out[3] = <char> (0x80 | (code & 0x3F))
    return out + 4


cdef const char *read_value(const char *at, const char *end, Buffer *values) noexcept nogil:
    """The string in which `at` is, as a value of COPY; there is room for it. Behind its quote, or NULL."""
    cdef char *out = values.data + values.size
    cdef char c
    cdef long code, low
    while at < end:
        c = at[0]
        if c == 34:
            values.size = out - values.data
            return at + 1
        if c != 92:
            out[0] = c
            out += 1
            at += 1
            continue
        if end - at < 2:
            return NULL
        c = at[1]
        at += 2
        if c == 110 or c == 116 or c == 114 or c == 98 or c == 102 or c == 92:  # n t r b f and the backslash: as in COPY
            out[0] = 92
            out[1] = c
            out += 2
        elif c == 34 or c == 47:
            out[0] = c
            out += 1
        elif c == 117:
            code = read_hex(at, end)
            at += 4
            if 0xD800 <= code < 0xDC00 and end - at >= 6 and at[0] == 92 and at[1] == 117:
                low = read_hex(at + 2, end)
                if not 0xDC00 <= low < 0xE000:
                    return NULL
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
                at += 6
            if code <= 0 or 0xD800 <= code < 0xE000:
                return NULL
            out = write_code(out, code)
        else:
            return NULL
    return NULL


cdef const char *read_object(const char *at, const char *end, Buffer *names, Buffer *values) except? NULL:
    """An object of texts and nulls, of which `at` is behind the brace: its names, and a line of COPY. NULL: it is none."""
    cdef const char *key
    cdef const char *behind
    cdef bint is_first = True
    names.size = values.size = 0
    reserve(values, 2 * (end - at) + 16)
    reserve(names, end - at)
    if at < end and at[0] == 125:
        return at + 1
    while True:
        if at >= end or at[0] != 34:
            return NULL
        key = at
        at = skip_string(at + 1, end)
        if at == NULL or at >= end or at[0] != 58:
            return NULL
        memcpy(names.data + names.size, key, at - key)
        names.size += at - key
        names.data[names.size] = 44
        names.size += 1
        at += 1
        if not is_first:
            values.data[values.size] = 9
            values.size += 1
        is_first = False
        if at < end and at[0] == 34:
            at = read_value(at + 1, end, values)
            if at == NULL:
                return NULL
        else:
            behind = expect(at, end, b"null", 4)
            if behind == NULL:
                return NULL
            at = behind
            values.data[values.size] = 92
            values.data[values.size + 1] = 78
            values.size += 2
        if at >= end:
            return NULL
        if at[0] == 125:
            return at + 1
        if at[0] != 44:
            return NULL
        at += 1


cdef const char *read_head(const char *at, const char *end) noexcept nogil:
    """From the quote behind the id to the row."""
    at = expect(at, end, b'","channel":"', 13)
    if at == NULL:
        return NULL
    at = skip_string(at, end)
    if at == NULL:
        return NULL
    at = expect(at, end, b',"operation":"', 14)
    if at == NULL:
        return NULL
    at = skip_string(at, end)
    if at == NULL:
        return NULL
    at = expect(at, end, b',"payload":{"op":"', 18)
    if at == NULL:
        return NULL
    at = skip_string(at, end)
    if at == NULL:
        return NULL
    at = expect(at, end, b',"table":', 9)
    if at == NULL or at >= end:
        return NULL
    if at[0] == 34:
        at = skip_string(at + 1, end)
        if at == NULL:
            return NULL
    else:
        at = expect(at, end, b"null", 4)
        if at == NULL:
            return NULL
    return expect(at, end, b',"row":', 7)


cdef object intern_names(Buffer *names, object last, dict known):
    """The columns as a tuple, the same one for the same names; `last` is the pair that was found before."""
    cdef bytes raw
    cdef object found
    if last is not None:
        raw = <bytes> (<tuple> last)[0]
        if PyBytes_GET_SIZE(raw) == names.size and memcmp(PyBytes_AS_STRING(raw), names.data, names.size) == 0:
            return last
    raw = PyBytes_FromStringAndSize(names.data, names.size)
    found = known.get(raw)
    if found is None:
        found = known[raw] = (raw, tuple(orjson.loads(b"[" + raw[:-1] + b"]")))
    return found


def scan(bytes text not None, dict known not None):
    """See `lines.scan_python`. `known` keeps names between calls."""
    cdef const char *at = PyBytes_AS_STRING(text)
    cdef const char *stop = at + PyBytes_GET_SIZE(text)
    cdef const char *begin
    cdef const char *end
    cdef const char *place
    cdef const char *head_begin
    cdef const char *last_begin = NULL
    cdef Py_ssize_t last_size = 0
    cdef Buffer names, values
    cdef list found = []
    cdef object head = None, columns, line, old_columns, old, last = None, last_old = None
    names.data = values.data = NULL
    names.size = names.room = values.size = values.room = 0
    try:
        while at < stop:
            begin = at
            end = <const char *> memchr(at, 10, stop - at)
            if end == NULL:
                end = stop
            at = end + 1
            place = expect(begin, end, b'{"id":"', 7)
            if place != NULL:
                place = skip_string(place, end)
            if place == NULL:
                found.append((None, None, PyBytes_FromStringAndSize(begin, end - begin), None, None))
                continue
            head_begin = place - 1
            if last_begin != NULL and end - head_begin > last_size and memcmp(head_begin, last_begin, last_size) == 0:
                place = head_begin + last_size
            else:
                place = read_head(head_begin, end)
                if place != NULL:
                    head = PyBytes_FromStringAndSize(head_begin, place - head_begin)
                    last_begin, last_size = head_begin, place - head_begin
            columns = line = old_columns = old = None
            if place != NULL and place < end and place[0] == 123:
                place = read_object(place + 1, end, &names, &values)
                if place != NULL:
                    last = intern_names(&names, last, known)
                    columns = (<tuple> last)[1]
                    line = PyBytes_FromStringAndSize(values.data, values.size)
            elif place != NULL:
                place = expect(place, end, b"null", 4)
            if place != NULL:
                place = expect(place, end, b',"old":', 7)
            if place != NULL and place < end and place[0] == 123:
                place = read_object(place + 1, end, &names, &values)
                if place != NULL:
                    last_old = intern_names(&names, last_old, known)
                    old_columns = (<tuple> last_old)[1]
                    old = PyBytes_FromStringAndSize(values.data, values.size)
            elif place != NULL:
                place = expect(place, end, b"null", 4)
            if place != NULL and (place >= end or place[0] != 125):  # more in the payload: unchanged TOAST
                place = NULL
            if place == NULL:
                found.append((None, None, PyBytes_FromStringAndSize(begin, end - begin), None, None))
            else:
                found.append((head, columns, line, old_columns, old))
    finally:
        free(names.data)
        free(values.data)
    return found
