"""The tiny GGUFs mean the same to llama.cpp as to transformers: the files are right.

Only then does a difference in test_engine_reference.py speak of the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from reference.llama_cpp import llama_cpp_logits
from reference.tiny import ARCHITECTURES, TinyModel, build, experts_in, random_tokens

pytestmark = pytest.mark.skipif(not find_spec("xllamacpp"), reason="xllamacpp is not installed")

TOKENS = random_tokens(40)


@pytest.fixture(scope="module")
def llama_cpp(tiny: Callable[[str], TinyModel]) -> dict[str, np.ndarray]:
    paths = [tiny(name).path for name in ARCHITECTURES]
    return dict(zip(ARCHITECTURES, llama_cpp_logits(paths, TOKENS), strict=True))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_f32_logits_agree(
    name: str, tiny: Callable[[str], TinyModel], llama_cpp: dict[str, np.ndarray]
) -> None:
    expected = tiny(name).torch_logits(TOKENS)
    np.testing.assert_allclose(llama_cpp[name], expected, rtol=0, atol=1e-4)


def test_quantised_logits_agree(tmp_path: Path) -> None:
    """llama.cpp rounds activations to 8 bits, so only relative RMS can agree."""
    models = [
        build("gpt-oss", tmp_path, type_of=experts_in("MXFP4"), label="mxfp4"),
        *(
            build("qwen3moe", tmp_path, type_of=experts_in(t), label=t)
            for t in ("Q2_0", "Q1_0", "Q4_K")
        ),
    ]
    results = llama_cpp_logits([m.path for m in models], TOKENS)
    for model, found in zip(models, results, strict=True):
        expected = model.torch_logits(TOKENS)
        error = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
        assert np.median(error) < 0.03, (model.path.name, np.median(error))
