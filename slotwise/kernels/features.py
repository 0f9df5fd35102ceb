"""What ggml's CPU backend was built with, for the records of measurements."""

from __future__ import annotations

import ctypes

import ggml


class _Feature(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_char_p))


def ggml_version() -> str:
    """ggml's version, and that of the package it comes from."""
    return f"{ggml.ggml_version().decode()} (ggml-python {ggml.__version__})"


def cpu_features() -> str:
    """In the words of llama.cpp's system info: `CPU : AVX2 = 1 | FMA = 1 ...`."""
    library = ggml.ggml.lib
    library.ggml_backend_cpu_reg.restype = ctypes.c_void_p
    address = library.ggml_backend_reg_get_proc_address
    address.restype, address.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)
    registry = library.ggml_backend_cpu_reg()
    features = ctypes.CFUNCTYPE(ctypes.POINTER(_Feature), ctypes.c_void_p)(
        address(registry, b"ggml_backend_get_features")
    )(registry)
    found = []
    while name := features[len(found)].name:
        found.append(f"{name.decode()} = {features[len(found)].value.decode()}")
    return "CPU : " + " | ".join(found)
