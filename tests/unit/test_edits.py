"""Simple transforms on column buffers: the same as an obvious implementation makes of the events one by one."""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from event_streams import ORDERS, SCHEMA, SEED, START, Change, Transaction, expected_events, spooled, streams
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transform_cases import KEY, KEY_VARIABLE, simple_chains, transformed
from wire import UNCHANGED, encode_message, encode_truncate

from pgcdc.core.errors import ConfigError, TransformError
from pgcdc.core.relation import Column, Relation, ShapeChange
from pgcdc.event import edits, lines
from pgcdc.event.batch import Batch, split_forms
from pgcdc.event.edits import SimpleChain, dump_chains, full_pattern, parse_chains, without_hidden
from pgcdc.event.events import BLOCKS, block_schema, drop_unwanted, event_batch
from pgcdc.event.forms import Form, form_column
from pgcdc.event.frame import EventOptions
from pgcdc.sink.stdout import Pretty
from pgcdc.source.postgres.wire.assemble import Assembler
from pgcdc.spool.reader import SpoolReader
from pgcdc.spool.writer import SpoolWriter
from pgcdc.transform import (
    debezium_envelope,
    drop_columns,
    filter,
    mask,
    python,
    rename_fields,
    sql,
)
from pgcdc.transform.program import AskProgram, BlockProgram, ColumnProgram, compile_chains
from pgcdc.transform.specs import Chain, missing_columns
from pgcdc.transform.steps import call_all


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)


def lines_of(reader: SpoolReader, chains: list[Chain], options: EventOptions = EventOptions()) -> list[list[Any]]:  # noqa: B008
    """For each chain the line of each event, or None."""
    program = compile_chains(chains)
    pushed = parse_chains(program.source_options().get("_chains", ""))
    slices = reader.slices(START, reader.end)
    schema = block_schema(pushed)
    batch = event_batch(slices, reader.relations(), SEED, schema, options, (), pushed) if slices else None
    if batch is None:
        return [[] for _ in chains]
    batch.validate(full=True)
    assert isinstance(program, BlockProgram)
    columns = [list(column.to_pylist()) for column in batch.columns[1:]]
    return [columns[number] for number in program.of_chain] if pushed else columns  # those that mean the same are one


@settings(max_examples=150)
@given(streams(), st.lists(simple_chains(), min_size=1, max_size=3, unique_by=repr), st.integers(1, 7))
def test_lines_are_those_of_the_obvious_implementation(
    transactions: list[Transaction], chains: list[Chain], seal_rows: int
) -> None:
    events = expected_events(transactions)
    with spooled(transactions, seal_rows, 2) as reader, pytest.MonkeyPatch.context() as patch:
        if any(transformed(event, chain) is TransformError for chain in chains for event in events):
            with pytest.raises(TransformError, match="the name"):
                lines_of(reader, chains)
            return
        try:
            compiled = lines_of(reader, chains)
        except TransformError:  # an event of the table does not have the other column, but the table has
            return
        patch.setattr(lines, "_renderer", lambda: lines.render_python)
        assert lines_of(reader, chains) == compiled
    found = [[line and json.loads(line) for line in column] for column in compiled]
    if all(not one.routes and not one.transforms for one in chains):
        found *= len(chains)
    assert found == [[transformed(event, chain) for event in events] for chain in chains]
    order = [[line and list(line["payload"]["row"] or ()) for line in column] for column in found]
    assert order == [
        [line and list(line["payload"]["row"] or ()) for line in (transformed(event, chain) for event in events)]
        for chain in chains
    ]


CHANGES = (
    Change(ORDERS, "INSERT", ("1", "a@b.c", "2.50")),
    Change(ORDERS, "UPDATE", ("1", UNCHANGED, None), ("1", "old", "9"), "O"),
    Change(ORDERS, "TRUNCATE"),
    Change(ORDERS, "DELETE", None, ("1", None, None), "K"),
)


def payloads(*specs: dict[str, Any], routes: tuple[str, ...] = ()) -> list[dict[str, Any] | None]:
    with spooled([Transaction(110, CHANGES)]) as reader:
        (found,) = lines_of(reader, [Chain(specs, routes)])
    return [line and json.loads(line)["payload"] for line in found]


def test_drop_leaves_columns_out_of_row_old_and_unchanged() -> None:
    insert, update, truncate, delete = payloads({"type": "drop_columns", "columns": ["note"]})
    assert insert is not None and insert["row"] == {"id": "1", "total": "2.50"}
    assert update == {
        "op": "UPDATE",
        "schema": "public",
        "table": "orders",
        "row": {"id": "1", "total": None},
        "old": {"id": "1", "total": "9"},
    }
    assert truncate is not None and truncate["row"] is None
    assert delete is not None and delete["row"] == {"id": "1"}


def test_rename_follows_into_old_and_unchanged_and_may_swap() -> None:
    insert, update, *_ = payloads({"type": "rename_fields", "fields": {"note": "total", "total": "note"}})
    assert insert is not None and insert["row"] == {"id": "1", "total": "a@b.c", "note": "2.50"}
    assert update is not None and update["_unchanged_toast_columns"] == ["total"]
    assert update["old"] == {"id": "1", "total": "old", "note": "9"}


def test_rename_onto_a_column_that_the_table_has_is_an_error() -> None:
    with pytest.raises(TransformError, match=r"two columns of table public\.orders the name total"):
        payloads({"type": "rename_fields", "fields": {"note": "total"}})
    dropped = payloads(
        {"type": "drop_columns", "columns": ["total"]}, {"type": "rename_fields", "fields": {"note": "total"}}
    )
    assert dropped[0] is not None and dropped[0]["row"] == {"id": "1", "total": "a@b.c"}
    elsewhere = payloads({"type": "rename_fields", "fields": {"note": "total"}}, routes=("items",))
    assert elsewhere == [None] * 4, "a table that the chain does not have cannot fail"


def test_masked_null_stays_null_and_masks_follow_each_other() -> None:
    steps = [{"type": "mask", "columns": ["total"], "mode": mode} for mode in ("zero", "hash")]
    insert, update, *_ = payloads(*steps)
    assert insert is not None and insert["row"]["total"] == hmac.new(KEY.encode(), b"0", hashlib.sha256).hexdigest()
    assert update is not None and update["row"]["total"] is None and update["old"]["total"] == insert["row"]["total"]


@given(st.lists(st.none() | st.text(max_size=100)), st.binary(max_size=100), st.integers(0, 5))
@example(["x" * 64], b"k" * 65, 0)
def test_hmac_is_that_of_the_standard_library(values: list[str | None], key: bytes, skipped: int) -> None:
    column = pa.array(values, pa.string()).slice(skipped)
    expected = [None if one is None else hmac.digest(key, one.encode(), "sha256").hex() for one in column.to_pylist()]
    assert edits.hmac_texts(column, key).to_pylist() == expected


ZEROS = {
    "0": ["17", "-2.50", "1e-7", "NaN", "Infinity", ".5", "7."],
    "f": ["t", "f"],
    "1970-01-01": ["2026-11-16", "0044-03-15 BC", "infinity"],
    "1970-01-01 00:00:00": ["2026-11-16 00:46:06", "2026-11-16 00:46:06.25 BC"],
    "1970-01-01 00:00:00+00": ["2026-11-16 00:46:06.159421+00", "2026-11-16 00:46:06+05:30"],
    "00:00:00": ["12:00:01.5"],
    "00:00:00+00": ["12:00:01-08"],
    "00000000-0000-0000-0000-000000000000": ["7f8a9d1e-1111-4222-8333-9abcdef01234"],
    "PT0S": ["P1DT2H", "P-1Y2M", "PT-0.5S"],
    r"\x": [r"\xdeadbeef"],
    "{}": ["{1,2}", '{"a":\n1}'],
    "[]": ["[1]"],
    "": ["", "someone", "17\n", "true", "P", "[1,5)", "2026-11-16T00:46:06"],
}


def test_zero_is_of_the_look_of_the_value() -> None:
    for zero, values in ZEROS.items():
        assert edits.zero(pa.array([*values, None])).to_pylist() == [zero] * len(values) + [None], values


def test_looks_have_only_what_all_regex_engines_read_alike() -> None:
    for look, _ in edits.LOOKS:
        assert look.startswith(r"\A(?:") and look.endswith(r")\z")
        assert not re.search(r"\\[bBdDwWZ]|\(\?[^:]|\$|\^", look.replace(r"\A", "").replace(r"\z", ""))


def test_what_is_not_a_row_of_a_table_passes_column_transforms_unharmed(tmp_path: Path) -> None:
    steps: tuple[dict[str, Any], ...] = (
        {"type": "drop_columns", "columns": ["prefix"]},
        {"type": "rename_fields", "fields": {"content": "note"}},
        {"type": "mask", "columns": ["note"]},
    )
    writer = SpoolWriter(tmp_path, START)
    assembler = Assembler(writer.relations, start_lsn=START.commit)
    begin, relation, insert, *_, commit = Transaction(110, CHANGES[:1]).encode()
    for message in (begin, relation, insert, encode_message("audit", b"checked", 109), encode_truncate([1]), commit):
        assembler.feed(message, 110)
    while batch := assembler.pop(drain=True):
        writer.append(batch)
    reader = SpoolReader(tmp_path)
    reader.refresh()
    plain, changed = lines_of(reader, [Chain(), Chain(steps)], EventOptions(transaction=True, markers=True))
    writer.close()
    operations = [json.loads(line)["operation"] for line in plain]
    assert operations == ["BEGIN", "INSERT", "MESSAGE", "TRUNCATE", "COMMIT"]
    assert [one == other for one, other in zip(plain, changed, strict=True)] == [True, False, True, True, True]


def test_what_old_rows_have_in_a_masked_column_is_masked_as_well() -> None:
    shape = Relation(1, "public", "t", "d", (Column("id", 23, -1, True), Column("a", 25, -1, False)))
    described = [
        {"name": "id", "attnum": 1, "type": "integer", "ndims": 0, "not_null": True, "missing": "7"},
        {"name": "a", "attnum": 2, "type": "text", "ndims": 0, "not_null": False, "missing": "secret"},
    ]
    chain = SimpleChain((), ({"type": "mask", "columns": ["a"], "mode": "redact"},))
    _, details = chain.describe(shape, {"columns": described, "primary_key": ["id"], "types": None})
    assert details is not None
    assert [one["missing"] for one in details["columns"]] == ["7", edits.REDACTED]


def test_people_see_what_changes_no_table(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, START)
    assembler = Assembler(writer.relations, start_lsn=START.commit)
    begin, relation, insert, *_, commit = Transaction(110, CHANGES[:1]).encode()
    for message in (begin, relation, insert, encode_message("audit", b"checked", 109), commit):
        assembler.feed(message, 110)
    while batch := assembler.pop(drain=True):
        writer.append(batch)
    reader = SpoolReader(tmp_path)
    reader.refresh()
    for form, operations in (("changes", ["INSERT", "MESSAGE"]), ("tables", ["INSERT"])):
        chains = [SimpleChain((), (), (form,))]
        slices = reader.slices(START, reader.end)
        made = event_batch(slices, reader.relations(), SEED, block_schema(chains), chains=chains)
        assert made is not None
        whole = Batch(START, reader.end, pa.Table.from_batches([made.replace_schema_metadata()]))
        (found,) = split_forms(whole, [(0, cast(Form, form))], [made.schema.metadata])
        shown = [line.split(" ", 2)[2] for line in Pretty(is_terminal=False).write(found)]
        assert [line.split()[0] for line in shown] == operations
        if form == "changes":
            assert shown[1] == "MESSAGE  _messages prefix=audit content=checked\n"
    writer.close()


def test_routes_are_shell_patterns_with_regard_to_case() -> None:
    for pattern, matches in (
        ("orders", True),
        ("Orders", False),
        ("pgcdc:ord*", True),
        ("sales.*", False),
        ("ord?rs", True),
    ):
        found = payloads(routes=(pattern,))
        assert (found[0] is not None) == matches, pattern
        assert fnmatch.fnmatchcase("pgcdc:orders", full_pattern(pattern)) == matches


def test_events_that_no_chain_has_are_not_carried() -> None:
    schema = block_schema([SimpleChain((), ())] * 2)
    batch = pa.RecordBatch.from_pydict(
        {"position": ["1", "2", "3"], "line_0": ["a", None, None], "line_1": [None, None, "c"]}
    )
    assert drop_unwanted(batch.cast(schema)).column("position").to_pylist() == ["1", "3"]
    assert form_column(1) == schema.names[2]


def test_a_key_that_is_missing_short_or_unreadable_is_said_before_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = {"type": "mask", "columns": ["a"], "mode": "hash"}
    monkeypatch.delenv(KEY_VARIABLE)
    for part, more in (("PGCDC_MASK_KEY is not set", {}), ("MY_KEY is not set", {"key_env": "MY_KEY"})):
        with pytest.raises(ConfigError, match=part):
            compile_chains([Chain(({**spec, **more},))])
    with pytest.raises(ConfigError, match="cannot be read"):
        compile_chains([Chain(({**spec, "key_file": str(tmp_path / "none")},))])
    (tmp_path / "key").write_text("short\n")
    with pytest.raises(ConfigError, match="has only 5 bytes"):
        compile_chains([Chain(({**spec, "key_file": str(tmp_path / "key")},))])
    (tmp_path / "key").write_text(KEY + "\n")
    program = compile_chains([Chain(({**spec, "key_file": str(tmp_path / "key")},))])
    assert KEY not in repr(program) + str(program.source_options())


def test_chains_travel_as_text() -> None:
    steps = [{"type": "drop_columns", "columns": ["ä"]}]
    (chain,) = parse_chains(dump_chains([SimpleChain(("pgcdc:a",), tuple(steps))]))
    assert isinstance(chain, SimpleChain) and (chain.routes, list(chain.steps)) == (("pgcdc:a",), steps)


FAULTS: dict[str, Any] = {
    "KeyError: 'nothing'": lambda event: event["nothing"],
    "it changed position": lambda event: event | {"position": "0"},
    "it changed id": lambda event: {key: value for key, value in event.items() if key != "id"},
    "it returned int": lambda event: 1,
    "row['id'] is int": lambda event: event | {"row": {"id": 1}},
    "channel is NoneType|channel is int": lambda event: event | {"channel": 5},
    "unknown operation UPSERT": lambda event: event | {"operation": "UPSERT"},
    "it added colour": lambda event: event | {"colour": "red"},
    "unchanged_toast_columns is not a list": lambda event: event | {"unchanged_toast_columns": "id"},
}


def asked() -> pa.RecordBatch:
    with spooled([Transaction(110, CHANGES)]) as reader:
        batch = event_batch(reader.slices(START, reader.end), reader.relations(), SEED, SCHEMA)
    assert batch is not None
    return batch


@pytest.mark.parametrize("message", FAULTS)
def test_a_function_that_fails_or_changes_what_it_must_not_names_the_event(message: str) -> None:
    with pytest.raises(TransformError) as caught:
        call_all(asked(), FAULTS[message], "mine:f")
    assert "python transform mine:f at position 000000000000006E/0000000000001: " in str(caught.value)
    assert any(part in str(caught.value) for part in message.split("|")) and caught.value.advice


def test_a_function_is_called_for_each_event_and_may_drop_it() -> None:
    seen: list[str] = []

    def note(event: dict[str, Any]) -> dict[str, Any] | None:
        seen.append(event["operation"])
        return (
            None if event["operation"] == "DELETE" else event | {"row": event["row"] and {**event["row"], "new": None}}
        )

    found, keep = call_all(asked(), note, "mine:f")
    assert seen == ["INSERT", "UPDATE", "TRUNCATE", "DELETE"]
    assert keep.tolist() == [True, True, True, False]
    rows = found["row"].to_pylist(maps_as_pydicts="strict")
    assert rows[0] == {"id": "1", "note": "a@b.c", "total": "2.50", "new": None} and rows[2] is None


@pytest.mark.parametrize("part", [slice(None), slice(1, None), slice(2, 3), slice(3, 4), slice(4, None)], ids=str)
def test_a_function_sees_events_as_arrow_shows_them(part: slice) -> None:
    seen: list[dict[str, Any]] = []
    events = asked()[part]
    call_all(events, lambda event: seen.append(event) or event, "mine:f")  # type: ignore[func-returns-value]
    assert seen == events.to_pylist(maps_as_pydicts="strict")


def test_only_filters_may_follow_an_envelope() -> None:
    closed, drop = debezium_envelope(), drop_columns("a")
    Chain((drop, closed, filter(operations=["INSERT"]))).made()
    with pytest.raises(ConfigError, match="drop_columns comes after debezium"):
        Chain((closed, drop)).made()


def test_the_program_is_the_cheapest_that_can_do_it() -> None:
    where, drop = filter(where="row['a'] = '1'"), drop_columns("b")
    plain, blocks = compile_chains([Chain(), Chain()]), compile_chains([Chain((drop,)), Chain(), Chain((drop,))])
    assert (plain.source_options(), plain.source_schema()) == ({}, BLOCKS)
    assert isinstance(blocks, BlockProgram) and (len(blocks.distinct), blocks.of_chain) == (2, (0, 1, 0))
    secret = mask("c", mode="hash", key=KEY)
    mixed = compile_chains([Chain((drop, where)), Chain((sql(a="1"), drop)), Chain((drop, secret, drop_columns("d")))])
    assert isinstance(mixed, ColumnProgram)
    names = [[[one.type for one in part] for part in chain.parts] for chain in mixed.distinct]
    assert names == [
        [["drop_columns"], ["filter"], []],
        [[], ["sql"], ["drop_columns"]],
        [["drop_columns"], ["mask"], ["drop_columns"]],
    ]
    assert "`event_2` struct<" in mixed.source_schema() and "shape" not in mixed.source_schema()
    assert KEY not in str(mixed.source_options())
    made = sql(a="1")
    records = compile_chains([Chain((made,), form="records"), Chain((made, debezium_envelope(), where))])
    assert records.source_schema().count("shape:string") == 2
    assert [one.type for one in records.distinct[1].parts[2]] == ["debezium"]
    asks = compile_chains([Chain((where,), form="records"), Chain((drop, debezium_envelope(), where)), Chain()])
    assert isinstance(asks, AskProgram) and asks.source_schema().startswith(f"{BLOCKS}, lsn BIGINT")
    pushed = parse_chains(asks.source_options()["_chains"])
    assert [one.forms for one in pushed] == [("records",), ("lines",), ("lines",), (), ()]
    assert [one["type"] for one in pushed[1].steps] == ["drop_columns", "debezium"]
    assert pushed[4].steps[0]["type"] == "drop_columns" and "debezium" not in str(pushed[4].steps)
    assert isinstance(compile_chains([Chain((where, rename_fields(a="b")))]), ColumnProgram)


def test_what_a_condition_does_not_read_is_not_hidden_in_schema_events() -> None:
    table = Relation(1, "public", "people", "d", (Column("id", 23, -1, True), Column("age", 23, -1, False)))
    details = {"columns": [{"name": "id"}, {"name": "age", "missing": "7"}], "primary_key": ["id"]}
    change = ShapeChange(START, table, None, details)
    asking = SimpleChain((), ({"type": "keep_columns", "columns": ["id"]},), (), asked=("row",))
    assert without_hidden(change, parse_chains(dump_chains([asking]))) == change
    assert without_hidden(change, [replace(asking, asked=())]) != change


def test_names_that_an_earlier_step_took_away_are_refused() -> None:
    renamed = rename_fields(email="mail")
    for later in (mask("email"), drop_columns("email"), rename_fields(email="x")):
        with pytest.raises(ConfigError, match=r"an earlier rename_fields calls mail\. Write mail, or put"):
            compile_chains([Chain((renamed, later))])
    with pytest.raises(ConfigError, match="an earlier drop_columns removes"):
        compile_chains([Chain((drop_columns("email"), mask("email")))])
    back = sql(email="row['mail']")
    for fine in (
        (renamed, mask("mail")),
        (rename_fields(a="b", b="a"), mask("a", "b")),
        (drop_columns("a"), drop_columns("a")),
        (drop_columns("b"), rename_fields(a="b"), mask("b")),
        (renamed, back, mask("email")),
        (renamed, python(lambda event: event), mask("email")),
    ):
        compile_chains([Chain(fine)])


def test_columns_that_no_table_has_are_found_with_the_nearest_name() -> None:
    columns = tuple(Column(name, 25, -1, False) for name in ("id", "Email", "phone"))
    tables = [Relation(1, "public", "people", "d", columns), Relation(2, "public", "log", "d", columns[:1])]

    def missing(*transforms: Any, routes: tuple[str, ...] = ()) -> list[str]:
        return missing_columns([Chain(transforms, routes)] * 2, tables)

    assert missing(mask("email", "phnoe", "qqq"), drop_columns("id")) == [
        "mask: no captured table has a column email; did you mean Email?",
        "mask: no captured table has a column phnoe; did you mean phone?",
        "mask: no captured table has a column qqq",
    ]
    assert missing(rename_fields(phone="tel", fax="f"), drop_columns("tel")) == [
        "rename_fields: no captured table has a column fax"
    ]
    assert missing(drop_columns("phone"), routes=("log",)) == []  # the same transforms may be there for others
    assert missing(sql(a="1"), drop_columns("a"), python(lambda event: event), mask("b")) == []
    assert missing(mask("b"), routes=("later",)) == ["mask: no captured table has a column b"]
    assert missing_columns([Chain((mask("b"),))], []) == []  # nothing is there yet to compare with
