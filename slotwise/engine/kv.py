"""The state a conversation leaves in a model whose past is keys and values.

Owns the memory and the tokens it stands for. Another kind of state (recurrent) needs another
class with the same methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from slotwise.kernels.backend import Buffer, Memory
from slotwise.kernels.graph import Weights, tensor_bytes
from slotwise.kernels.lib import F16, F32, TENSOR_ALIGNMENT
from slotwise.models.base import LayerState
from slotwise.models.hyper import Hyper

KV_TYPES = {"f16": F16, "f32": F32}
PADDING = 256
"""Attention looks at a multiple of this many positions, so that graphs can be reused."""


def padded(positions: int) -> int:
    return -(-positions // PADDING) * PADDING


def state_bytes(h: Hyper, context: int, kv_type: str) -> int:
    """Bytes of keys and values for `context` positions of every layer."""
    type_, n = KV_TYPES[kv_type], padded(context)
    one = _aligned(tensor_bytes(type_, (h.width_k, n)))
    one += _aligned(tensor_bytes(type_, (h.width_v, n)))
    return one * h.n_layers


class KeyValueState:
    """Keys and values of one conversation of up to `context` tokens."""

    def __init__(self, h: Hyper, *, context: int, kv_type: str, memory: Memory) -> None:
        self.capacity = context
        self.tokens: list[int] = []
        self._weights = Weights(2 * h.n_layers)
        self._memory, self._places = memory, []
        type_, n = KV_TYPES[kv_type], padded(context)
        offset = 0
        layers = []
        for layer in range(h.n_layers):
            pair = []
            for name, width in (("k", h.width_k), ("v", h.width_v)):
                ne = (width, n)
                pair.append(self._weights.add(f"{name}.{layer}", type_, ne, memory, offset))
                self._places.append((offset, (n, tensor_bytes(type_, (width, 1)))))
                offset += _aligned(tensor_bytes(type_, ne))
            layers.append(LayerState(*pair))
        self.layers = tuple(layers)

    def reuse(self, prompt: Sequence[int]) -> int:
        """Forgets what `prompt` does not begin with; returns how many of its tokens are kept.

        At least the last prompt token is left to read: its logits are needed.
        """
        limit = min(len(self.tokens), len(prompt) - 1)
        kept = next((i for i in range(limit) if self.tokens[i] != prompt[i]), max(limit, 0))
        del self.tokens[kept:]
        return kept

    def clear(self) -> None:
        self.tokens.clear()

    def advance(self, tokens: Sequence[int]) -> None:
        """Says that the state now holds `tokens` too."""
        self.tokens.extend(tokens)

    @property
    def row_bytes(self) -> int:
        """Bytes of one position, all layers together."""
        return sum(shape[1] for _, shape in self._places)

    @cached_property
    def _rows(self) -> list[np.ndarray]:
        """Keys and values of each layer, uint8 [positions, bytes]."""
        return [self._memory.array(offset, np.uint8, shape) for offset, shape in self._places]

    def copy_out(self, start: int, end: int) -> np.ndarray:
        """The bytes of positions [start, end), uint8 [(end - start) * row_bytes]."""
        return np.concatenate([layer[start:end] for layer in self._rows], axis=1).reshape(-1)

    def copy_in(self, start: int, rows: np.ndarray) -> None:
        """Puts bytes from `copy_out` back, at positions from `start` on."""
        data, column = rows.reshape(-1, self.row_bytes), 0
        for layer in self._rows:
            width = layer.shape[1]
            layer[start : start + len(data)] = data[:, column : column + width]
            column += width

    def close(self) -> None:
        self.__dict__.pop("_rows", None)  # views of memory that is about to go
        self._weights.close()


def open_state(h: Hyper, *, context: int, kv_type: str) -> tuple[KeyValueState, Buffer]:
    """A state with memory of its own. Zeroed: masked positions must not hold NaN."""
    buffer = Buffer(state_bytes(h, context, kv_type))
    buffer.touch()
    return KeyValueState(h, context=context, kv_type=kv_type, memory=buffer), buffer


def _aligned(nbytes: int) -> int:
    return -(-nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
