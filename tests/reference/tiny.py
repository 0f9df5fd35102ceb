"""Tiny random models: written as GGUF the way llama.cpp's converter writes them, and run by
transformers as the reference.

`build(name, folder)` writes one. The reference always runs on the values that are in the file
(quantised tensors are dequantised), so only the arithmetic of the engine under test differs. No
tokenizer: `tokenizer.ggml.model` is "none" and tests give token ids.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from reference.quantise import BLOCKS, dequantise, quantise
from reference.writers import gpt_oss, llama, olmoe, qwen2moe, qwen3moe
from reference.writers.shared import N_VOCAB, Architecture

ARCHITECTURES: dict[str, Architecture] = {
    "llama": llama.DENSE,
    "llama3": llama.LLAMA3,
    "mixtral": llama.MIXTRAL,
    "qwen3moe": qwen3moe.MODEL,
    "qwen2moe": qwen2moe.MODEL,
    "olmoe": olmoe.MODEL,
    "gpt-oss": gpt_oss.MODEL,
}
MOE = tuple(name for name, a in ARCHITECTURES.items() if a.n_experts)
SEED = 20261201

TypeOf = Callable[[str], str]
"""Tensor name -> type name."""


def everything_f32(_name: str) -> str:
    return "F32"


def experts_in(type_name: str) -> TypeOf:
    """Expert matrices in `type_name`, the rest in F32."""
    return lambda name: type_name if name.endswith("_exps.weight") else "F32"


def by_part(types: Mapping[str, str]) -> TypeOf:
    """The type of the first key that occurs in the tensor's name; F32 if none does."""
    return lambda name: next((t for part, t in types.items() if part in name), "F32")


@dataclass(frozen=True, eq=False)
class TinyModel:
    """A file, and transformers over the same weights."""

    path: Path
    architecture: Architecture
    weights: dict[str, np.ndarray]
    """float32, as stored in the file."""

    @property
    def n_experts(self) -> int:
        return self.architecture.n_experts

    @property
    def n_used(self) -> int:
        return self.architecture.n_used

    @cached_property
    def torch_model(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        model = AutoModelForCausalLM.from_config(
            self.architecture.config(), attn_implementation="eager"
        )
        model.set_experts_implementation("eager")
        constants = self.architecture.constants or {}
        weights = {n: w for n, w in self.weights.items() if n not in constants}
        state = self.architecture.to_torch(weights)
        model.load_state_dict({n: torch.tensor(w) for n, w in state.items()})
        return model.float().eval()

    def torch_logits(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 [len(tokens), vocabulary]."""
        import torch

        with torch.no_grad():
            logits = self.torch_model(torch.tensor([list(tokens)]), use_cache=False).logits
        return logits[0].numpy()


def build(
    name: str, directory: Path, *, type_of: TypeOf = everything_f32, label: str = "f32"
) -> TinyModel:
    """Write `<name>-<label>.gguf` into `directory`: the same weights at every call."""
    architecture = ARCHITECTURES[name]
    path = directory / f"{name}-{label}.gguf"
    values = {n: random_weight(n, architecture) for n in architecture.shapes}
    values |= architecture.constants or {}
    stored = {n: (type_of(n), quantise(v, type_of(n))) for n, v in values.items()}
    write_gguf(path, architecture, stored)
    weights = {n: dequantise(rows, type_name) for n, (type_name, rows) in stored.items()}
    return TinyModel(path, architecture, weights)


def random_weight(name: str, architecture: Architecture) -> np.ndarray:
    """Every parameter is random, norms and biases too, at a scale that keeps logits at a few
    units and lets every tensor move them; each tensor has a seed of its own."""
    shape = architecture.shapes[name]
    rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    noise = rng.standard_normal(shape, np.float32)
    if name.endswith("norm.weight"):
        return 1 + 0.3 * noise
    if name.endswith((".bias", "attn_sinks.weight")):
        return 0.5 * noise
    if name == "token_embd.weight":
        return 0.3 * noise
    gain = 1.3
    if "ffn_gate_inp" in name:
        gain = 3.0
    elif "gate_exps" in name or "up_exps" in name:
        gain = architecture.gate_up_gain
    return noise * np.float32(gain / np.sqrt(shape[-1]))


def write_gguf(
    path: Path, architecture: Architecture, stored: dict[str, tuple[str, np.ndarray]]
) -> None:
    """`stored`: tensor name -> type name and uint8 rows."""
    writer = GGUFWriter(path, architecture.name)
    add: dict[type, Callable[[str, Any], None]] = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in architecture.metadata.items():
        add[type(value)](f"{architecture.name}.{key}", value)
    writer.add_string("tokenizer.ggml.model", "none")
    for name, (type_name, rows) in stored.items():
        type_id, block, nbytes = BLOCKS[type_name]
        shape = (*rows.shape[:-1], rows.shape[-1] // nbytes * block)
        # Given as a float tensor with a raw type: gguf's table knows no Q2_0.
        writer.add_tensor_info(name, shape, np.dtype(np.float32), rows.nbytes, type_id)  # type: ignore[arg-type]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, rows in stored.values():
        writer.write_tensor_data(rows)
    writer.close()


def random_tokens(n: int, *, seed: int = 0) -> list[int]:
    return np.random.default_rng([SEED, seed]).integers(0, N_VOCAB, n).tolist()
