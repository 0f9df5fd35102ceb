"""llama.cpp on the other side of a pipe, through its C API, from the package llama-cpp-python.

Runs in the interpreter that has the package, which need not have slotwise. What is timed is
`llama_decode` and the wait for its logits; no sampling, no Python between the two.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from time import perf_counter_ns, process_time_ns
from types import SimpleNamespace
from typing import Any

from slotwise.bench.workers.protocol import Answer, Pipe, between, storage_bytes

N_UBATCH = 512


def from_llama_cpp_python() -> Any:
    """The functions and structs of `llama-cpp-python`, which is built where it is installed."""
    llama_cpp = importlib.import_module("llama_cpp")
    folder = Path(str(llama_cpp.__file__)).parent / "lib"
    return SimpleNamespace(
        **{n: getattr(llama_cpp, n) for n in dir(llama_cpp) if n.startswith("llama_")},
        package=f"llama-cpp-python {version('llama-cpp-python')}",
        ggml=_ggml_version(next(folder.glob("libggml-base.so*"))),
    )


PACKAGES = {"llama-cpp-python": from_llama_cpp_python}


def _ggml_version(path: Path) -> str:
    library = ctypes.CDLL(str(path))
    try:
        library.ggml_version.restype = library.ggml_commit.restype = ctypes.c_char_p
        return f"{library.ggml_version().decode()} ({library.ggml_commit().decode()})"
    except AttributeError:
        return "not exported"


class LlamaCpp:
    """One model and one context, everything at llama.cpp's defaults but the sizes."""

    def __init__(self, llama: Any, model: str, *, threads: int, context: int) -> None:
        self._llama = llama
        llama.llama_backend_init()
        settings = llama.llama_model_default_params()
        self._model = llama.llama_model_load_from_file(model.encode(), settings)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {model}")
        options = llama.llama_context_default_params()
        options.n_ctx = options.n_batch = context
        options.n_ubatch = N_UBATCH
        options.n_threads = options.n_threads_batch = threads
        self._context = llama.llama_init_from_model(self._model, options)
        if not self._context:
            raise SystemExit(f"llama.cpp cannot make a context of {context} tokens")
        self.ready: Answer = {
            "engine": "llama.cpp",
            "package": llama.package,
            "ggml": llama.ggml,
            "system_info": llama.llama_print_system_info().decode().strip(" |"),
            "n_ubatch": N_UBATCH,
            "flash_attention": {-1: "auto", 0: "off", 1: "on"}[options.flash_attn_type],
            "kv_type": {0: "f32", 1: "f16"}.get(options.type_k, str(options.type_k)),
            "use_extra_bufts": bool(settings.use_extra_bufts),
            "threads": threads,
            "context": context,
        }

    def tokenize(self, text: str) -> Answer:
        """The ids of `text`, control tokens in it taken as text, no bos."""
        raw = text.encode()
        ids = (ctypes.c_int32 * (len(raw) + 8))()
        vocab = self._llama.llama_model_get_vocab(self._model)
        n = self._llama.llama_tokenize(vocab, raw, len(raw), ids, len(ids), False, False)
        return {"tokens": list(ids[:n])}

    def request(
        self, tokens: Sequence[int], follow: Sequence[int], *, seconds: float | None = None
    ) -> Answer:
        """Reads `tokens` from an empty state, then each of `follow` by itself, until the one that
        is done more than `seconds` after the read.

        `first_ns` until the logits after the last of `tokens`, `decode_ns` for all of `follow`.
        """
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
        from_disk, cpu = storage_bytes(), process_time_ns()
        first_ns = self._decode(tokens)
        read_cpu, from_disk_first = process_time_ns() - cpu, storage_bytes()
        windows: list[int] = []
        for token in follow:
            windows.append(self._decode([token]))
            if seconds and sum(windows) > seconds * 1e9:
                break
        return {
            "first_ns": first_ns,
            "decode_ns": sum(windows),
            "decode_tokens": len(windows),
            "windows_ns": windows,
            "read_cpu_ns": read_cpu,
            "decode_cpu_ns": process_time_ns() - cpu - read_cpu,
            "read_bytes": between(from_disk, from_disk_first),
            "decode_bytes": between(from_disk_first, storage_bytes()),
        }

    def _decode(self, tokens: Sequence[int]) -> int:
        llama, context = self._llama, self._context
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        batch = llama.llama_batch_get_one(ids, len(tokens))
        begin = perf_counter_ns()
        status = llama.llama_decode(context, batch)
        llama.llama_synchronize(context)
        end = perf_counter_ns()
        if status:
            raise SystemExit(f"llama_decode of {len(tokens)} tokens returned {status}")
        return end - begin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("package", choices=PACKAGES)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    args = parser.parse_args()
    pipe = Pipe()
    llama = PACKAGES[args.package]()
    peer = LlamaCpp(llama, args.model, threads=args.threads, context=args.context)
    handlers = {"tokenize": peer.tokenize, "request": peer.request}
    pipe.serve(peer.ready, handlers)


if __name__ == "__main__":
    main()
