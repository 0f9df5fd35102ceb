"""Small logs made for one trap each, in Strata's format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotwise.explain.readers import read_files
from slotwise.explain.readers.strata import StrataReader
from slotwise.explain.record import Life, Phase, Reading, Request

REST = "prompt_ms - (lent + read + refilled)"


def lives(text: str) -> list[Life]:
    reader = StrataReader("engine.log")
    for number, line in enumerate(text.splitlines(), 1):
        reader.feed(number, line)
    return reader.finish()


def requests(text: str) -> tuple[Request, ...]:
    (life,) = lives(text)
    return life.requests


def one(text: str) -> Request:
    (request,) = requests(text)
    return request


def trace(*lines: str) -> str:
    return "".join(f"strata trace: {line}\n" for line in lines)


def summary(
    prompt: int, ms: float, *, reused: int = 0, read: str = "", generated: int = 8, end: str = ""
) -> str:
    read = read or str(prompt - reused)
    return (
        f"strata serve: prompt {prompt} tokens = {reused} reused + {read} read in {ms:.0f} ms "
        f"(1.0 tok/s), {generated} generated in 100 ms (80.0 tok/s), "
        f"drafts accepted 0 of 0, 1 checkpoints{end}\n"
    )


def phase(request: Request, name: str, lane: str = "request") -> Phase:
    (found,) = [p for p in request.phases if p.name == name and p.lane == lane]
    return found


def left(request: Request, name: str = REST) -> float:
    (found,) = [p for p in request.remainders if p.name == name]
    assert found.ms.how == "derived"
    return found.ms.value or 0.0


@pytest.mark.parametrize(
    ("tokens", "read", "refill", "slots"),
    [(127, 252.0, 71.7, 225), (457, 432.0, 82.6, 259), (1609, 1245.0, 188.2, 589)],
)
def test_the_second_document_s_table(tokens: int, read: float, refill: float, slots: int) -> None:
    prompt_ms = read + refill + 56
    request = one(
        trace(
            f"request {tokens + 1} 0",
            f"prompt start {tokens} -1",
            f"lent {slots} slots for 256 tokens in 0.0 ms",
            f"prompt chunk 0 of {tokens}",
            f"read {tokens} tokens (batched) in {read:.1f} ms",
            f"refill start {slots} -1",
            f"refilled {slots} slots on 1 stage(s) in {refill:.1f} ms",
            "prompt done (slots refilled) -1 -1",
            f"window {tokens} 1",
        )
        + f"DONE 8 {tokens + 1} {prompt_ms:.1f} 100.0 stop 0 0 0\n"
        + summary(tokens + 1, prompt_ms)
    )
    assert phase(request, "read (batched)").ms.value == read
    assert phase(request, "refill").ms.value == refill
    assert phase(request, "refill").slots == slots
    assert refill / slots == pytest.approx(0.319, abs=0.001)
    assert left(request) == pytest.approx(56)
    assert "56" not in {p.name for p in request.phases}
    assert not request.warnings


def test_a_growing_loan_hides_a_refill_and_its_total_is_not_summed() -> None:
    request = one(
        trace(
            "request 5001 0",
            "prompt start 5000 -1",
            "lent 311 slots for 256 tokens in 0.2 ms",
            "read 200 tokens (batched) in 600.0 ms",
            "refill start 311 -1",
            "lent 1371 slots for 4096 tokens in 101.5 ms",
            "read 4700 tokens (batched) in 5000.0 ms",
            "lent 1371 slots for 4096 tokens in 0.0 ms",
            "read 100 tokens (batched) in 400.0 ms",
            "refill start 1371 -1",
            "refilled 1371 slots on 1 stage(s) in 435.0 ms",
            "prompt done (slots refilled) -1 -1",
        )
        + summary(5001, 6600)
    )
    assert request.slots_lent.value == 1371
    assert request.slots_refilled.value == 1371
    assert request.facts["slots refilled inside lend"].value == 311
    lend = phase(request, "lend")
    assert lend.ms.value == pytest.approx(101.7)
    assert "311" in lend.contains
    inside = phase(request, "refill (inside lend)", "inside lend").ms
    assert (inside.value, inside.low, inside.how) == (None, 0, "bounded")
    assert request.facts["batched parts"].value == 3
    assert left(request) == pytest.approx(6600 - 101.7 - 6000 - 435)


def test_a_refill_on_two_stages() -> None:
    text = trace(
        "request 101 0",
        "lent 300 slots for 256 tokens in 0.3 ms",
        "read 100 tokens (batched) in 500.0 ms",
        "refill start 200 -1",
        "refill start 100 -1",
        "refilled 300 slots on 2 stage(s) in 70.0 ms",
        "prompt done (slots refilled) -1 -1",
    )
    request = one(text + summary(101, 600))
    assert request.slots_refilled.value == 300
    assert not request.warnings
    wrong = one(text.replace("refilled 300", "refilled 299") + summary(101, 600))
    assert any("299" in warning for warning in wrong.warnings)


def test_a_cancelled_part_prints_its_planned_length() -> None:
    request = one(
        trace(
            "request 98179 0",
            "lent 1546 slots for 4096 tokens in 3.2 ms",
            "read 98178 tokens (batched) in 17000.0 ms",
            "refill start 1546 -1",
            "refilled 1546 slots on 1 stage(s) in 500.0 ms",
            "prompt done (slots refilled) -1 -1",
        )
        + "DONE 0 98179 17565.0 0.0 cancel 0 0 0 0 0 0 0 0.0 12288\n"
        + summary(98179, 17565, read="12288 of 98179", generated=0, end=" (cancelled)")
    )
    assert request.status == "cancelled"
    assert request.read.value == 12288
    assert request.read_planned.value == 98178
    assert "planned" in phase(request, "read (batched)").contains
    assert not request.warnings


def test_a_cancel_known_only_from_the_protocol() -> None:
    request = one("DONE 0 98179 17565.0 0.0 cancel 0 0 0 0 0 0 0 0.0 12288\n")
    assert (request.status, request.read.value) == ("cancelled", 12288)
    assert request.prompt_ms.value == 17565.0


def test_a_failed_request_and_the_next_life() -> None:
    start = "[strata] 2026-10-09 10:00:00 engine started: /opt/x/strata --serve --batch 2\n"
    text = (
        start
        + trace("request 101 0", "lent 300 slots for 256 tokens in 0.3 ms")
        + "ERR out of memory while reading /secret/model\n"
        + start.replace("10:00", "10:05")
        + trace("request 101 0", "read 100 tokens (windows) in 70.0 ms")
        + trace("prompt done (slots refilled) -1 -1")
        + summary(101, 90)
    )
    first, second = lives(text)
    assert [r.status for r in first.requests] == ["failed"]
    assert [r.status for r in second.requests] == ["done"]
    assert second.requests[0].first_of_life
    assert first.facts["--batch"].value == 2


def timing(tokens: int, staging: int, *, wall: int = 1000, phases: str = "gdn 900 (100.0%)") -> str:
    return (
        f"strata prefill timing: {tokens} tokens, GPU timeline 900 ms, wall {wall} ms, "
        f"host staging {staging} ms: {phases}\n"
        "strata prefill timing: host: chunk setup (PLE rows, the expert stream plan) 1 ms, waiting "
        "for each chunk 2 ms, after each chunk (the draft layer, progress) 3 ms, PLE 0 ms\n"
    )


@pytest.mark.parametrize("marked", [True, False])
def test_no_difference_across_a_restart(marked: bool) -> None:
    header = "[strata] 2026-10-09 10:05:00 engine started: strata --serve\n" if marked else ""
    text = (
        timing(4096, 9000)
        + summary(4097, 1010)
        + timing(4096, 18000)
        + summary(4097, 1010)
        + header
        + timing(4096, 8800)
        + summary(4097, 1010)
        + timing(4096, 17700)
        + summary(4097, 1010)
    )
    first, second = lives(text)
    for life, difference, top in ((first, 9000, 9000), (second, 8900, 8800)):
        values = [phase(r, "host: host staging", "host").ms for r in life.requests]
        assert [v.how for v in values] == ["bounded", "derived"]
        assert values[0].high == top
        assert values[1].value == difference
        assert [r.first_of_life for r in life.requests] == [True, False]


def test_a_restart_before_the_last_request_is_seen() -> None:
    text = timing(4096, 9000) + summary(4097, 1010) + timing(4096, 8800) + summary(4097, 1010)
    first, second = lives(text)
    assert [r.first_of_life for r in (*first.requests, *second.requests)] == [True, True]
    assert second.capabilities["prefill timing"]
    assert any("restarted" in note for note in second.notes)


def test_lives_appended_to_one_file() -> None:
    up = (
        "strata generate: loaded 46.84 GiB at 1.27 GiB/s\n"
        "strata generate: expert cache 128 slots, 0.32 GiB of VRAM; policy is\n"
        "strata generate: session is up (engine {})\n"
    )
    text = up.format("0.1.36") + summary(50, 100) + up.format("0.1.41") + summary(60, 100)
    first, second = lives(text)
    assert (first.version, second.version) == ("0.1.36", "0.1.41")
    assert [len(life.requests) for life in (first, second)] == [1, 1]
    assert second.first_line == 5


def test_old_versions_bound_what_they_do_not_time() -> None:
    request = one(
        trace(
            "request 1001 0",
            "prompt chunk 0 of 1000",
            "read 1000 tokens (batched) in 800.0 ms",
            "refill start 400 -1",
            "prompt done (slots refilled) -1 -1",
        )
        + summary(1001, 950)
    )
    for name in ("lend", "refill"):
        value = phase(request, name).ms
        assert (value.value, value.low, value.high) == (None, 0, 150)
    assert request.slots_refilled.value == 400
    assert any("0.1.32" in text for text in request.cannot_tell)
    assert left(request) == 150


OLD = trace(
    "request 1001 0", "read 1000 tokens (batched) in 800.0 ms", "prompt done (slots refilled) -1 -1"
)


def test_a_version_without_any_loan_line_gets_bounds_or_a_reason() -> None:
    request = one(OLD + summary(1001, 950))
    assert [(p.name, p.ms.high) for p in request.phases if not p.ms.known] == [
        ("lend", 150),
        ("refill", 150),
    ]
    assert (request.slots_lent.how, request.slots_refilled.how) == ("missing", "missing")
    new = one("strata generate: session is up (engine 0.1.41)\n" + OLD + summary(1001, 950))
    assert [p.name for p in new.phases] == ["read (batched)"]
    assert new.slots_lent.value == 0
    own = one(
        "strata serve: the prompt path allocates its own buffers\n" + OLD + summary(1001, 950)
    )
    assert [p.name for p in own.phases] == ["read (batched)"]


def test_a_fork_s_phase_names_are_parsed() -> None:
    phases = "gdn proj in 300 (33.3%) warp-lattice+mix 500 (55.6%) dense proj 100 (11.1%)"
    request = one(timing(1000, 5, phases=phases) + summary(1001, 1010))
    assert phase(request, "gpu: warp-lattice+mix", "gpu timeline").ms.value == 500
    assert phase(request, "gpu: gdn proj in", "gpu timeline").ms.value == 300
    assert left(request, "GPU timeline - named phases") == 0


def test_a_french_fork_s_lines() -> None:
    request = one(
        "strata prefill timing: prompt, GPU 900 ms: qsa attn 500 ms (55.6%), "
        "qsa indexer+select 300 ms (33.3%), dense proj 100 ms (11.1%)\n" + summary(1001, 1010)
    )
    assert phase(request, "gpu: qsa indexer+select", "gpu timeline").ms.value == 300
    assert left(request, "GPU timeline - named phases") == 0


def test_a_fork_that_prints_only_json_phases() -> None:
    request = one(
        'strata prefill phases: {"gpu_timeline_ms": 9.5, "phase_ms": {"gdn": 5.25, "ple": 4.0}}\n'
        'strata prefill transfer: {"dma_active_ms": 7.5, "expert_bytes": 100, "who": "x"}\n'
        + summary(1001, 1010)
    )
    assert phase(request, "gpu: gdn", "gpu timeline").ms.value == 5.25
    assert left(request, "GPU timeline - named phases") == 0.25
    assert request.facts["dma_active_ms"].value == 7.5
    assert "who" not in request.facts


def test_peer_gpu_phases_are_a_lane_of_their_own() -> None:
    request = one(
        timing(1000, 5)
        + "strata prefill timing (peer GPU, ms): gather 12 gemm gate/up 30; MoE layers 48, "
        "rows/layer 10 of 20 cap, experts/layer 5, over the cap 0\n"
        "strata prefill timing: peer-streamed experts 480 (10 per MoE layer)\n"
        + summary(1001, 1010)
    )
    assert phase(request, "peer: gemm gate/up", "peer gpu").ms.value == 30
    assert request.facts["peer-streamed experts"].value == 480


def test_a_host_clock_is_said() -> None:
    text = "strata generate: session is up (engine 0.1.40-vulkan)\n" + timing(1000, 5)
    request = one(text + summary(1001, 1010))
    assert "host clock" in phase(request, "gpu: gdn", "gpu timeline").contains


def test_a_stall_is_a_failed_request() -> None:
    line = "strata serve: no progress for 90 s during a request (reading) - stopping the engine"
    request = one(line + "\n")
    assert (request.status, request.prompt_ms.how) == ("failed", "missing")


def test_what_no_request_follows_is_noted() -> None:
    text = summary(101, 90)
    text += "strata serve: conversation cache: parked 9 tokens in 12.0 ms; parked=1\n"
    (life,) = lives(text)
    assert len(life.requests) == 1
    assert any("not followed" in note for note in life.notes)


def test_the_tail_of_a_request_cut_off_is_given_to_no_other() -> None:
    rate = "strata serve: decode expert cache hit rate: 90.0% (9 hits / 10 lookups)\n"
    (life,) = lives(rate + summary(101, 90) + summary(102, 90) + rate.replace("90.0", "80.0"))
    rates = [r.facts.get("decode hit rate %") for r in life.requests]
    assert rates[0] is None
    assert rates[1] is not None
    assert rates[1].value == 80.0
    assert any("not preceded" in note for note in life.notes)


def test_a_short_prompt_on_a_split_is_two_stages() -> None:
    request = one(timing(1000, 7, wall=1005) + quiet(1000, 5) + summary(1001, 1010))
    assert phase(request, "prefill wall", "stage 0").ms.value == 1000
    assert phase(request, "prefill wall", "stage 1").ms.value == 1005
    assert not [p for p in request.phases if p.lane == "request"]


def quiet(tokens: int, staging: int) -> str:
    """An earlier stage's lines: it waits for nothing and has no callback."""
    text = timing(tokens, staging).replace("chunk 2 ms", "chunk 0 ms")
    return text.replace("progress) 3 ms", "progress) 0 ms")


def test_three_stages_are_three_lanes() -> None:
    chunks = "".join(quiet(4096, 5 + i) + timing(4096, 7 + i) for i in range(2))
    request = one(chunks + quiet(8192, 50) + summary(8193, 2010))
    walls = {p.lane: p.ms.value for p in request.phases if p.name == "prefill wall"}
    assert walls == {"stage 0": 1000, "stage 1": 2000, "stage 2": 2000}


def test_five_stages_are_five_lanes() -> None:
    """The three in the middle print in turn; their staging counters tell them apart."""
    chunks = "".join(
        quiet(4096, 50 + i) + quiet(4096, 30 + i) + quiet(4096, 10 + i) + timing(4096, 7 + i)
        for i in range(3)
    )
    request = one(chunks + quiet(12288, 90) + summary(12289, 3010))
    walls = {p.lane: p.ms.value for p in request.phases if p.name == "prefill wall"}
    assert walls == {"stage 0": 1000, **{f"stage {n}": 3000 for n in range(1, 5)}}


def test_two_parts_on_a_split_are_still_two_stages() -> None:
    parts = "".join(timing(4096, 7 + i) + quiet(4096, 5 + i) for i in range(2))
    request = one(parts + summary(8193, 2010))
    walls = {p.lane: p.ms.value for p in request.phases if p.name == "prefill wall"}
    assert walls == {"stage 0": 2000, "stage 1": 2000}
    assert not [p for p in request.phases if p.lane == "request"]


def test_two_batched_parts_on_one_card_do_add() -> None:
    request = one(timing(1000, 7) + timing(1000, 9) + summary(2001, 2010))
    assert phase(request, "prefill wall", "host").ms.value == 2000


def test_other_slots_decode_is_taken_out_of_the_read() -> None:
    request = one(
        trace(
            "request 1001 0",
            "lent 300 slots for 256 tokens in 0.3 ms",
            "prompt chunk 0 of 1000",
            "prompt chunk to 512, then the slots decoded 200 ms",
            "read 1000 tokens (batched) in 900.0 ms",
            "refill start 300 -1",
            "refilled 300 slots on 1 stage(s) in 50.0 ms",
            "prompt done (slots refilled) -1 -1",
        )
        + summary(1001, 970)
    )
    assert phase(request, "other slots' decode").ms.value == 200
    assert phase(request, "read (batched)").ms.value == 700
    assert left(request) == pytest.approx(970 - 0.3 - 900 - 50)


def test_a_lost_summary_is_not_given_to_the_wrong_request() -> None:
    text = trace("request 101 0", "read 100 tokens (windows) in 70.0 ms") + summary(500, 90)
    cut, other = requests(text)
    assert (cut.status, cut.prompt.value) == ("incomplete", 101)
    assert (other.status, other.prompt.value, other.phases) == ("done", 500, ())


def test_parts_that_do_not_add_up_are_a_warning() -> None:
    text = trace("request 101 0", "read 90 tokens (windows) in 70.0 ms", "window 99 2")
    request = one(text + summary(101, 60))
    assert any("90 tokens" in w for w in request.warnings)
    assert any("longer than prompt_ms" in w for w in request.warnings)
    assert any("first window" in w for w in request.warnings)
    assert any("prompt done" in w for w in request.warnings)


def test_a_server_s_request_line() -> None:
    line = (
        "[strata] request prompt 101 cached 0 output 8 prompt_read 90.5 ms total 300.0 ms "
        "prefill 1.0 tok/s decode 2.0 tok/s\n"
    )
    request = one(summary(101, 90) + line)
    assert request.ttft_ms.high == 300
    alone = one(line)
    assert (alone.prompt_ms.value, alone.decode_ms.how) == (90.5, "missing")


def test_a_one_shot_run() -> None:
    request = one(
        "strata generate: prefill 1000 tokens in 2 chunks, 812.5 ms (1230.8 tok/s); experts "
        "streamed 900 (800 by DMA, host 12.0 ms), resident 300; PLE 1.0 ms\n"
        "strata generate: 311 lent slots refilled in 99.5 ms\n"
    )
    assert phase(request, "read (one-shot)").ms.value == 812.5
    assert phase(request, "refill").slots == 311
    assert request.facts["experts streamed"].value == 900


SECRETS = (
    "hunter2",
    "swordfish",
    "sk-abc123",
    "correct horse",
    "/srv/private/model.gguf",
    "Zürich",
)


def test_secrets_never_leave(tmp_path: Path) -> None:
    lines = [
        "[strata] 2026-10-09 10:00:00 engine started: /srv/private/model.gguf --api sk-abc123",
        "strata generate: native pack: /srv/private/model.gguf experts (hunter2)",
        "strata generate: session is up (engine 0.1.41-swordfish)",
        "prompt: correct horse battery staple hunter2",
        "strata trace: request 101 0",
        "strata trace: swordfish 5 -1",
        "strata trace: hunter2 3 tokens in 5.0 ms",
        "strata trace: window 100 hunter2",
        "T 31337",
        "ERR hunter2 swordfish",
        "strata serve: hunter2 in Zürich",
        "strata prefill timing: 100 tokens, GPU timeline 9 ms, wall 9 ms, host staging 1 ms: "
        "/srv/private/model.gguf 5 (50.0%) sk-abc123456789 4 (40.0%)",
        'strata prefill phases: {"phase_ms": {"/srv/private/model.gguf": 4.0}}',
        "strata serve: expert profile saved to /srv/private/model.gguf (swordfish)",
        summary(101, 90).strip() + " hunter2",
        '{"messages": [{"role": "user", "content": "correct horse"}]}',
    ]
    path = tmp_path / "engine.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = json.dumps(read_files([path]).to_dict(), ensure_ascii=False)
    for secret in (*SECRETS, "31337", "battery", "private"):
        assert secret not in text
    assert '"prompt": {"value": 101' in text


def closed(reading: Reading) -> None:
    """What must hold of any reading whatever was read."""
    json.dumps(reading.to_dict())
    for life in reading.lives:
        for request in life.requests:
            total = request.prompt_ms.value
            inside = [p.ms.value for p in request.phases if p.lane == "request"]
            if total is not None and any(value is not None for value in inside):
                rest = [p.ms.value or 0 for p in request.remainders if p.lane == "request"]
                assert sum(v or 0 for v in inside) + sum(rest) == pytest.approx(total, abs=1e-3)


LINES = st.sampled_from(
    [
        "strata trace: request 101 0",
        "strata trace: prompt start 100 -1",
        "strata trace: lent 300 slots for 256 tokens in 0.3 ms",
        "strata trace: read 100 tokens (batched) in 70.0 ms",
        "strata trace: read 4 tokens (windows) in 7.0 ms",
        "strata trace: refill start 300 -1",
        "strata trace: refilled 300 slots on 1 stage(s) in 9.0 ms",
        "strata trace: prompt done (slots refilled) -1 -1",
        "strata trace: window 100 1",
        "strata trace: window 101 12",
        "DONE 0 101 17.0 0.0 cancel 0 0 0 0 0 0 0 0.0 12",
        "DONE 8 101 90.0 5.0 stop 0 0 0",
        "ERR no",
        "[strata] 2026-10-09 10:05:00 engine started: strata --serve",
        "strata generate: loaded 46.84 GiB at 1.27 GiB/s",
        "strata serve: conversation cache: parked 9 tokens in 12.0 ms; parked=1",
        "strata batch: the prompt was read in 2 parts, the slots decoding 8 ms between them",
        *timing(100, 5).splitlines(),
        *timing(50, 9).splitlines(),
        summary(101, 90).strip(),
        summary(101, 90, read="12 of 101").strip(),
        "# run=1 label=x measured=True",
        "# run=2 label=x measured=False",
        "",
        "\x00\xff",
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(LINES, max_size=40))
def test_any_order_of_lines_is_survived(found: list[str]) -> None:
    reader = StrataReader("x.log")
    for number, line in enumerate(found, 1):
        reader.feed(number, line)
        if number == 7:
            reader.finish()
    untouched = StrataReader("x.log")
    for number, line in enumerate(found, 1):
        untouched.feed(number, line)
    assert untouched.finish() == reader.finish()
    once, twice = reader.finish(), reader.finish()
    assert once == twice
    closed(Reading(lives=tuple(once)))
