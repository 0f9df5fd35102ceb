"""Architecture `llama`: dense with tied embeddings, with Llama 3's rope factors, and Mixtral.

Rows of q and k are stored permuted: GGUF's llama rotates neighbouring pairs (2i, 2i+1), while
transformers rotates (i, i + head_dim/2).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from reference.writers import shared
from reference.writers.shared import Architecture, Weights

WIDTH, FF, HEADS, HEADS_KV, HEAD_DIM = 64, 96, 4, 2, 16
EPS, THETA = 1e-5, 1e4
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _interleaved_to_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo the permutation of the rows of q or k."""
    return rows.reshape(heads, -1, 2, WIDTH).swapaxes(1, 2).reshape(rows.shape)


def _to_torch(weights: Weights) -> dict[str, np.ndarray]:
    state = shared.to_torch({n: w for n, w in weights.items() if n != "rope_freqs.weight"})
    for name in state:
        if name.endswith("q_proj.weight"):
            state[name] = _interleaved_to_halves(state[name], HEADS)
        elif name.endswith("k_proj.weight"):
            state[name] = _interleaved_to_halves(state[name], HEADS_KV)
    return state


def _config_values(ff: int) -> dict[str, Any]:
    return {
        "vocab_size": shared.N_VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": ff,
        "num_hidden_layers": shared.N_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS_KV,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": EPS,
        "max_position_embeddings": 512,
    }


def _dense_config(*, tied: bool, rope: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_config_values(FF), tie_word_embeddings=tied, rope_parameters=rope)


def _llama3_factors() -> np.ndarray:
    """Per frequency divisor, as the converter computes it from the same settings."""
    factor, low, high = (LLAMA3_ROPE[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = LLAMA3_ROPE["original_max_position_embeddings"]
    factors = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * math.pi * THETA ** (i / HEAD_DIM)
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def _metadata(ff: int) -> dict[str, Any]:
    return shared.common_metadata(
        width=WIDTH,
        heads=HEADS,
        heads_kv=HEADS_KV,
        head_dim=HEAD_DIM,
        ff=ff,
        eps=EPS,
        theta=THETA,
    )


def _shapes(feed_forward: shared.Shapes, *, tied: bool) -> shared.Shapes:
    layer = shared.attention_shapes(WIDTH, HEADS, HEADS_KV, HEAD_DIM)
    layer |= {"ffn_norm.weight": (WIDTH,), **feed_forward}
    return {**shared.trunk_shapes(WIDTH, tied=tied), **shared.in_every_layer(layer)}


DENSE_FF: shared.Shapes = {
    "ffn_gate.weight": (FF, WIDTH),
    "ffn_up.weight": (FF, WIDTH),
    "ffn_down.weight": (WIDTH, FF),
}
DENSE = Architecture(
    name="llama",
    metadata=_metadata(FF),
    shapes=_shapes(DENSE_FF, tied=True),
    config=lambda: _dense_config(tied=True, rope={"rope_type": "default", "rope_theta": THETA}),
    to_torch=lambda weights: {
        **_to_torch(weights),
        "lm_head.weight": weights["token_embd.weight"],
    },
)
LLAMA3 = Architecture(
    name="llama",
    metadata=_metadata(FF),
    shapes=_shapes(DENSE_FF, tied=False),
    config=lambda: _dense_config(tied=False, rope=LLAMA3_ROPE),
    to_torch=_to_torch,
    constants={"rope_freqs.weight": _llama3_factors()},
)

MIXTRAL_FF, EXPERTS, USED = 48, 16, 2


def _mixtral_config() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(
        **_config_values(MIXTRAL_FF),
        num_local_experts=EXPERTS,
        num_experts_per_tok=USED,
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )


MIXTRAL = Architecture(
    name="llama",
    metadata={**_metadata(MIXTRAL_FF), "expert_count": EXPERTS, "expert_used_count": USED},
    shapes=_shapes(shared.expert_shapes(WIDTH, MIXTRAL_FF, EXPERTS), tied=False),
    config=_mixtral_config,
    to_torch=_to_torch,
)
