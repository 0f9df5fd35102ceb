"""Experts as slots: geometry, slot classes, and where their bytes lie in the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from weights.gguf_files import MOE_KEYS, TYPE_IDS, Tensors, moe_tensors, write_model

from slotwise.errors import Finding, Refused
from slotwise.weights.catalog import dense_tensors, expert_layers
from slotwise.weights.ggml_types import GGML_TYPES, row_bytes, tensor_bytes, type_name
from slotwise.weights.layout import ExpertLayout, SourceRange, expert_layout, source_ranges
from slotwise.weights.shards import ModelFile, open_model


def opened(tmp_path: Path, tensors: Tensors, **keys: Any) -> ModelFile:
    keys = MOE_KEYS | {f"qwen3moe.{key}": value for key, value in keys.items()}
    return open_model(write_model(tmp_path / "m.gguf", keys, tensors)[0])


def layout_of(model: ModelFile) -> ExpertLayout:
    layout = expert_layout(model)
    assert layout is not None
    return layout


def refusal(model: ModelFile) -> Finding:
    with pytest.raises(Refused) as raised:
        expert_layout(model)
    assert len(raised.value.findings) == 1
    return raised.value.findings[0]


def test_types_are_what_ggml_has() -> None:
    assert (type_name(12), type_name(42), type_name(99)) == ("Q4_K", "Q2_0", "type 99")
    assert row_bytes(TYPE_IDS["Q4_K"], 512) == 288
    assert tensor_bytes(TYPE_IDS["Q2_0"], (128, 3, 2)) == 2 * 18 * 6
    unsupported = {t.name for t in GGML_TYPES.values() if not t.supported}
    assert unsupported == {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}
    with pytest.raises(ValueError, match="not a multiple"):
        row_bytes(TYPE_IDS["Q4_K"], 100)


def test_one_class_when_all_layers_are_alike(tmp_path: Path) -> None:
    layout = layout_of(opened(tmp_path, moe_tensors("Q4_0", "Q4_0", "Q4_0")))
    assert (layout.n_experts, layout.n_used, layout.layers) == (4, 2, (0, 1, 2))
    assert (layout.n_moe_layers, layout.n_total, layout.class_of) == (3, 12, (0, 0, 0))
    gate, up, down = layout.slot_class(2).projections
    assert [(p.name, p.n_in, p.n_out) for p in (gate, up, down)] == [
        ("gate", 32, 64),
        ("up", 32, 64),
        ("down", 64, 32),
    ]
    assert {p.nbytes for p in (gate, up, down)} == {64 * 18}
    assert [gate.offset, up.offset, down.offset] == [0, 1152, 2304]
    assert layout.slot_class(0).slot_bytes == 4096
    assert layout.total_bytes == 12 * 4096


def test_padding(tmp_path: Path) -> None:
    tensors = moe_tensors("Q8_0", n_embd=32, n_ff=96)
    gate, up, down = layout_of(opened(tmp_path, tensors)).slot_class(0).projections
    assert gate.nbytes == 96 * 34 == 3264 == 51 * 64
    tensors = moe_tensors("Q5_0", n_embd=32, n_ff=96)
    gate, up, down = layout_of(opened(tmp_path, tensors)).slot_class(0).projections
    assert (gate.nbytes, up.offset, down.offset) == (2112, 2112, 4224)
    tensors = moe_tensors("Q5_0", n_embd=32, n_ff=32)
    slot = layout_of(opened(tmp_path, tensors)).slot_class(0)
    assert [p.offset for p in slot.projections] == [0, 704, 1408]
    tensors = moe_tensors("MXFP4", n_embd=32, n_ff=32)
    slot = layout_of(opened(tmp_path, tensors)).slot_class(0)
    assert slot.projections[0].nbytes == 544
    assert [p.offset for p in slot.projections] == [0, 576, 1152]


def test_mixed_types_make_classes_by_geometry(tmp_path: Path) -> None:
    kinds = [("Q4_0", "Q4_0", "Q8_0"), "Q4_0", ("Q4_0", "Q4_0", "Q8_0"), "F32"]
    layout = layout_of(opened(tmp_path, moe_tensors(*kinds)))
    assert layout.class_of == (0, 1, 0, 2)
    assert [slot.index for slot in layout.classes] == [0, 1, 2]
    assert layout.slot_class(2).projections[2].type == TYPE_IDS["Q8_0"]
    assert layout.slot_class(3).slot_bytes == 3 * 32 * 64 * 4
    assert layout.total_bytes == 4 * (8192 + 4096 + 8192 + 24576)


def test_layers_of_other_widths_are_other_classes(tmp_path: Path) -> None:
    tensors = moe_tensors("Q4_0", "Q4_0")
    tensors |= {
        "blk.1.ffn_gate_exps.weight": ("Q4_0", (32, 96, 4)),
        "blk.1.ffn_up_exps.weight": ("Q4_0", (32, 96, 4)),
        "blk.1.ffn_down_exps.weight": ("Q4_0", (96, 32, 4)),
    }
    layout = layout_of(opened(tmp_path, tensors))
    assert layout.class_of == (0, 1)
    assert layout.slot_class(1).projections[2].n_in == 96


def test_q2_0_is_widened_to_q4_0(tmp_path: Path) -> None:
    model = opened(tmp_path, moe_tensors("Q2_0", "Q4_0", n_embd=64, n_ff=64))
    layout = layout_of(model)
    assert layout.class_of == (0, 0)
    assert {p.type for p in layout.slot_class(0).projections} == {TYPE_IDS["Q4_0"]}
    assert layout.slot_class(0).projections[0].nbytes == 64 * 2 * 18
    assert [r.nbytes for r in source_ranges(model, layout, 0, 1)] == [64 * 18] * 3
    assert [r.type for r in source_ranges(model, layout, 0, 1)] == [TYPE_IDS["Q2_0"]] * 3
    assert [r.type for r in source_ranges(model, layout, 1, 1)] == [TYPE_IDS["Q4_0"]] * 3


def test_source_ranges_cover_the_expert_tensors_exactly(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", tensors=moe_tensors("Q4_0", "Q8_0"), shards=3)
    model = open_model(tmp_path / "m-00001-of-00003.gguf")
    layout = layout_of(model)
    for moe_index, layer in enumerate(layout.layers):
        for position, name in enumerate(("gate", "up", "down")):
            tensor = model.tensors[f"blk.{layer}.ffn_{name}_exps.weight"]
            ranges = [source_ranges(model, layout, moe_index, e)[position] for e in range(4)]
            size = tensor.nbytes // 4
            assert ranges == [
                SourceRange(tensor.path, tensor.offset + e * size, size, tensor.type)
                for e in range(4)
            ]
            assert ranges[0].nbytes == layout.slot_class(moe_index).projections[position].nbytes


def test_expert_out_of_range(tmp_path: Path) -> None:
    model = opened(tmp_path, moe_tensors("Q4_0"))
    layout = layout_of(model)
    for expert in (-1, 4):
        with pytest.raises(IndexError):
            source_ranges(model, layout, 0, expert)


def test_moe_index_is_not_the_layer_number(tmp_path: Path) -> None:
    tensors = moe_tensors(*["Q4_0"] * 11)
    for layer in (0, 1, 3):
        for name in ("gate", "up", "down"):
            del tensors[f"blk.{layer}.ffn_{name}_exps.weight"]
    model = opened(tmp_path, tensors)
    layout = layout_of(model)
    assert layout.layers == (2, 4, 5, 6, 7, 8, 9, 10)
    assert expert_layers(model) == list(layout.layers)
    first = source_ranges(model, layout, 1, 0)[0]
    assert first.offset == model.tensors["blk.4.ffn_gate_exps.weight"].offset


def test_biases_and_routers_are_dense(tmp_path: Path) -> None:
    tensors = moe_tensors("Q4_0") | {"blk.0.ffn_gate_exps.bias": ("F32", (64, 4))}
    dense = {t.name for t in dense_tensors(opened(tmp_path, tensors))}
    assert dense == {
        "token_embd.weight",
        "blk.0.attn_norm.weight",
        "blk.0.ffn_gate_inp.weight",
        "blk.0.ffn_gate_exps.bias",
    }


def test_dense_model_has_no_layout(tmp_path: Path) -> None:
    tensors: Tensors = {"token_embd.weight": ("F32", (32, 8))}
    assert expert_layout(opened(tmp_path, tensors, expert_count=0)) is None
    assert refusal(opened(tmp_path, tensors)).code == "experts-missing"


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"blk.1.ffn_up_exps.weight": None}, "experts-missing", "blk.1.ffn_up_exps.weight"),
        ({"blk.1.ffn_up_exps.weight": (32, 96, 4)}, "expert-shape", "[32, 96, 4]"),
        ({"blk.1.ffn_down_exps.weight": (32, 64, 4)}, "expert-shape", "[32, 64, 4]"),
        ({"blk.1.ffn_down_exps.weight": (64, 32, 5)}, "expert-shape", "[64, 32, 5]"),
        ({"blk.1.ffn_gate_exps.weight": (32, 64)}, "expert-shape", "[32, 64]"),
        ({"blk.0.ffn_gate_exps.weight": (32, 64, 8)}, "expert-shape", "and 4 more"),
    ],
)
def test_inconsistent_experts(
    tmp_path: Path, change: dict[str, tuple[int, ...] | None], code: str, says: str
) -> None:
    tensors = moe_tensors()
    for name, shape in change.items():
        if shape is None:
            del tensors[name]
        else:
            tensors[name] = ("F32", shape)
    finding = refusal(opened(tmp_path, tensors))
    assert finding.code == code
    assert says in str(finding)


@pytest.mark.parametrize(
    "keys",
    [
        {"expert_count": 8},
        {"expert_used_count": 0},
        {"expert_used_count": 5},
        {"expert_used_count": "two"},
        {"expert_used_count": True},
    ],
)
def test_keys_that_contradict_the_tensors(tmp_path: Path, keys: dict[str, Any]) -> None:
    finding = refusal(opened(tmp_path, moe_tensors(), **keys))
    assert finding.code == "expert-count"
    assert next(iter(keys)) in finding.found
