"""Preflight: every check, that none hides another, and the report as text and as JSON."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weights.gguf_files import MOE_KEYS, TYPE_IDS, edit_key, edit_tensor, moe_tensors, write_model

from slotwise.errors import Finding, Refused
from slotwise.weights.layout import ExpertLayout, expert_layout
from slotwise.weights.pack import write_pack
from slotwise.weights.pack_index import default_pack_path
from slotwise.weights.preflight import MemoryNeed, PreflightReport, Upstairs, run_preflight
from slotwise.weights.preflight_report import report_lines
from slotwise.weights.shards import ModelFile, open_model


@dataclass(frozen=True)
class Need:
    name: str
    shape: tuple[int, ...]
    optional: bool = False


def requirements(model: ModelFile) -> list[Need]:
    width = model.metadata.get("qwen3moe.embedding_length")
    if type(width) is not int:
        finding = Finding(
            level="refusal",
            code="metadata-key",
            where="qwen3moe.embedding_length",
            found="nothing",
            expected="a number",
            next_step="",
        )
        raise Refused([finding])
    layers = range(model.metadata["qwen3moe.block_count"])
    return [
        Need("token_embd.weight", (width, 8)),
        Need("output.weight", (width, 8), optional=True),
        *(Need(f"blk.{i}.attn_norm.weight", (width, 1)) for i in layers),
    ]


def check_profile(path: Path, layout: ExpertLayout, digest: str) -> Iterable[Finding]:
    shape = json.loads(path.read_text())
    if shape != [layout.n_moe_layers, layout.n_experts]:
        yield Finding(
            level="refusal",
            code="profile-shape",
            where=str(path),
            found=str(shape),
            expected=f"{layout.n_moe_layers} x {layout.n_experts}",
            next_step="",
        )


def plan(model: ModelFile, layout: ExpertLayout | None, **settings: Any) -> MemoryNeed:
    return MemoryNeed(1000 * settings["context"], f"for {settings['kv_type']}")


UPSTAIRS = Upstairs(
    architectures=("llama", "qwen3moe"),
    requirements=requirements,
    check_profile=check_profile,
    plan=plan,
)


def check(path: Path, upstairs: Upstairs = UPSTAIRS, **wishes: Any) -> PreflightReport:
    return run_preflight(path, upstairs=upstairs, **{"context": 100, **wishes})


def codes(report: PreflightReport, level: str = "refusal") -> set[str]:
    return {f.code for f in report.findings if f.level == level}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf")[0]


def packed(path: Path) -> Path:
    model = open_model(path)
    layout = expert_layout(model)
    assert layout is not None
    folder = default_pack_path(model)
    write_pack(model, layout, folder)
    return folder


def test_a_sound_model(path: Path) -> None:
    packed(path)
    report = check(path, memory=200_000, deep=True)
    assert report.findings == ()
    assert (report.exit_code, report.refused) == (0, False)
    assert report.need == MemoryNeed(100_000, "for f16")
    report.raise_if_refused()


def test_no_pack_is_only_a_warning(path: Path) -> None:
    report = check(path)
    assert [f.level for f in report.findings] == ["warning"]
    assert report.exit_code == 0


def test_file_problems_end_it_when_there_is_no_model(tmp_path: Path) -> None:
    report = check(tmp_path / "absent.gguf", memory=1)
    assert codes(report) == {"file-unreadable"}
    assert (report.exit_code, report.facts, report.need) == (3, {}, None)
    with pytest.raises(Refused):
        report.raise_if_refused()


def test_unsupported_architecture_lists_the_supported(tmp_path: Path) -> None:
    report = check(write_model(tmp_path / "m.gguf", arch="mamba")[0])
    finding = next(f for f in report.findings if f.code == "architecture")
    assert "'mamba'" in finding.found
    assert finding.expected == "one of llama, qwen3moe"


def test_missing_and_misshapen_tensors(tmp_path: Path) -> None:
    tensors = moe_tensors()
    del tensors["blk.1.attn_norm.weight"]
    tensors["token_embd.weight"] = ("F32", (64, 8))
    tensors["output.weight"] = ("F32", (64, 8))
    report = check(write_model(tmp_path / "m.gguf", tensors=tensors)[0], memory=1)
    assert codes(report) == {"tensor-missing", "tensor-shape"}
    text = "\n".join(map(str, report.findings))
    assert "lacks 1 tensors: blk.1.attn_norm.weight" in text
    assert "[64, 8] (and 1 more tensors); expected [32, 8]" in text
    assert report.need is None


def test_missing_key(tmp_path: Path) -> None:
    keys = {k: v for k, v in MOE_KEYS.items() if not k.endswith("embedding_length")}
    assert codes(check(write_model(tmp_path / "m.gguf", keys)[0])) == {"metadata-key"}


def test_absurd_number_of_layers_is_refused_before_it_is_looped_over(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", MOE_KEYS | {"qwen3moe.block_count": 2**32 - 1})[0]
    assert codes(check(path)) == {"block-count"}


def test_unknown_tokenizer(tmp_path: Path) -> None:
    keys = MOE_KEYS | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "martian"}
    report = check(write_model(tmp_path / "m.gguf", keys)[0])
    finding = next(f for f in report.findings if f.code == "pre-tokenizer")
    assert "martian" in finding.found
    assert "qwen2" in finding.expected
    assert "m.gguf: tokenizer.ggml.pre" in finding.where


def test_context_beyond_training_is_a_warning(path: Path) -> None:
    report = check(path, context=129)
    assert "context-long" in codes(report, "warning")
    assert report.exit_code == 0


def test_profile_of_another_shape(path: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text("[48, 256]")
    assert codes(check(path, profile=profile)) == {"profile-shape"}
    profile.write_text("[2, 4]")
    assert codes(check(path, profile=profile)) == set()


def test_profile_that_cannot_be_checked_is_no_crash(path: Path, tmp_path: Path) -> None:
    report = check(path, profile=tmp_path / "absent")
    assert codes(report) == {"profile-failed"}


def test_budget_too_small_names_the_smallest(path: Path) -> None:
    report = check(path, memory=99_999, kv_type="f32")
    finding = next(f for f in report.findings if f.code == "memory-too-small")
    assert "99,999 bytes" in finding.found
    assert "100,000 bytes (97.66 KiB): for f32" in finding.expected
    assert "--memory 1MiB" in finding.next_step
    assert report.exit_code == 3


def test_a_planner_that_fails_is_a_finding(path: Path) -> None:
    def broken(*_: Any, **__: Any) -> MemoryNeed:
        raise ZeroDivisionError("head_count")

    report = check(path, replace(UPSTAIRS, plan=broken), memory=1)
    assert codes(report) == {"memory-plan-failed"}
    assert "ZeroDivisionError: head_count" in report.findings[-1].found


def test_pack_of_another_source(path: Path) -> None:
    packed(path)
    edit_key(path, "qwen3moe.context_length", struct.pack("<I", 999))
    assert codes(check(path)) == {"pack-of-another-source"}


def test_damaged_pack_is_found_by_a_deep_check(path: Path) -> None:
    experts = packed(path) / "experts.bin"
    data = bytearray(experts.read_bytes())
    data[5000] ^= 1
    experts.write_bytes(data)
    assert codes(check(path)) == set()
    seen: list[tuple[int, int]] = []
    assert codes(check(path, deep=True, progress=lambda *at: seen.append(at))) != set()
    assert seen[-1] == (len(data), len(data))


def test_pack_in_another_place(path: Path, tmp_path: Path) -> None:
    other = packed(path).rename(tmp_path / "elsewhere")
    assert check(path, pack=other).findings == ()


def test_split_model_from_any_shard(tmp_path: Path) -> None:
    paths = write_model(tmp_path / "m.gguf", shards=3)
    assert check(paths[2]).exit_code == 0
    paths[1].unlink()
    assert codes(check(paths[2])) == {"shard-missing"}


def test_everything_at_once(tmp_path: Path) -> None:
    keys = MOE_KEYS | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "martian",
        "qwen3moe.expert_used_count": 9,
    }
    tensors = moe_tensors()
    del tensors["blk.0.attn_norm.weight"]
    path = write_model(tmp_path / "m.gguf", keys, tensors)[0]
    found = codes(check(path, context=1000, memory=1))
    assert found >= {"tensor-missing", "expert-count", "pre-tokenizer"}
    assert "context-long" in codes(check(path, context=1000), "warning")


def test_profile_pack_and_budget_do_not_hide_one_another(path: Path, tmp_path: Path) -> None:
    packed(path)
    edit_key(path, "qwen3moe.context_length", struct.pack("<I", 999))
    profile = tmp_path / "profile.json"
    profile.write_text("[48, 256]")
    found = codes(check(path, profile=profile, memory=1))
    assert found == {"pack-of-another-source", "profile-shape", "memory-too-small"}


def test_file_damage_and_architecture_and_tokenizer_at_once(tmp_path: Path) -> None:
    keys = MOE_KEYS | {"tokenizer.ggml.model": "bert"}
    paths = write_model(tmp_path / "m.gguf", keys, arch="mamba", shards=3)
    shutil.copy(paths[1], paths[2])
    edit_tensor(paths[0], "token_embd.weight", kind=57)
    os.truncate(paths[1], paths[1].stat().st_size - 32)
    found = codes(check(paths[0]))
    assert found >= {"architecture", "tokenizer-model", "type-unknown", "file-truncated"}
    assert found >= {"shard-duplicate", "shard-missing"}


def test_dense_model(tmp_path: Path) -> None:
    keys = MOE_KEYS | {"qwen3moe.expert_count": 0, "qwen3moe.block_count": 0}
    path = write_model(tmp_path / "m.gguf", keys, {"token_embd.weight": ("F16", (32, 8))})[0]
    report = check(path)
    assert report.findings == ()
    assert report.facts["experts"] is None


def test_json_document(path: Path) -> None:
    document = json.loads(json.dumps(check(path, memory=1).to_dict()))
    assert document["schema"] == "slotwise.check/v1"
    assert document["refused"] is True
    assert (document["memory_bytes"], document["memory_needed_bytes"]) == (1, 100_000)
    assert {f["code"] for f in document["findings"]} == {"memory-too-small", "pack-missing"}
    assert set(document["findings"][0]) == {
        "level",
        "code",
        "where",
        "found",
        "expected",
        "next_step",
    }
    facts = document["facts"]
    assert facts["types"] == {"F32": {"tensors": 11, "bytes": facts["types"]["F32"]["bytes"]}}
    assert facts["experts"] == {
        "layers": 2,
        "per_layer": 4,
        "used": 2,
        "total": 8,
        "slot_bytes": [24576],
        "bytes": 8 * 24576,
    }
    assert facts["dense_bytes"] + facts["experts"]["bytes"] == facts["types"]["F32"]["bytes"]


def test_report_for_the_terminal(path: Path) -> None:
    lines = list(report_lines(check(path, memory=1)))
    assert lines[0].startswith("model: qwen3moe 'tiny', 1 file, ")
    assert "experts: 2 layers x 4, top-2; all of them: 8 expert slots of 24.00 KiB" in lines[2]
    assert "memory: needs at least 97.66 KiB, given 1 B (for f16)" in lines
    assert any(line.startswith("refusal [memory-too-small]") for line in lines)
    assert lines[-1] == "m.gguf: would refuse; refusals: 1, warnings: 1"
    refusal, warning = (
        next(i for i, line in enumerate(lines) if line.startswith(level))
        for level in ("refusal", "warning")
    )
    assert refusal < warning


def test_report_of_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"no")
    lines = list(report_lines(check(tmp_path / "x.gguf")))
    assert lines[0].startswith("refusal [not-gguf]")
    assert lines[-1] == "x.gguf: would refuse; refusals: 1, warnings: 0"


VALUES = st.one_of(
    st.integers(-(2**31), 2**32 - 1),
    st.floats(width=32),
    st.booleans(),
    st.text(min_size=1, max_size=8),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
)


@settings(max_examples=150, deadline=None)
@given(
    keys=st.dictionaries(st.sampled_from([*MOE_KEYS, "tokenizer.ggml.tokens"]), VALUES),
    kind=st.sampled_from([*TYPE_IDS.values(), 57]),
    dims=st.lists(st.sampled_from([0, 1, 4, 32, 64, 2**32, 2**63]), max_size=3),
    offset=st.none() | st.integers(0, 2**64 - 1) | st.integers(0, 4096),
    name=st.sampled_from(list(moe_tensors())),
)
def test_never_raises_on_what_a_file_says(
    tmp_path_factory: pytest.TempPathFactory,
    keys: dict[str, Any],
    kind: int,
    dims: list[int],
    offset: int | None,
    name: str,
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    write_model(path, MOE_KEYS | keys)
    n_dims = len(moe_tensors()[name][1])
    edit_tensor(path, name, kind=kind, dims=tuple(dims[:n_dims]), offset=offset)
    report = check(path, memory=1)
    assert report.exit_code == 3
    json.dumps(report.to_dict())
    "\n".join(report_lines(report)).encode()
