"""Experts of many rows: their weights repacked or dequantised a tile at a time, then multiplied.

    hidden ─rows of pairs─> inputs ─gate, up─> middle ─down─> results ─rows of pairs─> outputs

The expert feed-forward of `models/`, for the rows of the prompt read that meet the same expert.
Not the same to the last bit as ggml's own product a row at a time: which of them computes an expert
depends on the chunk's routing (and the processor's kernels) alone, never on what was resident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from slotwise.kernels.lib import F32
from slotwise.kernels.repack import repacked_rows
from slotwise.models.hyper import Hyper
from slotwise.models.layers import SlotTensors

ROWS = 1024
"""Rows computed between two waits of the crew for each other."""
FROM_ROWS = 40
"""Rows of one expert from which dequantising pays (bench/gemm.py; docs/performance.md)."""
REPACKED_FROM_ROWS = 20
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


@dataclass(frozen=True)
class _Room:
    """Where a run computes, all f32: rows of one group of pairs, and what each member has."""

    inputs: np.ndarray
    middle: np.ndarray
    results: np.ndarray
    up: list[np.ndarray]
    tiles: list[np.ndarray]

    @classmethod
    def of(cls, places: Places) -> _Room:
        inputs, middle, results = (
            places.array(f"gemm_{name}") for name in ("inputs", "middle", "results")
        )
        return cls(
            inputs, middle, results, list(places.array("gemm_up")), list(places.array("tiles"))
        )


@dataclass(frozen=True)
class _Block:
    """Part of a share: `rows` of the group's arrays, and the expert's weights."""

    share: Share
    pairs: np.ndarray
    rows: slice
    gate: Matrix
    up: Matrix
    down: Matrix


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
        room, outputs = _Room.of(places), places.array("outputs")
        slots = self._net.slots[self._net.class_of[layer]]
        for group in _groups(shares, slots, most=room.inputs.shape[0]):
            self._gather(places, group, room)
            self._crew.run(_tasks(partial(self._up, room, layer), group, "gate"))
            self._crew.run(_tasks(partial(self._down, room, layer), group, "down"))
            for block in group:
                outputs[block.pairs] = room.results[block.rows]

    def _gather(self, places: Places, group: Sequence[_Block], room: _Room) -> None:
        hidden = places.array("hidden")
        for block in group:
            tokens = block.pairs // self._h.n_used
            np.take(hidden, tokens, axis=0, out=room.inputs[block.rows], mode="clip")

    def _up(self, room: _Room, layer: int, block: _Block, rows: slice, member: int) -> None:
        inputs, gate = room.inputs[block.rows], room.middle[block.rows, rows]
        up = room.up[member][: gate.size].reshape(gate.shape)
        for name, matrix, out in (("gate", block.gate, gate), ("up", block.up, up)):
            self._multiply(room, matrix, rows, inputs, out, member)
            self._add_bias(layer, name, block.share.expert, out, rows)
        self._net.architecture.activate(gate, up)

    def _down(self, room: _Room, layer: int, block: _Block, rows: slice, member: int) -> None:
        out, middle = room.results[block.rows, rows], room.middle[block.rows]
        self._multiply(room, block.down, rows, middle, out, member)
        self._add_bias(layer, "down", block.share.expert, out, rows)

    def _multiply(
        self,
        room: _Room,
        matrix: Matrix,
        rows: slice,
        inputs: np.ndarray,
        out: np.ndarray,
        member: int,
    ) -> None:
        self._crew.multiply(matrix, rows, inputs, out, member=member, room=room.tiles[member])

    def _add_bias(self, layer: int, name: str, expert: int, out: np.ndarray, rows: slice) -> None:
        bias = self._net.weights.get(f"blk.{layer}.ffn_{name}_exps.bias")
        if bias is not None:
            out += floats(bias)[expert, rows]


def _tasks(compute: Callable[..., None], group: Sequence[_Block], name: str) -> list:
    """`compute` for every tile of the matrix `name` of each block."""
    return [
        partial(compute, block, rows)
        for block in group
        for matrix in (getattr(block, name),)
        for rows in tiles_of(matrix.n_out, matrix.tile)
    ]


def _groups(shares: Sequence[Share], slots: SlotTensors, *, most: int) -> Iterator[list[_Block]]:
    """Blocks of at most `most` rows together; a share that is larger is cut."""
    group: list[_Block] = []
    used = 0
    for share in shares:
        gate, up, down = (Matrix.of(w, share.slot) for w in (slots.gate, slots.up, slots.down))
        for first in range(0, share.pairs.size, most):
            pairs = share.pairs[first : first + most]
            if used + pairs.size > most:
                yield group
                group, used = [], 0
            rows = slice(used, used + pairs.size)
            group.append(_Block(share, pairs, rows, gate, up, down))
            used += pairs.size
    if group:
        yield group
