"""Architecture `qwen2moe`: q/k/v biases, a gated shared expert, top-k weights not renormalised."""

from __future__ import annotations

from typing import Any

import numpy as np
from reference.writers import shared

WIDTH, FF, FF_SHARED, HEADS, HEADS_KV, HEAD_DIM = 64, 48, 80, 4, 2, 16
EXPERTS, USED = 16, 4
EPS, THETA = 1e-6, 1e6


def _config() -> Any:
    from transformers import Qwen2MoeConfig

    return Qwen2MoeConfig(
        vocab_size=shared.N_VOCAB,
        hidden_size=WIDTH,
        intermediate_size=2 * FF,
        moe_intermediate_size=FF,
        shared_expert_intermediate_size=FF_SHARED,
        num_hidden_layers=shared.N_LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS_KV,
        num_experts=EXPERTS,
        num_experts_per_tok=USED,
        norm_topk_prob=False,
        rms_norm_eps=EPS,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )


def _to_torch(weights: shared.Weights) -> dict[str, np.ndarray]:
    state = shared.to_torch(weights)
    for name in state:
        if name.endswith("shared_expert_gate.weight"):
            state[name] = state[name][None, :]
    return state


_LAYER = {
    **shared.attention_shapes(WIDTH, HEADS, HEADS_KV, HEAD_DIM, bias=True),
    "ffn_norm.weight": (WIDTH,),
    **shared.expert_shapes(WIDTH, FF, EXPERTS),
    "ffn_gate_inp_shexp.weight": (WIDTH,),
    "ffn_gate_shexp.weight": (FF_SHARED, WIDTH),
    "ffn_up_shexp.weight": (FF_SHARED, WIDTH),
    "ffn_down_shexp.weight": (WIDTH, FF_SHARED),
}
MODEL = shared.Architecture(
    name="qwen2moe",
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
        "expert_shared_feed_forward_length": FF_SHARED,
    },
    shapes={**shared.trunk_shapes(WIDTH), **shared.in_every_layer(_LAYER)},
    config=_config,
    to_torch=_to_torch,
)
