"""A buffer is one block that Python and ggml see at the same address, and has an end."""

from __future__ import annotations

import mmap
from itertools import pairwise

import numpy as np
import pytest

from slotwise.kernels.backend import Backend, Buffer, NoMemory
from slotwise.kernels.context import Context
from slotwise.kernels.graph import Graph, tensor_bytes
from slotwise.kernels.lib import F16, F32, I64, TENSOR_ALIGNMENT


def test_it_starts_at_a_page_and_is_whole_pages_long() -> None:
    for wanted in (0, 1, mmap.PAGESIZE, mmap.PAGESIZE + 1):
        buffer = Buffer(wanted)
        assert buffer.address % mmap.PAGESIZE == 0
        assert buffer.size % mmap.PAGESIZE == 0
        assert max(wanted, 1) <= buffer.size < wanted + 2 * mmap.PAGESIZE
        buffer.close()


def test_views_and_arrays_show_the_same_bytes() -> None:
    buffer = Buffer(4096)
    buffer.view(64, 8)[:] = np.array([1.5, -2.0], np.float32).tobytes()
    array = buffer.array(64, np.float32, (2, 1))
    assert array.tolist() == [[1.5], [-2.0]]
    array[1] = 7
    assert bytes(buffer.view(68, 4)) == np.float32(7).tobytes()
    buffer.close()
    assert array[1, 0] == 7  # the memory lives as long as a view of it


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 4), (0, -1), (0, 4097), (4096, 1), (5000, 0)])
def test_a_view_outside_is_refused(offset: int, nbytes: int) -> None:
    buffer = Buffer(4096)
    with pytest.raises(ValueError):
        buffer.view(offset, nbytes)
    buffer.close()


@pytest.mark.parametrize("offset", [-4, 4096, 4093])
def test_an_array_outside_is_refused(offset: int) -> None:
    buffer = Buffer(4096)
    with pytest.raises(ValueError):
        buffer.array(offset, np.float32, (1,))
    buffer.close()


def test_the_last_byte_is_inside() -> None:
    buffer = Buffer(4096)
    assert buffer.view(4095, 1).nbytes == 1
    assert buffer.view(4096, 0).nbytes == 0
    context = Context(1)
    buffer.place(context.tensor(F32, (1024,)), 0)
    buffer.close()


@pytest.mark.parametrize("offset", [-64, 4, 4096, 1 << 40])
def test_a_tensor_outside_is_refused(offset: int) -> None:
    buffer = Buffer(4096)
    context = Context(1)
    tensor = context.tensor(F32, (1024,))
    with pytest.raises(ValueError, match="outside"):
        buffer.place(tensor, offset)
    assert not tensor.contents.data
    buffer.close()


def test_reserved_stretches_do_not_overlap_and_end_with_the_buffer() -> None:
    buffer = Buffer(4096)
    taken = [(buffer.reserve(n), n) for n in (1, 63, 64, 65, 1000)]
    for (a, n), (b, _) in pairwise(taken):
        assert a + n <= b
        assert b % TENSOR_ALIGNMENT == 0
    with pytest.raises(ValueError, match="no room"):
        buffer.reserve(4096)
    left = 4096 - buffer.reserve(0)
    assert buffer.reserve(left) + left == 4096
    buffer.close()


def test_closing_twice_is_fine() -> None:
    buffer, backend = Buffer(1), Backend(1)
    for thing in (buffer, backend, Context(1)):
        thing.close()
        thing.close()


def test_without_memory_tensors_have_shapes_and_nothing_else() -> None:
    g = Graph(4)
    leaf = g.leaf(F32, (3, 2), NoMemory(), 1 << 50)
    assert not leaf.contents.data
    with pytest.raises(TypeError, match="no memory"):
        NoMemory().array(0, np.float32, (1,))


def test_sizes_of_tensors() -> None:
    q4_0 = 2
    assert tensor_bytes(F32, (3, 5, 2)) == 120
    assert tensor_bytes(F16, (7,)) == 14
    assert tensor_bytes(I64, (1, 1, 1, 4)) == 32
    assert tensor_bytes(q4_0, (64, 3)) == 3 * 2 * 18
