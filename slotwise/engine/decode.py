"""Decode windows: T tokens through the whole model, all experts resident before each layer.

The graphs are built once per (T, positions looked at) and reused. Between two layers the host
reads the router's choice, has the experts brought into slots and writes the slot ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter_ns

import numpy as np

from slotwise.engine.kv import padded
from slotwise.engine.masks import write_mask, write_window_mask
from slotwise.engine.places import Field, Places, fields
from slotwise.engine.stages import Network, Stages
from slotwise.experts.loader import Experts
from slotwise.kernels.backend import PAGE, Backend, Memory, NoMemory
from slotwise.kernels.graph import Graph, Tensor
from slotwise.kernels.lib import F32, I32
from slotwise.kernels.planner import Extent

WIDTH = 1
"""Tokens of a decode window; more when drafts are verified."""


class Windows:
    """Runs windows of up to `WIDTH` tokens over one conversation's state."""

    def __init__(
        self,
        network: Network,
        *,
        context: int,
        memory: Memory,
        extents: Sequence[Extent],
    ) -> None:
        h = network.architecture.hyper
        wanted = fields(h, WIDTH, padded(context)) | {"logits": Field(F32, (h.n_vocab, WIDTH))}
        if h.n_experts:
            wanted["foreseen"] = Field(I32, (h.n_experts, WIDTH))
        self._places = Places(wanted, memory, extents)
        self._network, self._hyper = network, h
        self._n_kv = 0
        self._graphs: dict[bool, list[Graph]] = {}
        """With and without a guess at the next layer's experts."""
        self._routed = np.zeros((h.n_layers, WIDTH * h.n_used), np.int32)

    def run(
        self, tokens: Sequence[int], start: int, *, backend: Backend, experts: Experts | None
    ) -> np.ndarray:
        """Reads `tokens` at positions from `start` on; logits f32 [n_vocab] after the last.

        The array is reused by the next window. Raises StoreError if an expert cannot be read.
        """
        begin = perf_counter_ns()
        ahead = experts is not None and experts.looks_ahead()
        graphs = self._prepare(start + len(tokens), ahead=ahead)
        self._write_inputs(tokens, start)
        if experts is None:
            for graph in graphs:
                graph.run(backend)
            return self._logits
        self._run_with_experts(graphs, backend, experts, ahead=ahead)
        experts.window_done(self._routed, perf_counter_ns() - begin, looked_ahead=ahead)
        return self._logits

    def _run_with_experts(
        self, graphs: Sequence[Graph], backend: Backend, experts: Experts, *, ahead: bool
    ) -> None:
        """Between two layers: the router's choice is noted, and its experts are placed."""
        chosen, slot_ids, foreseen = self._chosen, self._slot_ids, self._foreseen
        last = len(self._routed) - 1
        for layer, routed in enumerate(self._routed):
            graphs[layer].run(backend)
            routed[:] = chosen
            experts.place(layer, routed, slot_ids, foreseen if ahead and layer < last else None)
        graphs[-1].run(backend)

    def _write_inputs(self, tokens: Sequence[int], start: int) -> None:
        p, n = self._places, len(tokens)
        positions = np.arange(start, start + n)
        p.array("tokens", n)[:] = tokens
        p.array("positions", n)[:] = positions
        p.array("state_rows", n)[:] = positions
        write_mask(p.array("mask", self._n_kv, n), positions)
        if "window_mask" in p:
            window = self._hyper.sliding_window
            write_window_mask(p.array("window_mask", self._n_kv, n), positions, window)

    def _prepare(self, positions: int, *, ahead: bool) -> list[Graph]:
        n_kv = padded(positions)
        if n_kv != self._n_kv:
            self._graphs = {}  # frees the old ones first
            self._n_kv = n_kv
            self._see_places()
        if ahead not in self._graphs:
            graphs = list(self._build(n_kv, ahead=ahead))
            for graph in graphs:
                graph.finish(self._places.buffer, self._places.rest)
            self._graphs[ahead] = graphs
        return self._graphs[ahead]

    def _see_places(self) -> None:
        """What the host reads and writes between graphs, as flat arrays."""
        self._logits = self._places.array("logits")[-1]
        if self._hyper.n_experts:
            self._chosen = self._places.array("ranking")[:, : self._hyper.n_used].reshape(-1)
            self._slot_ids = self._places.array("slot_ids").reshape(-1)
            self._foreseen = self._places.array("foreseen")[-1, : self._hyper.n_used]

    def _build(self, n_kv: int, *, ahead: bool) -> Iterator[Graph]:
        """One graph up to each layer's router, and one from the last experts to the logits."""
        stages = Stages(self._network, self._places, WIDTH, n_kv)
        n_layers, dense = self._hyper.n_layers, not self._hyper.n_experts
        for layer in range(n_layers):
            g = stages.new_graph()
            x = self._carry_on(stages, g, layer)
            mid = stages.attention(g, layer, x)
            if not dense:
                stages.router(g, layer, mid)
            if ahead and layer + 1 < n_layers:
                stages.foresee(g, layer + 1, mid)
            yield g
        g = stages.new_graph()
        logits = stages.head(g, self._carry_on(stages, g, n_layers))
        self._places.receive(g, "logits", logits)
        yield g

    def _carry_on(self, stages: Stages, g: Graph, layer: int) -> Tensor:
        """What layer `layer` starts from: the end of the layer before it."""
        if layer == 0:
            return stages.embed(g)
        if self._hyper.n_experts:
            return stages.window_experts(g, layer - 1)
        return stages.dense_ffn(g, layer - 1, self._places.leaf(g, "x_mid"))


def window_bytes(network: Network, context: int, threads: int) -> tuple[int, int]:
    """(bytes of fields and intermediates, bytes ggml needs beside them) for any window."""
    memory = NoMemory()
    windows = Windows(network, context=context, memory=memory, extents=[(0, 1 << 62)])
    graphs = list(windows._build(padded(context), ahead=bool(windows._hyper.n_experts)))
    return (
        windows._places.end + max(g.measure() for g in graphs) + PAGE,
        max(g.work_bytes(threads) for g in graphs),
    )
