"""Products with weights repacked for ggml's fastest kernels, a tile of a matrix at a time.

ggml interleaves the blocks of several rows (its buffer type CPU_REPACK) and then multiplies many
rows of inputs at once, in whole numbers; which types it can do that with depends on the processor.
llama.cpp repacks a whole model when it loads it. Here the expert slots keep the file's layout, and
a tile is repacked just before its product: it is paid for from a few rows of inputs on.

Q4_1 has no such kernel, but is Q4_0 with another offset: d q + m = d (q - 8) + (m + 8 d). The first
part is repacked as Q4_0, the second is a product of the inputs' sums over each block, in F32.
"""

from __future__ import annotations

import ctypes
from contextlib import closing
from functools import cache
from math import prod
from typing import Any, cast

import ggml
import numpy as np

from slotwise.kernels.backend import Backend
from slotwise.kernels.context import Context
from slotwise.kernels.lib import COMPUTE, F32, TENSOR_ALIGNMENT, Tensor

Q4_0: int = ggml.GGML_TYPE_Q4_0
Q4_1: int = ggml.GGML_TYPE_Q4_1
BLOCK = 32
"""Values that share a scale, in Q4_0, Q4_1 and the 8-bit type that inputs are rounded to."""
Q4_0_BLOCK = np.dtype([("d", "<f2"), ("q", "V16")])
Q4_1_BLOCK = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "V16")])
"""d: scale, m: offset, q: 32 values of 4 bits (ggml-common.h)."""

TILE_WEIGHTS = 432 << 10
"""Weights repacked at a time: with its inputs a tile stays in a core's own cache."""
ROW_STEP = 32
"""Rows of a tile are a multiple of this, as ggml interleaves 8 or 16."""

_library: Any = ggml.ggml.lib
for _name in (
    "ggml_backend_cpu_reg",
    "ggml_backend_reg_dev_get",
    "ggml_backend_reg_get_proc_address",
):
    getattr(_library, _name).restype = ctypes.c_void_p
_fp16_to_fp32 = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(
    ("ggml_cpu_fp16_to_fp32", _library)
)


@cache
def _repack_type() -> int | None:
    """ggml's buffer type whose tensors are repacked when they are set; None: built without."""
    registry = ctypes.c_void_p(_library.ggml_backend_cpu_reg())
    device = ctypes.c_void_p(_library.ggml_backend_reg_dev_get(registry, ctypes.c_size_t(0)))
    found = _library.ggml_backend_reg_get_proc_address(
        registry, b"ggml_backend_dev_get_extra_bufts"
    )
    if not found:
        return None
    types = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(found)(device)
    i = 0
    while address := types[i]:
        kind: Any = ctypes.c_void_p(address)
        if ggml.ggml_backend_buft_name(kind) == b"CPU_REPACK":
            return address
        i += 1
    return None


class _RepackedTensor:
    """A tensor that ggml will repack. Its memory is elsewhere: `set` says where."""

    def __init__(self, context: Context, type_: int, ne: tuple[int, int]) -> None:
        self.tensor = context.tensor(type_, ne)
        self.nbytes = ggml.ggml_nbytes(self.tensor)
        kind = ctypes.c_void_p(_repack_type())
        # Never written to, so it takes addresses but no memory.
        handle = _library.ggml_backend_buft_alloc_buffer(kind, ctypes.c_size_t(self.nbytes + 64))
        if not handle:
            raise MemoryError(f"ggml found no addresses for a tile of {self.nbytes:,} bytes")
        self._buffer: Any = ctypes.c_void_p(handle)
        base: Any = ctypes.c_void_p(_library.ggml_backend_buffer_get_base(self._buffer))
        ggml.ggml_backend_tensor_alloc(self._buffer, self.tensor, base)

    @property
    def possible(self) -> bool:
        """Whether this processor has kernels for it."""
        return bool(self.tensor.contents.extra)

    def set(self, source: int, target: int) -> None:
        """Repacks plain rows at address `source` to address `target`."""
        cast(Any, self.tensor.contents).data = target
        ggml.ggml_backend_tensor_set(self.tensor, source, 0, self.nbytes)

    def close(self) -> None:
        _library.ggml_backend_buffer_free(self._buffer)


@cache
def repackable(type_: int, n_in: int, n_out: int) -> bool:
    """Whether weights [n_in, n_out] of a ggml type can be multiplied this way on this processor."""
    if _repack_type() is None or n_out % ROW_STEP or n_in % BLOCK:
        return False
    stored = Q4_0 if type_ == Q4_1 else type_
    context = Context(1)
    with closing(context), closing(_RepackedTensor(context, stored, (n_in, ROW_STEP))) as tensor:
        return tensor.possible


def repacked_rows(n_in: int, n_out: int) -> int:
    """Rows of a matrix that are repacked together."""
    return min(n_out, max(ROW_STEP, TILE_WEIGHTS // n_in // ROW_STEP * ROW_STEP))


def repacked_floats(n_in: int, n_out: int, rows: int) -> int:
    """Room, in floats, for a tile of `n_out` rows and `rows` rows of inputs, or for less of both.

    The tile twice, plain and repacked (no repackable type takes over a byte a weight), its offsets,
    its results, and the inputs' sums.
    """
    blocks = n_in // BLOCK
    return n_in * n_out // 2 + n_out * blocks + rows * (n_out + blocks) + 6 * TENSOR_ALIGNMENT


class _Room:
    """Hands out aligned parts of an array of floats."""

    def __init__(self, floats: np.ndarray) -> None:
        self._bytes, self._top = floats.reshape(-1).view(np.uint8), 0
        self._skew = -floats.ctypes.data % TENSOR_ALIGNMENT

    def take(self, nbytes: int) -> np.ndarray:
        first = self._top + self._skew
        self._top += -(-nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        if first + nbytes > self._bytes.size:  # ggml would write beyond it
            raise ValueError(
                f"{first + nbytes:,} bytes of room are needed, {self._bytes.size:,} here"
            )
        return self._bytes[first : first + nbytes]

    def floats(self, *shape: int) -> np.ndarray:
        return self.take(4 * prod(shape)).view(np.float32).reshape(shape)


class _Graph:
    """One product for tiles of one type and size, and any number of rows of inputs."""

    def __init__(self, type_: int, n_in: int, n_out: int) -> None:
        self._context = Context(3, 8)
        self.weights = _RepackedTensor(self._context, type_, (n_in, n_out))
        self._inputs = self._context.tensor(F32, (n_in, 1))
        handle = self._context.handle
        self._out = ggml.ggml_mul_mat(handle, self.weights.tensor, self._inputs)
        self._out.contents.flags |= COMPUTE
        self.graph: Any = ggml.ggml_new_graph_custom(handle, 8, False)
        ggml.ggml_graph_add_node(self.graph, self._out)

    def place(self, inputs: np.ndarray, out: np.ndarray) -> None:
        """Both contiguous f32: [rows, n_in] and [rows, n_out]."""
        for tensor, array in ((self._inputs, inputs), (self._out, out)):
            _resize(tensor, array.shape[0])
            cast(Any, tensor.contents).data = array.ctypes.data

    def close(self) -> None:
        self.weights.close()
        self._context.close()


def _resize(tensor: Tensor, rows: int) -> None:
    t = tensor.contents
    t.ne[1] = rows
    t.nb[2] = t.nb[3] = t.nb[1] * rows


class Repacked:
    """What one thread multiplies with; no other may use it meanwhile."""

    def __init__(self) -> None:
        self._backend = Backend(1)
        self._graphs: dict[tuple[int, int, int], _Graph] = {}

    def multiply(
        self,
        type_: int,
        source: int,
        inputs: np.ndarray,
        out: np.ndarray,
        room: np.ndarray,
    ) -> None:
        """out f32 [rows, n_out] = inputs f32 [rows, n_in] @ weights^T.

        The weights are `n_out` plain rows at address `source`; `inputs` is contiguous, `out` need
        not be; `room` f32 has `repacked_floats`.
        """
        (rows, n_in), n_out, free = inputs.shape, out.shape[1], _Room(room)
        stored = Q4_0 if type_ == Q4_1 else type_
        graph = self._graph(stored, n_in, n_out)
        offsets = None
        if type_ == Q4_1:
            plain = free.take(graph.weights.nbytes)
            offsets = _as_q4_0(source, plain, free.floats(n_out, n_in // BLOCK))
            source = plain.ctypes.data
        graph.weights.set(source, free.take(graph.weights.nbytes).ctypes.data)
        result = free.floats(rows, n_out)
        graph.place(inputs, result)
        self._backend.compute(graph.graph)
        if offsets is None:
            out[:] = result
            return
        sums = free.floats(rows, n_in // BLOCK)
        np.dot(inputs.reshape(-1, BLOCK), _ones(), out=sums.reshape(-1))
        np.matmul(sums, offsets.T, out=out)
        out += result

    def _graph(self, type_: int, n_in: int, n_out: int) -> _Graph:
        key = type_, n_in, n_out
        if key not in self._graphs:
            self._graphs[key] = _Graph(*key)
        return self._graphs[key]

    def close(self) -> None:
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._backend.close()


def _as_q4_0(source: int, plain: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Writes Q4_1 rows at `source` as Q4_0 blocks, and m + 8 d of each; returns the latter."""
    raw = (ctypes.c_uint8 * (offsets.size * Q4_1_BLOCK.itemsize)).from_address(source)
    blocks, target = np.ctypeslib.as_array(raw).view(Q4_1_BLOCK), plain.view(Q4_0_BLOCK)
    target["d"], target["q"] = blocks["d"], blocks["q"]
    flat = offsets.reshape(-1)
    _widen(blocks["d"], flat)
    flat *= 8
    flat += _widen(blocks["m"], np.empty_like(flat))
    return offsets


def _widen(halves: np.ndarray, out: np.ndarray) -> np.ndarray:
    """f16 to f32 by ggml, with the processor's own instruction: numpy takes ten times as long."""
    packed = np.ascontiguousarray(halves)
    _fp16_to_fp32(packed.ctypes.data, out.ctypes.data, out.size)
    return out


@cache
def _ones() -> np.ndarray:
    return np.ones(BLOCK, np.float32)
