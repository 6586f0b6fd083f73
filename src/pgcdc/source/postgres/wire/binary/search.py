"""Text search: documents (tsvector) and queries (tsquery)."""

from __future__ import annotations

import struct
from collections import deque

from pgcdc.source.postgres.wire.binary.reader import Damaged, Reader

__all__ = ["tsquery_text", "tsvector_text"]

_U16 = struct.Struct("!H")
_BYTE = struct.Struct("!B")
_OPERAND = struct.Struct("!BB")

_WEIGHTS = ("", "C", "B", "A")
_VALUE, _OPERATOR = 1, 2
_NOT, _AND, _OR, _PHRASE = 1, 2, 3, 4
_PRIORITY = {0: 5, _NOT: 4, _AND: 2, _OR: 1, _PHRASE: 3}
"""How tightly an operator binds; 0 is a lexeme."""

_Part = tuple[deque[bytes], int]
"""A piece of a query: its text, and the operator at its top."""


def tsvector_text(data: bytes) -> bytes:
    """Lexemes with their positions and weights."""
    reader = Reader(data)
    lexemes = []
    for _ in range(reader.count(3)):
        text = _quote(reader.text())
        (count,) = reader.fields(_U16)
        if count:
            places = struct.unpack(f"!{count}H", reader.raw(2 * count))
            text += b":" + ",".join([f"{place & 0x3FFF}{_WEIGHTS[place >> 14]}" for place in places]).encode()
        lexemes.append(text)
    reader.finish()
    return b" ".join(lexemes)


def tsquery_text(data: bytes) -> bytes:
    """A query: sent as operator, right and left operand; written infix, with the brackets that it needs."""
    reader = Reader(data)
    items = [_read_item(reader) for _ in range(reader.count(2))]
    reader.finish()
    if not items:
        return b""
    # From the end, so that operands come before their operator. No recursion: a query may be deep.
    stack: list[_Part] = []
    for oper, text in reversed(items):
        if oper == 0:
            stack.append((deque([text]), 0))
            continue
        if len(stack) < (1 if oper == _NOT else 2):
            raise Damaged("has an operator without operands")
        right = stack.pop()
        if oper == _NOT:
            parts = _enclose(right, oper)
            parts.appendleft(b"!")
        else:
            left = stack.pop()
            parts = _join(_enclose(left, oper), text, _enclose(right, oper, is_right=True))
        stack.append((parts, oper))
    if len(stack) != 1:
        raise Damaged("has operands without an operator")
    return b"".join(stack[0][0])


def _read_item(reader: Reader) -> tuple[int, bytes]:
    """An operator and how it is written, or 0 and the lexeme."""
    (kind,) = reader.fields(_BYTE)
    if kind == _VALUE:
        weight, prefix = reader.fields(_OPERAND)
        text = _quote(reader.text())
        if weight or prefix:
            marks = "*" if prefix else ""
            marks += "".join([name for bit, name in ((8, "A"), (4, "B"), (2, "C"), (1, "D")) if weight & bit])
            text += f":{marks}".encode()
        return 0, text
    if kind != _OPERATOR:
        raise Damaged(f"has an item of an unknown kind: {kind}")
    (oper,) = reader.fields(_BYTE)
    if oper not in (_NOT, _AND, _OR, _PHRASE):
        raise Damaged(f"has an unknown operator: {oper}")
    if oper == _PHRASE:
        (distance,) = reader.fields(_U16)
        return oper, b" <-> " if distance == 1 else b" <%d> " % distance
    return oper, {_NOT: b"!", _AND: b" & ", _OR: b" | "}[oper]


def _enclose(part: _Part, parent: int, *, is_right: bool = False) -> deque[bytes]:
    parts, oper = part
    # a <-> (b <-> c) is not (a <-> b) <-> c
    if _PRIORITY[oper] < _PRIORITY[parent] or (is_right and oper == parent == _PHRASE):
        parts.appendleft(b"( ")
        parts.append(b" )")
    return parts


def _join(left: deque[bytes], oper: bytes, right: deque[bytes]) -> deque[bytes]:
    """The shorter into the longer, so that a query of many operands takes no quadratic time."""
    if len(left) >= len(right):
        left.append(oper)
        left.extend(right)
        return left
    right.appendleft(oper)
    right.extendleft(reversed(left))
    return right


def _quote(lexeme: bytes) -> bytes:
    return b"'%b'" % lexeme.replace(b"\\", b"\\\\").replace(b"'", b"''")
