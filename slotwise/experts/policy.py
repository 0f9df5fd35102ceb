"""Who stays in the pool: one heat per expert, hotter stays.

A policy decides what is *resident*, never what is computed. All policies keep the same thing, a
float64 array `heat` [n_moe_layers, n_experts], and differ only in what a touch does to it. A touch
ages one layer's row by that layer's own clock: a layer that this pass has not reached yet is not
older than one that it has just read, so a long prompt does not push one layer out for the next.

`TwoRates` is the default: docs/performance.md has all of them replayed on recorded routing against
the best possible. Does not know slots, pins or I/O (see pool.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from slotwise.errors import UsageError
from slotwise.weights.layout import ExpertLayout

HALF_LIFE_TOKENS = 128.0
"""Tokens after which an expert's past counts half in `DecayedLfu`."""

FAST_TOKENS, SLOW_TOKENS, FAST_SHARE = 8.0, 128.0, 0.3
"""The half-lives of `TwoRates`, and how much of its heat is the fast one."""


class Policy(ABC):
    """Heat of every expert. Only the engine's thread touches it; others may read it."""

    name: ClassVar[str]

    def __init__(self, layout: ExpertLayout) -> None:
        self.n_used = layout.n_used
        self.heat = np.zeros((layout.n_moe_layers, layout.n_experts))
        self.flat_heat = self.heat.reshape(-1)
        """The same numbers by flat id, moe_index * n_experts + expert."""

    @abstractmethod
    def touch(
        self, moe_index: int, experts: NDArray[np.int32], counts: NDArray[np.integer] | None = None
    ) -> None:
        """The router chose `experts` of one layer.

        Without `counts` each entry is one use and an expert may repeat (a decode window). With
        `counts` (tokens per expert, a prompt chunk) the experts are distinct.
        """

    def touch_window(self, routed: Sequence[NDArray[np.int32]] | NDArray[np.int32]) -> None:
        """One decode window: row i of `routed` is what layer i chose, from the first layer on."""
        for moe_index, experts in enumerate(routed):
            self.touch(moe_index, experts)

    @abstractmethod
    def seed(self, counts: NDArray[np.int64]) -> None:
        """Start from a profile's counts [n_moe_layers, n_experts] instead of from nothing."""

    def coldest(self, ids: NDArray[np.integer], n: int) -> NDArray[np.intp]:
        """Positions in `ids` (flat) of the `n` coldest, coldest first."""
        heat = self.flat_heat.take(ids)
        if n >= len(ids):
            return np.argsort(heat, kind="stable")
        few = np.argpartition(heat, n)[:n]
        return few[np.argsort(heat[few], kind="stable")]

    def hottest(self, ids: NDArray[np.integer], n: int) -> NDArray[np.intp]:
        """Positions in `ids` (flat) of the `n` hottest, hottest first; all of them keep ties in
        the order given."""
        cold = -self.flat_heat.take(ids)
        if n >= len(ids):
            return np.argsort(cold, kind="stable")
        few = np.argpartition(cold, n)[:n]
        return few[np.argsort(cold[few], kind="stable")]


class Lru(Policy):
    """Heat = minus the number of touches of the layer since the expert was last chosen; within
    one prompt chunk, the experts with more tokens count as the more recent."""

    name = "lru"

    def touch(
        self, moe_index: int, experts: NDArray[np.int32], counts: NDArray[np.integer] | None = None
    ) -> None:
        row = self.heat[moe_index]
        row -= 1.0
        row[experts] = 0.0 if counts is None else counts / (counts.max(initial=0) + 1.0)

    def seed(self, counts: NDArray[np.int64]) -> None:
        self.heat[:] = counts / (counts.max(initial=0) + 1.0) - 1.0


class DecayedLfu(Policy):
    """Heat = uses, each worth half as much after every `half_life` tokens."""

    name = "lfu"

    def __init__(self, layout: ExpertLayout, *, half_life: float = HALF_LIFE_TOKENS) -> None:
        super().__init__(layout)
        self.decay = 0.5 ** (1.0 / half_life)

    def touch(
        self, moe_index: int, experts: NDArray[np.int32], counts: NDArray[np.integer] | None = None
    ) -> None:
        row = self.heat[moe_index]
        uses = len(experts) if counts is None else int(counts.sum())
        row *= self.decay ** (uses / self.n_used)
        if counts is None:
            np.add.at(row, experts, 1.0)
        else:
            row[experts] += counts

    def seed(self, counts: NDArray[np.int64]) -> None:
        # The heat that endless text with the profile's frequencies would settle at.
        share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        self.heat[:] = share * (self.n_used / (1.0 - self.decay))


class TwoRates(Policy):
    """Heat = an expert's share of the tokens, averaged over the last few and over many: what the
    text is about just now, and what the model likes at all."""

    name = "two-rate"

    def __init__(self, layout: ExpertLayout) -> None:
        super().__init__(layout)
        self._keep = 0.5 ** (1.0 / FAST_TOKENS), 0.5 ** (1.0 / SLOW_TOKENS)
        self._share = FAST_SHARE, 1.0 - FAST_SHARE
        self._gain = [share * (1.0 - k) for share, k in zip(self._share, self._keep, strict=True)]
        self._rates = np.zeros((2, *self.heat.shape))
        self._flat_rates = self._rates.reshape(2, -1)
        self._bases = np.arange(layout.n_moe_layers, dtype=np.int32)[:, None] * layout.n_experts

    def touch(
        self, moe_index: int, experts: NDArray[np.int32], counts: NDArray[np.integer] | None = None
    ) -> None:
        tokens = (len(experts) if counts is None else int(counts.sum())) / self.n_used
        if not tokens:
            return
        uses = np.ones(len(experts)) if counts is None else counts
        for rate, keep, share in zip(self._rates, self._keep, self._share, strict=True):
            kept = keep**tokens  # as if the uses were spread evenly over the tokens
            row = rate[moe_index]
            row *= kept
            np.add.at(row, experts, uses * (share * (1.0 - kept) / tokens))
        np.add(*self._rates[:, moe_index], out=self.heat[moe_index])

    def touch_window(self, routed: Sequence[NDArray[np.int32]] | NDArray[np.int32]) -> None:
        if len(routed) != len(self.heat) or len(routed[0]) != self.n_used:
            super().touch_window(routed)
            return
        ids = (routed + self._bases).reshape(-1)  # of one token: distinct
        for rate, keep, gain in zip(self._flat_rates, self._keep, self._gain, strict=True):
            rate *= keep
            rate[ids] += gain
        np.add(*self._flat_rates, out=self.flat_heat)

    def seed(self, counts: NDArray[np.int64]) -> None:
        # As endless text with the profile's frequencies would leave it.
        share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1) * self.n_used
        for rate, part in zip(self._rates, self._share, strict=True):
            rate[:] = part * share
        np.add(*self._rates, out=self.heat)


DEFAULT_POLICY = TwoRates.name
POLICIES: dict[str, type[Policy]] = {p.name: p for p in (TwoRates, DecayedLfu, Lru)}


def make_policy(name: str, layout: ExpertLayout) -> Policy:
    """The policy called `name`; raises UsageError that lists the known ones."""
    if name not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise UsageError(f"there is no policy named {name!r}", next_step=f"Use one of: {known}.")
    return POLICIES[name](layout)
