"""Architecture `gpt-oss`: attention sinks, sliding window in even layers, biases everywhere,
clamped SwiGLU, YaRN.

transformers keeps gate and up interleaved and input-major; GGUF keeps them apart and row-major.
The window is shorter than the tests' texts. YaRN's correction range is rounded (`truncate`), as
ggml always does; the published models set it to false, a difference neither library bridges.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from reference.writers import shared

WIDTH, FF, HEADS, HEADS_KV, HEAD_DIM = 64, 96, 8, 2, 32
EXPERTS, USED = 16, 2
EPS, THETA, WINDOW = 1e-5, 150000.0, 16
YARN_FACTOR, YARN_CONTEXT = 32.0, 64

_LAYER_NAMES = {
    **shared.LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}


def _config() -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(
        vocab_size=shared.N_VOCAB,
        hidden_size=WIDTH,
        intermediate_size=FF,
        head_dim=HEAD_DIM,
        num_hidden_layers=shared.N_LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS_KV,
        num_local_experts=EXPERTS,
        num_experts_per_tok=USED,
        sliding_window=WINDOW,
        rms_norm_eps=EPS,
        max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": THETA,
            "factor": YARN_FACTOR,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": True,
            "original_max_position_embeddings": YARN_CONTEXT,
        },
    )


def _interleave(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """[E, ff, ...] twice -> [E, 2 ff, ...]: gate rows at even, up rows at odd places."""
    return np.stack([gate, up], axis=2).reshape(gate.shape[0], -1, *gate.shape[2:])


def _to_torch(weights: shared.Weights) -> dict[str, np.ndarray]:
    state: dict[str, np.ndarray] = {}
    for name, weight in weights.items():
        if name.endswith("attn_sinks.weight"):
            state[f"model.layers.{name.split('.')[1]}.self_attn.sinks"] = weight
        elif "_exps." not in name:
            state[shared.torch_name(name, layer_names=_LAYER_NAMES)] = weight
    for i in range(shared.N_LAYERS):
        experts = f"model.layers.{i}.mlp.experts"
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (
                weights[f"blk.{i}.ffn_{part}_exps.{kind}"] for part in ("gate", "up", "down")
            )
            gate_up = _interleave(gate, up)
            if kind == "weight":
                gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
            state[f"{experts}.gate_up_proj{suffix}"] = gate_up
            state[f"{experts}.down_proj{suffix}"] = down
    return state


_LAYER = {
    **shared.attention_shapes(WIDTH, HEADS, HEADS_KV, HEAD_DIM, bias=True),
    "attn_output.bias": (WIDTH,),
    "attn_sinks.weight": (HEADS,),
    "post_attention_norm.weight": (WIDTH,),
    **shared.expert_shapes(WIDTH, FF, EXPERTS),
    "ffn_gate_inp.bias": (EXPERTS,),
    "ffn_gate_exps.bias": (EXPERTS, FF),
    "ffn_up_exps.bias": (EXPERTS, FF),
    "ffn_down_exps.bias": (EXPERTS, WIDTH),
}
MODEL = shared.Architecture(
    name="gpt-oss",
    metadata={
        **shared.common_metadata(
            width=WIDTH,
            heads=HEADS,
            heads_kv=HEADS_KV,
            head_dim=HEAD_DIM,
            ff=FF,
            eps=EPS,
            theta=THETA,
        ),
        "context_length": 2048,
        "expert_count": EXPERTS,
        "expert_used_count": USED,
        "expert_feed_forward_length": FF,
        "attention.sliding_window": WINDOW,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": YARN_FACTOR,
        "rope.scaling.original_context_length": YARN_CONTEXT,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
    },
    shapes={**shared.trunk_shapes(WIDTH), **shared.in_every_layer(_LAYER)},
    config=_config,
    to_torch=_to_torch,
    gate_up_gain=4.0,  # reaches the clamp at 7
)
