"""Time to first token seen from outside the process, against the engine's own ledger.

A child process answers over a pipe. Outside: from just before the request's bytes leave until the
first byte of the answer is here. Inside: the ledger, from the request's last byte to the first
token's first byte. Both clocks are the same CLOCK_MONOTONIC.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import click

from bench.report import finish, options
from slotwise.bench.child import Child
from slotwise.bench.prose import prose
from slotwise.bench.record import BenchRecord
from slotwise.bench.stats import estimate, quantiles

MOST_OTHER = 0.02
MOST_APART_NS = 2_000_000
MOST_APART_SHARE = 0.01
HOW = {
    "outside_ns": "measured by perf_counter in the parent: before the request's bytes are "
    "written, to the first byte of the first token's line",
    "ledger_ns": "measured in the child: the ledger's wall_ns",
    "apart_ns": "derived: outside_ns - ledger_ns",
    "other_share": "derived: phase `other` / wall_ns",
    "phases_sum_ns": "derived: sum of the ledger's phases",
    "results": "derived: medians over all requests, with a t interval of the mean",
}


@click.command()
@options
@click.option("--memory", default="all", show_default=True, help="Bytes, or all.")
@click.option("--requests", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--longest", default=1024, show_default=True, help="Tokens, roughly.")
@click.option("--seed", default=1, show_default=True)
def main(
    model: Path,
    threads: int,
    out: Path,
    as_json: bool,
    memory: str,
    requests: int,
    longest: int,
    seed: int,
) -> None:
    """Measure time to first token of MODEL from outside the process."""
    context = -(-(2 * longest) // 256) * 256
    record = BenchRecord(
        bench="ttft_outside",
        settings={
            "model": model.name,
            "memory": memory,
            "threads": threads,
            "requests": requests,
            "longest": longest,
            "seed": seed,
        },
        how=HOW,
    )
    arguments = ("--memory", memory, "--threads", str(threads), "--context", str(context))
    with Child("engine", str(model), *arguments) as child:
        record.workers = {"slotwise": child.ready}
        _ask(child, prose()[:400])  # the first request of a process pays for cold caches
        for text in _texts(requests, longest, seed):
            record.samples.append(_ask(child, text))
    rows = _rows(record)
    _check(record)
    columns = ("", "least", "median", "90 %", "most")
    finish(record, columns=columns, rows=rows, out=out, as_json=as_json)


def _texts(n: int, longest: int, seed: int) -> list[str]:
    """Pieces of the prose from one word to about `longest` tokens (4 characters each), short
    ones as frequent as long ones on a logarithmic scale."""
    text, dice = prose(), random.Random(seed)
    pieces = []
    for i in range(n):
        size = round(4 * longest ** ((i + 0.5) / n))
        start = dice.randrange(max(1, len(text) - size))
        pieces.append(text[start : start + size])
    dice.shuffle(pieces)
    return pieces


def _ask(child: Child, text: str) -> dict[str, Any]:
    sent_ns = child.send("stream", text=text, max_tokens=1)
    first_ns, _ = child.read_stamped()
    record = child.read()["record"]
    ledger = record["ledger"]
    phases = {name: phase["ns"] for name, phase in ledger["phases"].items()}
    outside_ns = first_ns - sent_ns
    return {
        "prompt_tokens": record["tokens"]["prompt"],
        "outside_ns": outside_ns,
        "ledger_ns": ledger["wall_ns"],
        "apart_ns": outside_ns - ledger["wall_ns"],
        "start_apart_ns": ledger["start_ns"] - sent_ns,
        "phases_sum_ns": sum(phases.values()),
        "counted_twice_ns": ledger["counted_twice_ns"],
        "other_share": phases["other"] / ledger["wall_ns"],
        "phases_ns": phases,
    }


def _rows(record: BenchRecord) -> list[list[str]]:
    rows = []
    for label, name, form, scale in (
        ("prompt, tokens", "prompt_tokens", "{:.0f}", 1),
        ("TTFT outside, ms", "outside_ns", "{:.2f}", 1e6),
        ("TTFT by the ledger, ms", "ledger_ns", "{:.2f}", 1e6),
        ("apart, ms", "apart_ns", "{:.3f}", 1e6),
        ("other, % of TTFT", "other_share", "{:.3f}", 0.01),
    ):
        values = [s[name] / scale for s in record.samples]
        record.results[label] = estimate(values)
        rows.append([label, *(form.format(q) for q in quantiles(values, (0, 0.5, 0.9, 1)))])
    return rows


def _check(record: BenchRecord) -> None:
    samples = record.samples
    unequal = sum(s["phases_sum_ns"] != s["ledger_ns"] for s in samples)
    record.check(
        "the phases add up to the wall time",
        wanted="exactly, in nanoseconds",
        found=f"{len(samples) - unequal} of {len(samples)} requests do",
        passed=unequal == 0,
    )
    other = max(s["other_share"] for s in samples)
    record.check(
        "`other` is small",
        wanted=f"below {MOST_OTHER:.0%} of TTFT",
        found=f"at most {other:.3%}",
        passed=other < MOST_OTHER,
    )
    far = [s for s in samples if not agrees(s["apart_ns"], s["outside_ns"])]
    record.check(
        "outside and ledger agree",
        wanted=f"within {MOST_APART_NS / 1e6:.0f} ms or {MOST_APART_SHARE:.0%}",
        found=f"{len(samples) - len(far)} of {len(samples)} requests do",
        passed=not far,
    )


def agrees(apart_ns: int, outside_ns: int) -> bool:
    """Whether two measurements of one time are close enough."""
    return abs(apart_ns) <= max(MOST_APART_NS, MOST_APART_SHARE * outside_ns)


if __name__ == "__main__":
    main()
