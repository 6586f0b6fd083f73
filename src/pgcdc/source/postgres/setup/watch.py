"""Looks at the catalog regularly for what no row shows: a table that was altered but not written to since, a partition
that was attached. A cheap query computes a digest of each table; only tables whose digest changed are examined more
closely. Each finding becomes a mark in the stream, after everything that was written before the look. So no finding
comes too early, and rows in between that show it first make the mark unnecessary."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg

from pgcdc.core.errors import ConnectionLost, SourceError
from pgcdc.core.relation import Relation, ShapeChange
from pgcdc.postgres.database import Connection
from pgcdc.source.postgres.setup.guard import ShapeObserver, is_other, wal_place
from pgcdc.source.postgres.setup.shapes import IS_DETACHING, read_catalog
from pgcdc.source.postgres.setup.tables import read_published
from pgcdc.source.postgres.snapshot.marks import Mark, Marks
from pgcdc.source.postgres.snapshot.releases import schema_mark

logger = logging.getLogger("pgcdc.capture")

INTERVAL_S = 1.0
UNKNOWN_S = 0.1  # The interval while there is an unknown partition
SHARE = 0.01  # The largest share of time to spend on looking

# Any change to a table gives a row of the catalog another xmin. Statistics do not: they are updated in place.
_SINCE = f"i.xmin || CASE WHEN {IS_DETACHING} THEN ' detaching' ELSE '' END"
_DIGESTS = f"""
WITH RECURSIVE tree AS (
    SELECT i.inhparent AS root, i.inhrelid, {_SINCE} AS since FROM pg_inherits i
    WHERE i.inhparent = ANY (%(oids)s::int8[]::oid[])
    UNION ALL SELECT t.root, i.inhrelid, {_SINCE} FROM tree t JOIN pg_inherits i ON i.inhparent = t.inhrelid)
SELECT c.oid::int8, md5(concat_ws(' ', n.nspname, c.relname, c.relreplident, c.relnatts, c.relfilenode,
    (SELECT string_agg(a.attnum || ':' || a.xmin::text, ',' ORDER BY a.attnum) FROM pg_attribute a
     WHERE a.attrelid = c.oid AND a.attnum > 0),
    (SELECT string_agg(i.indexrelid || ':' || i.xmin::text, ',' ORDER BY i.indexrelid) FROM pg_index i
     WHERE i.indrelid = c.oid),
    (SELECT string_agg(r.oid::text, ',' ORDER BY r.oid) FROM pg_publication_rel r WHERE r.prrelid = c.oid),
    (SELECT string_agg(p.oid || ':' || p.xmin::text, ',' ORDER BY p.oid) FROM pg_publication p),
    (SELECT string_agg(d.xmin::text, ',') FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid
     AND d.objsubid = 0 AND d.refclassid = 'pg_namespace'::regclass),
    (SELECT string_agg(t.inhrelid || ':' || t.since || ':' || l.relfilenode, ',' ORDER BY t.inhrelid)
     FROM tree t JOIN pg_class l ON l.oid = t.inhrelid WHERE t.root = c.oid),
    CASE WHEN c.oid = ANY (%(typed)s::int8[]::oid[]) THEN concat(
        (SELECT string_agg(e.oid || ':' || e.xmin::text, ',' ORDER BY e.oid) FROM pg_enum e), ' ',
        (SELECT string_agg(a.attrelid || ':' || a.attnum || ':' || a.xmin::text, ',' ORDER BY a.attrelid, a.attnum)
         FROM pg_attribute a JOIN pg_class k ON k.oid = a.attrelid AND (k.relkind = 'c' OR k.reltype IN (
             SELECT unnest(ARRAY[y.oid, y.typelem]) FROM pg_attribute u JOIN pg_type y ON y.oid = u.atttypid
             WHERE u.attrelid = ANY (%(typed)s::int8[]::oid[]))) WHERE a.attnum > 0)) END))
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = ANY (%(oids)s::int8[]::oid[])
"""

# Published tables that the stream has not shown yet, but which may have to be known before it does: a root, whose
# partitions come and go without a row; and a table with the name of another one, whose rows the targets still have.
_NEW = """
SELECT r.prrelid::int8 FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE p.pubname = ANY (%s) AND r.prrelid <> ALL (%s::int8[]::oid[]) AND (c.relkind = 'p' OR (n.nspname, c.relname) IN (
    SELECT * FROM unnest(%s::text[], %s::text[])))
"""

# A partition that was created, filled and truncated in one transaction keeps its file: the file is empty, though rows
# were sent.
_EMPTY = "SELECT oid::int8 FROM pg_class WHERE oid = ANY (%s::int8[]::oid[]) AND pg_relation_size(oid) = 0"


class CatalogWatch:
    """Watches the tables that the stream has shown, and new ones that matter before it does. Its state does not survive
    a crash: the first look covers all of them."""

    def __init__(self, publications: Sequence[str], shapes: ShapeObserver, marks: Marks) -> None:
        self._publications = publications
        self._shapes = shapes
        self._marks = marks
        self._compared: dict[int, tuple[str, ShapeChange]] = {}  # The digest at which the table matched what was known
        self._asked: dict[int, ShapeChange | None] = {}  # Tables with a pending mark, and what was known of them then
        self._due = self._looked = self._cost_s = 0.0
        self.leaves: dict[int, set[int]] = {}
        """Partitions that the stream has shown, by root. The catalog is queried for a new one immediately: if it were
        dropped or truncated before the next regular look, its rows would be gone without any event."""
        self._old = {oid: set(map(int, _leaves(one) or ())) for oid, one in shapes.current.items()}
        """Partitions that are not new, by root: known when we started, or looked up since."""

    def look(self, sql: Connection, *, at_once: bool = False) -> None:
        """Look if it is time to. Tables that are locked, or being dropped, are looked at later."""
        begun = time.monotonic()
        is_asked = at_once or (begun >= self._looked + max(UNKNOWN_S, 20 * self._cost_s) and self._find_unknown())
        if begun < self._due and not is_asked:
            return
        try:
            with sql.transaction():
                sql.execute("SET LOCAL lock_timeout = '100ms'")
                self._compare(sql)
        except (psycopg.Error, SourceError) as error:
            if sql.broken:
                raise ConnectionLost("the server ended the connection") from error
            logger.debug("the catalog is read later: %s", error)
            self._cost_s = time.monotonic() - begun
        self._looked = time.monotonic()
        self._due = self._looked + max(INTERVAL_S, self._cost_s / SHARE)

    def _find_unknown(self) -> dict[int, set[int]]:
        """New partitions of roots that can be looked at now. Partitions that turn out to be known are forgotten."""
        found: dict[int, set[int]] = {}
        for root, shown in list(self.leaves.items()):
            known = self._shapes.current.get(root)
            if known is None:
                continue  # its row is still to come
            shown.difference_update(self._old.setdefault(root, set()))
            if not shown or _leaves(known) is None:
                del self.leaves[root]
            elif root not in self._asked:
                found[root] = shown
        return found

    def _compare(self, sql: Connection) -> None:
        begun = time.monotonic()
        known, taken = self._shapes.current, self._shapes.taken()
        self._asked = {oid: one for oid, one in self._asked.items() if known.get(oid) is one}
        typed = [oid for oid, one in known.items() if one.details is not None and one.details["types"] is not None]
        digests: dict[int, str] = dict(sql.execute(_DIGESTS, {"oids": list(known), "typed": typed}).fetchall())
        changed = [
            oid for oid, digest in digests.items()
            if (oid in taken or self._is_changed(known[oid], digest)) and oid not in self._asked
        ]  # fmt: skip
        names = [_name(one.after) for one in known.values()]
        query = [list(self._publications), list(known), [name[0] for name in names], [name[1] for name in names]]
        changed += [oid for (oid,) in sql.execute(_NEW, query).fetchall() if oid not in self._asked]
        self._cost_s = time.monotonic() - begun  # the cost of every look
        unknown = self._find_unknown()
        changed += [oid for oid in unknown if oid not in changed]
        if not changed:
            return
        only = changed[0] if len(changed) == 1 else 0
        published = {one.relation.oid: one.relation for one in read_published(sql, self._publications, only)}
        shapes = [published[oid] for oid in changed if oid in published]
        for oid in unknown.keys() - published.keys():
            del self.leaves[oid]
        look = read_catalog(sql, shapes, self._publications)
        lsn = 0
        for shape in shapes:
            details, before = look.describe(shape), known.get(shape.oid)
            if details is None:  # it is being altered right now
                continue
            if before is None:
                lsn = lsn or wal_place(sql)
                self._ask(lsn, shape, details, None)
                continue
            if shape.oid in unknown and (lost := self._take_shown(sql, before, details)):
                details["lost"] = list(map(str, lost))
            # Also a table that has its name again: from here on the name no longer belongs to the other table.
            if is_other(before, shape, details) or shape.oid in taken:
                lsn = lsn or wal_place(sql)
                self._ask(lsn, shape, details, before)
            else:
                self._shapes.adopt(shape.oid, details)
                self._compared[shape.oid] = (digests[shape.oid], known[shape.oid])

    def _take_shown(self, sql: Connection, root: ShapeChange, details: Mapping[str, Any]) -> list[int]:
        """The new partitions that the stream has shown and whose rows are gone, if nothing else reports that. The
        others are no longer new."""
        shown = self.leaves[root.after.oid]
        files, known = details.get("leaves", {}), _leaves(root) or {}
        empty = {oid for (oid,) in sql.execute(_EMPTY, [list(shown)]).fetchall()}
        gone = {one for one in shown if one in empty or str(one) not in files}
        lost = {one for one in gone if known.get(str(one)) in (None, files.get(str(one)))}
        del self.leaves[root.after.oid]  # last: a partition may have been locked, and then the next look must ask again
        self._old[root.after.oid] |= shown - lost
        return sorted(lost)

    def _is_changed(self, known: ShapeChange, digest: str) -> bool:
        """Whether somebody changed the table, or rows or a mark have updated what is known since (and that may be
        older)."""
        last = self._compared.get(known.after.oid)
        return last is None or last[0] != digest or last[1] is not known

    def _ask(self, lsn: int, shape: Relation, details: Mapping[str, Any], before: ShapeChange | None) -> None:
        def make() -> Mark | None:
            if self._shapes.current.get(shape.oid) is before:
                self._old.setdefault(shape.oid, set()).update(map(int, details.get("lost", ())))
                return Mark([schema_mark(details)], shape)
            if "lost" in details:  # rows have shown another change first: look again
                self.leaves.setdefault(shape.oid, set()).update(map(int, details["lost"]))
            return None

        self._asked[shape.oid] = before
        self._marks.ask(lsn, make)


def _leaves(known: ShapeChange) -> Mapping[str, int] | None:
    """The known partitions of a root."""
    found: Mapping[str, int] | None = (known.details or {}).get("leaves")
    return found


def _name(shape: Relation) -> tuple[str, str]:
    return shape.namespace, shape.name
