"""Whether the process stays within the memory it was given.

One process per budget reads a prompt and decodes; before it ends, the kernel's own peak
(VmHWM) is read from /proc.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bench.report import finish, options
from slotwise.bench.child import Child
from slotwise.bench.prose import cut, prose
from slotwise.bench.record import BenchRecord
from slotwise.bench.workers.engine import ALL, settings
from slotwise.engine.loading import blueprint
from slotwise.weights.shards import open_model

MOST_OVER = 1.15
MOST_BESIDE = 150 << 20
HOW = {
    "peak_bytes": "measured: VmHWM of /proc/PID/status after the last token, before the end",
    "planned_bytes": "measured: the engine's plan, sum of its parts",
    "budget_bytes": "the --memory given; for `all` the plan's total, for `min` its minimum",
}
MIB = 2**20


@click.command()
@options
@click.option("--budgets", default="min,700,1000,all", show_default=True, help="MiB, min or all.")
@click.option("--prompt", default=600, show_default=True, help="Tokens.")
@click.option("--decode", default=16, show_default=True, help="Tokens.")
@click.option("--context", default=4096, show_default=True, help="Tokens.")
def main(
    model: Path,
    threads: int,
    out: Path,
    as_json: bool,
    budgets: str,
    prompt: int,
    decode: int,
    context: int,
) -> None:
    """Measure MODEL's peak resident memory for several budgets."""
    record = BenchRecord(
        bench="memory",
        settings={
            "model": model.name,
            "budgets": budgets,
            "threads": threads,
            "prompt": prompt,
            "decode": decode,
            "context": context,
        },
        how=HOW,
    )
    for budget in budgets.split(","):
        memory = _bytes(budget, model, threads=threads, context=context)
        sample = _measure(
            model, memory, threads=threads, context=context, prompt=prompt, decode=decode
        )
        record.samples.append({"budget": budget, **sample})
    for s in record.samples:
        limit = s["budget_bytes"] * MOST_OVER + MOST_BESIDE
        record.check(
            f"budget {s['budget']}",
            wanted=f"at most {limit / MIB:,.0f} MiB",
            found=f"{s['peak_bytes'] / MIB:,.0f} MiB",
            passed=s["peak_bytes"] <= limit,
        )
    columns = (
        "budget",
        "MiB",
        "planned",
        "peak",
        "over",
        "anonymous",
        "shared",
        "files",
        "slots",
        "tok/s",
    )
    finish(
        record, columns=columns, rows=[_row(s) for s in record.samples], out=out, as_json=as_json
    )


def _bytes(budget: str, model: Path, *, threads: int, context: int) -> str:
    """`all`, or a number of bytes."""
    if budget == ALL:
        return ALL
    if budget == "min":
        chosen = settings(ALL, threads=threads, context=context)
        return str(blueprint(open_model(model)).plan(chosen).minimum)
    return str(round(float(budget) * MIB))


def _measure(
    model: Path, memory: str, *, threads: int, context: int, prompt: int, decode: int
) -> dict[str, Any]:
    arguments = ("--memory", memory, "--threads", str(threads), "--context", str(context))
    with Child("engine", str(model), *arguments) as child:
        tokens = cut(child.ask("tokenize", text=prose())["tokens"], prompt)
        opened = child.memory()
        answer = child.ask("request", tokens=tokens, max_tokens=decode)
        memory_now = child.memory()
    planned = child.ready["plan_total"]
    return {
        "budget_bytes": planned if memory == ALL else int(memory),
        "planned_bytes": planned,
        "plan": child.ready["plan_bytes"],
        "expert_slots": sum(child.ready["expert_slots"]),
        "peak_bytes": memory_now["VmHWM"],
        "after_bytes": memory_now,
        "after_opening_bytes": opened,
        "direct": child.ready["direct"],
        "read_ns": answer["first_ns"],
        "decode_ns": answer["decode_ns"],
        "decode_tokens": decode - 1,
    }


def _row(s: dict[str, Any]) -> list[str]:
    over = (s["peak_bytes"] - s["budget_bytes"]) / MIB
    speed = s["decode_tokens"] * 1e9 / s["decode_ns"] if s["decode_tokens"] else 0.0
    sizes = (
        s["budget_bytes"],
        s["planned_bytes"],
        s["peak_bytes"],
    )
    kinds = [s["after_bytes"][kind] for kind in ("RssAnon", "RssShmem", "RssFile")]
    return [
        s["budget"],
        *(f"{n / MIB:,.0f}" for n in sizes),
        f"{over:+,.0f}",
        *(f"{n / MIB:,.0f}" for n in kinds),
        str(s["expert_slots"]),
        f"{speed:.1f}",
    ]


if __name__ == "__main__":
    main()
