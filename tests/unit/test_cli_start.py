"""How quickly the command line begins: nothing is loaded that is not needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from pgcdc.cli.main import COMMANDS, app

HEAVY = ("psycopg", "pyarrow", "numpy", "pyspark", "pydantic", "rich", "yaml", "pgcdc.config", "pgcdc.sink")


@pytest.mark.parametrize("command", ["--help", "version", "--version"])
def test_help_and_version_load_neither_settings_nor_adapters(command: str) -> None:
    program = f"""
import sys
sys.argv = ["pgcdc", {command!r}]
from pgcdc.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code
found = [name for name in {HEAVY!r} if name in sys.modules]
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "listen" in done.stdout or "decoder" in done.stdout


def test_the_list_of_commands_says_what_each_says_of_itself() -> None:
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    for name, text in COMMANDS.items():
        assert f"  {name}" in shown.output
        said = CliRunner().invoke(app, [name, "--help"], terminal_width=300)
        assert said.exit_code == 0
        assert " ".join(text.split()) in " ".join(said.output.split())


def test_a_command_that_is_misspelt_is_suggested() -> None:
    shown = CliRunner().invoke(app, ["lissen"])
    assert shown.exit_code == 2 and "Did you mean 'listen'?" in shown.output


def test_version_is_a_command_and_a_flag() -> None:
    runner = CliRunner()
    said, same = runner.invoke(app, ["version"]), runner.invoke(app, ["--version"])
    assert (said.exit_code, same.exit_code) == (0, 0)
    assert said.output == same.output and said.output.startswith("pgcdc ")
    assert "--version" in runner.invoke(app, ["--help"]).output
