"""What a trace file of real requests holds, and what it never may."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from engine.rig import OTHER, PROMPT, Small, generate, make, open_engine, record_of
from engine.talk import SECRET, answerer, options, user

from slotwise.engine.prompt import Cancelled
from slotwise.engine.text import Answerer
from slotwise.trace import (
    LaneWork,
    LoanMade,
    Note,
    PhaseSpan,
    RefillDone,
    RequestEnd,
    RequestRecord,
    RequestStart,
    WindowDone,
    export_perfetto,
    read_trace,
)
from slotwise.trace.schema import trace_schema

SYSTEM = "Whisper of amethyst"


@pytest.fixture(scope="module")
def traced(
    talking: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[RequestRecord], list[list[int]], list[str]]:
    """A trace of every kind of request, their records, their token ids and their texts."""
    path = tmp_path_factory.mktemp("traces") / "t.jsonl"
    records: list[RequestRecord] = []
    tokens: list[list[int]] = []
    texts: list[str] = []

    def note(answerer: Answerer, *said: str) -> None:
        records.append(record_of(answerer.engine))
        tokens.append(list(answerer.engine.loaded.state.tokens))
        texts.extend(said)

    with answerer(talking, slots=8, trace=path, pack=talking.parent / "none") as talker:
        note(talker, SECRET, "".join(talker.continue_text(SECRET, options())))
        conversation = [{"role": "system", "content": SYSTEM}, *user("Marzipan?")]
        note(talker, SYSTEM, "Marzipan", "".join(talker.reply(conversation, options())))
        cancel = threading.Event()
        cancel.set()
        note(talker, *talker.continue_text(SECRET[:9], options(), cancel=cancel))
        steps = talker.continue_text(SECRET, options())
        next(steps)
        steps.close()  # type: ignore[attr-defined]
        note(talker)
    return path, records, tokens, texts


def test_the_records_are_those_of_the_requests(traced: tuple[Any, ...]) -> None:
    path, records, _, _ = traced
    trace = read_trace(path)
    assert trace.warnings == ()
    assert list(trace.records) == records
    assert [r.status for r in records] == ["done", "done", "cancelled", "cancelled"]
    assert trace.header.model.arch == "llama"
    assert trace.header.model.file == "talking.gguf"
    assert (trace.header.model.experts, trace.header.model.experts_used) == (8, 2)
    assert trace.header.settings == records[0].settings


def test_every_line_is_what_the_schema_says(traced: tuple[Any, ...]) -> None:
    validator = jsonschema.Draft202012Validator(trace_schema())
    for line in traced[0].read_text().splitlines():
        validator.validate(json.loads(line))


def test_the_spans_of_a_request_are_its_ledger(traced: tuple[Any, ...]) -> None:
    trace = read_trace(traced[0])
    for record in trace.records:
        spans = [
            e for e in trace.events if isinstance(e, PhaseSpan) and e.request == record.request
        ]
        outermost = sum(s.end_ns - s.start_ns for s in spans if s.depth == 1)
        assert outermost == record.ledger.wall_ns - record.ledger.ns("other")
        for name, phase in record.ledger.phases.items():
            if name != "other":
                assert sum(s.name == name for s in spans) == phase.calls
        windows = [w for w in trace.events if isinstance(w, WindowDone)]
        mine = [w for w in windows if w.request == record.request]
        assert len(mine) == (record.decode.windows if record.decode else 0)


def test_one_of_each_for_a_request(traced: tuple[Any, ...]) -> None:
    events = read_trace(traced[0]).events
    for record in traced[1]:
        for kind in (RequestStart, RequestEnd):
            mine = [e for e in events if isinstance(e, kind) and e.request == record.request]
            assert len(mine) == 1
        loans = [e for e in events if isinstance(e, LoanMade) and e.request == record.request]
        assert len(loans) == (record.loan is not None)
        if loans and record.loan:
            assert (loans[0].slots, loans[0].bytes) == (record.loan.slots, record.loan.bytes)
    assert any(isinstance(e, RefillDone) for e in events)
    assert any(isinstance(e, LaneWork) and e.name in ("read", "decode") for e in events)


def test_the_store_says_why_it_is_slow(traced: tuple[Any, ...]) -> None:
    notes = [e for e in read_trace(traced[0]).events if isinstance(e, Note) and e.code == "store"]
    assert len(notes) == 1
    assert "three reads an expert" in notes[0].text


def test_no_text_of_prompts_or_answers(traced: tuple[Any, ...]) -> None:
    content = traced[0].read_text()
    words = [w for text in traced[3] for w in text.split() if len(w) > 3]
    assert "Zebrafish" in words
    for word in words:
        assert word not in content
        assert json.dumps(word)[1:-1] not in content


def test_no_folders(traced: tuple[Any, ...], talking: Path) -> None:
    content = traced[0].read_text()
    for folder in talking.parent.parts[1:]:
        assert f"{folder}/" not in content
    assert "Secretfolder" not in content


def lists(data: Any) -> Iterator[list[Any]]:
    if isinstance(data, list):
        yield data
    for item in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from lists(item)


def test_no_token_ids(traced: tuple[Any, ...]) -> None:
    """No two neighbours of any list in the trace are neighbours in a prompt or an answer."""
    neighbours = {pair for ids in traced[2] for pair in pairwise(ids)}
    assert len(neighbours) > 20
    for line in traced[0].read_text().splitlines():
        for found in lists(json.loads(line)):
            plain = [item for item in found if isinstance(item, int)]
            assert not neighbours & set(pairwise(plain))


def test_perfetto_shows_it(traced: tuple[Any, ...], tmp_path: Path) -> None:
    export_perfetto(read_trace(traced[0]), tmp_path / "p.json")
    chrome = json.loads((tmp_path / "p.json").read_text())
    names = {e["args"]["name"] for e in chrome["traceEvents"] if e["name"] == "thread_name"}
    assert {f"request {r.request}" for r in traced[1]} <= names
    assert any(name.startswith("lane ") for name in names)
    assert all(e["dur"] >= 0 for e in chrome["traceEvents"] if e["ph"] == "X")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make("gpt-oss", tmp_path_factory.mktemp("traced-model"))


def test_settings_that_are_files_lose_their_folders(model: Small, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    profile = model.profiles["skewed"]
    with open_engine(model, trace=path, profile=profile, pack=model.pack) as engine:
        generate(engine)
    header = read_trace(path).header
    assert (header.settings.profile, header.settings.pack) == ("skewed.json", "pack")
    assert str(model.folder) not in path.read_text()


def test_a_request_with_and_without_a_trace_is_the_same(model: Small, tmp_path: Path) -> None:
    with open_engine(model) as engine:
        expected = generate(engine, OTHER)
        phases = record_of(engine).ledger.phases.keys()
    with open_engine(model, trace=tmp_path / "t.jsonl") as engine:
        assert generate(engine, OTHER) == expected
        assert record_of(engine).ledger.phases.keys() == phases


def test_a_request_that_failed_is_in_the_trace(model: Small, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with open_engine(model, trace=path) as engine:
        with pytest.raises(Exception, match="token id 999"):
            generate(engine, [999])
        cancel = threading.Event()
        cancel.set()
        with pytest.raises(Cancelled):
            generate(engine, PROMPT, cancel=cancel)
    ends = [e for e in read_trace(path).events if isinstance(e, RequestEnd)]
    assert [e.status for e in ends] == ["failed", "cancelled"]


def test_the_trace_of_a_killed_process_can_be_read(model: Small, tmp_path: Path) -> None:
    """Everything up to the last finished request is in the file before the next begins."""
    path = tmp_path / "t.jsonl"
    with open_engine(model, trace=path) as engine:
        generate(engine)
        trace = read_trace(path)
        assert [r.status for r in trace.records] == ["done"]
        assert any("no end mark" in warning for warning in trace.warnings)


def test_a_full_disk_ends_the_trace_and_not_the_request(model: Small) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full here")
    with open_engine(model) as engine:
        expected = generate(engine)
    with open_engine(model, trace=full) as engine:
        assert generate(engine) == expected
        assert engine.tracing.sink is not None
        assert "No space left" in engine.tracing.sink.stopped
