"""Fits against scipy, closed forms and the textbook; refusals; the table this kit started from."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from explain import made
from scipy import stats as scipy_stats

from slotwise.explain import fit, summary
from slotwise.explain.summary import summarise

RNG = np.random.default_rng(11)
X = [float(v) for v in (100, 100, 400, 400, 900, 900, 1600, 1600)]
Y = [100 + 0.7 * x + e for x, e in zip(X, RNG.normal(0, 3, len(X)), strict=True)]


def line(x: list[float] = X, y: list[float] = Y) -> fit.Fit:
    return fit.straight_line(x, y, name="read", per="token")


def test_a_line_is_scipy_s_line() -> None:
    oracle: Any = scipy_stats.linregress(X, Y)
    got = line()
    assert got.term("fixed").value == pytest.approx(oracle.intercept)
    assert got.term("per token").value == pytest.approx(oracle.slope)
    assert [p.residual for p in got.points] == pytest.approx(
        [y - oracle.intercept - oracle.slope * x for x, y in zip(X, Y, strict=True)]
    )


def test_hc3_is_its_formula() -> None:
    design = np.column_stack([np.ones(len(X)), X])
    hat = design @ np.linalg.inv(design.T @ design) @ design.T
    residuals = np.asarray(Y) - hat @ Y
    bread = np.linalg.inv(design.T @ design)
    meat = design.T @ np.diag((residuals / (1 - np.diag(hat))) ** 2) @ design
    assert np.asarray(line().covariance) == pytest.approx(bread @ meat @ bread, rel=1e-6)
    half = scipy_stats.t.ppf(0.975, len(X) - 2) * math.sqrt((bread @ meat @ bread)[1, 1])
    slope = line().term("per token")
    assert slope.high is not None
    assert slope.high - slope.value == pytest.approx(half)


def test_hc3_is_that_of_statsmodels() -> None:
    import statsmodels.api as sm

    oracle = sm.OLS(Y, sm.add_constant(X)).fit(cov_type="HC3")
    assert np.asarray(line().covariance) == pytest.approx(oracle.cov_params())


def test_unequal_scatter_widens_the_interval() -> None:
    x = np.repeat([100.0, 500.0, 900.0, 2000.0], 8)
    y = 100 + 0.7 * x + RNG.normal(0, 1, len(x)) * (1 + (x > 1000) * 60)
    slope = line(x.tolist(), y.tolist()).term("per token")
    oracle: Any = scipy_stats.linregress(x, y)
    assert slope.high is not None
    assert slope.high - slope.value > 1.3 * scipy_stats.t.ppf(0.975, 30) * oracle.stderr


def test_lack_of_fit_is_the_f_test_of_the_textbook() -> None:
    x, y = [1.0, 1, 2, 2, 3, 3, 4, 4], [1.0, 1.2, 4, 4.1, 9, 9.3, 16, 16.2]
    oracle: Any = scipy_stats.linregress(x, y)
    fitted = [oracle.intercept + oracle.slope * v for v in x]
    whole = sum((a - b) ** 2 for a, b in zip(y, fitted, strict=True))
    pure = sum(((a - b) ** 2) / 2 for a, b in zip(y[::2], y[1::2], strict=True))
    got = fit.lack_of_fit(x, y)
    assert got is not None
    assert got.f == pytest.approx((whole - pure) / 2 / (pure / 4))
    assert got.rejects
    assert any("does not hold" in w for w in line(x, y).warnings)


def test_a_straight_line_passes_its_test_and_needs_three_repeated_sizes() -> None:
    got = line().lack_of_fit
    assert got is not None
    assert not got.rejects
    assert fit.lack_of_fit(X[:4], Y[:4]) is None
    assert fit.lack_of_fit([1.0, 2.0, 3.0], [1.0, 2.0, 3.5]) is None
    assert any("two sizes" in w for w in line(X[:4], Y[:4]).warnings)


def test_sizes_that_differ_a_little_are_repeats() -> None:
    x = [160.0, 162, 165, 800, 805, 810, 3130, 3135, 3140]
    noise = [0.3, -0.4, 0.2, -0.3, 0.5, -0.2, 0.1, -0.3, 0.2]
    y = [100 + 0.7 * v + e for v, e in zip(x, noise, strict=True)]
    assert fit.repeated_sizes(x) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    got = fit.lack_of_fit(x, y)
    assert got is not None
    assert not got.rejects


def test_the_lack_of_fit_test_is_wrong_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    x = [160.0, 162, 165, 800, 805, 810, 3130, 3135, 3140]
    rejected = 0
    for _ in range(300):
        y = [100 + 0.7 * v + e for v, e in zip(x, rng.normal(0, 0.5, 9), strict=True)]
        got = fit.lack_of_fit(x, y)
        rejected += got is not None and got.rejects
    assert 0.02 <= rejected / 300 <= 0.09


def test_too_few_samples_get_no_interval() -> None:
    got = line(X[::3], Y[::3])
    assert got.covariance is None
    assert not any(t.has_interval for t in got.terms)
    assert any("n = 3 is too small" in w for w in got.warnings)


def test_a_fit_that_one_sample_decides_gets_no_interval() -> None:
    got = line([1.0, 1.0, 1.0, 1.0, 9.0], [1.0, 1.1, 0.9, 1.0, 5.0])
    assert got.covariance is None
    assert any("one sample alone" in w for w in got.warnings)


def test_samples_that_cannot_tell_the_terms_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot tell 2 terms apart"):
        line([5.0, 5.0, 5.0], [1.0, 2.0, 3.0])


def test_drift_is_seen_when_sizes_are_mixed_and_not_claimed_when_they_are_in_order() -> None:
    mixed = [100.0, 900, 400, 1600] * 4
    noise = RNG.normal(0, 1, 16)
    y = [100 + 0.7 * x + 8 * i + e for i, (x, e) in enumerate(zip(mixed, noise, strict=True))]
    got = line(mixed, y)
    assert got.drift is not None
    assert got.drift.value == pytest.approx(8, abs=0.5)
    assert any("drifts" in w for w in got.warnings)
    assert any("drift and size cannot" in w for w in line(sorted(X), Y).warnings)
    steady = line(mixed, [100 + 0.7 * x + e for x, e in zip(mixed, noise, strict=True)])
    assert not any("drifts" in w for w in steady.warnings)


def test_slots_that_grow_with_tokens_are_not_split() -> None:
    tokens = [100.0, 400, 900, 1600, 2500, 4000]
    slots = [t / 4 + 150 + (i % 2) for i, t in enumerate(tokens)]
    y = [100 + 0.7 * t + 0.32 * s for t, s in zip(tokens, slots, strict=True)]
    got = fit.two_costs(tokens, slots, y, name="clock", per=("token", "slot"))
    assert got.terms == ()
    assert got.inflation is not None
    assert got.inflation > 100
    assert "Crossing them would" in got.refused
    assert got.refused in got.warnings


def test_crossed_arms_separate_the_costs() -> None:
    tokens = [t for t in (100.0, 400, 900, 1600) for _ in range(3)]
    slots = [200.0, 400, 600] * 4
    y = [100 + 0.7 * t + 0.32 * s for t, s in zip(tokens, slots, strict=True)]
    noisy = [v + e for v, e in zip(y, RNG.normal(0, 1, 12), strict=True)]
    got = fit.two_costs(tokens, slots, noisy, name="clock", per=("token", "slot"))
    assert got.refused == ""
    assert got.inflation == pytest.approx(1.0)
    assert got.condition == pytest.approx(1.0)
    assert got.term("per slot").value == pytest.approx(0.32, abs=0.01)
    assert not got.term("per slot").excludes(0.32)


def test_inflation_and_condition_are_their_closed_forms() -> None:
    a, b = RNG.normal(0, 1, 30), RNG.normal(0, 1, 30)
    b = b + a
    r = float(np.corrcoef(a, b)[0, 1])
    columns = [a.tolist(), b.tolist()]
    assert fit.inflation(columns) == pytest.approx(1 / (1 - r * r))
    assert fit.condition_number(columns) == pytest.approx(math.sqrt((1 + r) / (1 - r)))
    assert fit.inflation([a.tolist(), (2 * a).tolist()]) == math.inf


def test_a_change_has_the_covariance_of_the_difference_and_the_noise() -> None:
    got = line()
    assert got.covariance is not None
    assert got.residual_sd is not None
    value, error = got.change((0.0, -500.0)) or (0.0, 0.0)
    assert value == pytest.approx(-500 * got.term("per token").value)
    variance = 500**2 * got.covariance[1][1]
    assert error == pytest.approx(math.sqrt(variance + got.residual_sd**2))
    assert got.change((0.0, -500.0), noise=False) == pytest.approx((value, math.sqrt(variance)))


def test_a_constant_rate_holds_or_does_not() -> None:
    slots = [200.0, 200, 400, 400, 800, 800]
    noise = [0.1, -0.2, 0.2, -0.1, 0.15, -0.15]
    constant = [0.32 * s + e for s, e in zip(slots, noise, strict=True)]
    good = fit.constant_rate(slots, constant, name="refill", per="slot")
    assert good.holds is True
    assert good.rate.term("per slot").value == pytest.approx(0.32, abs=1e-3)
    bad = fit.constant_rate(slots, [v + 40 for v in constant], name="refill", per="slot")
    assert bad.holds is False
    assert "does not hold" in bad.words
    tiny = fit.constant_rate(slots, [v + 0.75 for v in constant], name="refill", per="slot")
    assert tiny.with_intercept is not None
    assert tiny.with_intercept.term("fixed").excludes(0.0)
    assert tiny.holds is True
    assert "practical" in tiny.words
    few = fit.constant_rate(slots[::2], constant[::2], name="refill", per="slot")
    assert few.holds is None
    one = fit.constant_rate([5.0] * 6, constant, name="refill", per="slot")
    assert one.holds is None
    assert "same number" in one.words


def test_a_floor_is_found_and_a_line_is_not_taken_for_one() -> None:
    x = [20.0, 20, 60, 60, 400, 400, 900, 900, 1600, 1600]
    y = [max(150.0, 50 + 0.5 * v) + e for v, e in zip(x, RNG.normal(0, 1, 10), strict=True)]
    got = fit.floor_then_line(x, y, name="read", per="token")
    assert got is not None
    assert got.floor.value == pytest.approx(150, abs=2)
    assert got.knee == pytest.approx(200, abs=10)
    assert not got.saturated
    assert sum(p.residual**2 for p in line(x, y).points) > got.squares


def test_the_table_of_the_refill_study_comes_back() -> None:
    """0.319 ms a slot; 109 ms + 0.706 ms/token from its upper sizes; 56 ms, a subtraction."""
    said = summarise(made.table_of_document_two())
    assert said.refill is not None
    assert said.refill.rate.terms[0].value == pytest.approx(0.319, abs=5e-4)
    assert (said.refill.lowest, said.refill.highest) == pytest.approx((0.3187, 0.3195), abs=1e-4)
    assert said.read.line is not None
    assert said.read.floor is not None
    fixed, slope = (t.value for t in said.read.floor.line.terms)
    assert int(fixed) == 109
    assert round(slope, 3) == 0.706
    assert said.read.floor.saturated
    rests = [row for g in said.groups for row in g.rows if row.lane == "remainder"]
    assert [(row.median, row.how) for row in rests] == [(pytest.approx(56.0), "derived")] * 3


def test_first_requests_are_apart_and_unfinished_ones_left_out() -> None:
    requests = made.ladder(repeats=6)
    requests.append(made.request(18, prompt=201, phases=[], status="cancelled"))
    said = summarise(made.life(requests))
    assert [g.cold for g in said.groups] == [(0,), (1,), (2,)]
    assert [len(g.used) for g in said.groups] == [5, 5, 5]
    assert [i for i, _ in said.left_out] == [0, 1, 2, 18]
    assert "cancelled" in said.left_out[-1][1]


def test_new_and_reused_prompts_of_one_size_are_two_groups() -> None:
    new = [made.slot_request(i, read=165, read_ms=600, refill_ms=99, slots=311, rest=40)
           for i in range(3)]  # fmt: skip
    hits = [
        made.request(3 + i, prompt=166, reused=161, prompt_ms=62,
                     phases=[made.measured("read (windows)", 42, tokens=4)])
        for i in range(3)
    ]  # fmt: skip
    said = summarise(made.life([*new, *hits]))
    assert [g.label for g in said.groups] == [
        "prompt 166 tokens, new", "prompt 166 tokens, 161 reused",
    ]  # fmt: skip


def test_what_was_reused_is_not_guessed_and_read_tokens_stand_for_an_unknown_prompt() -> None:
    phases = [made.measured("prompt eval", 800.0)]
    unsaid = [made.request(i, prompt=157, phases=phases, reused=0) for i in range(3)]
    said = summarise(made.life([replace(r, reused=made.MISSING) for r in unsaid]))
    assert [g.label for g in said.groups] == ["prompt 157 tokens, reuse not said"]
    unknown = [replace(r, prompt=made.MISSING, reused=made.MISSING) for r in unsaid]
    said = summarise(made.life(unknown))
    assert [g.label for g in said.groups] == ["read 157 tokens, reuse not said"]


def test_slots_that_never_change_are_not_said_to_grow() -> None:
    got = fit.two_costs(X, [311.0] * len(X), Y, name="clock", per=("token", "slot"))
    assert "slots are the same in every sample" in got.refused


def test_a_very_long_log_is_fitted_on_a_random_part_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(summary, "MOST_SAMPLES", 100)
    requests = made.ladder(repeats=100)  # three sizes in turn: every 3rd would be one size
    said = summarise(made.life(requests))
    assert said.read.line is not None
    assert said.read.line.n == 100
    assert said.read.line.term("per token").value == pytest.approx(0.7, abs=1e-3)
    assert any("drawn at random" in w for w in said.read.line.warnings)
