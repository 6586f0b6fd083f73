# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""`python_intervals` of `interval.py` in C. Read that one first. What is wrong with a value is not said here, only which it is."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t, uintptr_t
from libc.string cimport memcmp, memset

import numpy as np

from pgcdc.postgres.types.interval import Intervals

cdef enum:
    YEARS
    MONTHS
    DAYS
    HOURS
    MINUTES
    SECONDS

cdef const char* UNITS = b"YMDHMS"
cdef uint64_t MOST_HOURS = 2562047788


cdef inline const uint8_t* address(object buffer) except? NULL:
    return NULL if buffer is None else <const uint8_t*><uintptr_t>buffer.address


def split_intervals(values):
    buffers = values.buffers()
    cdef const uint8_t* valid = address(buffers[0])
    cdef const int32_t* ends = <const int32_t*>address(buffers[1])
    cdef const uint8_t* data = address(buffers[2])
    cdef int64_t offset = values.offset
    found = Intervals(np.zeros(len(values), np.int32), np.zeros(len(values), np.int32), np.zeros(len(values), np.int64))
    cdef int32_t[::1] months = found.months
    cdef int32_t[::1] days = found.days
    cdef int64_t[::1] microseconds = found.microseconds
    cdef int64_t row
    for row in range(offset, offset + len(values)):
        if (valid == NULL or valid[row >> 3] >> (row & 7) & 1) and not read_interval(
            data + ends[row], data + ends[row + 1], &months[row - offset], &days[row - offset], &microseconds[row - offset]
        ):
            return row - offset
    return found


cdef bint read_interval(
    const uint8_t* at, const uint8_t* end, int32_t* months, int32_t* days, int64_t* microseconds
) noexcept:
    cdef uint64_t parts[6]
    cdef bint negative[6]
    cdef uint64_t fraction = 0, number
    cdef int64_t signed
    cdef int part = YEARS, digits
    cdef bint minus, has_time = False
    cdef const uint8_t* start
    if end - at == 4 and memcmp(at, <const char*>b"PT0S", 4) == 0:
        return True
    if end - at < 2 or at[0] != c"P":
        return False
    memset(parts, 0, sizeof(parts))
    memset(negative, 0, sizeof(negative))
    at += 1
    while at < end:
        if at[0] == c"T":
            if has_time:
                return False
            has_time = True
            part = HOURS
            at += 1
        minus = at < end and at[0] == c"-"
        if minus:
            at += 1
        start = at
        number = 0
        while at < end and c"0" <= at[0] <= c"9" and at - start < 10:
            number = 10 * number + (at[0] - c"0")
            at += 1
        if at == start or at == end or (start[0] == c"0" and (at - start > 1 or at[0] != c".")):
            return False
        if at[0] == c".":
            at += 1
            digits = 0
            while at < end and c"0" <= at[0] <= c"9" and digits < 6:
                fraction = 10 * fraction + (at[0] - c"0")
                at += 1
                digits += 1
            if digits == 0 or at[-1] == c"0" or at == end or at[0] != c"S":
                return False
            while digits < 6:
                fraction *= 10
                digits += 1
        # Each unit at most once, in their order; M is of months until there is a T.
        while part <= SECONDS and UNITS[part] != at[0]:
            part += 1
        if part > SECONDS or (part >= HOURS) != has_time:
            return False
        parts[part] = number
        negative[part] = minus
        part += 1
        at += 1
    if parts[MONTHS] >= 12 or parts[MINUTES] >= 60 or parts[SECONDS] >= 60:
        return False
    if parts[YEARS] and parts[MONTHS] and negative[YEARS] != negative[MONTHS]:
        return False
    minus = negative[HOURS] or negative[MINUTES] or negative[SECONDS]
    if (
        (parts[HOURS] and negative[HOURS] != minus)
        or (parts[MINUTES] and negative[MINUTES] != minus)
        or ((parts[SECONDS] or fraction) and negative[SECONDS] != minus)
    ):
        return False
    signed = 12 * parts[YEARS] + parts[MONTHS]
    if negative[YEARS] or negative[MONTHS]:
        signed = -signed
    months[0] = <int32_t>signed
    if months[0] != signed:
        return False
    signed = parts[DAYS]
    if negative[DAYS]:
        signed = -signed
    days[0] = <int32_t>signed
    if days[0] != signed or parts[HOURS] > MOST_HOURS:
        return False
    number = 1000000 * (3600 * parts[HOURS] + 60 * parts[MINUTES] + parts[SECONDS]) + fraction
    if number > (<uint64_t>1 << 63) - (0 if minus else 1):
        return False
    microseconds[0] = <int64_t>(0 - number if minus else number)
    return True
