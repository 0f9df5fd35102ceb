"""Our engine and llama.cpp on the same file, in one run, one measuring while the other rests.

Both read the same token ids, then decode the same tokens: the peer is fed what our engine
answered. Arms alternate A B B A; what counts is the median of the ratios of neighbours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bench.report import finish, interval, options
from slotwise.bench.child import Child, while_idle
from slotwise.bench.prose import cut, prose
from slotwise.bench.record import BenchRecord
from slotwise.bench.stats import alternating, estimate, ratio
from slotwise.bench.workers.protocol import Answer

WANTED_RATIO = 0.9
LEAST_PAIRS = 5
MOST_IDLE_SHARE = 0.02
"""CPU time of the resting side, as a share of the time that the other one measured."""
OURS, PEER = "slotwise", "llama.cpp"
HOW = {
    "first_ns": "measured in the worker by perf_counter: token ids in hand to the last one's "
    "logits (ours: to the first token out of Engine.generate, ledger and lanes on)",
    "decode_ns": "measured in the worker by perf_counter: ours the time outside Engine.generate "
    "for all tokens after the first, sampling and records included; the peer's the sum of its "
    "llama_decode + llama_synchronize calls",
    "windows_ns": "measured: ours the record's decode.windows_ns, the peer's the same as decode_ns",
    "*_cpu_ns": "measured: the worker's process CPU time in the same interval, all threads",
    "idle_cpu_ns": "measured by schedstat: CPU time of the resting worker meanwhile",
    "results": "derived: tokens per second are medians with a t interval of the mean; ratios are "
    "medians over neighbouring pairs, peer's time / our time, interval of the geometric mean",
}


@click.command()
@options
@click.option("--peer", required=True, help="llama-cpp-python:PYTHON or xllamacpp:PYTHON")
@click.option("--memory", default="all", show_default=True, help="Bytes, or all.")
@click.option("--prompts", default="512", show_default=True, help="Prompt sizes, with commas.")
@click.option("--decode", type=click.IntRange(min=1), default=48, show_default=True)
@click.option("--pairs", type=click.IntRange(min=2), default=6, show_default=True)
def main(
    model: Path,
    threads: int,
    out: Path,
    as_json: bool,
    peer: str,
    memory: str,
    prompts: str,
    decode: int,
    pairs: int,
) -> None:
    """Compare speed with llama.cpp on MODEL."""
    package, _, python = peer.partition(":")
    sizes = [int(size) for size in prompts.split(",")]
    context = -(-(max(sizes) + decode + 1) // 256) * 256
    common = ("--threads", str(threads), "--context", str(context))
    record = BenchRecord(
        bench="side_by_side",
        settings={
            "model": model.name,
            "memory": memory,
            "threads": threads,
            "prompts": sizes,
            "decode_tokens": decode,
            "pairs": pairs,
        },
        how=HOW,
    )
    with (
        Child("engine", str(model), "--memory", memory, *common) as ours,
        Child("peer", package, str(model), *common, python=python) as theirs,
    ):
        record.workers = {OURS: ours.ready, PEER: theirs.ready}
        tokens = _same_tokens(ours, theirs)
        for size in sizes:
            _measure(record, ours, theirs, cut(tokens, size), decode, pairs)
    rows = [row for size in sizes for row in _rows(record, size, decode)]
    _check(record, pairs)
    columns = ("", OURS, PEER, "ratio", "95 % interval", "CPU time ratio", "pairs")
    finish(record, columns=columns, rows=rows, out=out, as_json=as_json)


def _same_tokens(ours: Child, theirs: Child) -> list[int]:
    mine, other = (child.ask("tokenize", text=prose())["tokens"] for child in (ours, theirs))
    if mine != other:
        raise click.ClickException("the two sides cut the prose into different tokens")
    return mine


def _measure(
    record: BenchRecord,
    ours: Child,
    theirs: Child,
    tokens: Sequence[int],
    decode: int,
    pairs: int,
) -> None:
    """One untimed round each, then `pairs` of both."""
    warm = ours.ask("request", tokens=tokens, max_tokens=decode + 1)
    follow = warm["tokens"][:-1]
    theirs.ask("request", tokens=tokens, follow=follow)

    def ask(arm: str) -> Answer:
        if arm == OURS:
            return ours.ask("request", tokens=tokens, max_tokens=decode + 1)
        return theirs.ask("request", tokens=tokens, follow=follow)

    digest = hashlib.sha256(repr(list(tokens)).encode()).hexdigest()[:16]
    for arm in alternating(pairs, (OURS, PEER)):
        resting = theirs if arm == OURS else ours
        answer, idle_cpu_ns = while_idle([resting], lambda arm=arm: ask(arm))
        record.samples.append(_sample(arm, answer, len(tokens), digest, idle_cpu_ns))


def _sample(arm: str, answer: Answer, size: int, digest: str, idle_cpu_ns: int) -> dict[str, Any]:
    windows = answer["windows_ns"] if arm == PEER else answer["record"]["decode"]["windows_ns"]
    names = ("first_ns", "decode_ns", "read_cpu_ns", "decode_cpu_ns")
    return {
        "arm": arm,
        "prompt_tokens": size,
        "prompt_sha256": digest,
        **{name: answer[name] for name in names},
        "windows_ns": windows if arm == OURS else sum(windows),
        "each_window_ns": windows if arm == PEER else None,
        "idle_cpu_ns": idle_cpu_ns,
        "record": answer.get("record"),
    }


def _rows(record: BenchRecord, size: int, decode: int) -> list[list[str]]:
    rows = []
    for what, count, wall, cpu in (
        (f"read {size}", size, "first_ns", "read_cpu_ns"),
        (f"decode after {size}", decode, "decode_ns", "decode_cpu_ns"),
        (f"decode after {size}, windows only", decode, "windows_ns", "decode_cpu_ns"),
    ):
        mine, other = (_values(record, arm, size, wall) for arm in (OURS, PEER))
        speeds = {
            OURS: estimate([count * 1e9 / ns for ns in mine]),
            PEER: estimate([count * 1e9 / ns for ns in other]),
        }
        both = ratio(other, mine)
        cpu_both = ratio(_values(record, PEER, size, cpu), _values(record, OURS, size, cpu))
        for arm, speed in speeds.items():
            record.results[f"{what}, {arm}, tokens/s"] = speed
        record.results[f"{what}, ratio"] = both
        record.results[f"{what}, CPU time ratio"] = cpu_both
        shown = [f"{speeds[arm].median:.2f} tok/s" for arm in (OURS, PEER)]
        cells = [f"{both.median:.3f}", interval(both), f"{cpu_both.median:.3f}", str(both.n)]
        rows.append([what, *shown, *cells])
    return rows


def _values(record: BenchRecord, arm: str, size: int, name: str) -> list[float]:
    return [s[name] for s in record.samples if (s["arm"], s["prompt_tokens"]) == (arm, size)]


def _check(record: BenchRecord, pairs: int) -> None:
    for name, found in record.results.items():
        if name.endswith(", ratio") and "windows only" not in name:
            record.check(
                name,
                wanted=f"at least {WANTED_RATIO}",
                found=f"{found.median:.3f}",
                passed=found.median >= WANTED_RATIO,
            )
    share = max(s["idle_cpu_ns"] / (s["first_ns"] + s["decode_ns"]) for s in record.samples)
    record.check(
        "the resting side rests",
        wanted=f"at most {MOST_IDLE_SHARE:.0%} of the time measured",
        found=f"at most {share:.2%}",
        passed=share <= MOST_IDLE_SHARE,
    )
    record.check(
        "enough pairs", wanted=f"{LEAST_PAIRS}", found=f"{pairs}", passed=pairs >= LEAST_PAIRS
    )


if __name__ == "__main__":
    main()
