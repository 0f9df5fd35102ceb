"""Architecture `olmoe`: q and k norms over the whole width, top-k weights not renormalised."""

from __future__ import annotations

from typing import Any

from reference.writers import shared

WIDTH, FF, HEADS, HEAD_DIM = 64, 48, 4, 16
EXPERTS, USED = 16, 4
EPS, THETA = 1e-5, 1e4


def _config() -> Any:
    from transformers import OlmoeConfig

    return OlmoeConfig(
        vocab_size=shared.N_VOCAB,
        hidden_size=WIDTH,
        intermediate_size=FF,
        num_hidden_layers=shared.N_LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_experts=EXPERTS,
        num_experts_per_tok=USED,
        norm_topk_prob=False,
        rms_norm_eps=EPS,
        max_position_embeddings=512,
        pad_token_id=None,
        eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )


_LAYER = {
    **shared.attention_shapes(WIDTH, HEADS, HEADS, HEAD_DIM),
    "attn_q_norm.weight": (WIDTH,),
    "attn_k_norm.weight": (WIDTH,),
    "ffn_norm.weight": (WIDTH,),
    **shared.expert_shapes(WIDTH, FF, EXPERTS),
}
MODEL = shared.Architecture(
    name="olmoe",
    metadata={
        **shared.common_metadata(
            width=WIDTH,
            heads=HEADS,
            heads_kv=HEADS,
            head_dim=HEAD_DIM,
            ff=FF,
            eps=EPS,
            theta=THETA,
        ),
        "expert_count": EXPERTS,
        "expert_used_count": USED,
    },
    shapes={**shared.trunk_shapes(WIDTH), **shared.in_every_layer(_LAYER)},
    config=_config,
    to_torch=shared.to_torch,
)
