"""Texts, bytes, bits, network addresses and the server's own identifiers."""

from __future__ import annotations

import struct

from pgcdc.source.postgres.wire.binary.reader import Damaged, Reader, unpack

__all__ = [
    "bits_text", "bytea_text", "cidr_text", "hstore_text", "inet_text", "lsn_text", "macaddr8_text", "macaddr_text",
    "plain_text", "snapshot_text", "tid_text", "uuid_text", "versioned_text",
]  # fmt: skip

_INET = struct.Struct("!BBBB")
_TID = struct.Struct("!IH")
_LSN = struct.Struct("!II")
_SNAPSHOT = struct.Struct("!qq")
_FAMILIES = {2: 4, 3: 16}
"""How many bytes an address has: IPv4, IPv6."""


def plain_text(data: bytes) -> bytes:
    """Types that are sent as they are written."""
    return data


def versioned_text(data: bytes) -> bytes:
    """jsonb, jsonpath, ltree: a version, and what is written."""
    if data[:1] != b"\x01":
        raise Damaged(f"is not of version 1 but {data[0] if data else 'empty'}")
    return data[1:]


def bytea_text(data: bytes) -> bytes:
    """Hexadecimal, as bytea_output says."""
    return b"\\x" + data.hex().encode()


def bits_text(data: bytes) -> bytes:
    """bit and varbit: how many bits, and the bits from the left."""
    reader = Reader(data)
    count = reader.int32()
    if count < 0 or reader.left != (count + 7) // 8:
        raise Damaged(f"claims {count} bits in {reader.left} bytes")
    raw = reader.raw(reader.left)
    # In pieces: the text of one huge number would take quadratic time.
    return b"".join([_BYTES_AS_BITS[byte] for byte in raw])[:count]


_BYTES_AS_BITS = [f"{byte:08b}".encode() for byte in range(256)]


def uuid_text(data: bytes) -> bytes:
    """A UUID."""
    if len(data) != 16:
        raise Damaged(f"has {len(data)} bytes, not 16")
    text = data.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:])).encode()


def macaddr_text(data: bytes) -> bytes:
    """A MAC address of 6 bytes."""
    return _format_mac(data, 6)


def macaddr8_text(data: bytes) -> bytes:
    """A MAC address of 8 bytes."""
    return _format_mac(data, 8)


def _format_mac(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise Damaged(f"has {len(data)} bytes, not {size}")
    return data.hex(":").encode()


def inet_text(data: bytes) -> bytes:
    """A host, with the bits of its network unless it stands alone."""
    return _format_network(data, always_bits=False)


def cidr_text(data: bytes) -> bytes:
    """A network."""
    return _format_network(data, always_bits=True)


def _format_network(data: bytes, *, always_bits: bool) -> bytes:
    reader = Reader(data)
    family, bits, _, size = reader.fields(_INET)
    if _FAMILIES.get(family) != size or bits > 8 * size:
        raise Damaged(f"has an unknown address: family {family}, {size} bytes, {bits} bits")
    address = reader.raw(size)
    reader.finish()
    text = _format_ipv4(address) if size == 4 else _format_ipv6(address)
    if always_bits or bits != 8 * size:
        text += f"/{bits}"
    return text.encode()


def _format_ipv4(address: bytes) -> str:
    return ".".join(map(str, address))


def _format_ipv6(address: bytes) -> str:
    """With :: for the first longest run of zeros; an IPv4 address at the end of one is written as such."""
    words = struct.unpack("!8H", address)
    start, length = max(((at, _count_zeros(words, at)) for at in range(8)), key=lambda run: run[1])
    if length < 2:
        return ":".join(f"{word:x}" for word in words)
    if start == 0 and (length == 6 or (length == 5 and words[5] == 0xFFFF)):
        return f"::{'ffff:' if length == 5 else ''}{_format_ipv4(address[12:])}"
    head, tail = words[:start], words[start + length :]
    return f"{':'.join(f'{word:x}' for word in head)}::{':'.join(f'{word:x}' for word in tail)}"


def _count_zeros(words: tuple[int, ...], start: int) -> int:
    end = start
    while end < len(words) and words[end] == 0:
        end += 1
    return end - start


def tid_text(data: bytes) -> bytes:
    """The place of a row: block and item."""
    return b"(%d,%d)" % unpack(_TID, data)


def lsn_text(data: bytes) -> bytes:
    """A position in the WAL."""
    return b"%X/%X" % unpack(_LSN, data)


def snapshot_text(data: bytes) -> bytes:
    """pg_snapshot and txid_snapshot: xmin, xmax and the transactions in progress."""
    reader = Reader(data)
    count = reader.int32()
    xmin, xmax = reader.fields(_SNAPSHOT)
    if count < 0 or reader.left != 8 * count:
        raise Damaged(f"claims {count} transactions in {reader.left} bytes")
    running = struct.unpack(f"!{count}q", reader.raw(reader.left))
    return b"%d:%d:%b" % (xmin, xmax, b",".join([b"%d" % xid for xid in running]))


def hstore_text(data: bytes) -> bytes:
    """hstore: pairs of texts, of which the value may be NULL."""
    reader = Reader(data)
    pairs = []
    for _ in range(reader.count(8)):
        key, value = reader.item(), reader.item()
        if key is None:
            raise Damaged("has a key that is NULL")
        pairs.append(_quote_hstore(key) + b"=>" + (b"NULL" if value is None else _quote_hstore(value)))
    reader.finish()
    return b", ".join(pairs)


def _quote_hstore(text: bytes) -> bytes:
    return b'"%b"' % text.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
