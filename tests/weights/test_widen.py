"""Widening Q2_0 to Q4_0 changes no value."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st

from slotwise.weights.widen import widen_q2_0


def values_of_q2_0(raw: bytes) -> np.ndarray:
    """The format's own definition, one value at a time."""
    values = []
    for start in range(0, len(raw), 18):
        scale = np.frombuffer(raw[start : start + 2], np.float16)[0].astype(np.float32)
        codes = raw[start + 2 : start + 18]
        values += [np.float32(((codes[j // 4] >> 2 * (j % 4)) & 3) - 1) * scale for j in range(64)]
    return np.array(values, np.float32)


@settings(deadline=None)
@given(st.integers(1, 4).flatmap(lambda n: st.binary(min_size=18 * n, max_size=18 * n)))
def test_q4_0_has_the_values_of_q2_0(raw: bytes) -> None:
    wide = widen_q2_0(np.frombuffer(raw, np.uint8))
    with np.errstate(all="ignore"):  # a random scale can be infinite or not a number
        got = quants.dequantize(wide, gguf.GGMLQuantizationType.Q4_0)
        expected = values_of_q2_0(raw)
    np.testing.assert_array_equal(got, expected)


def test_every_code_becomes_its_nibble() -> None:
    raw = np.concatenate([np.array([0, 0x3C], np.uint8), np.full(16, 0b11100100, np.uint8)])
    wide = widen_q2_0(raw)
    expected = [0, 0x3C, *[0x77, 0x88, 0x99, 0xAA] * 4] * 2
    assert wide.tolist() == expected


def test_fills_the_array_it_is_given() -> None:
    raw = np.random.default_rng(0).integers(0, 256, 18 * 5, np.uint8)
    out = np.zeros(36 * 5, np.uint8)
    assert widen_q2_0(raw, out=out) is out
    assert out.tobytes() == widen_q2_0(raw).tobytes()


@pytest.mark.parametrize(
    "raw", [np.zeros(17, np.uint8), np.zeros(18, np.int8), np.zeros((2, 18), np.uint8)]
)
def test_refuses_what_is_not_whole_blocks(raw: np.ndarray) -> None:
    with pytest.raises(ValueError, match="blocks of 18 bytes"):
        widen_q2_0(raw)
