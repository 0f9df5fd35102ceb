"""Quantise and dequantise test weights, by type name.

Quantising is ggml's own (one oracle needs no second); dequantising is gguf's numpy code, which is
independent of ggml, plus the two types that `gguf` 0.19.0 lacks.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

Q2_0 = 42
BLOCKS: dict[str, tuple[int, int, int]] = {
    t.name: (int(t), *sizes) for t, sizes in GGML_QUANT_SIZES.items()
} | {"Q1_0": (41, 128, 18), "Q2_0": (Q2_0, 64, 18)}
"""Type id, elements and bytes of a block, by type name."""


def quantise(values: np.ndarray, type_name: str) -> np.ndarray:
    """float32 [..., n] -> uint8 [..., bytes of a row]."""
    if type_name == "F32":
        return np.ascontiguousarray(values, np.float32).view(np.uint8)
    if type_name == "Q2_0":
        return _quantise_q2_0(values)
    import ggml

    type_id, block, nbytes = BLOCKS[type_name]
    n = values.shape[-1]
    assert n % block == 0, (type_name, values.shape)
    flat = np.ascontiguousarray(values, np.float32).reshape(-1, n)
    out = np.empty((len(flat), n // block * nbytes), np.uint8)
    importance = np.ones(n, np.float32) if ggml.ggml_quantize_requires_imatrix(type_id) else None

    def floats(array: np.ndarray | None) -> Any:
        return None if array is None else array.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    written = ggml.ggml_quantize_chunk(
        type_id, floats(flat), out.ctypes.data, 0, len(flat), n, floats(importance)
    )
    assert written == out.nbytes, (type_name, written, out.nbytes)
    return out.reshape(*values.shape[:-1], -1)


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


def _unpack(rows: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of an fp16 scale and 16 bytes of codes, lowest bits first: scales, codes."""
    blocks = rows.reshape(-1, 18)
    scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = blocks[:, 2:, None] >> shifts & (2**bits - 1)
    return scale, codes.reshape(len(blocks), -1).astype(np.float32)


def _quantise_q2_0(values: np.ndarray) -> np.ndarray:
    """Nearest of -d, 0, d, 2d, with d the block's root mean square."""
    blocks = values.reshape(-1, 64)
    scale = np.sqrt((blocks**2).mean(1, keepdims=True)).astype(np.float16)
    codes = np.clip(np.rint(blocks / scale.astype(np.float32)) + 1, 0, 3).astype(np.uint8)
    packed = (codes.reshape(-1, 16, 4) << np.arange(0, 8, 2, dtype=np.uint8)).sum(2)
    rows = np.concatenate([scale.view(np.uint8), packed.astype(np.uint8)], axis=1)
    return rows.reshape(*values.shape[:-1], -1)
