"""A few scripts of the campaign (`make campaign-ddl`): whatever the source does, the mirror ends up equal."""

from __future__ import annotations

import pytest
from campaign_ddl import run_script
from ddl_scripts import write_script

from pgcdc.playground.postgres import EmbeddedPostgres

SEEDS = range(1, 16)  # Every third one has kills


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_script_ends_equal(postgres: EmbeddedPostgres, seed: int) -> None:
    outcome = run_script(postgres.url(), postgres.version, seed, write_script(seed))
    assert outcome.verdict == "equal", outcome.told
    assert bool(outcome.kills) == (seed % 3 == 0)
