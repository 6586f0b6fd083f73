"""A replay without its run goes where the run went, or nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgcdc import adapters
from pgcdc.core.errors import StateError
from pgcdc.core.state import StateDir
from pgcdc.run.chains import check_target, note_targets
from pgcdc.sink.spec import AdapterSpec
from pgcdc.transform.specs import Chain

MIRROR = adapters.pg_table("postgresql://app:one@b:5432/copy", mode="apply", target_schema="mirror")


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path)
    specs = (MIRROR, adapters.webhook("https://example.com/hook/a-long-secret-path"), adapters.exec("jq ."))
    note_targets(state, [(spec, Chain()) for spec in specs])
    return state


@pytest.mark.parametrize(
    "other",
    [
        adapters.pg_table("postgresql://app:one@a:5432/shop"),
        adapters.pg_table("postgresql://app:one@b:5432/copy"),
        adapters.pg_table("postgresql://app:one@b:5432/copy", mode="apply"),
        adapters.noop(name="pg_table"),
        adapters.webhook("https://example.com/hook/another"),
        adapters.exec("jq .payload"),
    ],
)
def test_settings_that_name_another_target_are_refused(state: StateDir, other: AdapterSpec) -> None:
    with pytest.raises(StateError, match="another target than these settings name"):
        check_target(state, other)


def test_how_it_is_delivered_does_not_matter_and_nothing_can_be_read_from_the_note(state: StateDir) -> None:
    check_target(state, adapters.pg_table("postgresql://other:two@b:5432/copy", mode="apply", target_schema="mirror"))
    check_target(state, adapters.webhook("https://example.com/hook/a-long-secret-path", signing_key="k", max_retries=1))
    check_target(state, adapters.file("new.jsonl"))  # an older version has noted nothing
    assert "secret" not in state.targets_file.read_text()
