"""Where the tensors that pass from one graph to the next live, for a batch of T tokens.

    x_in ─attention─> x_mid ─router─> hidden, ranking, weights
                        │             ranking ─host─> slot_ids, expert_ids
                        │             hidden ─experts─> outputs ─┐
                        └──────────────────combine───────────────┴─> x_in of the next layer

Windows keep them for good in a small buffer; the prompt read lays them out anew in lent
expert slots for every part. The host reads and writes them as numpy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from slotwise.kernels.backend import Memory
from slotwise.kernels.graph import Graph, Tensor
from slotwise.kernels.lib import F16, F32, I32, I64
from slotwise.kernels.planner import Extent, Span, place
from slotwise.models.hyper import Hyper

_NUMPY = {F32: np.float32, F16: np.float16, I32: np.int32, I64: np.int64}


@dataclass(frozen=True)
class Field:
    """ggml type and shape (fastest dimension first)."""

    type: int
    ne: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.ne) * np.dtype(_NUMPY[self.type]).itemsize


GUESS_TOKENS = 64
"""The last tokens of a batch, for which the next layer's router is asked early."""


def fields(h: Hyper, n_tokens: int, n_kv: int) -> dict[str, Field]:
    """Every tensor of a batch of `n_tokens` over `n_kv` positions."""
    pairs = n_tokens * h.n_used
    wanted = {
        "tokens": Field(I32, (n_tokens,)),
        "positions": Field(I32, (n_tokens,)),
        "state_rows": Field(I64, (n_tokens,)),
        "mask": Field(F16, (n_kv, n_tokens)),
        "x_in": Field(F32, (h.n_embd, n_tokens)),
        "x_mid": Field(F32, (h.n_embd, n_tokens)),
    }
    if h.sliding_window:
        wanted["window_mask"] = Field(F16, (n_kv, n_tokens))
    if pairs:
        wanted |= {
            "hidden": Field(F32, (h.n_embd, n_tokens)),
            "ranking": Field(I32, (h.n_experts, n_tokens)),
            "scores": Field(F32, (h.n_experts, n_tokens)),
            "guess": Field(F32, (h.n_experts, min(n_tokens, GUESS_TOKENS))),
            "weights": Field(F32, (1, h.n_used, n_tokens)),
            "slot_ids": Field(I32, (h.n_used, n_tokens)),
        }
    return wanted


def pair_fields(h: Hyper, n_tokens: int) -> dict[str, Field]:
    """What the prompt read adds: one entry for each (token, chosen expert) pair."""
    pairs = n_tokens * h.n_used
    if not pairs:
        return {}
    return {
        "pair_tokens": Field(I32, (pairs,)),
        "pair_experts": Field(I32, (pairs,)),
        "pair_rows": Field(I64, (pairs,)),
        "outputs": Field(F32, (h.n_embd, pairs)),
    }


class Places:
    """Fields with memory. Raises `planner.DoesNotFitError` when the extents are too small."""

    def __init__(self, wanted: dict[str, Field], buffer: Memory, extents: Sequence[Extent]) -> None:
        self.buffer = buffer
        self._fields = wanted
        spans = [Span(f.nbytes, 0, 0) for f in wanted.values()]
        offsets = place(spans, extents)
        self._offsets = dict(zip(wanted, offsets, strict=True))
        taken = [(o, s.nbytes) for o, s in zip(offsets, spans, strict=True)]
        self.rest = _without(extents, taken)
        """What is left of the extents, for the graphs' intermediates."""
        self.end = max(o + n for o, n in taken)

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def array(self, name: str, *ne: int) -> np.ndarray:
        """The field as numpy sees it (dimensions reversed), or its first bytes as `ne`."""
        field = self._fields[name]
        return self.buffer.array(self._offsets[name], _NUMPY[field.type], (ne or field.ne)[::-1])

    def leaf(self, g: Graph, name: str, *ne: int) -> Tensor:
        """The field as an input of `g`, or its first bytes as `ne`."""
        field = self._fields[name]
        return g.leaf(field.type, ne or field.ne, self.buffer, self._offsets[name])

    def receive(self, g: Graph, name: str, tensor: Tensor) -> None:
        """Lets the op that makes `tensor` write into the field."""
        g.output_at(tensor, self.buffer, self._offsets[name])


def _without(extents: Sequence[Extent], taken: Sequence[Extent]) -> list[Extent]:
    """The parts of `extents` that `taken` does not touch."""
    rest = []
    for start, length in extents:
        cursor, end = start, start + length
        for offset, nbytes in sorted(taken):
            if start <= offset < end:
                if offset > cursor:
                    rest.append((cursor, offset - cursor))
                cursor = max(cursor, offset + nbytes)
        if cursor < end:
            rest.append((cursor, end - cursor))
    return rest
