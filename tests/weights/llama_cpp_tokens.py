"""Token ids from llama.cpp, through the C API that the xllamacpp wheel exports.

It runs in a process of its own, because llama.cpp aborts on some files; a vocabulary without
weights is enough for it. The struct layout is that of the pinned wheel (llama.cpp b11549).
"""

from __future__ import annotations

import base64
import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence
from ctypes import c_bool, c_char_p, c_int32, c_void_p
from pathlib import Path
from typing import Any, NamedTuple


class Reference(NamedTuple):
    """What llama.cpp says about one vocabulary and some texts."""

    plain: list[list[int]]
    """Ids of each text, control tokens in it left as text, no bos."""
    special: list[list[int]]
    """Ids of each text, control tokens in it parsed, bos if the model wants it."""
    stop_ids: list[int]
    pieces: list[bytes]
    """The bytes of each token."""


def llama_cpp_tokens(paths: Sequence[Path], texts: Sequence[bytes]) -> list[Reference]:
    """Asks llama.cpp about the vocabularies in `paths`, the same texts for each."""
    job = json.dumps([list(map(str, paths)), [base64.b64encode(t).decode() for t in texts]])
    done = subprocess.run(
        [sys.executable, __file__], input=job, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [
        Reference(plain, special, stops, [base64.b64decode(piece) for piece in pieces])
        for plain, special, stops, pieces in json.loads(done.stdout)
    ]


class ModelParams(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("devices", "tensor_buft_overrides")),
        *((name, c_int32) for name in ("n_gpu_layers", "split_mode", "load_mode", "lazy_mode")),
        ("main_gpu", c_int32),
        *((name, c_void_p) for name in ("tensor_split", "progress_callback", "user_data")),
        ("kv_overrides", c_void_p),
        *((name, c_bool) for name in ("vocab_only", "check_tensors", "use_extra_bufts")),
        *((name, c_bool) for name in ("no_host", "no_alloc", "load_mtp")),
    )


def _library() -> Any:
    import xllamacpp

    assert xllamacpp.__version__ == "2026.10.11549", "the struct layout is for one version"
    library = ctypes.CDLL(sys.modules["xllamacpp.xllamacpp"].__file__)
    for name, result, arguments in (
        ("llama_model_default_params", ModelParams, ()),
        ("llama_model_load_from_file", c_void_p, (c_char_p, ModelParams)),
        ("llama_model_get_vocab", c_void_p, (c_void_p,)),
        ("llama_vocab_n_tokens", c_int32, (c_void_p,)),
        ("llama_vocab_is_eog", c_bool, (c_void_p, c_int32)),
        (
            "llama_tokenize",
            c_int32,
            (c_void_p, c_char_p, c_int32, c_void_p, c_int32, c_bool, c_bool),
        ),
        (
            "llama_token_to_piece",
            c_int32,
            (c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool),
        ),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_backend_init()
    return library


def _tokens(library: Any, vocab: int, text: bytes, special: bool) -> list[int]:
    ids = (c_int32 * (len(text) + 8))()
    n = library.llama_tokenize(vocab, text, len(text), ids, len(ids), special, special)
    assert n >= 0
    return list(ids[:n])


def _piece(library: Any, vocab: int, token: int) -> str:
    buffer = ctypes.create_string_buffer(1024)
    n = library.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, True)
    assert n >= 0
    return base64.b64encode(buffer.raw[:n]).decode()


def _answer(library: Any, path: str, texts: Sequence[bytes]) -> list[Any]:
    settings = library.llama_model_default_params()
    settings.vocab_only = True
    model = library.llama_model_load_from_file(path.encode(), settings)
    assert model, f"llama.cpp cannot load {path}"
    vocab = library.llama_model_get_vocab(model)
    tokens = range(library.llama_vocab_n_tokens(vocab))
    plain, special = ([_tokens(library, vocab, t, s) for t in texts] for s in (False, True))
    stops = [token for token in tokens if library.llama_vocab_is_eog(vocab, token)]
    return [plain, special, stops, [_piece(library, vocab, token) for token in tokens]]


def main() -> None:
    paths, encoded = json.load(sys.stdin)
    library = _library()
    texts = [base64.b64decode(text) for text in encoded]
    print(json.dumps([_answer(library, path, texts) for path in paths]))


if __name__ == "__main__":
    main()
