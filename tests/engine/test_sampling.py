"""Sampling: each filter's exact support, the distribution, repeatability and broken logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotwise.engine.sampling import Sampler, Sampling, candidates, largest
from slotwise.errors import SlotwiseError, UsageError

OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def logits_of(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities, np.float32))


def support(logits: np.ndarray, **filters: Any) -> list[int]:
    values: dict[str, Any] = OFF | {"temperature": 1.0} | filters
    sampling = Sampling(**values)
    return sorted(candidates(sampling, logits, float(logits.max())).tolist())


def drawn(logits: np.ndarray, sampling: Sampling, *, times: int) -> np.ndarray:
    sampler = Sampler(sampling)
    ids = [sampler.sample(logits) for _ in range(times)]
    return np.bincount(ids, minlength=logits.size)


FIVE = logits_of(0.1, 0.4, 0.05, 0.3, 0.15)


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_k": -1}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.0}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.84}, [1, 3, 4]),
        ({"top_p": 0.86}, [0, 1, 3, 4]),
        ({"top_p": 0.99}, [0, 1, 2, 3, 4]),
        ({"min_p": 0.2}, [0, 1, 3, 4]),
        ({"min_p": 0.74}, [1, 3]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 2, "top_p": 0.56}, [1]),  # of the two: 0.57 and 0.43
        ({"top_k": 2, "top_p": 0.58}, [1, 3]),
        ({"top_p": 0.84, "min_p": 0.5}, [1, 3]),
        ({"top_k": 4, "min_p": 0.3}, [1, 3, 4]),
    ],
)
def test_each_filter_keeps_exactly_these(filters: dict[str, Any], kept: list[int]) -> None:
    assert support(FIVE, **filters) == kept
    counts = drawn(FIVE, Sampling(seed=5, temperature=1.0, **(OFF | filters)), times=500)
    assert np.flatnonzero(counts).tolist() == kept


def test_filters_look_at_the_probabilities_before_the_temperature() -> None:
    for temperature in (0.1, 1.0, 50.0):
        assert support(FIVE, top_p=0.41, temperature=temperature) == [1, 3]
        assert support(FIVE, min_p=0.74, temperature=temperature) == [1, 3]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    counts = drawn(FIVE, Sampling(seed=3, temperature=temperature, **OFF), times=20_000)
    expected = np.exp(FIVE.astype(np.float64) / temperature)
    expected *= counts.sum() / expected.sum()
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 18.47  # 4 degrees of freedom: one sound sampler in 1,000 exceeds it


def test_filtered_draws_follow_the_renormalised_distribution() -> None:
    counts = drawn(FIVE, Sampling(seed=4, temperature=1.0, **(OFF | {"top_k": 3})), times=20_000)
    expected = np.array([0.4, 0.3, 0.15]) / 0.85 * 20_000
    chi_square = ((counts[[1, 3, 4]] - expected) ** 2 / expected).sum()
    assert chi_square < 13.82  # 2 degrees of freedom, 1 in 1,000


def test_a_seed_repeats_and_another_differs() -> None:
    logits = np.random.default_rng(0).normal(size=300).astype(np.float32)

    def stream(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(seed=seed, temperature=2.0, **OFF))
        return [sampler.sample(logits) for _ in range(40)]

    assert stream(7) == stream(7)
    assert stream(7) != stream(8)
    assert stream(None) != stream(None)


def test_logits_are_not_changed() -> None:
    logits = FIVE.copy()
    logits.flags.writeable = False
    Sampler(Sampling(seed=1)).sample(logits)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=-1)])
def test_greedy_takes_the_lowest_id_of_equals(sampling: Sampling) -> None:
    logits = np.array([0, 3, 1, 3, 3], np.float32)
    assert [Sampler(sampling).sample(logits) for _ in range(5)] == [1] * 5


def test_a_very_low_temperature_is_greedy_without_a_warning() -> None:
    for temperature in (1e-3, 1e-300, 5e-324):
        assert Sampler(Sampling(temperature=temperature, **OFF)).sample(FIVE) == 1


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.full(500, -np.inf, np.float32)
    logits[[13, 400]] = 1.0
    for filters in ({}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}):
        counts = drawn(logits, Sampling(seed=2, **(OFF | filters)), times=200)
        assert set(np.flatnonzero(counts)) == {13, 400}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error(bad: float, temperature: float) -> None:
    logits = FIVE.copy()
    logits[3] = bad
    with pytest.raises(SlotwiseError, match="logits are broken"):
        Sampler(Sampling(temperature=temperature)).sample(logits)
    with pytest.raises(SlotwiseError, match="logits are broken"):
        Sampler(Sampling(temperature=temperature)).sample(np.full(4, -np.inf, np.float32))


def test_logits_must_be_one_row() -> None:
    for shape in ((0,), (1, 5)):
        with pytest.raises(UsageError, match="one row"):
            Sampler(Sampling()).sample(np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("min_p", math.nan),
        ("min_p", 2.0),
        ("seed", -1),
    ],
)
def test_senseless_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        Sampling(**{name: value})


sizes = st.integers(1, 700) | st.sampled_from([4096, 4097, 49152])


@given(sizes, st.integers(0, 2**32 - 1), st.integers(1, 5000), st.booleans())
@settings(deadline=None, max_examples=150)
def test_the_largest_are_those_of_a_full_sort(size: int, seed: int, k: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=size).astype(np.float32)
    if ties:
        logits = np.round(logits)
    wanted = sorted(range(size), key=lambda i: (-logits[i], i))[:k]
    assert largest(logits, k).tolist() == wanted


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_a_nucleus_in_a_large_vocabulary_is_that_of_a_full_sort(spread: float) -> None:
    logits = (np.random.default_rng(1).normal(size=9000) * spread).astype(np.float32)
    order = np.argsort(-logits, kind="stable")
    heap = np.exp(logits[order].astype(np.float64) - logits.max()).cumsum()
    for p in (0.1, 0.5, 0.95):
        size = int((heap < p * heap[-1]).sum()) + 1
        kept = support(logits, top_p=p)
        # The whole is summed in another order, so the last one in may differ by one place.
        assert abs(len(kept) - size) <= 1
        assert kept == sorted(order[: len(kept)].tolist())
