"""Architecture `qwen3moe`: per-head q and k norms, top-k weights renormalised.

256 wide, so that every quantisation type fits its rows; head_dim * heads differs from the width.
"""

from __future__ import annotations

from typing import Any

from reference.writers import shared

WIDTH, FF, HEADS, HEADS_KV, HEAD_DIM = 256, 256, 8, 2, 64
EXPERTS, USED = 8, 3
EPS, THETA = 1e-6, 1e6


def _config() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=shared.N_VOCAB,
        hidden_size=WIDTH,
        intermediate_size=2 * FF,
        moe_intermediate_size=FF,
        num_hidden_layers=shared.N_LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS_KV,
        head_dim=HEAD_DIM,  # pyright: ignore[reportCallIssue]  (undeclared, but read)
        num_experts=EXPERTS,
        num_experts_per_tok=USED,
        norm_topk_prob=True,
        rms_norm_eps=EPS,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )


_LAYER = {
    **shared.attention_shapes(WIDTH, HEADS, HEADS_KV, HEAD_DIM),
    "attn_q_norm.weight": (HEAD_DIM,),
    "attn_k_norm.weight": (HEAD_DIM,),
    "ffn_norm.weight": (WIDTH,),
    **shared.expert_shapes(WIDTH, FF, EXPERTS),
}
MODEL = shared.Architecture(
    name="qwen3moe",
    metadata={
        **shared.common_metadata(
            width=WIDTH,
            heads=HEADS,
            heads_kv=HEADS_KV,
            head_dim=HEAD_DIM,
            ff=2 * FF,
            eps=EPS,
            theta=THETA,
        ),
        "expert_count": EXPERTS,
        "expert_used_count": USED,
        "expert_feed_forward_length": FF,
    },
    shapes={**shared.trunk_shapes(WIDTH), **shared.in_every_layer(_LAYER)},
    config=_config,
    to_torch=shared.to_torch,
)
