"""What every architecture offers the engine: tensor names, and the stages of one layer.

A layer is built in stages so that the engine can put the host between them:

    attention -> router -> (host: expert ids to slot ids) -> experts -> combine

An architecture is a subclass that overrides the stages in which it differs.
Knows nothing of slots' contents, chunks or windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from slotwise.kernels.graph import Graph, Tensor, Weights
from slotwise.kernels.lib import SORT_DESCENDING
from slotwise.models import layers
from slotwise.models.hyper import Hyper


@dataclass(frozen=True)
class TensorSpec:
    """A dense tensor the architecture reads. `shape` is ne order; experts are not dense."""

    name: str
    shape: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True)
class LayerState:
    """What a layer keeps of the past: here its keys and values, [width, positions]."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class StepInputs:
    """Inputs of one chunk or window of T tokens over n_kv positions."""

    positions: Tensor
    """i32 [T]"""
    state_rows: Tensor
    """i64 [T]: where the new keys and values go"""
    mask: Tensor
    """f16 [n_kv, T], 0 where attended, -inf elsewhere"""
    window_mask: Tensor | None
    """The same for layers with a sliding window; None where the model has none."""


@dataclass(frozen=True)
class Routed:
    """Result of the router for T tokens with k of E experts each."""

    hidden: Tensor
    """f32 [n_embd, T]: what the experts read"""
    ranking: Tensor
    """i32 [E, T]: best expert first; the first k count"""
    weights: Tensor
    """f32 [1, k, T]"""
    scores: Tensor
    """f32 [E, T]: the logits"""


class Architecture:
    """Base: pre-norm attention with rotary positions, then experts or a dense SwiGLU."""

    name: ClassVar[str] = ""
    rope_mode: ClassVar[int] = layers.ROPE_NEOX
    normalises_weights: ClassVar[bool] = False
    """Whether the chosen experts' probabilities are divided by their sum."""
    has_shared_expert: ClassVar[bool] = False
    ffn_norm: ClassVar[str] = "ffn_norm"

    def __init__(self, hyper: Hyper) -> None:
        self.hyper = hyper

    # -- the table of tensor names ----------------------------------------------------

    def dense_tensors(self) -> list[TensorSpec]:
        """Every tensor that is not an expert's, with its expected shape."""
        h = self.hyper
        specs = [
            TensorSpec("token_embd.weight", (h.n_embd, h.n_vocab)),
            TensorSpec("output_norm.weight", (h.n_embd,)),
            TensorSpec("output.weight", (h.n_embd, h.n_vocab), optional=True),
            TensorSpec("rope_freqs.weight", (h.rope.dims // 2,), optional=True),
        ]
        for layer in range(h.n_layers):
            for spec in self.attention_tensors() + self.feed_forward_tensors():
                specs.append(TensorSpec(f"blk.{layer}.{spec.name}", spec.shape, spec.optional))
        return specs

    def attention_tensors(self) -> list[TensorSpec]:
        """Names without their `blk.N.`"""
        h = self.hyper
        width_q = h.head_k * h.n_heads
        return [
            TensorSpec("attn_norm.weight", (h.n_embd,)),
            TensorSpec("attn_q.weight", (h.n_embd, width_q)),
            TensorSpec("attn_k.weight", (h.n_embd, h.width_k)),
            TensorSpec("attn_v.weight", (h.n_embd, h.width_v)),
            TensorSpec("attn_output.weight", (h.head_v * h.n_heads, h.n_embd)),
            TensorSpec("attn_q.bias", (width_q,), optional=True),
            TensorSpec("attn_k.bias", (h.width_k,), optional=True),
            TensorSpec("attn_v.bias", (h.width_v,), optional=True),
            TensorSpec("attn_output.bias", (h.n_embd,), optional=True),
        ]

    def feed_forward_tensors(self) -> list[TensorSpec]:
        """Names without their `blk.N.`"""
        h = self.hyper
        norm = TensorSpec(f"{self.ffn_norm}.weight", (h.n_embd,))
        if h.n_experts:
            return [norm, TensorSpec("ffn_gate_inp.weight", (h.n_embd, h.n_experts))]
        return [
            norm,
            TensorSpec("ffn_gate.weight", (h.n_embd, h.n_ff)),
            TensorSpec("ffn_up.weight", (h.n_embd, h.n_ff)),
            TensorSpec("ffn_down.weight", (h.n_ff, h.n_embd)),
        ]

    # -- the stages of a layer ----------------------------------------------------------

    def uses_window(self, layer: int) -> bool:
        """Whether this layer attends only to the last `sliding_window` positions."""
        return False

    def norm_qk(
        self, g: Graph, w: Weights, layer: int, q: Tensor, k: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Splits q and k [width, T] into heads [head, heads, T], normalised where wanted."""
        h = self.hyper
        n_tokens = q.contents.ne[1]
        return (
            g.reshape(q, h.head_k, h.n_heads, n_tokens),
            g.reshape(k, h.head_k, h.n_heads_kv, n_tokens),
        )

    def attention(
        self, g: Graph, w: Weights, layer: int, x: Tensor, state: LayerState, inputs: StepInputs
    ) -> Tensor:
        """x + attention(norm(x)) [n_embd, T]; writes the new keys and values into `state`."""
        h, p = self.hyper, f"blk.{layer}."
        normed = layers.rms_norm(g, x, w[p + "attn_norm.weight"], h.rms_eps)
        q = layers.linear(g, w, p + "attn_q", normed)
        k = layers.linear(g, w, p + "attn_k", normed)
        v = layers.linear(g, w, p + "attn_v", normed)
        q, k = self.norm_qk(g, w, layer, q, k)
        factors = w.get("rope_freqs.weight")
        q = layers.rope(g, q, inputs.positions, h.rope, self.rope_mode, factors)
        k = layers.rope(g, k, inputs.positions, h.rope, self.rope_mode, factors)
        windowed = inputs.window_mask if self.uses_window(layer) else None
        attended = layers.attend(
            g,
            h,
            (q, k, v),
            (state.keys, state.values),
            inputs.state_rows,
            inputs.mask if windowed is None else windowed,
            w.get(p + "attn_sinks.weight"),
        )
        return g.op("add", layers.linear(g, w, p + "attn_output", attended), x)

    def router(self, g: Graph, w: Weights, layer: int, x: Tensor) -> Routed:
        """Softmax over all experts, the k most probable, optionally normalised."""
        h, p = self.hyper, f"blk.{layer}."
        hidden = layers.rms_norm(g, x, w[p + self.ffn_norm + ".weight"], h.rms_eps)
        logits = layers.scores(g, w, p + "ffn_gate_inp", hidden)
        probabilities = g.op("soft_max", logits)
        ranking = g.op("argsort", probabilities, SORT_DESCENDING)
        chosen = layers.pick(g, probabilities, ranking, h.n_used)
        if self.normalises_weights:
            chosen = layers.normalise(g, chosen)
        if h.expert_scale != 1.0:
            chosen = g.op("scale", chosen, h.expert_scale)
        return Routed(hidden, ranking, chosen, logits)

    def foresee(self, g: Graph, w: Weights, layer: int, x: Tensor) -> Tensor:
        """The router's logits for `x`, f32 [E, T], and nothing else of it."""
        p = f"blk.{layer}."
        hidden = layers.rms_norm(g, x, w[p + self.ffn_norm + ".weight"], self.hyper.rms_eps)
        return layers.scores(g, w, p + "ffn_gate_inp", hidden)

    def experts(
        self,
        g: Graph,
        w: Weights,
        layer: int,
        slots: layers.SlotTensors,
        rows: Tensor,
        slot_ids: Tensor,
        expert_ids: Tensor,
    ) -> Tensor:
        """down(silu(gate) * up) for each pair of a row and an expert slot.

        `rows` f32 [n_embd, 1, T]; both ids i32 [k, T], `slot_ids` into the slots and
        `expert_ids` into what is kept per expert outside them; result f32 [n_embd, k, T].
        """
        gate = g.op("mul_mat_id", slots.gate, rows, slot_ids)
        up = g.op("mul_mat_id", slots.up, rows, slot_ids)
        return g.op("mul_mat_id", slots.down, g.op("swiglu_split", gate, up), slot_ids)

    def activate(self, gate: np.ndarray, up: np.ndarray) -> None:
        """The same activation on the host: silu(gate) * up, f32 [rows, columns], into `gate`."""
        up *= gate
        layers.over_one_plus_exp(up, gate, -1.0)

    def dense_ffn(self, g: Graph, w: Weights, layer: int, x: Tensor) -> Tensor:
        """x + SwiGLU(norm(x)) [n_embd, T], for models without experts."""
        p = f"blk.{layer}."
        normed = layers.rms_norm(g, x, w[p + self.ffn_norm + ".weight"], self.hyper.rms_eps)
        return g.op("add", layers.swiglu(g, w, p + "ffn_{}", normed), x)

    def shared_expert(self, g: Graph, w: Weights, layer: int, hidden: Tensor) -> Tensor:
        """[n_embd, T]; only called where `has_shared_expert`."""
        raise NotImplementedError

    def combine(
        self, g: Graph, w: Weights, layer: int, x: Tensor, routed: Routed, outputs: Tensor
    ) -> Tensor:
        """x + sum over the k experts of weight * output, always in the router's order.

        `outputs` f32 [n_embd, k, T]; result f32 [n_embd, T].
        """
        total = layers.weighted_sum(g, outputs, routed.weights)
        if self.has_shared_expert:
            total = g.op("add", total, self.shared_expert(g, w, layer, routed.hidden))
        return g.op("add", total, x)

    def head(self, g: Graph, w: Weights, x: Tensor) -> Tensor:
        """Logits f32 [n_vocab, rows]; the embedding serves as head where there is none."""
        normed = layers.rms_norm(g, x, w["output_norm.weight"], self.hyper.rms_eps)
        weight = w.get("output.weight")
        return g.op("mul_mat", w["token_embd.weight"] if weight is None else weight, normed)
