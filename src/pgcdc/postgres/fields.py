"""The types of settings that name things of a PostgreSQL database."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from pgcdc.core.settings import checked, split_names, text_or_list
from pgcdc.postgres.database import parse_identifier, parse_url, split_table

DatabaseUrl = Annotated[str, AfterValidator(lambda url: checked(parse_url, url) if url else url)]
TableName = Annotated[str, AfterValidator(partial(checked, split_table))]
TableNames = Annotated[tuple[TableName, ...], BeforeValidator(split_names), text_or_list()]
Identifiers = Annotated[
    tuple[Annotated[str, AfterValidator(partial(checked, parse_identifier))], ...],
    BeforeValidator(split_names),
    text_or_list(),
]
