"""Every setting wrong in turn: the message has file, line and key (or flag, or variable) and advice, and nothing is started.

The cases are made from the model: a new setting is covered by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from pgcdc.cli.main import app
from pgcdc.config.adapters import ENTRIES, FLAT_KEYS, Entry
from pgcdc.config.explain import NAMES, advise
from pgcdc.config.layers import load, load_config
from pgcdc.config.model import Config, Transforms
from pgcdc.core.errors import ConfigError, ConfigErrors
from pgcdc.core.secrets import read_secret
from pgcdc.core.settings import is_switch, setting_of
from pgcdc.event.edits import read_key
from pgcdc.sink.spec import ADAPTERS
from pgcdc.transform.specs import TransformSpec

TRANSFORM_MODELS: list[type[BaseModel]] = list(get_args(get_args(TransformSpec)[0]))
WRONG_TYPE: list[list[dict[str, str]]] = [[{}]]
"""No setting takes a list of lists of mappings."""


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and a pipeline that must not be made."""
    monkeypatch.chdir(tmp_path)

    def started(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr("pgcdc.run.pipeline.Pipeline.__init__", started)
    return tmp_path


def refuse(folder: Path, text: str) -> ConfigError:
    """Load the file; variables say what is needed beside it, but not over it."""
    (folder / "pgcdc.yaml").write_text(text)
    environ = {"PGCDC_DB": "postgresql://localhost/shop", "PGCDC_ALL_TABLES": "true"}
    if text.startswith("db"):
        del environ["PGCDC_DB"]
    if text.startswith(("all_tables", "publication")):
        del environ["PGCDC_ALL_TABLES"]
    with pytest.raises(ConfigError) as caught:
        load_config({}, environ, None)
    assert caught.value.exit_code == 2
    assert caught.value.advice, caught.value.message
    assert "\n" not in str(caught.value)
    assert list(folder.iterdir()) == [folder / "pgcdc.yaml"]
    return caught.value


# --- the places in a file where a setting can stand: a text up to it, its key, and its field


Place = tuple[str, str, str, BaseModel | Any]


def sample(name: str, field: Any) -> Any:
    """A value that is right, for what is required."""
    choices = [one for one in get_args(field.annotation) if isinstance(one, str)]
    if choices:
        return choices[0]
    if "tuple" in str(field.annotation):
        return ["a"]
    if name == "name":
        return "a"
    return {"a": "b"} if "dict" in str(field.annotation) else "m:f"


def lines_of(model: type[BaseModel], without: str, indent: str) -> str:
    """The required fields of a mapping in a list, but one; at least one line."""
    given = {
        field.alias or name: sample(name, field)
        for name, field in model.model_fields.items()
        if (field.is_required() or name == "type") and name != without
    }
    if "type" in model.model_fields and "type" not in given and without != "type":
        given["type"] = model.model_fields["type"].default
    rows = [f"{key}: {json.dumps(value)}" for key, value in given.items()] or ["{}"]
    return "".join(f"{indent}{'- ' if number == 0 else '  '}{row}\n" for number, row in enumerate(rows))


def places() -> Iterator[tuple[str, str, str, str, Any]]:
    """(id, text before, indent, path, field)."""
    for name, field in Config.model_fields.items():
        yield name, "", "", name, field
    for name, field in Transforms.model_fields.items():
        key = field.alias or name
        yield f"transforms.{key}", "transforms:\n", "  ", f"transforms.{key}", field
    for model in TRANSFORM_MODELS:
        kind = model.model_fields["type"].default
        for name, field in model.model_fields.items():
            if name == "type":
                continue
            for at, before, indent in (
                ("transforms.global[1]", "transforms:\n  global:\n    - {type: drop_columns, columns: [a]}\n", "    "),
                ("transforms.adapter.stdout[0]", "transforms:\n  adapter:\n    stdout:\n", "      "),
            ):
                text = before + lines_of(model, name, indent)
                yield f"{at}.{kind}.{name}", text, indent + "  ", f"{at}.{name}", field
    for kind, entry in ENTRIES.items():
        for name, field in entry.model_fields.items():
            if name == "type":
                continue
            text = "adapters:\n  - stdout\n" + lines_of(entry, name, "  ")
            yield f"adapters.{kind}.{name}", text, "    ", f"adapters[1].{name}", field


PLACES = {name: rest for name, *rest in places()}


def by_owner(cases: Iterable[str]) -> dict[str, list[str]]:
    """The cases of one model together: hundreds of tests of their own would take longer to set up than to run."""
    found: dict[str, list[str]] = {}
    for case in cases:
        found.setdefault(case.rpartition(".")[0] or "settings", []).append(case)
    return found


def for_each(cases: Iterable[str]) -> pytest.MarkDecorator:
    owners = by_owner(cases)
    return pytest.mark.parametrize("cases", owners.values(), ids=owners.keys())


def write_setting(before: str, indent: str, path: str, value: Any) -> tuple[str, int]:
    """The text with the setting as its last line, and the number of that line."""
    key = path.rpartition(".")[2]
    text = f"{before}{indent}{key}: {json.dumps(value)}\n"
    return text, text.count("\n")


@for_each(PLACES)
def test_wrong_type_names_file_line_and_key(nowhere: Path, cases: list[str]) -> None:
    for case in cases:
        before, indent, path, _ = PLACES[case]
        text, line = write_setting(before, indent, path, WRONG_TYPE)
        error = refuse(nowhere, text)
        assert error.message.startswith(f"pgcdc.yaml, line {line}: {path}"), error.message


@for_each(PLACES)
def test_missing_variable_names_file_line_key_and_variable(nowhere: Path, cases: list[str]) -> None:
    for case in cases:
        before, indent, path, _ = PLACES[case]
        text, line = write_setting(before, indent, path, "x${NOT_SET_ANYWHERE}")
        error = refuse(nowhere, text)
        assert error.message == f"pgcdc.yaml, line {line}: {path}: the variable NOT_SET_ANYWHERE is not set"


@for_each(PLACES)
def test_unknown_key_gets_the_nearest_one_suggested(nowhere: Path, cases: list[str]) -> None:
    for case in cases:
        before, indent, path, field = PLACES[case]
        wrong = f"{path}x"
        if "[" in path and field.is_required():
            before, _ = write_setting(before, indent, path, sample(path.rpartition(".")[2], field))
        text, line = write_setting(before, indent, wrong, 1)
        error = refuse(nowhere, text)
        key = path.rpartition(".")[2]
        assert error.message == f"pgcdc.yaml, line {line}: {wrong}: unknown key"
        assert error.advice == f"Did you mean {key}?"


BOUNDS: dict[str, tuple[str, Any]] = {
    case: (low, value)
    for case, (*_, field) in PLACES.items()
    for limit in field.metadata
    for low, value in (
        ("ge", limit.ge - 1 if getattr(limit, "ge", None) is not None else None),
        ("gt", getattr(limit, "gt", None)),
        ("min_length", [] if getattr(limit, "min_length", None) and "tuple" in str(field.annotation) else None),
    )
    if value is not None
}
BOUNDS |= {case: ("ge", -1) for case, (*_, field) in PLACES.items() if "Ge(" in str(field.annotation)} | {
    case: ("gt", 0) for case, (*_, field) in PLACES.items() if "Gt(" in str(field.annotation)
}


@for_each(BOUNDS)
def test_value_out_of_range(nowhere: Path, cases: list[str]) -> None:
    for case in cases:
        before, indent, path, _ = PLACES[case]
        text, line = write_setting(before, indent, path, BOUNDS[case][1])
        error = refuse(nowhere, text)
        assert error.message.startswith(f"pgcdc.yaml, line {line}: {path}: "), error.message


def test_ranges_are_found() -> None:
    assert {"max_batch_rows", "spool_limit", "file_timeout", "adapters.noop.rate_limit"} <= set(BOUNDS)


def choices_of(field: Any) -> list[str]:
    parts = [field.annotation, *get_args(field.annotation)]
    return [one for part in parts for one in get_args(part) if isinstance(one, str)]


CHOICES = {
    case: choices
    for case, (*_, field) in PLACES.items()
    if (choices := choices_of(field)) and "dict" not in str(field.annotation)
}


@for_each(CHOICES)
def test_unknown_choice_gets_the_nearest_one_suggested(nowhere: Path, cases: list[str]) -> None:
    for case in cases:
        before, indent, path, _ = PLACES[case]
        choice = max(CHOICES[case], key=len)
        text, line = write_setting(before, indent, path, f"{choice}x")
        error = refuse(nowhere, text)
        assert error.message.startswith(f"pgcdc.yaml, line {line}: {path}: "), error.message
        assert error.advice == f"Did you mean {choice}?"


@for_each(case for case, (*_, field) in PLACES.items() if not is_switch(field.annotation))
def test_true_is_no_value_of_what_is_not_a_switch(nowhere: Path, cases: list[str]) -> None:
    for case in cases:
        before, indent, path, _ = PLACES[case]
        text, line = write_setting(before, indent, path, True)
        error = refuse(nowhere, text)
        assert error.message.startswith(f"pgcdc.yaml, line {line}: {path}"), error.message


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf"])
@pytest.mark.parametrize("key", ["snapshot_chunk_delay", "max_batch_rows", "stdout_timeout"])
def test_numbers_have_an_end(nowhere: Path, key: str, number: str) -> None:
    assert refuse(nowhere, f"{key}: {number}\n").message.startswith(f"pgcdc.yaml, line 1: {key}: ")


# --- variables and flags


def wrong_text(name: str) -> str | None:
    """A text that is no value of a setting; None if any text is one."""
    field = Config.model_fields[name]
    kinds = str(field.annotation) + str(field.metadata)
    if is_switch(field.annotation):
        return "maybe"
    if choices_of(field) or any(kind in kinds for kind in ("int", "float")):
        return "many"
    named = {
        "db": "postgresql://h:notaport/x", "slot_name": "Bad-Name", "adapters": "carrier-pigeon", "routes": "orders",
        "adapter_priority": "stdout=hgih", "filter_operations": "INSRT", "publication": "p" * 64,
        "db_file": "no/such/file", "password_file": "no/such/file", "file_path": "no/such/folder",
        "dlq_db": "postgresql://h:notaport/x", "dlq_db_file": "no/such/file", "dlq_file": "no/such/folder",
        "row_filters": "orders", "columns": "orders", "spark_master": "10.0.0.5:7077", "exec_argv": "'", "detector": "many",
    }  # fmt: skip
    if name in ("tables", "schemas", "table", "signal_table", "snapshot_table", "dlq_table"):
        return "two words"
    if name.startswith("pg_table_"):
        return "postgresql://h:notaport/x"  # also for what takes any text: there is no such adapter
    if name in FLAT_KEYS and FLAT_KEYS[name][0] not in ("stdout", "file", "noop", "exec"):
        return "no/such/file"  # and there is no such adapter
    return named.get(name)


FLAGS = {name: setting_of(name, field) for name, field in Config.model_fields.items()}
TEXTS = {name: text for name, one in FLAGS.items() if one.flag and (text := wrong_text(name))}
ANY_TEXT = {"drop_columns", "state_dir", "exec_command", "exec_keep_env"}


def test_every_setting_has_a_wrong_text_or_takes_any() -> None:
    assert {name for name, one in FLAGS.items() if one.flag} - set(TEXTS) == ANY_TEXT


def one_of_each_type(names: Iterable[str]) -> list[str]:
    """Flags and variables of one type take the same way: the settings of every adapter need not all be tried."""
    found: dict[tuple[str, str], str] = {}
    for name in names:
        field = Config.model_fields[name]
        found.setdefault((f"{field.annotation} {field.metadata}", TEXTS[name]), name)
    return list(found.values())


@pytest.mark.parametrize("name", one_of_each_type(TEXTS))
def test_wrong_text_in_a_variable_names_the_variable(name: str) -> None:
    environ = {"PGCDC_DB": "postgresql://h/x", "PGCDC_ALL_TABLES": "true", "PGCDC_ADAPTERS": "stdout,file,noop"}
    if name != "file_path":
        environ["PGCDC_FILE_PATH"] = "x.jsonl"
    if name in ("tables", "schemas", "publication"):
        del environ["PGCDC_ALL_TABLES"]
    if name == "db_file":
        del environ["PGCDC_DB"]
    with pytest.raises(ConfigError) as caught:
        load_config({}, {**environ, f"PGCDC_{name.upper()}": TEXTS[name]}, None)
    assert caught.value.message.startswith(f"PGCDC_{name.upper()}"), caught.value.message
    assert caught.value.advice


@pytest.mark.parametrize(
    "name", one_of_each_type(name for name in TEXTS if not is_switch(Config.model_fields[name].annotation))
)
def test_wrong_flag_exits_2_and_starts_nothing(nowhere: Path, name: str) -> None:
    flags = {
        "--db": "postgresql://h/x", "--all-tables": "", "--adapter": "stdout", "--file-path": "x.jsonl",
        f"--{FLAGS[name].flag}": TEXTS[name],
    }  # fmt: skip
    if name in ("tables", "schemas", "publication"):
        del flags["--all-tables"]
    if name == "db_file":
        del flags["--db"]
    arguments = [part for flag, value in flags.items() for part in (flag, value) if part]
    if name != "adapters":
        arguments += ["--adapter", "file", "--adapter", "noop"]
    result = CliRunner().invoke(app, ["listen", *arguments], env={"PGCDC_DB": None})
    assert result.exit_code == 2, result.output
    assert result.output.startswith(f"error: --{FLAGS[name].flag}"), result.output
    assert list(nowhere.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "nearest"), [("PGCDC_SLOT_NAM", "PGCDC_SLOT_NAME"), ("PGCDC_TABLE_S", "PGCDC_TABLES")]
)
def test_variable_that_is_nearly_ours(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is not a setting of pgcdc. Did you mean {nearest}\?"):
        load_config({}, {"PGCDC_DB": "postgresql://h/x", name: "x"}, None)


def test_transforms_have_no_variable() -> None:
    with pytest.raises(ConfigError, match="PGCDC_TRANSFORMS can be set only in the YAML file"):
        load_config({}, {"PGCDC_TRANSFORMS": "x"}, None)


@pytest.mark.parametrize("name", NAMES)
def test_names_from_elsewhere_are_explained(nowhere: Path, name: str) -> None:
    assert refuse(nowhere, f"{name}: x\n").advice == NAMES[name]


# --- lists of things with names


LISTS = {
    "unknown adapter": ("adapters:\n  - stdout\n  - fiel\n", 3, "adapters[1]", "Did you mean file?"),
    "unknown type": ("adapters:\n  - name: a\n    type: fiel\n", 3, "adapters[0].type", "Did you mean file?"),
    "no type": ("adapters:\n  - name: a\n    path: x\n", 2, "adapters[0]", "Use one of: exec, file, "),
    "not a valid adapter name": ("adapters:\n  - type: file\n    path: x\n", 2, "adapters[0]", "Add name: ..."),
    "bad name": ("adapters:\n  - {type: noop, name: a/b}\n", 2, "adapters[0].name", "Where events go"),
    "reserved name": ("adapters:\n  - {type: noop, name: main}\n", 2, "adapters[0].name", "another name"),
    "same name": ("adapters:\n  - stdout\n  - {type: noop, name: stdout}\n", 3, "adapters[1]", "Name each"),
    "no path": ("adapters:\n  - {name: a, type: file}\n", 2, "adapters[0]", "Add path: ..."),
    "no folder": ("adapters:\n  - name: a\n    type: file\n    path: no/x\n", 4, "adapters[0].path", "Create it"),
    "same file": (
        "adapters:\n  - {name: a, type: file, path: x}\n  - {name: b, type: file, path: ./x}\n", 3, "adapters[1]", "own",
    ),
    "unknown transform": (
        "transforms:\n  global:\n    - type: dorp_columns\n", 3, "transforms.global[0].type", "Did you mean drop_columns?",
    ),
    "transform without a type": ("transforms:\n  global:\n    - {columns: [a]}\n", 3, "transforms.global[0]", "Use one"),
    "route of nobody": ("adapters: [stdout]\nroutes:\n  stdot: [a]\n", 3, "routes.stdot", "Did you mean stdout?"),
    "empty route": ("routes:\n  stdout: []\n", 2, "routes.stdout", "Deliver only matching channels"),
    "empty pattern": ("routes:\n  stdout: [a, ' ']\n", 2, "routes.stdout[1]", "orders"),
    "priority of nobody": ("adapter_priority:\n  fiel: normal\n", 2, "adapter_priority.fiel", "Known: stdout"),
    "unknown priority": (
        "adapter_priority:\n  stdout: critcal\n", 2, "adapter_priority.stdout", "Did you mean critical?",
    ),
    "transforms of nobody": (
        "transforms:\n  adapter:\n    nobody:\n      - {type: debezium}\n", 3, "transforms.adapter.nobody", "Known",
    ),
    "filter of nothing": ("transforms:\n  global:\n    - type: filter\n", 3, "transforms.global[0]", "operations"),
    "unknown operation": (
        "transforms:\n  global:\n    - type: filter\n      operations: [INSERT, UPDAT]\n",
        4, "transforms.global[0].operations", "Did you mean UPDATE?",
    ),
    "hash without a key": (
        "transforms:\n  global:\n    - {type: mask, columns: [a], mode: hash}\n", 3, "transforms.global[0]", "key_env",
    ),
    "key variable missing": (
        "transforms:\n  global:\n    - type: mask\n      columns: [a]\n      mode: hash\n      key_env: NOT_SET\n",
        6, "transforms.global[0].key_env", "Set it to the key",
    ),
    "key file missing": (
        "transforms:\n  global:\n    - type: mask\n      columns: [a]\n      mode: hash\n      key_file: no/such\n",
        6, "transforms.global[0].key_file", "must contain",
    ),
    "key without hash": (
        "transforms:\n  global:\n    - {type: mask, columns: [a], key_env: HOME}\n", 3, "transforms.global[0]", "mode: hash",
    ),
    "column behind an envelope": (
        "transforms:\n  global:\n    - type: debezium\n    - {type: drop_columns, columns: [a]}\n",
        2, "transforms.global", "Move debezium to the end",
    ),
    "two transforms": (
        "adapters:\n  - {name: a, type: noop, transforms: [{type: debezium}]}\n"
        "transforms:\n  adapter:\n    a: [{type: cloudevents}]\n", 5, "transforms.adapter.a", "one place",
    ),
    "twice the same key": ("adapters:\n  - name: a\n    type: noop\n    name: b\n", 4, "adapters[0].name", "line 2"),
    "key that is no name": ("adapters:\n  - on: a\n", 2, "adapters[0]", "quotes"),
    "list instead of a mapping": ("transforms:\n  - type: debezium\n", 1, "transforms", "Transforms"),
    "file without a path": ("adapters: [file]\n", 1, "adapters[0]", "file_path: PATH"),
    "row filter": ("row_filters:\n  orders: ''\n", 1, "row_filters", "orders=total"),
}  # fmt: skip


@pytest.mark.parametrize("case", LISTS)
def test_wrong_entry_names_its_line(nowhere: Path, case: str) -> None:
    text, line, path, advice = LISTS[case]
    error = refuse(nowhere, text)
    assert error.message.startswith(f"pgcdc.yaml, line {line}: {path}"), error.message
    assert advice in str(error), error.advice


TOGETHER = {
    "persistent_slot: false": "--temporary-slot",
    "persistent_slot: true\ntemporary_slot: true": "Remove one of them",
    "cooperative_checkpoint: false": "--bus-mode fast",
    "cooperative_checkpoint: true\ntemporary_slot: true": "Remove --temporary-slot",
    "snapshot_first: true\nsnapshot_mode: never": "Remove one of them",
    "snapshot_first: true\ntemporary_slot: true": "Remove --temporary-slot",
    "snapshot_table: orders": "Add --snapshot-first",
    "snapshot_first: true\nsnapshot_table: orders": "--tables",
    "toast_cache: true\ntoast: full": "Remove one of them",
    "toast_cache_max_entries: 5": "Add --toast cache",
    "toast: cache\norigin: none": "--toast full or --toast mark",
    "bus_buffer: 5": "--bus-mode fast",
    "file_path: x": "Add --adapter file",
    "noop_timeout: 5": "Add --adapter noop",
    "debezium_envelope: true\ncloudevents_envelope: true": "Remove one of them",
    "table: orders\ntx_markers: true": "--table",
    "table: orders\ndrop_columns: [a]": "Remove --table",
    "changelog: zset": "Add --table",
    "tables: [a]": "Remove one of them",
    "adapters: []": "--adapter",
    "rate_seed: 7": "Add --detector rate",
}


@pytest.mark.parametrize("text", TOGETHER)
def test_contradiction_names_a_line_and_gives_advice(nowhere: Path, text: str) -> None:
    error = refuse(nowhere, text + "\n")
    assert error.message.startswith(("pgcdc.yaml, line 1: ", "pgcdc.yaml, line 2: ", "PGCDC_ALL_TABLES")), error.message
    assert TOGETHER[text] in error.advice, error.advice


# --- what YAML itself refuses, and what would never end


BROKEN = {
    "endless alias": "adapters: &a [*a]\n",
    "many aliases": "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
    "d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: &f [*e,*e,*e,*e,*e,*e,*e,*e,*e]\n",
    "object": "db: !!python/object/apply:os.system [true]\n",
    "date": "slot_name: 2026-13-45\n",
    "two documents": "slot_name: a\n---\nslot_name: b\n",
    "deep": "adapters: " + "[" * 600 + "]" * 600 + "\n",
    "alias of a password": "db: *s3cret\n",
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file_is_one_error(nowhere: Path, case: str) -> None:
    error = refuse(nowhere, BROKEN[case])
    assert "pgcdc.yaml" in error.message
    assert "s3cret" not in str(error) + error.excerpt


def test_the_model_is_what_yaml_can_say() -> None:
    """The cases above write JSON into YAML."""
    assert yaml.safe_load(json.dumps(WRONG_TYPE)) == WRONG_TYPE
    assert all(issubclass(entry, Entry) for entry in ENTRIES.values()) and set(ENTRIES) == set(ADAPTERS)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("all_tables: !!bool maybe", "line 1: all_tables: this is not a valid YAML value"),
        ('password_file: "a\\0b"', "line 1: password_file: the text contains a NUL character"),
        ('state_dir: "a\\0b"', "line 1: state_dir: the text contains a NUL character"),
        ('db: "postgresql://h/\\ud800"', "line 1: db: the text contains half a character"),
        ('state_dir: "\\ud800"', "line 1: state_dir: the text contains half a character"),
    ],
)
def test_what_python_itself_would_stumble_over_is_an_error_with_its_line(nowhere: Path, line: str, said: str) -> None:
    assert said in str(refuse(nowhere, line + "\n"))


def test_path_of_a_secret_that_is_none_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="is not the path of a file"):
        read_secret(Path("a\0b"), "the password")
    for path in ("a\0b", "~no-such-user/key"):
        with pytest.raises(ConfigError, match=r"is not the path of a file|cannot be read"):
            read_key(None, path)


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"adapters": ["exec"]}, "adapter exec: command or argv is required. The flags are --exec-command, --exec-argv; "
         "in the YAML file: exec_command, exec_argv"),
        ({"adapters": ["exec"], "exec_command": "cat", "exec_argv": "cat"}, "command and argv cannot be combined. The"),
        ({"adapters": [{"name": "a", "type": "exec"}]}, "adapter a: command or argv is required. They are keys of"),
        ({"adapters": ["webhook"]}, "url or url_file is required. The flags are --webhook-url, --webhook-url-file; in the"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_named_as_they_are_written(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"tables": "t", **flags}, {}, None).check()
    assert message in str(caught.value)


def test_a_flag_stands_once_in_a_message() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"db": "postgresql://h/d", "tables": "t", "adapters": ["stdout"], "file_path": "x"}, {}, None).check()
    assert caught.value.message == "--file-path needs --adapter file"


# --- all at once, other names, and names of the manual

FAULTS = """\
slot_nam: a
tables: [orders, "a b"]
snapshot_hold_limit: soon
adapters:
  - {name: audit, type: file, pth: x}
  - {name: two, type: webhook, url: "https://h/", timeout: 0}
detector: mysql
"""


def test_everything_that_is_wrong_is_said_at_once_each_with_its_line(nowhere: Path) -> None:
    (nowhere / "pgcdc.yaml").write_text(FAULTS)
    with pytest.raises(ConfigErrors) as caught:
        load_config({"dlq": "fiel"}, {"PGCDC_SLOT_NAM": "x"}, None)
    said = [str(error) for error in caught.value.errors]
    for line, key, advice in [
        (1, "slot_nam", "Did you mean slot_name?"), (2, "tables[1]", "table"), (3, "snapshot_hold_limit", "6h"),
        (5, "adapters[0].pth", "Did you mean path?"), (6, "adapters[1].timeout", "greater than 0"),
        (7, "detector", "This detector is not built yet. Known detectors: wal, rate"),
    ]:  # fmt: skip
        assert any(f"pgcdc.yaml, line {line}: {key}: " in one and advice in one for one in said), (key, said)
    assert any(one.startswith("--dlq: ") and "Did you mean file?" in one for one in said)
    assert any(one.startswith("PGCDC_SLOT_NAM ") for one in said)
    assert len(said) == 8
    shown = CliRunner().invoke(app, ["listen", "--dlq", "fiel"])
    assert shown.exit_code == 2 and shown.output.count("error: ") == 7
    audit = "    5 |   - {name: audit, type: file, pth: ***\n      |                               ^\n"
    checked = CliRunner().invoke(app, ["validate", "--dlq", "fiel"])
    for excerpt in ("    3 | snapshot_hold_limit: soon\n      | ^\n", audit):
        assert excerpt in shown.stderr and excerpt in checked.stderr, shown.stderr


SHOWN = {  # Each with the line as it is shown, and what is below it
    "tables: [orders\nslot_name: x\n": ("    1 | tables: [orders", "      |         ^"),
    "webhook_headers:\n- name: s3cret: x\n": ("    2 | - name: ***", "      |            ^"),
    "tables:\n  - orders\n  - a: b: c\n": ("    3 |   - a: ***", "      |         ^"),
    "tables:\n  - orders: x\n  - b\n": ("    2 |   - orders: ***", "      |     ^"),
    "slot_name: x\n\ttables: a\n": ("    2 | →tables: a", "      | ^"),
    "state_dir: 'a\nonce: true\n": ("    1 | state_dir: 'a", "      |            ^"),
    "slot-name: @x\n": ("    1 | slot-name: @x", "      |            ^"),
    "slot_name: x\n  once: true\n": ("    2 |   once: true", "      |       ^"),
    "db: 'postgresql://app:s3cret@h/d\n": ("    1 | db: ***", "      |     ^"),
    "webhook_signing_secret: 's3cret\n  more s3cret\n": ("    1 | webhook_signing_secret: ***", ""),
    "webhook_headers:\n  a: @s3cret\n": ("    2 |   a: ***", "      |      ^"),
    "webhook_signing_secret:\n  - s3cret @\n  @s3cret\n": ("", ""),
    "max_batch_rows: many  # as many as there are\n": ("    1 | max_batch_rows: many  # as many as there are", ""),
}


@pytest.mark.parametrize("text", SHOWN)
def test_the_line_is_shown_with_a_caret_and_without_what_may_be_a_secret(nowhere: Path, text: str) -> None:
    (nowhere / "pgcdc.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config({"db": "postgresql://h/d"}, {}, None)
    line, caret = SHOWN[text]
    found = caught.value.excerpt.splitlines() or ["", ""]
    assert found[0] == line and found[1].startswith(caret), caught.value.excerpt
    assert "s3cret" not in str(caught.value)


def test_all_conflicts_are_said_at_once(nowhere: Path) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load_config({"toast_cache": True, "origin": "none", "bus_buffer": "5", "snapshot_table": "a"}, {}, None)
    said = [str(error) for error in caught.value.errors]
    for part in (
        "--snapshot-table needs",
        "--toast-cache",
        "--bus-buffer needs",
        "no database",
        "no tables are selected",
    ):
        assert any(part in one for one in said), (part, said)


def test_names_of_the_manual_that_we_renamed_mean_the_same(nowhere: Path) -> None:
    given = {"db": "postgresql://h/d", "tables": "t", "adapters": ["webhook"], "webhook_url": "https://h/"}
    (nowhere / "pgcdc.yaml").write_text("webhook_cb_failures: 7\n")
    config = load_config(given, {"PGCDC_WEBHOOK_RATE_BURST": "9"}, None)
    assert config.adapter_specs[0].delivery.cb_max_failures == 7
    assert config.adapter_specs[0].delivery.rate_limit_burst == 9
    (nowhere / "pgcdc.yaml").write_text("adapters:\n  - {name: a, type: noop, cb_failures: 3, rate_burst: 2}\n")
    spec = load_config({"db": "postgresql://h/d", "tables": "t"}, {}, None).adapter_specs[0]
    assert (spec.delivery.cb_max_failures, spec.delivery.rate_limit_burst) == (3, 2)
    (nowhere / "pgcdc.yaml").write_text("noop_cb_failures: x\n")
    with pytest.raises(ConfigError, match=r"^pgcdc.yaml, line 1: noop_cb_max_failures: "):
        load_config({"db": "postgresql://h/d", "tables": "t", "adapters": ["noop"]}, {}, None)
    (nowhere / "pgcdc.yaml").write_text("noop_cb_failures: 1\nnoop_cb_max_failures: 2\n")
    with pytest.raises(ConfigError, match=r"occurs twice. It is already set in line 1 as noop_cb_failures"):
        load_config({"db": "postgresql://h/d", "tables": "t", "adapters": ["noop"]}, {}, None)
    (nowhere / "pgcdc.yaml").unlink()
    both = {"PGCDC_NOOP_CB_FAILURES": "1", "PGCDC_NOOP_CB_MAX_FAILURES": "2"}
    with pytest.raises(ConfigError, match="another name of PGCDC_NOOP_CB_FAILURES, which is also set"):
        load_config({"db": "postgresql://h/d", "tables": "t", "adapters": ["noop"]}, both, None)
    shown = CliRunner().invoke(app, ["config", "show", "--help"])
    assert shown.exit_code == 0
    shown = CliRunner().invoke(app, ["validate", "--noop-cb-failures", "x", "--noop-rate-burst", "2"])
    assert "noop_cb_max_failures" in shown.output or "--noop-cb-max-failures" in shown.output


MANUAL = (
    "channel heartbeat-interval slot-lag-warn outbox-keep-processed outbox-poll-interval outbox-batch-size "
    "mysql-gtid mongodb-scope mongodb-full-document backpressure bp-warn-threshold bp-critical-threshold "
    "bp-max-throttle bp-poll-interval plugin-transform skip-validation ws-ping-interval kafka-brokers "
    "kafka-transactional-id kafka-encoding kafka-tls kafka-tls-ca-file schema-registry-url kafkaserver-partitions "
    "kafkaserver-checkpoint-db s3-bucket s3-format s3-flush-interval s3-flush-size "
    "embedding-columns embedding-api-url embedding-cb-failures embedding-cb-reset embedding-rate-limit "
    "embedding-rate-burst embedding-db view-query checkpoint-db snapshot-progress-db plugin-adapter dlq-plugin "
    "checkpoint-plugin metrics-addr skip-migrations "
)
"""The flags of the manual that there are not."""


def test_names_of_the_manual_that_are_not_built_get_advice_as_flags_and_as_keys(nowhere: Path) -> None:
    missing = [flag for flag in MANUAL.split() if flag.replace("-", "_") not in Config.model_fields]
    for flag in missing:
        key = flag.replace("-", "_")
        assert advise(flag) and "Did you mean" not in advise(flag)
        assert refuse(nowhere, f"{key}: x\n").advice == advise(key)
    for flag in missing[::6]:
        shown = CliRunner().invoke(app, ["listen", f"--{flag}", "x"])
        assert shown.exit_code == 2
        assert advise(flag) in " ".join(shown.output.split())
