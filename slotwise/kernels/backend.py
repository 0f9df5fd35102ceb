"""Memory and computation on one ggml backend.

Everything the engine keeps in fast memory lives in a `Buffer`: one page-aligned block
that Python (numpy, preadv) and ggml see at the same address. Only the CPU backend is
here; a device backend needs its own `Buffer` whose reads and writes are copies.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import ggml
import numpy as np

from slotwise.errors import SlotwiseError
from slotwise.kernels.lib import TENSOR_ALIGNMENT

PAGE = mmap.PAGESIZE


def round_up(nbytes: int, to: int) -> int:
    """The smallest multiple of `to` that is at least `nbytes`."""
    return -(-nbytes // to) * to


class Buffer:
    """One block of fast memory. Satisfies `experts.loader.Arena`."""

    def __init__(self, nbytes: int) -> None:
        self.size = round_up(max(nbytes, 1), PAGE)
        # Private: Linux gives huge pages to private anonymous memory, not to shared memory, and
        # decode is faster with them (docs/performance.md).
        self._mmap = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._mmap.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._mmap, dtype=np.uint8)
        self.address: int = self._bytes.ctypes.data
        self._handle: Any = ggml.ggml_backend_cpu_buffer_from_ptr(self.address, self.size)
        if not self._handle:
            raise SlotwiseError(f"ggml could not wrap a buffer of {self.size:,} bytes")
        self._top = 0

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes [offset, offset + nbytes)."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise ValueError(f"[{offset}, +{nbytes}) is outside a buffer of {self.size} bytes")
        return memoryview(self._mmap)[offset : offset + nbytes]

    def array(self, offset: int, dtype: np.dtype | type, shape: tuple[int, ...]) -> np.ndarray:
        """A numpy array over the bytes at `offset` (shape in numpy order)."""
        count = int(np.prod(shape))
        flat = np.frombuffer(self._mmap, dtype=dtype, count=count, offset=offset)
        return flat.reshape(shape)

    def touch(self) -> None:
        """Writes zeros, so that the system finds the memory now and not during a request."""
        self._bytes.fill(0)

    def reserve(self, nbytes: int) -> int:
        """Takes the next `nbytes` for good and returns their offset (a stack, never freed)."""
        offset = round_up(self._top, TENSOR_ALIGNMENT)
        if offset + nbytes > self.size:
            raise ValueError(f"buffer of {self.size} bytes has no room for {nbytes} at {offset}")
        self._top = offset + nbytes
        return offset

    def place(self, tensor: ggml.ggml_tensor_p, offset: int) -> None:
        """Gives `tensor` its memory at `offset`."""
        needed = ggml.ggml_nbytes(tensor)
        if offset < 0 or offset + needed > self.size:
            raise ValueError(f"tensor of {needed} bytes at {offset} is outside {self.size} bytes")
        ggml.ggml_backend_tensor_alloc(self._handle, tensor, self.address + offset)

    def close(self) -> None:
        """Frees ggml's handle; the memory goes when the last view of it does."""
        if self._handle:
            ggml.ggml_backend_buffer_free(self._handle)
            self._handle = None


class NoMemory:
    """Stands in for a `Buffer` where only shapes matter: to measure a graph before its memory
    exists."""

    def place(self, tensor: ggml.ggml_tensor_p, offset: int) -> None:
        """Leaves the tensor without memory."""

    def array(self, offset: int, dtype: np.dtype | type, shape: tuple[int, ...]) -> np.ndarray:
        raise TypeError("there is no memory behind this tensor: it was only measured")


Memory = Buffer | NoMemory


class Backend:
    """Runs graphs with a fixed number of threads."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or len(os.sched_getaffinity(0))
        self._handle: Any = ggml.ggml_backend_cpu_init()
        if not self._handle:
            raise SlotwiseError("ggml could not start its CPU backend")
        ggml.ggml_backend_cpu_set_n_threads(self._handle, self.threads)
        self.name = "cpu"

    def host_memory(self, nbytes: int) -> Buffer:
        """Host memory to copy experts from: page aligned. A device backend gives pinned memory,
        which its transfers read without a copy in between."""
        return Buffer(nbytes)

    def compute(self, graph: ctypes._Pointer) -> None:
        """Runs `graph` to its end; the GIL is free meanwhile."""
        status = ggml.ggml_backend_graph_compute(self._handle, graph)
        if status != ggml.GGML_STATUS_SUCCESS:
            text = ggml.ggml_status_to_string(status).decode()
            raise SlotwiseError(f"ggml could not compute a graph: {text}")

    def close(self) -> None:
        if self._handle:
            ggml.ggml_backend_free(self._handle)
            self._handle = None
