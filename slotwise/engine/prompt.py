"""The prompt read: chunks of many tokens, layer by layer, in memory lent by the expert slots.

Every stage of a layer is a graph and a phase of its own. Experts that are resident compute while
the others are read; each (token, expert) pair is computed once, whatever the waves, and written to
its own row, so the result does not depend on what was resident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np

from slotwise.engine.kv import padded
from slotwise.engine.masks import write_mask, write_window_mask
from slotwise.engine.places import Places, fields, pair_fields
from slotwise.engine.stages import Network, Stages
from slotwise.errors import SlotwiseError
from slotwise.experts.lending import Loan
from slotwise.experts.loader import Experts
from slotwise.kernels.backend import PAGE, Backend, Buffer, Memory, NoMemory
from slotwise.kernels.graph import Graph
from slotwise.kernels.planner import DoesNotFitError, Extent
from slotwise.models.hyper import Hyper
from slotwise.trace.ledger import Ledger

WORK_LIMIT = 16 << 20
"""Bytes; bounds ggml's own table of slots x pairs by splitting a wave into several graphs."""
WORK_PER_SLOT_AND_PAIR = 8


class Cancelled(Exception):
    """The caller asked to stop; what was read of the prompt stays valid up to the last chunk."""


Check = Callable[[], None]
"""Raises `Cancelled` when it is time to stop."""


@dataclass
class Batch:
    """One chunk in memory: its places, and what is needed to build graphs over them."""

    places: Places
    stages: Stages
    n_tokens: int
    pairs_at_once: int

    def run(self, g: Graph, backend: Backend) -> None:
        g.finish(self.places.buffer, self.places.rest)
        g.run(backend)


class PromptReader:
    """Reads parts of a prompt into the state. One per engine."""

    def __init__(
        self,
        network: Network,
        *,
        backend: Backend,
        experts: Experts | None,
        arena: Buffer | None,
        chunk: int,
    ) -> None:
        self._network, self._backend = network, backend
        self._experts, self._arena, self._chunk = experts, arena, chunk
        self._hyper = network.architecture.hyper
        self.last_loan: Loan | None = None

    def read(
        self,
        tokens: Sequence[int],
        start: int,
        *,
        ledger: Ledger,
        check: Check,
        done: Callable[[Sequence[int]], None],
        logits: list[np.ndarray] | None = None,
    ) -> None:
        """Reads `tokens` at positions from `start` on; calls `done` after every chunk.

        With `logits`, appends f32 [T, n_vocab] for every chunk (for tests; costs memory).
        Raises StoreError, Cancelled, or SlotwiseError when no loan is large enough.
        """
        widest, self.last_loan = min(self._chunk, len(tokens)), None
        with self._memory(widest, padded(start + len(tokens)), ledger) as (memory, extents):
            for first in range(0, len(tokens), self._chunk):
                chunk = tokens[first : first + self._chunk]
                n_kv = padded(start + first + len(chunk))
                with ledger.phase("read.embed"):
                    batch = self._batch(len(chunk), n_kv, memory, extents)
                    self._write_inputs(batch, chunk, start + first)
                self._read_chunk(batch, ledger, check)
                if logits is not None:
                    logits.append(self._logits(batch))
                done(chunk)

    # -- memory ------------------------------------------------------------------------

    @contextmanager
    def _memory(
        self, n_tokens: int, n_kv: int, ledger: Ledger
    ) -> Iterator[tuple[Memory, Sequence[Extent]]]:
        """Lent expert slots, or for a dense model a buffer of its own."""
        with ledger.phase("lend"):
            needed = scratch_bytes(self._network, n_tokens, n_kv)
        if self._experts is None or self._arena is None:
            with closing(Buffer(needed)) as buffer:
                yield buffer, ((0, needed),)
            return
        with ledger.phase("lend"):
            loan = self._lend(self._experts, needed, n_tokens, n_kv)
            ledger.add("lend", slots=loan.slots)
        self.last_loan = loan
        try:
            yield self._arena, loan.extents
        finally:
            with ledger.phase("lend"):
                self._experts.give_back(loan)

    def _lend(self, experts: Experts, needed: int, n_tokens: int, n_kv: int) -> Loan:
        """A loan whose extents hold the batch; scattered extents may take a larger one."""
        available = experts.lendable_bytes()
        for nbytes in (needed, needed + needed // 4, needed + needed // 2, available):
            if nbytes <= available and self._holds(experts.loan_extents(nbytes), n_tokens, n_kv):
                return experts.lend(nbytes)
        raise SlotwiseError(
            f"a chunk of {n_tokens} tokens over {n_kv} positions needs {needed:,} bytes, "
            f"the expert slots can lend {available:,}",
            next_step="Give more --memory, a smaller --chunk or a smaller --context.",
        )

    def _holds(self, extents: Sequence[Extent], n_tokens: int, n_kv: int) -> bool:
        try:
            places, graphs = _all_graphs(self._network, n_tokens, n_kv, extents)
        except DoesNotFitError:
            return False
        return all(g.fits(places.rest) for g in graphs)

    def _batch(self, n_tokens: int, n_kv: int, memory: Memory, extents: Sequence[Extent]) -> Batch:
        h = self._hyper
        wanted = fields(h, n_tokens, n_kv) | pair_fields(h, n_tokens)
        places = Places(wanted, memory, extents)
        stages = Stages(self._network, places, n_tokens, n_kv)
        return Batch(places, stages, n_tokens, pairs_at_once(self._network))

    def _write_inputs(self, batch: Batch, tokens: Sequence[int], start: int) -> None:
        p, positions = batch.places, np.arange(start, start + len(tokens))
        p.array("tokens")[:] = tokens
        p.array("positions")[:] = positions
        p.array("state_rows")[:] = positions
        write_mask(p.array("mask"), positions)
        if "window_mask" in p:
            write_window_mask(p.array("window_mask"), positions, self._hyper.sliding_window)

    # -- one chunk -----------------------------------------------------------------------

    def _read_chunk(self, batch: Batch, ledger: Ledger, check: Check) -> None:
        with ledger.phase("read.embed"):
            g = Graph(8)
            batch.places.receive(g, "x_in", batch.stages.embed(g))
            batch.run(g, self._backend)
        for layer in range(self._hyper.n_layers):
            check()
            with ledger.phase("read.attention"):
                g = batch.stages.new_graph()
                batch.stages.attention(g, layer, batch.places.leaf(g, "x_in"))
                batch.run(g, self._backend)
            if self._experts is None:
                self._read_dense(batch, layer, ledger)
            else:
                self._read_experts(batch, layer, ledger, self._experts)

    def _read_dense(self, batch: Batch, layer: int, ledger: Ledger) -> None:
        with ledger.phase("read.ffn"):
            g = batch.stages.new_graph()
            x = batch.stages.dense_ffn(g, layer, batch.places.leaf(g, "x_mid"))
            batch.places.receive(g, "x_in", x)
            batch.run(g, self._backend)

    def _read_experts(self, batch: Batch, layer: int, ledger: Ledger, experts: Experts) -> None:
        with ledger.phase("read.router"):
            g = batch.stages.new_graph()
            batch.stages.router(g, layer, batch.places.leaf(g, "x_mid"))
            batch.run(g, self._backend)
            chosen = batch.places.array("ranking")[:, : self._hyper.n_used].ravel()
            order = np.argsort(chosen, kind="stable")
            distinct, counts = np.unique(chosen, return_counts=True)
            experts.touch(layer, distinct, counts)
        waves = experts.stream(layer, distinct)
        first = 0
        try:
            while True:
                with ledger.phase("read.expert_wait"):
                    wave = next(waves, None)
                if wave is None:
                    break
                with ledger.phase("read.expert_compute"):
                    count = _write_pairs(batch.places, chosen, order, wave, first, self._hyper)
                    self._compute_pairs(batch, layer, first, count)
                    first += count
        finally:
            waves.close()
        with ledger.phase("read.combine"):
            g = batch.stages.new_graph()
            batch.stages.pair_combine(g, layer)
            batch.run(g, self._backend)

    def _compute_pairs(self, batch: Batch, layer: int, first: int, count: int) -> None:
        for begin in range(first, first + count, batch.pairs_at_once):
            g = Graph(32)
            batch.stages.pair_experts(
                g, layer, begin, min(batch.pairs_at_once, first + count - begin)
            )
            batch.run(g, self._backend)

    def _logits(self, batch: Batch) -> np.ndarray:
        """f32 [T, n_vocab], in memory of their own."""
        g = Graph(16)
        h = self._hyper
        logits = batch.stages.head(g, batch.places.leaf(g, "x_in"))
        out = Buffer(h.n_vocab * batch.n_tokens * 4)
        g.output_at(logits, out, 0)
        batch.run(g, self._backend)
        return out.array(0, np.float32, (batch.n_tokens, h.n_vocab)).copy()


def _write_pairs(
    places: Places,
    chosen: np.ndarray,
    order: np.ndarray,
    wave: tuple[np.ndarray, np.ndarray],
    first: int,
    h: Hyper,
) -> int:
    """Writes the pairs of a wave's experts from pair `first` on, expert by expert.

    `chosen` i32 [T * k] is the router's choice, `order` sorts it by expert. Returns the count.
    """
    slot_of = np.full(h.n_experts, -1, np.int32)
    slot_of[wave[0]] = wave[1]
    slots = slot_of[chosen[order]]
    pairs = order[slots >= 0]
    here = slice(first, first + pairs.size)
    places.array("pair_tokens")[here] = pairs // h.n_used
    places.array("pair_experts")[here] = chosen[pairs]
    places.array("pair_rows")[here] = pairs
    places.array("slot_ids").reshape(-1)[here] = slots[slots >= 0]
    return pairs.size


def pairs_at_once(network: Network) -> int:
    """How many pairs one graph may hold: ggml keeps a table of all slots x pairs."""
    if not network.slots:
        return 0
    most = max(s.gate.contents.ne[2] for s in network.slots)
    at_least = network.architecture.hyper.n_used
    return max(at_least, WORK_LIMIT // (WORK_PER_SLOT_AND_PAIR * most))


def _all_graphs(
    network: Network, n_tokens: int, n_kv: int, extents: Sequence[Extent]
) -> tuple[Places, list[Graph]]:
    """One graph of each kind, only to be measured."""
    h = network.architecture.hyper
    wanted = fields(h, n_tokens, n_kv) | pair_fields(h, n_tokens)
    places = Places(wanted, NoMemory(), extents)
    stages = Stages(network, places, n_tokens, n_kv)
    graphs = [stages.new_graph() for _ in range(3)]
    stages.attention(graphs[0], 0, places.leaf(graphs[0], "x_in"))
    if not h.n_experts:
        x = stages.dense_ffn(graphs[1], 0, places.leaf(graphs[1], "x_mid"))
        places.receive(graphs[1], "x_in", x)
        return places, graphs[:2]
    stages.router(graphs[1], 0, places.leaf(graphs[1], "x_mid"))
    stages.pair_combine(graphs[2], 0)
    count = min(n_tokens * h.n_used, pairs_at_once(network))
    for slot_class in range(len(network.slots)):
        g = stages.new_graph()
        stages.pair_experts(g, network.class_of.index(slot_class), 0, count)
        graphs.append(g)
    return places, graphs


def scratch_bytes(network: Network, n_tokens: int, n_kv: int) -> int:
    """Bytes, in one stretch, that a chunk of `n_tokens` over `n_kv` positions computes in."""
    places, graphs = _all_graphs(network, n_tokens, n_kv, [(0, 1 << 62)])
    return places.end + max(g.measure() for g in graphs) + PAGE


def work_bytes(network: Network, n_tokens: int, n_kv: int, threads: int) -> int:
    """Bytes ggml allocates beside our buffers for such a chunk."""
    _, graphs = _all_graphs(network, n_tokens, n_kv, [(0, 1 << 62)])
    return max(g.work_bytes(threads) for g in graphs)
