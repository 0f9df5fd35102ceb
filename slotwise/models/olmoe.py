"""`olmoe`: OLMoE-1B-7B."""

from __future__ import annotations

from slotwise.kernels.graph import Graph, Tensor, Weights
from slotwise.models import layers
from slotwise.models.base import Architecture, TensorSpec


class Olmoe(Architecture):
    """RMS norm over the whole width of queries and keys, before they are split into heads."""

    name = "olmoe"

    def attention_tensors(self) -> list[TensorSpec]:
        h = self.hyper
        norms = [
            TensorSpec("attn_q_norm.weight", (h.head_k * h.n_heads,)),
            TensorSpec("attn_k_norm.weight", (h.width_k,)),
        ]
        return super().attention_tensors() + norms

    def norm_qk(
        self, g: Graph, w: Weights, layer: int, q: Tensor, k: Tensor
    ) -> tuple[Tensor, Tensor]:
        eps, p = self.hyper.rms_eps, f"blk.{layer}."
        q = layers.rms_norm(g, q, w[p + "attn_q_norm.weight"], eps)
        k = layers.rms_norm(g, k, w[p + "attn_k_norm.weight"], eps)
        return super().norm_qk(g, w, layer, q, k)
