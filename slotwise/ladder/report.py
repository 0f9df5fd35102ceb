"""What a run record says: a table per arm, what things cost, arms against the first one.

All statistics are `explain`'s; this only chooses which samples go into which. Cold samples stand
apart, samples that were refused or failed are counted with their reasons and are in no number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slotwise.errors import Refused
from slotwise.explain.compare import Comparison, compare
from slotwise.explain.fit import Fit, RateCheck, straight_line
from slotwise.explain.grouping import by_size_and_reuse, label
from slotwise.explain.readers.ladder_record import FIRST, lives_of
from slotwise.explain.record import Life, Reading, Request
from slotwise.explain.stats import Difference, Estimate, difference, mean, paired_difference
from slotwise.explain.summary import ReadCost, phase_ms, read_cost, reads_of, refill_cost
from slotwise.ladder.proof import Proof, proofs

LEAST_SIZES = 2
PARTS: dict[str, Callable[[str], bool]] = {
    "read": lambda name: name.startswith("read"),
    "refill": lambda name: name == "refill",
    "conversation": lambda name: name in ("lookup", "restore", "checkpoint"),
}
"""Phases that belong together when two arms are reconciled."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One size of one arm; means in ms. None where no sample says."""

    label: str
    n: int
    tokens: float
    read: Estimate | None
    refill: Estimate | None
    checkpoint: Estimate | None
    lent: float | None
    per_slot: Estimate | None
    prompt_clock: Estimate | None
    first_token: Estimate | None
    next_token: Estimate | None
    """Mean time between events that carried tokens."""


@dataclass(frozen=True, kw_only=True)
class ArmReport:
    """One arm: a row per size, and what fits say it costs."""

    name: str
    rows: tuple[Row, ...]
    first_rows: tuple[Row, ...]
    """Of the cold samples."""
    read: ReadCost
    refill: RateCheck | None
    refill_why_not: str
    first_token: Fit | None
    statuses: Mapping[str, int]
    reasons: Mapping[str, int]
    """Why samples were refused or failed, and how often."""
    proofs: tuple[Proof, ...]
    """That the arm was switched on."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Where one size's difference of two arms lies: in the read, the refill, the conversation's
    own work, or elsewhere. The shares add up to that of the first token."""

    names: tuple[str, str]
    label: str
    first_token: Difference
    read: Difference
    refill: Difference
    conversation: Difference
    rest: Difference


@dataclass(frozen=True, kw_only=True)
class LadderReport:
    """Everything `slotwise ladder report` shows."""

    record: Mapping[str, Any]
    arms: tuple[ArmReport, ...]
    comparisons: tuple[Comparison, ...]
    shares: tuple[Share, ...]
    """For arms whose phases are known."""
    not_compared: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def anything(self) -> bool:
        return any(arm.rows for arm in self.arms)


def ladder_report(record: Mapping[str, Any], *, file: str) -> LadderReport:
    """The report of a record that satisfies the schema."""
    lives = {life.file: life for life in lives_of(record, file=file)}
    names = [arm["name"] for arm in record["arms"]]
    arms = [_arm(arm, lives, record, file=file) for arm in record["arms"]]
    comparisons, not_compared = _comparisons(record, lives, names, file=file)
    compared = [c.names for c in comparisons]
    shares = [s for pair in compared for s in _shares(pair, lives, file=file)]
    return LadderReport(
        record=record, arms=tuple(arms), comparisons=tuple(comparisons),
        shares=tuple(shares),
        not_compared=tuple(not_compared),
        warnings=(*_warnings(record), *(_unsure(arms) if len(arms) > 1 else ())),
    )  # fmt: skip


def _arm(
    entry: Mapping[str, Any], lives: Mapping[str, Life], record: Mapping[str, Any], *, file: str
) -> ArmReport:
    name = entry["name"]
    samples = [s for s in record["samples"] if s["arm"] == name]
    warm = _done(lives.get(f"{file}:{name}"))
    cold = _done(lives.get(f"{file}:{name}{FIRST}"))
    gaps = {s["index"] + 1: gap for s in samples if (gap := _gap(s)) is not None}
    refill, why_not = refill_cost(warm)
    return ArmReport(
        name=name,
        rows=tuple(_row(group, gaps) for group in by_size_and_reuse(warm)),
        first_rows=tuple(_row(group, gaps) for group in by_size_and_reuse(cold)),
        read=read_cost(warm),
        refill=refill,
        refill_why_not=why_not,
        first_token=_first_token(warm),
        statuses=Counter(s["status"] for s in samples),
        reasons=Counter(s["why"] for s in samples if s["why"]),
        proofs=tuple(proofs(entry, samples)),
    )


def _done(life: Life | None) -> list[Request]:
    return [r for r in life.requests if r.status == "done"] if life is not None else []


def _row(requests: Sequence[Request], gaps: Mapping[int, float]) -> Row:
    refills = [(phase_ms(r, "refill"), r.slots_refilled.value) for r in requests]
    lent = [r.slots_lent.value for r in requests if r.slots_lent.value is not None]
    return Row(
        label=label(requests),
        n=len(requests),
        tokens=sum(r.prompt.value or 0 for r in requests) / len(requests),
        read=_mean(requests, _read_ms),
        refill=_mean(requests, lambda r: phase_ms(r, "refill")),
        checkpoint=_mean(requests, lambda r: phase_ms(r, "checkpoint")),
        lent=sum(lent) / len(lent) if lent else None,
        per_slot=_estimate([ms / n for ms, n in refills if ms and n], "ms/slot"),
        prompt_clock=_mean(requests, lambda r: r.prompt_ms.value),
        first_token=_mean(requests, lambda r: r.ttft_ms.value),
        next_token=_mean(requests, lambda r: gaps.get(r.lines[0])),
    )


def _read_ms(request: Request) -> float | None:
    """The phases that read the prompt, summed; None where one of them is not known."""
    values = [p.ms.value for p in reads_of(request)]
    known = [v for v in values if v is not None]
    return sum(known) if known and len(known) == len(values) else None


def _mean(requests: Sequence[Request], of: Callable[[Request], float | None]) -> Estimate | None:
    """A mean only where every request says: a mean of some would be of others than it seems."""
    values = [of(r) for r in requests]
    known = [v for v in values if v is not None]
    return _estimate(known, "ms") if len(known) == len(values) else None


def _estimate(values: Sequence[float], unit: str) -> Estimate | None:
    return mean(values, unit=unit) if values else None


def _gap(sample: Mapping[str, Any]) -> float | None:
    """Mean ms between the sample's events that carried tokens."""
    stamps = sample["token_ms"]
    return (stamps[-1] - stamps[0]) / (len(stamps) - 1) if len(stamps) > 1 else None


def _first_token(requests: Sequence[Request]) -> Fit | None:
    """The client's first token against what was read."""
    pairs = [(r.read.value, r.ttft_ms.value) for r in requests]
    known = [(x, y) for x, y in pairs if x is not None and y is not None]
    if len({x for x, _ in known}) < LEAST_SIZES or len(known) < LEAST_SIZES + 1:
        return None
    x, y = zip(*known, strict=True)
    return straight_line(x, y, name="first token", per="token")


def _comparisons(
    record: Mapping[str, Any], lives: Mapping[str, Life], names: Sequence[str], *, file: str
) -> tuple[list[Comparison], list[str]]:
    """Every arm against the first; those whose counter proves nothing are refused."""
    unproven = [a["name"] for a in record["arms"] if not a["engaged"]]
    if len(names) < 2:
        return [], []
    if unproven:
        return [], [f"arm {n}: no engaged counter in the record" for n in unproven]
    found, refused = [], []
    for name in names[1:]:
        sides = [
            Reading(lives=tuple(v for k, v in lives.items() if k == f"{file}:{n}"))
            for n in (names[0], name)
        ]
        try:
            found.append(compare(*sides, names=(names[0], name), interleaved=True))
        except Refused as error:
            refused.append(f"{names[0]} against {name}: {error.findings[0].found}")
    return found, refused


def _shares(names: tuple[str, str], lives: Mapping[str, Life], *, file: str) -> Iterator[Share]:
    sides = [_done(lives.get(f"{file}:{name}")) for name in names]
    first = {id(r) for r in sides[0]}
    for group in by_size_and_reuse([*sides[0], *sides[1]]):
        a, b = ([r for r in group if (id(r) in first) == (k == 0)] for k in (0, 1))
        if a and b and all(_ledger(r) and r.ttft_ms.known for r in group):
            yield Share(names=names, label=label(group), **_differences(a, b))


def _differences(a: Sequence[Request], b: Sequence[Request]) -> dict[str, Difference]:
    def by(of: Callable[[Request], float]) -> Difference:
        left, right = [of(r) for r in a], [of(r) for r in b]
        if len(left) == len(right):  # arms share the passage of a round
            return paired_difference(list(zip(left, right, strict=True)))
        return difference(left, right)

    parts = {name: by(lambda r, w=which: _sum(r, w)) for name, which in PARTS.items()}
    known = list(PARTS.values())
    return {
        "first_token": by(lambda r: r.ttft_ms.value or 0.0),
        **parts,
        "rest": by(lambda r: (r.ttft_ms.value or 0.0) - sum(_sum(r, w) for w in known)),
    }


def _sum(request: Request, which: Callable[[str], bool]) -> float:
    return sum(p.ms.value or 0.0 for p in request.phases if p.lane == "request" and which(p.name))


def _ledger(request: Request) -> bool:
    """Whether the request's read is timed by itself."""
    return bool(reads_of(request))


def _unsure(arms: Sequence[ArmReport]) -> Iterator[str]:
    """What the engaged counters leave open of arms that are compared."""
    for number, arm in enumerate(arms):
        if number and arm.proofs and not any(proof.counted for proof in arm.proofs):
            yield f"arm {arm.name} is proven by a setting only, by nothing that its lever did"
        for proof in arm.proofs:
            for size in proof.never_at:
                yield (
                    f"arm {arm.name}, {size:,} tokens: its lever never engaged ({proof.counter} "
                    f"is {proof.expected} in none of {proof.of[size]} samples): nothing at this "
                    "size is its work"
                )


def _warnings(record: Mapping[str, Any]) -> list[str]:
    warnings = list(record["warnings"])
    samples = record["samples"]
    unsaid = sum(s["status"] == "ok" and s["tokens"]["cached"] is None for s in samples)
    if unsaid:
        warnings.append(
            f"{unsaid} samples: the server does not say how many tokens came from its cache"
        )
    if record["status"] != "done":
        warnings.append(f"the run is {record['status']} {record['status_why']}".rstrip())
    planned = record["plan"]["steps"]
    if len(samples) < planned:
        warnings.append(f"{len(samples)} of {planned} planned samples were taken")
    pairing = record["pairing"]
    if pairing is not None and pairing["unpaired_samples"] and pairing["files"]:
        numbers = ", ".join(str(i) for i in pairing["unpaired_samples"][:12])
        warnings.append(
            f"{len(pairing['unpaired_samples'])} samples have no request in the trace: {numbers}"
        )
    warnings += pairing["warnings"] if pairing else []
    service = record["service"]
    if service is not None and not service["restored"]:
        warnings.append("PRODUCTION WAS NOT RESTORED")
    return warnings
