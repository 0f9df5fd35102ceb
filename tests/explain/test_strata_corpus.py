"""Right figures from public Strata logs. Each folder's SOURCE.txt says where it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from slotwise.explain.readers import read_files
from slotwise.explain.record import Life, Phase, Request

DATA = Path(__file__).parents[1] / "data" / "explain"


def read(*names: str) -> tuple[Life, ...]:
    reading = read_files([DATA / name for name in names])
    assert not [text for text in reading.unreadable if "last line" not in text]
    return reading.lives


def only(name: str) -> tuple[Request, ...]:
    (life,) = read(name)
    return life.requests


def phase(request: Request, name: str, lane: str = "request") -> Phase:
    (found,) = [p for p in request.phases if p.name == name and p.lane == lane]
    return found


def ms(request: Request, name: str, lane: str = "request") -> float:
    value = phase(request, name, lane).ms.value
    assert value is not None
    return value


def rest(request: Request, name: str = "prompt_ms - (lent + read + refilled)") -> float:
    (found,) = [p for p in request.remainders if p.name == name]
    assert found.ms.how == "derived"
    assert found.ms.value is not None
    return found.ms.value


def test_p023_medians_come_out_exactly() -> None:
    requests = only("strata-notmike101-P023/engine-session.thinned.txt")
    assert len(requests) == 24
    cells = {
        "short/new": requests[2:12:2],
        "short/hit": requests[3:12:2],
        "longer/new": requests[14:24:2],
        "longer/hit": requests[15:24:2],
    }
    expected = {
        "short/new": (603.7, 99.5, 45.9, 788),
        "short/hit": (None, None, 41.7, 62),
        "longer/new": (5626.0, 435.1, 53.8, 6158),
        "longer/hit": (None, None, 40.7, 61),
    }
    for cell, (batched, refill, windows, prompt) in expected.items():
        group = cells[cell]
        assert len(group) == 5
        if batched is not None:
            assert median(ms(r, "read (batched)") for r in group) == batched
            assert median(ms(r, "refill") for r in group) == refill
        else:
            assert all(p.name == "read (windows)" for r in group for p in r.phases)
            assert {r.slots_lent.value for r in group} == {0}
        assert median(ms(r, "read (windows)") for r in group) == windows
        assert median(r.prompt_ms.value or 0 for r in group) == prompt
    lefts = [round(rest(r), 1) for r in cells["longer/new"]]
    assert lefts == [38.0, 37.4, 38.2, 37.8, 37.8]
    assert {r.slots_lent.value for r in cells["longer/new"]} == {1371}
    assert {r.slots_refilled.value for r in cells["short/new"]} == {311}


def test_p023_the_last_token_is_the_first_windows() -> None:
    for request in only("strata-notmike101-P023/engine-session.thinned.txt"):
        assert request.status == "done"
        assert request.read.value == request.read_planned.value
        assert request.read.value == (request.facts["read as printed"].value or 0) - 1
        assert any("window lines are missing" in warning for warning in request.warnings)


def test_p019a_cut_request_is_incomplete_not_zero() -> None:
    first, second = only("strata-notmike101-P019A/engine-session.thinned.txt")
    assert round(rest(first), 1) == 66.9
    assert first.first_of_life
    assert second.status == "incomplete"
    assert second.prompt_ms.how == "bounded"
    refill = phase(second, "refill").ms
    assert (refill.value, refill.how, refill.high) == (None, "bounded", None)
    assert second.slots_refilled.how == "bounded"
    assert second.generated.how == "missing"
    assert not second.remainders


def test_resident_profile_staging_is_per_request() -> None:
    requests = only("strata-yqyo1-resident-profile/engine.reduced.log")
    staging = [phase(r, "host: host staging", "host").ms for r in requests]
    assert (staging[0].how, staging[0].value, staging[0].high) == ("bounded", None, 8925)
    assert [v.value for v in staging[1:]] == [9784, 9823, 8981, 8986, 9767, 9797, 8972]
    assert [rest(r, "prompt_ms - named phases") for r in requests][3] == 4
    assert ms(requests[0], "gpu: qsa select", "gpu timeline") == pytest.approx(202.029268)
    assert ms(requests[3], "gpu: qsa select", "gpu timeline") == pytest.approx(42.17, abs=0.01)
    for request in requests:
        assert 222 < rest(request, "wall - GPU timeline") < 241
        assert abs(rest(request, "GPU timeline - named phases")) <= 3
        assert "idle" in phase(request, "gpu: embed+steps", "gpu timeline").contains
        assert request.slots_lent.value == 0


def test_sycl_chunks_and_request_line_are_two_views() -> None:
    (request,) = only("strata-sycl-p2/p2-32k-timing.excerpt.log")
    chunks = "gpu timeline (chunks)"
    staging = phase(request, "host: host staging", chunks).ms
    assert (staging.how, staging.low, staging.high) == ("bounded", 4714, 6229)
    assert ms(request, "GPU timeline", chunks) == 71172
    assert ms(request, "gpu: qsa attn", chunks) == 53679
    assert ms(request, "prefill wall", chunks) == 79818
    assert ms(request, "GPU timeline", "gpu timeline") == 64970
    assert rest(request, "prefill wall - chunk walls") == 92510 - 79818
    assert rest(request, "prompt_ms - named phases") == 2356
    assert "15406" not in str(request.to_dict())
    assert request.read.value == 32255


def test_split_stages_are_never_added() -> None:
    first, second = only("strata-two-gpu-split/prefill-128k.log")
    assert ms(first, "prefill wall", "stage 0") == 23591
    assert ms(first, "prefill wall", "stage 1") == 20911
    assert phase(first, "GPU timeline", "stage 0").tokens == 126993
    assert phase(first, "GPU timeline", "stage 1").tokens == 126993
    assert not [p for r in (first, second) for p in r.phases if p.lane == "request"]
    staging = phase(first, "host: host staging", "stage 1").ms
    assert (staging.low, staging.high) == (516 - 383, 516)
    later = phase(second, "host: host staging", "stage 1").ms
    assert (later.low, later.high) == (903 - 882, 903 - 516)
    ple = phase(first, "host: PLE", "stage 0").ms
    assert (ple.how, ple.value) == ("bounded", None)


def test_decode_timing_leaves_the_rest_unexplained() -> None:
    requests = only("strata-two-gpu-split/decode-timing.log")
    assert len(requests) == 8
    for request in requests:
        assert abs(rest(request, "window - (verify + commit + draft)")) <= 0.031
        assert 8 < rest(request, "verify - (wait + host + stage)") < 11
        assert request.prompt_ms.how == "missing"


def test_batch_shows_the_other_slots_decode() -> None:
    one, single, other, back = only(
        "strata-niko-7900gre-batch/batch-concurrent-batch2.engine.reduced.log"
    )
    assert not one.phases
    assert ms(other, "other slots' decode") == 855
    assert rest(other, "prompt_ms - named phases") == 2866
    assert round(other.facts["own read tok/s"].value or 0) == 814
    assert ms(single, "slot takes the sequence", "outside prompt_ms") == 103.4
    assert single.read.value == 0
    assert any("no speed to compare" in w for w in single.warnings)
    assert ms(back, "slot hand-back") == 104.8
    assert one.slots_lent.value == 0


def test_parking_lies_inside_the_next_prompt() -> None:
    _, second, third, fourth = only("strata-yqyo1-mtp-serve/layout3.log")
    assert ms(second, "conversation parked") == 165.6
    assert ms(third, "conversation parked") == 148.3
    assert ms(fourth, "conversation restored") == 41.9
    assert round(rest(fourth, "prompt_ms - named phases"), 1) == 574.1


@pytest.mark.parametrize(
    "name",
    [
        "strata-niko-2x3060/engine-0.1.39.log",
        "strata-2x5060ti/engine-timing-lines.txt",
        "strata-niko-arcb65/native-timings.log",
    ],
)
def test_summary_only_logs_get_no_phases(name: str) -> None:
    for life in read(name):
        assert any("STRATA_TRACE" in text for text in life.cannot_tell)
        assert any("STRATA_PREFILL_TIMING" in text for text in life.cannot_tell)
        for request in life.requests:
            assert not request.phases
            assert not request.remainders
            assert request.slots_lent.how == "missing"
            assert request.ttft_ms.value is None


def test_rates_are_over_what_was_read() -> None:
    request = only("strata-niko-2x3060/engine-0.1.39.log")[5]
    assert request.facts["read tok/s as printed"].value == 1295.9
    assert request.facts["read as printed"].value == 51748
    ladder = only("strata-2x5060ti/engine-timing-lines.txt")
    by_size = {
        size: median(r.prompt_ms.value or 0 for r in ladder if r.prompt.value == size)
        for size in (4096, 32768, 128000)
    }
    assert by_size == {4096: 5067, 32768: 16972, 128000: 58205}


def test_protocol_lines_are_more_exact_and_warm_ups_are_marked() -> None:
    lives = read("strata-niko-arcb65/native-timings.log")
    assert [len(life.requests) for life in lives] == [16, 16, 16]
    first = lives[0].requests[4]
    assert first.prompt_ms.value == 5025.9
    assert first.decode_ms.value == 13401.6
    assert sum(r.facts["measured"].value or 0 for r in lives[0].requests) == 10


def test_start_up_facts() -> None:
    (life,) = read("strata-notmike101-P023/engine-session.thinned.txt")
    assert life.version == "0.1.41"
    assert life.facts["slots"].value == 8409
    assert life.facts["chunk tokens"].value == 8192
    assert life.facts["slot bytes"].value == pytest.approx(15.95 * 2**30 / 8409, rel=1e-6)
    assert life.capabilities["lent lines"]
    assert not life.capabilities["prefill timing"]


def test_a_ladder_has_totals_and_no_phases() -> None:
    lives = read("strata-niko-3070ti-ladder/orchestrator-session1.log")
    assert [len(life.requests) for life in lives] == [2, 2, 2, 2, 2, 4]
    found = [r.ttft_ms.value for life in lives for r in life.requests]
    seconds = (7.5, 25.4, 11.3, 43.2, 8.1, 30.6, 13.5, 54.3, 11.3, 43.2, 8.1, 30.6, 61.4, 246.0)
    assert found == pytest.approx([s * 1e3 for s in seconds])
    for request in (r for life in lives for r in life.requests):
        assert not request.phases
        assert abs(rest(request, "ttft - target/prefill")) < 650
    assert any("phases" in text for text in lives[0].cannot_tell)


def test_turns_derived_from_a_trace() -> None:
    requests = only("strata-annoyingtech-shortread/short-read-trace-summary.reduced.json")
    assert len(requests) == 31
    base, turns = requests[0], [r for r in requests[1:] if "read (batched)" in str(r.phases)]
    assert base.slots_refilled.value == 4254
    assert ms(base, "refill") == 327.1
    expected = {97: (588.9, 515.1, 24.7, 316), 676: (985.0, 908.0, 31.0, 399)}
    for read, (prompt, batched, refill, slots) in expected.items():
        group = [r for r in turns if abs((r.read.value or 0) + 1 - read) <= 12]
        assert median(r.prompt_ms.value or 0 for r in group) == pytest.approx(prompt, abs=1)
        assert median(ms(r, "read (batched)") for r in group) == pytest.approx(batched, abs=1)
        assert median(ms(r, "refill") for r in group) == pytest.approx(refill, abs=0.6)
        assert median(r.slots_refilled.value or 0 for r in group) == slots
    path = DATA / "strata-annoyingtech-shortread/short-read-trace-summary.reduced.json"
    others = [turn["other_ms"] for turn in json.loads(path.read_text())["turns"]]
    assert [rest(request) for request in requests] == pytest.approx(others)
    for request in requests:
        assert request.read.value == request.read_planned.value
        assert request.reused.how == "missing"
        assert not request.warnings or "no speed" in request.warnings[0]


def test_turns_with_the_client_s_clock() -> None:
    batched, windows = read("strata-annoyingtech-shortread/short-read-comparison.reduced.json")
    outside = [r.facts["outside prompt_ms"].value or 0 for r in batched.requests]
    assert len(outside) == 30
    found = (min(outside), median(outside), max(outside))
    assert [round(v, 1) for v in found] == [167.7, 174.1, 178.3]
    assert [r.prompt_ms.value for r in (batched.requests[0], windows.requests[0])] == [
        915.7,
        3786.0,
    ]
    assert batched.requests[0].prompt.value == 64548 + 362
    assert not batched.requests[0].phases
