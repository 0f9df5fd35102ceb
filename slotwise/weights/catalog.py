"""What tensors there are: the names of expert tensors, and which weights are dense.

Names as every converter of llama.cpp writes them. What an architecture needs beyond that is the
business of slotwise/models.
"""

from __future__ import annotations

import re
from typing import Literal

from slotwise.weights.shards import ModelFile, TensorInfo

ProjectionName = Literal["gate", "up", "down"]
PROJECTIONS: tuple[ProjectionName, ...] = ("gate", "up", "down")

_EXPERT = re.compile(r"blk\.(\d{1,5})\.ffn_(?:gate|up|down)_exps\.weight")


def expert_tensor_name(layer: int, projection: ProjectionName) -> str:
    return f"blk.{layer}.ffn_{projection}_exps.weight"


def expert_layers(model: ModelFile) -> list[int]:
    """Numbers, ascending, of the layers with at least one expert tensor."""
    matches = (_EXPERT.fullmatch(name) for name in model.tensors)
    return sorted({int(match[1]) for match in matches if match})


def dense_tensors(model: ModelFile) -> list[TensorInfo]:
    """All tensors but the experts' three projections; biases of experts and routers are dense."""
    return [t for t in model.tensors.values() if not _EXPERT.fullmatch(t.name)]
