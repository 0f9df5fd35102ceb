"""What the experts of a model look like as expert slots, and where each one lies in the files.

One slot holds one expert's gate | up | down. Layers whose three projections have the same types and
sizes share a slot class. Nothing is read or allocated here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slotwise.errors import Finding, Refused
from slotwise.weights.catalog import (
    PROJECTIONS,
    ProjectionName,
    expert_layers,
    expert_tensor_name,
)
from slotwise.weights.ggml_types import Q2_0, Q4_0, tensor_bytes
from slotwise.weights.header import refusal, shown
from slotwise.weights.shards import ModelFile, TensorInfo

PROJECTION_ALIGNMENT = 64
SLOT_ALIGNMENT = 4096

_ANOTHER_FILE = "Use a conversion with stacked experts (ffn_*_exps) of one shape."


@dataclass(frozen=True)
class Projection:
    """One matrix of an expert in its slot: rows of `n_in` values, `n_out` rows."""

    name: ProjectionName
    type: int
    """ggml type in the slot: the file's, but Q4_0 where the file has Q2_0."""
    n_in: int
    n_out: int
    offset: int
    """Bytes from the slot's start, a multiple of 64."""
    nbytes: int


@dataclass(frozen=True)
class SlotClass:
    index: int
    projections: tuple[Projection, ...]
    slot_bytes: int
    """A multiple of 4096."""


@dataclass(frozen=True)
class ExpertLayout:
    """Experts are addressed by (moe_index, expert): `moe_index` is a position in `layers`."""

    n_experts: int
    n_used: int
    layers: tuple[int, ...]
    classes: tuple[SlotClass, ...]
    class_of: tuple[int, ...]

    @property
    def n_moe_layers(self) -> int:
        return len(self.layers)

    @property
    def n_total(self) -> int:
        return len(self.layers) * self.n_experts

    @property
    def total_bytes(self) -> int:
        """Bytes of all experts as slots."""
        return self.n_experts * sum(self.classes[index].slot_bytes for index in self.class_of)

    def slot_class(self, moe_index: int) -> SlotClass:
        return self.classes[self.class_of[moe_index]]


@dataclass(frozen=True)
class SourceRange:
    """One projection of one expert in a GGUF file; `type` is the file's, before widening."""

    path: Path
    offset: int
    nbytes: int
    type: int


def expert_layout(model: ModelFile) -> ExpertLayout | None:
    """The layout of the model's experts; None for a dense model.

    Refused, with every finding, when the expert tensors do not fit together or the keys.
    """
    layers = expert_layers(model)
    if not layers:
        if findings := list(_dense_findings(model)):
            raise Refused(findings)
        return None
    if findings := list(_findings(model, layers)):
        raise Refused(findings)
    classes: dict[tuple[Projection, ...], SlotClass] = {}
    class_of = []
    for layer in layers:
        projections = _projections(_layer_tensors(model, layer))
        new = SlotClass(len(classes), projections, _slot_bytes(projections))
        class_of.append(classes.setdefault(projections, new).index)
    return ExpertLayout(
        n_experts=_expert_count(model, layers),
        n_used=model.metadata[f"{model.arch}.expert_used_count"],
        layers=tuple(layers),
        classes=tuple(classes.values()),
        class_of=tuple(class_of),
    )


def source_ranges(
    model: ModelFile, layout: ExpertLayout, moe_index: int, expert: int
) -> tuple[SourceRange, ...]:
    """Where gate, up and down of one expert lie in the model's files (about 3 us)."""
    if not 0 <= expert < layout.n_experts:
        raise IndexError(f"expert {expert} of {layout.n_experts}")
    ranges = []
    for tensor in _layer_tensors(model, layout.layers[moe_index]):
        nbytes = tensor.nbytes // layout.n_experts
        offset = tensor.offset + expert * nbytes
        ranges.append(SourceRange(tensor.path, offset, nbytes, tensor.type))
    return tuple(ranges)


def _dense_findings(model: ModelFile) -> Iterator[Finding]:
    count = model.metadata.get(f"{model.arch}.expert_count", 0)
    if count != 0:
        found = f"says it has {shown(str(count))} experts, but has no stacked expert tensors"
        expected = expert_tensor_name(0, "gate") + " and the like"
        yield refusal(model.path, "experts-missing", found, expected, _ANOTHER_FILE)


def _findings(model: ModelFile, layers: list[int]) -> Iterator[Finding]:
    names = [expert_tensor_name(layer, name) for layer in layers for name in PROJECTIONS]
    if absent := [name for name in names if name not in model.tensors]:
        found = f"lacks {len(absent):,} expert tensors, first {absent[0]}"
        expected = f"gate, up and down in each of the {len(layers)} layers with experts"
        yield refusal(model.path, "experts-missing", found, expected, _ANOTHER_FILE)
        return
    flat = [name for name in names if len(model.tensors[name].shape) != 3]
    count = 0 if flat else _expert_count(model, layers)
    crooked = flat or [name for layer in layers for name in _misshapen(model, layer, count)]
    if crooked:
        tensor = model.tensors[crooked[0]]
        found = f"has the shape {list(tensor.shape)}"
        found += f" (and {len(crooked) - 1:,} more tensors)" if len(crooked) > 1 else ""
        expected = "[n_embd, n_ff, experts] for gate and up, [n_ff, n_embd, experts] for down, "
        expected += "and as many experts in every layer"
        where = f"{tensor.path}: tensor {tensor.name}"
        yield refusal(where, "expert-shape", found, expected, _ANOTHER_FILE)
        return
    yield from _count_findings(model, count)


def _misshapen(model: ModelFile, layer: int, count: int) -> Iterator[str]:
    gate, up, down = _layer_tensors(model, layer)
    n_embd, n_ff, _ = gate.shape
    expected = ((n_embd, n_ff, count), (n_embd, n_ff, count), (n_ff, n_embd, count))
    for tensor, shape in zip((gate, up, down), expected, strict=True):
        if tensor.shape != shape:
            yield tensor.name


def _count_findings(model: ModelFile, count: int) -> Iterator[Finding]:
    bounds = {"expert_count": range(count, count + 1), "expert_used_count": range(1, count + 1)}
    for suffix, allowed in bounds.items():
        value = model.metadata.get(f"{model.arch}.{suffix}")
        if type(value) is not int or value not in allowed:
            found = f"has {model.arch}.{suffix} = {shown(str(value))}"
            expected = f"{count}" if suffix == "expert_count" else f"1 to {count}"
            yield refusal(model.path, "expert-count", found, f"{expected}, as its tensors have it")


def _layer_tensors(model: ModelFile, layer: int) -> list[TensorInfo]:
    return [model.tensors[expert_tensor_name(layer, name)] for name in PROJECTIONS]


def _expert_count(model: ModelFile, layers: list[int]) -> int:
    return _layer_tensors(model, layers[0])[0].shape[2]


def _projections(tensors: list[TensorInfo]) -> tuple[Projection, ...]:
    projections, offset = [], 0
    for name, tensor in zip(PROJECTIONS, tensors, strict=True):
        kind = Q4_0 if tensor.type == Q2_0 else tensor.type
        n_in, n_out = tensor.shape[:2]
        nbytes = tensor_bytes(kind, (n_in, n_out))
        projections.append(Projection(name, kind, n_in, n_out, offset, nbytes))
        offset = _padded(offset + nbytes, PROJECTION_ALIGNMENT)
    return tuple(projections)


def _slot_bytes(projections: tuple[Projection, ...]) -> int:
    last = projections[-1]
    return _padded(last.offset + last.nbytes, SLOT_ALIGNMENT)


def _padded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
