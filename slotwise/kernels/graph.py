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
from slotwise.kernels.context import Context
from slotwise.kernels.gemm import HostProducts, Product
from slotwise.kernels.lib import COMPUTE, F32, Tensor
from slotwise.kernels.planner import DoesNotFitError, Extent, Span, peak_bytes, place

MOST_SEGMENTS = 8
"""Of a graph with host products: attention with biases has five."""


def shape(tensor: Tensor) -> tuple[int, ...]:
    """ne, fastest dimension first, all four."""
    return tuple(tensor.contents.ne)


class Graph:
    """Builder and runner. After `finish` (or `measure`) no op may be added.

    With `host`, dense products are computed by it between segments of ggml's ops.
    """

    def __init__(self, max_ops: int = 192, *, host: HostProducts | None = None) -> None:
        self._max_ops, self._host = max_ops, host
        self._context = Context(2 * max_ops, max_ops, graphs=MOST_SEGMENTS if host else 1)
        self._steps: list[Any] = []  # segments (ggml graphs) and lists of products, in order
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
        self._append(tensor)
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
        self._append(tensor)
        self._note(tensor, [q, k, v, mask])
        return tensor

    def product(self, weights: Tensor, x: Tensor) -> Tensor:
        """weights [n_in, n_out] times x [n_in, T]: f32 [n_out, T]."""
        if self._host is None:
            return self.op("mul_mat", weights, x)
        out = self._context.tensor(F32, (weights.contents.ne[1], x.contents.ne[1]))
        if not self._beside_products(x):
            self._steps.append([])
        self._steps[-1].append(Product(weights, x, out))
        self._note(out, [x])
        return out

    def _beside_products(self, x: Tensor) -> bool:
        """Whether the last step is products of which none makes `x`."""
        last = self._steps[-1] if self._steps else None
        if not isinstance(last, list):
            return False
        return _address(_root(x)) not in [_address(product.out) for product in last]

    def _segment(self) -> Any:
        """The segment that is being built; None at the start and after a product."""
        return None if not self._steps or isinstance(self._steps[-1], list) else self._steps[-1]

    def _append(self, tensor: Tensor) -> None:
        """The next node. Its sources are in earlier places, maybe of another segment."""
        if self._segment() is None:
            graph = ggml.ggml_new_graph_custom(self._context.handle, self._max_ops, False)
            self._steps.append(graph)
        tensor.contents.flags |= COMPUTE
        ggml.ggml_graph_add_node(self._steps[-1], tensor)

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
        segments = [s for s in self._steps if not isinstance(s, list)]
        return max(ggml.ggml_graph_plan(s, threads, None).work_size for s in segments)

    def run(self, backend: Backend) -> None:
        for step in self._steps:
            if not isinstance(step, list):
                backend.compute(step)
            elif self._host is not None:
                self._host.run(step)


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
