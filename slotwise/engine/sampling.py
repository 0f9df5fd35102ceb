"""Chooses the next token from one row of logits. Knows nothing of text or of what came before.

The filters come in the order of llama.cpp's default chain (src/llama-sampler.cpp, common/common.h):
top-k, top-p, min-p, then temperature, so the first three look at the model's own probabilities.
The defaults are llama.cpp's too. There are no penalties and no grammar here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.random import PCG64, Generator

from slotwise.errors import SlotwiseError, UsageError

_ROWS = 64
_FIRST_NUCLEUS = 256


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. UsageError on values that make no sense."""

    temperature: float = 0.8
    """0 or less takes the most probable token (the lowest id of equals) and ignores the rest."""
    top_k: int = 40
    """Keep this many of the most probable tokens; 0 or less: all."""
    top_p: float = 0.95
    """Keep the most probable tokens until they have this probability together; 1: all."""
    min_p: float = 0.05
    """Keep tokens with at least this part of the best one's probability; 0: all."""
    seed: int | None = None
    """Makes the choices repeatable; None: different every time."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.temperature):
            raise UsageError(f"temperature is {self.temperature}; expected a finite number")
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p)):
            if not 0 <= value <= 1:
                raise UsageError(f"{name} is {value}; expected a number from 0 to 1")
        if self.seed is not None and self.seed < 0:
            raise UsageError(
                f"seed is {self.seed}; expected 0 or more",
                next_step="Leave it out for different answers every time.",
            )

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0


class Sampler:
    """One answer's stream of choices: for a seed, the same logits give the same tokens."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling

    @cached_property
    def _random(self) -> Generator:
        """Made when it is first needed, inside the phase that is named for it."""
        return Generator(PCG64(self.sampling.seed))

    def sample(self, logits: np.ndarray) -> int:
        """A token id for `logits`, float [n_vocab], which stay as they are.

        SlotwiseError if the largest is not a finite number (one NaN is enough for that).
        """
        if logits.ndim != 1 or not logits.size:
            raise UsageError(f"logits have the shape {logits.shape}; expected one row of numbers")
        best = int(logits.argmax())
        top = float(logits[best])
        if not math.isfinite(top):
            raise SlotwiseError(
                f"the model's logits are broken: the largest of {logits.size:,} is {top}",
                next_step="Run `slotwise check` on the model; report it if the file is sound.",
            )
        if self.sampling.greedy or self.sampling.top_k == 1:
            return best
        ids = candidates(self.sampling, logits, top)
        # Very low temperatures overflow to -inf, whose weight is rightly 0.
        with np.errstate(over="ignore"):
            weights = np.exp((logits[ids].astype(np.float64) - top) / self.sampling.temperature)
        heap = weights.cumsum()
        mark = self._random.random() * heap[-1]
        return int(ids[np.searchsorted(heap[:-1], mark, side="right")])


def candidates(sampling: Sampling, logits: np.ndarray, top: float) -> np.ndarray:
    """The ids that pass top-k, top-p and min-p, int [n >= 1]; `top` is the largest logit."""
    ids = None
    if 0 < sampling.top_k < logits.size:
        ids = largest(logits, sampling.top_k)
    if sampling.top_p < 1:
        ids = _nucleus(logits, ids, sampling.top_p, top)
    if ids is None:
        ids = np.arange(logits.size)
    if sampling.min_p > 0:
        ids = ids[logits[ids] >= top + math.log(sampling.min_p)]
    return ids


def largest(logits: np.ndarray, k: int) -> np.ndarray:
    """The ids of the `k` largest, in falling order, the lower id first of equals."""
    width = logits.size // _ROWS
    found = np.arange(logits.size)
    if k <= width:
        # The k-th largest of many maxima is a bound that at least k numbers reach, and that few
        # others do: much cheaper than to partition them all.
        maxima = logits[: width * _ROWS].reshape(_ROWS, width).max(axis=0)
        found = np.flatnonzero(logits >= np.partition(maxima, width - k)[width - k])
    elif k < logits.size:
        bound = np.partition(logits, logits.size - k)[logits.size - k]
        found = np.flatnonzero(logits >= bound)
    return found[np.argsort(-logits[found], kind="stable")[:k]]


def _nucleus(logits: np.ndarray, ids: np.ndarray | None, p: float, top: float) -> np.ndarray:
    """The most probable of `ids` (in falling order; None: all) that have `p` of the whole."""
    if ids is not None:
        heap = np.exp(logits[ids].astype(np.float64) - top).cumsum()
        return ids[: int(np.searchsorted(heap, p * heap[-1])) + 1]
    goal = p * np.exp(logits - top).sum(dtype=np.float64)
    k = _FIRST_NUCLEUS
    while True:
        ids = largest(logits, k)
        heap = np.exp(logits[ids].astype(np.float64) - top).cumsum()
        if heap[-1] >= goal or k >= logits.size:
            return ids[: int(np.searchsorted(heap, goal)) + 1]
        k *= 16
