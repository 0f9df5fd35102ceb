"""Predictions with a phase off the path, their bounds, and predicted against measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from explain import made
from scipy import stats as scipy_stats

from slotwise.explain.levers import LeverReport, predict_levers
from slotwise.explain.record import Phase, Reading, Request, Value


def arm(**more: float | int) -> Reading:
    return made.reading(made.life(made.ladder(**more)))


def one(report: LeverReport, key: str, size: int = 0):
    return [p for p in report.predictions if p.lever.key == key][size]


def test_deferring_the_refill_saves_the_refill() -> None:
    p = one(predict_levers(arm()), "deferred-refill", 2)
    assert p.saved is not None
    assert p.saved.value == pytest.approx(208, abs=0.2)
    assert p.predicted.value == pytest.approx(p.now.value - p.saved.value)
    assert p.predicted.has_interval
    assert "nothing before the first token waits" in p.lever.assumption
    assert any("prompt clock" in w for w in p.warnings)


def test_the_interval_is_that_of_the_difference_per_request() -> None:
    """Slow requests with slow refills: the scatter cancels, and the interval knows."""
    requests = [
        made.slot_request(i, read=100, read_ms=200.0, refill_ms=50.0 + 20 * (i % 3), slots=9,
                          rest=5.0 + 0.1 * i)
        for i in range(7)
    ]  # fmt: skip
    p = one(predict_levers(made.reading(made.life(requests))), "deferred-refill")
    assert p.predicted.low is not None
    assert p.predicted.high is not None
    assert p.now.low is not None
    assert p.now.high is not None
    assert p.predicted.high - p.predicted.low < 0.1 * (p.now.high - p.now.low)


def test_what_is_not_timed_is_bounded_by_the_rest() -> None:
    p = one(predict_levers(arm()), "no-checkpoint")
    assert p.saved is None
    assert p.predicted.low == pytest.approx(p.now.value - 56, abs=0.5)
    assert p.predicted.high == pytest.approx(p.now.value)
    assert "bounds" in p.predicted.method
    assert any("only bounds" in w for w in p.warnings)


def test_an_old_log_without_refill_times_gets_bounds() -> None:
    def old(r: Request) -> Request:
        refill = Phase("refill", Value.bounded(0.0, 120.0, "not timed by this version"), slots=200)
        return replace(r, phases=(r.phases[0], refill))

    reading = made.reading(made.life([old(r) for r in made.ladder()]))
    p = one(predict_levers(reading), "deferred-refill")
    assert p.saved is None
    assert p.predicted.low == pytest.approx(240, abs=1)
    assert p.predicted.high == pytest.approx(p.now.value)


def test_a_lever_without_its_phase_is_not_predicted_and_says_why() -> None:
    report = predict_levers(arm(), off=("no such phase",))
    reasons = dict(report.not_predicted)
    assert "no request was read in more than one batched part" in reasons.values()
    assert "there are: read (batched), refill" in reasons["without no such phase"]


def test_any_phase_can_be_taken_off() -> None:
    p = one(predict_levers(arm(), off=("read (batched)",)), "off:read (batched)")
    assert p.predicted.value == pytest.approx(64 + 56, abs=1)


def test_the_arm_with_the_lever_on_is_set_against_the_prediction() -> None:
    with_lever = arm(refill=0.0, noise=1.1)
    for p in predict_levers(
        arm(), with_lever=with_lever, lever_key="deferred-refill", arm="deferred.log"
    ).predictions:
        assert p.holds is True
        assert p.measured is not None
        assert p.expected is not None
        assert p.expected[0] < p.predicted.value < p.expected[1]
        assert not any("not fully on" in w for w in p.warnings)


def test_the_expected_interval_has_the_noise_of_both_arms() -> None:
    reading, with_lever = arm(), arm(refill=0.0)
    p = predict_levers(reading, with_lever=with_lever, lever_key="deferred-refill").predictions[0]
    chosen = [r for r in reading.lives[0].requests if r.prompt.value == 201][1:]
    left = [(r.prompt_ms.value or 0) - (r.phases[1].ms.value or 0) for r in chosen]
    sd = float(scipy_stats.tstd(left))
    half = scipy_stats.t.ppf(0.975, 4) * sd * (1 / 5 + 1 / 5) ** 0.5
    middle = sum(left) / 5
    assert p.expected == pytest.approx((middle - half, middle + half))


def test_a_miss_is_a_miss() -> None:
    slower = arm(refill=0.0, rest=90.0)
    report = predict_levers(arm(), with_lever=slower, lever_key="deferred-refill")
    assert [p.holds for p in report.predictions] == [False, False, False]


def test_a_lever_that_was_not_on_is_noticed() -> None:
    report = predict_levers(arm(), with_lever=arm(refill=0.3), lever_key="deferred-refill")
    assert any("not fully on" in w for w in report.predictions[0].warnings)


def test_two_samples_predict_without_an_interval() -> None:
    report = predict_levers(arm(repeats=2), with_lever=arm(refill=0.0), lever_key="deferred-refill")
    assert {p.holds for p in report.predictions} == {None}
    assert all("too few samples" in p.warnings[-1] for p in report.predictions)


def test_joining_parts_saves_the_fixed_cost_of_each_further_one() -> None:
    def in_two(r: Request) -> Request:
        summed = replace(r.phases[0], ms=Value.measured(340.0))
        facts = {"batched parts": Value.measured(2)}
        clock = Value.measured((r.prompt_ms.value or 0) + 100)
        return replace(r, phases=(summed, *r.phases[1:]), facts=facts, prompt_ms=clock)

    requests = made.ladder()
    parted = [in_two(r) if (r.prompt.value or 0) < 300 and r.index > 8 else r for r in requests]
    p = one(predict_levers(made.reading(made.life(parted))), "one-part")
    assert p.saved is None  # an interval of the fit, not a time that was measured
    assert p.predicted.low is not None
    assert p.predicted.high is not None
    saved = (p.now.value - p.predicted.high, p.now.value - p.predicted.low)
    assert saved[0] < 100 < saved[1]
    assert any("only 3 of 5 requests" in w for w in p.warnings)
