"""`qwen2moe`: Qwen1.5-MoE and Qwen2-57B-A14B."""

from __future__ import annotations

from slotwise.kernels.graph import Graph, Tensor, Weights
from slotwise.models import layers
from slotwise.models.base import Architecture, TensorSpec


class Qwen2Moe(Architecture):
    """A shared expert with a sigmoid gate beside the routed ones; biases on q, k and v."""

    name = "qwen2moe"
    has_shared_expert = True

    def feed_forward_tensors(self) -> list[TensorSpec]:
        h = self.hyper
        shared = [
            TensorSpec("ffn_gate_inp_shexp.weight", (h.n_embd,)),
            TensorSpec("ffn_gate_shexp.weight", (h.n_embd, h.n_ff_shared)),
            TensorSpec("ffn_up_shexp.weight", (h.n_embd, h.n_ff_shared)),
            TensorSpec("ffn_down_shexp.weight", (h.n_ff_shared, h.n_embd)),
        ]
        return super().feed_forward_tensors() + shared

    def shared_expert(self, g: Graph, w: Weights, layer: int, hidden: Tensor) -> Tensor:
        p = f"blk.{layer}."
        gate = g.op("sigmoid", g.op("mul_mat", w[p + "ffn_gate_inp_shexp.weight"], hidden))
        return g.op("mul", layers.swiglu(g, w, p + "ffn_{}_shexp", hidden), gate)
