"""Takes the binary form of one value apart; every step checks that the bytes are there."""

from __future__ import annotations

import struct

_I32 = struct.Struct("!i")


class Damaged(ValueError):
    """Bytes that are not of the type. The message goes on after "value of type ..."."""


def unpack(form: struct.Struct, data: bytes) -> tuple[int, ...]:
    """All fields of a value whose size is fixed."""
    if len(data) != form.size:
        raise Damaged(f"has {len(data)} bytes, not {form.size}")
    return form.unpack(data)


class Reader:
    """Walks one value from its first byte to its last."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """How many bytes were not read yet."""
        return len(self._data) - self._at

    def raw(self, size: int) -> bytes:
        """The next `size` bytes."""
        at = self._advance(size)
        return self._data[at : at + size]

    def fields(self, form: struct.Struct) -> tuple[int, ...]:
        """The next fields, by their form."""
        return form.unpack_from(self._data, self._advance(form.size))

    def int32(self) -> int:
        """The next signed number of four bytes."""
        number: int = _I32.unpack_from(self._data, self._advance(4))[0]
        return number

    def count(self, size: int) -> int:
        """How many items follow, of at least `size` bytes each."""
        count = self.int32()
        if not 0 <= count * size <= self.left:
            raise Damaged(f"claims {count} items in {self.left} bytes")
        return count

    def text(self) -> bytes:
        """Everything up to the next NUL, which is skipped."""
        end = self._data.find(0, self._at)
        if end < 0:
            raise Damaged("has a text without its NUL")
        text = self._data[self._at : end]
        self._at = end + 1
        return text

    def item(self) -> bytes | None:
        """The next value inside of this one: its length and its bytes, or NULL."""
        length = self.int32()
        if length == -1:
            return None
        if length < 0:
            raise Damaged(f"has a part of {length} bytes")
        return self.raw(length)

    def finish(self) -> None:
        """There is nothing more."""
        if self.left:
            raise Damaged(f"is followed by {self.left} bytes")

    def _advance(self, size: int) -> int:
        at = self._at
        if size > len(self._data) - at:
            raise Damaged(f"is truncated: needs {size} bytes at {at}, {len(self._data) - at} are left")
        self._at = at + size
        return at
