"""What a configuration becomes: adapters, transforms, layers by name, secrets, and the files that are made of the model."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from pgcdc.cli.main import app
from pgcdc.config import Config, load_config
from pgcdc.config.documents import effective, json_schema, make_template, show_yaml, write_template
from pgcdc.config.layers import load
from pgcdc.core.errors import ConfigError
from pgcdc.core.settings import setting, setting_of
from pgcdc.postgres.database import parse_url
from pgcdc.sink.file import FileOptions
from pgcdc.sink.spec import ADAPTERS, SinkOptions, make_sink
from pgcdc.transform.specs import CloudEventsSpec, DebeziumSpec, DropColumnsSpec, FilterSpec

URL = "postgresql://localhost/shop"
MINIMAL = {"db": URL, "all_tables": True}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(text: str, flags: dict[str, Any] = {}, environ: dict[str, str] = {}) -> Config:
    Path("pgcdc.yaml").write_text(text)
    return load_config(MINIMAL | flags, environ, None)


# --- adapters


def test_two_adapters_of_one_type_have_their_own_options() -> None:
    config = read(
        "adapters:\n  - file\n  - {name: audit, type: file, path: audit.jsonl, timeout: 3, rate_limit: 10}\n  - name: noop\n"
        "file_path: events.jsonl\nfile_max_retries: 9\n"
    )
    first, second, third = config.adapter_specs
    assert config.adapter_names == ("file", "audit", "noop") and third.type == "noop"
    assert (first.options, second.options) == (
        FileOptions(path="events.jsonl"),
        FileOptions(path="audit.jsonl"),
    )
    assert (first.delivery.max_retries, second.delivery.max_retries) == (9, 5)
    assert (second.delivery.timeout, second.delivery.rate_limit, first.delivery.timeout) == (3, 10, 30)


def test_every_adapter_makes_its_sink_under_its_name(tmp_path: Path) -> None:
    config = read("adapters: [stdout, {name: a, type: noop}, {name: b, type: file, path: x}]\n")
    made = [(spec.name, type(make_sink(spec)).__name__) for spec in config.adapter_specs]
    assert made == [("stdout", "StdoutSink"), ("a", "NoopSink"), ("b", "FileSink")]


def test_routes_and_priorities_are_of_one_adapter_each() -> None:
    config = read(
        "adapters: [stdout, {name: a, type: noop, routes: [x], priority: critical}, {name: b, type: noop}]\n"
        "routes: {stdout: 'orders, sales.*, other:*'}\nadapter_priority: {b: best-effort}\n"
    )
    assert [spec.routes for spec in config.adapter_specs] == [
        ("pgcdc:orders", "pgcdc:sales.*", "other:*"), ("pgcdc:x",), (),
    ]  # fmt: skip
    assert [spec.priority for spec in config.adapter_specs] == ["normal", "critical", "best-effort"]


def test_a_flag_for_one_adapter_leaves_the_others_as_the_file_has_them() -> None:
    text = "adapters: [stdout, noop]\nroutes: {stdout: [a], noop: [b]}\nadapter_priority: {stdout: critical}\n"
    flags = {"routes": ["noop=c,d", "noop=e"], "adapter_priority": ["noop=best-effort"]}
    config = read(text, flags)
    assert dict(config.routes) == {"stdout": ("pgcdc:a",), "noop": ("pgcdc:c", "pgcdc:d", "pgcdc:e")}
    assert dict(config.adapter_priority) == {"stdout": "critical", "noop": "best-effort"}
    by_variable = read(text, {}, {"PGCDC_ROUTES": "noop=c; stdout=x,y"})
    assert dict(by_variable.routes) == {"stdout": ("pgcdc:x", "pgcdc:y"), "noop": ("pgcdc:c",)}


def test_a_flag_wins_over_the_route_in_an_entry() -> None:
    config = read("adapters: [{name: a, type: noop, routes: [x], priority: critical}]\n", {"routes": ["a=y"]})
    assert config.adapter_specs[0].routes == ("pgcdc:y",)


def test_an_error_in_a_merged_setting_names_who_said_it() -> None:
    text = "adapters: [stdout, noop]\nroutes:\n  noop: [b]\n"
    with pytest.raises(ConfigError, match=r"^--route: routes.nop: adapter nop does not exist. Did you mean noop"):
        read(text, {"routes": ["nop=c"]})
    with pytest.raises(ConfigError, match=r"^pgcdc.yaml, line 3: routes.nop: adapter nop does not exist"):
        read("adapters: [stdout, noop]\nroutes:\n  nop: [b]\n", {"routes": ["noop=c"]})


def test_a_database_that_is_not_said_otherwise_is_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cascade: adapters with a database of their own will have a key for it."""
    from pgcdc.config import adapters

    class Options(SinkOptions):
        db: str | None = setting(None, "the database", cascade="db")

    monkeypatch.setitem(ADAPTERS._loaded, "pg_table", Options)
    entry = adapters._make_models()[0]["pg_table"]
    for given, expected in (({}, URL), ({"db": "postgresql://other/x"}, "postgresql://other/x")):
        item = entry.model_validate({"name": "t", "type": "pg_table", **given})
        config = load_config(MINIMAL, {}, None).model_copy(update={"adapters": (item,)})
        assert config.adapter_specs[0].options == Options(db=expected)


# --- transforms


def test_transforms_come_in_the_order_of_flags_then_global_then_the_adapter_s() -> None:
    config = read(
        "adapters: [stdout, noop]\ntransforms:\n  global: [{type: drop_columns, columns: [b]}]\n"
        "  adapter: {noop: [{type: rename_fields, fields: {c: d}}]}\n",
        {"drop_columns": "a", "filter_operations": "insert,UPDATE", "debezium_envelope": True},
    )
    assert [type(one) for one in config.global_transforms] == [DropColumnsSpec, FilterSpec, DropColumnsSpec]
    assert config.global_transforms[0].columns == ("a",) and config.global_transforms[2].columns == ("b",)
    assert config.global_transforms[1].operations == ("INSERT", "UPDATE")
    assert [[one.type for one in spec.transforms] for spec in config.adapter_specs] == [
        ["debezium"], ["rename_fields", "debezium"],
    ]  # fmt: skip


def test_an_envelope_may_be_followed_by_a_filter_of_operations_only() -> None:
    config = read("transforms:\n  global: [{type: debezium}, {type: filter, operations: [INSERT]}]\n")
    assert isinstance(config.global_transforms[0], DebeziumSpec)
    assert read("", {"cloudevents_envelope": True}).adapter_specs[0].transforms == (CloudEventsSpec.model_validate({}),)
    with pytest.raises(ConfigError, match="filter comes after debezium"):
        read("transforms:\n  global: [{type: debezium}, {type: filter, where: 'true'}]\n")


# --- flags that mean what we always do


def test_names_of_the_manual_are_accepted() -> None:
    config = read(
        "", {"persistent_slot": True, "cooperative_checkpoint": True, "snapshot_first": True, "toast_cache": True}
    )
    assert config.effective_snapshot_mode == "initial" and config.source_options().effective_toast == "cache"
    alone = {"db": URL, "tables": "orders", "snapshot_first": True, "snapshot_table": "orders"}
    assert load_config(alone, {}, None).effective_snapshot_mode == "initial"


def test_of_two_ways_to_say_a_thing_the_higher_layer_holds() -> None:
    assert read("snapshot_mode: never\n", {"snapshot_first": True}).effective_snapshot_mode == "initial"
    assert read("toast_cache: true\n", {"toast": "full"}).source_options().effective_toast == "full"


# --- secrets


SECRET = "s3cret-pass"


def load_secret(text: str, environ: dict[str, str] = {}, flags: dict[str, Any] = {}) -> Config:
    Path("pgcdc.yaml").write_text(text + "\nall_tables: true\n")
    return load_config(flags, environ, None)


def test_password_from_a_file_from_a_variable_and_url_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text(SECRET + "\n")
    (tmp_path / "url").write_text(f"postgresql://app:{SECRET}@h/shop\n")
    ways = [
        load_secret("db: postgresql://app@h/shop\npassword_file: password"),
        load_secret("db: postgresql://app:${PW}@h/shop", {"PW": SECRET}),
        load_secret("db: ${URL}", {"URL": f"postgresql://app:{SECRET}@h/shop"}),
        load_secret("db: ${NOT_SET:-postgresql://app@h/shop}", {"PGCDC_PASSWORD_FILE": "password"}),
        load_secret("db_file: url"),
        load_secret("", {"PGCDC_DB_FILE": "url"}),
        load_secret("db_file: nowhere", {}, {"db": f"postgresql://app:{SECRET}@h/shop"}),
    ]
    for config in ways:
        assert parse_url(config.db) == {"user": "app", "password": SECRET, "host": "h", "dbname": "shop"}


def test_variables_stand_for_any_value_and_can_be_written_plainly() -> None:
    config = read(
        "slot_name: ${SLOT}_${N:-1}\nmax_batch_rows: ${ROWS}\nfail_fast: ${FAST}\ntables: ${TABLES}\n"
        "row_filters: {a: \"x = '$${PLAIN}'\"}\n",
        {"all_tables": False},
        {"SLOT": "s", "ROWS": "7", "FAST": "true", "TABLES": "a,b"},
    )
    assert (config.slot_name, config.max_batch_rows, config.fail_fast, config.tables) == ("s_1", 7, True, ("a", "b"))
    assert config.row_filters == ("a=x = '${PLAIN}'",)


SECRET_ERRORS = {
    "literal": f"db: postgresql://app:{SECRET}@h/shop",
    "literal default": f"db: postgresql://app:${{NONE:-{SECRET}}}@h/shop",
    "literal dsn": f"db: host=h password={SECRET}",
    "two passwords": "db: postgresql://app:${PW}@h/shop\npassword_file: password",
    "no file": "db: postgresql://app@h/shop\npassword_file: nowhere",
    "empty file": "db: postgresql://app@h/shop\npassword_file: empty",
    "long file": "db: postgresql://app@h/shop\npassword_file: long",
    "folder": "db: postgresql://app@h/shop\npassword_file: .",
    "binary": "db: postgresql://app@h/shop\npassword_file: binary",
    "both": "db: postgresql://app:${PW}@h/shop\ndb_file: url",
    "bad url in a file": "db_file: bad_url",
    "bad url": "db: postgresql://app:${PW}@h:notaport/shop",
    "url as a file": f"db_file: postgresql://app:{SECRET}@h/shop",
    "in another key": f"slot_name: postgresql://app:{SECRET}@h/shop",
    "in a table": "db: postgresql://h/x\nsignal_table: ${PW}.x.y",
    "in a list": f"db: postgresql://h/x\ntables: [a, 'b://u:{SECRET}@h']",
    "as an adapter": "db: postgresql://h/x\nadapters: ['${PW}']",
    "as a type": "db: postgresql://h/x\nadapters: [{name: a, type: '${PW}'}]",
    "as a choice": "db: postgresql://h/x\ntoast: ${PW}",
    "as a path": "db: postgresql://h/x\nadapters: [{name: a, type: file, path: '${PW}/x'}]",
    "key of a mapping": f"password: {SECRET}",
}


@pytest.mark.parametrize("case", SECRET_ERRORS)
def test_a_secret_is_refused_without_being_shown(tmp_path: Path, case: str) -> None:
    (tmp_path / "password").write_text(SECRET)
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "long").write_text(f"{SECRET}\n{SECRET}\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "url").write_text(f"postgresql://app:{SECRET}@h/shop")
    (tmp_path / "bad_url").write_text(f"postgresql://app:{SECRET}@h:x/shop")
    with pytest.raises(ConfigError) as caught:
        load_secret(SECRET_ERRORS[case], {"PW": SECRET})
    assert SECRET not in str(caught.value) and SECRET not in caught.value.excerpt
    assert caught.value.__cause__ is None
    assert caught.value.message.startswith("pgcdc.yaml, line "), caught.value.message
    assert caught.value.advice


def test_show_has_the_origin_of_each_value_and_no_secret(tmp_path: Path) -> None:
    (tmp_path / "password").write_text(SECRET)
    Path("pgcdc.yaml").write_text(
        "db: postgresql://app@h/shop\npassword_file: password\nslot_name: ${SLOT}\n"
        "adapters: [stdout, {name: a, type: noop}]\nroutes: {stdout: [x], a: [y]}\nstdout_timeout: 5\n"
    )
    environ = {"PGCDC_TABLES": "orders", "SLOT": SECRET.replace("-", "_")}
    loaded = load({"max_batch_rows": "7", "routes": ["a=z"], "snapshot_first": True}, environ, None)
    shown = effective(loaded)
    assert shown["db"] == ("postgresql://app@h/shop", "pgcdc.yaml, line 1")
    assert shown["slot_name"] == ("${SLOT}", "pgcdc.yaml, line 3")
    assert shown["tables"] == (["orders"], "PGCDC_TABLES")
    assert shown["max_batch_rows"] == (7, "--max-batch-rows")
    assert shown["adapters"] == (["stdout", {"name": "a", "type": "noop"}], "pgcdc.yaml, line 4")
    assert shown["routes"][1] == "pgcdc.yaml, line 5, --route"
    assert shown["stdout_timeout"] == (5.0, "pgcdc.yaml, line 6")
    assert shown["snapshot_mode"] == ("initial", "--snapshot-first")
    assert shown["bus_mode"] == ("reliable", "default")
    assert "noop_timeout" not in shown and "publication" not in shown
    text = show_yaml(loaded)
    assert SECRET not in text and SECRET.replace("-", "_") not in text
    assert re.search(r"^max_batch_rows: 7 +# --max-batch-rows$", text, re.MULTILINE)


def test_secrets_are_not_in_the_repr_of_a_configuration() -> None:
    flags = {"db": f"postgresql://app:{SECRET}@h/d", "webhook_url": "https://h/", "webhook_signing_key": SECRET}
    named = {"name": "b", "type": "webhook", "url": "https://b/", "signing_key": SECRET}
    config = load({**flags, "all_tables": True, "adapters": ["webhook", named]}, {}, None).config
    assert SECRET not in repr(config) and len(config.adapter_specs) == 2


def test_what_show_prints_can_be_read_again() -> None:
    first = read(
        "adapters: [stdout, {name: a, type: file, path: x, timeout: 3}]\nrow_filters: {a: \"x = 'ü: #1'\"}\n"
        "tables: [a, b]\ntransforms:\n  global: [{type: sql, set: {total: \"row['a'] * 2\"}}]\n"
        "  adapter: {a: [{type: mask, columns: [c]}]}\nspool_limit: 64MB\nsnapshot_hold_limit: 30m\n",
        {"all_tables": False},
    )
    loaded = load({"db": URL}, {}, Path("pgcdc.yaml"))
    Path("again.yaml").write_text(show_yaml(loaded))
    again = load_config({}, {}, Path("again.yaml"))
    assert again.adapter_specs == first.adapter_specs
    settled = {"snapshot_mode"}
    assert again.model_dump(exclude=settled) == first.model_dump(exclude=settled)


# --- commands


def invoke(*arguments: str, **environ: str | None) -> tuple[int, str, str]:
    return invoke_any("config", *arguments, **environ)


def invoke_any(*arguments: str, **environ: str | None) -> tuple[int, str, str]:
    quiet = {"COLUMNS": "200", "NO_COLOR": "1", "PGCDC_DB": None}
    result = CliRunner().invoke(app, arguments, env={**quiet, **environ})
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["status"], ["reload"], ["sentinel"], ["consumer", "list"], ["consumer", "forget", "main"], ["dlq", "list"],
        ["snapshot", "--pause", "x"], ["resync", "--db", "postgresql://u@127.0.0.1:1/x"],
    ],
    ids=lambda command: command[0],
)  # fmt: skip
def test_every_command_finds_the_state_directory_of_the_file(tmp_path: Path, command: list[str]) -> None:
    """The file that is named, or pgcdc.yaml; the variable and the flag win over both."""
    text = "max-batch-rows: 5\nstate-dir: {}\n"
    for name in ("pgcdc", "other"):
        (tmp_path / f"{name}.yaml").write_text(text.format(f"of_{name}"))
    for name, flags, environ in (
        ("of_pgcdc", [], {}),
        ("of_other", ["--config", "other.yaml"], {}),
        ("of_variable", ["--config", "other.yaml"], {"PGCDC_STATE_DIR": "of_variable"}),
        ("of_flag", ["--config", "other.yaml", "--state-dir", "of_flag"], {"PGCDC_STATE_DIR": "of_variable"}),
    ):
        assert name in invoke_any(*command, *flags, **environ)[2]


def test_commands_that_need_the_state_directory_read_nothing_else_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "pgcdc.yaml").write_text("db: ${NOT_SET}\nmax_batch_rows: many\nstate_dir: ${WHERE:-here}\n")
    assert "here is not a state directory" in invoke_any("status")[2]


def test_init_writes_a_file_that_loads_and_does_not_overwrite(tmp_path: Path) -> None:
    assert invoke("init")[0] == 0
    written = (tmp_path / "pgcdc.yaml").read_text()
    assert load_config(MINIMAL, {}, None).adapters == ("stdout",)
    (tmp_path / "pgcdc.yaml").write_text("mine: true\n")
    code, _, error = invoke("init")
    assert code == 2 and error.startswith("error: pgcdc.yaml exists.")
    assert (tmp_path / "pgcdc.yaml").read_text() == "mine: true\n"
    assert invoke("init", "--config", "other.yaml")[0] == 0
    assert (tmp_path / "other.yaml").read_text() == written
    assert not stat.S_IMODE((tmp_path / "other.yaml").stat().st_mode) & stat.S_IXUSR
    assert invoke("init", "--config", "no/such/folder.yaml")[0] == 2


def test_init_has_every_setting_and_each_of_its_lines_is_valid(tmp_path: Path) -> None:
    text = make_template()
    settings = {key: setting_of(key, field) for key, field in Config.model_fields.items()}
    lines = re.findall(r"^(?:# )?([a-z][a-z0-9_]*): (.+)$", text, re.MULTILINE)
    assert {key for key, _ in lines} >= {key for key, one in settings.items() if not one.is_hidden} - {"transforms"}
    for key, value in lines:
        (tmp_path / "one.yaml").write_text(f"{key}: {value}\n")
        if key not in ("db_file", "password_file", "dlq_db_file"):
            load({}, {}, tmp_path / "one.yaml")
    block = "".join(
        line[2:] for line in re.findall(r"^# (?:transforms:|  ).*\n", text, re.MULTILINE) if "$schema" not in line
    )
    (tmp_path / "one.yaml").write_text(block[block.index("transforms:") :])
    assert len(load_config(MINIMAL, {}, tmp_path / "one.yaml").global_transforms) == 1


def test_template_is_not_written_over_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.yaml").symlink_to(tmp_path / "target.yaml")
    with pytest.raises(ConfigError, match="exists"):
        write_template(tmp_path / "link.yaml")
    assert not (tmp_path / "target.yaml").exists()


def test_show_command_prints_and_then_says_what_is_wrong() -> None:
    code, out, error = invoke("show", "--slot-name", "s", PGCDC_DB=f"postgresql://app:{SECRET}@h/x")
    assert code == 2 and "slot_name: s" in out and "no tables are selected" in error
    assert SECRET not in out + error and "postgresql://app:***@h/x" in out
    code, out, _ = invoke("show", "--json", "--all-tables", PGCDC_DB=URL)
    assert code == 0 and json.loads(out)["all_tables"] == {"value": True, "origin": "--all-tables"}


# --- the schema


def test_schema_command_prints_a_schema_that_editors_can_use() -> None:
    code, out, _ = invoke("schema")
    schema = json.loads(out)
    assert code == 0 and schema == json.loads(json.dumps(json_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    assert set(schema["properties"]) == set(Config.model_fields)
    assert all(one.get("description") for one in schema["properties"].values())
    assert "setting" not in re.findall(r'"(\w+)":', out)


VALID = [
    "tables: [a, b]\nspool_limit: 1GB\nsnapshot_hold_limit: 6h\nrow_filters: {a: x > 1}\ncolumns: {a: [b]}\n",
    "adapters: [stdout, {name: a, type: file, path: x, timeout: '${T}', priority: critical}]\nroutes: {a: [b], stdout: c}\n",
    "max_batch_rows: ${ROWS}\nfail_fast: ${FAST}\ntoast: ${TOAST}\nbus_mode: fast\nstdout_timeout: ${T}\n",
    "transforms:\n  global: [{type: mask, columns: [a], mode: hash, key_env: K}]\n  adapter: {stdout: [{type: debezium}]}\n",
    make_template(),
    (Path(__file__).parents[2] / "examples" / "pgcdc.yaml").read_text(),
    (Path(__file__).parents[2] / "examples" / "pipeline.yaml").read_text(),
]
INVALID = [
    "slot: a\n",
    "max_batch_rows: many\n",
    "max_batch_rows: 0\n",
    "toast: sometimes\n",
    "adapters: [kafka]\n",
    "adapters: [{name: a, type: file}]\n",
    "adapters: [{name: a, type: file, path: x, pth: y}]\n",
    "transforms: {global: [{type: dorp}]}\n",
    "transforms: {gobal: []}\n",
    "adapter_priority: {a: high}\n",
    "stdout_timeout: 0\n",
]


@pytest.mark.parametrize("text", VALID)
def test_schema_takes_what_is_right(text: str) -> None:
    jsonschema.validate(yaml.safe_load(text), json_schema())


@pytest.mark.parametrize("text", INVALID)
def test_schema_refuses_what_is_wrong(text: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text), json_schema())
