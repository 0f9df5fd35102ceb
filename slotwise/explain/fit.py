"""Least squares with errors that survive unequal scatter, and checks of what a fit assumes.

OLS with HC3 standard errors (MacKinnon and White 1985), t quantiles, a pure-error lack-of-fit test
over repeated sizes, variance inflation and condition number, and a drift check with the order of
the samples as a regressor. Every result carries its warnings. Nothing here knows about logs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from slotwise.explain.stats import Estimate, t_quantile

LEAST_FREEDOM = 2
MOST_LEVERAGE = 0.98
MOST_INFLATION = 10.0
SAME_RATE = 0.01
REPEAT_WITHIN = 0.05
"""Sizes closer than this share of each other count as the same size, repeated."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One sample of a fit: where it lies, what was seen, what the fit says, and its number."""

    x: tuple[float, ...]
    y: float
    fitted: float
    order: int

    @property
    def residual(self) -> float:
        return self.y - self.fitted


@dataclass(frozen=True, kw_only=True)
class LackOfFit:
    """Whether a straight line is consistent with how much repeats of one size scatter."""

    f: float
    p: float
    sizes: int
    repeats: int

    @property
    def rejects(self) -> bool:
        return self.p < 0.05


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fitted sum of terms. `terms` are named like `names`; `covariance` is HC3 or None."""

    name: str
    names: tuple[str, ...]
    terms: tuple[Estimate, ...]
    n: int
    residual_sd: float | None
    points: tuple[Point, ...]
    covariance: tuple[tuple[float, ...], ...] | None = None
    lack_of_fit: LackOfFit | None = None
    drift: Estimate | None = None
    inflation: float | None = None
    condition: float | None = None
    refused: str = ""
    """Why the terms must not be read one by one; empty when they may."""
    warnings: tuple[str, ...] = ()

    def term(self, name: str) -> Estimate:
        return self.terms[self.names.index(name)]

    @property
    def freedom(self) -> int:
        return self.n - len(self.names)

    def at(self, row: Sequence[float]) -> float:
        """The fitted value at one row of regressors, in the order of `names`."""
        return sum(t.value * x for t, x in zip(self.terms, row, strict=True))

    def change(self, row: Sequence[float], *, noise: bool = True) -> tuple[float, float] | None:
        """Change of y for a change `row` of the regressors, and its standard error.

        The error uses the covariance of the difference, plus one new observation's noise when
        `noise`. None when the fit has no covariance.
        """
        if self.covariance is None or self.residual_sd is None:
            return None
        d = np.asarray(row, dtype=float)
        variance = float(d @ np.asarray(self.covariance) @ d)
        if noise:
            variance += self.residual_sd**2
        return self.at(row), math.sqrt(variance)


@dataclass(frozen=True, kw_only=True)
class Floor:
    """A flat cost up to `knee`, then a straight line: max(floor, fixed + slope * x)."""

    floor: Estimate
    knee: float
    line: Fit
    squares: float
    """Sum of squared misses over all samples, to be set against the straight line's."""
    saturated: bool
    """As many numbers as sizes: it fits whatever was measured, so it proves nothing."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RateCheck:
    """Cost per unit through the origin, and whether one constant rate describes the samples."""

    rate: Fit
    with_intercept: Fit | None
    lowest: float
    highest: float
    holds: bool | None
    """None: too few samples or sizes to say."""
    words: str


def ols(
    columns: Sequence[Sequence[float]],
    y: Sequence[float],
    *,
    name: str,
    names: Sequence[str],
    units: Sequence[str],
    warnings: Sequence[str] = (),
) -> Fit:
    """Least squares of `y` on `columns` (pass a column of ones for an intercept).

    Raises ValueError when there are fewer samples than terms or the columns are dependent.
    """
    design, seen = np.column_stack([np.asarray(c, dtype=float) for c in columns]), np.asarray(y)
    n, terms = design.shape
    if n < terms or np.linalg.matrix_rank(design) < terms:
        raise ValueError(f"{n} samples cannot tell {terms} terms apart")
    beta = np.linalg.lstsq(design, seen, rcond=None)[0]
    fitted = design @ beta
    sd = math.sqrt(float(((seen - fitted) ** 2).sum()) / (n - terms)) if n > terms else None
    covariance, why = _hc3(design, seen - fitted)
    notes = [*warnings, *([why] if why else [])]
    half = [None] * terms
    if covariance is not None:
        half = [t_quantile(n - terms) * math.sqrt(v) for v in np.diag(covariance)]
    method = f"OLS, HC3, t 95 %, {n - terms} degrees of freedom"
    estimates = tuple(
        Estimate(
            value=float(b), unit=unit, n=n, low=None if h is None else float(b) - h,
            high=None if h is None else float(b) + h, method="" if h is None else method,
        )
        for b, unit, h in zip(beta, units, half, strict=True)
    )  # fmt: skip
    points = tuple(
        Point(x=tuple(float(v) for v in row), y=float(s), fitted=float(f), order=i)
        for i, (row, s, f) in enumerate(zip(design, seen, fitted, strict=True))
    )
    return Fit(
        name=name, names=tuple(names), terms=estimates, n=n, residual_sd=sd, points=points,
        covariance=None if covariance is None else tuple(map(tuple, covariance.tolist())),
        warnings=tuple(notes),
    )  # fmt: skip


def straight_line(
    x: Sequence[float], y: Sequence[float], *, name: str, per: str, warnings: Sequence[str] = ()
) -> Fit:
    """fixed + slope * x in order of measurement, with lack-of-fit and drift checks."""
    line = ols(
        [[1.0] * len(x), x], y, name=name, names=("fixed", f"per {per}"),
        units=("ms", f"ms/{per}"), warnings=warnings,
    )  # fmt: skip
    notes = list(line.warnings)
    fixed = line.term("fixed")
    if fixed.value < 0 and (fixed.high is None or fixed.high < 0):
        notes.insert(0, "the fixed cost comes out below zero, which nothing costs: do not use it")
    sizes = len(set(repeated_sizes(x)))
    lack = lack_of_fit(x, y)
    if sizes == 2:
        notes.append("two sizes: any two sizes lie on a straight line, so the line is not tested")
    elif lack is None:
        notes.append("no size was repeated often enough: the straight line is not tested")
    elif lack.rejects:
        notes.append(
            f"a straight line does not hold: sizes miss it by more than their repeats scatter "
            f"(F = {lack.f:.3g}, p = {lack.p:.2g})"
        )
    drift, note = drift_check(x, y, line=line)
    if note:
        notes.append(note)
    return replace(line, lack_of_fit=lack, drift=drift, warnings=tuple(notes))


def lack_of_fit(x: Sequence[float], y: Sequence[float]) -> LackOfFit | None:
    """Pure-error F test of a straight line; None without repeats or with under three sizes.

    Sizes within 5 % of each other count as repeats; the slope is kept in the larger model, so
    that their small differences are not taken for scatter.
    """
    groups = repeated_sizes(x)
    labels = sorted(set(groups))
    if len(labels) < 3 or len(x) <= len(labels):
        return None
    dummies = np.array([[float(g == label) for label in labels] for g in groups])
    size = np.asarray(x, dtype=float)
    full = dummies if _exact(x, groups) else np.column_stack([dummies, size - size.mean()])
    line = np.column_stack([np.ones(len(x)), size])
    rank = int(np.linalg.matrix_rank(full))
    pure_freedom, lack_freedom = len(x) - rank, rank - 2
    if pure_freedom < 1 or lack_freedom < 1:
        return None
    seen = np.asarray(y, dtype=float)
    pure, whole = _squares(full, seen), _squares(line, seen)
    if pure <= 1e-12 * max(1.0, float((seen**2).sum())):
        return None
    f = (whole - pure) / lack_freedom / (pure / pure_freedom)
    p = float(stats.f.sf(f, lack_freedom, pure_freedom))
    return LackOfFit(f=f, p=p, sizes=len(labels), repeats=len(x))


def drift_check(
    x: Sequence[float], y: Sequence[float], *, line: Fit
) -> tuple[Estimate | None, str]:
    """Change of y per sample in the order given, with x held; and a warning or ""."""
    order = np.arange(len(x), dtype=float)
    if len(x) < 6 or line.covariance is None:
        return None, ""
    if inflation([list(x), order.tolist()]) > MOST_INFLATION:
        return None, "the sizes came in order, so drift and size cannot be told apart"
    fit = ols(
        [[1.0] * len(x), x, order.tolist()], y, name="drift", names=("fixed", "size", "order"),
        units=("ms", "ms", "ms/sample"),
    )  # fmt: skip
    drift = fit.term("order")
    if not drift.excludes(0.0):
        return drift, ""
    return drift, f"it drifts: {drift.value:+.3g} ms per sample in the order they were taken"


def floor_then_line(x: Sequence[float], y: Sequence[float], *, name: str, per: str) -> Floor | None:
    """The best max(floor, fixed + slope * x) with a knee between two sizes; None if none fits.

    The smallest sizes are averaged to the floor, the line is fitted to the others (at least two).
    """
    groups = np.asarray(repeated_sizes(x))
    best: Floor | None = None
    for split in range(1, len(set(groups.tolist())) - 1):
        low, high = groups < split, groups >= split
        candidate = _floor(x, y, low, high, name=name, per=per)
        if candidate is None:
            continue
        if best is None or candidate.squares < best.squares:
            best = candidate
    return best


def _floor(
    x: Sequence[float], y: Sequence[float], low: np.ndarray, high: np.ndarray, *,
    name: str, per: str,
) -> Floor | None:  # fmt: skip
    from slotwise.explain.stats import mean

    size, seen = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    line = straight_line(size[high].tolist(), seen[high].tolist(), name=name, per=per)
    floor, (fixed, slope) = mean(seen[low].tolist()), (t.value for t in line.terms)
    if slope <= 0:
        return None
    knee = (floor.value - fixed) / slope
    if not size[low].max() * (1 - REPEAT_WITHIN) <= knee <= size[high].min():
        return None
    saturated = len(set(repeated_sizes(x))) <= 3
    missed = [*(p.residual for p in line.points), *(seen[low] - floor.value)]
    warnings = ()
    if saturated:
        warnings = (
            "three numbers from three sizes: this form fits by construction and is not tested",
        )
    return Floor(
        floor=floor,
        knee=knee,
        line=line,
        squares=float(np.square(missed).sum()),
        saturated=saturated,
        warnings=warnings,
    )


def constant_rate(
    x: Sequence[float], y: Sequence[float], *, name: str, per: str, warnings: Sequence[str] = ()
) -> RateCheck:
    """ms per unit through the origin, against a line with an intercept.

    It holds when the intercept's interval contains zero and the line passes its test, or when the
    rates of the sizes lie within 1 % of each other, whatever a test with very little scatter says.
    Where there are too few samples for an interval `holds` is None.
    """
    rate = ols([x], y, name=name, names=(f"per {per}",), units=(f"ms/{per}",), warnings=warnings)
    rates = [b / a for a, b in zip(x, y, strict=True)]
    low, high = min(rates), max(rates)
    apart = rate_spread(x, rates)
    spread = f"single rates {low:.3f} to {high:.3f} ms/{per}"
    if len(set(repeated_sizes(x))) > 1:
        spread += f", sizes within {apart:.1%} of each other"
    if len(set(x)) < 2:
        words = f"cannot say: every sample has the same number of {per}s; {spread}"
        return RateCheck(
            rate=rate, with_intercept=None, lowest=low, highest=high, holds=None, words=words
        )
    line = straight_line(x, y, name=f"{name}, with intercept", per=per)
    fixed = line.term("fixed")
    if not fixed.has_interval:
        return RateCheck(
            rate=rate, with_intercept=line, lowest=low, highest=high, holds=None,
            words=f"n = {len(x)} is too small to test it; {spread}",
        )  # fmt: skip
    passes = not fixed.excludes(0.0) and not (line.lack_of_fit and line.lack_of_fit.rejects)
    holds = passes or apart <= SAME_RATE
    verdict = "a constant rate does not hold"
    if passes:
        verdict = "consistent with a constant rate"
    elif holds:
        verdict = "a constant rate for any practical purpose, though not exactly one"
    words = f"{verdict}: intercept {fixed.value:.3g} ms [{fixed.low:.3g}, {fixed.high:.3g}]; "
    return RateCheck(
        rate=rate, with_intercept=line, lowest=low, highest=high, holds=holds, words=words + spread
    )


def rate_spread(x: Sequence[float], rates: Sequence[float]) -> float:
    """How far the mean rates of the sizes are apart, as a share of their mean."""
    sizes: dict[int, list[float]] = {}
    for size, rate in zip(repeated_sizes(x), rates, strict=True):
        sizes.setdefault(size, []).append(rate)
    means = [sum(v) / len(v) for v in sizes.values()]
    return (max(means) - min(means)) / (sum(means) / len(means)) if sum(means) else 0.0


def two_costs(
    a: Sequence[float], b: Sequence[float], y: Sequence[float], *, name: str, per: tuple[str, str]
) -> Fit:
    """fixed + per-a + per-b, refused where the samples cannot tell a from b apart.

    A refusal keeps the inflation and the condition number and says what would separate them.
    Raises ValueError when there are too few samples or the columns are dependent.
    """
    vif, condition = inflation([a, b]), condition_number([a, b])
    names = ("fixed", f"per {per[0]}", f"per {per[1]}")
    if vif > MOST_INFLATION or condition > MOST_INFLATION:
        still = next((p for p, column in zip(per, (a, b), strict=True) if len(set(column)) < 2), "")
        why = (
            f"{still}s are the same in every sample, so their cost cannot be told from the fixed "
            f"one. Arms in which {still}s differ would tell it."
            if still
            else f"{per[0]}s and {per[1]}s grow together (variance inflation {vif:.3g}, condition "
            f"number {condition:.3g}; above {MOST_INFLATION:.0f} their costs cannot be told "
            f"apart). Crossing them would: the same prompt sizes in arms with other pool sizes "
            f"or refill policies, so that {per[1]}s change while {per[0]}s do not."
        )
        return Fit(
            name=name, names=names, terms=(), n=len(y), residual_sd=None, points=(),
            inflation=vif, condition=condition, refused=why, warnings=(why,),
        )  # fmt: skip
    fit = ols(
        [[1.0] * len(y), a, b], y, name=name, names=names,
        units=("ms", f"ms/{per[0]}", f"ms/{per[1]}"),
    )  # fmt: skip
    return replace(fit, inflation=vif, condition=condition)


def inflation(columns: Sequence[Sequence[float]]) -> float:
    """Variance inflation of two regressors: 1 / (1 - r^2); infinite when dependent."""
    a, b = (np.asarray(c, dtype=float) for c in columns)
    if a.std() == 0 or b.std() == 0:
        return math.inf
    r = float(np.corrcoef(a, b)[0, 1])
    return 1 / (1 - r * r) if abs(r) < 1 - 1e-12 else math.inf


def condition_number(columns: Sequence[Sequence[float]]) -> float:
    """Condition number of the centred and scaled regressors (Belsley)."""
    x = np.column_stack([np.asarray(c, dtype=float) for c in columns])
    x = x - x.mean(axis=0)
    length = np.linalg.norm(x, axis=0)
    if (length == 0).any():
        return math.inf
    values = np.linalg.svd(x / length, compute_uv=False)
    return float(values[0] / values[-1]) if values[-1] > 1e-9 * values[0] else math.inf


def repeated_sizes(x: Sequence[float]) -> list[int]:
    """The number of its size group for every sample; sizes within 5 % share one."""
    label, labels, last = -1, {}, -math.inf
    for size in sorted(set(x)):
        if size - last > REPEAT_WITHIN * abs(size):
            label, last = label + 1, size
        labels[size] = label
    return [labels[size] for size in x]


def _exact(x: Sequence[float], groups: Sequence[int]) -> bool:
    return len(set(x)) == len(set(groups))


def _squares(design: np.ndarray, y: np.ndarray) -> float:
    return float(((y - design @ np.linalg.lstsq(design, y, rcond=None)[0]) ** 2).sum())


def _hc3(design: np.ndarray, residuals: np.ndarray) -> tuple[np.ndarray | None, str]:
    """HC3 covariance of the terms, or None and why there is none."""
    n, terms = design.shape
    if n - terms < LEAST_FREEDOM:
        needed = terms + LEAST_FREEDOM
        return None, f"n = {n} is too small for an interval of this fit ({needed} needed)"
    scale = np.linalg.norm(design, axis=0)
    scaled = design / scale
    inverse = np.linalg.inv(scaled.T @ scaled)
    leverage = np.einsum("ij,jk,ik->i", scaled, inverse, scaled)
    if leverage.max() > MOST_LEVERAGE:
        return None, "one sample alone decides a term of this fit, so it has no interval"
    weight = (residuals / (1 - leverage)) ** 2
    middle = (scaled * weight[:, None]).T @ scaled
    covariance = inverse @ middle @ inverse / np.outer(scale, scale)
    return covariance, ""
