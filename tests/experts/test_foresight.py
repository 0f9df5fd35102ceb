"""Foresight: what the layer in between adds is learnt, and only what is sure is named."""

from __future__ import annotations

import numpy as np

from slotwise.experts.foresight import LEAST_TOKENS, MEMORY_TOKENS, Foresight

LAYERS, EXPERTS, USED = 3, 32, 4


def tokens(n: int, *, noise: float, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """(scores, guesses) f32 [n, EXPERTS] that differ by one effect for all tokens, and noise."""
    rng = np.random.default_rng(seed)
    effect = np.random.default_rng(7).normal(0, 1.5, EXPERTS)
    guesses = rng.normal(0, 2, (n, EXPERTS))
    scores = guesses + effect + rng.normal(0, noise, (n, EXPERTS))
    return scores.astype(np.float32), guesses.astype(np.float32)


def chosen(scores: np.ndarray) -> set[int]:
    return set(np.argsort(-scores)[:USED].tolist())


def taught(noise: float, n: int = 200) -> Foresight:
    foresight = Foresight(LAYERS, EXPERTS, USED)
    foresight.learn(1, *tokens(n, noise=noise))
    return foresight


def test_nothing_is_named_before_some_tokens_were_seen() -> None:
    foresight = Foresight(LAYERS, EXPERTS, USED)
    scores, guesses = tokens(LEAST_TOKENS, noise=0.0)
    foresight.learn(1, scores[1:], guesses[1:])
    assert foresight.likely(1, guesses[0]) == []
    foresight.learn(1, scores[:1], guesses[:1])
    assert foresight.likely(1, guesses[0])
    assert foresight.likely(2, guesses[0]) == []


def test_without_noise_the_experts_are_those_chosen_the_likeliest_first() -> None:
    foresight = taught(0.0)
    for scores, guess in zip(*tokens(50, noise=0.0, seed=2), strict=True):
        named = foresight.likely(1, guess)
        assert named == np.argsort(-scores)[: len(named)].tolist()
        assert len(named) == USED


def test_with_noise_the_sure_ones_are_right_more_often_than_the_best_guesses() -> None:
    foresight = taught(0.85)
    right = named = plain = 0
    cases = list(zip(*tokens(400, noise=0.85, seed=3), strict=True))
    for scores, guess in cases:
        likely = foresight.likely(1, guess)
        named += len(likely)
        right += len(chosen(scores) & set(likely))
        plain += len(chosen(scores) & chosen(guess))
    assert named < USED * len(cases)
    assert right / named > plain / (USED * len(cases)) + 0.15


def test_a_window_teaches_what_its_tokens_one_by_one_would() -> None:
    scores, guesses = tokens(2 * MEMORY_TOKENS, noise=0.5)
    one_by_one, windows = (Foresight(LAYERS, EXPERTS, USED) for _ in range(2))
    for score, guess in zip(scores, guesses, strict=True):
        one_by_one.learn(1, score[None], guess[None])
        one_by_one.learn(2, score[None], guess[None])
        windows.learn_window(np.tile(score, (LAYERS, 1)), np.tile(guess, (LAYERS, 1)))
    for layer in (1, 2):
        for guess in guesses[:40]:
            assert one_by_one.likely(layer, guess) == windows.likely(layer, guess)
    assert windows.likely(0, guesses[0]) == []  # nothing is guessed for the first layer


def test_what_many_tokens_want_comes_first_and_what_none_wants_not_at_all() -> None:
    foresight = taught(0.0)
    scores, guesses = tokens(6, noise=0.0, seed=4)
    wanted = foresight.wanted(1, guesses).tolist()
    times = [sum(e in chosen(score) for score in scores) for e in wanted]
    assert set(wanted) == set().union(*(chosen(score) for score in scores))
    assert times == sorted(times, reverse=True)


def test_a_model_that_uses_all_its_experts_has_them_all_named() -> None:
    foresight = Foresight(2, 4, 4)
    foresight.learn(1, np.zeros((9, 4), np.float32), np.ones((9, 4), np.float32))
    assert foresight.likely(1, np.array([1, 4, 2, 3], np.float32)) == [1, 3, 2, 0]
