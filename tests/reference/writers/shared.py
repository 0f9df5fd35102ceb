"""What the tiny models of all architectures share: shapes, and the two naming schemes.

Shapes are in numpy order (outermost first), which is the reverse of GGUF's. Sizes are small and
uneven on purpose: a swapped dimension or a wrong head count must not fit by chance.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Weights = Mapping[str, np.ndarray]
"""float32 arrays by GGUF tensor name."""
Shapes = dict[str, tuple[int, ...]]

N_VOCAB = 300
N_LAYERS = 3


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A tiny model: what its GGUF holds and how transformers sees the same weights."""

    name: str
    """`general.architecture`."""
    metadata: dict[str, Any]
    """Keys without the architecture's prefix."""
    shapes: Shapes
    config: Callable[[], Any]
    """Builds the transformers config; imports transformers."""
    to_torch: Callable[[Weights], dict[str, np.ndarray]]
    """GGUF weights as a transformers state dict."""
    gate_up_gain: float = 1.3
    """Scale of the experts' gate and up outputs, for inputs of scale 1."""
    constants: dict[str, np.ndarray] | None = None
    """Tensors that follow from the config (rope factors) and are not in the state dict."""

    @property
    def n_experts(self) -> int:
        return self.metadata.get("expert_count", 0)

    @property
    def n_used(self) -> int:
        return self.metadata.get("expert_used_count", 0)


def common_metadata(
    *, width: int, heads: int, heads_kv: int, head_dim: int, ff: int, eps: float, theta: float
) -> dict[str, Any]:
    return {
        "block_count": N_LAYERS,
        "context_length": 512,
        "embedding_length": width,
        "feed_forward_length": ff,
        "attention.head_count": heads,
        "attention.head_count_kv": heads_kv,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": eps,
        "rope.dimension_count": head_dim,
        "rope.freq_base": theta,
        "vocab_size": N_VOCAB,
    }


def trunk_shapes(width: int, *, tied: bool = False) -> Shapes:
    shapes: Shapes = {
        "token_embd.weight": (N_VOCAB, width),
        "output_norm.weight": (width,),
    }
    return shapes if tied else {**shapes, "output.weight": (N_VOCAB, width)}


def attention_shapes(
    width: int, heads: int, heads_kv: int, head_dim: int, *, bias: bool = False
) -> Shapes:
    """One layer's attention, without the `blk.N.` prefix."""
    q, kv = heads * head_dim, heads_kv * head_dim
    shapes: Shapes = {
        "attn_norm.weight": (width,),
        "attn_q.weight": (q, width),
        "attn_k.weight": (kv, width),
        "attn_v.weight": (kv, width),
        "attn_output.weight": (width, q),
    }
    if bias:
        shapes |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    return shapes


def expert_shapes(width: int, ff: int, experts: int) -> Shapes:
    """One layer's router and experts, without the `blk.N.` prefix."""
    return {
        "ffn_gate_inp.weight": (experts, width),
        "ffn_gate_exps.weight": (experts, ff, width),
        "ffn_up_exps.weight": (experts, ff, width),
        "ffn_down_exps.weight": (experts, width, ff),
    }


def in_every_layer(shapes: Shapes) -> Shapes:
    return {f"blk.{i}.{name}": shape for i in range(N_LAYERS) for name, shape in shapes.items()}


TRUNK_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}


def torch_name(name: str, *, layer_names: Mapping[str, str] = LAYER_NAMES) -> str:
    """`blk.2.attn_q.bias` -> `model.layers.2.self_attn.q_proj.bias`."""
    if name in TRUNK_NAMES:
        return TRUNK_NAMES[name]
    layer, tensor, kind = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(\w+)", name).groups()  # type: ignore[union-attr]
    return f"model.layers.{layer}.{layer_names[tensor]}.{kind}"


def to_torch(weights: Weights) -> dict[str, np.ndarray]:
    """Rename; transformers fuses gate and up of all experts into one tensor, gate rows first."""
    state = {torch_name(n): w for n, w in weights.items() if "_exps." not in n}
    for name, gate in weights.items():
        if name.endswith("ffn_gate_exps.weight"):
            experts = f"model.layers.{name.split('.')[1]}.mlp.experts"
            up, down = (weights[name.replace("gate", part)] for part in ("up", "down"))
            state[f"{experts}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
            state[f"{experts}.down_proj"] = down
    return state
