"""Test weights in any ggml type, by type name.

Quantising is ggml's own (an oracle needs no second opinion on rounding); dequantising is gguf's
numpy code, which is independent of ggml, plus the two types that `gguf` 0.19.0 lacks.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

BLOCKS: dict[str, tuple[int, int, int]] = {
    t.name: (int(t), *sizes) for t, sizes in GGML_QUANT_SIZES.items()
} | {"Q1_0": (41, 128, 18), "Q2_0": (42, 64, 18)}
"""Type id, elements and bytes of a block, by type name."""


def quantise(values: np.ndarray, type_name: str) -> np.ndarray:
    """float32 [..., n] -> uint8 [..., bytes of a row].

    For the IQ types the result only has the scale of `values`: take the weights from it.
    """
    type_id, block, nbytes = BLOCKS[type_name]
    assert values.shape[-1] % block == 0, (type_name, values.shape)
    flat = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])
    if type_name == "F32":
        rows = flat.view(np.uint8)
    elif type_name == "Q2_0":
        rows = _quantise_q2_0(flat)
    elif type_name.startswith("IQ"):
        rows = _random_blocks(flat, type_name)
    else:
        rows = np.empty((len(flat), flat.shape[1] // block * nbytes), np.uint8)
        _quantise_by_ggml(flat, type_id, rows)
    return rows.reshape(*values.shape[:-1], -1)


def dequantise(rows: np.ndarray, type_name: str) -> np.ndarray:
    """uint8 [..., bytes of a row] -> float32 [..., n]."""
    if type_name == "F32":
        return rows.view(np.float32)
    if type_name in ("Q1_0", "Q2_0"):
        bits = 1 if type_name == "Q1_0" else 2
        scale, codes = _unpack(rows, bits)
        levels = 2 * codes - 1 if bits == 1 else codes - 1
        return (scale * levels).reshape(*rows.shape[:-1], -1)
    return dequantize(rows, GGMLQuantizationType[type_name])


def _quantise_by_ggml(flat: np.ndarray, type_id: int, out: np.ndarray) -> None:
    import ggml

    source = ctypes.cast(flat.ctypes.data, ctypes.POINTER(ctypes.c_float))
    quantise_chunk: Any = ggml.ggml_quantize_chunk
    written = quantise_chunk(type_id, source, out.ctypes.data, 0, *flat.shape, None)
    assert written == out.nbytes, (type_id, written, out.nbytes)


def _random_blocks(flat: np.ndarray, type_name: str) -> np.ndarray:
    """Any bytes are valid IQ codes, and the quantisers' tables take up to 14 s to build."""
    _, block, nbytes = BLOCKS[type_name]
    rng = np.random.default_rng(flat.size)
    blocks = rng.integers(0, 256, (flat.size // block, nbytes), np.uint8)
    _set_scale(blocks, type_name, np.float16(1))
    rms = np.sqrt(np.mean(dequantise(blocks, type_name) ** 2))
    _set_scale(blocks, type_name, np.float16(np.sqrt(np.mean(flat**2)) / rms))
    return blocks.reshape(len(flat), -1)


def _set_scale(blocks: np.ndarray, type_name: str, scale: np.float16) -> None:
    if type_name != "IQ1_M":
        blocks[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)
        return
    # IQ1_M keeps its scale in the high four bits of the last four 16-bit words, lowest first.
    for i in range(4):
        nibble = int(scale.view(np.uint16)) >> 4 * i & 15
        high = blocks[:, 48 + 2 * i + 1]
        high[:] = high & 15 | nibble << 4


def _unpack(rows: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of an fp16 scale and 16 bytes of codes, lowest bits first: scales, codes."""
    blocks = rows.reshape(-1, 18)
    scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = blocks[:, 2:, None] >> shifts & (2**bits - 1)
    return scale, codes.reshape(len(blocks), -1).astype(np.float32)


def _quantise_q2_0(flat: np.ndarray) -> np.ndarray:
    """Nearest of -d, 0, d, 2d, with d the block's root mean square."""
    blocks = flat.reshape(-1, 64)
    scale = np.sqrt((blocks**2).mean(1, keepdims=True)).astype(np.float16)
    codes = np.clip(np.rint(blocks / scale.astype(np.float32)) + 1, 0, 3).astype(np.uint8)
    packed = (codes.reshape(-1, 16, 4) << np.arange(0, 8, 2, dtype=np.uint8)).sum(2)
    rows = np.concatenate([scale.view(np.uint8), packed.astype(np.uint8)], axis=1)
    return rows.reshape(len(flat), -1)
