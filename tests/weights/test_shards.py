"""Tensor lists that make no sense, and split models whose files do not fit together."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType, GGUFReader
from weights.gguf_files import MOE_KEYS, edit_key, edit_tensor, moe_tensors, write_model

from slotwise.errors import Finding, Refused
from slotwise.weights.shards import inspect, open_model


def findings(path: Path) -> dict[str, Finding]:
    """Findings by code; a code twice would hide one, so that is an error here."""
    found = inspect(path)[1]
    assert len({f.code for f in found}) == len(found), [str(f) for f in found]
    return {f.code: f for f in found}


def only(path: Path, code: str) -> Finding:
    found = findings(path)
    assert list(found) == [code]
    return found[code]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf")[0]


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return write_model(tmp_path / "m.gguf", shards=3)


def test_one_file(model: Path) -> None:
    opened = open_model(model)
    assert opened.arch == "qwen3moe"
    assert opened.path == model
    assert list(opened.tensors) == list(moe_tensors())
    assert inspect(model)[1] == []


def test_digest_follows_name_size_and_header_but_not_data(model: Path) -> None:
    before = open_model(model).digest
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    assert open_model(model).digest == before
    edit_key(model, "qwen3moe.context_length", struct.pack("<I", 99))
    assert open_model(model).digest != before
    renamed = model.rename(model.with_name("n.gguf"))
    assert open_model(renamed).digest != before


# --- tensors of one file ---------------------------------------------------------------------

EXPERTS = "blk.0.ffn_gate_exps.weight"


@pytest.mark.parametrize(
    ("edit", "code", "says"),
    [
        ({"dims": (0,)}, "tensor-shape", "[0, 64, 4]"),
        ({"dims": (2**62, 2**62, 4)}, "tensor-shape", "no overflow"),
        ({"kind": GGMLQuantizationType.Q4_K}, "tensor-shape", "blocks of 256"),
        ({"kind": GGMLQuantizationType.I32}, "type-unsupported", "quant type I32"),
        ({"kind": GGMLQuantizationType.Q8_K}, "type-unsupported", "quant type Q8_K"),
        ({"kind": 57}, "type-unknown", "quant type type 57"),
        ({"offset": 33}, "tensor-overlap", "overlaps"),
        ({"offset": 2**40}, "tensor-out-of-bounds", "ends at byte 1,0"),
        ({"offset": 2**64 - 32}, "tensor-out-of-bounds", "the size of the file"),
    ],
)
def test_one_damaged_tensor(model: Path, edit: dict[str, Any], code: str, says: str) -> None:
    edit_tensor(model, EXPERTS, **edit)
    found = findings(model)
    assert says in str(found[code])
    assert EXPERTS in str(found[code])
    with pytest.raises(Refused):
        open_model(model)


def test_misaligned_tensor(model: Path) -> None:
    edit_tensor(model, "token_embd.weight", offset=2)
    assert "a multiple of 32" in findings(model)["tensor-misaligned"].expected


def test_duplicate_tensor(model: Path) -> None:
    model.write_bytes(model.read_bytes().replace(b"blk.1.ffn_up_exps", b"blk.0.ffn_up_exps"))
    assert only(model, "duplicate-tensor").where.endswith("'blk.0.ffn_up_exps.weight'")


def test_many_damaged_tensors_are_one_finding(model: Path) -> None:
    for name in ("gate", "up", "down"):
        edit_tensor(model, f"blk.1.ffn_{name}_exps.weight", kind=31)
    assert "and 2 more tensors" in only(model, "type-unknown").found


@pytest.mark.parametrize("missing", [1, 5000, 60_000])
def test_truncated_file_says_how_much_is_missing(model: Path, missing: int) -> None:
    size = model.stat().st_size
    os.truncate(model, size - missing)
    found = only(model, "file-truncated")
    assert f"{missing:,} bytes are missing" in found.found
    assert f"{size:,} bytes" in found.expected


def test_several_problems_at_once(model: Path) -> None:
    edit_tensor(model, EXPERTS, kind=57)
    edit_tensor(model, "blk.1.ffn_up_exps.weight", dims=(0,))
    os.truncate(model, model.stat().st_size - 8)
    assert set(findings(model)) == {"type-unknown", "tensor-shape", "file-truncated"}


def test_missing_architecture(model: Path) -> None:
    model.write_bytes(model.read_bytes().replace(b"general.architecture", b"general.architekture"))
    assert "general.architecture" in only(model, "key-missing").found


# --- split models ----------------------------------------------------------------------------


@pytest.mark.parametrize("small_first_shard", [False, True])
@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_shard_opens_the_model(tmp_path: Path, given: int, small_first_shard: bool) -> None:
    paths = write_model(tmp_path / "m.gguf", shards=3, small_first_shard=small_first_shard)
    opened = open_model(paths[given])
    assert [s.path for s in opened.shards] == paths
    assert (len(opened.shards[0].tensors) == 0) == small_first_shard
    assert opened.metadata["qwen3moe.block_count"] == 2
    theirs = {t.name: (path, t.data_offset) for path in paths for t in GGUFReader(path).tensors}
    assert {t.name: (t.path, t.offset) for t in opened.tensors.values()} == theirs
    assert opened.digest == open_model(paths[0]).digest


def test_relative_path_and_symlinks(tmp_path: Path, shards: list[Path], monkeypatch: Any) -> None:
    links = tmp_path / "links"
    links.mkdir()
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for index, path in enumerate(shards):
        (links / path.name).symlink_to(path.rename(blobs / f"{index:x}"))
    monkeypatch.chdir(links)
    assert len(open_model(Path(shards[1].name)).shards) == 3


def test_two_split_models_in_one_folder(tmp_path: Path, shards: list[Path]) -> None:
    others = write_model(tmp_path / "other.gguf", shards=3)
    assert [s.path for s in open_model(shards[1]).shards] == shards
    assert [s.path for s in open_model(others[1]).shards] == others


def test_missing_shards(shards: list[Path]) -> None:
    shards[1].unlink()
    found = only(shards[0], "shard-missing")
    assert "m-00002-of-00003.gguf" in found.found
    shards[2].unlink()
    assert "lacks 2 of 3" in only(shards[0], "shard-missing").found


def test_missing_first_shard(shards: list[Path]) -> None:
    shards[0].unlink()
    model, found = inspect(shards[2])
    assert model is None
    assert [f.code for f in found] == ["shard-missing"]


def test_missing_shard_under_another_name_is_pointed_out(shards: list[Path]) -> None:
    shards[1].rename(shards[1].with_name("second.gguf"))
    assert "second.gguf says it is shard 2" in only(shards[0], "shard-missing").next_step


def test_two_files_with_the_same_number_by_name_and_content(shards: list[Path]) -> None:
    shutil.copy(shards[1], shards[1].with_name("m-2-of-3.gguf"))
    found = [f for f in inspect(shards[0])[1] if f.code == "shard-duplicate"]
    assert ["by their name" in f.found for f in found] == [True, False]
    assert all("m-00002-of-00003.gguf" in str(f) and "m-2-of-3.gguf" in str(f) for f in found)


def test_two_files_with_the_same_number_by_content_only(shards: list[Path]) -> None:
    shutil.copy(shards[0], shards[1])
    found = findings(shards[0])
    assert "shard 1 by their split.no" in found["shard-duplicate"].found
    assert "m-00002-of-00003.gguf" in found["shard-missing"].found
    assert set(found) == {"shard-duplicate", "shard-missing", "duplicate-tensor"}


def test_shards_out_of_order(shards: list[Path]) -> None:
    swap = shards[0].with_name("swap")
    shards[1].rename(swap)
    shards[2].rename(shards[1])
    swap.rename(shards[2])
    found = only(shards[0], "shard-order")
    assert "m-00002-of-00003.gguf says it is shard 3" in found.found
    assert "m-00003-of-00003.gguf says it is shard 2" in found.found


def test_count_differs_from_the_name(shards: list[Path]) -> None:
    edit_key(shards[2], "split.count", struct.pack("<H", 4))
    found = only(shards[0], "shard-count")
    assert "shard 3 of 4" in found.found
    assert str(shards[2]) == found.where


def test_tensor_count_is_not_what_was_announced(shards: list[Path]) -> None:
    for path in shards:
        edit_key(path, "split.tensors.count", struct.pack("<i", 12))
    found = only(shards[0], "shard-tensor-count")
    assert "hold 11 tensors" in found.found
    assert "12" in found.expected


def test_shard_of_another_model(tmp_path: Path, shards: list[Path]) -> None:
    (tmp_path / "other").mkdir()
    others = write_model(
        tmp_path / "other" / "m.gguf", tensors=moe_tensors("F32", "F32", "F32"), shards=3
    )
    shutil.copy(others[2], shards[2])
    found = findings(shards[0])
    assert found["shard-foreign"].where == str(shards[2])
    assert "split.tensors.count = '16'" in found["shard-foreign"].found


def test_first_shard_of_another_architecture_in_the_middle(
    tmp_path: Path, shards: list[Path]
) -> None:
    (tmp_path / "other").mkdir()
    others = write_model(tmp_path / "other" / "m.gguf", arch="llama", shards=3)
    shutil.copy(others[0], shards[1])
    edit_key(shards[1], "split.no", struct.pack("<H", 1))
    assert "general.architecture = 'llama'" in findings(shards[0])["shard-foreign"].found


def test_damaged_sibling_is_not_missing(shards: list[Path]) -> None:
    shards[1].write_bytes(b"<html>404</html>")
    assert only(shards[0], "not-gguf").where == str(shards[1])


def test_truncated_sibling(shards: list[Path]) -> None:
    os.truncate(shards[2], shards[2].stat().st_size - 7)
    assert only(shards[0], "file-truncated").where == str(shards[2])


@pytest.mark.parametrize("number", [0, 4])
def test_number_outside_the_count(shards: list[Path], number: int) -> None:
    extra = shards[0].with_name(f"m-{number:05}-of-00003.gguf")
    shutil.copy(shards[1], extra)
    assert findings(shards[0])["shard-name"].where == str(extra)


def test_one_shard_under_a_plain_name(shards: list[Path]) -> None:
    plain = shards[0].rename(shards[0].with_name("plain.gguf"))
    found = only(plain, "shard-name")
    assert "plain-00001-of-00003.gguf" in found.next_step
    assert "m-00002-of-00003.gguf says it is shard 2" in found.next_step


def test_whole_model_that_says_it_is_a_shard_is_only_a_warning(tmp_path: Path) -> None:
    keys = MOE_KEYS | {"split.no": 0, "split.count": 3, "split.tensors.count": 11}
    path = write_model(tmp_path / "whole.gguf", keys)[0]
    assert only(path, "shard-name").level == "warning"
    assert len(open_model(path).tensors) == 11


@pytest.mark.parametrize("name", ["m-00001-of-00003.gguf", "m-00001-of-00001.gguf"])
def test_whole_model_named_as_a_shard(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / name)[0]
    levels = [f.level for f in inspect(path)[1]]
    assert levels == (["warning"] if "00003" in name else [])
    assert len(open_model(path).tensors) == 11


def test_siblings_without_split_keys(tmp_path: Path) -> None:
    paths = [write_model(tmp_path / f"m-0000{i}-of-00002.gguf")[0] for i in (1, 2)]
    found = [f for f in inspect(paths[0])[1] if f.code == "shard-keys"]
    assert [f.where for f in found] == [str(p) for p in paths]


@pytest.mark.parametrize("value", [-1, 2**31, "two", 1.5, [3]])
def test_senseless_split_keys(tmp_path: Path, value: Any) -> None:
    keys = MOE_KEYS | {"split.no": value, "split.count": value, "split.tensors.count": value}
    paths = [write_model(tmp_path / f"m-0000{i}-of-00002.gguf", keys)[0] for i in (1, 2)]
    codes = [f.code for f in inspect(paths[0])[1]]
    assert "shard-keys" in codes


def test_everything_wrong_with_a_split_model_at_once(shards: list[Path]) -> None:
    shards[1].unlink()
    edit_tensor(shards[0], "token_embd.weight", kind=57)
    os.truncate(shards[2], shards[2].stat().st_size - 4)
    assert set(findings(shards[0])) == {"shard-missing", "type-unknown", "file-truncated"}
