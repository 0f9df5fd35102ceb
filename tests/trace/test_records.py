"""Request records: every number says how it was obtained, every null says why."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from slotwise.errors import SlotwiseError
from slotwise.trace import DecodeTally, RequestRecord, Settings, Tokens
from slotwise.trace.codec import encode, without_folders

FREE_KEYS = {"phases", "lanes"}  # mappings whose keys are names; written as * in the tables
TABLES = {"how", "missing"}


def leaves(data: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every leaf, nested records (they have tables of their own) left out."""
    for key, value in data.items():
        where = path + key
        if path == "" and key in {"settings", *TABLES}:
            continue
        if not isinstance(value, dict):
            yield where, value
        elif key in FREE_KEYS:
            for entry in value.values():
                yield from leaves(entry, f"{where}.*.")
        elif "schema" not in value:
            yield from leaves(value, f"{where}.")


def check_tables(data: dict[str, Any]) -> None:
    for path, value in leaves(data):
        if value is None:
            assert data["missing"].get(path), f"{path} is null without a reason"
        elif isinstance(value, int | float) and not isinstance(value, bool):
            assert data["how"].get(path) in {"measured", "derived", "bounded"}, path
    for path in data["how"]:
        assert any(path == known for known, _ in leaves(data)), f"{path} is not in the record"


def test_every_number_of_a_full_record_says_how(make_record: Any, clock: Any) -> None:
    data = make_record(clock).to_dict()
    check_tables(data)
    check_tables(data["ledger"])
    assert data["how"]["tokens.read_planned"] == "derived"
    assert data["how"]["refill.saved_misses"] == "missing"


def test_every_null_of_an_empty_record_says_why(failed_record: Any) -> None:
    data = failed_record.to_dict()
    check_tables(data)
    check_tables(data["ledger"])
    assert data["missing"]["loan"] == "no expert slots were lent"
    assert data["loan"] is None
    assert data["how"]["lanes.*.busy_ns"] == "bounded"  # its lane log had dropped spans


def test_the_check_of_the_tables_can_fail(make_record: Any, clock: Any) -> None:
    data = make_record(clock).to_dict()
    data["loan"]["price"] = 3
    with pytest.raises(AssertionError, match=r"loan\.price"):
        check_tables(data)


def test_records_survive_json(make_record: Any, failed_record: Any, clock: Any) -> None:
    for record in (make_record(clock), failed_record):
        assert RequestRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_newer_fields_are_ignored_and_newer_majors_refused(make_record: Any, clock: Any) -> None:
    record = make_record(clock)
    data = record.to_dict()
    data["colour"] = 1
    data["loan"]["price"] = 3
    assert RequestRecord.from_dict(data) == record
    data["ledger"]["schema"] = "slotwise.ledger/v2"
    with pytest.raises(SlotwiseError, match=r"reads up to 'slotwise\.ledger/v1'"):
        RequestRecord.from_dict(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("tokens", "prompt"), "9", r"tokens\.prompt: found '9', expected int"),
        (("tokens", "prompt"), True, r"tokens\.prompt: found True, expected int"),
        (("status",), "gone", r"status: found 'gone', expected one of"),
        (("loan",), [], r"loan: found \[\], expected an object"),
        (("ledger",), None, r"ledger: found None, expected an object"),
        (("ledger", "phases", "other", "ns"), 1.5, r"ledger\.phases\.other\.ns: found 1\.5"),
    ],
)
def test_content_that_does_not_fit_is_named(
    make_record: Any, clock: Any, path: tuple[str, ...], value: Any, message: str
) -> None:
    data = make_record(clock).to_dict()
    *folders, last = path
    inner = data
    for key in folders:
        inner = inner[key]
    inner[last] = value
    with pytest.raises(ValueError, match=message):
        RequestRecord.from_dict(data)


def test_planned_read_leaves_the_last_token_to_the_first_window() -> None:
    assert Tokens(prompt=40, reused=10, read=12, generated=0).read_planned == 29


def test_time_to_first_token_is_none_if_there_was_none(
    make_record: Any, failed_record: Any, clock: Any
) -> None:
    assert make_record(clock).time_to_first_token_ns == 26_000_000
    assert failed_record.time_to_first_token_ns is None


def test_tally_counts_64_tokens_with_the_first_and_across_gaps() -> None:
    tally = DecodeTally(start_ns=100)
    assert tally.record() is None
    now = 100
    for _ in range(21):
        tally.window(now + 1, now + 10, tokens=3, expert_wait_ns=2)
        now += 10
    record = tally.record()
    assert record is not None
    assert (record.windows, record.tokens) == (21, 63)
    assert (record.wall_ns, record.windows_ns, record.expert_wait_ns) == (210, 189, 42)
    assert record.first_64_tokens_ns == 210
    tally.window(now, now + 5, tokens=1)
    later = tally.record()
    assert later is not None
    assert later.first_64_tokens_ns == 210


def test_63_tokens_are_not_64() -> None:
    tally = DecodeTally(start_ns=0)
    tally.window(0, 10, tokens=62)
    record = tally.record()
    assert record is not None
    assert record.first_64_tokens_ns is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/mnt/disk/models/a b/x.gguf: no O_DIRECT", "x.gguf: no O_DIRECT"),
        ("fell back for '/srv/x/y.gguf' (tmpfs)", "fell back for 'y.gguf' (tmpfs)"),
        (r"C:\Users\somebody\x.gguf", "x.gguf"),
        ("~somebody/models/x.gguf", "x.gguf"),
        ("org/model-name and/or 3/4", "org/model-name and/or 3/4"),
        ("plain", "plain"),
    ],
)
def test_folders_never_leave(text: str, expected: str) -> None:
    assert without_folders(text) == expected
    assert encode(Settings(profile=text))["profile"] == expected


def test_what_is_not_data_cannot_be_recorded() -> None:
    with pytest.raises(TypeError, match="object cannot be part of a record"):
        encode({"x": object()})


def test_import_needs_neither_numpy_nor_rich() -> None:
    code = "import slotwise.trace, sys; print({'numpy', 'ggml', 'rich'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout.strip(), result.stderr) == ("set()", "")
