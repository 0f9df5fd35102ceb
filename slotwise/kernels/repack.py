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
Q4_0_BLOCK = np.dtype([("d", "<f2"), ("q", "c16")])
Q4_1_BLOCK = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "c16")])
Q4_1_PAIRS = np.dtype([("dm", "<u4"), ("q", "c16")])
"""d: scale, m: offset, q: 32 values of 4 bits (ggml-common.h). numpy copies 16 bytes faster as a
complex number than as bytes."""

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

    The tile twice, plain and repacked (no repackable type takes over a byte a weight), its scales
    and offsets, its results, and the inputs' sums.
    """
    blocks = n_in // BLOCK
    return n_in * n_out // 2 + 2 * n_out * blocks + rows * (n_out + 2 * blocks) + 16 * 6


class _Room:
    """Where one tile's parts lie in an array of floats. Made once for an array, as there are
    thousands of small tiles in a prompt read."""

    def __init__(self, floats: np.ndarray, nbytes: int, pairs: int) -> None:
        """For weights of `nbytes`, with so many pairs of scale and offset."""
        self._bytes = floats.reshape(-1).view(np.uint8)
        self._address: int = floats.ctypes.data
        self._top = -self._address % TENSOR_ALIGNMENT
        self.plain, repacked = self._take(nbytes), self._take(nbytes)
        self.repacked: int = repacked.ctypes.data
        self.wide = self._take(8 * pairs).view(np.float32)
        self._rest = self._bytes[self._top :].view(np.float32)

    def is_in(self, floats: np.ndarray) -> bool:
        return floats.ctypes.data == self._address and floats.nbytes == self._bytes.size

    def _take(self, nbytes: int) -> np.ndarray:
        first = self._top
        self._top += -(-nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        self._check(first + nbytes)
        return self._bytes[first : first + nbytes]

    def _check(self, nbytes: int) -> None:
        if nbytes > self._bytes.size:  # ggml would write beyond it
            raise ValueError(f"{nbytes:,} bytes of room are needed, {self._bytes.size:,} here")

    def rest(self, count: int) -> np.ndarray:
        """So many floats behind the tile, the same at every call."""
        self._check(self._top + 4 * count)
        return self._rest[:count]


class _Tile:
    """Products with tiles of one type and size, and any number of rows of inputs."""

    def __init__(self, type_: int, n_in: int, n_out: int) -> None:
        self._n_in, self._n_out, self._rows = n_in, n_out, 1
        self._pairs = n_out * (n_in // BLOCK) if type_ == Q4_1 else 0
        self._source = ctypes.c_uint8 * (self._pairs * Q4_1_BLOCK.itemsize)
        self._context = Context(3, 8)
        stored = Q4_0 if type_ == Q4_1 else type_
        self._weights = _RepackedTensor(self._context, stored, (n_in, n_out))
        self._inputs = self._context.tensor(F32, (n_in, 1))
        handle = self._context.handle
        self._out = ggml.ggml_mul_mat(handle, self._weights.tensor, self._inputs)
        self._out.contents.flags |= COMPUTE
        self._graph: Any = ggml.ggml_new_graph_custom(handle, 8, False)
        ggml.ggml_graph_add_node(self._graph, self._out)
        self._room: _Room | None = None

    def multiply(
        self, source: int, inputs: np.ndarray, out: np.ndarray, floats: np.ndarray, backend: Backend
    ) -> None:
        """As `Repacked.multiply`."""
        room = self._room
        if room is None or not room.is_in(floats):
            room = self._room = _Room(floats, self._weights.nbytes, self._pairs)
        if self._pairs:
            source = self._split(source, room)
        self._weights.set(source, room.repacked)
        rows = len(inputs)
        result = room.rest(rows * self._n_out).reshape(rows, self._n_out)
        self._place(inputs, result)
        backend.compute(self._graph)
        if not self._pairs:
            out[:] = result
            return
        sums = room.rest(result.size + 2 * rows * (self._n_in // BLOCK))[result.size :]
        np.dot(inputs.reshape(-1, BLOCK), _weights_of_sums(), out=sums.reshape(-1, 2))
        wide = room.wide.reshape(self._n_out, -1)
        np.matmul(sums.reshape(rows, -1), wide.T, out=out)
        out += result

    def _split(self, source: int, room: _Room) -> int:
        """Q4_1 rows at `source` become Q4_0 blocks, whose address it returns, and pairs of scale
        and offset."""
        raw: Any = self._source.from_address(source)
        blocks, plain = np.frombuffer(raw, Q4_1_BLOCK), room.plain.view(Q4_0_BLOCK)
        plain["d"], plain["q"] = blocks["d"], blocks["q"]
        # ggml widens with the processor's own instruction: numpy takes ten times as long.
        pairs = np.ascontiguousarray(np.frombuffer(raw, Q4_1_PAIRS)["dm"])
        _fp16_to_fp32(pairs.ctypes.data, room.wide.ctypes.data, room.wide.size)
        return room.plain.ctypes.data

    def _place(self, inputs: np.ndarray, out: np.ndarray) -> None:
        """Both contiguous f32: [rows, n_in] and [rows, n_out]."""
        for tensor, array in ((self._inputs, inputs), (self._out, out)):
            if len(inputs) != self._rows:
                _resize(tensor, len(inputs))
            cast(Any, tensor.contents).data = array.ctypes.data
        self._rows = len(inputs)

    def close(self) -> None:
        self._weights.close()
        self._context.close()


def _resize(tensor: Tensor, rows: int) -> None:
    t = tensor.contents
    t.ne[1] = rows
    t.nb[2] = t.nb[3] = t.nb[1] * rows


@cache
def _weights_of_sums() -> np.ndarray:
    """[BLOCK, 2]. Inputs times it: 8 times a block's sum, for its scale, and the sum, for its
    offset."""
    return np.tile(np.array([8, 1], np.float32), (BLOCK, 1))


class Repacked:
    """What one thread multiplies with; no other may use it meanwhile."""

    def __init__(self) -> None:
        self._backend = Backend(1)
        self._tiles: dict[tuple[int, int, int], _Tile] = {}

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
        key = type_, inputs.shape[1], out.shape[1]
        tile = self._tiles.get(key)
        if tile is None:
            tile = self._tiles[key] = _Tile(*key)
        tile.multiply(source, inputs, out, room, self._backend)

    def close(self) -> None:
        for tile in self._tiles.values():
            tile.close()
        self._tiles.clear()
        self._backend.close()
