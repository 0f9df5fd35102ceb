"""Experts of many rows: their weights repacked or dequantised a tile at a time, then multiplied.

    hidden ─rows of pairs─> inputs ─gate, up─> middle ─down─> results ─rows of pairs─> outputs

The expert feed-forward of `models/`, for the rows of the prompt read that meet the same expert.
Not the same to the last bit as ggml's own product a row at a time: which of them computes an expert
depends on the chunk's routing (and the processor's kernels) alone, never on what was resident.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from slotwise.engine.places import Field, Places
from slotwise.engine.stages import Network
from slotwise.kernels.gemm import (
    Crew,
    Matrix,
    floats,
    narrow_floats,
    tile_floats,
    tile_rows,
    tiles_of,
)
from slotwise.kernels.lib import F32, Tensor
from slotwise.kernels.repack import repacked_rows
from slotwise.models.hyper import Hyper
from slotwise.models.layers import SlotTensors

ROWS = 1024
"""Rows computed between two waits of the crew for each other."""
FROM_ROWS = 40
"""Rows of one expert from which dequantising pays (bench/gemm.py; docs/performance.md)."""
REPACKED_FROM_ROWS = 24
"""The same for repacking, where the processor has kernels for the type (decision 11)."""


@dataclass(frozen=True)
class GemmUse:
    """From how many rows of one expert on, by how many threads."""

    threads: int
    from_rows: int = FROM_ROWS
    repacked_from_rows: int = REPACKED_FROM_ROWS

    def least(self, slots: SlotTensors) -> int:
        """Rows from which experts in such slots are multiplied this way."""
        matrices = (Matrix.of(weight, 0) for weight in (slots.gate, slots.up, slots.down))
        return self.repacked_from_rows if all(m.repacked for m in matrices) else self.from_rows


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
    rows, up = min(ROWS, n_tokens), _widest_tile(h.n_embd, h.width_expert)
    tiles = [narrow_floats(n, n_tokens) for n in _dense_widths(h)]
    if h.n_experts:
        tiles.append(tile_floats(h.n_embd, h.width_expert, rows))
        tiles.append(tile_floats(h.width_expert, h.n_embd, rows))
    wanted = {"tiles": Field(F32, (max(tiles), threads))}
    if h.n_experts:
        wanted |= {
            "gemm_inputs": Field(F32, (h.n_embd, rows)),
            "gemm_middle": Field(F32, (h.width_expert, rows)),
            "gemm_results": Field(F32, (h.n_embd, rows)),
            "gemm_up": Field(F32, (rows * up, threads)),
        }
    return wanted


def rounded_bytes(network: Network, n_tokens: int) -> int:
    """Bytes in which ggml rounds one member's inputs to 8 bits (34 for 32 values), if it does."""
    h = network.architecture.hyper
    dense = n_tokens * max(_dense_widths(h))
    experts = min(ROWS, n_tokens) * h.width_expert if h.n_experts else 0
    return max(dense, experts) * 34 // 32


def _dense_widths(h: Hyper) -> tuple[int, ...]:
    """Columns of the dense weights."""
    return h.n_embd, h.head_v * h.n_heads, *filter(None, (h.n_ff, h.n_ff_shared))


def _widest_tile(n_in: int, n_out: int) -> int:
    """Rows of a tile, whichever way it is multiplied."""
    return max(tile_rows(n_in, n_out), repacked_rows(n_in, n_out))


class ExpertGemm:
    """Computes shares into the places of a chunk."""

    def __init__(self, network: Network, crew: Crew, use: GemmUse) -> None:
        self._net, self._crew, self._h = network, crew, network.architecture.hyper
        self._least = [use.least(slots) for slots in network.slots]

    def takes(self, layer: int, share: Share) -> bool:
        """Whether an expert has so many rows that it is computed here."""
        return share.pairs.size >= self._least[self._net.class_of[layer]]

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
        slots = self._net.slots[self._net.class_of[layer]]
        compute, weight = (self._up, slots.gate) if up else (self._down, slots.down)
        matrix = Matrix.of(weight, 0)
        return [
            partial(compute, places, layer, block, rows)
            for block in group
            for rows in tiles_of(matrix.n_out, matrix.tile)
        ]

    def _up(self, places: Places, layer: int, block: _Block, rows: slice, member: int) -> None:
        slots = self._net.slots[self._net.class_of[layer]]
        inputs = places.array("gemm_inputs")[block.rows]
        gate = places.array("gemm_middle")[block.rows, rows]
        up = places.array("gemm_up")[member][: gate.size].reshape(gate.shape)
        for name, weight, out in (("gate", slots.gate, gate), ("up", slots.up, up)):
            self._multiply(places, block, weight, rows, inputs, out, member)
            self._add_bias(layer, name, block.share.expert, out, rows)
        self._net.architecture.activate(gate, up)

    def _down(self, places: Places, layer: int, block: _Block, rows: slice, member: int) -> None:
        down = self._net.slots[self._net.class_of[layer]].down
        out = places.array("gemm_results")[block.rows, rows]
        middle = places.array("gemm_middle")[block.rows]
        self._multiply(places, block, down, rows, middle, out, member)
        self._add_bias(layer, "down", block.share.expert, out, rows)

    def _multiply(
        self,
        places: Places,
        block: _Block,
        weight: Tensor,
        rows: slice,
        inputs: np.ndarray,
        out: np.ndarray,
        member: int,
    ) -> None:
        matrix, room = Matrix.of(weight, block.share.slot), places.array("tiles")[member]
        self._crew.multiply(matrix, rows, inputs, out, member=member, room=room)

    def _add_bias(self, layer: int, name: str, expert: int, out: np.ndarray, rows: slice) -> None:
        bias = self._net.weights.get(f"blk.{layer}.ffn_{name}_exps.bias")
        if bias is not None:
            out += floats(bias)[expert, rows]


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
