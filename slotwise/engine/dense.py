"""Loads what is not an expert: attention, norms, routers, embeddings, biases.

Read once, straight into the memory they stay in, past the page cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from slotwise.errors import Finding, Refused
from slotwise.kernels.backend import Buffer, Memory, NoMemory
from slotwise.kernels.graph import Weights
from slotwise.kernels.lib import F32, TENSOR_ALIGNMENT
from slotwise.models.base import TensorSpec
from slotwise.weights.direct_io import DirectFile
from slotwise.weights.ggml_types import Q2_0, Q4_0, tensor_bytes, type_name
from slotwise.weights.shards import ModelFile, TensorInfo
from slotwise.weights.widen import widen_q2_0

Progress = Callable[[int, int], None]

_ELEMENT_WISE = ("norm.weight", ".bias", "attn_sinks.weight", "rope_freqs.weight")
"""Not multiplied as matrices: ggml aborts the process when their type is not F32."""


def dense_findings(model: ModelFile, specs: Iterable[TensorSpec]) -> list[Finding]:
    """Every tensor that is missing or that the architecture cannot read as it is."""
    findings = []
    for spec in specs:
        info = model.tensors.get(spec.name)
        if info is None:
            if not spec.optional:
                findings.append(_finding(model.path, spec, "the tensor is missing"))
        elif _trimmed(info.shape) != _trimmed(spec.shape):
            findings.append(_finding(info.path, spec, f"shape {list(info.shape)}"))
        elif info.type != F32 and spec.name.endswith(_ELEMENT_WISE):
            findings.append(_finding(info.path, spec, f"type {type_name(info.type)}", "type F32"))
    return findings


def _finding(path: Path, spec: TensorSpec, found: str, expected: str = "") -> Finding:
    return Finding(
        level="refusal",
        code="dense-tensor",
        where=f"{path.name}, tensor {spec.name}",
        found=found,
        expected=expected or f"shape {list(spec.shape)}",
        next_step="Convert the model again, or use another file.",
    )


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without trailing ones: a row and a one-row matrix are the same to us."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


class DenseWeights:
    """The table of dense tensors, first as shapes, then with memory by `load`."""

    def __init__(self, model: ModelFile, specs: Iterable[TensorSpec]) -> None:
        specs = list(specs)
        if findings := dense_findings(model, specs):
            raise Refused(findings)
        self._infos = [(model.tensors[s.name], s) for s in specs if s.name in model.tensors]
        self._offsets: list[int] = []
        top = 0
        for info, _ in self._infos:
            self._offsets.append(top)
            needed = tensor_bytes(_slot_type(info), info.shape)
            top += -(-needed // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        self.nbytes = top

    def shapes(self) -> Weights:
        """The tensors without memory."""
        return self._declare(NoMemory())

    def load(self, *, progress: Progress | None = None) -> tuple[Weights, Buffer]:
        """Reads everything. Raises StoreError with file and offset."""
        buffer = Buffer(self.nbytes)
        files: dict[Path, DirectFile] = {}
        try:
            for (info, _), offset in zip(self._infos, self._offsets, strict=True):
                file = files.get(info.path) or files.setdefault(info.path, DirectFile(info.path))
                _read(file, info, buffer, offset)
                if progress is not None:
                    progress(offset, self.nbytes)
        finally:
            for file in files.values():
                file.close()
        return self._declare(buffer), buffer

    def _declare(self, memory: Memory) -> Weights:
        weights = Weights(len(self._infos))
        for (info, spec), offset in zip(self._infos, self._offsets, strict=True):
            weights.add(spec.name, _slot_type(info), spec.shape, memory, offset)
        return weights


def _slot_type(info: TensorInfo) -> int:
    return Q4_0 if info.type == Q2_0 else info.type


def _read(file: DirectFile, info: TensorInfo, buffer: Buffer, offset: int) -> None:
    if info.type != Q2_0:
        file.read_into(info.offset, buffer.view(offset, info.nbytes))
        return
    raw = np.empty(info.nbytes, np.uint8)
    file.read_into(info.offset, raw.data)
    wide = widen_q2_0(raw)
    buffer.array(offset, np.uint8, (wide.size,))[:] = wide.ravel()
