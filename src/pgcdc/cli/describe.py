"""`pgcdc describe`: a table as Spark will see it."""

from __future__ import annotations

from typing import Annotated

import typer

from pgcdc.cli.report import exit_on_error

__all__ = ["describe"]

_HEADINGS = {"pg_type": "PostgreSQL", "spark_type": "Spark"}


def describe(
    table: Annotated[str, typer.Option(help="The table: orders, or schema.orders.")] = "",
    db: Annotated[
        str, typer.Option("--db", envvar="PGCDC_DB", show_envvar=True, help="URL of the source database.")
    ] = "",
    output: Annotated[str, typer.Option("--format", help="table, or json for machines.")] = "table",
    json_as: Annotated[str, typer.Option("--json", help="json and jsonb: string or variant.")] = "string",
    numeric: Annotated[str, typer.Option(help="numeric: decimal, string or double.")] = "decimal",
    out_of_range: Annotated[
        str, typer.Option(help="Dates and timestamps that Spark does not have: error, clamp or string.")
    ] = "error",
    arrays: Annotated[str, typer.Option(help="Arrays: array or string.")] = "array",
    composites: Annotated[str, typer.Option(help="Composite types: struct or string.")] = "struct",
) -> None:
    """Every column of a table: its type in PostgreSQL and in Spark, whether it is a key, and how exact it is."""
    with exit_on_error():
        import dataclasses
        import json

        from pgcdc.cli.report import print_table, show
        from pgcdc.core.errors import ConfigError
        from pgcdc.spark.describe import describe as describe_table

        if not table:
            raise ConfigError("no table is named", "Use --table NAME")
        if output not in ("table", "json"):
            raise ConfigError(f"--format {output} is not a format", "Use table or json")
        chosen = {"numeric": numeric, "out_of_range": out_of_range, "arrays": arrays, "composites": composites}
        found = describe_table(db, table, json=json_as, **chosen)
        raw = [dataclasses.asdict(column) for column in found]
        if output == "json":
            typer.echo(json.dumps(raw, indent=2, ensure_ascii=False))
            return
        names = [field.name for field in dataclasses.fields(found[0])] if found else ["column"]
        print_table(names, [[show(one[name]) for name in names] for one in raw], _HEADINGS)
