"""The header parser: equal to the gguf package on good files, a message on all others."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFEndian, GGUFReader, GGUFValueType, GGUFWriter
from weights.gguf_files import MOE_KEYS, edit_tensor, moe_tensors, tensor_entry, write_model

from slotwise.errors import Finding
from slotwise.weights.header import MAX_HEADER, MAX_ITEMS, read_header
from slotwise.weights.shards import inspect

KEYS = {
    **MOE_KEYS,
    "a.bool": True,
    "a.float": 0.5,
    "tokenizer.ggml.tokens": ["<s>", "ä", "", "\u4f60\u597d", "x" * 300],
    "tokenizer.ggml.scores": [0.0, -1.5, 3.25],
    "tokenizer.ggml.token_type": [1, 2, 3],
}


def refusal(path: Path) -> Finding:
    """The only refusal for the file."""
    _, findings = inspect(path)
    assert [f.level for f in findings] == ["refusal"]
    return findings[0]


def test_equals_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, KEYS, moe_tensors("Q4_K", "MXFP4", n_embd=256, n_ff=256))
    shard, reader = read_header(path), GGUFReader(path)
    theirs = {key: field.contents() for key, field in reader.fields.items() if key[:4] != "GGUF"}
    assert shard.metadata == theirs
    assert [(t.name, t.type, t.shape, t.offset, t.nbytes) for t in shard.tensors] == [
        (t.name, t.tensor_type, tuple(t.shape), t.data_offset, t.n_bytes) for t in reader.tensors
    ]
    assert (shard.version, shard.data_offset) == (3, reader.data_offset)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (GGUFValueType.UINT8, 255),
        (GGUFValueType.INT8, -128),
        (GGUFValueType.UINT16, 65535),
        (GGUFValueType.INT16, -32768),
        (GGUFValueType.INT32, -(2**31)),
        (GGUFValueType.FLOAT32, 1.5),
        (GGUFValueType.BOOL, False),
        (GGUFValueType.UINT64, 2**64 - 1),
        (GGUFValueType.INT64, -(2**63)),
        (GGUFValueType.FLOAT64, 0.1),
    ],
)
def test_every_value_type_alone_and_in_an_array(
    tmp_path: Path, kind: GGUFValueType, value: Any
) -> None:
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_key_value("x.one", value, kind)
    writer.add_key_value("x.many", [value, value], GGUFValueType.ARRAY, sub_type=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = read_header(path).metadata
    assert metadata["x.one"] == value
    assert metadata["x.many"] == [value, value]
    assert type(metadata["x.many"][0]) is type(value)


def test_large_vocabulary_spans_several_reads(tmp_path: Path) -> None:
    tokens = [f"token {i}" for i in range(150_000)]
    path = tmp_path / "m.gguf"
    write_model(path, {**MOE_KEYS, "t.tokens": tokens, "t.types": [1] * 150_000})
    assert path.stat().st_size > 2 << 20
    metadata = read_header(path).metadata
    assert metadata["t.tokens"] == tokens
    assert metadata["t.types"] == [1] * 150_000


def test_invalid_utf8_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, {**MOE_KEYS, "t.tokens": ["abc", "mark"]})
    path.write_bytes(path.read_bytes().replace(b"mark", b"\xff\x80\xc3("))
    tokens = read_header(path).metadata["t.tokens"]
    assert tokens[1].encode("utf-8", "surrogateescape") == b"\xff\x80\xc3("


def test_version_2_and_nested_arrays(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, {**MOE_KEYS, "n.nested": [[1, 2], [3]]})
    data = bytearray(path.read_bytes())
    data[4] = 2
    path.write_bytes(data)
    shard = read_header(path)
    assert (shard.version, shard.metadata["n.nested"]) == (2, [[1, 2], [3]])


def test_a_custom_alignment(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(4096)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_header(path).data_offset == 4096


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (b"", "not-gguf", "empty"),
        (b"GG", "not-gguf", "b'GG'"),
        (b"PK\x03\x04 a zip file, not a model", "not-gguf", "b'PK"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "not-gguf", "git lfs pull"),
        (b"GGUF", "header-damaged", "ends at 4"),
        (b"GGUF" + struct.pack("<I", 1), "gguf-version", "version 1"),
        (b"GGUF" + struct.pack("<I", 77), "gguf-version", "version 77"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "header-damaged", "number of tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "header-damaged", "number of keys"),
        (b"GGUF" + struct.pack("<IQQ", 3, 9, 0), "header-damaged", "number of tensors"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60) + bytes(16),
            "header-damaged",
            "name of key 0",
        ),
    ],
)
def test_not_a_readable_header(tmp_path: Path, content: bytes, code: str, says: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    finding = refusal(path)
    assert finding.code == code
    assert says in str(finding)
    assert str(path) in finding.where


def test_big_endian_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, endianess=GGUFEndian.BIG)
    assert "big-endian" in refusal(path).found


def test_missing_file_folder_and_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    for path in (tmp_path / "absent.gguf", tmp_path, pipe):
        assert refusal(path).code == "file-unreadable"


def one_value(value: bytes) -> bytes:
    """A file with one key `k`, whose type and value are `value`."""
    return b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + value


ARRAY = struct.pack("<I", 9)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (one_value(struct.pack("<I", 13)), "value type 13"),
        (one_value(ARRAY + struct.pack("<IQ", 99, 1)) + bytes(9), "value type 99"),
        (one_value(ARRAY + struct.pack("<IQ", 4, 2**62)) + bytes(9), "length of the value"),
        (one_value(ARRAY + struct.pack("<IQ", 8, 100)) + bytes(64), "length of the value"),
        (one_value(ARRAY + struct.pack("<IQ", 9, 1) * 6) + bytes(64), "nests"),
    ],
)
def test_damaged_values(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert says in refusal(path).found


@pytest.mark.parametrize(
    "value",
    [
        ARRAY + struct.pack("<IQ", 0, MAX_ITEMS + 1),
        ARRAY + struct.pack("<IQ", 8, 2**40),
        struct.pack("<IQ", 8, MAX_HEADER),
        struct.pack("<IQ", 8, 2**39),
    ],
)
def test_a_length_that_only_a_huge_file_allows_is_not_allocated(
    tmp_path: Path, value: bytes
) -> None:
    path = tmp_path / "sparse.gguf"
    path.write_bytes(one_value(value))
    os.truncate(path, 1 << 41)
    tracemalloc.start()
    try:
        assert refusal(path).code == "header-damaged"
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_duplicate_key(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, {**MOE_KEYS, "a.one": 1, "a.two": 2})
    path.write_bytes(path.read_bytes().replace(b"a.two", b"a.one"))
    assert refusal(path).code == "duplicate-key"


@pytest.mark.parametrize("value", [0, 3, 48])
def test_alignment_must_be_a_power_of_two(tmp_path: Path, value: int) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, {**MOE_KEYS, "general.alignment": value})
    assert refusal(path).code == "alignment-invalid"


def test_too_many_dimensions(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path)
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, tensor_entry(data, "token_embd.weight").dims - 4, 5)
    path.write_bytes(data)
    assert "5 dimensions" in refusal(path).found


def test_a_name_cannot_upset_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path)
    edit_tensor(path, "token_embd.weight", kind=99)
    path.write_bytes(path.read_bytes().replace(b"token_embd.weight", b"\x1b[2J\xff_embd.weight"))
    str(refusal(path)).encode("utf-8")
    assert "\x1b" not in str(refusal(path))
