"""Repacked products against f64 on what the type holds, and what decides whether they are used."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from slotwise.kernels.gemm import Crew, Matrix, tile_floats, tiles_of
from slotwise.kernels.repack import ROW_STEP, Repacked, repackable, repacked_floats, repacked_rows

RELATIVE = 0.012
"""Of the result's size: inputs are rounded to 8 bits (half of 1/127 of a block's largest)."""


def stored(type_name: str, n_in: int, n_out: int) -> tuple[int, np.ndarray, np.ndarray]:
    """The ggml type, raw rows u8 [n_out, bytes], and the values f32 they stand for; not centred, so
    that an offset of a block matters."""
    type_ = gguf.GGMLQuantizationType[type_name]
    values = np.random.default_rng(1).standard_normal((n_out, n_in)).astype(np.float32) + 0.5
    raw = np.ascontiguousarray(gguf.quants.quantize(values, type_)).view(np.uint8)
    return int(type_), raw, gguf.quants.dequantize(raw, type_)


def test_types_without_kernels_are_left_to_others() -> None:
    assert not repackable(int(gguf.GGMLQuantizationType.F32), 64, 64)
    assert not repackable(int(gguf.GGMLQuantizationType.Q4_1), 64, 65)
    assert not repackable(int(gguf.GGMLQuantizationType.Q4_1), 48, 64)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "MXFP4"])
@pytest.mark.parametrize("rows", [1, 3, 4, 37])
def test_it_is_the_product(type_name: str, rows: int) -> None:
    n_in, n_out = 288, 160
    type_, raw, weights = stored(type_name, n_in, n_out)
    if not repackable(type_, n_in, n_out):
        pytest.skip(f"this processor has no kernel for repacked {type_name}")
    inputs = np.random.default_rng(2).standard_normal((rows, n_in)).astype(np.float32)
    wide = np.full((rows, n_out + 7), np.nan, np.float32)
    room = np.empty(repacked_floats(n_in, n_out, rows), np.float32)
    worker = Repacked()
    worker.multiply(type_, raw.ctypes.data, inputs, wide[:, :n_out], room)
    worker.close()
    expected = inputs.astype(np.float64) @ weights.astype(np.float64).T
    size = np.linalg.norm(inputs, axis=1)[:, None] * np.linalg.norm(weights, axis=1)
    assert np.abs(wide[:, :n_out] - expected).max() < RELATIVE * size.max()
    assert np.isnan(wide[:, n_out:]).all()  # nothing beside its own columns


def test_one_worker_takes_any_number_of_rows_in_any_order() -> None:
    n_in, n_out = 64, 64
    type_, raw, _ = stored("Q4_1", n_in, n_out)
    if not repackable(type_, n_in, n_out):
        pytest.skip("this processor has no kernel for repacked Q4_0")
    inputs = np.random.default_rng(3).standard_normal((40, n_in)).astype(np.float32)
    room = np.empty(repacked_floats(n_in, n_out, 40), np.float32)
    found = []
    for orders in ((40, 8, 4), (4, 8, 40)):
        worker, outputs = Repacked(), {}
        for rows in orders:
            out = np.empty((rows, n_out), np.float32)
            worker.multiply(type_, raw.ctypes.data, inputs[:rows], out, room)
            outputs[rows] = out
        worker.close()
        found.append(outputs)
    for rows in (4, 8, 40):
        np.testing.assert_array_equal(found[0][rows], found[1][rows])


@pytest.mark.parametrize("members", [1, 2])
def test_a_crew_gives_the_same_bits_whatever_its_size(members: int) -> None:
    n_in, n_out, rows = 2048, 1024, 24
    type_, raw, _ = stored("Q4_1", n_in, n_out)
    matrix = Matrix(raw.ctypes.data, type_, n_in, n_out, raw.shape[1])
    inputs = np.random.default_rng(4).standard_normal((rows, n_in)).astype(np.float32)
    out, alone = (np.empty((rows, n_out), np.float32) for _ in range(2))
    tiles = np.empty((members, tile_floats(n_in, n_out, rows)), np.float32)
    crew = Crew(members)

    def task(part: slice, member: int) -> None:
        crew.multiply(matrix, part, inputs, out[:, part], member=member, room=tiles[member])

    parts = tiles_of(n_out, matrix.tile)
    assert len(parts) > 1
    crew.run([lambda member, part=part: task(part, member) for part in parts])
    for part in parts:
        crew.multiply(matrix, part, inputs, alone[:, part], member=0, room=tiles[0])
    crew.close()
    np.testing.assert_array_equal(out, alone)


def test_tiles_are_whole_steps() -> None:
    assert repacked_rows(576, 1536) == 768
    assert repacked_rows(1536, 576) == 288
    assert repacked_rows(1 << 20, 4096) == ROW_STEP
    assert repacked_rows(64, 96) == 96
