"""What a handful of samples says: medians, and the interval that goes with them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Median, and Student's t interval of the mean at 95 %; None where one sample has none."""

    n: int
    median: float
    low: float | None
    high: float | None


def estimate(values: Sequence[float]) -> Estimate:
    """Raises ValueError without values."""
    low, high = _t_interval(values)
    return Estimate(n=len(values), median=_median(values), low=low, high=high)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Of the ratios pair by pair. The interval is that of their geometric mean: a ratio and its
    inverse must tell the same story, so it is computed on logarithms.

    Raises ValueError for sequences of unequal length, or values that are not above 0.
    """
    ratios = [n / d for n, d in zip(numerators, denominators, strict=True) if d > 0]
    if len(ratios) < len(numerators) or any(r <= 0 for r in ratios):
        raise ValueError("ratios need values above 0 on both sides")
    low, high = _t_interval([math.log(r) for r in ratios])
    return Estimate(
        n=len(ratios),
        median=_median(ratios),
        low=None if low is None else math.exp(low),
        high=None if high is None else math.exp(high),
    )


def alternating(pairs: int, arms: Sequence[str] = ("A", "B")) -> list[str]:
    """A B B A A B B A ...: drift of the machine falls on all arms alike."""
    order = []
    for i in range(pairs):
        order += arms if i % 2 == 0 else reversed(arms)
    return order


def _median(values: Sequence[float]) -> float:
    if not values:
        raise ValueError("no samples")
    return statistics.median(values)


def _t_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """(low, high) of the mean; nothing is known about the spread of a single value."""
    if len(values) < 2:
        return None, None
    from slotwise.explain.stats import t_quantile

    mean, error = statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))
    margin = t_quantile(len(values) - 1) * error
    return mean - margin, mean + margin


def quantiles(values: Sequence[float], shares: Sequence[float]) -> list[float]:
    """The values below which these shares lie; the nearest real sample, never in between."""
    ordered = sorted(values)
    return [ordered[round(share * (len(ordered) - 1))] for share in shares]
