"""Adapters of other packages: found by entry points, used like ours, refused by name if they break the contract."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from pgcdc.core.errors import ConfigError
from pgcdc.sink.spec import ADAPTERS, own_adapters

MODULE = """
    from pathlib import Path
    from pgcdc import Reject, Sink, SinkContext, SinkOptions, SinkRejected
    from pgcdc.core.settings import setting

    class ShoutOptions(SinkOptions):
        "Events in capital letters."
        path: str = setting(..., "the file")
        token: str = setting("", "a secret", secret=True)

        def make(self):
            return ShoutSink(self)

        def target(self):
            return self.path

        def secrets(self):
            return {self.token}

    class ShoutSink(Sink):
        def __init__(self, options):
            self.options = options

        def open(self, context: SinkContext) -> None:
            self.name = context.name

        def write(self, batch):
            for position, text in zip(batch.positions().to_pylist(), batch.texts()):
                if "bad" in text:
                    raise SinkRejected("no", "look", [Reject(position, "bad", text)])
            with open(self.options.path, "a") as file:
                file.writelines(f"{text.upper()}\\n" for text in batch.texts())

    class Half:
        model_fields = {}

    class Formless(SinkOptions):
        def make(self):
            sink = ShoutSink(None)
            sink.form = "smoke"
            return sink
"""
MAIN = """
    import json, sys
    from pathlib import Path
    import pyarrow as pa
    from pgcdc import Position, adapters, ConfigError
    from pgcdc.config import Config
    from pgcdc.core import secrets
    from pgcdc.event.batch import Batch
    from pgcdc.sink.spec import make_sink
    from pgcdc.sink.runner import Runner

    folder = Path(sys.argv[1])
    options = {"path": str(folder / "out"), "token": "hush-hush-hush"}
    base = {"db": "postgresql://h/x", "all_tables": True, "state_dir": folder / "state"}
    config = Config.model_validate({**base, "adapters": [{"name": "loud", "type": "shout", **options}]})
    flat = Config.model_validate({**base, "adapters": ["shout"], "shout_path": str(folder / "out")})
    (spec,) = config.adapter_specs
    assert flat.adapter_specs[0].options.path == spec.options.path
    assert adapters.shout(name="loud", **options).options == spec.options
    (folder / "acks").mkdir()
    runner = Runner(make_sink(spec), folder / "acks", spec.name)
    runner.open(Position.end(1))
    table = pa.table({"position": [str(Position.at(2, 1))], "line": ["one\\n"]})
    runner.write(Batch(Position.end(1), Position.end(2), table))
    said = {}
    for kind in ("half", "broken", "formless"):
        try:
            Config.model_validate({**base, "adapters": [kind]}).adapter_specs
            said[kind] = ""
            make_sink(adapters.formless())
        except Exception as error:
            said[kind] = str(error)
    print(json.dumps({"out": (folder / "out").read_text(), "secrets": sorted(secrets._known), "said": said}))
"""


def test_package_of_somebody_else_adds_an_adapter_and_broken_ones_are_refused_by_name(tmp_path: Path) -> None:
    site = tmp_path / "site"
    info = site / "shouting-1.5.dist-info"
    info.mkdir(parents=True)
    (site / "shouting.py").write_text(dedent(MODULE))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting\nVersion: 1.5\n")
    points = (
        "shout = shouting:ShoutOptions\nhalf = shouting:Half\nbroken = missing:Nothing\nformless = shouting:Formless\n"
    )
    (info / "entry_points.txt").write_text(f"[pgcdc.sinks]\n{points}")
    done = subprocess.run(
        [sys.executable, "-c", dedent(MAIN), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["out"] == "ONE\n"
    assert found["secrets"] == ["hush-hush-hush"]
    assert "the adapter half of the package shouting 1.5 (shouting:Half) breaks the contract" in found["said"]["half"]
    assert "its options do not derive from SinkOptions" in found["said"]["half"]
    assert "the adapter broken of the package shouting 1.5" in found["said"]["broken"]
    assert "No module named 'missing'" in found["said"]["broken"]
    assert "has a form that does not exist" in found["said"]["formless"]


def test_unknown_adapter_is_told_which_there_are_and_which_is_nearest() -> None:
    with pytest.raises(ConfigError, match="adapter 'fil' does not exist") as caught:
        ADAPTERS.find("fil")
    assert caught.value.advice == "Did you mean file?"
    with pytest.raises(ConfigError) as caught:
        ADAPTERS.find("zzz")
    assert caught.value.advice.startswith(f"Known: {', '.join(sorted(own_adapters()))}")


def test_help_imports_no_sink() -> None:
    program = "import sys; from pgcdc.cli.main import main; sys.argv = ['pgcdc', '--help']\n"
    program += "try:\n  main()\nexcept SystemExit: pass\n"
    program += "print('LOADED', [name for name in sys.modules if name.startswith('pgcdc.sink.')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"
