"""Experts of many rows: their weights dequantised, the products left to a BLAS.

    hidden ─rows of pairs─> inputs ─gate, up─> middle ─down─> results ─rows of pairs─> outputs

The expert feed-forward of `models/`, for the rows of the prompt read that meet the same expert.
More exact than ggml's own product, which rounds the inputs to 8 bits, and hence not the same to the
last bit: which of the two computes an expert depends on the chunk's routing alone, never on what
was resident.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from slotwise.engine.places import Field, Places
from slotwise.engine.stages import Network
from slotwise.kernels.gemm import Crew, Matrix, floats, tile_floats, tile_rows
from slotwise.kernels.lib import F32
from slotwise.models.hyper import Hyper

ROWS = 1024
"""Rows computed between two waits of the crew for each other."""
FROM_ROWS = 40
"""Rows of one expert from which dequantising pays (bench/gemm.py; docs/performance.md)."""


@dataclass(frozen=True)
class GemmUse:
    """From how many rows of one expert on, and by how many threads."""

    from_rows: int
    threads: int


@dataclass(frozen=True)
class Share:
    """The pairs of a chunk that go to one expert. A pair is token * k + rank."""

    expert: int
    slot: int
    pairs: np.ndarray


@dataclass(frozen=True)
class _Block:
    """Part of a share: `rows` of the group's arrays."""

    share: Share
    pairs: np.ndarray
    rows: slice


def gemm_fields(h: Hyper, n_tokens: int, *, threads: int) -> dict[str, Field]:
    """Memory for the products of a chunk of `n_tokens`; one expert gets at most as many rows."""
    rows, widest = min(ROWS, n_tokens), max(h.n_embd, h.width_expert, h.head_v * h.n_heads, h.n_ff)
    wanted = {"tiles": Field(F32, (tile_floats(widest), threads))}
    if h.n_experts:
        up = tile_rows(h.n_embd, h.width_expert)
        wanted |= {
            "gemm_inputs": Field(F32, (h.n_embd, rows)),
            "gemm_middle": Field(F32, (h.width_expert, rows)),
            "gemm_results": Field(F32, (h.n_embd, rows)),
            "gemm_up": Field(F32, (rows * up, threads)),
        }
    return wanted


class ExpertGemm:
    """Computes shares into the places of a chunk."""

    def __init__(self, network: Network, crew: Crew) -> None:
        self._net, self._crew, self._h = network, crew, network.architecture.hyper

    def run(self, places: Places, layer: int, shares: Sequence[Share]) -> None:
        """Writes the outputs f32 [pairs, n_embd] of all shares, each to its pair's row."""
        for group in _groups(shares, places.array("gemm_inputs").shape[0]):
            self._gather(places, group)
            self._crew.run(self._tasks(places, layer, group, up=True))
            self._crew.run(self._tasks(places, layer, group, up=False))
            results, outputs = places.array("gemm_results"), places.array("outputs")
            for block in group:
                outputs[block.pairs] = results[block.rows]

    def _gather(self, places: Places, group: Sequence[_Block]) -> None:
        hidden, inputs = places.array("hidden"), places.array("gemm_inputs")
        for block in group:
            tokens = block.pairs // self._h.n_used
            np.take(hidden, tokens, axis=0, out=inputs[block.rows], mode="clip")

    def _tasks(self, places: Places, layer: int, group: Sequence[_Block], *, up: bool) -> list:
        h, compute = self._h, self._up if up else self._down
        n_in, n_out = (h.n_embd, h.width_expert) if up else (h.width_expert, h.n_embd)
        step = tile_rows(n_in, n_out)
        return [
            partial(compute, places, layer, block, first, min(first + step, n_out))
            for block in group
            for first in range(0, n_out, step)
        ]

    def _up(
        self, places: Places, layer: int, block: _Block, first: int, last: int, member: int
    ) -> None:
        slots = self._net.slots[self._net.class_of[layer]]
        inputs = places.array("gemm_inputs")[block.rows]
        tile = places.array("tiles")[member]
        gate = places.array("gemm_middle")[block.rows, first:last]
        up = places.array("gemm_up")[member][: gate.size].reshape(gate.shape)
        for name, weight, out in (("gate", slots.gate, gate), ("up", slots.up, up)):
            matrix = Matrix.of(weight, block.share.slot)
            np.matmul(inputs, matrix.rows(first, last, tile).T, out=out)
            self._add_bias(layer, name, block.share.expert, out, first, last)
        self._net.architecture.activate(gate, up)

    def _down(
        self, places: Places, layer: int, block: _Block, first: int, last: int, member: int
    ) -> None:
        slots = self._net.slots[self._net.class_of[layer]]
        tile = places.array("tiles")[member]
        out = places.array("gemm_results")[block.rows, first:last]
        matrix = Matrix.of(slots.down, block.share.slot)
        middle = places.array("gemm_middle")[block.rows]
        np.matmul(middle, matrix.rows(first, last, tile).T, out=out)
        self._add_bias(layer, "down", block.share.expert, out, first, last)

    def _add_bias(
        self, layer: int, name: str, expert: int, out: np.ndarray, first: int, last: int
    ) -> None:
        bias = self._net.weights.get(f"blk.{layer}.ffn_{name}_exps.bias")
        if bias is not None:
            out += floats(bias)[expert, first:last]


def _groups(shares: Sequence[Share], most: int) -> Iterator[list[_Block]]:
    """Blocks of at most `most` rows together; a share that is larger is cut."""
    group: list[_Block] = []
    used = 0
    for share in shares:
        for first in range(0, share.pairs.size, most):
            pairs = share.pairs[first : first + most]
            if used + pairs.size > most:
                yield group
                group, used = [], 0
            group.append(_Block(share, pairs, slice(used, used + pairs.size)))
            used += pairs.size
    if group:
        yield group
