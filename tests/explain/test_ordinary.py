"""Requests kept as their text are the requests that their lines tell, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slotwise.explain.readers.lines import feed_block
from slotwise.explain.readers.strata import StrataReader
from slotwise.explain.record import Life

DATA = Path(__file__).parents[1] / "data" / "explain" / "strata-notmike101-P023"


def request(prompt: int, *, windows: int = 5) -> list[str]:
    """One request with its lines in the usual order, none of a kind that is rare."""
    rows = "".join(f"\nstrata trace: window {prompt - 1 + i} {1 + i % 3}" for i in range(windows))
    offered = sum(i % 3 for i in range(windows))
    text = (
        f"strata trace: request {prompt} 0\nstrata trace: prompt start {prompt - 1} -1\n"
        "strata trace: lent 311 slots for 256 tokens in 0.2 ms\n"
        f"strata trace: prompt chunk 0 of {prompt - 5}\n"
        f"strata trace: read {prompt - 5} tokens (batched) in {prompt / 2:.1f} ms\n"
        "strata trace: refill start 311 -1\n"
        "strata trace: refilled 311 slots on 1 stage(s) in 99.0 ms\n"
        "strata trace: read 4 tokens (windows) in 65.3 ms\n"
        "strata trace: prompt done (slots refilled) -1 -1\n"
        f"strata serial cache policy: {prompt} fresh prompt tokens, interval 0{rows}\n"
        "strata decode timing: 5 windows, avg T 2.85, 2.17 tokens/window, 20.56 ms/window = verify "
        "18.39 (GPU-reach wait 6.54 + per-layer host 1.67 [plan 0.06 actq 0.38 jobs 0.15 CPU 2.37]"
        " + stage 1.36) + commit/emit 0.50 + draft 1.66; per layer-window: CPU experts 0.68 (0.73 "
        "entries), VRAM hits 27.70, PCIe 0.05\n"
        f"strata serve: prompt {prompt} tokens = 0 reused + {prompt} read in {prompt + 300} ms "
        f"(9.0 tok/s), 8 generated in 91 ms (87.9 tok/s), drafts accepted 1 of {offered}, "
        "1 checkpoints\n"
        "strata serve: decode expert cache hit rate: 85.7% (2317 hits / 2704 lookups); 27 more "
        "read by the GPU over PCIe or from another GPU (1.0% of all 2731 routed)\n"
        "strata serve: suffix drafts: 11 windows, 26 of 33 drafts accepted"
    )
    return text.split("\n")


RARE = [
    "strata trace: request 12 0",
    "strata trace: window 7 1",
    "strata trace: refill start 311 -1",
    "strata serve: prompt 60 tokens = 0 reused + 12 of 60 read in 9 ms (1.0 tok/s), 0 generated "
    "in 0 ms (nan tok/s)",
    "strata serve: conversation cache: parked 90 tokens in 1.5 ms",
    "strata prefill timing: 64 tokens, GPU timeline 24 ms, wall 28 ms, host staging 383 ms: gdn 9 "
    "(37.5%)",
    "strata generate: session is up (engine 0.1.41)",
    "[strata] request prompt 70 cached 0 output 8 prompt_read 70 ms total 200 ms",
    "junk strata trace: request 5 0",
    "",
]


def at_once(lines: list[str]) -> list[Life]:
    reader = StrataReader("engine.log")
    feed_block(reader, "\n".join(lines).encode(), 1)
    return reader.finish()


def one_by_one(lines: list[str]) -> list[Life]:
    reader = StrataReader("engine.log")
    for number, line in enumerate(lines, 1):
        reader.feed(number, line)
    return reader.finish()


class Counting(StrataReader):
    kept = 0

    def keep_ordinary(self, *end: Any) -> None:
        self.kept += 1
        super().keep_ordinary(*end)


def test_requests_of_a_plain_log_are_kept_as_text() -> None:
    reader = Counting("engine.log")
    lines = [line for prompt in range(60, 80) for line in request(prompt)]
    feed_block(reader, "\n".join(lines).encode(), 1)
    assert reader.kept == 19, "all but the last, whose end has no next request after it"
    assert not any(r.warnings for r in reader.finish()[0].requests)


@pytest.mark.parametrize("name", sorted(p.name for p in DATA.glob("*.txt")))
def test_real_logs(name: str) -> None:
    lines = (DATA / name).read_text().splitlines() * 2
    assert at_once(lines) == one_by_one(lines)


edits = st.lists(
    st.tuples(st.integers(0, 120), st.sampled_from(["drop", "twice", *RARE])), max_size=6
)


def test_a_life_s_switches_survive_an_unusual_next_request() -> None:
    lines = [*request(66), "strata trace: request 12 0"]
    (life,) = at_once(lines)
    assert life.capabilities["PCIe reads in the hit rate"]
    assert [life] == one_by_one(lines)


def test_two_decode_lines_are_two_requests() -> None:
    lines = [*request(60), *request(57)]
    at = next(i for i, line in enumerate(lines) if line.startswith("strata decode timing"))
    lines.insert(at, lines[at])
    (life,) = at_once(lines)
    assert [r.status for r in life.requests] == ["incomplete", "done", "done"]
    assert [life] == one_by_one(lines)


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(sizes=st.lists(st.integers(50, 70), min_size=1, max_size=6), edits=edits)
def test_lines_lost_doubled_or_put_between(sizes: list[int], edits: list[tuple[int, str]]) -> None:
    lines = [line for size in sizes for line in request(size)]
    for place, what in edits:
        at = place % len(lines)
        lines[at : at + 1] = {"drop": [], "twice": [lines[at]] * 2}.get(what, [what, lines[at]])
        if not lines:
            return
    assert at_once(lines) == one_by_one(lines)
