"""What to compare with what, and how: each captured table at each adapter that can be read back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pgcdc.core.errors import ConfigError
from pgcdc.core.relation import Op, Relation
from pgcdc.core.settings import suggest
from pgcdc.event.edits import SimpleChain
from pgcdc.event.shape import TableShape
from pgcdc.postgres.database import Connection, name_table, quote_identifier, quote_qualified, split_table
from pgcdc.run.chains import Chains
from pgcdc.sink.contract import Sink
from pgcdc.sink.pg_table.options import PgTableOptions
from pgcdc.sink.spec import AdapterSpec, make_sink
from pgcdc.source.postgres.setup.tables import PublishedTable
from pgcdc.transform.specs import Chain

_ROW_OPERATIONS = {one.name for one in (Op.INSERT, Op.UPDATE, Op.DELETE, Op.TRUNCATE, Op.SNAPSHOT)}
_COLUMN_STEPS = ("drop_columns", "rename_fields", "mask")
_ORDERED = "BDINTU"  # Categories of base types whose values sort the same on every server
_COLLATION_SINCE = 150000


@dataclass(frozen=True)
class Pair:
    """A table of the source, and an adapter's copy of it."""

    spec: AdapterSpec
    sink: Sink
    table: PublishedTable
    chain: SimpleChain
    reason: str = ""  # Why it cannot be compared

    @property
    def name(self) -> str:
        return f"{self.spec.name}/{self.table.title}"

    @property
    def shape(self) -> TableShape:
        """The table after the chain."""
        relation = self.table.relation
        primary = list(self.table.key) if relation.replica_identity in "df" else []
        return TableShape(*self.chain.describe(relation, {"primary_key": primary, "columns": []}))

    @property
    def kept(self) -> list[tuple[str, str]]:
        """The columns that the adapter gets: their names at the source, and after the chain."""
        fates = zip(self.table.columns, self.chain.fates(self.table.relation), strict=True)
        return [(column, name) for column, (name, _) in fates if name is not None]

    @property
    def has_masks(self) -> bool:
        return any(masked for _, masked in self.chain.fates(self.table.relation))

    @property
    def key(self) -> tuple[str, ...]:
        """Key columns at the source. (): the table has none, or transforms drop or mask it; rows are then counted."""
        fates = dict(zip(self.table.columns, self.chain.fates(self.table.relation), strict=True))
        plain = all(fates[one][0] is not None and not fates[one][1] for one in self.table.key)
        return self.table.key if plain else ()

    @property
    def target_key(self) -> tuple[str, ...]:
        names = dict(self.kept)
        return tuple(names[one] for one in self.key)

    @property
    def is_by_servers(self) -> bool:
        return isinstance(self.spec.options, PgTableOptions) and not self.has_masks


def plan_pairs(
    chains: Chains, published: Sequence[PublishedTable], tables: Sequence[str], adapters: Sequence[str]
) -> tuple[list[Pair], list[str]]:
    """The pairs, and a line for each adapter that is left out. ConfigError: an unknown name, or nothing to compare."""
    names = [spec.name for spec in chains.specs]
    for one in adapters:
        if one not in names:
            raise ConfigError(f"adapter {one} does not exist", suggest(one, names))
    wanted = [split_table(one) for one in tables]
    known = {(one.relation.namespace, one.relation.name): one for one in published}
    for table in wanted:
        if table not in known:
            titles = ", ".join(one.title for one in published) or "none"
            raise ConfigError(f"table {name_table(*table)} is not captured", f"Captured tables: {titles}")
    pairs, left_out = list[Pair](), list[str]()
    for spec in chains.specs:
        if adapters and spec.name not in adapters:
            continue
        sink = make_sink(spec)
        if not sink.reads_back:
            left_out.append(f"adapter {spec.name} (type {spec.type}) cannot be read back")
            continue
        pairs += _pairs_of(spec, sink, chains, [one for name, one in known.items() if not wanted or name in wanted])
    if not pairs and (left_out or adapters):
        raise ConfigError(
            "; ".join(left_out) or "no table is delivered to these adapters",
            "Adapters that can: pg_table in mode apply, file, redis in mode sync",
        )
    return pairs, left_out


def _pairs_of(spec: AdapterSpec, sink: Sink, chains: Chains, tables: Sequence[PublishedTable]) -> Iterator[Pair]:
    chain = chains.of(spec).made()
    reason = "typed rows are not events" if chains.is_typed else _why_not(chain)
    steps = tuple(one.worker_step for one in chain.transforms if one.type in _COLUMN_STEPS)
    simple = SimpleChain(chain.routes, steps)
    for table in tables:
        if simple.is_routed(table.relation):
            yield Pair(spec, sink, table, simple, reason)


def _why_not(chain: Chain) -> str:
    """Why it takes Spark to know what a row looks like after this chain; "" if it does not."""
    for one in chain.transforms:
        if one.type in ("sql", "python") or one.sql:
            return f"the transform {one.type} changes rows, and only Spark can run it"
        if one.type == "filter" and not set(one.operations) >= _ROW_OPERATIONS:
            return "a filter removes operations, so the target is meant to differ"
        if one.is_envelope:
            return f"the transform {one.type} gives events another form"
    return ""


# --- information from the catalogs


@dataclass(frozen=True)
class ServerColumn:
    type: str  # Without a length
    order: str | None  # If two servers have the same text here, values sort the same there. None: not known


ServerTable = dict[str, ServerColumn]  # By column name. Empty: the table does not exist


def order_of(names: Sequence[str], known: ServerTable) -> list[ServerColumn]:
    return [known[one] for one in names if one in known]


_CATALOG = """
SELECT a.attname::text, format_type(a.atttypid, -1), t.typtype = 'b', t.typcategory::text, a.attcollation::int8,
       c.collname::text, c.collnamespace = 'pg_catalog'::regnamespace, pg_collation_actual_version(c.oid)
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid LEFT JOIN pg_collation c ON c.oid = a.attcollation
WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped
"""
_DEFAULT = """
SELECT datlocprovider::text, datcollate, pg_database_collation_actual_version(oid) FROM pg_database
WHERE datname = current_database()
"""
_BEFORE = "SELECT 'c', datcollate, NULL FROM pg_database WHERE datname = current_database()"


def read_table(conn: Connection, schema: str, table: str) -> ServerTable:
    query = _DEFAULT if conn.info.server_version >= _COLLATION_SINCE else _BEFORE
    default: Any = conn.execute(query.encode()).fetchone()
    found: ServerTable = {}
    for name, kind, is_base, category, collation, *more in conn.execute(_CATALOG, [quote_qualified(schema, table)]):
        order = None
        if is_base and (category in _ORDERED or category == "S"):
            order = _collation(more, default) if collation else ""
        found[name] = ServerColumn(kind, order)
    return found


def _collation(collation: Sequence[Any], default: Sequence[Any]) -> str | None:
    name, is_builtin, version = collation
    if name == "default":
        provider, name, version = default
        is_builtin = provider == "c"  # ICU's rules may be the user's own
    if not is_builtin:
        return None
    return "C" if name in ("C", "POSIX") else f"{name} {version}" if version else None


def target_name(pair: Pair) -> tuple[str, str]:
    """The table of `pg_table` for a pair."""
    options = pair.spec.options
    assert isinstance(options, PgTableOptions)
    relation: Relation = pair.table.relation
    return options.names((relation.namespace, relation.name))


def quoted_columns(names: Sequence[str], known: ServerTable) -> tuple[str, ...]:
    """Columns in SQL; NULL for a column that does not exist."""
    return tuple(quote_identifier(one) if one in known else "NULL" for one in names)
