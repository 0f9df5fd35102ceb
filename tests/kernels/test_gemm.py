"""Dequantised products on the host, and the crew that shares them."""

from __future__ import annotations

import threading

import gguf
import numpy as np
import pytest

from slotwise.kernels.backend import Backend, Buffer
from slotwise.kernels.gemm import (
    Crew,
    HostProducts,
    Matrix,
    floats,
    narrow_floats,
    tile_floats,
    tile_rows,
)
from slotwise.kernels.graph import Graph, Weights
from slotwise.kernels.lib import F32

N_IN, N_OUT, ROWS = 256, 300, 50
TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"]


def weights_of(type_name: str) -> tuple[np.ndarray, Weights, Buffer]:
    """Random weights f32 [N_OUT, N_IN] as the type holds them, and as a tensor."""
    type_ = gguf.GGMLQuantizationType[type_name]
    values = np.random.default_rng(1).standard_normal((N_OUT, N_IN)).astype(np.float32)
    raw = gguf.quants.quantize(values, type_)
    buffer = Buffer(raw.nbytes + 64)
    buffer.array(0, np.uint8, (raw.nbytes,))[:] = raw.reshape(-1).view(np.uint8)
    named = Weights(1)
    named.add("w", int(type_), (N_IN, N_OUT), buffer, 0)
    return gguf.quants.dequantize(raw, type_), named, buffer


@pytest.mark.parametrize("type_name", TYPES)
def test_rows_are_the_type_s_values(type_name: str) -> None:
    values, named, _buffer = weights_of(type_name)
    matrix = Matrix.of(named["w"], 0)
    room = np.empty(tile_floats(N_IN, N_OUT, ROWS), np.float32)
    np.testing.assert_array_equal(matrix.rows(7, 31, room), values[7:31])


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("members", [1, 3])
def test_a_graph_has_its_products_on_the_host(type_name: str, members: int) -> None:
    """scale(w x) + x' where x = 2 x0: a product between two segments of ggml's ops."""
    values, named, _weights = weights_of(type_name)
    x0 = np.random.default_rng(2).standard_normal((ROWS, N_IN)).astype(np.float32)
    memory = Buffer(4 << 20)
    memory.array(0, np.float32, x0.shape)[:] = x0
    crew = Crew(members)
    tiles = np.empty((members, narrow_floats(N_IN, ROWS)), np.float32)
    g = Graph(host=HostProducts(crew, tiles))
    x = g.op("scale", g.leaf(F32, (N_IN, ROWS), memory, 0), 2.0)
    out = g.op("scale", g.op("add", g.product(named["w"], x), g.product(named["w"], x)), 0.25)
    g.finish(memory, [(1 << 20, 3 << 20)])
    backend = Backend(1)
    g.run(backend)
    found = floats(out).copy()
    crew.close()
    backend.close()
    np.testing.assert_allclose(found, x0 @ values.T, rtol=0, atol=1e-4)
    single = expected_of_one(x0, named)
    np.testing.assert_array_equal(found, single)


def expected_of_one(x0: np.ndarray, named: Weights) -> np.ndarray:
    """The same products, tile by tile in this thread: the crew's size changes no bit."""
    matrix, room = Matrix.of(named["w"], 0), np.empty(tile_floats(N_IN, N_OUT, ROWS), np.float32)
    out = np.empty((len(x0), N_OUT), np.float32)
    for first in range(0, N_OUT, 96):
        last = min(first + 96, N_OUT)
        np.matmul(x0 * np.float32(2), matrix.rows(first, last, room).T, out=out[:, first:last])
    return (out + out) * np.float32(0.25)


def test_a_graph_that_was_only_measured_does_not_run() -> None:
    _values, named, _weights = weights_of("F32")
    memory = Buffer(1 << 20)
    g = Graph(host=HostProducts())
    g.product(named["w"], g.leaf(F32, (N_IN, ROWS), memory, 0))
    assert g.measure() >= ROWS * N_OUT * 4
    g.finish(memory, [(1 << 19, 1 << 19)])
    with pytest.raises(ValueError, match="only measured"):
        g.run(Backend(1))


def test_every_task_is_done_once_by_somebody() -> None:
    crew, lock, done = Crew(3), threading.Lock(), []

    def task(number: int):
        def work(member: int) -> None:
            with lock:
                done.append((number, member))

        return work

    for n in (0, 1, 2, 50):
        done.clear()
        crew.run([task(i) for i in range(n)])
        assert sorted(number for number, _ in done) == list(range(n))
        assert all(0 <= member < 3 for _, member in done)
    crew.close()


def test_an_error_of_any_member_is_raised_and_the_crew_goes_on() -> None:
    crew, met = Crew(2), threading.Barrier(2, timeout=10)

    def fail_in(bad: int):
        def work(member: int) -> None:
            met.wait()  # both members hold a task
            if member == bad:
                raise ArithmeticError(f"member {bad}")

        return work

    for bad in (0, 1):
        with pytest.raises(ArithmeticError, match=f"member {bad}"):
            crew.run([fail_in(bad)] * 2)
    crew.run([lambda _member: None] * 5)
    crew.close()


def test_a_tile_is_at_least_sixteen_rows_and_at_most_the_matrix() -> None:
    assert tile_rows(1 << 20, 1000) == 16
    assert tile_rows(64, 100) == 100
    assert tile_rows(576, 1536) == 448
    for n_in in (64, 576, 1 << 20):
        assert tile_rows(n_in, 1 << 20) * n_in <= tile_floats(n_in, 1 << 20, 1)
