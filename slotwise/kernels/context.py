"""Where ggml keeps the headers of tensors and graphs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import ggml

from slotwise.kernels.lib import Tensor


class Context:
    """Owns tensor headers (not their data)."""

    def __init__(self, n_tensors: int, graph_nodes: int = 0, *, graphs: int = 1) -> None:
        size = n_tensors * ggml.ggml_tensor_overhead() + 1024
        if graph_nodes:
            size += graphs * ggml.ggml_graph_overhead_custom(graph_nodes, False)
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
