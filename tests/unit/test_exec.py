"""A command as an adapter: what it is given, what it says, how it fails, and that nothing of it is left running."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from running import run
from targets.events import END, START, STREAM, WHOLE, batch, batch_of, up_to

from pgcdc import Pipeline, adapters
from pgcdc.config.layers import load_config
from pgcdc.core import secrets
from pgcdc.core.counters import EXEC_RESTARTS, counters
from pgcdc.core.errors import ConfigError, Policy, SinkError, SinkRejected, SinkUnavailable
from pgcdc.core.position import Position
from pgcdc.core.secrets import clean_environment
from pgcdc.event.batch import Batch
from pgcdc.sink.command import MARK, Command, end_all, find_marked, mark_leader
from pgcdc.sink.contract import Progress
from pgcdc.sink.exec import ExecSink
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import DeliveryOptions, make_sink

Make = Callable[..., Runner]
FIRST, MIDDLE = Position.end(110), Position.end(130)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Sinks with an ack in tmp_path; afterwards nothing that they started may run."""
    made: list[Runner] = []
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def make(command: str | list[str], timeout_s: float = 20.0, **options: Any) -> Runner:
        spec = adapters.exec(command, timeout=timeout_s, **options)
        tries = {"max_retries": 0, "cb_max_failures": 0, **(spec.delivery.model_dump(exclude_unset=True))}
        sink = run(make_sink(spec), tmp_path, spec.name, **tries)
        sink.open(START)
        sink.options = DeliveryOptions(**{**tries, "timeout": 60.0})  # the sink's own patience is looked at
        made.append(sink)
        return sink

    yield make
    for sink in made:
        sink.close()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def process_of(runner: Runner) -> Command:
    assert isinstance(runner.sink, ExecSink) and runner.sink._command is not None
    return runner.sink._command


def python(program: str, *more: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", program, *more]


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True) if path.exists() else []


def wait_for(found: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def quote(path: Path) -> str:
    return shlex.quote(str(path))


# --- what it is given


def test_shell_text_gets_the_lines_on_its_input_and_writes_to_our_output(
    make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    sink = make('sed \'s/.*"position":"\\([^"]*\\)".*/\\1/\' | sort -r')
    sink.write(batch(START, FIRST))
    assert capfd.readouterr().out.split() == sorted((str(one) for one in STREAM if one <= FIRST), reverse=True)


def test_words_are_not_read_by_a_shell(make: Make, tmp_path: Path) -> None:
    odd = tmp_path / "$(touch x) ; 'y'"
    sink = make(["tee", str(odd)])
    sink.write(batch(START, END))
    assert lines(odd) == WHOLE


def test_error_output_goes_to_ours_with_the_name(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    sink = make("cat > /dev/null; echo one >&2; printf 'two\\377' >&2", name="mine")
    sink.write(batch(START, END))
    assert capfd.readouterr().err == "pgcdc: adapter mine: one\npgcdc: adapter mine: two\ufffd\n"


def test_environment_has_no_secret_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_known", {"hush!hush"})
    environ = {
        "PATH": "/home/app:/bin", "HOME": "/home/me", "PGCDC_DB": "postgresql://app:hush%21hush@host/shop",
        "PGCDC_WEBHOOK_SIGNING_KEY": "k", "PGPASSWORD": "home", "PGPASSFILE": "/x",
        "DB_PASSWORD": "hush!hush", "URL": "postgresql://app:hush%21hush@host/shop", "DSN": "host=h password=hush!hush",
        "COPY": "home", "OTHER": "hush",
    }  # fmt: skip
    assert clean_environment(environ) == {
        "PATH": "/home/app:/bin", "HOME": "/home/me", "PGPASSFILE": "/x", "OTHER": "hush",
    }  # fmt: skip
    assert clean_environment(environ, ["PGCDC_DB"])["PGCDC_DB"] == environ["PGCDC_DB"]
    assert clean_environment({"A": "1", "PGCDC_DB": "no url: ://"}) == {"A": "1"}


@pytest.mark.parametrize(
    "value",
    [
        "Bearer hunter2hunter",
        "host=x token=hunter2hunter",
        "-u app:hunter2hunter",
        "redis://:hunter2hunter@h/0",
        "a,hunter2hunter;b",
    ],
)
def test_environment_has_no_short_secret_as_a_word(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_known", {"hunter2hunter", "home"})
    plain = {"WORDS": "/my-hunter2hunters/x", "LANGUAGE": "home; sweet home"}
    assert clean_environment({"AUTH": value, **plain}) == plain


def test_environment_has_no_secret_of_other_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_known", set())
    variables = {
        "HOOK_TOKEN": "tok-1", "FIRST": "first-half", "SECOND": "second-half", "MIRROR": "postgresql://m:pw-of-m@h/x",
        "SOURCE_PW": "pw-of-source", "LETTERS": "host=h password=pw-of-letters", "MASK": "the-key-of-the-mask",
        "ROOM": "/services/abcdefghijklmnopqrst",
    }  # fmt: skip
    plain = {
        "PATH": "/usr/lib/hooks.example.com:/bin",
        "HOST": "hooks.example.com",
        "STAGE": "test",
        "V": "2",
        "HOME": "/home/m",
    }
    for name, value in {**variables, **plain, "KEPT": "tok-1"}.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "pgcdc.yaml"
    file.write_text("""
        db: postgresql://app:${SOURCE_PW}@source/shop
        all_tables: true
        dlq: pg_table
        dlq_db: ${LETTERS}
        transforms: {global: [{type: mask, columns: [email], mode: hash, key_env: MASK}]}
        adapters:
        - {name: exec, command: cat, keep_env: KEPT}
        - {name: webhook, url: 'https://${HOST}${ROOM}?v=2', signing_key: '${FIRST}${SECOND}',
           headers: {Authorization: 'Bearer ${HOOK_TOKEN}', X-Stage: '${STAGE}'}}
        - {name: pg_table, db: '${MIRROR}'}
    """)
    Pipeline(load_config({}, os.environ, file))
    found = clean_environment(os.environ, ["KEPT"])
    assert not set(found) & set(variables)
    assert {name: found.get(name) for name in plain} == plain and found["KEPT"] == "tok-1"


@pytest.mark.parametrize("ack", ["exit", "line", "write"])
def test_command_sees_no_secret(make: Make, tmp_path: Path, ack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCDC_DB", "postgresql://app:hush-hush@host/shop")
    monkeypatch.setenv("MY_URL", "postgresql://app:hush-hush@host/shop")
    monkeypatch.setenv("PGCDC_X", "kept")
    monkeypatch.setenv("HOOK_KEY", "also-hush-hush")
    monkeypatch.setattr(secrets, "_known", {"hush-hush", "also-hush-hush"})
    out = tmp_path / "env"
    answers = "while read -r line; do echo done; done" if ack == "line" else "cat > /dev/null"
    sink = make(f"env > {quote(out)}.new; mv {quote(out)}.new {quote(out)}; {answers}", ack=ack, keep_env=["PGCDC_X"])
    sink.write(batch(START, END))
    wait_for(out.exists)
    assert "hush-hush" not in out.read_text()
    assert "PGCDC_X=kept\n" in out.read_text()
    assert "PATH=" in out.read_text()


# --- it does not exist


@pytest.mark.parametrize("ack", ["exit", "line", "write"])
@pytest.mark.parametrize("command", [["/does/not/exist"], ["acks.txt"], "does-not-exist x", "true | no-such-thing"])
def test_command_that_does_not_exist_stops_and_loses_nothing(
    make: Make, command: Any, ack: str, tmp_path: Path
) -> None:
    (tmp_path / "acks.txt").write_text("not to be executed")
    sink = make([str(tmp_path / "acks.txt")] if command == ["acks.txt"] else command, ack=ack)
    with pytest.raises(SinkError) as caught:
        sink.write(batch(START, END))
    assert caught.value.policy is Policy.STOP or "ended before" in caught.value.message
    assert caught.value.advice
    assert sink.ack == START
    if command != "true | no-such-thing":
        with pytest.raises(SinkError, match="does not exist or is not executable"):
            sink.check()


@pytest.mark.parametrize(
    "command", ["cat", "cat > /dev/null", "A=1 cat", "while read x; do :; done", "  # why\n cat", "$X"]
)
def test_command_that_only_a_shell_understands_passes_the_look(make: Make, command: str) -> None:
    make(command).check()


def test_options_are_checked() -> None:
    assert adapters.exec(["a", "b c"]).options.words == ["a", "b c"]  # type: ignore[attr-defined]
    assert adapters.exec("a | b").options.words == ["sh", "-c", "a | b"]  # type: ignore[attr-defined]
    for wrong in ("", [], ["\0"], "a\0"):
        with pytest.raises(ConfigError):
            adapters.exec(wrong)
    with pytest.raises(ConfigError, match="ack"):
        adapters.exec("cat", **dict[str, Any](ack="never"))


# --- by exit


def test_each_batch_has_a_process_of_its_own_that_sees_the_end_of_its_input(make: Make, tmp_path: Path) -> None:
    sink = make(f"wc -l >> {quote(tmp_path / 'out')}")
    sink.write(batch(START, FIRST))
    sink.write(batch(FIRST, Position.end(115)))  # empty: no process
    sink.write(batch(Position.end(115), END))
    assert lines(tmp_path / "out") == ["4\n", "12\n"]
    assert sink.ack == END


def test_failed_command_is_told_with_what_it_said_and_started_again(make: Make, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fail = f"touch {quote(out)}.ok; echo 'no password=x' >&2; exit 3"
    sink = make(f"test -e {quote(out)}.ok || {{ {fail}; }}; cat >> {quote(out)}", name="failing")
    restarts = counters.get(EXEC_RESTARTS, adapter="failing")
    with pytest.raises(SinkUnavailable, match=r"failed with status 3: no password=\*\*\*"):
        sink.write(batch(START, END))
    assert sink.ack == START
    sink.write(batch(START, END))
    assert lines(out) == WHOLE
    assert counters.get(EXEC_RESTARTS, adapter="failing") == restarts + 1


def test_delivery_starts_it_again_until_it_works(make: Make, tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = (
        f"echo x >> {quote(out)}.tries; test $(wc -l < {quote(out)}.tries) -gt 3 || kill -9 $$; cat >> {quote(out)}"
    )
    delivery = make(program, max_retries=5, backoff_base=0.001)
    delivery.write(batch(START, END))
    assert lines(out) == WHOLE
    assert len(lines(tmp_path / "out.tries")) == 4


@pytest.mark.parametrize("bad", [[0], [7], [15], [3, 4], [0, 15], list(range(16))], ids=str)
def test_events_that_are_refused_are_found_and_the_others_arrive_once(
    make: Make, tmp_path: Path, bad: list[int]
) -> None:
    out = tmp_path / "out"
    refused = {str(STREAM[number]) for number in bad}
    words = "|".join(f'"{one}"' for one in sorted(refused))
    program = f"cat > {quote(out)}.new; if grep -qE '{words}' {quote(out)}.new; then echo bad one >&2; exit 65; fi; "
    sink = make(program + f"cat {quote(out)}.new >> {quote(out)}")
    left = batch(START, END)
    found: set[str] = set()
    while sink.ack < END:
        try:
            sink.write(left)
            assert sink.ack == END
        except SinkRejected as error:
            (reject,) = error.rejects
            assert (reject.kind, reject.text) == ("exec_65", "bad one")
            assert reject.position in refused - found
            found.add(reject.position)
            left = left.without([reject.position])
    assert found == refused
    assert lines(out) == [line for position, line in zip(STREAM, WHOLE, strict=True) if str(position) not in refused]


def test_events_of_one_position_are_refused_together(make: Make, tmp_path: Path) -> None:
    events = pa.table({"position": [str(STREAM[0]), str(STREAM[1]), str(STREAM[1])], "line": ["a\n", "b\n", "bad\n"]})
    sink = make(f"cat > {quote(tmp_path)}/new; ! grep -q bad {quote(tmp_path)}/new || exit 65")
    with pytest.raises(SinkRejected) as caught:
        sink.write(Batch(START, END, events))
    assert [reject.position for reject in caught.value.rejects] == [str(STREAM[1])]
    assert sink.ack == STREAM[0]


def large(count: int = 20_000) -> Batch:
    positions = [f"{110:016X}/{number:013X}" for number in range(1, count + 1)]
    texts = [f'{{"id":"{number}","text":"{"x" * 80}"}}\n' for number in range(count)]
    return Batch(START, FIRST, pa.table({"position": positions, "line": texts}))


def test_command_that_ends_well_without_reading_everything_is_not_believed(make: Make) -> None:
    sink = make("head -n 1 > /dev/null")
    with pytest.raises(SinkUnavailable, match="did not read all events"):
        sink.write(large())
    assert sink.ack == START


@pytest.mark.parametrize("command", ["sleep 0.2", "read line; sleep 0.2", "exec 0<&-; sleep 0.2"])
def test_small_batch_that_was_not_read_is_not_delivered_either(make: Make, command: str) -> None:
    sink = make(command)
    with pytest.raises(SinkUnavailable, match="did not read all events"):
        sink.write(batch(START, FIRST))
    assert sink.ack == START


@pytest.mark.parametrize(
    "command",
    ["sleep 600", "trap '' TERM; cat > /dev/null; sleep 600", "sleep 600 & cat > /dev/null; wait", "kill -STOP $$"],
)
def test_command_that_does_not_end_is_ended_with_all_that_it_started(make: Make, command: str) -> None:
    sink = make(command, timeout_s=0.5)
    began = time.monotonic()
    with pytest.raises(SinkUnavailable, match=r"within 0\.4 s, and was ended"):
        sink.write(large())
    assert time.monotonic() - began < 5
    assert sink.ack == START


def test_what_a_command_leaves_in_the_background_is_ended(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgcdc.sink.exec.GRACE_S", 0.2)
    left = f"sh -c 'trap \"\" TERM; echo $$ > {quote(tmp_path)}/pid; exec sleep 600'"
    sink = make(f"{left} < /dev/null & cat > /dev/null; until test -s {quote(tmp_path)}/pid; do sleep 0.01; done")
    sink.write(batch(START, END))
    assert sink.ack == END
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


# --- by line

ECHO = """
import sys
with open(sys.argv[1], "a") as out:
    for line in sys.stdin:
        out.write(line)
        out.flush()
        print(line if len(sys.argv) > 2 else "ok", flush=True, end="" if len(sys.argv) > 2 else "\\n")
"""


@pytest.mark.parametrize("more", [[], ["echo"]], ids=["any text", "the event itself"])
def test_one_process_has_all_batches_and_says_when_an_event_is_done(
    make: Make, tmp_path: Path, more: list[str]
) -> None:
    sink = make(python(ECHO, str(tmp_path / "out"), *more), ack="line")
    sink.write(batch(START, FIRST))
    # Other tests of this process may have left a child that nobody has waited for yet: it has no command any more.
    children = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    (child,) = [one for one in children if str(tmp_path / "out") in one.cmdline()]
    sink.write(batch(FIRST, END))
    assert child.is_running() and lines(tmp_path / "out") == WHOLE
    sink.close()
    assert not child.is_running()


def test_tee_acknowledges_by_line(make: Make, tmp_path: Path) -> None:
    sink = make(["tee", str(tmp_path / "out")], ack="line")
    sink.write(batch(START, END))
    assert lines(tmp_path / "out") == WHOLE


BACKWARDS = """
import json, sys
lines = [sys.stdin.readline() for _ in range(int(sys.argv[1]))]
for line in reversed(lines):
    print(json.dumps({"id": json.loads(line)["id"]}), flush=True)
sys.stdin.read()
"""


def test_events_may_be_done_in_another_order(make: Make) -> None:
    sink = make(python(BACKWARDS, "16"), ack="line")
    sink.write(batch(START, END))
    assert sink.ack == END


DIES = """
import json, os, sys
out = open(sys.argv[1], "a")
first = not os.path.exists(sys.argv[1] + ".died")
open(sys.argv[1] + ".died", "w").close()
done = []
for number, line in enumerate(sys.stdin):
    if first and number in (1, 6):
        continue  # not done
    out.write(line)
    out.flush()
    print(json.dumps({"id": json.loads(line)["id"]}), flush=True)
    if first and number == 8:
        os.kill(os.getpid(), int(sys.argv[2]))
"""


def test_command_that_dies_gets_again_only_what_it_has_not_acknowledged(make: Make, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sink = make(python(DIES, str(out), str(int(signal.SIGKILL))), ack="line", name="dying")
    restarts = counters.get(EXEC_RESTARTS, adapter="dying")
    with pytest.raises(SinkUnavailable, match="was ended by SIGKILL"):
        sink.write(batch(START, END))
    sink.write(batch(START, END))
    sink.close()
    order = [*[0], *range(2, 6), 7, 8, 1, 6, *range(9, 16)]
    assert lines(out) == [WHOLE[number] for number in order]
    assert counters.get(EXEC_RESTARTS, adapter="dying") == restarts + 1


FAILS = """
import sys, time
for number, line in enumerate(sys.stdin):
    if number == 3:
        time.sleep(0.5)
        print("ok", flush=True)
        sys.exit(7)
    print("ok", flush=True)
"""


def test_acknowledged_events_do_not_come_again_after_a_crash_of_ours(make: Make, tmp_path: Path) -> None:
    """What was acknowledged before is in the ack when the write fails later."""
    sink = make(python(FAILS), ack="line")
    with pytest.raises(SinkUnavailable, match="status 7"):
        sink.write(batch(START, END))
    assert make("true").ack == STREAM[3]


REFUSES = """
import sys
for line in sys.stdin:
    if sys.argv[2] in line:
        sys.exit(65)
    with open(sys.argv[1], "a") as out:
        out.write(line)
    print("ok", flush=True)
"""


def test_exit_65_refuses_the_oldest_event_that_is_not_acknowledged(make: Make, tmp_path: Path) -> None:
    out, bad = tmp_path / "out", str(STREAM[5])
    sink = make(python(REFUSES, str(out), f'"{bad}"'), ack="line")
    with pytest.raises(SinkRejected) as caught:
        sink.write(batch(START, END))
    assert [reject.position for reject in caught.value.rejects] == [bad]
    sink.write(batch(START, END).without([bad]))
    assert lines(out) == [*WHOLE[:5], *WHOLE[6:]]


@pytest.mark.parametrize("command", ["cat > /dev/null", "sleep 600", "trap '' TERM; while :; do sleep 0.1; done"])
def test_command_that_never_acknowledges_is_ended_and_nothing_is_acknowledged(make: Make, command: str) -> None:
    sink = make(command, ack="line", timeout_s=0.5)
    with pytest.raises(SinkUnavailable, match=r"acknowledged nothing within 0\.4 s") as caught:
        sink.write(batch(START, END))
    assert "flush" in caught.value.advice
    assert sink.ack == START


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("yes", "matches no event"),
        ('read -r line; echo \'{"id":"nobody"}\'; cat > /dev/null', "matches no event"),
        ("head -c 2000000 /dev/zero; cat > /dev/null", "without a newline"),
        ("head -c 200000 /dev/urandom; cat > /dev/null", "matches no event|without a newline"),
    ],
)
def test_command_that_prints_garbage_stops_the_adapter(make: Make, command: str, said: str) -> None:
    sink = make(command, ack="line", timeout_s=3.0)
    with pytest.raises(SinkError, match=said) as caught:
        sink.write(batch(START, FIRST))
        sink.write(batch(FIRST, END))
    assert caught.value.advice
    assert sink.ack < END


SLOW = """
import sys, time
for line in sys.stdin:
    time.sleep(0.08)
    with open(sys.argv[1], "a") as out:
        out.write(line)
    print("ok", flush=True)
"""


def test_slow_command_is_left_to_work_and_gets_nothing_twice(make: Make, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sink = make(python(SLOW, str(out)), ack="line", timeout_s=0.5)
    tries = 0
    while sink.ack < END:
        try:
            sink.write(batch(START, END))
        except SinkUnavailable as error:
            assert "is slow" in error.message
            tries += 1
    assert tries >= 2
    assert lines(out) == WHOLE


def test_command_may_end_when_it_has_done_a_batch(make: Make) -> None:
    program = "import sys\nfor n, line in enumerate(sys.stdin):\n  print('ok', flush=True)\n  if n == 3: sys.exit()\n"
    delivery = make(python(program), ack="line", max_retries=5, backoff_base=0.001)  # it may just be ending
    for start, end in ((START, 110), (FIRST, 120), (Position.end(120), 130)):
        delivery.write(batch(start, Position.end(end)))
        assert delivery.ack == Position.end(end)


# --- by write


def test_what_the_command_has_not_read_when_it_dies_comes_again(make: Make, tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = f"if test -e {quote(out)}; then exec cat >> {quote(out)}; fi; touch {quote(out)}; read -r x; exit 1"
    sink = make(program, ack="write")
    with pytest.raises(SinkUnavailable):
        sink.write(large())
    sink.write(large())
    sink.close()
    assert lines(out) == large().events.column("line").to_pylist()


def test_command_that_reads_nothing_is_ended(make: Make) -> None:
    sink = make("sleep 600", ack="write", timeout_s=0.5)
    for events in (batch(START, FIRST), large()):
        with pytest.raises(SinkUnavailable, match=r"read nothing within 0\.4 s, and was ended"):
            sink.write(events)
    assert sink.ack == START


LEAVES = """
import os, sys, time
sys.stdin.buffer.raw.read(1 << 20)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
sys.exit(4)
"""


def test_command_that_ended_between_batches_is_said_and_started_again(
    make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    go = tmp_path / "go"
    sink = make(python(LEAVES, str(go)), ack="write")
    sink.write(batch(START, FIRST))
    go.touch()
    wait_for(lambda: process_of(sink).has_ended)
    go.unlink()
    sink.write(batch(FIRST, END))
    assert "ended with status 4 between two batches" in capfd.readouterr().err
    assert sink.ack == END
    go.touch()


# --- events of the past


@pytest.mark.parametrize("ack", ["exit", "line", "write"])
def test_events_of_the_past_have_a_process_of_their_own(make: Make, tmp_path: Path, ack: str) -> None:
    command = ["tee", "-a", str(tmp_path / "out")]
    sink = make(command, ack=ack)
    sink.write(batch(START, END).without([str(STREAM[2])]))
    assert not sink.redeliver(batch_of(STREAM[1], STREAM[2], [WHOLE[2]]))
    assert sink.ack == END
    sink.close()
    assert sorted(lines(tmp_path / "out")) == sorted(WHOLE)


def test_events_of_the_past_that_were_taken_are_not_given_again_without_those_that_were_not(
    make: Make, tmp_path: Path
) -> None:
    out, bad = tmp_path / "out", str(STREAM[3])
    program = (
        f"cat > {quote(out)}.new; ! grep -q '{bad}' {quote(out)}.new || exit 65; cat {quote(out)}.new >> {quote(out)}"
    )
    sink = make(program)
    past = batch(START, FIRST)
    sink.write(Batch(START, END, past.events.slice(0, 0)))
    with pytest.raises(SinkRejected):
        sink.redeliver(past)
    assert lines(out) == WHOLE[:3]
    sink.redeliver(past.without([bad]))
    assert lines(out) == WHOLE[:3]
    assert sink.ack == END


# --- the end


def test_close_lets_a_command_finish_what_it_has_read(make: Make, tmp_path: Path) -> None:
    program = "import sys, time; text = sys.stdin.read(); time.sleep(0.2); open(sys.argv[1], 'w').write(text)"
    sink = make(python(program, str(tmp_path / "out")), ack="write")
    sink.write(batch(START, END))
    sink.close()
    assert lines(tmp_path / "out") == WHOLE


def test_close_ends_a_command_that_does_not_want_to(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgcdc.sink.exec.CLOSE_S", 0.1)
    sink = make("trap '' TERM HUP; cat > /dev/null; sleep 600", ack="write", timeout_s=2.0)
    sink.write(batch(START, END))
    sink.close()


def test_all_commands_can_be_killed_at_once(make: Make) -> None:
    sink = make("trap '' TERM; cat > /dev/null; sleep 600", ack="write")
    sink.write(batch(START, FIRST))
    assert not process_of(sink).has_ended
    end_all()
    wait_for(lambda: process_of(sink).has_ended)


def test_command_of_a_run_that_was_killed_is_ended_by_the_next_one(
    make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["sh", "-c", "trap '' TERM; sleep 600 & wait"]
    owner = Progress(tmp_path, "exec").owner
    other, left = (
        subprocess.Popen(words, start_new_session=True, env={**os.environ, MARK: one}) for one in ("another", owner)
    )
    for one in (other, left):
        mark_leader(one.pid)
    wait_for(lambda: psutil.Process(left.pid).children())
    (child,) = psutil.Process(left.pid).children()
    make("cat", timeout_s=2.0)
    assert f"ended the command of an earlier run (process {left.pid})" in capfd.readouterr().err
    left.wait(5)
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert other.poll() is None
    os.killpg(other.pid, signal.SIGKILL)
    other.wait(5)


def test_daemon_of_a_command_is_left_alone(make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pids, owner = tmp_path / "pids", Progress(tmp_path, "exec").owner
    sink = make(
        f"setsid sh -c 'echo $$ > {quote(pids)}; exec sleep 60' > /dev/null 2>&1 & cat > /dev/null", ack="write"
    )
    sink.write(batch(START, FIRST))
    wait_for(lambda: lines(pids))
    daemon = psutil.Process(int(pids.read_text()))
    try:
        assert find_marked(owner) == [process_of(sink).pid]
        sink.close()
        assert daemon.environ()[MARK] == owner and find_marked(owner) == []
    finally:
        daemon.kill()


def test_number_of_an_ended_command_is_kept_until_its_group_is_ended(make: Make, tmp_path: Path) -> None:
    sink = make(python(LEAVES, str(tmp_path / "go")), ack="write")
    sink.write(batch(START, FIRST))
    command = process_of(sink)
    (tmp_path / "go").touch()  # not before: one that ends during the write has failed
    wait_for(lambda: command.has_ended)
    assert psutil.Process(command.pid).status() == psutil.STATUS_ZOMBIE
    sink.close()
    assert command.has_ended and not psutil.pid_exists(command.pid)


def test_no_descriptors_are_left_open(make: Make, tmp_path: Path) -> None:
    sink = make("cat > /dev/null")
    sink.write(batch(START, FIRST))
    before = len(os.listdir("/proc/self/fd"))
    for position in STREAM[5:10]:
        sink.write(batch(sink.ack, position))
    line = make(["tee", str(tmp_path / "out")], ack="line")
    line.write(batch(line.ack, END))
    line.close()
    wait_for(lambda: len(os.listdir("/proc/self/fd")) == before)
    assert up_to(FIRST)
