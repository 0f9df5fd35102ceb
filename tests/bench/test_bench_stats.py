"""Statistics of the benchmarks, against values worked out by hand or from tables."""

from __future__ import annotations

import math

import pytest

from slotwise.bench.stats import alternating, estimate, quantiles, ratio


def test_estimate_gives_the_median_and_students_interval() -> None:
    # mean 3, standard deviation sqrt(2.5), t(0.975, 4) = 2.7764 in any table
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0])
    margin = 2.7764 * math.sqrt(2.5 / 5)
    assert found.n == 5
    assert found.median == 3.0
    assert found.low == pytest.approx(3 - margin, abs=1e-3)
    assert found.high == pytest.approx(3 + margin, abs=1e-3)


def test_estimate_takes_the_median_not_the_mean() -> None:
    assert estimate([1.0, 1.0, 100.0]).median == 1.0


def test_one_sample_has_no_interval() -> None:
    found = estimate([7.0])
    assert (found.n, found.median, found.low, found.high) == (1, 7.0, None, None)


def test_no_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        estimate([])


def test_ratio_pairs_neighbours_before_it_takes_the_median() -> None:
    # The machine got twice as slow half way: no ratio of medians would be 2.
    found = ratio([2.0, 2.0, 4.0, 4.0, 4.0], [1.0, 1.0, 2.0, 2.0, 2.0])
    assert found.median == 2.0
    assert found.low == pytest.approx(2.0)
    assert found.high == pytest.approx(2.0)


def test_the_inverse_ratio_has_the_inverse_interval() -> None:
    mine, other = [1.0, 2.0, 3.0, 5.0], [2.0, 2.5, 2.0, 6.0]
    there, back = ratio(mine, other), ratio(other, mine)
    assert there.low is not None
    assert there.high is not None
    assert back.high == pytest.approx(1 / there.low)
    assert back.low == pytest.approx(1 / there.high)


@pytest.mark.parametrize(("mine", "other"), [([1.0], [0.0]), ([0.0], [1.0]), ([1.0, 2.0], [1.0])])
def test_ratio_refuses_what_has_none(mine: list[float], other: list[float]) -> None:
    with pytest.raises(ValueError):
        ratio(mine, other)


def test_alternating_is_abba() -> None:
    assert "".join(alternating(4)) == "ABBAABBA"


def test_alternating_turns_three_arms_round() -> None:
    assert "".join(alternating(2, "ABC")) == "ABCCBA"


def test_every_arm_comes_as_often() -> None:
    order = alternating(7, ("x", "y", "z"))
    assert [order.count(arm) for arm in "xyz"] == [7, 7, 7]


def test_quantiles_are_real_samples() -> None:
    assert quantiles([5.0, 1.0, 3.0, 2.0, 4.0], (0, 0.5, 0.9, 1)) == [1.0, 3.0, 5.0, 5.0]
