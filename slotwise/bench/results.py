"""What the samples of a run add up to: for every limit and everything measured, a line of figures.

A figure that could not be had is missing with a reason, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slotwise.bench.limit import Best, Limit, policy_quality
from slotwise.bench.stats import Estimate, estimate, ratio
from slotwise.bench.turns import OURS, PEER, Plan

Sample = Mapping[str, Any]

HOW = {
    "tokens/s": "measured: tokens / time in the worker by perf_counter; for a read from the token "
    "ids in hand to the first token out (ours) or to the last one's logits (llama.cpp)",
    "llama.cpp tokens/s": "measured: llama_decode and the wait for its logits, nothing else",
    "against llama.cpp": "derived: its time / our time, pair by pair under the same limit",
    "against resident llama.cpp": "derived: its time with everything in memory / our time, pair by "
    "pair",
    "of our resident speed": "derived: our time with everything in memory / our time, pair by pair",
    "TTFT, ms": "measured: as tokens/s",
    "bytes read/token": "measured: by the kernel (read_bytes of /proc/self/io), whatever they were "
    "read for: on demand, ahead, to refill",
    "llama.cpp bytes read/token": "measured: by the kernel, its page faults",
    "hit rate": "measured: routed entries that no read was needed for (for a read, distinct "
    "experts a layer and chunk)",
    "of the limit": "derived: max(compute, Belady's bytes / disk speed) / our time",
    "policy quality": "derived: Belady's bytes on the recorded routing / bytes read; Belady begins "
    "with a pool filled with what is needed first and never lends",
    "overlap quality": "derived: max(compute, bytes read / disk speed) / our time",
    "peak, MiB": "measured: the group's own peak, page cache included; without a group VmHWM",
    "llama.cpp peak, MiB": "measured: the group's own peak, page cache included",
}


@dataclass(kw_only=True)
class Line:
    """One thing measured under one limit (None: everything in memory)."""

    limit: int | None
    what: str
    figures: dict[str, Estimate] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Figure -> why it is not there."""
    best: Limit | None = None
    """What `of the limit` was reckoned with; for decode, of one window."""

    @property
    def where(self) -> str:
        return "resident" if self.limit is None else f"{self.limit / 2**20:,.0f} MiB"

    def shown(self, name: str, form: str) -> str:
        found = self.figures.get(name)
        return "-" if found is None else form.format(found.median)


@dataclass(frozen=True, kw_only=True)
class Thing:
    """What a line is about: a read of `prompt` tokens, or decode."""

    what: str
    prompt: int
    decode: bool

    def ns(self, sample: Sample) -> float | None:
        """Nanoseconds: of a read as a whole, of decode per token."""
        if "failed" in sample:
            return None
        if not self.decode:
            return sample["first_ns"]
        return sample["decode_ns"] / sample["decode_tokens"] if sample["decode_tokens"] else None

    def tokens(self) -> int:
        return 1 if self.decode else self.prompt

    def nbytes(self, sample: Sample) -> float | None:
        """As `ns`: of the read (its first window included), or of a window."""
        if not self.decode:
            return sample["read_bytes"]
        found = sample["decode_bytes"]
        return None if found is None else found / sample["decode_tokens"]

    def hit_rate(self, sample: Sample) -> float | None:
        counts = _experts(sample, "decode" if self.decode else "read")
        routed = counts["hits"] + counts["misses"]
        return counts["hits"] / routed if routed else None

    def best(self, best: Best) -> float:
        return best.decode_window if self.decode else best.read


def things(plan: Plan) -> list[Thing]:
    """In the order of the table."""
    found = [Thing(what=f"read {n:,}", prompt=n, decode=False) for n in plan.prompts]
    if plan.decode:
        found.append(
            Thing(what=f"decode after {plan.decode_after:,}", prompt=plan.decode_after, decode=True)
        )
    return found


def lines(
    plan: Plan,
    samples: Sequence[Sample],
    *,
    bests: Callable[[int, Sequence[int]], Best | None],
    bytes_per_second: float | None,
) -> list[Line]:
    """`bests(prompt, slots)` is what Belady reads for a prompt, None where no routing is known."""
    book = _Book(samples)
    made = []
    for limit in (
        *[n for n in plan.limits if n is not None],
        *([None] if None in plan.limits else []),
    ):
        for thing in things(plan):
            line = Line(limit=limit, what=thing.what)
            _speeds(line, thing, book)
            _traffic(line, thing, book)
            _limits(line, thing, book, bests, bytes_per_second)
            _memory(line, thing, book)
            made.append(line)
    return made


class _Book:
    """Samples by arm, limit and prompt, in the order of their rounds."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def all(self, arm: str, limit: int | None, thing: Thing) -> list[Sample]:
        return [
            s for s in self._samples
            if "set_aside" not in s
            and (s["arm"], s["limit_bytes"], s["prompt_tokens"]) == (arm, limit, thing.prompt)
        ]  # fmt: skip

    def good(self, arm: str, limit: int | None, thing: Thing) -> list[Sample]:
        return [s for s in self.all(arm, limit, thing) if thing.ns(s) is not None]

    def by_round(self, arm: str, limit: int | None, thing: Thing) -> dict[int, float]:
        return {s["round"]: thing.ns(s) or 0.0 for s in self.good(arm, limit, thing)}

    def why_none(self, arm: str, limit: int | None, thing: Thing) -> str:
        """Why there is no good sample."""
        failed = [s["failed"] for s in self.all(arm, limit, thing) if "failed" in s]
        return failed[0].splitlines()[0] if failed else "not measured in this run"


def _speeds(line: Line, thing: Thing, book: _Book) -> None:
    for arm, name in ((OURS, "tokens/s"), (PEER, "llama.cpp tokens/s")):
        times = book.by_round(arm, line.limit, thing)
        if times:
            rates = [thing.tokens() * 1e9 / ns for ns in times.values()]
            line.figures[name] = estimate(rates)
        else:
            line.missing[name] = book.why_none(arm, line.limit, thing)
    ours = book.by_round(OURS, line.limit, thing)
    if not thing.decode and ours:
        line.figures["TTFT, ms"] = estimate([ns / 1e6 for ns in ours.values()])
    compared = [("against llama.cpp", PEER, line.limit)]
    if line.limit is not None:
        compared += [
            ("against resident llama.cpp", PEER, None),
            ("of our resident speed", OURS, None),
        ]
    for name, arm, limit in compared:
        other = book.by_round(arm, limit, thing)
        both = sorted(ours.keys() & other.keys())
        if both:
            line.figures[name] = ratio([other[n] for n in both], [ours[n] for n in both])
        else:
            missing_arm = (arm, limit) if ours else (OURS, line.limit)
            line.missing[name] = book.why_none(*missing_arm, thing)


def _traffic(line: Line, thing: Thing, book: _Book) -> None:
    for arm, name in ((OURS, "bytes read/token"), (PEER, "llama.cpp bytes read/token")):
        found = [thing.nbytes(s) for s in book.good(arm, line.limit, thing)]
        known = [n / thing.tokens() for n in found if n is not None]
        if known:
            line.figures[name] = estimate(known)
        else:
            why = "the kernel does not count" if found else book.why_none(arm, line.limit, thing)
            line.missing[name] = why
    good = [s for s in book.good(OURS, line.limit, thing) if s["expert_slots"]]
    rates = [rate for s in good if (rate := thing.hit_rate(s)) is not None]
    if rates:
        line.figures["hit rate"] = estimate(rates)
    else:
        line.missing["hit rate"] = _no_experts(line, thing, book)


def _no_experts(line: Line, thing: Thing, book: _Book) -> str:
    if book.good(OURS, line.limit, thing):
        return "the model has no experts"
    return book.why_none(OURS, line.limit, thing)


def _limits(
    line: Line,
    thing: Thing,
    book: _Book,
    bests: Callable[[int, Sequence[int]], Best | None],
    bytes_per_second: float | None,
) -> None:
    names = ("of the limit", "policy quality", "overlap quality")
    if line.limit is None:
        return
    good = [s for s in book.good(OURS, line.limit, thing) if s["expert_slots"]]
    resident = book.by_round(OURS, None, thing)
    best = bests(thing.prompt, good[0]["expert_slots"]) if good else None
    why = (
        _no_experts(line, thing, book) if not good
        else "computing was not measured with everything in memory" if not resident
        else "no disk speed" if bytes_per_second is None
        else "no routing was recorded" if best is None
        else ""
    )  # fmt: skip
    if why or best is None or bytes_per_second is None:
        line.missing |= dict.fromkeys(names, why)
        return
    limit = Limit(
        compute_ns=estimate(list(resident.values())).median,
        best_bytes=thing.best(best),
        bytes_per_second=bytes_per_second,
    )
    times = [thing.ns(s) or 0.0 for s in good]
    line.figures["of the limit"] = estimate([limit.reached(ns) for ns in times])
    line.best = limit
    read = [
        (ns, n) for ns, s in zip(times, good, strict=True) if (n := thing.nbytes(s)) is not None
    ]
    if not read:
        line.missing |= dict.fromkeys(names[1:], "the kernel does not count what was read")
        return
    line.figures["overlap quality"] = estimate([limit.overlap(ns, n) for ns, n in read])
    qualities = [q for _, n in read if (q := policy_quality(limit.best_bytes, n)) is not None]
    if qualities:
        line.figures["policy quality"] = estimate(qualities)
    else:
        line.missing["policy quality"] = "nothing was read"


def _memory(line: Line, thing: Thing, book: _Book) -> None:
    for arm, name in ((OURS, "peak, MiB"), (PEER, "llama.cpp peak, MiB")):
        peaks = [n for s in book.good(arm, line.limit, thing) if (n := peak_bytes(s)) is not None]
        if peaks:
            line.figures[name] = estimate([n / 2**20 for n in peaks])


def peak_bytes(sample: Sample) -> int | None:
    """Of the group; of the process where there is no group or the kernel does not say."""
    group = sample.get("group")
    if group and group["peak_bytes"] is not None:
        return group["peak_bytes"]
    memory = sample.get("memory")
    return memory["VmHWM"] if memory else None


def _experts(sample: Sample, stage: str) -> Mapping[str, Any]:
    record = sample["record"]
    return record["prefill_experts" if stage == "read" else "decode_experts"]
