"""How SQL writes a type with its modifier: `numeric(10,2)`, `character varying(20)[]`. For types of PostgreSQL itself.

The same text as the server's format_type(), for when the server cannot be asked any more.
"""

from __future__ import annotations

from pgcdc.postgres.types.built_in import BUILT_IN

_SQL_NAMES = {
    "bool": "boolean", "char": '"char"', "int8": "bigint", "int2": "smallint", "int4": "integer", "float4": "real",
    "float8": "double precision", "bit": '"bit"', "varbit": "bit varying", "varchar": "character varying",
    "time": "time without time zone", "timetz": "time with time zone", "timestamp": "timestamp without time zone",
    "timestamptz": "timestamp with time zone",
}  # fmt: skip
_WITH_MODIFIER = {"bit": "bit", "bpchar": "character"}
"""What is called otherwise if it has a modifier."""
_YEAR, _MONTH, _DAY, _HOUR, _MINUTE, _SECOND = (1 << bit for bit in (2, 1, 3, 10, 11, 12))
_FIELDS = {"year": _YEAR, "month": _MONTH, "day": _DAY, "hour": _HOUR, "minute": _MINUTE, "second": _SECOND}


def type_name(oid: int, typmod: int = -1) -> str:
    """The name of a built-in type; `oid 16432` for any other."""
    found = BUILT_IN.types.get(oid)
    if found is None:
        return f"oid {oid}"
    if found.output == "array_out":
        return f"{type_name(found.inner, typmod)}[]"
    if typmod < 0:
        return _SQL_NAMES.get(found.name, found.name)
    if found.name in ("time", "timetz", "timestamp", "timestamptz"):
        first, _, rest = _SQL_NAMES[found.name].partition(" ")
        return f"{first}({typmod}) {rest}"
    name = _WITH_MODIFIER.get(found.name) or _SQL_NAMES.get(found.name, found.name)
    return name + _modifier(found.name, typmod)


def _modifier(name: str, typmod: int) -> str:
    if name == "interval":
        return _interval_modifier(typmod)
    if name == "numeric":
        scale = ((typmod - 4) & 0x7FF ^ 0x400) - 0x400  # 11 bits with a sign
        return f"({(typmod - 4) >> 16 & 0xFFFF},{scale})"
    return f"({typmod - 4 if name in ('bpchar', 'varchar') else typmod})"


def _interval_modifier(typmod: int) -> str:
    """An interval may be limited to some fields, and its seconds to some digits."""
    mask, digits = typmod >> 16 & 0x7FFF, typmod & 0xFFFF
    names = [name for name, bit in _FIELDS.items() if mask & bit] if mask != 0x7FFF else []
    fields = " to ".join(dict.fromkeys((names[0], names[-1]))) if names else ""
    return (f" {fields}" if fields else "") + (f"({digits})" if digits != 0xFFFF else "")
