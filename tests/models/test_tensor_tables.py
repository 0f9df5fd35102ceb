"""Each architecture's table of dense tensors against the files that converters write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from reference.tiny import ARCHITECTURES
from reference.writers.shared import N_LAYERS, N_VOCAB

from slotwise.engine.dense import dense_findings
from slotwise.models import ARCHITECTURES as KNOWN
from slotwise.models.base import Architecture, TensorSpec
from slotwise.models.hyper import read_hyper
from slotwise.weights.ggml_types import tensor_bytes
from slotwise.weights.shards import ModelFile, Shard, TensorInfo

F32, F16, Q8_0 = 0, 1, 8


def architecture(name: str) -> Architecture:
    tiny = ARCHITECTURES[name]
    keys = {f"{tiny.name}.{key}": value for key, value in tiny.metadata.items()}
    hyper = read_hyper({"general.architecture": tiny.name, **keys}, N_VOCAB, "tiny.gguf")
    return KNOWN[tiny.name](hyper)


def written(name: str) -> dict[str, tuple[int, ...]]:
    """ggml shapes of the dense tensors in the tiny model's file."""
    constants = ARCHITECTURES[name].constants or {}
    every = ARCHITECTURES[name].shapes | {n: c.shape for n, c in constants.items()}
    return {n: tuple(reversed(s)) for n, s in every.items() if not n.endswith("_exps.weight")}


def model(shapes: dict[str, tuple[int, ...]], types: dict[str, int] | None = None) -> ModelFile:
    path = Path("tiny.gguf")
    infos = []
    for name, shape in shapes.items():
        type_ = (types or {}).get(name, F32)
        infos.append(TensorInfo(name, type_, shape, path, 0, tensor_bytes(type_, shape)))
    shard = Shard(path, 0, 3, {}, tuple(infos), 0, "")
    return ModelFile((shard,), {}, {info.name: info for info in infos})


def specs(name: str) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in architecture(name).dense_tensors()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_table_is_what_the_file_holds(name: str) -> None:
    table, file = specs(name), written(name)
    assert len(table) == len(architecture(name).dense_tensors()), "a name is listed twice"
    assert {n: table[n].shape for n in file} == file
    assert [n for n, spec in table.items() if n not in file and not spec.optional] == []
    assert dense_findings(model(file), table.values()) == []


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_tensor_that_is_not_optional_is_missed(name: str) -> None:
    table, file = specs(name), written(name)
    for gone in file:
        left = {n: s for n, s in file.items() if n != gone}
        found = dense_findings(model(left), table.values())
        assert [f.where for f in found] == (
            [] if table[gone].optional else [f"tiny.gguf, tensor {gone}"]
        )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_tensor_of_another_shape_is_found(name: str) -> None:
    table, file = specs(name), written(name)
    for odd, shape in file.items():
        found = dense_findings(model({**file, odd: (shape[0] + 2, *shape[1:])}), table.values())
        assert [f.where for f in found] == [f"tiny.gguf, tensor {odd}"]
        assert str(list(table[odd].shape)) in found[0].expected


def test_all_of_them_at_once() -> None:
    table = specs("qwen3moe")
    found = dense_findings(model({}), table.values())
    assert len(found) == sum(not spec.optional for spec in table.values())


def test_a_row_and_a_one_row_matrix_are_the_same() -> None:
    table, file = specs("qwen2moe"), written("qwen2moe")
    gate = "blk.1.ffn_gate_inp_shexp.weight"
    assert len(table[gate].shape) == 1
    assert dense_findings(model({**file, gate: (*file[gate], 1)}), table.values()) == []


def test_a_model_may_tie_its_head_to_the_embedding() -> None:
    for name in ARCHITECTURES:
        assert specs(name)["output.weight"].optional
        assert not specs(name)["token_embd.weight"].optional


def test_gpt_oss_needs_its_biases() -> None:
    """Elsewhere attention biases are optional; a gpt-oss without them is incomplete."""
    assert all(spec.optional for n, spec in specs("llama").items() if n.endswith(".bias"))
    biases = [spec for n, spec in specs("gpt-oss").items() if n.endswith(".bias")]
    assert len(biases) == N_LAYERS * 8
    assert not any(spec.optional for spec in biases)


def test_only_even_layers_of_gpt_oss_look_through_a_window() -> None:
    arch = architecture("gpt-oss")
    assert [arch.uses_window(i) for i in range(4)] == [True, False, True, False]
    wide = type(arch)(replace(arch.hyper, sliding_window=0))
    assert not any(wide.uses_window(i) for i in range(4))


def test_layers_without_experts_have_a_feed_forward_of_their_own() -> None:
    moe, dense = specs("mixtral"), specs("llama")
    assert "blk.0.ffn_gate_inp.weight" in moe
    assert "blk.0.ffn_gate.weight" not in moe
    assert "blk.0.ffn_gate.weight" in dense
    assert "blk.0.ffn_gate_inp.weight" not in dense


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_norms_and_biases_must_be_f32(name: str) -> None:
    """ggml aborts the process on a norm or a bias of another type."""
    table, file = specs(name), written(name)
    ends = ("norm.weight", ".bias", "sinks.weight", "freqs.weight")
    small = [n for n in file if n.endswith(ends)]
    assert small
    for odd in small:
        found = dense_findings(model(file, {odd: F16}), table.values())
        assert [f.where for f in found] == [f"tiny.gguf, tensor {odd}"]
        assert "F16" in found[0].found
    matrices = [n for n in file if n not in small]
    assert dense_findings(model(file, dict.fromkeys(matrices, F16)), table.values()) == []
