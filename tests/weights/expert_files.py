"""Tiny GGUF files with experts of any type, and the slot images that are expected of them.

The bytes are random: nothing here computes with them. Only the tensors that experts need are there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np

from slotwise.weights.ggml_types import GGML_TYPES, row_bytes
from slotwise.weights.layout import ExpertLayout, expert_layout
from slotwise.weights.shards import ModelFile, open_model
from slotwise.weights.widen import widen_q2_0

TYPE_IDS = {kind.name: kind.id for kind in GGML_TYPES.values()}
PROJECTIONS = ("gate", "up", "down")


@dataclass
class ExpertFile:
    """A written model, and for each (moe_index, expert, projection) its bytes in the file."""

    path: Path
    raw: dict[tuple[int, int, str], bytes] = field(default_factory=dict)
    types: list[tuple[str, str, str]] = field(default_factory=list)

    def open(self) -> tuple[ModelFile, ExpertLayout]:
        model = open_model(self.path)
        layout = expert_layout(model)
        assert layout is not None
        return model, layout

    def image(self, moe_index: int, expert: int) -> bytes:
        """The slot image, put together without the code under test (but for widening)."""
        image = b""
        for projection, kind in zip(PROJECTIONS, self.types[moe_index], strict=True):
            raw = self.raw[moe_index, expert, projection]
            if kind == "Q2_0":
                raw = widen_q2_0(np.frombuffer(raw, np.uint8)).tobytes()
            image += bytes(-len(image) % 64) + raw
        return image + bytes(-len(image) % 4096)

    def images(self) -> bytes:
        """All slot images in (moe_index, expert) order: experts.bin."""
        n_experts = 1 + max(expert for _, expert, _ in self.raw)
        return b"".join(
            self.image(moe_index, expert)
            for moe_index in range(len(self.types))
            for expert in range(n_experts)
        )


def write_experts(
    path: Path,
    types: list[str | tuple[str, str, str]],
    *,
    n_experts: int = 3,
    n_embd: int = 64,
    n_ff: int = 128,
    layers: list[int] | None = None,
    tensors_per_shard: int = 0,
    seed: int = 0,
) -> ExpertFile:
    """A model at `path` (a split one beside it) with `types[i]` in its i-th layer with experts."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "qwen3moe", split_max_tensors=tensors_per_shard)
    writer.add_expert_count(n_experts)
    writer.add_expert_used_count(2)
    written = ExpertFile(path)
    for moe_index, kinds in enumerate(types):
        kinds = (kinds, kinds, kinds) if isinstance(kinds, str) else kinds
        written.types.append(kinds)
        layer = layers[moe_index] if layers else moe_index
        for projection, kind in zip(PROJECTIONS, kinds, strict=True):
            n_in, n_out = (n_ff, n_embd) if projection == "down" else (n_embd, n_ff)
            row = row_bytes(TYPE_IDS[kind], n_in)
            data = random.integers(0, 256, (n_experts, n_out, row), np.uint8)
            writer.add_tensor(
                f"blk.{layer}.ffn_{projection}_exps.weight",
                data.view(np.int8) if kind == "Q2_0" else data,
                raw_dtype=None if kind == "Q2_0" else gguf.GGMLQuantizationType[kind],
            )
            for expert in range(n_experts):
                written.raw[moe_index, expert, projection] = data[expert].tobytes()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = sorted(path.parent.glob(f"{path.stem}*.gguf"))
    for file in files:
        _name_q2_0(file)
    written.path = files[0]
    return written


def _name_q2_0(file: Path) -> None:
    """Turn tensors of int8, [row bytes, ..], into Q2_0, [values, ..]: gguf cannot write type 42."""
    data = bytearray(file.read_bytes())
    int8 = int(gguf.GGMLQuantizationType.I8)
    at = 0
    while (at := data.find(b"_exps.weight", at) + len(b"_exps.weight")) >= len(b"_exps.weight"):
        n_dims, row = struct.unpack_from("<IQ", data, at)
        kind_at = at + 4 + 8 * n_dims
        if struct.unpack_from("<I", data, kind_at)[0] == int8:
            struct.pack_into("<Q", data, at + 4, row // 18 * 64)
            struct.pack_into("<I", data, kind_at, TYPE_IDS["Q2_0"])
    file.write_bytes(data)
