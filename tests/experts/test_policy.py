"""Heat: what a touch does to it, and who is coldest and hottest by it."""

from __future__ import annotations

import numpy as np
import pytest
from experts.fakes import ids, make_layout
from hypothesis import given
from hypothesis import strategies as st

from slotwise.errors import UsageError
from slotwise.experts.policy import POLICIES, DecayedLfu, Lru, TwoRates, make_policy

LAYOUT = make_layout(layers=2, experts=6, used=2)


def everyone() -> np.ndarray:
    return np.arange(LAYOUT.n_total)


def test_lfu_counts_uses_and_halves_them_after_the_half_life() -> None:
    policy = DecayedLfu(LAYOUT, half_life=4)
    policy.touch(0, ids(0, 1, 1, 2))
    assert policy.heat[0].tolist() == [1, 2, 1, 0, 0, 0]
    for _ in range(4):  # four windows of one token: top-2 of 6 experts each
        policy.touch(0, ids(4, 5))
    assert policy.heat[0, 1] == pytest.approx(1.0)


def test_lfu_takes_a_chunk_of_many_tokens_as_that_much_time() -> None:
    policy = DecayedLfu(LAYOUT, half_life=4)
    policy.touch(0, ids(0, 1))
    policy.touch(0, ids(2, 3), np.array([5, 3]))  # 8 uses at top-2 = 4 tokens
    assert policy.heat[0] == pytest.approx([0.5, 0.5, 5, 3, 0, 0])


def test_lru_ranks_by_the_touches_since_and_within_a_chunk_by_tokens() -> None:
    policy = Lru(LAYOUT)
    policy.touch(0, ids(0, 1, 2), np.array([1, 9, 4]))
    policy.touch(0, ids(3, 3))
    order = policy.hottest(np.arange(6), 6).tolist()
    assert order == [3, 1, 2, 0, 4, 5]


def test_two_rates_weigh_the_last_tokens_and_all_of_them() -> None:
    policy = TwoRates(LAYOUT)
    for _ in range(1000):
        policy.touch(0, ids(0, 1))
    assert policy.heat[0] == pytest.approx([1, 1, 0, 0, 0, 0], abs=0.01)
    for _ in range(8):  # the fast half-life
        policy.touch(0, ids(2, 3))
    slow = 0.5 ** (8 / 128)
    assert policy.heat[0, 0] == pytest.approx(0.3 * 0.5 + 0.7 * slow, abs=0.01)
    assert policy.heat[0, 2] == pytest.approx(0.3 * 0.5 + 0.7 * (1 - slow), abs=0.01)


def test_two_rates_take_a_chunk_as_its_tokens_one_by_one() -> None:
    chunk, windows = TwoRates(LAYOUT), TwoRates(LAYOUT)
    chunk.touch(0, ids(0, 1), np.array([20, 20]))
    for _ in range(20):
        windows.touch(0, ids(0, 1))
    np.testing.assert_allclose(chunk.heat, windows.heat)
    chunk.touch(0, ids(), np.array([], np.int32))
    np.testing.assert_allclose(chunk.heat, windows.heat)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("width", [1, 3])
def test_a_window_at_once_is_what_its_layers_are_one_by_one(name: str, width: int) -> None:
    at_once, by_layer = make_policy(name, LAYOUT), make_policy(name, LAYOUT)
    for seed in range(20):
        draw = np.random.default_rng(seed)
        routed = np.stack(
            [np.concatenate([draw.permutation(6)[:2] for _ in range(width)]) for _ in range(2)]
        ).astype(np.int32)
        at_once.touch_window(routed)
        for moe_index, experts in enumerate(routed):
            by_layer.touch(moe_index, experts)
    np.testing.assert_allclose(at_once.heat, by_layer.heat)
    assert at_once.heat.any()


@pytest.mark.parametrize("name", POLICIES)
def test_a_layer_is_not_older_because_another_was_read_since(name: str) -> None:
    policy = make_policy(name, LAYOUT)
    policy.touch(0, ids(0, 1))
    before = policy.heat[0].copy()
    policy.touch(1, ids(0, 1))
    assert policy.heat[0].tolist() == before.tolist()


@pytest.mark.parametrize("name", POLICIES)
def test_a_profile_ranks_the_experts_at_start_and_use_overrules_it(name: str) -> None:
    policy = make_policy(name, LAYOUT)
    policy.seed(np.array([[0, 7, 3, 0, 0, 1], [0, 0, 0, 0, 0, 0]]))
    assert policy.hottest(everyone(), 3).tolist() == [1, 2, 5]
    for _ in range(2000):
        policy.touch(0, ids(0, 4))
    assert set(policy.hottest(everyone(), 2).tolist()) == {0, 4}


def test_a_profile_of_zeros_leaves_no_nan() -> None:
    for name in POLICIES:
        policy = make_policy(name, LAYOUT)
        policy.seed(np.zeros((2, 6), np.int64))
        assert np.isfinite(policy.heat).all()


@given(st.lists(st.floats(0, 100), min_size=12, max_size=12), st.integers(0, 14))
def test_coldest_and_hottest_are_the_ends_of_the_sorted_heat(heat: list[float], n: int) -> None:
    policy = DecayedLfu(LAYOUT)
    policy.flat_heat[:] = heat
    ranked = sorted(heat)
    cold = policy.flat_heat[policy.coldest(everyone(), n)].tolist()
    hot = policy.flat_heat[policy.hottest(everyone(), n)].tolist()
    assert cold[:n] == ranked[:n]
    assert hot[:n] == ranked[::-1][:n]


def test_a_full_ranking_keeps_ties_in_the_order_given() -> None:
    policy = DecayedLfu(LAYOUT)
    order = np.array([5, 3, 1, 0])
    assert order[policy.hottest(order, 4)].tolist() == [5, 3, 1, 0]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="fifo") as caught:
        make_policy("fifo", LAYOUT)
    assert "lfu, lru, two-rate" in caught.value.next_step
