"""`pgcdc verify` between two real servers' databases: what is equal, and each kind of difference that somebody plants."""

from __future__ import annotations

from pathlib import Path

import pytest
from verifying import mirrored

from pgcdc.playground.postgres import EmbeddedPostgres

ITEMS = "CREATE TABLE items (id int PRIMARY KEY, name text, price numeric, at timestamptz)"
ROWS = "INSERT INTO items SELECT n, 'item ' || n, n / 4.0, now() FROM generate_series(1, 1000) n"


def test_equal_tables_are_equal(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    with mirrored(postgres, tmp_path, ITEMS, ROWS) as (flow, _):
        report = flow.verify()
        (one,) = report.tables
        assert (report.exit_code, report.verdict, one.outcome, one.method) == (0, "equal", "equal", "ranges")
        assert (one.rows, one.equal, one.ranges) == (1000, 1000, 1)
        assert not (flow.state.path / "verify.json").exists()


def test_missing_extra_and_different_rows_are_found_with_their_keys(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    with mirrored(postgres, tmp_path, ITEMS, ROWS) as (flow, mirror):
        flow.deliver("DELETE FROM items WHERE id = 500")
        mirror.execute("DELETE FROM items WHERE id IN (3, 999)")
        mirror.execute("UPDATE items SET price = price + 1 WHERE id = 7")
        mirror.execute("UPDATE items SET name = NULL WHERE id = 8")
        mirror.execute("INSERT INTO items (id, name) VALUES (500, 'a lost delete'), (-1, 'of somebody')")
        report = flow.verify()
        (one,) = report.tables
        assert report.exit_code == 1
        assert (one.missing, one.extra, one.different, one.unsettled, one.equal) == (2, 2, 2, 0, 995)
        assert {name: sorted(keys) for name, keys in one.keys.items()} == {
            "missing": [["3"], ["999"]],
            "extra": [["-1"], ["500"]],
            "different": [["7"], ["8"]],
        }
        assert flow.check(keys=1)["mirror/items"].keys["missing"] == [["3"]]
