"""The memory of the prompt read: what a chunk needs, what is lent, what ggml takes beside it."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest
from engine.rig import CHUNK, PROMPT, Small, check_idle, generate, open_engine

from slotwise.engine import chunk, prompt
from slotwise.engine.chunk import Shape, pairs_at_once, scratch_bytes, work_bytes
from slotwise.engine.engine import Engine
from slotwise.engine.expert_gemm import GemmUse
from slotwise.engine.kv import PADDING
from slotwise.engine.loading import blueprint
from slotwise.engine.stages import Network
from slotwise.errors import SlotwiseError
from slotwise.experts.pool import minimum_slots


def shapes(small: Small, n_kv: int) -> Network:
    """The network as it is measured before anything is loaded."""
    drawing = blueprint(small.model)
    slots = minimum_slots(drawing.layout) if drawing.layout else []
    return drawing._shapes(slots, n_kv)


@pytest.mark.parametrize("gemm", [None, GemmUse(2, from_rows=7, repacked_from_rows=5)])
@pytest.mark.parametrize("kind", ["qwen3moe-mixed", "gpt-oss", "qwen2moe", "llama"])
def test_no_smaller_chunk_needs_more_than_the_full_one(
    kind: str, gemm: GemmUse | None, small: Callable[[str], Small]
) -> None:
    """The loan is made for the widest chunk at the last position, and all others must fit in it."""
    network = shapes(small(kind), 4 * PADDING)
    full = scratch_bytes(network, Shape(48, 4 * PADDING, gemm))
    needed = [
        scratch_bytes(network, Shape(n, n_kv, gemm))
        for n in (1, 2, 3, 7, 16, 31, 47, 48)
        for n_kv in (PADDING, 4 * PADDING)
    ]
    assert max(needed) == full
    assert min(needed) < full / 4


def test_ggml_s_own_memory_is_bounded(
    small: Callable[[str], Small], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of slots x pairs grows with both; a wave is cut into graphs that keep it small."""
    many = blueprint(small("gpt-oss").model)._shapes([2000], PADDING)
    monkeypatch.setattr(chunk, "WORK_LIMIT", 1 << 20)
    assert pairs_at_once(many) == (1 << 20) // 8 // 2000
    assert work_bytes(many, Shape(512, PADDING), 1) < 2 << 20
    monkeypatch.setattr(chunk, "WORK_LIMIT", 1 << 30)
    assert work_bytes(many, Shape(512, PADDING), 1) > 1024 * 2000 * 8


@pytest.mark.parametrize("limit", [1, 5000])
def test_cutting_a_wave_changes_nothing(
    small: Callable[[str], Small], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(small("gpt-oss")) as engine:
        expected, graphs = counted(engine)
    monkeypatch.setattr(chunk, "WORK_LIMIT", limit)
    with open_engine(small("gpt-oss")) as engine:
        found, more = counted(engine)
    np.testing.assert_array_equal(found, expected)
    assert more > graphs


def counted(engine: Engine) -> tuple[np.ndarray, int]:
    """Logits of PROMPT, and how many graphs they took."""
    backend = engine.loaded.backend
    with patch.object(backend, "compute", wraps=backend.compute) as compute:
        return engine.logits(PROMPT), compute.call_count


def test_a_loan_that_does_not_hold_a_chunk_is_made_larger(
    small: Callable[[str], Small], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(small("qwen2moe"), slots=20) as engine:
        expected = engine.logits(PROMPT)
        monkeypatch.setattr(prompt, "scratch_bytes", lambda *_: 1)
        asked = []
        experts = engine.loaded.experts
        assert experts is not None
        lend = experts.lend
        monkeypatch.setattr(experts, "lend", lambda n: asked.append(n) or lend(n))
        np.testing.assert_array_equal(engine.logits(PROMPT), expected)
        assert len(asked) == 1
        assert asked[0] > 1
        check_idle(engine)


def test_a_chunk_that_no_loan_holds_is_an_error_with_figures(
    small: Callable[[str], Small],
) -> None:
    with open_engine(small("qwen2moe"), slots=1) as engine:
        expected = generate(engine)
        with pytest.raises(
            SlotwiseError, match=r"needs [\d,]+ bytes, .* can lend [\d,]+"
        ) as caught:
            engine.logits(PROMPT * 4, chunk=8 * CHUNK)
        assert "--chunk" in caught.value.next_step
        check_idle(engine)
        engine.loaded.state.reuse([-1])
        assert generate(engine) == expected
