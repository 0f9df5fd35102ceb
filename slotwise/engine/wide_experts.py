"""The experts of one layer for a whole chunk: route, bring in, compute, combine.

What is resident computes while the rest is read. Each (token, expert) pair is computed once,
whatever the waves, and written to its own row, so the result does not depend on what was
resident. An expert with few rows goes through ggml's quantised product together with others of
its wave, one with many through `ExpertGemm`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slotwise.engine.chunk import Batch
from slotwise.engine.expert_gemm import ExpertGemm, Share
from slotwise.engine.places import Places
from slotwise.experts.loader import Experts
from slotwise.kernels.backend import Backend
from slotwise.kernels.graph import Graph
from slotwise.models.hyper import Hyper
from slotwise.trace.ledger import Ledger

RECENT_TOKENS = 64
"""The end of a chunk, which tells most about what decode will want: counted after the rest."""


class WideExperts:
    """Computes the feed-forward of layers with experts. `gemm` None: quantised products only."""

    def __init__(
        self, h: Hyper, *, backend: Backend, experts: Experts, gemm: ExpertGemm | None
    ) -> None:
        self._hyper, self._backend, self._experts, self._gemm = h, backend, experts, gemm
        self._guess: np.ndarray | None = None
        """What the router of the layer to come was thought to say of the chunk's last tokens."""

    def read_layer(self, batch: Batch, layer: int, ledger: Ledger) -> None:
        with ledger.phase("read.router"):
            ahead = layer + 1 < self._hyper.n_layers and self._experts.reads_ahead()
            pairs_of = self._route(batch, layer, ahead=ahead)
            foreseen = self._foresee(batch, layer, ahead=ahead)
        waves = self._experts.stream(layer, np.array(list(pairs_of), np.int32), foreseen)
        try:
            while True:
                with ledger.phase("read.expert_wait"):
                    wave = next(waves, None)
                if wave is None:
                    break
                experts, slots = (ids.tolist() for ids in wave)
                shares = [Share(e, s, pairs_of[e]) for e, s in zip(experts, slots, strict=True)]
                self._compute(batch, layer, shares, ledger)
        finally:
            waves.close()
        with ledger.phase("read.combine"):
            g = batch.stages.new_graph()
            batch.places.receive(g, "x_in", batch.stages.pair_combine(g, layer))
            batch.run(g, self._backend)

    def _route(self, batch: Batch, layer: int, *, ahead: bool) -> dict[int, np.ndarray]:
        """The pairs (token * k + rank) of every chosen expert, ascending."""
        g = batch.stages.new_graph()
        batch.stages.router(g, layer, batch.places.leaf(g, "x_mid"))
        if ahead:
            batch.stages.foresee(g, layer + 1, batch.places.leaf(g, "x_mid"))
        batch.run(g, self._backend)
        chosen = batch.places.array("ranking")[:, : self._hyper.n_used].ravel()
        order = np.argsort(chosen, kind="stable")
        distinct, counts = np.unique(chosen, return_counts=True)
        last = chosen[-RECENT_TOKENS * self._hyper.n_used :]
        recent = np.unique(last, return_counts=True) if last.size < chosen.size else None
        self._experts.touch(layer, distinct, counts, recent)
        pairs = np.split(order, np.cumsum(counts)[:-1])
        return dict(zip(distinct.tolist(), pairs, strict=True))

    def _foresee(self, batch: Batch, layer: int, *, ahead: bool) -> list[int]:
        """Checks the last guess against what this router said, and notes the next one."""
        foresight, before, self._guess = self._experts.foresight, self._guess, None
        if before is not None and layer:
            foresight.learn(layer, batch.places.array("scores")[-len(before) :], before)
        if not ahead:
            return []
        self._guess = batch.places.array("guess").copy()
        return foresight.wanted(layer + 1, self._guess).tolist()

    def _compute(self, batch: Batch, layer: int, shares: Sequence[Share], ledger: Ledger) -> None:
        large, small = [], []
        for share in shares:
            by_tiles = self._gemm is not None and self._gemm.takes(layer, share)
            (large if by_tiles else small).append(share)
        if small:
            with ledger.phase("read.expert_compute"):
                count = _write_pairs(batch.places, small, self._hyper)
                self._compute_pairs(batch, layer, count)
        if large and self._gemm is not None:
            with ledger.phase("read.expert_gemm"):
                self._gemm.run(batch.places, layer, large)

    def _compute_pairs(self, batch: Batch, layer: int, count: int) -> None:
        for begin in range(0, count, batch.pairs_at_once):
            g = Graph(32)
            batch.stages.pair_experts(g, layer, begin, min(batch.pairs_at_once, count - begin))
            batch.run(g, self._backend)


def _write_pairs(places: Places, shares: Sequence[Share], h: Hyper) -> int:
    """Writes the pairs of all shares, expert by expert; returns how many they are."""
    pairs = np.concatenate([s.pairs for s in shares])
    here = slice(0, pairs.size)
    repeats = [s.pairs.size for s in shares]
    places.array("pair_tokens")[here] = pairs // h.n_used
    places.array("pair_experts")[here] = np.repeat([s.expert for s in shares], repeats)
    places.array("pair_rows")[here] = pairs
    places.array("slot_ids").reshape(-1)[here] = np.repeat([s.slot for s in shares], repeats)
    return pairs.size
