"""The documentation says what the code does: flags, options, errors and links are compared with it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pgcdc.cli.main import COMMANDS, app
from pgcdc.cli.snapshot import snapshot_app
from pgcdc.cli.verify import verify_app
from pgcdc.config import Config
from pgcdc.config.adapters import FLAT_KEYS
from pgcdc.core import errors
from pgcdc.core.settings import setting_of, unit_of
from pgcdc.event.columns import EVENT_SCHEMA
from pgcdc.sink.spec import DeliveryOptions, own_adapters
from pgcdc.spark import options as stream_options

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])

_OTHERS = {"--host", "--port", "--cores", "--memory", "--data-binary", "--unbuffered", "--conf", "--full-refresh"}
_OTHERS |= {"--log-path"}  # of the adapter that the pages write
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def _read(page: str) -> str:
    return (DOCS / page).read_text()


def _first_cells(text: str, heading: str) -> list[str]:
    """The names in the first column of the table that follows a heading."""
    section = re.split(r"^#+ ", text.partition(f"\n{heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")][2:]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def _anchors(path: Path) -> set[str]:
    """The anchors of a page, as they are made from its headings."""
    headings = _HEADING.findall(_FENCE.sub("", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_pages_name_the_flags_of_listen_and_no_others() -> None:
    environment = {"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1", "FORCE_COLOR": None, "GITHUB_ACTIONS": None}
    shown = CliRunner().invoke(app, ["listen", "--help"], env=environment)
    assert shown.exit_code == 0
    in_help = set(_FLAG.findall(re.sub(r"\x1b\[[0-9;]*m", "", shown.output)))
    assert "--slot-name" in in_help
    assert set(_FLAG.findall(_read("listen.md"))) | set(_FLAG.findall(_references())) == in_help


def _known_flags() -> set[str]:
    """Settings, which stand on two pages that are checked above, and the flags of every command."""
    group: Any = typer.main.get_command(app)
    flags = set(_FLAG.findall(_read("listen.md") + _references()))
    waiting = [group.get_command(None, name) for name in COMMANDS]
    while waiting:
        command = waiting.pop()
        flags |= {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
        waiting += getattr(command, "commands", {}).values()
    delivery = {
        f"--{kind}-{name}".replace("_", "-") for kind in own_adapters() for name in DeliveryOptions.model_fields
    }
    return flags | delivery


def test_pages_name_only_commands_flags_and_metrics_that_exist() -> None:
    flags, wrong = _known_flags(), []
    for page in PAGES:
        if page.parent.name == "decisions" or page.name in ("CHANGELOG.md", "benchmarks.md", "CONTRIBUTING.md"):
            continue
        text = re.sub(r"<!-- run: .* -->", "", page.read_text())
        code = "\n".join([*_FENCE.findall(text), *re.findall(r"^    .*", text, re.MULTILINE)])
        named = set(re.findall(r"`pgcdc ([a-z]+)", text) + re.findall(r"^(?:\$ | *)pgcdc ([a-z]+)", code, re.MULTILINE))
        wrong += [f"{page.name}: pgcdc {name}" for name in named - COMMANDS.keys()]
        wrong += [f"{page.name}: {name}" for name in re.findall(r"pgcdc_\w+_total", text)]
        wrong += [
            f"{page.name}: {flag}" for flag in sorted(set(_FLAG.findall(text)) - flags - _OTHERS) if flag[-1] != "-"
        ]
    assert wrong == []


def test_pages_name_every_variable_and_key_of_listen() -> None:
    settings = {key: setting_of(key, field) for key, field in Config.model_fields.items()}
    shown = {key for key, setting in settings.items() if setting.flag and not setting.is_hidden}
    for text, keys in ((_read("listen.md"), shown - FLAT_KEYS.keys()), (_references(), shown & FLAT_KEYS.keys())):
        for key in keys:
            assert f"`PGCDC_{key.upper()}` | `{key}`" in text, key
        named = set(re.findall(r"`PGCDC_([A-Z0-9_]+)` \|", text))
        assert named == {key.upper() for key in keys}


def _tool(name: str = "adapter_reference") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def _references() -> str:
    """The tables of settings on the pages of adapters."""
    tool = _tool()
    pages = [_read(f"adapters/{kind}.md") for kind in own_adapters()]
    return "".join(page.partition(tool.BEGIN)[2].partition(tool.END)[0] for page in pages)


@pytest.mark.parametrize("kind", own_adapters())
def test_page_of_an_adapter_has_its_settings(kind: str) -> None:
    advice = "run: .venv/bin/python tools/adapter_reference.py"
    assert _read(f"adapters/{kind}.md") == _tool().make_page(kind, own_adapters()[kind]), advice


def test_page_of_the_commands_is_made_from_them() -> None:
    advice = "run: .venv/bin/python tools/command_reference.py"
    assert _read("reference/commands.md") == _tool("command_reference").make_page(), advice


def test_types_of_adapters_are_python_and_name_every_option() -> None:
    stub = ast.parse(_tool().make_stub())
    functions = {one.name: one.args for one in stub.body if isinstance(one, ast.FunctionDef)}
    for kind, model in own_adapters().items():
        given = [*functions[kind].args, *functions[kind].kwonlyargs]
        assert set(model.model_fields) <= {one.arg for one in given}


def test_configuration_page_names_how_every_adapter_is_called_with_its_default() -> None:
    rows = _first_cells(_read("configuration.md"), "### Adapters")
    assert [name for name in rows if name.startswith("file_")] == [
        f"file_{name}" for name in DeliveryOptions.model_fields
    ]
    for name, field in DeliveryOptions.model_fields.items():
        unit = unit_of(field)
        default = field.default if isinstance(field.default, str) else f"{field.default:g}"
        default = f"`{unit.format(field.default)}`" if unit else default
        assert f"| `file_{name}` | {default} |" in _read("configuration.md")


def test_snapshots_page_names_every_flag_of_the_command() -> None:
    """Beside the settings, which stand on the page of the configuration."""
    own = [one for one in typer.main.get_command(snapshot_app).params if one.name != "help"]
    flags = {flag for one in own for flag in one.opts}
    assert len(flags) > 12
    assert sorted(flags - set(_FLAG.findall(_read("snapshots.md")))) == []


def test_verify_page_names_every_flag_of_the_command() -> None:
    own = [one for one in typer.main.get_command(verify_app).params if one.name not in ("help", "config")]
    flags = {flag for one in own for flag in (*one.opts, *one.secondary_opts)}
    assert len(flags) > 8
    assert sorted(flags - set(_FLAG.findall(_read("verify.md")))) == []


def test_walkthrough_names_only_files_and_folders_that_exist() -> None:
    named = re.findall(r"`([\w/]+(?:/|\.pyx?))`", _read("walkthrough.md"))
    assert len(named) > 10
    assert [name for name in named if not any((root / name).exists() for root in (ROOT, ROOT / "src" / "pgcdc"))] == []


def test_spark_page_names_the_options_of_the_source_and_no_others() -> None:
    known = {name for name in stream_options.option_names("wal") if not name.startswith("_")}
    tables = {"spark.md": "## Options", "tables.md": "## Options", "snapshots.md": "### Options"}
    documented = [name for page, heading in tables.items() for name in _first_cells(_read(page), heading)]
    assert len(documented) == len(set(documented))
    assert set(documented) == known


def test_spark_page_names_the_columns_of_an_event_in_their_order() -> None:
    columns = [part.split()[0] for part in re.sub(r"<[^>]*>", "", EVENT_SCHEMA).split(",")]
    assert _first_cells(_read("spark.md"), "## Columns") == columns


def test_errors_page_names_every_kind_of_error() -> None:
    text = _read("errors.md")
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.PgcdcError)]
    assert len(kinds) > 5
    assert [kind.__name__ for kind in kinds if f"`{kind.__name__}`" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in _LINK.findall(_FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in _anchors(path)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("program", sorted((ROOT / "examples").glob("*.py")), ids=lambda program: program.name)
def test_examples_compile(program: Path) -> None:
    compile(program.read_text(), str(program), "exec")


def test_example_configuration_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pgcdc.config import load_config

    monkeypatch.chdir(tmp_path)
    config = load_config({}, {"PGCDC_DB": "postgresql://localhost/shop"}, ROOT / "examples" / "pgcdc.yaml")
    assert config.tables == ("orders",)
    assert config.adapters == ("file",)


def test_example_of_a_pipeline_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pgcdc.config import load_config

    monkeypatch.chdir(tmp_path)
    config = load_config({}, {"PGCDC_DB": "postgresql://localhost/shop"}, ROOT / "examples" / "pipeline.yaml")
    assert config.adapter_names == ("file", "audit", "nothing")
    assert [spec.priority for spec in config.adapter_specs] == ["critical", "best-effort", "normal"]
    assert [len(spec.transforms) for spec in config.adapter_specs] == [0, 2, 0]


def test_example_in_the_configuration_page_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pgcdc.config import load_config

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUDIT_KEY", "k")
    text = _read("configuration.md").partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "pgcdc.yaml").write_text(text)
    config = load_config({}, {"PGCDC_DB": "postgresql://localhost/shop"}, None)
    assert config.adapter_names == ("stdout", "file", "audit")
    assert config.adapter_specs[1].delivery.max_retries == 10 and config.adapter_specs[2].delivery.timeout == 10
