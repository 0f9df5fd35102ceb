"""Attention masks, written by the host: 0 where a token may look, -inf elsewhere."""

from __future__ import annotations

import numpy as np

_HIDDEN = np.float16(-np.inf)


def write_mask(mask: np.ndarray, positions: np.ndarray) -> None:
    """Causal. `mask` f16 [T, n_kv]; the token at position p sees positions 0 to p."""
    columns = np.arange(mask.shape[1])
    mask[:] = np.where(columns[None, :] <= positions[:, None], np.float16(0), _HIDDEN)


def write_window_mask(mask: np.ndarray, positions: np.ndarray, window: int) -> None:
    """Causal, and no further back than `window` positions, the token itself included."""
    columns = np.arange(mask.shape[1])[None, :]
    last = positions[:, None]
    seen = (columns <= last) & (columns > last - window)
    mask[:] = np.where(seen, np.float16(0), _HIDDEN)
