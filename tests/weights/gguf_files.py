"""Writes tiny GGUF files with gguf.GGUFWriter, and damages them on purpose. Weights are noise."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGUFEndian, GGUFValueType, GGUFWriter

from slotwise.weights.ggml_types import GGML_TYPES, tensor_bytes

TYPE_IDS = {kind.name: kind.id for kind in GGML_TYPES.values()}
Tensors = dict[str, tuple[str, tuple[int, ...]]]

MOE_KEYS: dict[str, Any] = {
    "general.name": "tiny",
    "qwen3moe.block_count": 2,
    "qwen3moe.context_length": 128,
    "qwen3moe.embedding_length": 32,
    "qwen3moe.expert_count": 4,
    "qwen3moe.expert_used_count": 2,
    "tokenizer.ggml.model": "none",
}


def moe_tensors(*layers: str | tuple[str, str, str], n_embd: int = 32, n_ff: int = 64) -> Tensors:
    """Embedding, norms, routers and 4 experts a layer; `layers` gives the experts' types."""
    tensors: Tensors = {"token_embd.weight": ("F32", (n_embd, 8))}
    for layer, kinds in enumerate(layers or ("F32", "F32")):
        gate, up, down = (kinds, kinds, kinds) if isinstance(kinds, str) else kinds
        tensors |= {
            f"blk.{layer}.attn_norm.weight": ("F32", (n_embd,)),
            f"blk.{layer}.ffn_gate_inp.weight": ("F32", (n_embd, 4)),
            f"blk.{layer}.ffn_gate_exps.weight": (gate, (n_embd, n_ff, 4)),
            f"blk.{layer}.ffn_up_exps.weight": (up, (n_embd, n_ff, 4)),
            f"blk.{layer}.ffn_down_exps.weight": (down, (n_ff, n_embd, 4)),
        }
    return tensors


def write_model(
    path: Path,
    keys: Mapping[str, Any] = MOE_KEYS,
    tensors: Tensors | None = None,
    *,
    arch: str = "qwen3moe",
    shards: int = 1,
    small_first_shard: bool = False,
    endianess: GGUFEndian = GGUFEndian.LITTLE,
) -> list[Path]:
    """Writes `path`, or `shards` files beside it named after it; returns the files in order."""
    tensors = moe_tensors() if tensors is None else tensors
    limit = -(-len(tensors) // (shards - small_first_shard)) if shards > 1 else 0
    writer = GGUFWriter(
        path,
        arch,
        split_max_tensors=limit,
        small_first_shard=small_first_shard,
        endianess=endianess,
    )
    for key, value in keys.items():
        writer.add_key_value(key, value, _value_type(value))
    noise = np.random.default_rng(0)
    for name, (kind, shape) in tensors.items():
        # int8 with an explicit shape: the writer takes any type id this way, Q2_0 too.
        data = noise.integers(-128, 128, tensor_bytes(TYPE_IDS[kind], shape), np.int8)
        type_id: Any = TYPE_IDS[kind]
        writer.add_tensor(name, data, raw_shape=shape[::-1], raw_dtype=type_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if shards == 1:
        return [path]
    return [path.with_name(f"{path.stem}-{i:05}-of-{shards:05}.gguf") for i in range(1, shards + 1)]


def _value_type(value: Any) -> GGUFValueType:
    if isinstance(value, int) and not isinstance(value, bool):
        return GGUFValueType.UINT32 if value >= 0 else GGUFValueType.INT32
    return GGUFValueType.get_type(value)


class Entry(NamedTuple):
    """Where the fields of one tensor's entry lie in the file."""

    dims: int
    type: int
    offset: int


def tensor_entry(data: bytes | bytearray, name: str) -> Entry:
    start = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    (n_dims,) = struct.unpack_from("<I", data, start)
    return Entry(start + 4, start + 4 + 8 * n_dims, start + 8 + 8 * n_dims)


def edit_tensor(
    path: Path,
    name: str,
    *,
    dims: tuple[int, ...] = (),
    kind: int | None = None,
    offset: int | None = None,
) -> None:
    """Overwrites fields of one tensor's entry in place."""
    data = bytearray(path.read_bytes())
    entry = tensor_entry(data, name)
    for index, dim in enumerate(dims):
        struct.pack_into("<Q", data, entry.dims + 8 * index, dim)
    if kind is not None:
        struct.pack_into("<I", data, entry.type, kind)
    if offset is not None:
        struct.pack_into("<Q", data, entry.offset, offset)
    path.write_bytes(data)


def edit_key(path: Path, key: str, value: bytes) -> None:
    """Overwrites a key's value in place with bytes of the same length."""
    data = bytearray(path.read_bytes())
    start = data.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key) + 4
    data[start : start + len(value)] = value
    path.write_bytes(data)
