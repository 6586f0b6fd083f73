"""Configuration: which layer wins, and errors that name the place and the key but never the password."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pgcdc.capture.control import CaptureOptions
from pgcdc.config import Config, load_config
from pgcdc.core.errors import ConfigError
from pgcdc.sink.file import FileOptions

DB = "postgresql://app:s3cret@localhost/shop"
MINIMAL = {"db": DB, "all_tables": True}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No pgcdc.yaml but the test's own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, text: str, name: str = "pgcdc.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


# --- layers


def test_flags_win_over_variables_over_file_over_defaults(tmp_path: Path) -> None:
    write(tmp_path, "slot_name: from_file\npublication: from_file\nmax_batch_rows: 1\n")
    environ = {"PGCDC_SLOT_NAME": "from_env", "PGCDC_PUBLICATION": "from_env"}
    config = load_config(MINIMAL | {"slot_name": "from_flag"}, environ, None)
    assert (config.slot_name, config.publication, config.max_batch_rows) == ("from_flag", "from_env", 1)
    assert config.spool_limit == Config.model_fields["spool_limit"].default


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("", "pgcdc"),
        ("file", "from_file"),
        ("env", "from_env"),
        ("flag", "from_flag"),
        ("file env", "from_env"),
        ("file flag", "from_flag"),
        ("env flag", "from_flag"),
    ],
)
def test_precedence(tmp_path: Path, layers: str, expected: str) -> None:
    if "file" in layers:
        write(tmp_path, "slot_name: from_file\n")
    environ = {"PGCDC_SLOT_NAME": "from_env"} if "env" in layers else {}
    flags = MINIMAL | ({"slot_name": "from_flag"} if "flag" in layers else {})
    assert load_config(flags, environ, None).slot_name == expected


def test_false_flag_wins_over_true_in_the_file(tmp_path: Path) -> None:
    write(tmp_path, "fail_fast: true\n")
    assert load_config(MINIMAL | {"fail_fast": False}, {}, None).fail_fast is False


def test_empty_variable_is_as_if_not_set(tmp_path: Path) -> None:
    write(tmp_path, "slot_name: from_file\n")
    assert load_config(MINIMAL, {"PGCDC_SLOT_NAME": ""}, None).slot_name == "from_file"


def test_everything_can_come_from_variables() -> None:
    environ = {
        "PGCDC_DB": DB,
        "PGCDC_TABLES": "a, b ,sales.c,",
        "PGCDC_ADAPTERS": "stdout,file",
        "PGCDC_FILE_PATH": "out.jsonl",
        "PGCDC_SPOOL_LIMIT": "64MB",
        "PGCDC_FAIL_FAST": "true",
        "PGCDC_MAX_BATCH_ROWS": "7",
    }
    config = load_config({}, environ, None)
    assert (config.db, config.tables, config.adapters) == (DB, ("a", "b", "sales.c"), ("stdout", "file"))
    assert (config.spool_limit, config.max_batch_rows) == (64 << 20, 7)
    assert config.adapter_specs[1].options == FileOptions(path="out.jsonl")
    assert config.fail_fast is True


def test_other_variables_are_not_ours() -> None:
    load_config(MINIMAL, {"PGCDC_WATCH_PID": "1", "PGCDC_NONSENSE": "x", "PATH": "/bin"}, None)


def test_file_that_is_named_is_read_instead_of_the_usual_one(tmp_path: Path) -> None:
    write(tmp_path, "slot_name: usual\n")
    other = write(tmp_path, "slot_name: other\n", "other.yaml")
    assert load_config(MINIMAL, {}, other).slot_name == "other"


def test_keys_may_be_written_like_flags_and_lists_as_lists(tmp_path: Path) -> None:
    write(tmp_path, "db: postgresql://localhost/shop\nslot-name: orders\ntables: [a, b]\nspool-limit: 2097152\n")
    config = load_config({}, {}, None)
    assert (config.slot_name, config.tables, config.spool_limit) == ("orders", ("a", "b"), 2 << 20)


def test_empty_file_is_no_file(tmp_path: Path) -> None:
    write(tmp_path, "# nothing yet\n")
    assert load_config(MINIMAL, {}, None).slot_name == "pgcdc"


def test_source_options_carry_every_value() -> None:
    flags = {
        "db": DB, "slot_name": "s", "publication": "p", "tables": ("a",), "state_dir": Path("/x"),
        "spool_limit": 2 << 20, "temporary_slot": True, "start_from": "slot", "fail_fast": True,
    }  # fmt: skip
    config = load_config(flags, {}, None)
    given = {**config.source_options().model_dump(), **config.part(CaptureOptions).model_dump()}
    assert {name: given[name] for name in flags} == flags


# --- errors


FILE_ERRORS = {
    "unknown_key": ("all_tables: true\n\nslot: orders\n", ["pgcdc.yaml, line 3: slot", "unknown key", "slot_name"]),
    "unknown_key_with_dash": ("slott-name: x\n", ["line 1: slott_name", "unknown key"]),
    "bad_number": ("# c\nmax_batch_rows: many\n", ["pgcdc.yaml, line 2: max_batch_rows", "integer", "'many'"]),
    "too_small": ("max_batch_rows: 0\n", ["line 1: max_batch_rows", "greater than or equal to 1"]),
    "bad_bytes": ("spool_limit: lots\n", ["line 1: spool_limit", "'lots'"]),
    "spool_too_small": ("spool_limit: 1kB\n", ["line 1: spool_limit", "1048576"]),
    "unknown_adapter": ("adapters: [stdout, kafka]\n", ["line 1: adapters[1]", "'kafka'", "exec, file"]),
    "bad_flag": ("fail_fast: maybe\n", ["line 1: fail_fast", "'maybe'"]),
    "mode_that_does_not_exist": ("snapshot_mode: sometimes\n", ["line 1: snapshot_mode", "'never'"]),
    "bad_time": ("snapshot_hold_limit: soon\n", ["line 1: snapshot_hold_limit", "30m or 6h"]),
    "not_a_mapping": ("- a\n- b\n", ["pgcdc.yaml, line 1"]),
    "not_yaml": ("db: x\nslot_name: [a\n", ["pgcdc.yaml, line 2: the list that begins here does not end"]),
    "tab": ("db: x\n\tslot_name: a\n", ["pgcdc.yaml, line 2: there is a tab", "spaces"]),
    "wrong_type": ("slot_name: [a]\n", ["line 1: slot_name", "string"]),
}


@pytest.mark.parametrize(("text", "named"), FILE_ERRORS.values(), ids=FILE_ERRORS.keys())
def test_error_in_the_file_names_file_line_and_key(tmp_path: Path, text: str, named: list[str]) -> None:
    write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config({}, {}, None)
    assert [part for part in named if part not in str(caught.value)] == []
    assert caught.value.advice


def test_error_in_a_variable_names_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"^PGCDC_MAX_BATCH_ROWS: .*'many'"):
        load_config(MINIMAL, {"PGCDC_MAX_BATCH_ROWS": "many"}, None)


@pytest.mark.parametrize(("key", "flag"), [("max_batch_rows", "--max-batch-rows"), ("adapters", "--adapter")])
def test_error_in_a_flag_names_the_flag(key: str, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}: "):
        load_config(MINIMAL | {key: ("many",)}, {}, None)


def test_missing_file_is_an_error_only_if_it_was_named(tmp_path: Path) -> None:
    load_config(MINIMAL, {}, None)
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read: No such file"):
        load_config(MINIMAL, {}, tmp_path / "nowhere.yaml")


def test_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pgcdc.yaml").write_bytes(b"db: \xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config({}, {}, None)


TOGETHER: dict[str, tuple[dict[str, Any], str]] = {
    "no_database": ({"all_tables": True}, "no database"),
    "no_tables": ({"db": DB}, "select"),
    "tables_twice": ({"db": DB, "tables": ("a",), "all_tables": True}, "select"),
    "no_adapter": (MINIMAL | {"adapters": ()}, "no adapter"),
    "adapter_twice": (MINIMAL | {"adapters": ("stdout", "stdout")}, "twice"),
    "file_without_path": (MINIMAL | {"adapters": ("file",)}, "--file-path"),
    "path_without_file": (MINIMAL | {"file_path": Path("x.jsonl")}, "--file-path"),
    "path_without_folder": (MINIMAL | {"adapters": ("file",), "file_path": Path("no/x.jsonl")}, "does not exist"),
    "temporary_slot_with_file": (
        MINIMAL | {"adapters": ("file",), "file_path": Path("x.jsonl"), "temporary_slot": True},
        "--temporary-slot",
    ),
}


@pytest.mark.parametrize(("flags", "named"), TOGETHER.values(), ids=TOGETHER.keys())
def test_what_cannot_go_together_is_refused_with_advice(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(flags, {}, None)
    assert named in str(caught.value)
    assert caught.value.advice


SECRETS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "file_with_another_error": (f"db: {DB}\nmax_batch_rows: many\n", {}, {}),
    "file_with_a_list": (f"db: [{DB}]\n", {}, {}),
    "file_with_a_mapping": (f"db: {{url: '{DB}'}}\n", {}, {}),
    "file_with_an_unknown_key": (f"dbs: {DB}\n", {}, {}),
    "file_that_is_one_text": (f"{DB}\n", {}, {}),
    "file_with_a_broken_line": (f"db: '{DB}\n", {}, {}),
    "file_with_a_broken_url": ("db: %s3cret\n", {}, {}),
    "variable_with_another_error": ("", {"PGCDC_DB": DB, "PGCDC_MAX_BATCH_ROWS": "many"}, {}),
    "flag_with_nothing_to_capture": ("", {}, {"db": DB}),
    "flag_of_a_wrong_type": ("", {}, {"db": (DB,)}),
}


@pytest.mark.parametrize(("text", "environ", "flags"), SECRETS.values(), ids=SECRETS.keys())
def test_password_never_stands_in_an_error(
    tmp_path: Path, text: str, environ: dict[str, str], flags: dict[str, Any]
) -> None:
    write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(flags, environ, None)
    errors = getattr(caught.value, "errors", (caught.value,))
    assert "s3cret" not in " ".join([str(caught.value), *(one.excerpt for one in errors)])
    assert caught.value.__cause__ is None or "s3cret" not in str(caught.value.__cause__)


# --- bytes
