"""The ggml library with its result types set right, and the few constants we use.

ggml-python declares some pointers as a NewType, which ctypes takes for a C int and
cuts to 32 bits. They are widened here, once, before anything calls them.
"""

from __future__ import annotations

import ctypes

import ggml

_POINTER_RESULTS = (
    "ggml_backend_cpu_buffer_from_ptr",
    "ggml_backend_cpu_buffer_type",
    "ggml_backend_alloc_buffer",
    "ggml_backend_get_default_buffer_type",
    "ggml_backend_buft_alloc_buffer",
    "ggml_backend_buffer_get_base",
)
for _name in _POINTER_RESULTS:
    getattr(ggml.ggml.lib, _name).restype = ctypes.c_void_p

F32: int = ggml.GGML_TYPE_F32
F16: int = ggml.GGML_TYPE_F16
I32: int = ggml.GGML_TYPE_I32
I64: int = ggml.GGML_TYPE_I64

SORT_DESCENDING: int = ggml.GGML_SORT_ORDER_DESC

Tensor = ctypes._Pointer
"""Pointer to a `ggml_tensor`."""

COMPUTE: int = ggml.GGML_TENSOR_FLAG_COMPUTE

TENSOR_ALIGNMENT = 64
"""Bytes. The CPU backend asks for 32; 64 is a cache line."""


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _quiet(level: int, text: bytes, _data: int) -> None:
    """ggml logs to stderr by default; what matters reaches the user as an error of ours."""


ggml.ggml_log_set(_quiet, None)
