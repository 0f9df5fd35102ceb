"""Trace files: what is written, what survives, what is refused."""

from __future__ import annotations

import errno
import gzip
import io
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotwise.errors import SlotwiseError, UsageError
from slotwise.trace import (
    Header,
    LaneLog,
    LaneWork,
    Ledger,
    LoanMade,
    Note,
    PhaseSpan,
    PoolFill,
    RefillDone,
    RefillTotal,
    RequestEnd,
    RequestStart,
    Trace,
    TraceSink,
    WindowDone,
    read_trace,
    sinks,
)
from slotwise.trace.events import EVENT_TYPES, ModelShape
from slotwise.trace.schema import trace_schema

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "trace-v1.json"


def write_everything(sink: TraceSink, record: Any) -> None:
    """One event of every type, as an engine would emit them; closes the sink."""
    sink.emit(RequestStart(request="1", start_ns=1))
    hook = sink.span_hook("1")
    hook("lend", 1, 5, 1)
    sink.emit(LoanMade(request="1", at_ns=5, slots=9, bytes=36864, extents=1))
    sink.emit(PoolFill(at_ns=6, resident=80, loading=1, lent=9, free=6))
    lanes = LaneLog(capacity=1)
    lanes.record("io.0", "read", 1, 2, bytes=4096, slots=1)
    lanes.record("io.0", "read", 2, 3, bytes=4096, slots=1)
    sink.take_lanes(lanes)
    sink.emit(WindowDone("1", 10, 20, 1, 3))
    sink.emit(
        RefillDone(
            request="1",
            policy="deferred",
            start_ns=8,
            end_ns=18,
            slots=9,
            bytes=36864,
            waited_ns=0,
        )
    )
    sink.emit(
        RefillTotal(
            request="1",
            at_ns=28,
            end="full",
            slots=12,
            failed=0,
            bytes=49152,
            lane_ns=9,
            waited_ns=0,
            saved_misses=3,
        )
    )
    sink.emit(Note(at_ns=7, code="no-o-direct", text="/mnt/a/x.gguf: tmpfs has no O_DIRECT"))
    sink.emit(RequestEnd(request="1", at_ns=30, status="done", record=record))
    sink.emit(RequestEnd(request="2", at_ns=31, status="failed", record=None, error="StoreError"))
    sink.close()


@pytest.fixture
def whole(sink: TraceSink, make_record: Any, clock: Any) -> Path:
    write_everything(sink, make_record(clock))
    return sink.path


def test_everything_written_is_read_back(whole: Path, header: Header) -> None:
    trace = read_trace(whole)
    assert trace.header == header
    assert trace.warnings == ()
    assert {type(event) for event in trace.events} == set(EVENT_TYPES)
    assert PhaseSpan("1", "lend", 1, 5, 1) in trace.events
    assert LaneWork("io.0", "read", 2, 3, 4096, 1) in trace.events
    lost = next(e for e in trace.events if isinstance(e, Note) and e.code == "lane-spans-lost")
    assert lost.count == 1
    (record,) = trace.records
    assert record.ledger.wall_ns == 26_000_000


def test_every_line_fits_the_published_schema(whole: Path, failed_record: Any) -> None:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for line in whole.read_text().splitlines():
        validator.validate(json.loads(line))
    end = RequestEnd(request="2", at_ns=1, status="failed", record=failed_record)
    validator.validate(json.loads(sinks._line(end)))


def test_schema_file_is_the_one_the_code_makes() -> None:
    assert json.loads(SCHEMA.read_text()) == trace_schema(), (
        "run: python -m slotwise.trace.schema > docs/schemas/trace-v1.json"
    )


@pytest.mark.parametrize(
    "line",
    [
        {"type": "request_start", "request": "1", "start_ns": 1, "prompt": "secret"},
        {"type": "request_start", "request": "1"},
        {"type": "request_start", "request": "1", "start_ns": "1"},
        {"type": "tokens", "ids": [1, 2]},
    ],
)
def test_schema_allows_nothing_else(line: dict[str, Any]) -> None:
    assert not jsonschema.Draft202012Validator(trace_schema()).is_valid(line)


def test_unknown_fields_are_an_error_where_the_event_is_made() -> None:
    with pytest.raises(TypeError, match="prompt"):
        RequestStart(request="1", start_ns=1, prompt="x")  # pyright: ignore[reportCallIssue]


def test_strings_of_a_trace_are_a_closed_list() -> None:
    """A new string field is a place where a prompt could leak: think before adding it here."""
    strings = set()

    def collect(node: Any, name: str) -> None:
        if not isinstance(node, dict):
            return
        if node.get("type") == "string":
            strings.add(name)
        for key, value in node.get("properties", {}).items():
            collect(value, key)
        for value in [*node.get("anyOf", []), *node.get("oneOf", [])]:
            collect(value, name)
        for key, value in node.get("$defs", {}).items():
            collect(value, key)

    collect(trace_schema(), "")
    assert strings == {
        *("arch", "clock", "code", "digest", "engine_version", "error", "file", "kv_type"),
        *("lane", "name", "pack", "policy", "profile", "refill", "request", "text"),
    }


def test_folders_of_paths_do_not_reach_the_file(whole: Path) -> None:
    text = whole.read_text()
    assert "x.gguf: tmpfs has no O_DIRECT" in text
    assert "/mnt" not in text


def test_nothing_is_written_before_the_request_ends(sink: TraceSink, header: Header) -> None:
    size = sink.path.stat().st_size
    sink.emit(RequestStart(request="1", start_ns=1))
    assert sink.path.stat().st_size == size
    sink.emit(RequestEnd(request="1", at_ns=2, status="cancelled", record=None))
    assert sink.path.stat().st_size > size
    sink.close()


def test_very_many_events_are_written_in_between(
    sink: TraceSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "MAX_PENDING", 10)
    hook = sink.span_hook("1")
    for i in range(25):
        hook("draft", i, i + 1, 1)
    assert len(sink.path.read_bytes().splitlines()) == 1 + 20
    sink.close()
    assert len(read_trace(sink.path).events) == 25 + 1


def test_spans_of_a_ledger_give_its_phases(sink: TraceSink, make_ledger: Any, clock: Any) -> None:
    record = make_ledger(clock, on_span=sink.span_hook("7"))
    sink.close()
    spans = [e for e in read_trace(sink.path).events if isinstance(e, PhaseSpan)]
    assert {span.request for span in spans} == {"7"}
    outermost = sum(span.end_ns - span.start_ns for span in spans if span.depth == 1)
    assert outermost == record.wall_ns - record.ns("other")
    waits = [s.end_ns - s.start_ns for s in spans if s.name == "read.expert_wait"]
    assert sum(waits) == record.ns("read.expert_wait")


def test_without_tracing_a_ledger_reports_no_spans(clock: Any) -> None:
    ledger = Ledger(clock=clock)
    with ledger.phase("lend"):
        clock.tick(1)
    assert ledger._starts == []
    ledger.close("done")


class _SmallDisk(io.FileIO):
    """A file that takes `room` bytes and then reports a full disk, like a write(2) does."""

    room = 0

    def write(self, data: Any) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = super().write(bytes(data)[: self.room])
        self.room -= taken
        return taken


def test_full_disk_stops_the_trace_and_nothing_else(
    tmp_path: Path, header: Header, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = _SmallDisk(tmp_path / "t.jsonl", "w")
    disk.room = len(sinks._line(header)) + 100
    monkeypatch.setattr(sinks, "_create", lambda path, overwrite: disk)
    sink = TraceSink(tmp_path / "t.jsonl", header)
    sink.emit(RequestStart(request="1", start_ns=1))
    for at_ns in range(3):
        sink.emit(Note(at_ns=at_ns, code="x", text="y" * 50))
    sink.emit(RequestEnd(request="1", at_ns=9, status="done", record=None))
    assert sink.stopped == "t.jsonl: tracing stopped, No space left on device"
    assert sink.events_lost == 5
    sink.emit(RequestStart(request="2", start_ns=1))
    sink.close()
    assert sink.events_lost == 6
    trace = read_trace(sink.path)  # the line that was cut by the full disk is gone again
    assert trace.events == ()
    assert trace.warnings == (
        "no end mark: the trace is still being written, or its process was killed",
    )


def test_a_device_that_is_always_full(header: Header) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    sink = TraceSink(full, header, overwrite=True)
    assert "No space left" in sink.stopped
    sink.close()


def test_files_are_not_overwritten_unless_asked(sink: TraceSink, header: Header) -> None:
    sink.close()
    with pytest.raises(UsageError, match="exists already"):
        TraceSink(sink.path, header)
    TraceSink(sink.path, header, overwrite=True).close()


def test_file_that_cannot_be_made_is_an_error_at_once(tmp_path: Path, header: Header) -> None:
    with pytest.raises(SlotwiseError, match="cannot be created: No such file"):
        TraceSink(tmp_path / "no" / "t.jsonl", header)
    with pytest.raises(UsageError, match="uncompressed"):
        TraceSink(tmp_path / "t.jsonl.gz", header)


def test_a_trace_cut_anywhere_reads_up_to_its_last_whole_line(whole: Path) -> None:
    data = whole.read_bytes()
    events = read_trace(whole).events
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    for size in {*range(ends[0], ends[2]), *range(len(data) - 30, len(data)), *ends[:-1]}:
        whole.write_bytes(data[:size])
        trace = read_trace(whole)
        lines = data[:size].count(b"\n")
        assert trace.events == events[: lines - 1]
        assert any("no end mark" in warning for warning in trace.warnings)
        assert any("cut after" in w for w in trace.warnings) == (data[size - 1] != 10)


def test_cut_inside_the_header_is_refused(whole: Path) -> None:
    whole.write_bytes(whole.read_bytes()[:20])
    with pytest.raises(SlotwiseError, match="no whole line"):
        read_trace(whole)


def test_gzip_is_read_whole_and_cut(whole: Path, tmp_path: Path) -> None:
    packed = tmp_path / "t.jsonl.gz"
    data = gzip.compress(whole.read_bytes())
    packed.write_bytes(data)
    assert read_trace(packed) == read_trace(whole)
    packed.write_bytes(data[:-100])
    assert "the compressed file is cut" in read_trace(packed).warnings
    packed.write_bytes(data[:20] + b"\xff" * 50)
    with pytest.raises(SlotwiseError, match=r"damaged gzip data|no whole line"):
        read_trace(packed)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"type":"header","schema":"slotwise.trace/v2"}', "reads up to 'slotwise.trace/v1'"),
        ('{"type":"header","schema":"elsewhere/v1"}', "expected 'slotwise.trace/v1'"),
        ('{"type":"header","schema":"slotwise.trace/v1"}', "line 1: .*missing"),
        ('{"type":"phase"}', "expected a trace header"),
        ("[]", "expected a JSON object"),
        ("GGUF", "line 1: not JSON"),
    ],
)
def test_what_is_not_a_trace_is_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(SlotwiseError, match=message):
        read_trace(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SlotwiseError, match="cannot be read: No such file"):
        read_trace(tmp_path / "t.jsonl")


def test_line_in_the_middle_that_does_not_fit_is_named(whole: Path) -> None:
    lines = whole.read_text().splitlines()
    lines[2] = lines[2].replace('"depth":1', '"depth":"1"')
    whole.write_text("\n".join(lines) + "\n")
    with pytest.raises(SlotwiseError, match=r"line 3 \(phase\): depth: found '1', expected int"):
        read_trace(whole)


def test_event_types_of_a_newer_minor_version_are_skipped_and_counted(whole: Path) -> None:
    lines = whole.read_text().splitlines()
    lines.insert(1, '{"type":"weather","sun":true}')
    lines[2] = lines[2].replace("{", '{"new":1,', 1)
    whole.write_text("\n".join(lines) + "\n")
    assert read_trace(whole).warnings == ("1 events of unknown type 'weather' skipped",)


@settings(max_examples=200)
@given(data=st.data())
def test_damaged_bytes_are_read_or_refused_never_a_crash(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.jsonl"
    header = Header(
        engine_version="0", clock_ns=1, unix_ns=2, model=ModelShape(file="x", arch="y", layers=1)
    )
    with TraceSink(path, header, overwrite=True) as sink:
        record = None
        sink.emit(WindowDone("1", 10, 20, 1, 3))
        sink.emit(RequestEnd(request="1", at_ns=3, status="done", record=record))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position : position + data.draw(st.integers(0, 4))] = data.draw(
            st.binary(max_size=4)
        )
    path.write_bytes(bytes(content))
    try:
        assert isinstance(read_trace(path), Trace)
    except SlotwiseError as error:
        assert str(path) in str(error)  # noqa: PT017
