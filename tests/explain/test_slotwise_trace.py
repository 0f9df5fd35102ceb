"""slotwise's own traces, written by the real sink and read back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from slotwise.explain.readers import read_files
from slotwise.explain.readers.slotwise_trace import SlotwiseTraceReader
from slotwise.explain.record import Life
from slotwise.trace import (
    DecodeTally,
    Forecast,
    Header,
    LaneTotal,
    Ledger,
    Loan,
    ModelShape,
    Refill,
    RefillTotal,
    RequestEnd,
    RequestRecord,
    RequestStart,
    Settings,
    Tokens,
    TraceSink,
)

MS = 1_000_000


def record(*, done: bool = True) -> RequestRecord:
    """A request with 3 ms of lend, 40 ms of read, 5 ms of first window and 2 ms of nothing."""
    now = [0]
    ledger = Ledger(clock=lambda: now[0])
    for name, ms in (("lend", 3), ("read.attention", 40), ("first_window", 5)):
        with ledger.phase(name):
            now[0] += ms * MS
    now[0] += 2 * MS
    closed = ledger.close("done" if done else "cancelled")
    tally = DecodeTally(start_ns=closed.end_ns)
    tally.window(now[0], now[0] + 20 * MS, tokens=2)
    return RequestRecord(
        request="r1",
        status="done" if done else "cancelled",
        ledger=closed,
        tokens=Tokens(prompt=100, reused=20, read=79 if done else 64, generated=3),
        loan=Loan(slots=225, bytes=4096),
        refill=Refill(policy="deferred", slots=200, bytes=8192, lane_ns=70 * MS, waited_ns=0),
        decode=tally.record() if done else None,
        lanes={"io.0": LaneTotal(busy_ns=60 * MS, calls=3, bytes=12, slots=3)},
    )


def trace(tmp_path: Path, *, done: bool = True, end: bool = True) -> Path:
    path = tmp_path / "a.jsonl"
    model = ModelShape(file="m.gguf", arch="olmoe", layers=16, moe_layers=16, experts=64)
    header = Header(engine_version="0.1.0", model=model, settings=Settings(chunk_tokens=512))
    sink = TraceSink(path, header)
    for _ in range(2):
        sink.emit(RequestStart(request="r1", start_ns=0))
        request = record(done=done)
        sink.emit(RequestEnd(request="r1", at_ns=9, status=request.status, record=request))
    sink.emit(RequestStart(request="r2", start_ns=0))
    sink.flush()
    sink.close()
    if not end:
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    return path


def read(path: Path) -> Life:
    (life,) = read_files([path]).lives
    return life


def test_ledger_lanes_loan_and_refill(tmp_path: Path) -> None:
    life = read(trace(tmp_path))
    first = life.requests[0]
    own = {p.name: p.ms.value for p in first.phases if p.lane == "request"}
    assert own == {"lend": 3, "read.attention": 40, "first_window": 5, "other": 2}
    assert first.ttft_ms.value == sum(v or 0 for v in own.values()) == 50
    assert (first.prompt_ms.how, first.prompt_ms.value) == ("derived", 45)
    assert {p.lane for p in first.phases} == {"request", "lane io.0", "refill lane"}
    assert (first.prompt.value, first.reused.value, first.read_planned.value) == (100, 20, 79)
    assert (first.slots_lent.value, first.slots_refilled.value) == (225, 200)
    assert first.decode_ms.value == 20
    assert [r.first_of_life for r in life.requests] == [True, False, False]
    assert (life.version, life.facts["chunk_tokens"].value) == ("0.1.0", 512)


def test_open_and_cancelled_requests(tmp_path: Path) -> None:
    life = read(trace(tmp_path, done=False, end=False))
    assert [r.status for r in life.requests] == ["cancelled", "cancelled", "incomplete"]
    assert life.requests[0].ttft_ms.how == "bounded"
    assert life.requests[0].read.value == 64
    assert any("no end mark" in note for note in life.notes)


def test_newer_schema_and_unknown_events_are_noted(tmp_path: Path) -> None:
    path = trace(tmp_path)
    text = path.read_text().replace("slotwise.trace/v1", "slotwise.trace/v2")
    path.write_text(text + '{"type":"dream","at_ns":1}\n')
    life = read(path)
    assert any("another schema" in note for note in life.notes)
    assert any("unknown type" in note for note in life.notes)
    assert life.requests[0].prompt.value == 100


@pytest.mark.parametrize("value", [None, "x", [], {}, -1e400, True])
def test_content_that_does_not_fit(tmp_path: Path, value: Any) -> None:
    lines = [json.loads(line) for line in trace(tmp_path).read_text().splitlines()]
    reader = SlotwiseTraceReader("a.jsonl")
    number = 0
    for data in lines:
        for key in list(data):
            number += 1
            reader.feed(number, json.dumps({**data, key: value}))
        record = data.get("record")
        if not isinstance(record, dict):
            continue
        for key in record:
            number += 1
            reader.feed(number, json.dumps({**data, "record": {**record, key: value}}))
    for life in reader.finish():
        json.dumps(life.to_dict(), allow_nan=False)


def test_names_and_texts_do_not_leave(tmp_path: Path) -> None:
    path = trace(tmp_path)
    text = path.read_text().replace("olmoe", "secret").replace('"io.0"', '"/home/alice/x"')
    text = text.replace('"lend"', '"the secret prompt: hunter2"').replace("0.1.0", "a secret")
    note = {"type": "note", "at_ns": 1, "code": "secret", "text": "secret", "count": 2}
    path.write_text(text + json.dumps(note) + "\n")
    out = json.dumps(read_files([path]).to_dict())
    assert "secret" not in out
    assert "alice" not in out
    assert "(2 times)" in out


def test_a_refill_that_went_on_after_its_request_is_counted_in_full(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    sink = TraceSink(
        path, Header(engine_version="0.1.0", model=ModelShape(file="m.gguf", arch="a", layers=1))
    )
    for name in ("r1", "r2"):
        sink.emit(RequestStart(request=name, start_ns=0))
        request = dataclasses.replace(
            record(),
            request=name,
            loan=Loan(slots=225, bytes=4096, read_misses=7, decode_misses=2),
            forecast=Forecast(time_to_first_token_ns=45 * MS, error_ns=5 * MS),
        )
        sink.emit(RequestEnd(request=name, at_ns=9, status="done", record=request))
    sink.emit(
        RefillTotal(
            request="r1",
            at_ns=99,
            end="cut_short",
            slots=211,
            failed=1,
            bytes=9999,
            lane_ns=80 * MS,
            waited_ns=0,
            saved_misses=13,
        )
    )
    sink.close()
    first, second = read(path).requests
    assert (first.slots_refilled.value, second.slots_refilled.value) == (211, 200)
    facts = {name: fact.value for name, fact in first.facts.items()}
    assert (facts["refill_saved_misses"], facts["refill_bytes"]) == (13, 9999)
    assert (facts["refill_lane_ms"], facts["refill_failed"]) == (80, 1)
    assert facts["refill_complete"] == 0
    assert (facts["loan_read_misses"], facts["loan_decode_misses"]) == (7, 2)
    assert (facts["forecast_ms"], facts["forecast_error_ms"]) == (45, 5)
    assert "refill_complete" not in second.facts
