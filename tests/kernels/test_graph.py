"""Graphs in planned memory compute what they compute with memory of their own for every tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ggml
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotwise.kernels.backend import Backend, Buffer, NoMemory
from slotwise.kernels.graph import Graph, Tensor, Weights, shape, tensor_bytes
from slotwise.kernels.lib import F16, F32, I32, I64
from slotwise.kernels.planner import DoesNotFitError

WIDTH, ROWS = 8, 6
N_INPUTS = 3

# Each makes a [WIDTH, ROWS] tensor of one or two others of that shape.
OPS: list[Callable[[Graph, Tensor, Tensor], Tensor]] = [
    lambda g, a, b: g.op("add", a, b),
    lambda g, a, b: g.op("mul", a, b),
    lambda g, a, b: g.op("sub", a, b),
    lambda g, a, b: g.op("silu", a),
    lambda g, a, b: g.op("rms_norm", a, 1e-5),
    lambda g, a, b: g.op("soft_max", a),
    lambda g, a, b: g.op("cont", g.op("transpose", g.reshape(a, ROWS, WIDTH))),
    lambda g, a, b: g.op("mul_mat", g.op("mul_mat", a, b), g.op("cont", g.op("transpose", a))),
    lambda g, a, b: _halves(g, a, b),
]


def _halves(g: Graph, a: Tensor, b: Tensor) -> Tensor:
    """The first half of each row of a and the second of b, through views."""
    half, row = WIDTH // 2, WIDTH * 4
    left = g.view(a, (half, ROWS), (row,))
    right = g.view(g.view(b, (WIDTH, ROWS), (row,)), (half, ROWS), (row,), half * 4)
    return g.op("concat", left, right, 0)


@dataclass(frozen=True)
class Recipe:
    """`steps`: op, and which earlier tensors it reads; `kept`: which results are looked at."""

    steps: list[tuple[int, int, int]]
    kept: list[int]

    def build(self, g: Graph, inputs: Sequence[Tensor]) -> list[Tensor]:
        tensors = list(inputs)
        for op, a, b in self.steps:
            result = OPS[op](g, tensors[a % len(tensors)], tensors[b % len(tensors)])
            tensors.append(g.reshape(result, WIDTH, ROWS))
        made = tensors[len(inputs) :]
        return [made[i % len(made)] for i in self.kept]


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    step = st.tuples(st.integers(0, len(OPS) - 1), st.integers(0, 30), st.integers(0, 30))
    steps = draw(st.lists(step, min_size=1, max_size=12))
    kept = draw(st.lists(st.integers(0, 30), max_size=2))
    return Recipe(steps, [*kept, len(steps) - 1])


def root(tensor: Tensor) -> Tensor:
    return tensor.contents.view_src or tensor


class Run:
    """A recipe on fixed inputs, its intermediates wherever `finish` puts them."""

    size = tensor_bytes(F32, (WIDTH, ROWS))

    def __init__(self, recipe: Recipe) -> None:
        self.inputs = Buffer(N_INPUTS * 256)
        self.results = Buffer(256 * len(recipe.kept))
        for i in range(N_INPUTS):
            noise = np.random.default_rng(i).standard_normal((ROWS, WIDTH))
            self.inputs.array(i * 256, np.float32, (ROWS, WIDTH))[:] = noise
        self.before = bytes(self.inputs.view(0, self.inputs.size))
        self.graph = Graph()
        leaves = [
            self.graph.leaf(F32, (WIDTH, ROWS), self.inputs, i * 256) for i in range(N_INPUTS)
        ]
        self.kept = recipe.build(self.graph, leaves)

    def keep(self) -> None:
        """Copies what is looked at out of the intermediates, at the end of the graph."""
        for i, tensor in enumerate(self.kept):
            copy = self.graph.op("scale", tensor, 1.0)
            self.graph.output_at(copy, self.results, i * 256)

    def values(self, backend: Backend) -> list[np.ndarray]:
        self.graph.run(backend)
        assert bytes(self.inputs.view(0, self.inputs.size)) == self.before
        arrays = [
            self.results.array(i * 256, np.float32, (ROWS, WIDTH)).copy()
            for i in range(len(self.kept))
        ]
        self.inputs.close()
        self.results.close()
        return arrays


def garbage(nbytes: int) -> Buffer:
    buffer = Buffer(nbytes)
    buffer.array(0, np.uint8, (buffer.size,))[:] = 0xFF  # NaN in every float type
    return buffer


def apart(recipe: Recipe, backend: Backend) -> list[np.ndarray]:
    """Every tensor has bytes of its own."""
    run = Run(recipe)
    run.keep()
    memory = garbage(1 << 16)
    for i, tensor in enumerate(run.graph._tensors[: -len(run.kept)]):
        run.graph.output_at(tensor, memory, i * 512)
    run.graph.finish(NoMemory(), [])
    values = run.values(backend)
    memory.close()
    return values


@given(recipes())
def test_tight_memory_gives_the_same_results(backend: Backend, recipe: Recipe) -> None:
    expected = apart(recipe, backend)
    run = Run(recipe)
    run.keep()
    needed = run.graph.measure()
    memory = garbage(needed + 4096)
    run.graph.finish(memory, [(0, needed)])
    found = run.values(backend)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    rest = memory.array(needed, np.uint8, (4096,))
    assert (rest == 0xFF).all(), "written behind its extent"
    memory.close()


@given(recipes(), st.lists(st.integers(64, 2000), min_size=1, max_size=6))
def test_scattered_memory_gives_the_same_results_or_none(
    backend: Backend, recipe: Recipe, lengths: list[int]
) -> None:
    run = Run(recipe)
    run.keep()
    extents = [(3000 * i, length) for i, length in enumerate(lengths)]
    memory = garbage(3000 * len(lengths))
    if not run.graph.fits(extents):
        with pytest.raises(DoesNotFitError):
            run.graph.finish(memory, extents)
        return
    run.graph.finish(memory, extents)
    for a, b in zip(run.values(backend), apart(recipe, backend), strict=True):
        np.testing.assert_array_equal(a, b)
    for i, length in enumerate(lengths):
        gap = memory.array(3000 * i + length, np.uint8, (3000 - length,))
        assert (gap == 0xFF).all(), "written outside its extents"
    memory.close()


@given(recipes())
def test_one_byte_less_than_measured_is_not_enough(recipe: Recipe) -> None:
    run = Run(recipe)
    needed = run.graph.measure()
    assert needed >= Run.size
    assert run.graph.fits([(0, needed)])
    assert not run.graph.fits([(0, needed - 1)])
    with pytest.raises(DoesNotFitError):
        run.graph.finish(NoMemory(), [(0, needed - 1)])


def test_a_chain_needs_two_tensors_at_a_time(backend: Backend) -> None:
    g = Graph()
    inputs = Buffer(4096)
    x = g.leaf(F32, (1024,), inputs, 0)
    for _ in range(20):
        x = g.op("silu", x)
    assert g.measure() == 2 * 4096


def test_what_other_graphs_read_is_not_among_the_intermediates(backend: Backend) -> None:
    """`output_at` through a view moves the tensor behind it."""
    memory = garbage(4096)
    g = Graph()
    x = g.leaf(F32, (4, 2), memory, 0)
    memory.array(0, np.float32, (8,))[:] = np.arange(8)
    doubled = g.op("scale", x, 2.0)
    g.output_at(g.reshape(doubled, 8), memory, 512)
    assert g.measure() == 0
    g.finish(NoMemory(), [])
    g.run(backend)
    assert memory.array(512, np.float32, (8,)).tolist() == [2.0 * i for i in range(8)]
    memory.close()


def test_a_second_graph_goes_on_from_the_first(backend: Backend) -> None:
    memory = garbage(8192)
    first, second = Graph(), Graph()
    memory.array(0, np.float32, (4,))[:] = 3
    first.output_at(first.op("scale", first.leaf(F32, (4,), memory, 0), 2.0), memory, 64)
    second.output_at(second.op("scale", second.leaf(F32, (4,), memory, 64), 2.0), memory, 128)
    for g in (first, second):
        g.finish(memory, [(4096, 4096)])
    for value in (3, 5):
        memory.array(0, np.float32, (4,))[:] = value
        first.run(backend)
        second.run(backend)
        assert memory.array(128, np.float32, (4,)).tolist() == [4.0 * value] * 4
    memory.close()


SLOTS, N_IN, N_OUT = 5, 64, 12
Q8_0 = 8


@pytest.mark.parametrize("type_", [F32, F16, Q8_0])
@pytest.mark.parametrize("tokens", [1, 7])
def test_expert_slots_with_a_stride_of_their_own(backend: Backend, type_: int, tokens: int) -> None:
    """Three projections a slot, and rubbish between them: numpy finds the same products."""
    rng = np.random.default_rng(tokens)
    matrix = tensor_bytes(type_, (N_IN, N_OUT))
    slot_bytes, inside = 3 * 4096, 4096 + 128
    arena, weights = garbage(SLOTS * slot_bytes), Weights(1)
    values = rng.standard_normal((SLOTS, N_OUT, N_IN)).astype(np.float32)
    for slot in range(SLOTS):
        at = slot * slot_bytes + inside
        arena.view(at, matrix)[:] = _stored(values[slot], type_)
    tensor = weights.add("gate", type_, (N_IN, N_OUT, SLOTS), arena, inside, slot_bytes=slot_bytes)
    assert shape(tensor) == (N_IN, N_OUT, SLOTS, 1)
    assert weights["gate"] is tensor
    assert weights.get("up") is None

    ids = rng.integers(0, SLOTS, (tokens, 2), np.int32)
    x = rng.standard_normal((tokens, N_IN)).astype(np.float32)
    memory = garbage(1 << 16)
    memory.array(0, np.float32, x.shape)[:] = x
    memory.array(8192, np.int32, ids.shape)[:] = ids
    g = Graph()
    rows = g.leaf(F32, (N_IN, 1, tokens), memory, 0)
    product = g.op("mul_mat_id", tensor, rows, g.leaf(I32, (2, tokens), memory, 8192))
    g.output_at(product, memory, 16384)
    g.finish(NoMemory(), [])
    g.run(backend)
    found = memory.array(16384, np.float32, (tokens, 2, N_OUT))
    expected = np.einsum("tkoi,ti->tko", values[ids], x)
    tolerance = {F32: 1e-5, F16: 0.05, Q8_0: 0.4}[type_]
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
    memory.close()
    arena.close()


def _stored(matrix: np.ndarray, type_: int) -> bytes:
    if type_ == Q8_0:
        blocks = matrix.reshape(-1, 32)
        scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
        codes = np.rint(blocks / scale.astype(np.float32)).astype(np.int8)
        return np.concatenate([scale.view(np.int8), codes], axis=1).tobytes()
    return matrix.astype(np.float16 if type_ == F16 else np.float32).tobytes()


def test_a_slot_array_may_end_with_the_buffer() -> None:
    """The last slot needs its own bytes, not a whole stride."""
    weights = Weights(2)
    arena = Buffer(2 * 4096)
    weights.add("down", F32, (16, 4, 2), arena, 4096 - 256, slot_bytes=4096)
    with pytest.raises(ValueError, match="outside"):
        weights.add("over", F32, (16, 4, 2), arena, 4096 - 256 + 64, slot_bytes=4096)
    arena.close()


def test_state_rows_are_written_where_they_are_asked_for(backend: Backend) -> None:
    """set_rows writes into a tensor that is not the graph's; the graph's own memory is tight."""
    memory = garbage(1 << 14)
    memory.array(0, np.float32, (2, 8))[:] = [[1] * 8, [2] * 8]
    memory.array(256, np.int64, (2,))[:] = [3, 0]
    cache, weights = Buffer(4096), Weights(1)
    keys = weights.add("k", F16, (8, 4), cache, 0)
    g = Graph()
    rows = g.op("scale", g.leaf(F32, (8, 2), memory, 0), 3.0)
    g.op("set_rows", keys, rows, g.leaf(I64, (2,), memory, 256))
    g.finish(memory, [(4096, g.measure())])
    g.run(backend)
    assert cache.array(0, np.float16, (4, 8))[:, 0].tolist() == [6, 0, 0, 3]
    memory.close()
    cache.close()


def test_ggml_work_memory_is_counted_for_many_slots() -> None:
    """mul_mat_id keeps a table of slots x pairs outside our buffers."""

    def work(slots: int, pairs: int) -> int:
        weights = Weights(1)
        tensor = weights.add("gate", F32, (32, 8, slots), NoMemory(), 0, slot_bytes=4096)
        g = Graph()
        rows = g.leaf(F32, (32, 1, pairs), NoMemory(), 0)
        g.op("mul_mat_id", tensor, rows, g.leaf(I32, (1, pairs), NoMemory(), 0))
        return g.work_bytes(1)

    assert work(100, 50) >= 100 * 50 * 8
    assert work(100, 100) - work(100, 50) >= 100 * 50 * 8


def test_unknown_ops_are_no_tensor() -> None:
    with pytest.raises(AttributeError):
        Graph().op("no_such_op")
    assert not hasattr(ggml, "ggml_no_such_op")
