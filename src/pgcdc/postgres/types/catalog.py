"""What is to be known of a type: which functions of the server send and write it, and what it is made of.

A type is known by its pair of functions, not by its name: citext sends by textsend and writes by textout, so it is text,
whatever its oid. Functions of the server itself stand here under their name, functions of extensions under
library:name. The types of PostgreSQL itself have fixed oids and need no server: `built_in.BUILT_IN`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgcdc.postgres.database import Connection


@dataclass(frozen=True, slots=True)
class TypeInfo:
    """One type."""

    oid: int
    name: str
    """With its schema, and quoted as in SQL, if it is not of pg_catalog."""
    output: str
    """The function that writes it as text."""
    send: str | None
    """The function that sends it. Without one pgoutput sends text, but an array or a row of it cannot be sent at all."""
    inner: int = 0
    """The type of the elements, of the bounds, or (of a domain) the base type."""
    kind: str = "base"
    """base, enum, domain, composite, range, multirange, array or pseudo."""
    delimiter: str = ","
    """What stands between the elements of an array, and of arrays of this type: both always have the same."""
    typmod: int = -1
    """Of a domain: the modifier of its base type, such as the precision of a numeric."""
    ndims: int = 0
    """Of a domain over an array: its declared dimensions."""
    attributes: tuple[int, ...] = ()
    """The types of a composite type's columns; the three below say more about each of them."""
    attribute_names: tuple[str, ...] = ()
    attribute_typmods: tuple[int, ...] = ()
    attribute_ndims: tuple[int, ...] = ()

    @property
    def is_domain(self) -> bool:
        """Whether its values are those of its base type."""
        return self.kind == "domain"


@dataclass(frozen=True, slots=True)
class TypeCatalog:
    """The types of one database, by oid."""

    types: Mapping[int, TypeInfo]
    server_version: int = 180000

    @classmethod
    def load(cls, conn: Connection) -> TypeCatalog:
        """Every type that the server knows now, with one query."""
        from pgcdc.postgres.database import explain_errors  # executors have no use for a driver

        version = conn.info.server_version
        is_range_of = "t.oid IN (r.rngtypid, r.rngmultitypid)" if version >= 140000 else "t.oid = r.rngtypid"
        with explain_errors("read the types of the database"):
            rows = conn.execute(_TYPES.format(is_range_of=is_range_of).encode()).fetchall()
        return cls({row[0]: _parse(row) for row in rows}, version)

    def get(self, oid: int) -> TypeInfo | None:
        """The type, with a domain's base type in its place; None if there is none of this oid."""
        found = self.types.get(oid)
        while found is not None and found.is_domain:
            found = self.types.get(found.inner)
        return found

    def name(self, oid: int) -> str:
        """For messages: the name, and the number where no name is known."""
        found = self.types.get(oid)
        return found.name if found else f"with oid {oid}"

    def subset(self, oids: Iterable[int]) -> TypeCatalog:
        """These types with all that they are made of: what is needed to read columns of them."""
        found: dict[int, TypeInfo] = {}
        wanted = list(oids)
        while wanted:
            info = self.types.get(wanted.pop())
            if info is not None and info.oid not in found:
                found[info.oid] = info
                wanted += (info.inner, *info.attributes)
        return TypeCatalog(dict(sorted(found.items())), self.server_version)

    def to_json(self) -> dict[str, Any]:
        """The form in which a catalog travels to other processes and stands in files."""
        types = [[getattr(info, name) for name in _FIELDS] for info in self.types.values()]
        return {"server_version": self.server_version, "types": types}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> TypeCatalog:
        """The catalog behind `to_json()`."""
        return cls({row[0]: _parse(row) for row in raw["types"]}, raw["server_version"])


_FIELDS = TypeInfo.__slots__


def _parse(row: Iterable[Any]) -> TypeInfo:
    fields: list[Any] = [tuple(field) if isinstance(field, list) else field for field in row]
    return TypeInfo(*fields)


# A multirange has the bounds of its range. Row types of tables are types as well: a column can have them.
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
