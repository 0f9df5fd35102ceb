"""Damaged GGUF bytes: findings or Refused, never anything else."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weights.gguf_files import MOE_KEYS, moe_tensors, write_model

from slotwise.errors import Refused
from slotwise.weights.layout import expert_layout, source_ranges
from slotwise.weights.preflight_report import model_facts
from slotwise.weights.shards import inspect, open_model

KEYS = {
    **MOE_KEYS,
    "tokenizer.ggml.tokens": ["<s>", "ä", "\u4f60"],
    "tokenizer.ggml.scores": [0.0, 1.5],
    "general.alignment": 32,
}


def _written(shards: int) -> list[tuple[str, bytes]]:
    with TemporaryDirectory() as folder:
        paths = write_model(Path(folder) / "m.gguf", KEYS, moe_tensors("Q4_0"), shards=shards)
        return [(path.name, path.read_bytes()) for path in paths]


SINGLE, SPLIT = _written(1), _written(3)
HEADER = 1100
"""Bytes that hold the whole header of SINGLE and of each file of SPLIT, about."""

KINDS = ["set", "set", "set", "number", "number", "cut", "insert", "double", "delete"]


@st.composite
def damage(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` after a few flips, cuts, insertions and copies, mostly in the header."""
    changed = bytearray(data)
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 4]))):
        limit = draw(st.sampled_from([HEADER, HEADER, HEADER, len(data)]))
        # Not from byte 0: a damaged magic or count ends every further question.
        start = draw(st.sampled_from(range(draw(st.sampled_from([0, 24, 24, 24])), limit)))
        length = draw(st.sampled_from([1, 1, 2, 4, 8, 33]))
        match draw(st.sampled_from(KINDS)):
            case "set":
                changed[start : start + length] = draw(st.binary(min_size=length, max_size=length))
            case "number":
                number = draw(st.sampled_from([0, 1, 2, 31, 2**16, 2**31, 2**32, 2**62, 2**64 - 1]))
                changed[start : start + 8] = number.to_bytes(8, "little")
            case "cut":
                del changed[start:]
            case "insert":
                changed[start:start] = draw(st.binary(min_size=1, max_size=length))
            case "double":
                changed[start:start] = changed[start : start + length]
            case "delete":
                del changed[start : start + length]
    return bytes(changed)


def examine(path: Path) -> None:
    """All that reads a model's headers must either work or refuse, and say the same thing."""
    model, findings = inspect(path)
    refused = any(f.level == "refusal" for f in findings)
    for finding in findings:
        assert finding.found
        assert len(str(finding)) < 5000
        str(finding).encode("utf-8")
    if model is not None:
        model_facts(model, None)
    if model is None or refused:
        with pytest.raises(Refused):
            open_model(path)
        return
    try:
        layout = expert_layout(open_model(path))
    except Refused:
        return
    if layout is not None:
        for moe_index in range(layout.n_moe_layers):
            for part in source_ranges(model, layout, moe_index, layout.n_experts - 1):
                assert part.offset + part.nbytes <= part.path.stat().st_size


@settings(max_examples=300, deadline=None)
@given(damage(SINGLE[0][1]))
def test_damaged_file(data: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(data)
        examine(path)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_damaged_shards(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        names = [name for name, _ in SPLIT]
        for name, content in SPLIT:
            match data.draw(st.sampled_from(["keep", "keep", "damage", "leave out", "rename"])):
                case "keep":
                    (Path(folder) / name).write_bytes(content)
                case "damage":
                    (Path(folder) / name).write_bytes(data.draw(damage(content)))
                case "rename":
                    other = data.draw(st.sampled_from([*names, "m-2-of-3.gguf", "x.gguf"]))
                    (Path(folder) / other).write_bytes(content)
        for path in sorted(Path(folder).iterdir()):
            examine(path)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_noise_after_the_magic(data: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(b"GGUF\x03\0\0\0" + data)
        examine(path)


def test_every_single_cut() -> None:
    data = SINGLE[0][1]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        for length in [*range(0, HEADER, 7), *range(HEADER, len(data), 501)]:
            path.write_bytes(data[:length])
            assert any(f.level == "refusal" for f in inspect(path)[1]), length
            examine(path)


def test_the_undamaged_files_are_sound() -> None:
    for files in (SINGLE, SPLIT):
        with TemporaryDirectory() as folder:
            for name, content in files:
                (Path(folder) / name).write_bytes(content)
            path = Path(folder) / files[0][0]
            assert inspect(path)[1] == []
            examine(path)
