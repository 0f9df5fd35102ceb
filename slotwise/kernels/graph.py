"""A computation graph under construction, then placed in memory, then run many times.

Every op is appended in the order it is written, so the order of the calls is the order of
the computation, and lifetimes are known without asking ggml. ggml aborts the process on a
wrong shape: callers pass weights whose shapes were checked when they were loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import ggml

from slotwise.kernels.backend import Backend, Memory
from slotwise.kernels.planner import DoesNotFitError, Extent, Span, peak_bytes, place

Tensor = ctypes._Pointer
"""Pointer to a `ggml_tensor`."""


def shape(tensor: Tensor) -> tuple[int, ...]:
    """ne, fastest dimension first, all four."""
    return tuple(tensor.contents.ne)


class Context:
    """Owns tensor headers (not their data)."""

    def __init__(self, n_tensors: int, graph_nodes: int = 0) -> None:
        size = n_tensors * ggml.ggml_tensor_overhead() + 1024
        if graph_nodes:
            size += ggml.ggml_graph_overhead_custom(graph_nodes, False)
        params = ggml.ggml_init_params(mem_size=size, mem_buffer=None, no_alloc=True)
        self.handle: Any = ggml.ggml_init(params)
        if not self.handle:
            raise MemoryError(f"ggml found no {size:,} bytes for tensor headers")

    def tensor(self, type_: int, ne: Sequence[int]) -> Tensor:
        """A new tensor without memory; `ne` fastest dimension first."""
        dims = (ctypes.c_int64 * len(ne))(*ne)
        return ggml.ggml_new_tensor(self.handle, type_, len(ne), dims)

    def close(self) -> None:
        if self.handle:
            ggml.ggml_free(self.handle)
            self.handle = None

    def __del__(self) -> None:
        self.close()


class Graph:
    """Builder and runner. After `finish` (or `measure`) no op may be added."""

    def __init__(self, max_ops: int = 192) -> None:
        self._context = Context(2 * max_ops, max_ops)
        self._graph = ggml.ggml_new_graph_custom(self._context.handle, max_ops, False)
        self._made: dict[int, int] = {}  # root tensor address -> index of the op that makes it
        self._last_use: dict[int, int] = {}
        self._tensors: list[Tensor] = []
        self._views: list[Tensor] = []
        self._fixed: dict[int, tuple[Memory, int]] = {}
        self._ops = 0

    # -- building ------------------------------------------------------------------

    def leaf(self, type_: int, ne: Sequence[int], buffer: Memory, offset: int) -> Tensor:
        """An input that lives at `offset` of `buffer`."""
        tensor = self._context.tensor(type_, ne)
        buffer.place(tensor, offset)
        return tensor

    def output_at(self, tensor: Tensor, buffer: Memory, offset: int) -> None:
        """Makes the op write `tensor` to a given place, where other graphs find it."""
        self._fixed[_address(_root(tensor))] = (buffer, offset)

    def op(self, name: str, *args: Any) -> Tensor:
        """Appends `ggml_<name>(context, *args)` and returns its result."""
        tensor = getattr(ggml, "ggml_" + name)(self._context.handle, *args)
        ggml.ggml_build_forward_expand(self._graph, tensor)
        self._note(tensor, [a for a in args if isinstance(a, Tensor)])
        return tensor

    def flash_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """softmax(q k^T * scale + mask) v, with `sinks` as one more logit per head."""
        tensor = ggml.ggml_flash_attn_ext(self._context.handle, q, k, v, mask, scale, 0.0, 0.0)
        if sinks is not None:
            ggml.ggml_flash_attn_ext_add_sinks(tensor, sinks)
        ggml.ggml_flash_attn_ext_set_prec(tensor, ggml.GGML_PREC_F32)
        ggml.ggml_build_forward_expand(self._graph, tensor)
        self._note(tensor, [q, k, v, mask])
        return tensor

    def view(
        self, source: Tensor, ne: Sequence[int], strides: Sequence[int] = (), offset: int = 0
    ) -> Tensor:
        """A view of 1 to 4 dimensions; strides in bytes from the second dimension on."""
        return self.op(f"view_{len(ne)}d", source, *ne, *strides, offset)

    def reshape(self, source: Tensor, *ne: int) -> Tensor:
        return self.op(f"reshape_{len(ne)}d", source, *ne)

    def _note(self, tensor: Tensor, sources: Sequence[Tensor]) -> None:
        index, self._ops = self._ops, self._ops + 1
        root = _address(_root(tensor))
        for source in sources:
            self._last_use[_address(_root(source))] = index
        self._last_use[root] = index
        if tensor.contents.view_src:
            self._views.append(tensor)
        else:
            self._made[root] = index
            self._tensors.append(tensor)

    # -- placing and running -----------------------------------------------------------

    def _spans(self) -> tuple[list[Tensor], list[Span]]:
        free = [t for t in self._tensors if _address(t) not in self._fixed]
        spans = [
            Span(ggml.ggml_nbytes(t), self._made[_address(t)], self._last_use[_address(t)])
            for t in free
        ]
        return free, spans

    def measure(self) -> int:
        """Bytes of intermediates this graph needs in one stretch."""
        return peak_bytes(self._spans()[1])

    def fits(self, extents: Sequence[Extent]) -> bool:
        """Whether `finish` would find room."""
        try:
            place(self._spans()[1], extents)
        except DoesNotFitError:
            return False
        return True

    def finish(self, buffer: Memory, extents: Sequence[Extent]) -> None:
        """Places every intermediate; raises `planner.DoesNotFitError`."""
        tensors, spans = self._spans()
        for tensor, offset in zip(tensors, place(spans, extents), strict=True):
            buffer.place(tensor, offset)
        for tensor in self._tensors:
            if target := self._fixed.get(_address(tensor)):
                target[0].place(tensor, target[1])
        for tensor in self._views:
            ggml.ggml_backend_view_init(tensor)

    def work_bytes(self, threads: int) -> int:
        """Bytes ggml itself allocates beside our buffers while the graph runs."""
        return ggml.ggml_graph_plan(self._graph, threads, None).work_size

    def run(self, backend: Backend) -> None:
        backend.compute(self._graph)


def _address(tensor: Tensor) -> int:
    return ctypes.addressof(tensor.contents)


def _root(tensor: Tensor) -> Tensor:
    source = tensor.contents.view_src
    return source if source else tensor


class Weights:
    """Named tensors with memory: the dense weights of a model, or an expert-slot array."""

    def __init__(self, n_tensors: int) -> None:
        self._context = Context(n_tensors)
        self._tensors: dict[str, Tensor] = {}

    def add(
        self,
        name: str,
        type_: int,
        ne: Sequence[int],
        buffer: Memory,
        offset: int,
        *,
        slot_bytes: int = 0,
    ) -> Tensor:
        """Declares `name` at `offset`. With `slot_bytes`, its third dimension counts expert
        slots that many bytes apart (DESIGN decision 3)."""
        tensor = self._context.tensor(type_, ne)
        if slot_bytes:
            tensor.contents.nb[2] = slot_bytes
            tensor.contents.nb[3] = slot_bytes * ne[2]
        buffer.place(tensor, offset)
        self._tensors[name] = tensor
        return tensor

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def get(self, name: str) -> Tensor | None:
        return self._tensors.get(name)

    def close(self) -> None:
        self._tensors.clear()
        self._context.close()


def tensor_bytes(type_: int, ne: Sequence[int]) -> int:
    """Bytes of a contiguous tensor."""
    rows = 1
    for n in ne[1:]:
        rows *= n
    return ggml.ggml_row_size(type_, ne[0]) * rows
