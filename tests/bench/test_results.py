"""Samples in, figures out: what pairs with what, what is missing and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slotwise.bench.limit import Best
from slotwise.bench.peers import Peer
from slotwise.bench.results import Line, lines
from slotwise.bench.show import gaps, table
from slotwise.bench.turns import OURS, PEER, Plan

MIB = 1 << 20
LIMIT = 900 * MIB
PLAN = Plan(
    model=Path("m.gguf"), files=(), limits=(LIMIT, None), prompts=(16, 128), decode=4,
    decode_after=128, decode_seconds=1.0, pairs=2, threads=1, io_lanes=2,
    peer=Peer(worker="peer", arguments=(), python="python"), grouped=True,
)  # fmt: skip
BEST = Best(read=int(1e6), decode_window=1e6)


def sample(arm: str, limit: int | None, prompt: int, number: int, **more: Any) -> dict[str, Any]:
    counts = {"hits": 3, "misses": 1, "bytes": 0, "wait_ns": 0}
    return {
        "arm": arm, "limit_bytes": limit, "prompt_tokens": prompt, "round": number,
        "first_ns": 1e9, "decode_ns": 4e8, "decode_tokens": 4 if prompt == 128 else 0,
        "read_bytes": 2e6, "decode_bytes": 8e6, "expert_slots": [8],
        "record": {"prefill_experts": counts, "decode_experts": counts},
        "group": {"peak_bytes": 800 * MIB, "oom_kills": 0, "version": "v1"},
    } | more  # fmt: skip


def found(samples: list[dict[str, Any]], what: str, limit: int | None = LIMIT) -> Line:
    made = lines(PLAN, samples, bests=lambda prompt, slots: BEST, bytes_per_second=1e9)
    return next(line for line in made if (line.what, line.limit) == (what, limit))


def test_speeds_and_ratios_are_of_pairs_of_the_same_round() -> None:
    samples = [
        sample(OURS, LIMIT, 16, 0, first_ns=1e9),
        sample(PEER, LIMIT, 16, 0, first_ns=4e9),
        sample(PEER, LIMIT, 16, 1, first_ns=16e9),
        sample(OURS, LIMIT, 16, 1, first_ns=4e9),
        sample(OURS, LIMIT, 16, 2, first_ns=4e9),
    ]
    line = found(samples, "read 16")
    assert line.figures["tokens/s"].median == 4.0
    assert line.figures["tokens/s"].n == 3
    assert line.figures["against llama.cpp"].median == 4.0
    assert line.figures["against llama.cpp"].n == 2
    assert line.figures["TTFT, ms"].median == 4000.0


def test_decode_is_reckoned_per_token() -> None:
    line = found([sample(OURS, LIMIT, 128, 0), sample(OURS, None, 128, 0, decode_ns=2e8)],
                 "decode after 128")  # fmt: skip
    assert line.figures["tokens/s"].median == 10.0
    assert line.figures["bytes read/token"].median == 2e6
    assert line.figures["of our resident speed"].median == 0.5
    # computing takes 50 ms, Belady's million bytes 1 ms, ours took 100 ms for two million
    assert line.figures["of the limit"].median == pytest.approx(0.5)
    assert line.figures["policy quality"].median == 0.5
    assert line.figures["overlap quality"].median == pytest.approx(0.5)
    assert line.figures["hit rate"].median == 0.75


def test_a_turn_that_failed_is_missing_with_what_it_said() -> None:
    samples = [
        sample(OURS, LIMIT, 16, 0),
        {"arm": PEER, "limit_bytes": LIMIT, "prompt_tokens": 16, "round": 0, "failed": "killed"},
    ]
    line = found(samples, "read 16")
    assert line.missing["llama.cpp tokens/s"] == "killed"
    assert line.missing["against llama.cpp"] == "killed"
    assert "against llama.cpp" not in line.figures


def test_without_a_resident_run_there_is_no_limit_and_it_says_why() -> None:
    line = found([sample(OURS, LIMIT, 16, 0)], "read 16")
    assert "everything in memory" in line.missing["of the limit"]


def test_without_kernel_counts_quality_is_missing() -> None:
    samples = [sample(OURS, limit, 16, 0, read_bytes=None) for limit in (LIMIT, None)]
    line = found(samples, "read 16")
    assert "kernel" in line.missing["policy quality"]
    assert "of the limit" in line.figures


def test_a_dense_model_has_no_hit_rate_and_no_limit() -> None:
    line = found([sample(OURS, LIMIT, 16, 0, expert_slots=[])], "read 16")
    assert line.missing["hit rate"] == "the model has no experts"
    assert line.missing["of the limit"] == "the model has no experts"


def test_the_table_leaves_out_empty_columns_and_names_every_gap_once() -> None:
    made = lines(PLAN, [sample(OURS, LIMIT, 16, 0)], bests=lambda *_: BEST, bytes_per_second=1e9)
    shown = table(made)
    assert "llama.cpp" not in shown.columns
    assert shown.markdown().splitlines()[0].startswith("| memory |  | tokens/s |")
    assert len(shown.rows) == 6
    reasons = gaps(made)
    assert len(reasons) == len(set(reasons))
    assert any("of the limit" in reason for reason in reasons)


def test_turns_alternate_abba_and_every_pair_is_complete() -> None:
    turns = list(PLAN.turns())
    of_one = [t.arm for t in turns if (t.limit, t.prompt) == (LIMIT, 16)]
    assert of_one == [OURS, PEER, PEER, OURS]
    assert len(turns) == 2 * 2 * 2 * 2


def test_without_groups_only_the_resident_part_is_compared() -> None:
    turns = list(replace(PLAN, grouped=False).turns())
    assert {t.arm for t in turns if t.limit} == {OURS}
    assert {t.arm for t in turns if t.limit is None} == {OURS, PEER}
