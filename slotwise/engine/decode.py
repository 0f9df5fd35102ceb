"""Decode windows: T tokens through the whole model, all experts resident before each layer.

The graphs are built once per (T, positions looked at) and reused. Between two layers the host
reads the router's choice, has the experts brought into slots and writes the slot ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from slotwise.engine.kv import padded
from slotwise.engine.masks import write_mask, write_window_mask
from slotwise.engine.places import Field, Places, fields
from slotwise.engine.stages import Network, Stages
from slotwise.experts.loader import Experts
from slotwise.kernels.backend import PAGE, Backend, Memory, NoMemory
from slotwise.kernels.graph import Graph, Tensor
from slotwise.kernels.lib import F32
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
        self._places = Places(wanted, memory, extents)
        self._network, self._hyper = network, h
        self._n_kv = 0
        self._graphs: list[Graph] = []

    def run(
        self, tokens: Sequence[int], start: int, *, backend: Backend, experts: Experts | None
    ) -> np.ndarray:
        """Reads `tokens` at positions from `start` on; logits f32 [n_vocab] after the last.

        The array is reused by the next window. Raises StoreError if an expert cannot be read.
        """
        self._prepare(start + len(tokens))
        self._write_inputs(tokens, start)
        for layer, graph in enumerate(self._graphs[:-1]):
            graph.run(backend)
            if experts is not None:
                self._place_experts(experts, layer)
        self._graphs[-1].run(backend)
        return self._places.array("logits")[-1]

    def _place_experts(self, experts: Experts, layer: int) -> None:
        chosen = self._chosen
        routed = chosen.ravel()
        self._slot_ids[:] = experts.require_routed(layer, routed)
        experts.touch(layer, routed)

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

    def _prepare(self, positions: int) -> None:
        n_kv = padded(positions)
        if n_kv == self._n_kv:
            return
        self._graphs = []  # frees the old ones first
        self._graphs = list(self._build(n_kv))
        for graph in self._graphs:
            graph.finish(self._places.buffer, self._places.rest)
        self._n_kv = n_kv
        if self._hyper.n_experts:
            ranking = self._places.array("ranking")
            self._chosen = ranking[:, : self._hyper.n_used]
            self._slot_ids = self._places.array("slot_ids").ravel()

    def _build(self, n_kv: int) -> Iterator[Graph]:
        """One graph up to each layer's router, and one from the last experts to the logits."""
        stages = Stages(self._network, self._places, WIDTH, n_kv)
        n_layers, dense = self._hyper.n_layers, not self._hyper.n_experts
        for layer in range(n_layers):
            g = stages.new_graph()
            x = self._carry_on(stages, g, layer)
            mid = stages.attention(g, layer, x)
            if not dense:
                stages.router(g, layer, mid)
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
    graphs = list(windows._build(padded(context)))
    return (
        windows._places.end + max(g.measure() for g in graphs) + PAGE,
        max(g.work_bytes(threads) for g in graphs),
    )
