"""Decode windows: T tokens through the whole model.

The graphs are built once per (T, positions looked at) and reused. Between two layers the host
reads the router's choice, has the experts brought into slots and writes the slot ids. When all are
there, their computing and the next layer's attention are one graph. Otherwise those that are there
compute while the others are read, and the next graph begins with what both have left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter_ns

import numpy as np

from slotwise.engine.kv import padded
from slotwise.engine.masks import write_mask, write_window_mask
from slotwise.engine.places import Field, Places, fields, pair_fields
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
        wanted = fields(h, WIDTH, padded(context)) | pair_fields(h, WIDTH)
        wanted["logits"] = Field(F32, (h.n_vocab, WIDTH))
        self._places = Places(wanted, memory, extents)
        self._network, self._hyper = network, h
        self._n_kv = 0
        self._graphs: dict[tuple[int, bool, bool], Graph] = {}
        """By layer, whether it guesses the next layer's experts, and whether it begins with the
        experts of the layer before or with their outputs."""
        self._parts: dict[tuple[int, int], Graph] = {}
        """Some experts of a layer, by layer and number."""
        self._routed = np.zeros((h.n_layers, WIDTH * h.n_used), np.int32)
        self._slots = np.zeros(WIDTH * h.n_used, np.int32)
        self._scores = np.zeros((h.n_layers, h.n_experts), np.float32)
        self._guesses = np.zeros_like(self._scores)

    def run(
        self, tokens: Sequence[int], start: int, *, backend: Backend, experts: Experts | None
    ) -> np.ndarray:
        """Reads `tokens` at positions from `start` on; logits f32 [n_vocab] after the last.

        The array is reused by the next window. Raises StoreError if an expert cannot be read.
        """
        begin = perf_counter_ns()
        ahead = experts is not None and experts.looks_ahead()
        self._prepare(start + len(tokens))
        self._write_inputs(tokens, start)
        if experts is None:
            for layer in range(self._hyper.n_layers + 1):
                self._graph(layer).run(backend)
            return self._logits
        self._run_with_experts(backend, experts, ahead=ahead)
        if ahead:
            experts.foresight.learn_window(self._scores, self._guesses)
        experts.window_done(self._routed, perf_counter_ns() - begin, looked_ahead=ahead)
        return self._logits

    def warm_up(self, backend: Backend) -> None:
        """Computes the start of a window that nobody asked for: the first graph of a process has
        threads to start and tables to make, which no request should wait for."""
        self._prepare(1)
        self._write_inputs([0], 0)
        self._graph(0).run(backend)

    def _run_with_experts(self, backend: Backend, experts: Experts, *, ahead: bool) -> None:
        """Between two layers: the router's choice is noted, and its experts are placed."""
        chosen, slot_ids, foreseen = self._chosen, self._slot_ids, ()
        last, whole = len(self._routed) - 1, True
        for layer, routed in enumerate(self._routed):
            guess = ahead and layer < last
            self._graph(layer, ahead=guess, joined=not whole).run(backend)
            routed[:] = chosen
            if ahead:
                self._scores[layer] = self._score
                foreseen = self._foresee(layer + 1, experts) if guess else ()
            whole = experts.place(layer, routed, self._slots, foreseen)
            if whole:
                slot_ids[:] = self._slots
            else:
                self._compute_as_they_come(layer, backend, experts)
        self._graph(last + 1, joined=not whole).run(backend)

    def _compute_as_they_come(self, layer: int, backend: Backend, experts: Experts) -> None:
        """The experts that are there, while the others are read; then those."""
        there: list[int] = []
        missing: list[int] = []
        for pair, slot in enumerate(self._slots.tolist()):
            (there if slot >= 0 else missing).append(pair)
        if there:
            self._compute_pairs(layer, there, backend)
        experts.complete()
        self._compute_pairs(layer, missing, backend)

    def _compute_pairs(self, layer: int, pairs: list[int], backend: Backend) -> None:
        """Pairs (token * k + rank), each into its own row of the outputs."""
        n, slots, chosen = len(pairs), self._slots.tolist(), self._routed[layer].tolist()
        self._pair_rows[:n] = pairs
        self._pair_tokens[:n] = [pair // self._hyper.n_used for pair in pairs]
        self._pair_experts[:n] = [chosen[pair] for pair in pairs]
        self._slot_ids[:n] = [slots[pair] for pair in pairs]
        self._part(layer, n).run(backend)

    def _foresee(self, layer: int, experts: Experts) -> list[int]:
        self._guesses[layer] = self._guess
        return experts.foresight.likely(layer, self._guess)

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
        if n_kv != self._n_kv:
            self._graphs = {}  # frees the old ones first
            self._n_kv = n_kv
            self._see_places()

    def _graph(self, layer: int, *, ahead: bool = False, joined: bool = False) -> Graph:
        key = layer, ahead, joined
        if key not in self._graphs:
            graph = self._build(layer, self._n_kv, ahead=ahead, joined=joined)
            graph.finish(self._places.buffer, self._places.rest)
            self._graphs[key] = graph
        return self._graphs[key]

    def _part(self, layer: int, n: int) -> Graph:
        if (layer, n) not in self._parts:
            graph = self._build_part(layer, n)
            graph.finish(self._places.buffer, self._places.rest)
            self._parts[layer, n] = graph
        return self._parts[layer, n]

    def _see_places(self) -> None:
        """What the host reads and writes between graphs, as flat arrays."""
        self._logits = self._places.array("logits")[-1]
        if self._hyper.n_experts:
            self._chosen = self._places.array("ranking")[:, : self._hyper.n_used].reshape(-1)
            self._slot_ids = self._places.array("slot_ids").reshape(-1)
            self._pair_rows = self._places.array("pair_rows")
            self._pair_tokens = self._places.array("pair_tokens")
            self._pair_experts = self._places.array("pair_experts")
            self._score = self._places.array("scores")[-1]
            self._guess = self._places.array("guess")[-1]

    def _build(self, layer: int, n_kv: int, *, ahead: bool, joined: bool) -> Graph:
        """From the experts of the layer before to this layer's router, or at last the logits."""
        stages = Stages(self._network, self._places, WIDTH, n_kv)
        g = stages.new_graph()
        x = self._carry_on(stages, g, layer, joined=joined)
        if layer == self._hyper.n_layers:
            self._places.receive(g, "logits", stages.head(g, x))
            return g
        mid = stages.attention(g, layer, x)
        if self._hyper.n_experts:
            stages.router(g, layer, mid)
        if ahead:
            stages.foresee(g, layer + 1, mid)
        return g

    def _build_part(self, layer: int, n: int) -> Graph:
        g = Graph(32)
        Stages(self._network, self._places, WIDTH, self._n_kv).pair_experts(g, layer, 0, n)
        return g

    def _carry_on(self, stages: Stages, g: Graph, layer: int, *, joined: bool) -> Tensor:
        """What layer `layer` starts from: the end of the layer before it."""
        if layer == 0:
            return stages.embed(g)
        if not self._hyper.n_experts:
            return stages.dense_ffn(g, layer - 1, self._places.leaf(g, "x_mid"))
        experts = stages.pair_combine if joined else stages.window_experts
        return experts(g, layer - 1)

    def widest_graphs(self, n_kv: int) -> Iterator[Graph]:
        """Of every kind that a window may need the largest, only to be measured."""
        h = self._hyper
        for joined in {False, h.n_experts > 0}:
            for layer in range(h.n_layers + 1):
                ahead = h.n_experts > 0 and layer + 1 < h.n_layers
                yield self._build(layer, n_kv, ahead=ahead, joined=joined)
        if h.n_experts:
            for layer in range(h.n_layers):
                yield self._build_part(layer, h.n_used)


def window_bytes(network: Network, context: int, threads: int) -> tuple[int, int]:
    """(bytes of fields and intermediates, bytes ggml needs beside them) for any window."""
    windows = Windows(network, context=context, memory=NoMemory(), extents=[(0, 1 << 62)])
    sizes = [
        (graph.measure(), graph.work_bytes(threads))
        for graph in windows.widest_graphs(padded(context))
    ]
    intermediates, work = (max(size) for size in zip(*sizes, strict=True))
    return windows._places.end + intermediates + PAGE, work
