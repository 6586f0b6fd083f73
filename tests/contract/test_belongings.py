"""The contract of sinks: what belongs to every type of the registry, options that are refused, and secrets."""

from __future__ import annotations

import json
import logging
import pickle
import traceback
from pathlib import Path

import pytest
from sink_targets import END, START, STREAM, TARGETS, Target, batch, batch_of, fresh, having, line
from targets.letters import Letters

from pgcdc import adapters
from pgcdc.core.errors import ConfigError, PgcdcError, SinkError
from pgcdc.core.settings import make_options
from pgcdc.core.state import Identity, StateDir
from pgcdc.sink.folder import FolderSink
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import ADAPTERS, AdapterSpec, DeliveryOptions, make_sink

ROOT = Path(__file__).parents[2]
QUICK = DeliveryOptions(max_retries=1, backoff_base=0.001, backoff_cap=0.002, cb_max_failures=0, timeout=20.0)


# --- what belongs to every type


@pytest.mark.parametrize("kind", ADAPTERS)
def test_every_type_is_in_the_suite(kind: str) -> None:
    assert kind in {TARGETS[name].type for name in TARGETS}, f"{kind} has no target: see docs/contract.md"


@pytest.mark.parametrize("kind", ADAPTERS)
def test_every_type_has_a_page(kind: str) -> None:
    page = ROOT / "docs" / "adapters" / f"{kind}.md"
    assert page.exists(), f"{page} is missing"
    text = page.read_text()
    options = ADAPTERS[kind].model_fields
    unnamed = [field.alias or name for name, field in options.items() if f"`{field.alias or name}`" not in text]
    assert unnamed == [], f"{page} does not name these settings"


@pytest.mark.parametrize("kind", ADAPTERS)
def test_every_type_has_a_function_in_python(kind: str) -> None:
    assert callable(getattr(adapters, kind, None)), f"pgcdc.adapters has no function {kind}"
    assert kind in dir(adapters)


@pytest.mark.parametrize("name", TARGETS)
def test_function_in_python_takes_the_options_of_the_configuration(name: str) -> None:
    with fresh(name) as target:
        made = getattr(adapters, target.type)(**target.options(), name="one", routes=["items"], max_retries=7)
        assert (made.name, made.type, made.routes) == ("one", target.type, ("items",))
        assert made.options == target.spec().options
        assert made.delivery.max_retries == 7


@pytest.mark.parametrize("name", TARGETS)
def test_every_sink_delivers_dead_letters_again(name: str) -> None:
    with fresh(name) as target:
        assert callable(target.make().redeliver)
        assert isinstance(target.spec().options, ADAPTERS[target.type])


@pytest.mark.parametrize("name", TARGETS)
def test_sink_has_the_name_of_its_adapter_and_keeps_its_ack_under_it(name: str) -> None:
    with fresh(name) as target:
        target.name = "another"
        sink = target.sink()
        assert sink.name == "another"
        sink.open(START)
        sink.close()
        assert (target.acks / "another.json").exists()


@pytest.mark.parametrize("name", TARGETS)
def test_target_that_keeps_the_position_keeps_one_for_each_stream(name: str) -> None:
    with fresh(name) as target:
        if not target.make().keeps_position:
            return  # its ack is the only position
        state = StateDir(target.acks.parent)
        state.save_identity(Identity("postgres", "system", "shop", "first", "instance", 1))
        first = target.sink()
        first.open(START)
        first.write(batch(START, END))
        first.close()
        ack = target.acks / f"{first.name}.json"
        ack.write_text(json.dumps({"position": None, "owner": first.progress.owner, "detail": {}}))
        state.save_identity(Identity("postgres", "system", "shop", "second", "instance", 1))
        second = target.sink()
        second.open(START)
        second.close()
        assert second.ack == START, "that is the position of the other stream"


# --- options that cannot work


@pytest.mark.parametrize("name", TARGETS)
def test_wrong_options_are_refused_before_anything_starts(name: str) -> None:
    with fresh(name) as target:
        wrong = target.wrong_options()
        assert wrong or target.type in {"stdout"}, "say in wrong_options() what must be refused"
        for options, says in [*wrong, ({**target.options(), "no_such_option": 1}, "unknown key no_such_option")]:
            with pytest.raises((ConfigError, SinkError), match=says) as caught:
                _prepare(target, options)
            assert caught.value.advice
            assert "\n" not in str(caught.value), "one line"
            assert not target.secret or target.secret not in str(caught.value)
        assert not list(target.acks.glob("*.json"))
        _prepare(target, target.options())


def _prepare(target: Target, options: object) -> None:
    """What is done before a pipeline starts."""
    kind = ADAPTERS[target.type]
    spec = AdapterSpec("one", target.type, make_options(kind, options, "adapter one", "See it"))  # type: ignore[arg-type]
    spec.options.check()
    Runner(make_sink(spec), target.acks, "one").check()


# --- secrets


@pytest.mark.parametrize("name", having("secret"))
def test_secret_is_seen_nowhere(name: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    caplog.set_level(logging.DEBUG, logger="pgcdc")
    letters = Letters()
    with fresh(name) as target:
        secret = target.secret
        assert secret in repr(target.options()), "the target's options do not have its secret"
        spec = target.spec()
        seen = [repr(spec), str(spec), spec.options.target()]
        delivery = target.sink(QUICK, dead_letters=letters)
        sink = delivery.sink
        delivery.open(START)
        delivery.write(batch(START, STREAM[4]))
        seen += [repr(sink), repr(delivery), str(vars(delivery))]
        if sink.takes_executors:
            assert isinstance(sink, FolderSink)
            seen.append(pickle.dumps(sink.part_writer()).decode("latin-1"))
            seen.append(repr(sink.part_writer()))
        if (bad := target.bad_line(STREAM[5])) is not None:
            delivery.write(batch_of(STREAM[4], STREAM[5], [bad]))
            seen += [repr(letter) for letter in letters.kept.values()]
        if target.can_break:
            seen += _errors_of_an_outage(target, delivery)
        delivery.close()
        files = [path for path in target.acks.parent.rglob("*") if path.is_file() and path.parent == target.acks]
        seen += [path.read_bytes().decode("latin-1") for path in files]
        assert files
        out, err = capfd.readouterr()
        for text in [*seen, caplog.text, out, err]:
            assert secret not in text


def _errors_of_an_outage(target: Target, delivery: Runner) -> list[str]:
    found = []
    target.break_target()
    try:
        for act in (
            lambda: delivery.write(batch(STREAM[5], END)),
            lambda: delivery.redeliver(batch_of(STREAM[0], STREAM[1], [line(STREAM[1])])),
            lambda: target.sink().check(),
            lambda: target.sink().open(START),
        ):
            try:
                act()
            except PgcdcError as error:
                found += [str(error), repr(error), str(error.to_json()), "".join(traceback.format_exception(error))]
    finally:
        target.heal_target()
    assert found, "the target was not broken"
    return found
