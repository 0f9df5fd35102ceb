"""The ggml tensor types: their names, how many bytes a block takes, and which are computed here.

Block sizes come from the `gguf` package; it does not know Q2_0 (type 42) yet, so that one is added
here. `supported` was read off ggml 0.15.3: exactly the types whose CPU traits have a `vec_dot`,
plus Q2_0, which is widened to Q4_0 when it is read. This module does not convert anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType


@dataclass(frozen=True)
class GgmlType:
    """One type id. `block` elements take `nbytes` bytes; `supported` says whether it computes."""

    id: int
    name: str
    block: int
    nbytes: int
    supported: bool


Q4_0 = int(GGMLQuantizationType.Q4_0)
Q2_0 = 42
"""Blocks of 64 values: an fp16 scale and 16 bytes of 2-bit codes, value = (code - 1) * scale."""

_NOT_COMPUTED = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}

GGML_TYPES: dict[int, GgmlType] = {
    int(kind): GgmlType(int(kind), kind.name, block, nbytes, kind.name not in _NOT_COMPUTED)
    for kind, (block, nbytes) in GGML_QUANT_SIZES.items()
} | {Q2_0: GgmlType(Q2_0, "Q2_0", 64, 18, True)}


def type_name(type_id: int) -> str:
    """The type's name, or ``type 57`` for an id nobody here knows."""
    known = GGML_TYPES.get(type_id)
    return known.name if known else f"type {type_id}"


def row_bytes(type_id: int, elements: int) -> int:
    """Bytes of one row of `elements` values. ValueError when a row is not whole blocks."""
    kind = GGML_TYPES[type_id]
    blocks, rest = divmod(elements, kind.block)
    if rest:
        raise ValueError(f"a row of {elements} is not a multiple of {kind.name}'s {kind.block}")
    return blocks * kind.nbytes


def tensor_bytes(type_id: int, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of `shape` (ggml order, the row's length first)."""
    return row_bytes(type_id, shape[0]) * prod(shape[1:])
