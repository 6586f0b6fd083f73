"""Sources by their names: ours, and those that other packages bring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pgcdc.cli.main import app
from pgcdc.config import load_config
from pgcdc.core.errors import ConfigError
from pgcdc.core.state import Lock, StateDir
from pgcdc.run.pipeline import Pipeline
from pgcdc.source.protocol import find_source, source_names
from pgcdc.source.rate.options import RateOptions
from pgcdc.spark.options import parse_options, write_options

OTHER = """
from typing import ClassVar
from pgcdc.core.settings import setting
from pgcdc.source.protocol import SourceOptions
from pgcdc.source.rate.options import RateOptions
from pgcdc.source.rate.source import RateSource

class OtherOptions(RateOptions):
    kind: ClassVar[str] = "other"
    other_size: int = setting(1, "How large.", "Other", ge=1)

class OtherSource(RateSource):
    options_type = OtherOptions
"""


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with a source, installed."""
    site = tmp_path / "site"
    info = site / "pgcdc_other-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pgcdc-other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pgcdc.sources]\nother = pgcdc_other:OtherSource\n")
    (site / "pgcdc_other.py").write_text(OTHER)
    monkeypatch.syspath_prepend(str(site))


@pytest.mark.usefixtures("other")
def test_detector_of_another_package_is_found_and_prepared_by_its_own_source(tmp_path: Path) -> None:
    assert source_names() == ["other", "postgres", "rate"]
    found = parse_options({"detector": "Other", "other_size": "3", "rate_seed": "7", "state_dir": str(tmp_path)})
    assert (found.detector, found.source.kind) == ("other", "other")
    assert found.source.model_dump()["other_size"] == 3

    state = StateDir(tmp_path / "state")
    given = {"detector": "other", "rate_seed": "7", "adapters": "noop", "state_dir": str(state.path)}
    config = load_config(given, {}, None)
    assert isinstance(config.source, find_source("other").options_type) and config.source.is_given("rate_seed")
    assert parse_options(write_options(config)).source == config.source
    pipeline, lock = Pipeline(config, say=lambda text: None), Lock(state.run_lock)
    try:
        pipeline._prepare(lock)
        identity = state.identity()
        assert identity is not None and (identity.kind, identity.details["other_size"]) == ("other", 1)
    finally:
        pipeline._close()
        lock.release()


@pytest.mark.usefixtures("other")
@pytest.mark.parametrize("name", ["othr", "postgres", "magic"])
def test_unknown_detector_gets_the_list_and_the_nearest_name(name: str) -> None:
    advice = f"{'Did you mean other? ' if name == 'othr' else ''}Known detectors: wal, rate, other"
    with pytest.raises(ConfigError, match=f"detector '{name}' does not exist") as caught:
        parse_options({"detector": name})
    assert caught.value.advice == advice
    with pytest.raises(ConfigError, match=f"detector: detector '{name}' does not exist") as caught:
        load_config({"detector": name, "adapters": "noop"}, {}, None)
    assert caught.value.advice == advice


def test_made_up_changes_need_no_database_and_are_checked_by_their_own_rules() -> None:
    config = load_config({"detector": "rate", "rate_seed": "7", "adapters": "noop"}, {}, None)
    assert config.source == RateOptions(rate_seed=7)
    with pytest.raises(ConfigError, match="would leave no rows"):
        load_config({"detector": "rate", "rate_deletes": "6", "adapters": "noop"}, {}, None)


@pytest.mark.parametrize(
    "flags",
    [{"tables": "orders"}, {"all_tables": True}, {"schemas": "sales"}, {"publication": "p"}, {"columns": ["a=b"]}],
)
def test_made_up_tables_cannot_be_selected(flags: dict[str, Any]) -> None:
    flag = f"--{next(iter(flags)).replace('_', '-')}"
    with pytest.raises(
        ConfigError, match=f"^{flag} is for PostgreSQL, but --detector rate makes its own tables"
    ) as caught:
        load_config({"detector": "rate", "adapters": "noop", **flags}, {}, None)
    assert "--rate-tables N" in caught.value.advice and "--route" in caught.value.advice


def test_settings_of_made_up_changes_need_their_detector() -> None:
    with pytest.raises(ConfigError, match=r"^--rate-rows-per-second needs --detector rate. Add --detector rate"):
        load_config({"db": "postgresql://h/d", "tables": "t", "rate_rows_per_second": "5"}, {}, None)


def test_help_of_made_up_changes_has_default_and_unit() -> None:
    shown = CliRunner().invoke(app, ["listen", "--help"], env={"COLUMNS": "300", "NO_COLOR": "1"})
    lines = {line.split()[1]: line for line in shown.output.splitlines() if " --rate-" in line}
    assert set(lines) == {f"--{name.replace('_', '-')}" for name in RateOptions.model_fields if name[:5] == "rate_"}
    assert all("(default: " in line for line in lines.values()), lines
    for flag, unit in {"rows-per-second": "Changes per second", "row-width": "characters", "tables": "rate_1"}.items():
        assert unit in lines[f"--rate-{flag}"]
