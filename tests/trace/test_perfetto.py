"""The Chrome trace-event export: structure, nesting, names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slotwise.errors import SlotwiseError, UsageError
from slotwise.trace import (
    LaneWork,
    LoanMade,
    Note,
    PoolFill,
    RefillDone,
    RequestEnd,
    TraceSink,
    WindowDone,
    export_perfetto,
    read_trace,
)

MS = 1_000_000


@pytest.fixture
def exported(sink: TraceSink, make_record: Any, clock: Any, tmp_path: Path) -> dict[str, Any]:
    start = clock.now
    record = make_record(clock, request="7", on_span=sink.span_hook("7"))
    end = record.ledger.end_ns
    sink.emit(WindowDone("7", end, end + 10 * MS, 1, 1 * MS))
    sink.emit(LaneWork("io.0", "read", start, start + MS, 4096, 1))
    sink.emit(LaneWork("io.1", "read", start, start + MS, 4096, 1))
    sink.emit(LoanMade(request="7", at_ns=start, slots=9, bytes=36864, extents=1))
    refill = {"policy": "deferred", "start_ns": end, "end_ns": end + 5}
    sink.emit(RefillDone(request="7", **refill, slots=9, bytes=36864, waited_ns=0))
    sink.emit(PoolFill(at_ns=start, resident=80, loading=0, lent=9, free=7))
    sink.emit(Note(at_ns=start, code="no-o-direct", text="tmpfs"))
    sink.emit(RequestEnd(request="7", at_ns=end, status="done", record=record))
    sink.close()
    out = tmp_path / "perfetto.json"
    export_perfetto(read_trace(sink.path), out)
    return json.loads(out.read_text())


def slices(exported: dict[str, Any], track: str) -> list[dict[str, Any]]:
    names = {
        e["tid"]: e["args"]["name"]
        for e in exported["traceEvents"]
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    events = (e for e in exported["traceEvents"] if e["ph"] != "M")
    return [e for e in events if names.get(e.get("tid")) == track]


def test_every_event_has_what_the_format_asks_for(exported: dict[str, Any]) -> None:
    required = {"X": {"ts", "dur", "tid"}, "i": {"ts", "s", "tid"}, "C": {"ts"}, "M": set()}
    for event in exported["traceEvents"]:
        assert {"ph", "pid", "name", "args"} | required[event["ph"]] <= set(event)
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0


def test_each_request_and_lane_has_a_track_with_a_name(exported: dict[str, Any]) -> None:
    threads = [e for e in exported["traceEvents"] if e["name"] == "thread_name"]
    names = [thread["args"]["name"] for thread in threads]
    assert set(names) == {"notes", "request 7", "lane io.0", "lane io.1", "refill"}
    assert len({thread["tid"] for thread in threads}) == len(names)


def test_phases_nest_inside_the_request_and_each_other(exported: dict[str, Any]) -> None:
    track = [e for e in slices(exported, "request 7") if e["ph"] == "X"]
    assert track[0]["name"] == "to the first token"
    assert track[0]["dur"] == 26_000
    open_ends: list[float] = []
    depths = []
    for event in track:  # parents come first; a slice ends within every slice open around it
        while open_ends and open_ends[-1] <= event["ts"]:
            open_ends.pop()
        end = event["ts"] + event["dur"]
        assert all(end <= outer for outer in open_ends), event
        depths.append((event["name"], len(open_ends)))
        open_ends.append(end)
    assert depths.count(("read.router", 1)) == 2
    assert depths.count(("read.expert_wait", 2)) == 2
    assert depths[-1] == ("window", 0)


def test_time_is_in_microseconds_after_the_header(exported: dict[str, Any]) -> None:
    (first, second) = (slices(exported, f"lane io.{n}")[0] for n in (0, 1))
    assert first["ts"] == second["ts"] == 100_000
    assert first["dur"] == 1000
    assert first["args"] == {"bytes": 4096, "slots": 1}
    assert exported["otherData"]["unix_ns_at_0"] == 1_700_000_000_000_000_000


def test_pool_is_a_counter(exported: dict[str, Any]) -> None:
    (counter,) = [e for e in exported["traceEvents"] if e["ph"] == "C"]
    assert counter["args"] == {"resident": 80, "loading": 0, "lent": 9, "free": 7}


def test_output_is_not_overwritten_and_errors_are_named(sink: TraceSink, tmp_path: Path) -> None:
    sink.close()
    trace = read_trace(sink.path)
    out = tmp_path / "out.json"
    export_perfetto(trace, out)
    with pytest.raises(UsageError, match="exists already"):
        export_perfetto(trace, out)
    export_perfetto(trace, out, overwrite=True)
    with pytest.raises(SlotwiseError, match="cannot be written: No such file"):
        export_perfetto(trace, tmp_path / "no" / "out.json")
