"""Sources and adapters in Python: what is wrong is said at once, with its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from pyspark.core.context import SparkContext

from pgcdc import Pipeline, adapters, sources, transform
from pgcdc.config import Config
from pgcdc.core.errors import ConfigError, GapError, PgcdcError
from pgcdc.core.state import read_json
from pgcdc.run.chains import Reloads, change_specs
from pgcdc.spark.session import check_running

DB = "postgresql://h/x"


def test_a_pipeline_has_what_it_is_given(tmp_path: Path) -> None:
    source = sources.postgres(DB, tables=["orders"], state_dir=tmp_path, max_batch_rows=7)
    given = [
        adapters.file(tmp_path / "a.jsonl", timeout=3),
        adapters.file(f"{tmp_path}/parts/", name="b", routes="orders", transforms=[transform.drop_columns("v")]),
    ]
    pipeline = Pipeline(source, given, [transform.mask("email")])
    assert (pipeline.config.max_batch_rows, pipeline.phase, pipeline.status()["adapters"]) == (
        7,
        "starting",
        ["file", "b"],
    )
    assert given[0].delivery.timeout == 3 and given[1].routes == ("orders",)
    assert [one.type for one in pipeline._chains.of(given[1]).transforms] == ["mask", "drop_columns"]


def test_the_variable_says_which_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCDC_DB", DB)
    assert sources.postgres(all_tables=True).db == DB
    monkeypatch.delenv("PGCDC_DB")
    with pytest.raises(ConfigError, match="PGCDC_DB"):
        sources.postgres(all_tables=True)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: sources.postgres(DB, tables=["a"], slot_nam="x"), "slot_name"),
        (lambda: sources.postgres(DB, tables=["a"], max_batch_rows=0), "max_batch_rows"),
        (lambda: sources.postgres(DB), "tables"),
        (lambda: sources.postgres(DB, tables=["a"], adapters=["file"]), "adapters is not a setting of a source"),
        (lambda: adapters.file("x", **dict[str, Any](timout=3)), "unknown key timout"),
        (lambda: adapters.file("x", timeout=-1), "timeout"),
        (lambda: adapters.file("", name="a"), "path"),
        (lambda: adapters.noop(**dict[str, Any](priority="high")), "unknown priority 'high'"),
    ],
)
def test_wrong_settings_are_named(make: Any, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make()
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "no adapter"),
        ([adapters.noop(), adapters.noop()], "two adapters are named noop"),
        ([adapters.file("x"), adapters.file("x", name="y")], "the same target"),
        ([adapters.file("no/such/folder/x")], "does not exist"),
    ],
)
def test_adapters_that_cannot_be_together_are_refused(given: list[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Pipeline(sources.postgres(DB, tables=["a"]), given)


def test_what_needs_a_running_pipeline_says_so(tmp_path: Path) -> None:
    pipeline = Pipeline(sources.postgres(DB, tables=["a"], state_dir=tmp_path), [adapters.noop()])
    with pytest.raises(PgcdcError, match="is not running"):
        pipeline.reload([], {})
    with pytest.raises(PgcdcError, match="is not running"):
        pipeline.add_adapter(adapters.noop(name="b"))
    with pytest.raises(PgcdcError, match="is not running"):
        pipeline.remove_adapter("b")


def test_a_reload_takes_everything_or_nothing() -> None:
    specs = (adapters.noop(name="a", routes=["x"]), adapters.noop(name="b"))
    changed = change_specs(specs, {"a": ((), ["y"])})
    assert [one.routes for one in changed] == [("y",), ()]
    with pytest.raises(ConfigError, match="adapter 'c' does not exist"):
        change_specs(specs, {"c": ((), ())})
    said: list[str] = []
    first = sources.postgres(DB, tables=["a"])
    answers: list[Config | ConfigError] = [ConfigError("line 3: no"), sources.postgres(DB, tables=["a", "b"])]

    def read_again() -> Config:
        answer = answers.pop(0)
        if isinstance(answer, ConfigError):
            raise answer
        return answer

    taken: list[Any] = []
    reloads = Reloads(first, read_again, said.append)
    assert not reloads.take(lambda *given: taken.append(given), ["stdout"])
    for _ in range(2):
        reloads.ask()
        assert reloads.take(lambda *given: taken.append(given), ["stdout"])
    assert taken == [((), {"stdout": ((), ())})]
    assert "the previous one stays in effect: line 3: no" in said[0] and "need a restart: tables" in said[1]
    report = reloads.status()
    assert report.pop("last_reload_at") and report == {"reloads": 1, "reload_errors": 1, "last_reload_error": None}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Pipeline("postgresql://x", [adapters.noop()]), "str is not a source"),  # type: ignore[arg-type]
        (lambda: Pipeline(sources.postgres(DB, tables=["a"]), ["file"]), "'file' is not an adapter"),  # type: ignore[list-item]
        (
            lambda: Pipeline(sources.postgres(DB, tables=["a"]), [adapters.noop()], ["drop"]),
            "'drop' is not a transform",
        ),
        (lambda: adapters.noop(name="../x"), "not a valid adapter name"),
        (lambda: adapters.noop(name="main"), "not a valid adapter name"),
        (
            lambda: Pipeline(
                sources.postgres(DB, tables=["a"]),
                [adapters.noop()],
                [transform.debezium_envelope(), transform.drop_columns("a")],
            ),
            "comes after debezium",
        ),
    ],
)
def test_what_is_no_part_of_a_pipeline_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make()
    assert said in str(raised.value)


def test_a_single_one_may_stand_for_a_list_and_a_pipeline_runs_once(tmp_path: Path) -> None:
    source = sources.postgres("postgresql://127.0.0.1:1/x?connect_timeout=1", tables=["a"], state_dir=tmp_path / "s")
    pipeline = Pipeline(source, adapters.noop(), transform.drop_columns("v"))  # type: ignore[arg-type]
    with pytest.raises(PgcdcError, match="was not started"):
        pipeline.wait()
    with pytest.raises(PgcdcError, match="connect"):
        pipeline.start()
    for again in (pipeline.start, pipeline.run):
        with pytest.raises(PgcdcError, match="runs once"):
            again()


def test_a_reload_that_fails_in_any_way_does_not_end_the_run() -> None:
    said: list[str] = []

    def read_again() -> Config:
        raise KeyError("maybe")

    reloads = Reloads(sources.postgres(DB, tables=["a"]), read_again, said.append)
    reloads.ask()
    assert reloads.take(lambda *given: None, ["stdout"])
    assert "the previous one stays in effect: KeyError" in said[0]
    assert reloads.status()["reload_errors"] == 1


def test_each_command_hears_what_became_of_its_own_reload() -> None:
    answers: list[Config | ConfigError] = [ConfigError("line 3: no"), sources.postgres(DB, tables=["a"])]

    def read_again() -> Config:
        if isinstance(answer := answers.pop(0), ConfigError):
            raise answer
        return answer

    reloads = Reloads(sources.postgres(DB, tables=["a"]), read_again, lambda text: None)
    assert reloads.answer("first") == {}
    assert reloads.take(lambda *given: None, ["stdout"])
    assert reloads.answer("second") == {}
    assert reloads.take(lambda *given: None, ["stdout"])
    assert (reloads.answer("first"), reloads.answer("second")) == ({"refused": "line 3: no"}, {"refused": None})
    assert not reloads.take(lambda *given: None, ["stdout"]), "an answer that got lost is given again"


def test_one_target_under_two_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "x.jsonl")
    for other in ("d/../x.jsonl", "link.jsonl"):
        given = [adapters.file(tmp_path / "x.jsonl"), adapters.file(tmp_path / other, name="b")]
        with pytest.raises(ConfigError, match="the same target"):
            Pipeline(sources.postgres(DB, tables=["a"]), given)


@pytest.mark.parametrize(
    ("given", "for_all"),
    [
        (adapters.noop(), [transform.mask("email")]),
        (adapters.noop(routes=["orders"]), []),
        (adapters.noop(transforms=[transform.drop_columns("v")]), []),
    ],
)
def test_typed_rows_with_transforms_or_routes_are_refused_at_the_start(
    tmp_path: Path, given: Any, for_all: list[Any]
) -> None:
    source = sources.postgres(DB, tables=["a"], table="a", state_dir=tmp_path / "state")
    with pytest.raises(ConfigError, match="typed rows"):
        Pipeline(source, [given], for_all).run()
    assert not (tmp_path / "state").exists()


def test_typed_rows_refuse_a_new_adapter_with_routes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sources.postgres(DB, tables=["a"], table="a", state_dir=tmp_path)
    pipeline = Pipeline(source, [adapters.noop()])
    monkeypatch.setattr(pipeline, "_running_lanes", lambda: None)
    with pytest.raises(ConfigError, match="typed rows"):
        pipeline.add_adapter(adapters.noop(name="b", routes=["a"]))


class RunningJvm:
    """A JVM of this process, as far as its environment goes."""

    def __init__(self, url: str | None) -> None:
        self.jvm = self.System = self
        self._url = url

    def getenv(self, name: str) -> str | None:
        assert name == "PGCDC_DB"
        return self._url


@pytest.mark.parametrize(("url", "said"), [("postgresql://h/y", "another database"), (None, "no PGCDC_DB"), (DB, "")])
def test_spark_of_another_database_is_refused(url: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkContext, "_gateway", RunningJvm(url))
    if said:
        with pytest.raises(ConfigError, match=said):
            check_running(DB)
        return
    monkeypatch.setattr(SparkContext, "_active_spark_context", object())
    assert not check_running(DB)
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    assert check_running(DB)


@pytest.mark.parametrize("was_there", [True, False])
def test_a_session_that_was_there_before_is_left_running(
    tmp_path: Path, was_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark = mock.Mock()
    monkeypatch.setenv("PGCDC_DB", "")
    monkeypatch.setenv("PGCDC_WATCH_PID", "")
    monkeypatch.setattr(SparkContext, "_gateway", RunningJvm(DB))
    monkeypatch.setattr(SparkContext, "_active_spark_context", object() if was_there else None)
    monkeypatch.setattr("pgcdc.run.driver.start_session", lambda *_, **__: spark)
    pipeline = Pipeline(sources.postgres(DB, tables=["a"], state_dir=tmp_path), [adapters.noop()])
    pipeline._start_spark()
    pipeline._close()
    assert spark.stop.called is not was_there


def test_what_transforms_change_is_remembered_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgcdc.run.driver.CaptureLink", mock.Mock())
    monkeypatch.setattr("pgcdc.run.driver.Lanes", mock.Mock())
    given = adapters.file(tmp_path / "x.jsonl", transforms=[transform.mask("email")])
    pipeline = Pipeline(sources.postgres(DB, tables=["a"], state_dir=tmp_path), [given, adapters.noop()])
    pipeline._prepared = pipeline._server = mock.Mock(names=("p",))

    def changed() -> dict[str, list[str]]:
        found = (read_json(pipeline.state.targets_file) or {}).items()
        return {name: one["columns"] for name, one in found if one["columns"]}

    pipeline._open_lanes()
    assert changed() == {"file": ["email"]}
    pipeline._prepared = None  # the database is not asked which columns there are
    lanes = mock.Mock()
    lanes.ask.side_effect = lambda do: do()
    monkeypatch.setattr(pipeline, "_running_lanes", lambda: lanes)
    pipeline.add_adapter(adapters.noop(name="late", transforms=[transform.drop_columns("id")]))
    pipeline.reload([], {"noop": ([transform.mask("phone")], [])})
    assert changed() == {"file": ["email"], "late": ["id"], "noop": ["phone"]}


def test_a_run_that_ends_with_a_gap_says_which_state_directory_to_resync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Pipeline(sources.postgres(DB, tables=["a"], state_dir=tmp_path / "s"), [adapters.noop()])

    def refuse(*_: Any) -> None:
        raise GapError("the slot is gone", "Bring the sinks back to the source: pgcdc resync")

    monkeypatch.setattr(pipeline, "_prepare", refuse)
    with pytest.raises(GapError, match=f"pgcdc resync --state-dir {tmp_path / 's'}$"):
        pipeline.run()
