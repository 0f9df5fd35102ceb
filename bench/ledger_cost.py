"""What the books cost: the ledger up to the first token, the tally and the lanes while decoding.

Twice, independently: the cost of one entry in a tight loop times how many there were; and the
same requests with and without books, in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter_ns
from typing import Any
from unittest.mock import patch

import click

from bench.report import finish, interval, options
from slotwise.bench.prose import cut, prose
from slotwise.bench.record import BenchRecord
from slotwise.bench.stats import alternating, estimate, ratio
from slotwise.bench.workers.engine import GREEDY, settings
from slotwise.engine import request as request_module
from slotwise.engine.engine import Engine
from slotwise.trace.lanes import LaneLog
from slotwise.trace.ledger import CLOCK, Ledger
from slotwise.trace.record import DecodeTally
from slotwise.weights.tokenizer import Tokenizer

MOST_SHARE = 0.01
LOOPS, BATCHES = 2_000, 15
WITH, WITHOUT = "with books", "without"
HOW = {
    "cost, *": "measured: median of 15 tight loops of 2,000 entries in this process, per entry",
    "entries": "measured: phase entries of the ledger, windows, and expert reads of one request",
    "share, *": "derived: cost of one entry x entries / the time they accompany; the median over "
    "the requests with books",
    "first_ns, decode_ns": "measured around Engine.generate by perf_counter",
    "with / without": "derived: ratios of neighbouring requests, interval of the geometric mean",
}


@click.command()
@options
@click.option("--memory", default="all", show_default=True, help="Bytes, or all.")
@click.option("--prompt", default=64, show_default=True, help="Tokens.")
@click.option("--decode", default=32, show_default=True, help="Tokens.")
@click.option("--pairs", type=click.IntRange(min=2), default=6, show_default=True)
def main(
    model: Path,
    threads: int,
    out: Path,
    as_json: bool,
    memory: str,
    prompt: int,
    decode: int,
    pairs: int,
) -> None:
    """Measure what ledger, tally and lanes cost on MODEL."""
    record = BenchRecord(
        bench="ledger_cost",
        settings={
            "model": model.name,
            "memory": memory,
            "threads": threads,
            "prompt": prompt,
            "decode": decode,
            "pairs": pairs,
        },
        how=HOW,
    )
    context = -(-(prompt + decode + 1) // 256) * 256
    with Engine.open(model, settings(memory, threads=threads, context=context)) as engine:
        tokens = Tokenizer.from_metadata(engine.model.metadata).encode(prose(), special=False)
        costs = _entry_costs(engine)
        part = cut(tokens, prompt)
        for turn, arm in enumerate(["warm", *alternating(pairs, (WITH, WITHOUT))]):
            sample = _request(engine, part, decode + 1, books=arm != WITHOUT)
            if turn:
                record.samples.append({"arm": arm, **sample})
    rows = _count(record, costs) + _compare(record)
    finish(record, columns=("", "", "95 % interval"), rows=rows, out=out, as_json=as_json)


# -- one entry ---------------------------------------------------------------------------


def _entry_costs(engine: Engine) -> dict[str, list[float]]:
    """Nanoseconds of one entry, one value per batch."""
    ledger, lanes, tally = Ledger(), LaneLog(), DecodeTally(start_ns=CLOCK())
    experts, tracing = engine.loaded.experts, engine.tracing

    def phase() -> None:
        with ledger.phase("sample"):
            pass

    def window() -> None:
        begin, _ = CLOCK(), experts.decode_wait_ns if experts else 0
        end = CLOCK()
        tally.window(begin, end, tokens=1, expert_wait_ns=0)
        tracing.window("r", begin, end, experts.decode_wait_ns if experts else 0)

    def read() -> None:
        lanes.record("io0", "decode", 1, 2, bytes=1, slots=1)

    return {"phase": _loops(phase), "window": _loops(window), "read": _loops(read)}


def _loops(entry: Callable[[], None]) -> list[float]:
    values = []
    for _ in range(BATCHES):
        begin = perf_counter_ns()
        for _ in range(LOOPS):
            entry()
        values.append((perf_counter_ns() - begin) / LOOPS)
    return values


# -- requests --------------------------------------------------------------------------------


class _NoLedger(Ledger):
    """Charges everything to `other`."""

    def phase(self, name: str) -> Any:
        return _NO_PHASE

    def add(self, name: str, *, bytes: int | None = None, slots: int | None = None) -> None:
        pass


class _NoTally(DecodeTally):
    def window(self, start_ns: int, end_ns: int, *, tokens: int, expert_wait_ns: int = 0) -> None:
        pass


_NO_PHASE: AbstractContextManager[None] = nullcontext()


@contextmanager
def _no_books(engine: Engine) -> Iterator[tuple[str, Ledger]]:
    with (
        patch.object(request_module, "DecodeTally", _NoTally),
        patch.object(engine.tracing, "on_event", lambda *_, **__: None),
    ):
        yield "none", _NoLedger()


def _request(
    engine: Engine, tokens: Sequence[int], max_tokens: int, *, books: bool
) -> dict[str, Any]:
    engine.loaded.state.reuse([-1])
    with nullcontext(engine.new_ledger()) if books else _no_books(engine) as opened:
        begin = perf_counter_ns()
        steps = engine.generate(tokens, sampling=GREEDY, max_tokens=max_tokens, opened=opened)
        next(steps)
        first = perf_counter_ns()
        windows = sum(1 for _ in steps)
        end = perf_counter_ns()
    sample: dict[str, Any] = {"first_ns": first - begin, "decode_ns": end - first}
    if books and (request := engine.last_record) is not None:
        data = request.to_dict()
        sample["entries"] = {
            "phase": sum(phase["calls"] for phase in data["ledger"]["phases"].values()),
            "window": windows,
            "read": data["decode_experts"]["misses"] or 0,
        }
        sample["record"] = data
    return sample


# -- what it adds up to ------------------------------------------------------------------------


def _count(record: BenchRecord, costs: dict[str, list[float]]) -> list[list[str]]:
    rows = []
    for name, values in costs.items():
        record.results[f"cost, {name}, ns"] = found = estimate(values)
        rows.append([f"one {name}", f"{found.median:,.0f} ns", interval(found, "{:,.0f}")])
    one = {name: record.results[f"cost, {name}, ns"].median for name in costs}
    shares: dict[str, list[float]] = {"first token": [], "decode": []}
    for s in record.samples:
        if n := s.get("entries"):
            shares["first token"].append(n["phase"] * one["phase"] / s["first_ns"])
            books = n["window"] * one["window"] + n["read"] * one["read"]
            shares["decode"].append(books / s["decode_ns"])
    for name, values in shares.items():
        record.results[f"share, {name}"] = found = estimate(values)
        rows.append([f"share of {name}", f"{found.median:.4%}", interval(found, "{:.4%}")])
        record.check(
            f"books, share of {name}",
            wanted=f"below {MOST_SHARE:.0%}",
            found=f"{max(values):.4%} at most",
            passed=max(values) < MOST_SHARE,
        )
    return rows


def _compare(record: BenchRecord) -> list[list[str]]:
    rows = []
    for what, name in (("first token", "first_ns"), ("decode", "decode_ns")):
        arms = [[s[name] for s in record.samples if s["arm"] == arm] for arm in (WITH, WITHOUT)]
        record.results[f"{what}, with / without"] = found = ratio(*arms)
        rows.append([f"{what}, with / without", f"{found.median:.3f}", interval(found)])
    return rows


if __name__ == "__main__":
    main()
