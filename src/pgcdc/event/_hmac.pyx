# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""HMAC-SHA256 of a whole column of texts, as hexadecimal text: FIPS 180-4 and FIPS 198-1.

`masks.hmac_python` does the same with the standard library, one call for each value.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

import hashlib

import pyarrow as pa
import pyarrow.compute as pc

cdef enum:
    BLOCK = 64
    DIGEST = 32

cdef const char* HEX = "0123456789abcdef"
cdef uint32_t[8] START
cdef uint32_t[64] ROUND


cdef uint32_t root_bits(object prime, object degree):
    """The first 32 bits of the fraction of a square or cube root, by integers alone."""
    number = prime << (32 * degree)
    guess = int(round(number ** (1.0 / degree)))
    while guess**degree > number:
        guess -= 1
    while (guess + 1) ** degree <= number:
        guess += 1
    return <uint32_t>(guess & 0xFFFFFFFF)


_PRIMES = [n for n in range(2, 312) if all(n % d for d in range(2, n))]
for _index in range(64):
    ROUND[_index] = root_bits(_PRIMES[_index], 3)
for _index in range(8):
    START[_index] = root_bits(_PRIMES[_index], 2)


cdef inline uint32_t turn(uint32_t x, int n) noexcept nogil:
    return (x >> n) | (x << (32 - n))


cdef void compress(uint32_t* state, const uint8_t* block) noexcept nogil:
    cdef uint32_t[64] w
    cdef uint32_t a, b, c, d, e, f, g, h, one, two
    cdef int i
    for i in range(16):
        w[i] = (
            (<uint32_t>block[i * 4] << 24) | (<uint32_t>block[i * 4 + 1] << 16)
            | (<uint32_t>block[i * 4 + 2] << 8) | <uint32_t>block[i * 4 + 3]
        )
    for i in range(16, 64):
        w[i] = (
            w[i - 16] + (turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ (w[i - 15] >> 3))
            + w[i - 7] + (turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ (w[i - 2] >> 10))
        )
    a, b, c, d = state[0], state[1], state[2], state[3]
    e, f, g, h = state[4], state[5], state[6], state[7]
    for i in range(64):
        one = h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) + ROUND[i] + w[i]
        two = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))
        h, g, f = g, f, e
        e = d + one
        d, c, b = c, b, a
        a = one + two
    state[0] += a
    state[1] += b
    state[2] += c
    state[3] += d
    state[4] += e
    state[5] += f
    state[6] += g
    state[7] += h


cdef void finish(const uint32_t* begin, const uint8_t* data, uint64_t size, uint8_t* digest) noexcept nogil:
    """The digest of `data` behind one block that `begin` has seen already."""
    cdef uint32_t[8] state
    cdef uint8_t[128] last
    cdef uint64_t bits = (size + BLOCK) * 8
    cdef uint64_t rest = size
    cdef int blocks, i
    memcpy(state, begin, sizeof(state))
    while rest >= BLOCK:
        compress(state, data)
        data += BLOCK
        rest -= BLOCK
    memset(last, 0, sizeof(last))
    if rest:
        memcpy(last, data, rest)
    last[rest] = 0x80
    blocks = 1 if rest + 9 <= BLOCK else 2
    for i in range(8):
        last[blocks * BLOCK - 1 - i] = <uint8_t>(bits >> (8 * i))
    compress(state, last)
    if blocks == 2:
        compress(state, last + BLOCK)
    for i in range(DIGEST):
        digest[i] = <uint8_t>(state[i >> 2] >> (24 - 8 * (i & 3)))


cdef void begin_with(const uint8_t* key, uint8_t pad, uint32_t* state) noexcept nogil:
    cdef uint8_t[BLOCK] block
    cdef int i
    for i in range(BLOCK):
        block[i] = key[i] ^ pad
    memcpy(state, START, sizeof(START))
    compress(state, block)


def hmac_texts(values, bytes key):
    """For each value (a binary array) the HMAC as 64 hexadecimal digits; null stays null."""
    if not len(values):
        return pa.array([], pa.string())
    cdef bytes padded = (hashlib.sha256(key).digest() if len(key) > BLOCK else key).ljust(BLOCK, b"\0")
    cdef const uint8_t* key_bytes = padded
    cdef uint32_t[8] inner
    cdef uint32_t[8] outer
    cdef uint8_t[DIGEST] digest
    begin_with(key_bytes, 0x36, inner)
    begin_with(key_bytes, 0x5C, outer)
    cdef int64_t count = len(values)
    cdef int64_t offset = values.offset
    _, given_ends, given_data = values.buffers()
    cdef const int32_t* given = <const int32_t*><uintptr_t>given_ends.address
    cdef const uint8_t* data = NULL if given_data is None else <const uint8_t*><uintptr_t>given_data.address
    offsets = pa.allocate_buffer((count + 1) * 4)
    target = pa.allocate_buffer(count * 2 * DIGEST)
    cdef int32_t* ends = <int32_t*><uintptr_t>offsets.address
    cdef uint8_t* to = <uint8_t*><uintptr_t>target.address
    cdef int64_t row
    cdef int i
    with nogil:
        ends[0] = 0
        for row in range(count):
            finish(inner, data + given[offset + row], given[offset + row + 1] - given[offset + row], digest)
            finish(outer, digest, DIGEST, digest)
            for i in range(DIGEST):
                to[2 * i] = HEX[digest[i] >> 4]
                to[2 * i + 1] = HEX[digest[i] & 15]
            to += 2 * DIGEST
            ends[row + 1] = <int32_t>((row + 1) * 2 * DIGEST)
    texts = pa.StringArray.from_buffers(count, offsets, target)
    if not values.null_count:
        return texts
    return pc.if_else(values.is_valid(), texts, None)
