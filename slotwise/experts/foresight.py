"""What the next layer's router will choose, from what it says one layer too early.

The next layer's router is applied to what this layer's router sees. What the layer in between adds
is missing from that, and is much the same from token to token: its mean effect on each expert's
score is learnt and added (on the streaming model it takes the share of right guesses from 0.66 to
0.70, and tells the sure ones from the doubtful; docs/performance.md). An expert counts as likely
when its corrected score is above the line between the chosen and the rest by a share of the
scores' usual error.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]

MEMORY_TOKENS = 64
"""Over how many tokens the mean effect is taken."""
LEAST_TOKENS = 4
"""Nothing is named for a layer of which fewer have been seen."""
SURE = 0.35
"""Usual errors above the line: about two of three of such experts are chosen."""


class Foresight:
    """Scores are the router's logits. All methods are for one thread, the engine's."""

    def __init__(self, n_layers: int, n_experts: int, n_used: int) -> None:
        self._n_used = n_used
        self._effect = np.zeros((n_layers, n_experts), np.float32)
        self._variance = np.zeros(n_layers, np.float32)
        self._seen = np.zeros(n_layers, np.int64)
        self._margin: list[float] = [0.0] * n_layers

    def learn(self, layer: int, scores: Scores, guesses: Scores) -> None:
        """What the router of `layer` said of some tokens, [T, n_experts], and what was guessed."""
        n = len(scores)
        self._seen[layer] += n
        rate = min(1.0, n / min(self._seen[layer], MEMORY_TOKENS))
        off = scores - guesses
        self._effect[layer] += rate * (off.mean(axis=0) - self._effect[layer])
        error = np.square(off - self._effect[layer]).mean()
        self._variance[layer] += rate * (error - self._variance[layer])
        self._margin[layer] = SURE * float(np.sqrt(self._variance[layer]))

    def learn_window(self, scores: Scores, guesses: Scores) -> None:
        """As `learn` for one token and all layers but the first, [n_layers, n_experts] each."""
        self._seen[1:] += 1
        rate = (1.0 / np.minimum(self._seen[1:], MEMORY_TOKENS)).astype(np.float32)
        off = scores[1:] - guesses[1:]
        self._effect[1:] += rate[:, None] * (off - self._effect[1:])
        error = np.square(off - self._effect[1:]).mean(axis=1)
        self._variance[1:] += rate * (error - self._variance[1:])
        self._margin = (SURE * np.sqrt(self._variance)).tolist()

    def likely(self, layer: int, guess: Scores) -> list[int]:
        """The experts that one token will probably choose, the likeliest first."""
        if self._seen[layer] < LEAST_TOKENS:
            return []
        scores = guess + self._effect[layer]
        best = scores.argsort()[: -self._n_used - 2 : -1]
        experts, heights = best.tolist(), scores.take(best).tolist()
        if len(experts) <= self._n_used:
            return experts
        line = (heights[-2] + heights[-1]) / 2 + self._margin[layer]
        return [e for e, height in zip(experts, heights, strict=True) if height > line]

    def wanted(self, layer: int, guesses: Scores) -> NDArray[np.int32]:
        """The experts that some of the tokens [T, n_experts] will choose, those of most tokens
        first."""
        scores = guesses + self._effect[layer]
        chosen = np.argpartition(-scores, self._n_used - 1, axis=1)[:, : self._n_used]
        tokens = np.bincount(chosen.reshape(-1), minlength=scores.shape[1])
        by_tokens = np.argsort(-tokens, kind="stable")
        return by_tokens[: np.count_nonzero(tokens)].astype(np.int32)
