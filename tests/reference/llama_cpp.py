"""Logits from llama.cpp, through the C API that the xllamacpp wheel exports.

The struct layouts are those of the pinned wheel (llama.cpp b11549). It runs in a process of its
own, `python llama_cpp.py OUT.npz TOKENS MODEL...`, because ggml aborts on a bad file, and because
two copies of ggml in one process are one too many. K and V in F32, no flash attention, no repacked
weights, one thread: the setting with the least rounding.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from ctypes import c_bool, c_char_p, c_float, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np


def llama_cpp_logits(paths: Sequence[Path], tokens: Sequence[int]) -> list[np.ndarray]:
    """One float32 [len(tokens), vocabulary] per file, the whole text in one batch."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npz"
        command = [sys.executable, __file__, str(out), json.dumps(list(tokens))]
        done = subprocess.run(
            [*command, *map(str, paths)], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-4000:]
        with np.load(out) as arrays:
            return [arrays[str(i)] for i in range(len(paths))]


class ModelParams(ctypes.Structure):
    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        *((name, c_bool) for name in ("vocab_only", "check_tensors", "use_extra_bufts")),
        *((name, c_bool) for name in ("no_host", "no_alloc", "load_mtp")),
    )


class ContextParams(ctypes.Structure):
    _fields_ = (
        *((name, c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        *((name, c_uint32) for name in ("n_outputs_max", "n_outputs_max_per_seq")),
        *((name, c_int32) for name in ("n_threads", "n_threads_batch", "ctx_type")),
        *((name, c_int32) for name in ("rope_scaling_type", "pooling_type", "attention_type")),
        ("flash_attn_type", c_int32),
        *((name, c_float) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor")),
        *((name, c_float) for name in ("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        *((name, c_bool) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload")),
        *((name, c_bool) for name in ("swa_full", "kv_unified")),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", ctypes.POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", ctypes.POINTER(c_int32)),
        ("n_seq_id", ctypes.POINTER(c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


def _library() -> Any:
    import xllamacpp

    library = ctypes.CDLL(sys.modules["xllamacpp.xllamacpp"].__file__)
    for name, result, arguments in (
        ("llama_model_default_params", ModelParams, ()),
        ("llama_context_default_params", ContextParams, ()),
        ("llama_model_load_from_file", c_void_p, (c_char_p, ModelParams)),
        ("llama_init_from_model", c_void_p, (c_void_p, ContextParams)),
        ("llama_model_get_vocab", c_void_p, (c_void_p,)),
        ("llama_vocab_n_tokens", c_int32, (c_void_p,)),
        ("llama_batch_init", Batch, (c_int32, c_int32, c_int32)),
        ("llama_decode", c_int32, (c_void_p, Batch)),
        ("llama_get_logits_ith", ctypes.POINTER(c_float), (c_void_p, c_int32)),
        ("llama_free", None, (c_void_p,)),
        ("llama_model_free", None, (c_void_p,)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    assert xllamacpp.__version__ == "2026.10.11549", "the struct layouts are for one version"
    library.llama_backend_init()
    return library


def _logits(library: Any, path: str, tokens: Sequence[int]) -> np.ndarray:
    settings = library.llama_model_default_params()
    assert settings.main_gpu == 0
    settings.n_gpu_layers, settings.use_extra_bufts = 0, False
    model = library.llama_model_load_from_file(path.encode(), settings)
    assert model, f"llama.cpp cannot load {path}"
    options = library.llama_context_default_params()
    assert (options.n_batch, options.n_ubatch, options.moe_cache_size) == (2048, 512, 0)
    options.n_ctx = options.n_batch = options.n_ubatch = 256
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = options.flash_attn_type = 0
    context = library.llama_init_from_model(model, options)
    assert context, f"no context for {path}"
    batch = library.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    assert library.llama_decode(context, batch) == 0
    n = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    rows = [library.llama_get_logits_ith(context, i)[:n] for i in range(len(tokens))]
    library.llama_free(context)
    library.llama_model_free(model)
    return np.array(rows, np.float32)


def main() -> None:
    out, tokens, *paths = sys.argv[1:]
    library = _library()
    results = {str(i): _logits(library, p, json.loads(tokens)) for i, p in enumerate(paths)}
    np.savez(out, **results)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
