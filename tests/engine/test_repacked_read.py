"""Which experts of a prompt read are multiplied by repacked tiles when nothing is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import gguf
import pytest
from engine.rig import Small, open_engine
from reference.tiny import random_tokens

from slotwise.engine.expert_gemm import REPACKED_FROM_ROWS
from slotwise.kernels.repack import Repacked, repackable

Q4_1 = int(gguf.GGMLQuantizationType.Q4_1)
LONG = random_tokens(160, seed=3)
"""Enough for every expert to get many rows."""


def rows_repacked(small: Small, tokens: list[int], **chosen: Any) -> list[int]:
    """Rows of each product with a repacked tile while `tokens` are read in one chunk."""
    seen: list[int] = []
    multiply = Repacked.multiply

    def watched(self: Repacked, type_: int, source: int, inputs: Any, *rest: Any) -> None:
        assert type_ == Q4_1
        seen.append(len(inputs))
        multiply(self, type_, source, inputs, *rest)

    with (
        patch.object(Repacked, "multiply", watched),
        open_engine(small, chunk=len(tokens), **chosen) as engine,
    ):
        engine.read_only(tokens)
    return seen


@pytest.mark.skipif(not repackable(Q4_1, 256, 256), reason="this processor has no such kernels")
def test_it_is_those_with_many_rows(small: Callable[[str], Small]) -> None:
    rows = rows_repacked(small("qwen3moe-q4_1"), LONG)
    assert rows
    assert min(rows) >= REPACKED_FROM_ROWS
    assert rows_repacked(small("qwen3moe-q4_1"), LONG[: REPACKED_FROM_ROWS - 1]) == []


def test_and_none_when_one_kind_of_product_is_asked_for(small: Callable[[str], Small]) -> None:
    assert rows_repacked(small("qwen3moe-q4_1"), LONG, exact=True) == []
    assert rows_repacked(small("qwen3moe"), LONG) == []
