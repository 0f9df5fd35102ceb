"""What the time to the first token would have been with a phase off the path, and whether it was.

A prediction takes a phase out of every request it was measured in, so what phases have in common
stays in the interval. Its assumption is part of it, in words. With an arm that has the lever on,
predicted is set against measured. Nothing here makes a lever work; it says what to expect of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from slotwise.explain.compare import (
    Matched,
    hidden_differences,
    match,
    objections,
    outer_clock,
    used,
)
from slotwise.explain.record import Reading, Request
from slotwise.explain.stats import LEAST_FOR_INTERVAL, Estimate, mean, t_quantile
from slotwise.explain.summary import (
    Summary,
    batched_parts,
    drawn_words,
    group_requests,
    in_memory,
    phase_ms,
    phase_names,
    slot_and_token_cost,
    summarise,
)

FULLY_ON = 0.05
"""A lever counts as on when less than this share of its phase is left."""


@dataclass(frozen=True, kw_only=True)
class Lever:
    """A phase that could be off the path, and what has to be true for the prediction."""

    key: str
    title: str
    phase: str
    """Name of the phase it removes; "" when it does something else."""
    assumption: str


LEVERS = (
    Lever(
        key="deferred-refill",
        title="refill after the first token",
        phase="refill",
        assumption=(
            "nothing before the first token waits for the experts that are not back yet, and the "
            "copies that follow do not slow the first window; decode pays for them instead"
        ),
    ),
    Lever(
        key="no-checkpoint",
        title="no checkpoint before the first token",
        phase="checkpoint",
        assumption=(
            "nothing else needs the checkpoint in this request; the next turn reads again what it "
            "would have restored, and that is not counted here"
        ),
    ),
    Lever(
        key="one-part",
        title="one batched part instead of several",
        phase="",
        assumption=(
            "every further batched part costs the fitted fixed cost of a read and nothing else "
            "changes when parts are joined"
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What one request would save: a number, or bounds; None bounds are open."""

    value: float | None
    low: float
    high: float | None
    basis: str


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One lever at one prompt size."""

    lever: Lever
    label: str
    clock: str
    n: int
    now: Estimate
    saved: Estimate | None
    """None when only bounds are known."""
    predicted: Estimate
    """Of the mean; bounded predictions have an interval whose `method` says bounds."""
    basis: str
    measured: Estimate | None = None
    expected: tuple[float, float] | None = None
    """Where the measured mean should lie, with the noise of new samples."""
    holds: bool | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LeverReport:
    """All predictions, and the levers that could not be predicted with the reason."""

    predictions: tuple[Prediction, ...]
    not_predicted: tuple[tuple[str, str], ...]
    arm: str
    """Name of the arm with the lever on; "" when none was given."""
    warnings: tuple[str, ...]


def predict_levers(
    reading: Reading,
    *,
    off: Sequence[str] = (),
    with_lever: Reading | None = None,
    lever_key: str = "",
    arm: str = "",
) -> LeverReport:
    """Predictions per prompt size for the known levers and for phases named in `off`.

    With `with_lever` only the lever `lever_key` is predicted and set against that arm.
    """
    lives = [*reading.lives, *(with_lever.lives if with_lever else ())]
    drawn = [words for life in lives for words in drawn_words(life)]
    reading = in_memory(reading)
    with_lever = None if with_lever is None else in_memory(with_lever)
    levers = [*LEVERS, *(_custom(name) for name in off)]
    if lever_key:
        levers = [lever for lever in levers if lever.key == lever_key]
    groups = match(reading, with_lever)[0] if with_lever else _own_groups(reading)
    summary = _summary_of_all(reading)
    predictions: list[Prediction] = []
    reasons: list[tuple[str, str]] = []
    for lever in levers:
        found = [p for p in (_predict(lever, g, summary=summary) for g in groups) if p]
        predictions += found
        if not found:
            reasons.append((lever.title, _why_not(lever, used(reading))))
    if with_lever is not None:
        drawn += _differences(reading, with_lever, groups, arm=arm)
    warnings = [*drawn, *([] if groups else ["no finished request with a known size"])]
    return LeverReport(
        predictions=tuple(predictions), not_predicted=tuple(reasons), arm=arm,
        warnings=tuple(warnings),
    )  # fmt: skip


def _differences(a: Reading, b: Reading, matched: Sequence[Matched], *, arm: str) -> list[str]:
    """What beside the lever may be why the arm is not as predicted."""
    against = objections(a, b, matched, names=("these logs", arm))
    return [
        *(f"not comparable: {finding.found}" for finding in against),
        *(f"differs beside the lever: {text}" for text in hidden_differences(a, b, matched)),
    ]


def _predict(lever: Lever, group: Matched, *, summary: Summary) -> Prediction | None:
    clock, outer_of = outer_clock([*group.a, *group.b])
    timed = [r for r in group.a if outer_of(r) is not None]
    savings = [_saved(lever, r, summary=summary) for r in timed]
    rows = [(r, s) for r, s in zip(timed, savings, strict=True) if s is not None]
    if not rows:
        return None
    now = [outer_of(r) or 0.0 for r, _ in rows]
    warnings = [] if len(rows) == len(timed) else [f"only {len(rows)} of {len(timed)} requests say"]
    if clock != "first token":
        warnings.append("first token not in the log: predicted for the prompt clock")
    exact = [s.value for _, s in rows if s.value is not None]
    if len(exact) == len(rows):
        saved = mean(exact)
        predicted = mean([y - s for y, s in zip(now, exact, strict=True)])
    else:
        saved, predicted = None, _bounded(now, [s for _, s in rows])
        warnings.append("only bounds: the log does not time this phase")
    prediction = Prediction(
        lever=lever, label=group.label, clock=clock, n=len(rows), now=mean(now), saved=saved,
        predicted=predicted, basis=rows[0][1].basis, warnings=tuple(warnings),
    )  # fmt: skip
    if not group.b:
        return prediction
    return _judge(prediction, now, [s for _, s in rows], group.b, outer_of)


def _judge(
    prediction: Prediction, now: Sequence[float], savings: Sequence[Saved],
    arm: Sequence[Request], outer_of: Callable[[Request], float | None],
) -> Prediction:  # fmt: skip
    seen = [v for v in (outer_of(r) for r in arm) if v is not None]
    if not seen:
        return prediction
    measured = mean(seen)
    warnings = list(prediction.warnings)
    name = prediction.lever.phase
    still = [v for v in (phase_ms(r, name) for r in arm if name) if v]
    taken = prediction.saved.value if prediction.saved else 0.0
    if still and mean(still).value > FULLY_ON * taken:
        warnings.append(
            f"the lever was not fully on: that arm still waits {mean(still).value:,.1f} ms "
            f"of {name}"
        )
    expected = _expected(now, savings, len(seen))
    holds = None
    if expected is None:
        warnings.append("too few samples to say where the measured mean should lie")
    else:
        holds = expected[0] <= measured.value <= expected[1]
    return replace(
        prediction, measured=measured, expected=expected, holds=holds, warnings=tuple(warnings)
    )


def _expected(now: Sequence[float], savings: Sequence[Saved], m: int) -> tuple[float, float] | None:
    """Interval for the mean of `m` new requests: error of the prediction plus their noise.

    The scatter is that of (time - saved) per request, so the covariance of both is in it.
    """
    n = len(now)
    if n < LEAST_FOR_INTERVAL:
        return None
    least = [y - (s.high if s.high is not None else y) for y, s in zip(now, savings, strict=True)]
    most = [y - s.low for y, s in zip(now, savings, strict=True)]
    halves = [t_quantile(n - 1) * _sd(v) * math.sqrt(1 / n + 1 / m) for v in (least, most)]
    return sum(least) / n - halves[0], sum(most) / n + halves[1]


def _saved(lever: Lever, request: Request, *, summary: Summary) -> Saved | None:
    if lever.key == "one-part":
        return _saved_by_one_part(request, summary)
    ms = phase_ms(request, lever.phase)
    if ms is not None:
        return Saved(value=ms, low=ms, high=ms, basis=f"the {lever.phase} that was timed")
    if any(p.name == lever.phase for p in request.phases):
        return _rest(request, lever.phase)
    lent = request.slots_lent.value
    if lever.key == "deferred-refill":
        if not lent or request.slots_refilled.value == 0:
            return None
        return _saved_by_slots(summary, lent) or _rest(request, lever.phase)
    if lever.key == "no-checkpoint" and request.remainders:
        return _rest(request, lever.phase)
    return None


def _saved_by_slots(summary: Summary, lent: float) -> Saved | None:
    fit = summary.costs
    if fit is None or fit.refused:
        return None
    change = fit.change((0.0, 0.0, lent), noise=False)
    if change is None:
        return None
    value, error = change
    half = t_quantile(fit.freedom) * error
    return Saved(
        value=value, low=value - half, high=value + half,
        basis="lent slots times the fitted cost per slot",
    )  # fmt: skip


def _rest(request: Request, phase: str) -> Saved | None:
    """Bounds: the phase is somewhere in what the timed phases leave of the prompt clock."""
    if request.prompt_ms.value is None:
        return None
    timed = [p.ms.value for p in request.phases if p.lane == "request" and p.ms.value is not None]
    if not timed:
        return None
    rest = max(0.0, request.prompt_ms.value - sum(timed))
    basis = f"{phase} is not timed; it is at most what the timed phases leave of the prompt clock"
    return Saved(value=None, low=0.0, high=rest, basis=basis)


def _saved_by_one_part(request: Request, summary: Summary) -> Saved | None:
    parts = batched_parts(request)
    cost = summary.read
    if parts < 2 or cost.line is None or cost.what != "read (batched)":
        return None
    fixed = (cost.floor.line if cost.floor else cost.line).term("fixed")
    if fixed.low is None or fixed.high is None:
        return None
    k = parts - 1
    return Saved(
        value=None, low=max(0.0, k * fixed.low), high=k * fixed.high,
        basis=f"{k} part(s) less, each at the fitted fixed cost of the read",
    )  # fmt: skip


def _bounded(now: Sequence[float], savings: Sequence[Saved]) -> Estimate:
    n = len(now)
    low = sum(y - (s.high if s.high is not None else y) for y, s in zip(now, savings, strict=True))
    high = sum(y - s.low for y, s in zip(now, savings, strict=True))
    return Estimate(
        value=(low + high) / 2 / n, unit="ms", n=n, low=low / n, high=high / n,
        method="bounds, not a confidence interval: the value is their middle",
    )  # fmt: skip


def _why_not(lever: Lever, requests: Sequence[Request]) -> str:
    if lever.key == "one-part":
        if max(map(batched_parts, requests), default=0) < 2:
            return "no request was read in more than one batched part"
        return "the fixed cost of a read has no interval here (too few sizes or samples)"
    if lever.key.startswith("off:"):
        return f"no such phase; there are: {', '.join(phase_names(requests)) or 'none'}"
    return f"no request shows a {lever.phase}, and nothing bounds one"


def _own_groups(reading: Reading) -> list[Matched]:
    groups = []
    warm = {id(r) for r in used(reading)}
    for life in reading.lives:
        by_index = {r.index: r for r in life.requests if id(r) in warm}
        for g in group_requests(life.requests):
            members = tuple(by_index[i] for i in g.used if i in by_index)
            if members:
                groups.append(Matched(label=g.label, a=members, b=()))
    return groups


def _summary_of_all(reading: Reading) -> Summary:
    """Costs over all lives together when there are several, so that sizes of each count."""
    if len(reading.lives) == 1:
        return summarise(reading.lives[0])
    requests = used(reading)
    renumbered = [replace(r, index=i, first_of_life=False) for i, r in enumerate(requests)]
    life = replace(reading.lives[0], requests=tuple(renumbered))
    return replace(summarise(life), costs=slot_and_token_cost(renumbered))


def _custom(phase: str) -> Lever:
    return Lever(
        key=f"off:{phase}",
        title=f"without {phase}",
        phase=phase,
        assumption=f"everything else takes as long without {phase}",
    )


def _sd(values: Sequence[float]) -> float:
    middle = sum(values) / len(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (len(values) - 1))
