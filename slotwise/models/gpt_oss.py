"""`gpt-oss`: gpt-oss-20b and gpt-oss-120b."""

from __future__ import annotations

import numpy as np

from slotwise.kernels.graph import Graph, Tensor, Weights
from slotwise.kernels.lib import SORT_DESCENDING
from slotwise.models import layers
from slotwise.models.base import Architecture, Routed, TensorSpec

SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0


class GptOss(Architecture):
    """Attention sinks, every other layer with a sliding window, biases everywhere, YaRN."""

    name = "gpt-oss"
    ffn_norm = "post_attention_norm"

    def attention_tensors(self) -> list[TensorSpec]:
        specs = [TensorSpec(s.name, s.shape) for s in super().attention_tensors()]
        return [*specs, TensorSpec("attn_sinks.weight", (self.hyper.n_heads,))]

    def feed_forward_tensors(self) -> list[TensorSpec]:
        h = self.hyper
        biases = [
            TensorSpec("ffn_gate_inp.bias", (h.n_experts,)),
            TensorSpec("ffn_gate_exps.bias", (h.n_ff_expert, h.n_experts)),
            TensorSpec("ffn_up_exps.bias", (h.n_ff_expert, h.n_experts)),
            TensorSpec("ffn_down_exps.bias", (h.n_embd, h.n_experts)),
        ]
        return super().feed_forward_tensors() + biases

    def uses_window(self, layer: int) -> bool:
        return self.hyper.sliding_window > 0 and layer % 2 == 0

    def router(self, g: Graph, w: Weights, layer: int, x: Tensor) -> Routed:
        """The k largest logits, then softmax over those k only."""
        h, p = self.hyper, f"blk.{layer}."
        hidden = layers.rms_norm(g, x, w[p + self.ffn_norm + ".weight"], h.rms_eps)
        logits = layers.scores(g, w, p + "ffn_gate_inp", hidden)
        ranking = g.op("argsort", logits, SORT_DESCENDING)
        chosen = layers.pick(g, logits, ranking, h.n_used)
        n_tokens = x.contents.ne[1]
        flat = g.op("soft_max", g.reshape(chosen, h.n_used, n_tokens))
        weights = g.reshape(flat, 1, h.n_used, n_tokens)
        return Routed(hidden, ranking, weights, logits)

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
        """Each projection with the expert's own bias, and the clamped SwiGLU of gpt-oss."""

        def project(name: str, weight: Tensor, inputs: Tensor) -> Tensor:
            result = g.op("mul_mat_id", weight, inputs, slot_ids)
            return g.op("add_id", result, w[f"blk.{layer}.ffn_{name}_exps.bias"], expert_ids)

        gate = project("gate", slots.gate, rows)
        up = project("up", slots.up, rows)
        activated = g.op("swiglu_oai", gate, up, SWIGLU_ALPHA, SWIGLU_LIMIT)
        return project("down", slots.down, activated)

    def activate(self, gate: np.ndarray, up: np.ndarray) -> None:
        """min(gate, L) * sigmoid(alpha * min(gate, L)) * (clip(up, -L, L) + 1), into `gate`."""
        np.minimum(gate, SWIGLU_LIMIT, out=gate)
        np.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT, out=up)
        up += 1.0
        up *= gate
        layers.over_one_plus_exp(up, gate, -SWIGLU_ALPHA)
