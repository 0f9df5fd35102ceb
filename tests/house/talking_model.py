"""A tiny random model with experts, a tokenizer and a chat template: runs every verb in no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

WIDTH, FF, LAYERS, HEADS, EXPERTS, USED = 64, 32, 2, 2, 8, 2
SPECIAL = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_talking_model(path: Path) -> Path:
    """Architecture `llama` with Mixtral's tensors; a token for every byte, and a few more."""
    writer = GGUFWriter(path, "llama")
    for key, value in _keys().items():
        if isinstance(value, float):
            writer.add_float32(f"llama.{key}", value)
        else:
            writer.add_uint32(f"llama.{key}", value)
    _add_tokenizer(writer)
    rng = np.random.default_rng(1)
    for name, shape in _shapes().items():
        noise = rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
        writer.add_tensor(name, noise + 1 if name.endswith("norm.weight") else noise)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _keys() -> dict[str, int | float]:
    return {
        "block_count": LAYERS,
        "context_length": 4096,
        "embedding_length": WIDTH,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "expert_count": EXPERTS,
        "expert_used_count": USED,
    }


def _add_tokenizer(writer: GGUFWriter) -> None:
    tokens = [*_byte_letters(), "he", *SPECIAL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * len(SPECIAL))
    writer.add_array("tokenizer.ggml.merges", ["h e"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_chat_template(TEMPLATE)


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def _shapes() -> dict[str, tuple[int, ...]]:
    """In numpy order."""
    n_vocab = 257 + len(SPECIAL)
    layer: dict[str, Any] = {
        "attn_norm": (WIDTH,),
        **{f"attn_{part}": (WIDTH, WIDTH) for part in ("q", "k", "v", "output")},
        "ffn_norm": (WIDTH,),
        "ffn_gate_inp": (EXPERTS, WIDTH),
        "ffn_gate_exps": (EXPERTS, FF, WIDTH),
        "ffn_up_exps": (EXPERTS, FF, WIDTH),
        "ffn_down_exps": (EXPERTS, WIDTH, FF),
    }
    shapes = {"token_embd.weight": (n_vocab, WIDTH), "output_norm.weight": (WIDTH,)}
    for number in range(LAYERS):
        shapes |= {f"blk.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes
