"""The prompt read: chunks of many tokens, layer by layer, in memory lent by the expert slots.

Every stage of a layer is a graph and a phase of its own (the experts: wide_experts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np

from slotwise.engine.chunk import Batch, Shape, fits, scratch_bytes
from slotwise.engine.expert_gemm import ExpertGemm, GemmUse
from slotwise.engine.kv import padded
from slotwise.engine.masks import write_mask, write_window_mask
from slotwise.engine.stages import Network
from slotwise.engine.wide_experts import WideExperts
from slotwise.errors import SlotwiseError
from slotwise.experts.lending import Loan
from slotwise.experts.loader import Experts
from slotwise.kernels.backend import Backend, Buffer, Memory
from slotwise.kernels.gemm import Crew
from slotwise.kernels.graph import Graph
from slotwise.kernels.planner import Extent
from slotwise.trace.ledger import Ledger


class Cancelled(Exception):
    """The caller asked to stop; what was read of the prompt stays valid up to the last chunk."""


Check = Callable[[], None]
"""Raises `Cancelled` when it is time to stop."""


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
        gemm: GemmUse | None = None,
        crew: Crew | None = None,
    ) -> None:
        self._network, self._backend = network, backend
        self._experts, self._arena, self._chunk = experts, arena, chunk
        self._hyper = network.architecture.hyper
        self._gemm, self._crew = gemm, crew
        products = ExpertGemm(network, crew, gemm) if crew and gemm else None
        self._wide = experts and WideExperts(
            self._hyper, backend=backend, experts=experts, gemm=products
        )
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
        self.last_loan = None
        widest = Shape(min(self._chunk, len(tokens)), padded(start + len(tokens)), self._gemm)
        with self._memory(widest, ledger) as (memory, extents):
            for first in range(0, len(tokens), self._chunk):
                chunk = tokens[first : first + self._chunk]
                shape = Shape(len(chunk), padded(start + first + len(chunk)), self._gemm)
                with ledger.phase("read.embed"):
                    batch = Batch(self._network, shape, memory, extents, crew=self._crew)
                    self._write_inputs(batch, chunk, start + first)
                self._read_chunk(batch, ledger, check)
                if logits is not None:
                    logits.append(self._logits(batch))
                done(chunk)

    # -- memory ------------------------------------------------------------------------

    @contextmanager
    def _memory(self, widest: Shape, ledger: Ledger) -> Iterator[tuple[Memory, Sequence[Extent]]]:
        """Lent expert slots, or for a dense model a buffer of its own."""
        with ledger.phase("lend"):
            needed = scratch_bytes(self._network, widest)
        if self._experts is None or self._arena is None:
            with closing(Buffer(needed)) as buffer:
                yield buffer, ((0, needed),)
            return
        with ledger.phase("lend"):
            loan = self._lend(self._experts, needed, widest)
            ledger.add("lend", slots=loan.slots)
        self.last_loan = loan
        try:
            yield self._arena, loan.extents
        finally:
            with ledger.phase("lend"):
                self._experts.give_back(loan)

    def _lend(self, experts: Experts, needed: int, widest: Shape) -> Loan:
        """A loan whose extents hold the batch; scattered extents may take a larger one."""
        available = experts.lendable_bytes()
        for nbytes in (needed, needed + needed // 4, needed + needed // 2, available):
            if nbytes > available:
                continue
            if fits(self._network, widest, experts.loan_extents(nbytes)):
                return experts.lend(nbytes)
        raise SlotwiseError(
            f"a chunk of {widest.n_tokens} tokens over {widest.n_kv} positions needs "
            f"{needed:,} bytes, "
            f"the expert slots can lend {available:,}",
            next_step="Give more --memory, a smaller --chunk or a smaller --context.",
        )

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
            if self._wide is None:
                self._read_dense(batch, layer, ledger)
            else:
                self._wide.read_layer(batch, layer, ledger)

    def _read_dense(self, batch: Batch, layer: int, ledger: Ledger) -> None:
        with ledger.phase("read.ffn"):
            g = batch.stages.new_graph()
            x = batch.stages.dense_ffn(g, layer, batch.places.leaf(g, "x_mid"))
            batch.places.receive(g, "x_in", x)
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
