"""Intervals and tests against scipy's own, and the rules for small samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from slotwise.explain import stats

RNG = np.random.default_rng(7)


@pytest.mark.parametrize("n", [3, 5, 19])
def test_below_twenty_samples_the_interval_is_student_s(n: int) -> None:
    x = RNG.gamma(2.0, 30.0, n)
    low, high = scipy_stats.t.interval(0.95, n - 1, loc=x.mean(), scale=scipy_stats.sem(x))
    got = stats.mean(x.tolist())
    assert (got.low, got.high) == pytest.approx((low, high))
    assert got.value == pytest.approx(x.mean())
    assert "t, 95 %" in got.method
    assert got.n == n


def test_the_deviation_is_the_sample_s_not_the_population_s() -> None:
    got = stats.mean([1.0, 2.0, 3.0])
    assert got.high == pytest.approx(2 + scipy_stats.t.ppf(0.975, 2) * 1.0 / math.sqrt(3))


def test_the_bootstrap_comes_in_at_twenty_samples_only() -> None:
    x = RNG.normal(100, 5, 20).tolist()
    assert "bootstrap" in stats.mean(x).method
    assert "bootstrap" not in stats.mean(x[:19]).method
    again = stats.mean(x)
    assert (again.low, again.high) == (stats.mean(x).low, stats.mean(x).high)


def test_many_samples_do_not_cost_memory_squared() -> None:
    assert stats.mean(RNG.normal(0, 1, 100_000).tolist()).has_interval


@pytest.mark.parametrize("n", [1, 2])
def test_too_few_samples_get_a_sentence_and_no_interval(n: int) -> None:
    got = stats.mean([5.0, 7.0][:n])
    assert got.low is None
    assert got.high is None
    assert got.warnings == (f"n = {n} is too small for an interval (3 needed)",)


def test_equal_samples_get_no_interval_of_width_zero() -> None:
    got = stats.mean([4.0] * 30)
    assert not got.has_interval
    assert "equal" in got.warnings[0]


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [math.inf]])
def test_nothing_and_nan_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError):
        stats.mean(bad)


def test_welch_agrees_with_scipy() -> None:
    a, b = RNG.normal(100, 3, 6), RNG.normal(110, 12, 9)
    oracle = scipy_stats.ttest_ind(b, a, equal_var=False)
    interval = oracle.confidence_interval(0.95)
    got = stats.difference(a.tolist(), b.tolist())
    assert got.p == pytest.approx(oracle.pvalue)
    assert (got.estimate.low, got.estimate.high) == pytest.approx((interval.low, interval.high))
    assert not got.paired


def test_paired_agrees_with_scipy() -> None:
    a = RNG.normal(100, 30, 7)
    b = a + RNG.normal(5, 1, 7)
    oracle = scipy_stats.ttest_rel(b, a)
    interval = oracle.confidence_interval(0.95)
    got = stats.paired_difference(list(zip(a.tolist(), b.tolist(), strict=True)))
    assert got.p == pytest.approx(oracle.pvalue)
    assert (got.estimate.low, got.estimate.high) == pytest.approx((interval.low, interval.high))
    assert got.moved
    assert not stats.difference(a.tolist(), b.tolist()).moved  # pairing is what finds it


@pytest.mark.parametrize(("n_a", "n_b"), [(3, 3), (4, 4), (3, 5), (6, 6)])
def test_the_smallest_p_is_that_of_samples_that_do_not_overlap(n_a: int, n_b: int) -> None:
    a, b = range(n_a), range(100, 100 + n_b)
    oracle = scipy_stats.mannwhitneyu(list(a), list(b), method="exact").pvalue
    assert stats.smallest_p(n_a, n_b) == pytest.approx(oracle)


@pytest.mark.parametrize(("n", "p"), [(5, 0.0625), (6, 0.03125)])
def test_the_smallest_p_of_pairs(n: int, p: float) -> None:
    oracle = scipy_stats.permutation_test(
        (np.arange(1.0, n + 1), np.zeros(n)), lambda x, y: np.mean(x - y),
        permutation_type="samples",
    ).pvalue  # fmt: skip
    assert stats.smallest_paired_p(n) == pytest.approx(p) == pytest.approx(oracle)


def test_arms_that_cannot_become_significant_say_so() -> None:
    got = stats.difference([1.0, 1.1, 1.2], [9.0, 9.1, 9.2])
    assert got.smallest_p == pytest.approx(0.1)
    assert any("p = 0.1" in w and "4 per arm" in w for w in got.estimate.warnings)
    pairs = stats.paired_difference([(i, i + 5 + 0.1 * i) for i in range(5)])
    assert any("p = 0.0625" in w for w in pairs.estimate.warnings)


def test_arms_without_scatter_or_with_one_sample_get_no_interval() -> None:
    assert not stats.difference([1.0] * 5, [2.0] * 5).estimate.has_interval
    one = stats.difference([1.0], [2.0, 3.0, 4.0])
    assert one.p is None
    assert not one.moved
    assert one.estimate.value == pytest.approx(2.0)


def test_t_covers_what_it_promises_at_five_skewed_samples() -> None:
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(400):
        got = stats.mean((rng.gamma(4.0, 1.0, 5)).tolist())
        hits += not got.excludes(4.0)
    assert 0.88 <= hits / 400 <= 0.98
