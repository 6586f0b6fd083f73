"""The pure parts of `pgcdc verify`: hashes, buckets, and when a key counts as different."""

from __future__ import annotations

import io
import os
import pickle
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgcdc.config import load_config
from pgcdc.core.errors import PgcdcError
from pgcdc.core.state import StateDir, write_json
from pgcdc.run.chains import Chains
from pgcdc.run.settings import PipelineSettings
from pgcdc.run.verify import job, report
from pgcdc.run.verify.beside import VerifyBeside, run_child
from pgcdc.run.verify.comparing import GROUP_ROWS, groups, unequal
from pgcdc.run.verify.hashing import Key, Seen, Sums, hash_values, note
from pgcdc.run.verify.report import Notebook, Report, TableResult, describe_last, last_file
from pgcdc.run.verify.settling import ROUNDS, judge, settle

ROW = st.lists(st.none() | st.binary(max_size=4), max_size=4)
A, B, K = Seen(1, 11, "5"), Seen(1, 22, "6"), ("1",)


@given(ROW, ROW)
def test_rows_have_the_same_hash_only_if_they_are_the_same(one: list[bytes | None], other: list[bytes | None]) -> None:
    assert (hash_values(one) == hash_values(other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"), [([None], [b""]), ([b"a", b""], [b"", b"a"]), ([b"1:a"], [b"a"]), ([b"-"], [None]), ([], [None])]
)
def test_null_empty_and_separators_are_told_apart(one: list[bytes | None], other: list[bytes | None]) -> None:
    assert hash_values(one) != hash_values(other)


def test_sums_do_not_depend_on_order_and_show_what_was_added_twice() -> None:
    one, other = Sums(8), Sums(8)
    rows = [(n % 7, hash_values([b"%d" % n])) for n in range(1000)]
    for bucket, hashed in rows:
        one.add(bucket, 1, hashed)
    for bucket, hashed in reversed(rows):
        other.add(bucket, 1, hashed)
    assert one.differing(other) == []
    other.add(3, 1, rows[0][1])
    assert one.differing(other) == [3]


def test_rows_under_one_key_are_counted() -> None:
    found: dict[Key, Seen] = {}
    for _ in range(3):
        note(found, K, (1 << 64) - 1)
    assert found == {K: Seen(3, (1 << 64) - 3)}
    assert unequal({K: Seen(3, 5, "mark")}, {K: Seen(3, 5)}) == set()
    assert unequal({K: A, ("2",): A}, {K: B, ("3",): A}) == {K, ("2",), ("3",)}


def test_buckets_are_read_in_groups_that_fit_into_memory() -> None:
    sums = Sums(5)
    sums.rows = [GROUP_ROWS // 2, GROUP_ROWS // 2, 1, GROUP_ROWS * 3, 1]
    assert list(groups([0, 1, 2, 3, 4], sums)) == [[0, 1], [2], [3], [4]]
    assert list(groups([], sums)) == []


# --- settling


@pytest.mark.parametrize(
    ("before", "there", "after", "verdict"),
    [
        (A, A, A, "equal"),
        (None, None, None, "equal"),
        (A, Seen(1, 11), B, "equal"),  # it changed after the barrier
        (A, Seen(1, 22), B, "equal"),  # and the target was quick
        (A, Seen(1, 33), B, None),  # who knows
        (A, None, A, "missing"),
        (A, Seen(1, 33), A, "different"),
        (A, Seen(2, 22), A, "different"),
        (A, Seen(1, 33), A._replace(mark="9"), None),  # written again, with the same values
        (None, A, None, None),  # came and went between two looks at the source?
        (None, A, A, "equal"),
        (A, B, None, None),
    ],
)
def test_judgement_of_one_look(
    before: Seen | None, there: Seen | None, after: Seen | None, verdict: str | None
) -> None:
    assert judge(before, there, after, None) == verdict


def test_a_row_that_is_not_at_the_source_is_extra_if_it_looks_the_same_twice() -> None:
    assert judge(None, A, None, (None, A)) == "extra"
    assert judge(None, A, None, (None, B)) is None


class Side:
    """Says the next thing at each look, and then the last one again."""

    def __init__(self, *seen: Seen | None) -> None:
        self.seen = list(seen)

    def find(self, keys: Collection[Key]) -> Mapping[Key, Seen]:
        found = self.seen.pop(0) if len(self.seen) > 1 else self.seen[0]
        return {key: found for key in keys} if found else {}


def run(source: Side, target: Side) -> tuple[dict[Key, str], list[float]]:
    pauses: list[float] = []
    return dict(settle([K], source, target, lambda: None, pauses.append)), pauses


def test_a_key_that_rests_at_last_is_equal() -> None:
    moving = [Seen(1, n, str(n)) for n in range(6)]
    assert run(Side(*moving, Seen(1, 7, "7")), Side(Seen(1, 99), Seen(1, 98), Seen(1, 97), Seen(1, 7))) == (
        {K: "equal"},
        [0.1, 0.2, 0.4],
    )


def test_a_key_that_never_rests_is_unsettled_and_not_different() -> None:
    moving = [Seen(1, n, str(n)) for n in range(100)]
    found, pauses = run(Side(*moving), Side(Seen(1, 999)))
    assert found == {K: "unsettled"} and len(pauses) == ROUNDS - 1 and max(pauses) == 3.0


def test_a_row_that_comes_and_goes_all_the_time_is_not_extra() -> None:
    come_and_gone = Side(*(Seen(1, n) for n in range(100)))  # each look finds another one
    assert run(Side(None), come_and_gone)[0] == {K: "unsettled"}


# --- what is kept


def test_an_interrupted_comparison_goes_on_with_what_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = StateDir(tmp_path)
    book = Notebook(state, "digest", resume=True)
    book.results["m/t"] = TableResult("m", "t", rows=5, after=["3"])
    book.add_keys("m/t", [("1", "ä")])
    book.save()
    book.add_keys("m/t", [("2", "")])  # and then it was killed
    again = Notebook(state, "digest", resume=True)
    again.begin("m/t")
    assert again.is_resumed and again.results["m/t"].after == ["3"]
    assert list(again.keys("m/t")) == [("1", "ä")]
    again.copy_keys("m/t", tmp_path / "keys" / "repair.jsonl")
    assert (tmp_path / "keys" / "repair.jsonl").read_text() == '["1", "\\u00e4"]\n'
    assert not Notebook(state, "another", resume=True).is_resumed
    again.save()
    monkeypatch.setattr(report, "RESUMED_S", 0.0)
    assert not Notebook(state, "digest", resume=True).is_resumed


def test_exit_codes_and_the_last_result(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    assert describe_last(state) is None
    good, bad = TableResult("m", "t", rows=3), TableResult("m", "u", rows=3, missing=1, different=1)
    other = TableResult("f", "t", reason="nobody knows")
    codes = [Report("p", some, []).exit_code for some in ([], [good], [good, bad, other], [good, other])]
    assert codes == [0, 0, 1, 3]
    assert Report("p", [TableResult("m", "t", unsettled=1)], []).exit_code == 3
    write_json(last_file(state), Report("0/1", [good, bad, other], []).summary())
    assert describe_last(state) == ("different at 0/1, 0 min ago: m 1 missing, 1 different; f 1 not compared")


# --- now and then


@pytest.mark.parametrize("text", ["verify: {every: 6h}", "verify_every: 6h"])
def test_it_runs_now_and_then_as_the_file_says(tmp_path: Path, text: str) -> None:
    (tmp_path / "pgcdc.yaml").write_text(f"adapters: [noop]\ntables: [orders]\n{text}\n")
    config = load_config({}, {"PGCDC_DB": "postgresql://localhost/shop"}, tmp_path / "pgcdc.yaml")
    beside = VerifyBeside(config, StateDir(tmp_path), lambda text: None)
    assert beside._every_s == 6 * 3600
    (tmp_path / "pgcdc.yaml").write_text("adapters: [noop]\ntables: [orders]\nverify: {every: often}\n")
    with pytest.raises(PgcdcError, match=r"verify\.every"):
        load_config({}, {"PGCDC_DB": "postgresql://localhost/shop"}, tmp_path / "pgcdc.yaml")


def test_the_rate_of_the_file_is_that_of_the_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pgcdc.yaml").write_text("adapters: [noop]\ntables: [orders]\nverify: {every: 6h, rate: 5000}\n")
    config = load_config({}, {"PGCDC_DB": "postgresql://localhost/shop"}, tmp_path / "pgcdc.yaml")
    rates = list[float]()

    def run(one: job.Verify) -> Report:
        rates.append(one.options.rate)
        return Report("p", [], [])

    monkeypatch.setattr(job.Verify, "run", run)
    sent = io.BytesIO(pickle.dumps((config.part(PipelineSettings), Chains((), ()))))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=sent))
    monkeypatch.setattr(os, "nice", lambda more: 0)
    assert (run_child(), rates) == (0, [5000.0])


def test_a_failed_one_is_said_and_the_pipeline_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    config = PipelineSettings(
        db="postgresql://user:correct-horse@localhost:1/shop", state_dir=tmp_path, verify_every=0.01
    )
    beside = VerifyBeside(config, StateDir(tmp_path), said.append)
    deadline = time.monotonic() + 60
    while not said and time.monotonic() < deadline:
        beside.follow(Chains((), ()))
        time.sleep(0.02)
    beside.close()
    assert said == [f"verify failed: see {tmp_path / 'verify.log'}"]
    assert "is not a state directory" in (tmp_path / "verify.log").read_text()


def test_what_cannot_go_to_another_process_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    beside = VerifyBeside(PipelineSettings(state_dir=tmp_path, verify_every=0.01), StateDir(tmp_path), said.append)
    for _ in range(3):
        time.sleep(0.02)
        beside.follow(Chains((), (lambda event: event,)))
    assert len(said) == 1 and said[0].startswith("verify cannot run beside this pipeline")
