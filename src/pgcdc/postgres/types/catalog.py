"""PostgreSQL's types: the server functions that send and write each one, and its components.

A type is identified by its pair of functions, not by its name. For example, citext sends by textsend and writes by
textout, so it is text, whatever its oid. The server's own functions are listed by name, those of extensions as
library:name. PostgreSQL's own types have fixed oids and need no server: `BUILT_IN`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgcdc.postgres.database import Connection


@dataclass(frozen=True, slots=True)
class TypeInfo:
    oid: int
    name: str  # Outside pg_catalog: with its schema, and quoted as in SQL
    output: str  # The function that writes the value as text
    send: str | None
    """The function that sends the value in binary. If it is missing, pgoutput sends text, but arrays and rows of the
    type cannot be sent."""
    inner: int = 0  # The type of the elements or bounds, or the base type of a domain
    kind: str = "base"  # base, enum, domain, composite, range, multirange, array or pseudo
    delimiter: str = ","  # Separates elements of an array, and of arrays of this type: always the same
    typmod: int = -1  # For a domain: the modifier of its base type, such as the precision of a numeric
    ndims: int = 0  # For a domain over an array: its declared dimensions
    attributes: tuple[int, ...] = ()  # The types of a composite type's columns; the next three fields describe each
    attribute_names: tuple[str, ...] = ()
    attribute_typmods: tuple[int, ...] = ()
    attribute_ndims: tuple[int, ...] = ()

    @property
    def is_domain(self) -> bool:
        """Whether its values are those of a base type."""
        return self.kind == "domain"


@dataclass(frozen=True, slots=True)
class TypeCatalog:
    """The types of one database, by oid."""

    types: Mapping[int, TypeInfo]
    server_version: int = 180000

    @classmethod
    def load(cls, conn: Connection) -> TypeCatalog:
        """Load every type of the server with one query."""
        from pgcdc.postgres.database import explain_errors  # executors do not need a driver

        version = conn.info.server_version
        is_range_of = "t.oid IN (r.rngtypid, r.rngmultitypid)" if version >= 140000 else "t.oid = r.rngtypid"
        with explain_errors("read the types of the database"):
            rows = conn.execute(_TYPES.format(is_range_of=is_range_of).encode()).fetchall()
        return cls({row[0]: _parse(row) for row in rows}, version)

    def get(self, oid: int) -> TypeInfo | None:
        """The type, or the base type of a domain; None if the oid is unknown."""
        found = self.types.get(oid)
        while found is not None and found.is_domain:
            found = self.types.get(found.inner)
        return found

    def name(self, oid: int) -> str:
        """The name for messages; the number if it is unknown."""
        found = self.types.get(oid)
        return found.name if found else f"with oid {oid}"

    def subset(self, oids: Iterable[int]) -> TypeCatalog:
        """These types and all their components."""
        found: dict[int, TypeInfo] = {}
        wanted = list(oids)
        while wanted:
            info = self.types.get(wanted.pop())
            if info is not None and info.oid not in found:
                found[info.oid] = info
                wanted += (info.inner, *info.attributes)
        return TypeCatalog(dict(sorted(found.items())), self.server_version)

    def to_json(self) -> dict[str, Any]:
        types = [[getattr(info, name) for name in _FIELDS] for info in self.types.values()]
        return {"server_version": self.server_version, "types": types}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> TypeCatalog:
        return cls({row[0]: _parse(row) for row in raw["types"]}, raw["server_version"])


_FIELDS = TypeInfo.__slots__


def _parse(row: Iterable[Any]) -> TypeInfo:
    fields: list[Any] = [tuple(field) if isinstance(field, list) else field for field in row]
    return TypeInfo(*fields)


# A multirange has the same bounds as its range. Row types of tables are included: a column can have them.
_TYPES = """
SELECT t.oid::int8,
       CASE n.nspname WHEN 'pg_catalog' THEN t.typname ELSE quote_ident(n.nspname) || '.' || quote_ident(t.typname) END,
       CASE WHEN o.probin IS NULL THEN o.prosrc ELSE regexp_replace(o.probin, '^.*/', '') || ':' || o.prosrc END,
       CASE WHEN s.probin IS NULL THEN s.prosrc ELSE regexp_replace(s.probin, '^.*/', '') || ':' || s.prosrc END,
       CASE t.typtype WHEN 'd' THEN t.typbasetype::int8 ELSE coalesce(r.rngsubtype, t.typelem)::int8 END,
       CASE WHEN t.typtype <> 'd' AND o.prosrc = 'array_out' THEN 'array'
            ELSE ('{{"b": "base", "e": "enum", "d": "domain", "c": "composite", "r": "range", "m": "multirange",
                     "p": "pseudo"}}'::jsonb) ->> t.typtype::text END,
       t.typdelim::text,
       t.typtypmod,
       t.typndims,
       coalesce(a.types, '{{}}'), coalesce(a.names, '{{}}'), coalesce(a.typmods, '{{}}'), coalesce(a.ndims, '{{}}')
FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace JOIN pg_proc o ON o.oid = t.typoutput
LEFT JOIN pg_proc s ON s.oid = t.typsend LEFT JOIN pg_range r ON {is_range_of}
LEFT JOIN LATERAL (SELECT array_agg(a.atttypid::int8 ORDER BY a.attnum) AS types,
                          array_agg(a.attname::text ORDER BY a.attnum) AS names,
                          array_agg(a.atttypmod ORDER BY a.attnum) AS typmods,
                          array_agg(a.attndims::int4 ORDER BY a.attnum) AS ndims
                   FROM pg_attribute a
                   WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped) a ON t.typtype = 'c'
WHERE t.typisdefined
"""

# --- the types of every PostgreSQL server

# oid, oid of the array type, name, functions; ordered by oid.
_SCALARS = """
16 1000 bool boolout boolsend
17 1001 bytea byteaout byteasend
18 1002 char charout charsend
19 1003 name nameout namesend
20 1016 int8 int8out int8send
21 1005 int2 int2out int2send
22 1006 int2vector int2vectorout int2vectorsend
23 1007 int4 int4out int4send
24 1008 regproc regprocout regprocsend
25 1009 text textout textsend
26 1028 oid oidout oidsend
27 1010 tid tidout tidsend
28 1011 xid xidout xidsend
29 1012 cid cidout cidsend
30 1013 oidvector oidvectorout oidvectorsend
114 199 json json_out json_send
142 143 xml xml_out xml_send
600 1017 point point_out point_send
601 1018 lseg lseg_out lseg_send
602 1019 path path_out path_send
603 1020 box box_out box_send
604 1027 polygon poly_out poly_send
628 629 line line_out line_send
650 651 cidr cidr_out cidr_send
700 1021 float4 float4out float4send
701 1022 float8 float8out float8send
718 719 circle circle_out circle_send
774 775 macaddr8 macaddr8_out macaddr8_send
790 791 money cash_out cash_send
829 1040 macaddr macaddr_out macaddr_send
869 1041 inet inet_out inet_send
1033 1034 aclitem aclitemout -
1042 1014 bpchar bpcharout bpcharsend
1043 1015 varchar varcharout varcharsend
1082 1182 date date_out date_send
1083 1183 time time_out time_send
1114 1115 timestamp timestamp_out timestamp_send
1184 1185 timestamptz timestamptz_out timestamptz_send
1186 1187 interval interval_out interval_send
1266 1270 timetz timetz_out timetz_send
1560 1561 bit bit_out bit_send
1562 1563 varbit varbit_out varbit_send
1700 1231 numeric numeric_out numeric_send
1790 2201 refcursor textout textsend
2202 2207 regprocedure regprocedureout regproceduresend
2203 2208 regoper regoperout regopersend
2204 2209 regoperator regoperatorout regoperatorsend
2205 2210 regclass regclassout regclasssend
2206 2211 regtype regtypeout regtypesend
2249 2287 record record_out record_send
2950 2951 uuid uuid_out uuid_send
2970 2949 txid_snapshot pg_snapshot_out pg_snapshot_send
3220 3221 pg_lsn pg_lsn_out pg_lsn_send
3614 3643 tsvector tsvectorout tsvectorsend
3615 3645 tsquery tsqueryout tsquerysend
3734 3735 regconfig regconfigout regconfigsend
3769 3770 regdictionary regdictionaryout regdictionarysend
3802 3807 jsonb jsonb_out jsonb_send
4072 4073 jsonpath jsonpath_out jsonpath_send
4089 4090 regnamespace regnamespaceout regnamespacesend
4096 4097 regrole regroleout regrolesend
4191 4192 regcollation regcollationout regcollationsend
5038 5039 pg_snapshot pg_snapshot_out pg_snapshot_send
5069 271 xid8 xid8out xid8send
"""

# oid, oid of the array type, name, type of the bounds.
_RANGES = """
3904 3905 int4range 23
3906 3907 numrange 1700
3908 3909 tsrange 1114
3910 3911 tstzrange 1184
3912 3913 daterange 1082
3926 3927 int8range 20
4451 6150 int4multirange 23
4532 6151 nummultirange 1700
4533 6152 tsmultirange 1114
4534 6153 tstzmultirange 1184
4535 6155 datemultirange 1082
4536 6157 int8multirange 20
"""

_ELEMENTS = {"int2vector": 21, "oidvector": 26, "name": 18, "point": 701, "lseg": 600, "box": 600, "line": 701}
"""Types that have elements but are not arrays."""


def _list_built_in() -> Iterator[TypeInfo]:
    for line in _SCALARS.split("\n")[1:-1]:
        oid, array, name, output, send = line.split()
        scalar = TypeInfo(
            int(oid),
            name,
            output,
            None if send == "-" else send,
            _ELEMENTS.get(name, 0),
            "pseudo" if name == "record" else "base",
            delimiter=";" if name == "box" else ",",
        )
        yield from _with_array(scalar, int(array))
    for line in _RANGES.split("\n")[1:-1]:
        oid, array, name, subtype = line.split()
        kind = "multirange" if "multi" in name else "range"
        info = TypeInfo(int(oid), name, f"{kind}_out", f"{kind}_send", int(subtype), kind)
        yield from _with_array(info, int(array))


def _with_array(element: TypeInfo, oid: int) -> Iterable[TypeInfo]:
    return element, TypeInfo(
        oid, f"_{element.name}", "array_out", "array_send", element.oid, "array", element.delimiter
    )


BUILT_IN = TypeCatalog({info.oid: info for info in _list_built_in()})
"""The types of every PostgreSQL server that a column can have."""


# --- types with modifiers as SQL text: `numeric(10,2)`, `character varying(20)[]`

_SQL_NAMES = {
    "bool": "boolean", "char": '"char"', "int8": "bigint", "int2": "smallint", "int4": "integer", "float4": "real",
    "float8": "double precision", "bit": '"bit"', "varbit": "bit varying", "varchar": "character varying",
    "time": "time without time zone", "timetz": "time with time zone", "timestamp": "timestamp without time zone",
    "timestamptz": "timestamp with time zone",
}  # fmt: skip
_WITH_MODIFIER = {"bit": "bit", "bpchar": "character"}  # Types whose name changes with a modifier
_YEAR, _MONTH, _DAY, _HOUR, _MINUTE, _SECOND = (1 << bit for bit in (2, 1, 3, 10, 11, 12))
_INTERVAL_FIELDS = {"year": _YEAR, "month": _MONTH, "day": _DAY, "hour": _HOUR, "minute": _MINUTE, "second": _SECOND}


def type_name(oid: int, typmod: int = -1) -> str:
    """The text that the server's format_type() returns, for use without a connection; `oid 16432` if the type is not
    built in."""
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
        precision, scale = numeric_digits(typmod)
        return f"({precision},{scale})"
    return f"({typmod - 4 if name in ('bpchar', 'varchar') else typmod})"


def numeric_digits(typmod: int) -> tuple[int, int]:
    """Precision and scale of a numeric. The scale is 11 bits, signed since PostgreSQL 15."""
    return typmod - 4 >> 16 & 0xFFFF, (typmod - 4 & 0x7FF ^ 0x400) - 0x400


def _interval_modifier(typmod: int) -> str:
    """An interval may be limited to some fields, and its seconds to a number of digits."""
    mask, digits = typmod >> 16 & 0x7FFF, typmod & 0xFFFF
    names = [name for name, bit in _INTERVAL_FIELDS.items() if mask & bit] if mask != 0x7FFF else []
    fields = " to ".join(dict.fromkeys((names[0], names[-1]))) if names else ""
    return (f" {fields}" if fields else "") + (f"({digits})" if digits != 0xFFFF else "")
