"""The three refill policies against each other, with fewer slots than experts.

Each policy has a process of its own; they take turns on the same prompts, one working while the
others rest. Between turns the refill lane may finish, as it would between two users' requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bench.report import finish, interval, options
from slotwise.bench.child import Child, while_idle
from slotwise.bench.prose import cut, prose
from slotwise.bench.record import BenchRecord
from slotwise.bench.stats import Estimate, alternating, estimate, ratio

POLICIES = ("deferred", "blocking", "lazy")
FIRST_TOKENS = 64
HOW = {
    "ttft_ns": "measured: the ledger's wall_ns",
    "refill_on_path_ns": "measured: the ledger's phase `refill`",
    "first_64_ns": "measured: the record's decode.first_64_tokens_ns, from the first token's first "
    "byte until the answer has 64 tokens",
    "with_refill_ns": "derived: first_64_ns + refill_on_path_ns",
    "to_64_ns": "derived: ttft_ns + first_64_ns",
    "outside_64_ns": "measured in the worker around Engine.generate: from the request to token 64",
    "results": "derived: medians with a t interval of the mean; ratios pair by pair, on the same "
    "prompt, interval of the geometric mean",
}
SHOWN = (
    ("TTFT, ms", "ttft_ns", 1e6),
    ("refill on the path, ms", "refill_on_path_ns", 1e6),
    ("first 64 tokens, ms", "first_64_ns", 1e6),
    ("first 64 + refill on the path, ms", "with_refill_ns", 1e6),
    ("request to token 64, ms", "to_64_ns", 1e6),
    ("slots lent", "slots_lent", 1),
    ("slots refilled", "slots_refilled", 1),
    ("misses while decoding", "decode_misses", 1),
)


@click.command()
@options
@click.option("--memory", default=str(1000 << 20), show_default=True, help="Bytes.")
@click.option("--prompt", default=512, show_default=True, help="Tokens.")
@click.option("--rounds", type=click.IntRange(min=2), default=6, show_default=True)
def main(
    model: Path, threads: int, out: Path, as_json: bool, memory: str, prompt: int, rounds: int
) -> None:
    """Compare the refill policies on MODEL."""
    record = BenchRecord(
        bench="refill",
        settings={
            "model": model.name,
            "memory": memory,
            "threads": threads,
            "prompt": prompt,
            "rounds": rounds,
        },
        how=HOW,
    )
    context = -(-(prompt + FIRST_TOKENS) // 256) * 256
    common = ("--memory", memory, "--threads", str(threads), "--context", str(context))
    children: dict[str, Child] = {}
    try:
        for policy in POLICIES:
            children[policy] = Child("engine", str(model), *common, "--refill", policy)
        record.workers = {policy: child.ready for policy, child in children.items()}
        _measure(record, children, prompt, rounds)
    finally:
        for child in children.values():
            child.close()
    rows = _rows(record)
    _check(record)
    finish(record, columns=("", *POLICIES), rows=rows, out=out, as_json=as_json)


def _measure(record: BenchRecord, children: dict[str, Child], prompt: int, rounds: int) -> None:
    """A round is one prompt through all three; the first round is not timed."""
    tokens = children[POLICIES[0]].ask("tokenize", text=prose())["tokens"]
    for i, policy in enumerate(alternating(rounds + 1, POLICIES)):
        turn, child = i // len(POLICIES), children[policy]
        others = [c for c in children.values() if c is not child]
        part = cut(tokens, prompt, start=turn * 97)
        answer, idle_cpu_ns = while_idle(
            others,
            lambda child=child, part=part: child.ask(
                "request", tokens=part, max_tokens=FIRST_TOKENS
            ),
        )
        child.ask("settle")
        if turn:
            record.samples.append(_sample(policy, turn, answer, idle_cpu_ns))


def _sample(policy: str, turn: int, answer: dict[str, Any], idle_cpu_ns: int) -> dict[str, Any]:
    request = answer["record"]
    phases, decode, refill = request["ledger"]["phases"], request["decode"], request["refill"]
    ttft, first_64 = request["ledger"]["wall_ns"], decode["first_64_tokens_ns"]
    on_path = phases["refill"]["ns"] if "refill" in phases else 0
    return {
        "arm": policy,
        "round": turn,
        "ttft_ns": ttft,
        "refill_on_path_ns": on_path,
        "first_64_ns": first_64,
        "with_refill_ns": first_64 + on_path,
        "to_64_ns": ttft + first_64,
        "outside_64_ns": answer["first_ns"] + answer["decode_ns"],
        "slots_lent": request["loan"]["slots"],
        "slots_refilled": refill["slots"],
        "decode_misses": request["decode_experts"]["misses"],
        "idle_cpu_ns": idle_cpu_ns,
        "record": request,
    }


def _values(record: BenchRecord, policy: str, name: str) -> list[float]:
    return [s[name] for s in record.samples if s["arm"] == policy]


def _rows(record: BenchRecord) -> list[list[str]]:
    rows = []
    for label, name, scale in SHOWN:
        found: list[Estimate] = []
        for policy in POLICIES:
            found.append(estimate([v / scale for v in _values(record, policy, name)]))
            record.results[f"{label}, {policy}"] = found[-1]
        rows.append([label, *(f"{e.median:,.1f}" for e in found)])
    return rows


def _check(record: BenchRecord) -> None:
    on_path = max(_values(record, "deferred", "refill_on_path_ns"))
    record.check(
        "deferred: refill on the path to the first token",
        wanted="0",
        found=f"{on_path:,.0f} ns",
        passed=on_path == 0,
    )
    refilled = min(_values(record, "deferred", "slots_refilled"))
    record.check(
        "deferred really refills",
        wanted="slots refilled",
        found=f"{refilled:.0f} at least",
        passed=refilled > 0,
    )
    both = ratio(
        _values(record, "deferred", "first_64_ns"), _values(record, "blocking", "with_refill_ns")
    )
    record.results["first 64 tokens, deferred / blocking with its refill"] = both
    record.check(
        "first 64 tokens, deferred against blocking with its refill",
        wanted="at most 1, or not told apart from it",
        found=f"{both.median:.3f}, 95 % interval {interval(both)}",
        passed=both.median <= 1 or (both.low is not None and both.low <= 1),
    )


if __name__ == "__main__":
    main()
