"""Settings and models at the edge of what can be run: an error, never a crash of the process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.rig import PROMPT, Small, check_idle, generate, open_engine, settings
from gguf import GGUFWriter
from reference.quantise import quantise
from reference.tiny import ARCHITECTURES, random_weight, write_gguf
from reference.writers.shared import Architecture

from slotwise.engine.engine import Engine
from slotwise.engine.settings import EngineSettings
from slotwise.errors import Refused, UsageError


def chosen(name: str, value: Any) -> EngineSettings:
    return EngineSettings(**{name: value})


@pytest.mark.parametrize("name", ["threads", "context", "chunk", "io_lanes", "slots", "memory"])
def test_counts_start_at_one(name: str) -> None:
    for value in (0, -1):
        with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} is {value}"):
            chosen(name, value)
    chosen(name, 1)


@pytest.mark.parametrize(("name", "most"), [("threads", 512), ("context", 2**31 - 1)])
def test_what_ggml_cannot_count(name: str, most: int) -> None:
    """More threads than it has room for end in a crash of the whole process."""
    with pytest.raises(UsageError, match=f"--{name} is {most + 1}, expected {most} at most"):
        chosen(name, most + 1)
    chosen(name, most)


@pytest.mark.parametrize("name", ["kv_type", "refill", "policy"])
def test_names_that_nobody_knows(name: str) -> None:
    with pytest.raises(UsageError, match="expected one of"):
        chosen(name, "best")


def test_a_context_that_no_machine_can_hold_is_a_matter_of_memory(
    small: Callable[[str], Small],
) -> None:
    with pytest.raises(Refused, match="memory budget"):
        open_engine(small("gpt-oss"), context=2**31 - 1)


def test_a_chunk_larger_than_the_context_is_the_context(small: Callable[[str], Small]) -> None:
    with open_engine(small("gpt-oss"), context=32) as reference:
        expected = generate(reference)
    with open_engine(small("gpt-oss"), context=32, chunk=1 << 40) as engine:
        assert generate(engine) == expected


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_do_not_change_the_logits(small: Callable[[str], Small], threads: int) -> None:
    with open_engine(small("qwen2moe"), threads=threads) as engine:
        found = engine.logits(PROMPT[:5])
    with open_engine(small("qwen2moe"), threads=1, slots=1) as engine:
        np.testing.assert_array_equal(found, engine.logits(PROMPT[:5]))


def write(path: Path, architecture: Architecture, *, type_of: Callable[[str], str]) -> Path:
    values = {n: random_weight(n, architecture) for n in architecture.shapes}
    write_gguf(
        path, architecture, {n: (type_of(n), quantise(v, type_of(n))) for n, v in values.items()}
    )
    return path


def changed(name: str, **metadata: Any) -> Architecture:
    """A tiny architecture with other numbers in its metadata."""
    base = ARCHITECTURES[name]
    return replace(base, metadata={**base.metadata, **metadata})


def with_experts(experts: int, used: int) -> Architecture:
    """Many small experts of a qwen2moe."""
    base = changed("qwen2moe", expert_count=experts, expert_used_count=used)

    def shape(name: str, old: tuple[int, ...]) -> tuple[int, ...]:
        counted = "_exps." in name or name.endswith("ffn_gate_inp.weight")
        return (experts, *old[1:]) if counted else old

    return replace(base, shapes={n: shape(n, s) for n, s in base.shapes.items()})


@pytest.mark.parametrize(("experts", "used"), [(1, 1), (40, 40), (160, 150)])
def test_any_number_of_chosen_experts(experts: int, used: int, tmp_path: Path) -> None:
    """`combine` takes two ops for each of them; a graph that is too small is a crash in ggml."""
    path = write(tmp_path / "m.gguf", with_experts(experts, used), type_of=lambda _: "F32")
    with Engine.open(path, settings(context=32)) as engine:
        in_chunks = engine.logits(PROMPT[:5])
        one_by_one = engine.logits(PROMPT[:5], one_by_one=True)
        check_idle(engine)
    np.testing.assert_allclose(in_chunks, one_by_one, rtol=0, atol=1e-4)
    assert np.ptp(in_chunks) > 1


def test_a_norm_in_half_precision_is_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.gguf",
        ARCHITECTURES["qwen2moe"],
        type_of=lambda name: "F16" if name == "blk.1.ffn_norm.weight" else "F32",
    )
    with pytest.raises(Refused, match=r"blk\.1\.ffn_norm\.weight: type F16; expected type F32"):
        Engine.open(path, settings())


@pytest.mark.parametrize("name", ["llama", "qwen2moe"])
@pytest.mark.parametrize("layers", [2**31 - 1, 400])
def test_more_layers_than_tensors_is_refused_before_anybody_counts_them(
    name: str, layers: int, tmp_path: Path
) -> None:
    base = changed(name, block_count=layers)
    path = write(tmp_path / "m.gguf", base, type_of=lambda _: "F32")
    with pytest.raises(Refused, match="layers"):
        Engine.open(path, settings())


@pytest.mark.parametrize(
    "metadata",
    [
        {"block_count": 2},
        {"block_count": 4},
        {"expert_used_count": 99},
        {"expert_used_count": 0},
        {"expert_count": 11},
        {"embedding_length": 32},
        {"attention.head_count": 8},
        {"attention.head_count_kv": 4},
        {"attention.key_length": 8},
        {"attention.value_length": 8},
        {"rope.dimension_count": 34},
        {"expert_shared_feed_forward_length": 81},
        {"rope.scaling.type": "longrope"},
    ],
    ids=lambda metadata: "-".join(f"{k}={v}" for k, v in metadata.items()),
)
def test_metadata_that_is_not_the_tensors(metadata: dict[str, Any], tmp_path: Path) -> None:
    """ggml would abort at the first shape that does not fit."""
    path = write(tmp_path / "m.gguf", changed("qwen2moe", **metadata), type_of=lambda _: "F32")
    with pytest.raises(Refused):
        Engine.open(path, settings())


def test_an_architecture_nobody_knows(tmp_path: Path) -> None:
    odd = replace(ARCHITECTURES["llama"], name="llama5")
    path = write(tmp_path / "m.gguf", odd, type_of=lambda _: "F32")
    with pytest.raises(Refused, match=r"'llama5'; expected one of llama, qwen3moe"):
        Engine.open(path, settings())


def test_a_model_in_several_files(small: Callable[[str], Small], tmp_path: Path) -> None:
    """Experts and dense tensors of a layer may lie in different shards."""
    architecture = ARCHITECTURES["gpt-oss"]
    writer = GGUFWriter(tmp_path / "split.gguf", architecture.name, split_max_tensors=7)
    add: dict[type, Callable[[str, Any], None]] = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in architecture.metadata.items():
        add[type(value)](f"{architecture.name}.{key}", value)
    writer.add_string("tokenizer.ggml.model", "none")
    for name in architecture.shapes:
        writer.add_tensor(name, random_weight(name, architecture))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shards = sorted(tmp_path.glob("*.gguf"))
    assert len(shards) > 5
    with open_engine(small("gpt-oss")) as engine:
        expected = engine.logits(PROMPT)
    for shard in (shards[0], shards[3]):
        with Engine.open(shard, settings(slots=1)) as engine:
            np.testing.assert_array_equal(engine.logits(PROMPT), expected)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_limit_that_no_read_can_keep(seconds: float) -> None:
    with pytest.raises(UsageError, match="--read-limit"):
        EngineSettings(read_limit=seconds)
    assert EngineSettings(read_limit=0.5).read_limit == 0.5
