"""`qwen3moe`: Qwen3-30B-A3B and its kin."""

from __future__ import annotations

from slotwise.kernels.graph import Graph, Tensor, Weights
from slotwise.models import layers
from slotwise.models.base import Architecture, TensorSpec


class Qwen3Moe(Architecture):
    """RMS norm per head on queries and keys; expert weights normalised."""

    name = "qwen3moe"
    normalises_weights = True

    def attention_tensors(self) -> list[TensorSpec]:
        head = self.hyper.head_k
        norms = [
            TensorSpec("attn_q_norm.weight", (head,)),
            TensorSpec("attn_k_norm.weight", (head,)),
        ]
        return super().attention_tensors() + norms

    def norm_qk(
        self, g: Graph, w: Weights, layer: int, q: Tensor, k: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k = super().norm_qk(g, w, layer, q, k)
        eps, p = self.hyper.rms_eps, f"blk.{layer}."
        return (
            layers.rms_norm(g, q, w[p + "attn_q_norm.weight"], eps),
            layers.rms_norm(g, k, w[p + "attn_k_norm.weight"], eps),
        )
