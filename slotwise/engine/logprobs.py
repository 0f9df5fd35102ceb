"""How probable the model found a token, and which it found more probable.

Of the model's own distribution, before temperature and filters: what OpenAI's `logprobs` are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slotwise.engine.sampling import largest


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    """(token, logprob) of the most probable, in falling order."""


def token_logprobs(logits: np.ndarray, token: int, *, top: int) -> TokenLogprobs:
    """Of `token` and the `top` most probable tokens, for `logits` f32 [n_vocab]."""
    highest = float(logits.max())
    total = np.exp(logits - highest).sum(dtype=np.float64)
    shift = highest + float(np.log(total))
    best = largest(logits, min(top, logits.size)) if top else np.empty(0, np.int64)
    return TokenLogprobs(
        chosen=float(logits[token]) - shift,
        top=tuple((int(i), float(logits[i]) - shift) for i in best),
    )
