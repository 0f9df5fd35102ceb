"""The stages of a layer as graphs: the architecture's ops between the places of a batch.

`Stages` only builds. The prompt read runs one graph per stage, so that each is a phase of its
own; a decode window runs `window_layer`, the experts of one layer and the attention of the next
in one graph, because between them the host has nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slotwise.engine.places import GUESS_TOKENS, Places
from slotwise.kernels.gemm import HostProducts
from slotwise.kernels.graph import Graph, Tensor, Weights
from slotwise.models.base import Architecture, LayerState, Routed, StepInputs
from slotwise.models.layers import SlotTensors, top


@dataclass(frozen=True)
class Network:
    """A model ready to be built into graphs."""

    architecture: Architecture
    weights: Weights
    state: Sequence[LayerState]
    """Per layer."""
    slots: Sequence[SlotTensors] = ()
    """Per slot class; empty for a dense model."""
    class_of: Sequence[int] = ()
    """Slot class of each layer; empty for a dense model."""
    keep: tuple[object, ...] = ()
    """Owners of the tensors above: ggml frees a tensor's header with its context."""


class Stages:
    """Appends stages to a graph, for a batch of `n_tokens` over `n_kv` positions."""

    def __init__(
        self,
        network: Network,
        places: Places,
        n_tokens: int,
        n_kv: int,
        *,
        host: HostProducts | None = None,
    ) -> None:
        self._net, self._places, self._n, self._n_kv = network, places, n_tokens, n_kv
        self._host = host
        self._h = network.architecture.hyper

    def new_graph(self) -> Graph:
        """Room for any stage, or for the experts of a layer and the attention of the next. ggml
        aborts the process when it is too small; `combine` takes two ops for each chosen expert."""
        return Graph(160 + 2 * self._h.n_used, host=self._host)

    def embed(self, g: Graph) -> Tensor:
        tokens = self._places.leaf(g, "tokens")
        return g.op("get_rows", self._net.weights["token_embd.weight"], tokens)

    def attention(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        p, n, n_kv = self._places, self._n, self._n_kv
        inputs = StepInputs(
            positions=p.leaf(g, "positions", n),
            state_rows=p.leaf(g, "state_rows", n),
            mask=p.leaf(g, "mask", n_kv, n),
            window_mask=p.leaf(g, "window_mask", n_kv, n) if "window_mask" in p else None,
        )
        arch, w = self._net.architecture, self._net.weights
        out = arch.attention(g, w, layer, x, self._net.state[layer], inputs)
        p.receive(g, "x_mid", out)
        return out

    def router(self, g: Graph, layer: int, x: Tensor) -> None:
        routed = self._net.architecture.router(g, self._net.weights, layer, x)
        self._places.receive(g, "hidden", routed.hidden)
        self._places.receive(g, "ranking", routed.ranking)
        self._places.receive(g, "weights", routed.weights)
        self._places.receive(g, "scores", routed.scores)

    def foresee(self, g: Graph, layer: int, x: Tensor) -> None:
        """What the router of `layer` says of the last tokens of `x`, which has not yet been through
        the layer before."""
        n = min(self._n, GUESS_TOKENS)
        if n < self._n:
            row = self._h.n_embd * 4
            x = g.view(x, (self._h.n_embd, n), (row,), offset=(self._n - n) * row)
        guess = self._net.architecture.foresee(g, self._net.weights, layer, x)
        self._places.receive(g, "guess", guess)

    def routed(self, g: Graph) -> Routed:
        """What an earlier graph's router left behind."""
        p = self._places
        names = ("hidden", "ranking", "weights", "scores")
        return Routed(*(p.leaf(g, name) for name in names))

    def window_experts(self, g: Graph, layer: int) -> Tensor:
        """Experts and combine of a whole batch whose experts are all resident."""
        routed = self.routed(g)
        rows = g.reshape(routed.hidden, self._h.n_embd, 1, self._n)
        outputs = self._experts(
            g, layer, rows, self._places.leaf(g, "slot_ids"), top(g, routed.ranking, self._h.n_used)
        )
        return self._combine(g, layer, routed, outputs)

    def pair_experts(self, g: Graph, layer: int, first: int, count: int) -> None:
        """Experts for `count` pairs from pair `first` on; each output goes to its own row."""
        p = self._places
        pairs = {
            name: g.view(p.leaf(g, name), (count,), offset=first * size)
            for name, size in (("pair_tokens", 4), ("pair_experts", 4), ("pair_rows", 8))
        }
        slot_ids = g.view(
            p.leaf(g, "slot_ids", self._n * self._h.n_used), (count,), offset=first * 4
        )
        rows = g.op("get_rows", p.leaf(g, "hidden"), pairs["pair_tokens"])
        outputs = self._experts(
            g,
            layer,
            g.reshape(rows, self._h.n_embd, 1, count),
            g.reshape(slot_ids, 1, count),
            g.reshape(pairs["pair_experts"], 1, count),
        )
        flat = g.reshape(outputs, self._h.n_embd, count)
        g.op("set_rows", p.leaf(g, "outputs"), flat, pairs["pair_rows"])

    def pair_combine(self, g: Graph, layer: int) -> Tensor:
        """From the rows that `pair_experts` has written."""
        outputs = self._places.leaf(g, "outputs", self._h.n_embd, self._h.n_used, self._n)
        return self._combine(g, layer, self.routed(g), outputs)

    def dense_ffn(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        return self._net.architecture.dense_ffn(g, self._net.weights, layer, x)

    def head(self, g: Graph, x: Tensor) -> Tensor:
        """Logits of every token of the batch."""
        return self._net.architecture.head(g, self._net.weights, x)

    def _experts(
        self, g: Graph, layer: int, rows: Tensor, slot_ids: Tensor, expert_ids: Tensor
    ) -> Tensor:
        slots = self._net.slots[self._net.class_of[layer]]
        arch, w = self._net.architecture, self._net.weights
        return arch.experts(g, w, layer, slots, rows, slot_ids, expert_ids)

    def _combine(self, g: Graph, layer: int, routed: Routed, outputs: Tensor) -> Tensor:
        x = self._places.leaf(g, "x_mid")
        return self._net.architecture.combine(g, self._net.weights, layer, x, routed, outputs)
