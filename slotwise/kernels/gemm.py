"""Matrix products on the host for many rows at once, a tile of the weights at a time.

ggml multiplies quantised weights as they lie in a file a row of inputs at a time. From some rows
on it is faster to repack them for its better kernels (repack.py), or, for types that have none,
from some tens on to dequantise them and leave the product to a BLAS (numpy's). Tiles are cut the
same way whatever the number of threads, so the result does not depend on it.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import ggml
import numpy as np
import threadpoolctl

from slotwise.kernels.lib import F32, Tensor
from slotwise.kernels.repack import Repacked, repackable, repacked_floats, repacked_rows

TILE_BYTES = 1 << 20
"""Of dequantised weights at a time and thread: a tile stays in the cache until it is used."""
NARROW_TILE = 96
NARROW_REPACKED = 192
"""Rows of a dense matrix in a tile, so that small ones make work for several threads too."""

LEAST_TILE = 16

_ToFloat = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


@cache
def _to_float(type_: int) -> Callable[[int, int, int], None]:
    """ggml's (source, target f32, count) for a type; the GIL is free meanwhile."""
    traits = ggml.ggml_get_type_traits(type_)
    if traits is None:
        raise ValueError(f"ggml knows no type {type_}")
    return _ToFloat(ctypes.cast(cast(Any, traits.contents.to_float), ctypes.c_void_p).value or 0)


@dataclass(frozen=True)
class Matrix:
    """Weights in host memory, `n_out` rows of `n_in` values of a ggml type."""

    address: int
    type: int
    n_in: int
    n_out: int
    row_bytes: int

    @classmethod
    def of(cls, tensor: Tensor, slot: int) -> Matrix:
        """Matrix `slot` of a tensor [n_in, n_out, slots] whose memory the host can read."""
        t = tensor.contents
        return cls((t.data or 0) + slot * t.nb[2], t.type, t.ne[0], t.ne[1], t.nb[1])

    @property
    def repacked(self) -> bool:
        """Whether its products are ggml's with repacked tiles, on this processor."""
        return repackable(self.type, self.n_in, self.n_out)

    @property
    def tile(self) -> int:
        """Rows that are multiplied together."""
        rows = repacked_rows if self.repacked else tile_rows
        return rows(self.n_in, self.n_out)

    def rows(self, first: int, last: int, out: np.ndarray) -> np.ndarray:
        """Rows [first, last) as f32 [last - first, n_in], in `out` (flat) or where they are."""
        source, shape = self.address + first * self.row_bytes, (last - first, self.n_in)
        if self.type == F32:
            return _floats(source, shape)
        wide = out[: shape[0] * shape[1]]
        _to_float(self.type)(source, wide.ctypes.data, wide.size)
        return wide.reshape(shape)


def tiles_of(n_out: int, step: int) -> list[slice]:
    """The rows of a matrix, `step` at a time."""
    return [slice(first, min(first + step, n_out)) for first in range(0, n_out, step)]


def floats(tensor: Tensor) -> np.ndarray:
    """A contiguous F32 tensor in host memory as an array, [ne1, ne0]."""
    t = tensor.contents
    return _floats(t.data, (t.ne[1], t.ne[0]))


def _floats(address: int, shape: tuple[int, int]) -> np.ndarray:
    raw = (ctypes.c_float * (shape[0] * shape[1])).from_address(address)
    return np.ctypeslib.as_array(raw).reshape(shape)


def tile_rows(n_in: int, n_out: int) -> int:
    """Rows of a matrix that are dequantised together."""
    return min(n_out, max(LEAST_TILE, TILE_BYTES // (4 * n_in) // LEAST_TILE * LEAST_TILE))


def tile_floats(n_in: int, n_out: int, rows: int) -> int:
    """Room for a tile of a matrix [n_in, n_out], multiplied with up to `rows` rows of inputs."""
    repacked = repacked_floats(n_in, repacked_rows(n_in, n_out), rows)
    return max(TILE_BYTES // 4, LEAST_TILE * n_in, repacked)


def narrow_floats(n_in: int, rows: int) -> int:
    """The same for a dense matrix with `n_in` columns."""
    dequantised = max(TILE_BYTES // 4, LEAST_TILE * n_in)
    return max(dequantised, repacked_floats(n_in, NARROW_REPACKED, rows))


class Crew:
    """`n` threads, the caller's among them, that work on one list of tasks at a time, each with its
    own means to multiply.

    While they do, BLAS computes every product in the thread that asks for it.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._blas = threadpoolctl.ThreadpoolController()
        self._repacked = [Repacked() for _ in range(n)]
        self._orders: list[queue.SimpleQueue[Callable[[int], None] | None]] = []
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._threads = []
        for member in range(1, n):
            orders: queue.SimpleQueue[Callable[[int], None] | None] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._serve, args=(member, orders), name=f"gemm-{member}", daemon=True
            )
            thread.start()
            self._orders.append(orders)
            self._threads.append(thread)

    def run(self, tasks: Sequence[Callable[[int], None]]) -> None:
        """Calls every task with the number of the member that took it; returns when all are done.

        Raises the first error of a task; the others are still waited for.
        """
        ticket = itertools.count()

        def take(member: int) -> None:
            while (i := next(ticket)) < len(tasks):
                tasks[i](member)

        helpers = self._orders[: max(0, len(tasks) - 1)]
        with self._blas.limit(limits=1, user_api="blas"):
            for orders in helpers:
                orders.put(take)
            try:
                take(0)
            finally:
                errors = [self._done.get() for _ in helpers]
        for error in errors:
            if error is not None:
                raise error

    def multiply(
        self,
        matrix: Matrix,
        rows: slice,
        inputs: np.ndarray,
        out: np.ndarray,
        *,
        member: int,
        room: np.ndarray,
    ) -> None:
        """out f32 [T, rows] = inputs f32 [T, n_in] @ (rows of matrix)^T, by `member` itself.

        `inputs` is contiguous; `room` f32 is at least `tile_floats` or `narrow_floats`.
        """
        if matrix.repacked:
            source = matrix.address + rows.start * matrix.row_bytes
            self._repacked[member].multiply(matrix.type, source, inputs, out, room)
        else:
            np.matmul(inputs, matrix.rows(rows.start, rows.stop, room).T, out=out)

    def close(self) -> None:
        for orders in self._orders:
            orders.put(None)
        for thread in self._threads:
            thread.join()
        for repacked in self._repacked:
            repacked.close()
        self._orders, self._threads, self._repacked = [], [], []

    def _serve(self, member: int, orders: queue.SimpleQueue[Callable[[int], None] | None]) -> None:
        while (work := orders.get()) is not None:
            error = None
            try:
                work(member)
            except BaseException as caught:  # raised by whoever waits in `run`
                error = caught
            self._done.put(error)


@dataclass(frozen=True)
class Product:
    """One dense product: out [rows, n_out] = inputs [rows, n_in] @ weights^T, all f32."""

    weights: Tensor
    inputs: Tensor
    out: Tensor

    def tasks(self, crew: Crew, tiles: np.ndarray) -> list[Callable[[int], None]]:
        """Its parts for a crew; `tiles` f32 [members, at least `narrow_floats`]."""
        matrix, inputs, out = Matrix.of(self.weights, 0), floats(self.inputs), floats(self.out)
        step = min(NARROW_REPACKED if matrix.repacked else NARROW_TILE, matrix.tile)

        def part(rows: slice, member: int) -> None:
            crew.multiply(matrix, rows, inputs, out[:, rows], member=member, room=tiles[member])

        return [partial(part, rows) for rows in tiles_of(matrix.n_out, step)]


@dataclass(frozen=True)
class HostProducts:
    """Where a graph has its dense products computed; both None while it is only measured."""

    crew: Crew | None = None
    tiles: np.ndarray | None = None

    def run(self, products: Sequence[Product]) -> None:
        if self.crew is None or self.tiles is None:
            raise ValueError("a graph that was only measured cannot run")
        crew, tiles = self.crew, self.tiles
        crew.run([task for product in products for task in product.tasks(crew, tiles)])
