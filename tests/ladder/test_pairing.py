"""Samples find their request in a trace, and what has no partner is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ladder.driving import run
from ladder.small_server import SmallServer

from slotwise.explain.readers.ladder_record import lives_of
from slotwise.ladder.arms import Arm, Engaged
from slotwise.ladder.pairing import pair, request_of
from slotwise.ladder.record import Record
from slotwise.ladder.report import ladder_report
from slotwise.trace.ledger import Ledger
from slotwise.trace.record import RequestRecord, Tokens

PER_SLOT = 0.319


@pytest.fixture
def record(server: SmallServer, tmp_path: Path) -> Record:
    data = run(tmp_path / "run.json", url=server.url, sizes=(60, 120, 300), samples=4)
    for sample in data["samples"]:
        sample["timings"] = None
    return Record(tmp_path / "run.json", data)


def block(tokens: int, *, slots: int) -> str:
    """Strata's log of one request: everything is known of it."""
    read, refill = 109 + 0.706 * (tokens - 1), PER_SLOT * slots
    prompt_ms = read + refill + 56
    lines = [
        f"request {tokens} 0",
        f"prompt start {tokens - 1} -1",
        f"lent {slots} slots for 256 tokens in 0.0 ms",
        f"read {tokens - 1} tokens (batched) in {read:.1f} ms",
        f"refill start {slots} -1",
        f"refilled {slots} slots on 1 stage(s) in {refill:.1f} ms",
        "prompt done (slots refilled) -1 -1",
        f"window {tokens - 1} 1",
    ]
    return "".join(f"strata trace: {line}\n" for line in lines) + (
        f"DONE 3 {tokens} {prompt_ms:.1f} 100.0 stop 0 0 0\n"
        f"strata serve: prompt {tokens} tokens = 0 reused + {tokens} read in {prompt_ms:.0f} ms "
        f"(1.0 tok/s), 3 generated in 100 ms (80.0 tok/s), drafts accepted 0 of 0, 1 checkpoints\n"
    )


def strata_log(path: Path, samples: list[dict[str, Any]]) -> Path:
    """One block per sample. The client's times do not fit, but the pairing is by tokens."""
    path.write_text(
        "".join(block(s["tokens"]["prompt"], slots=100 + s["tokens"]["prompt"]) for s in samples)
    )
    return path


def slow_client(record: Record) -> None:
    for sample in record.data["samples"]:
        sample["edges_ms"]["first_token"] += 1_000.0


def test_every_sample_finds_its_block_in_strata_s_log(record: Record, tmp_path: Path) -> None:
    slow_client(record)
    samples = record.data["samples"]
    log = strata_log(tmp_path / "s.log", samples)
    said = pair(record, {"server": [log]}, ())
    assert (said["paired"], said["unpaired_samples"], said["unpaired_requests"]) == (15, [], 0)
    assert said["warnings"] == []
    assert said["files"][0]["name"] == "s.log"
    for sample in samples:
        assert sample["trace"]["prompt"]["value"] == sample["tokens"]["prompt"]
        assert sample["trace"]["ttft_ms"]["value"] == sample["edges_ms"]["first_token"]
    report = ladder_report(record.data, file="run.json")
    (arm,) = report.arms
    assert [row.lent for row in arm.rows] == [160, 220, 400]
    assert arm.refill is not None
    assert arm.refill.rate.terms[0].value == pytest.approx(PER_SLOT, abs=0.001)
    line = arm.read.line
    assert line is not None
    assert line.terms[0].value == pytest.approx(109, abs=0.2)
    assert line.terms[1].value == pytest.approx(0.706, abs=0.001)


def test_what_has_no_partner_is_said_on_both_sides(record: Record, tmp_path: Path) -> None:
    slow_client(record)
    samples = record.data["samples"]
    missing = samples[4]
    log = strata_log(tmp_path / "s.log", [s for s in samples if s is not missing])
    log.write_text(block(77, slots=5) + log.read_text() + block(60, slots=5))
    said = pair(record, {"server": [log]}, ())
    assert said["paired"] == 14
    assert len(said["unpaired_samples"]) == 1
    lost = samples[said["unpaired_samples"][0]]
    assert lost["tokens"] == missing["tokens"]
    assert said["unpaired_requests"] == 2
    warnings = ladder_report(record.data | {"pairing": said}, file="r").warnings
    assert any("1 samples have no request in the trace" in text for text in warnings)


def test_a_pair_whose_times_contradict_is_warned_of(record: Record, tmp_path: Path) -> None:
    log = strata_log(tmp_path / "s.log", record.data["samples"])
    said = pair(record, {"server": [log]}, ())
    assert any("is before the end of the read" in text for text in said["warnings"])


def test_a_counter_of_the_trace_decides_after_the_run(record: Record, tmp_path: Path) -> None:
    slow_client(record)
    samples = record.data["samples"]
    log = strata_log(tmp_path / "s.log", samples[:-1])
    engaged = Engaged(counter="trace:slots_refilled", above=0)
    for sample in samples:
        sample["engaged"] = [None]
    pair(record, {"server": [log]}, [Arm(name="server", engaged=(engaged,))])
    proven = [s for s in samples if s["status"] == "ok"]
    assert len(proven) == 14
    assert all(s["engaged"] == [s["trace"]["slots_refilled"]["value"]] for s in proven)
    (refused,) = [s for s in samples if s["status"] == "refused"]
    assert refused["why"] == "the arm's counter trace:slots_refilled is absent"


def own_block(tokens: int) -> dict[str, Any]:
    ledger = Ledger()
    with ledger.phase("read.attention"):
        pass
    done = ledger.close("done")
    record = RequestRecord(
        request="r1", status="done", ledger=done,
        tokens=Tokens(prompt=tokens, reused=0, read=tokens - 1, generated=3),
    )  # fmt: skip
    return {"request": "r1", "record": record.to_dict()}


def test_our_own_answers_bring_their_ledger_along(record: Record) -> None:
    samples = record.data["samples"]
    for sample in samples[1:]:
        sample["slotwise"] = own_block(sample["tokens"]["prompt"])
    samples[2]["slotwise"] = own_block(9_999)  # not of this sample
    said = pair(record, {}, ())
    assert said["method"] == "the ledger inside the answer"
    assert said["paired"] == 13
    assert said["unpaired_samples"] == [0, 2]
    names = {p["name"] for p in samples[1]["trace"]["phases"]}
    assert "read.attention" in names
    (warm, _) = lives_of(record.data, file="r")
    assert any(p.name == "read.attention" for p in warm.requests[0].phases)


def test_a_block_without_a_ledger_is_no_request() -> None:
    assert request_of({"lever": "on"}) is None
    assert request_of({"record": {"tokens": {}}}) is None
    assert request_of({"record": "text"}) is None
