"""Values that contain values: arrays, rows, ranges. Each has its own rules about what to quote, and how."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from itertools import islice

from pgcdc.source.postgres.wire.binary.numbers import Damaged, Reader

Convert = Callable[[int, bytes], bytes]  # Converts a nested value to text, given its type

_ARRAY = struct.Struct("!iiI")
_DIMENSION = struct.Struct("!ii")
_U32 = struct.Struct("!I")
_MAX_DIMENSIONS = 6

_EMPTY, _LOWER_INCLUSIVE, _UPPER_INCLUSIVE = 0x01, 0x02, 0x04
_NO_LOWER, _NO_UPPER = 0x08 | 0x20, 0x10 | 0x40

_IN_RECORD = re.compile(rb'["\\(), \t\n\r\v\f]')
_IN_RANGE = re.compile(rb'["\\()\[\], \t\n\r\v\f]')


def array_text(data: bytes, delimiter: bytes, convert: Convert) -> bytes:
    """{a,b}, preceded by its bounds if one does not start at 1."""
    element, bounds, reader = _open_array(data)
    count = _count_elements(bounds)
    if count == 0:
        return b"{}"
    special = re.compile(rb'["\\{} \t\n\r\v\f' + re.escape(delimiter) + rb"]")
    texts = [
        b"NULL" if value is None else _quote_element(convert(element, value), special)
        for value in _read_elements(reader, count)
    ]
    # Innermost dimension first.
    for size, _ in reversed(bounds):
        elements = iter(texts)
        texts = [b"{%b}" % delimiter.join(islice(elements, size)) for _ in range(len(texts) // size)]
    if any(start != 1 for _, start in bounds):
        shown = b"".join([b"[%d:%d]" % (start, start + size - 1) for size, start in bounds])
        return shown + b"=" + texts[0]
    return texts[0]


def word_list_text(data: bytes, convert: Convert) -> bytes:
    """int2vector and oidvector: sent as arrays, written with spaces between the elements."""
    element, bounds, reader = _open_array(data)
    values = list(_read_elements(reader, _count_elements(bounds)))
    if len(bounds) > 1 or None in values:
        raise Damaged("is not a list of numbers")
    return b" ".join([convert(element, value) for value in values if value is not None])


def _open_array(data: bytes) -> tuple[int, list[tuple[int, int]], Reader]:
    """The element type, the size and first index of each dimension, and where the elements start."""
    reader = Reader(data)
    dimensions, flags, element = reader.fields(_ARRAY)
    if not 0 <= dimensions <= _MAX_DIMENSIONS or flags not in {0, 1}:
        raise Damaged(f"claims {dimensions} dimensions with flags {flags}")
    bounds = []
    for _ in range(dimensions):
        size, start = reader.fields(_DIMENSION)
        if size < 0:
            raise Damaged(f"claims {size} elements in a dimension")
        bounds.append((size, start))
    return element, bounds, reader


def _count_elements(bounds: list[tuple[int, int]]) -> int:
    count = 1 if bounds else 0
    for size, _ in bounds:
        count *= size
    return count


def _read_elements(reader: Reader, count: int) -> Iterator[bytes | None]:
    for _ in range(count):
        yield reader.item()
    reader.finish()


def _quote_element(text: bytes, special: re.Pattern[bytes]) -> bytes:
    if special.search(text) or not text or text.upper() == b"NULL":
        return b'"%b"' % text.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
    return text


def record_text(data: bytes, convert: Convert) -> bytes:
    """(a,b): a row value names the types of its columns. NULL is empty."""
    reader = Reader(data)
    columns = []
    for _ in range(reader.count(8)):
        (column_type,) = reader.fields(_U32)
        value = reader.item()
        columns.append(b"" if value is None else _quote(convert(column_type, value), _IN_RECORD))
    reader.finish()
    return b"(%b)" % b",".join(columns)


def range_text(data: bytes, subtype: int, convert: Convert) -> bytes:
    """[a,b), or empty."""
    reader = Reader(data)
    flags = reader.raw(1)[0]
    if flags & _EMPTY:
        reader.finish()
        return b"empty"
    lower = b"" if flags & _NO_LOWER else _read_bound(reader, subtype, convert)
    upper = b"" if flags & _NO_UPPER else _read_bound(reader, subtype, convert)
    reader.finish()
    opening = b"[" if flags & _LOWER_INCLUSIVE else b"("
    closing = b"]" if flags & _UPPER_INCLUSIVE else b")"
    return opening + lower + b"," + upper + closing


def _read_bound(reader: Reader, subtype: int, convert: Convert) -> bytes:
    value = reader.item()
    if value is None:
        raise Damaged("has a bound that is NULL")
    return _quote(convert(subtype, value), _IN_RANGE)


def multirange_text(data: bytes, subtype: int, convert: Convert) -> bytes:
    """{[a,b),[c,d)}"""
    reader = Reader(data)
    ranges = []
    for _ in range(reader.count(5)):
        value = reader.item()
        if value is None:
            raise Damaged("has a range that is NULL")
        ranges.append(range_text(value, subtype, convert))
    reader.finish()
    return b"{%b}" % b",".join(ranges)


def _quote(text: bytes, special: re.Pattern[bytes]) -> bytes:
    """Quote a text: inside rows and ranges, characters that would end the quotes are doubled."""
    if special.search(text) or not text:
        return b'"%b"' % text.replace(b"\\", b"\\\\").replace(b'"', b'""')
    return text


# --- text search: documents (tsvector) and queries (tsquery)

_U16 = struct.Struct("!H")
_BYTE = struct.Struct("!B")
_OPERAND = struct.Struct("!BB")

_WEIGHTS = ("", "C", "B", "A")
_VALUE, _OPERATOR = 1, 2
_NOT, _AND, _OR, _PHRASE = 1, 2, 3, 4
_PRIORITY = {0: 5, _NOT: 4, _AND: 2, _OR: 1, _PHRASE: 3}  # Precedence of the operators; 0 is a lexeme
_OPERANDS = {0: 0, _NOT: 1, _AND: 2, _OR: 2, _PHRASE: 2}

_Rope = bytes | tuple["_Rope", ...]  # Text in pieces, so that many operands do not take quadratic time


def tsvector_text(data: bytes) -> bytes:
    """Lexemes with their positions and weights."""
    reader = Reader(data)
    lexemes = []
    for _ in range(reader.count(3)):
        text = _quote_lexeme(reader.text())
        (count,) = reader.fields(_U16)
        if count:
            places = struct.unpack(f"!{count}H", reader.raw(2 * count))
            text += b":" + ",".join([f"{place & 0x3FFF}{_WEIGHTS[place >> 14]}" for place in places]).encode()
        lexemes.append(text)
    reader.finish()
    return b" ".join(lexemes)


def tsquery_text(data: bytes) -> bytes:
    """A query: sent as operator, right operand, left operand; written infix, with brackets where needed."""
    reader = Reader(data)
    items = [_read_item(reader) for _ in range(reader.count(2))]
    reader.finish()
    if not items:
        return b""
    # From the end, so that operands come before their operator. Without recursion: a query may be deep.
    stack: list[tuple[_Rope, int]] = []
    for oper, text in reversed(items):
        if len(stack) < _OPERANDS[oper]:
            raise Damaged("has an operator without operands")
        operands = [stack.pop() for _ in range(_OPERANDS[oper])]
        if oper:
            right = _enclose(*operands[0], oper, is_right=True)
            left = (_enclose(*operands[1], oper),) if oper != _NOT else ()
            stack.append(((*left, text, right), oper))
        else:
            stack.append((text, oper))
    if len(stack) != 1:
        raise Damaged("has operands without an operator")
    return b"".join(_flatten(stack[0][0]))


def _flatten(rope: _Rope) -> Iterator[bytes]:
    rest = [rope]
    while rest:
        piece = rest.pop()
        if isinstance(piece, bytes):
            yield piece
        else:
            rest.extend(reversed(piece))


def _read_item(reader: Reader) -> tuple[int, bytes]:
    """An operator and its text, or 0 and the lexeme."""
    (kind,) = reader.fields(_BYTE)
    if kind == _VALUE:
        weight, prefix = reader.fields(_OPERAND)
        text = _quote_lexeme(reader.text())
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


def _enclose(part: _Rope, oper: int, parent: int, *, is_right: bool = False) -> _Rope:
    # a <-> (b <-> c) is not (a <-> b) <-> c
    if _PRIORITY[oper] < _PRIORITY[parent] or (is_right and oper == parent == _PHRASE):
        return b"( ", part, b" )"
    return part


def _quote_lexeme(lexeme: bytes) -> bytes:
    return b"'%b'" % lexeme.replace(b"\\", b"\\\\").replace(b"'", b"''")


SEARCHES = {"tsvector": tsvector_text, "tsquery": tsquery_text}  # By the stem of their functions' names
