"""Reads and checks the vocabulary in a GGUF's metadata. Turns no text into tokens.

Nothing in the metadata is trusted: `read_vocabulary` never raises, whatever the values are. The
facts about keys, token types, and which texts end an answer are those of llama.cpp's
src/llama-vocab.cpp, so that both stop at the same tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

from slotwise.errors import Finding

PREFIX = "tokenizer.ggml."


class Kind(IntEnum):
    """`tokenizer.ggml.token_type`; every other value means: cannot be printed or written."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut into words before merging: the regexes cut one after the other."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A word that is a token is taken whole, even where the merges would not lead to it."""
    add_bos: bool = False
    """What holds when the file has no `add_bos_token`."""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CAPITAL, _SMALL = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"  # letters of other scripts are both
_OTHER = r" ?[^\s\p{L}\p{N}]+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

KNOWN_PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
    "gpt-2": PreTokenizer((_GPT2,)),
    "olmo": PreTokenizer((_GPT2,)),
    "llama-bpe": PreTokenizer(
        (rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}|{_OTHER}[\r\n]*|{_SPACES}",),
        ignore_merges=True,
        add_bos=True,
    ),
    "qwen2": PreTokenizer((rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|\p{{N}}|{_OTHER}[\r\n]*|{_SPACES}",)),
    "qwen35": PreTokenizer(
        (
            rf"{_CONTRACTION}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        )
    ),
    "gpt-4o": PreTokenizer(
        (
            rf"{_LEAD}{_CAPITAL}*{_SMALL}+{_CONTRACTION}?|{_LEAD}{_CAPITAL}+{_SMALL}*{_CONTRACTION}?"
            rf"|\p{{N}}{{1,3}}|{_OTHER}[\r\n/]*|{_SPACES}",
        )
    ),
}
"""By `tokenizer.ggml.pre`; facts from llama.cpp's llm_tokenizer_bpe, in Oniguruma's syntax."""

_STOP_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_STOP_TEXTS = """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn>
    <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance>
    <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[
    <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]
    <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
"""
_CONTROL_TEXTS = """
    <|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>
    <|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>
    <|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>
"""
_HARMONY = ("<|return|>", "<|call|>", "<|end|>")
_HARMONY_PRINTED = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""gpt-oss marks the parts of one answer with these, so they are text and do not end it."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A sound byte-level BPE vocabulary. Lists are the metadata's own where nothing changed."""

    tokens: list[str]
    kinds: list[int]
    merges: list[tuple[str, str]]
    """By rank, each once."""
    unspelled: frozenset[str]
    """What merges take or make although it is no token."""
    ids: dict[str, int]
    pre: PreTokenizer
    bos: int | None
    eos: int | None
    add_bos: bool
    stop_ids: frozenset[int]


def has_tokenizer(metadata: Mapping[str, Any]) -> bool:
    """False for a file that says it has none, or says nothing: it runs on token ids only."""
    return metadata.get(PREFIX + "model") not in (None, "none", "no_vocab")


def read_vocabulary(metadata: Mapping[str, Any]) -> tuple[Vocabulary | None, list[Finding]]:
    """The vocabulary, None where there is none or a finding refuses it, and all findings."""
    if not has_tokenizer(metadata):
        return None, [] if PREFIX + "model" in metadata else [_absent()]
    findings = [*_check_names(metadata), *_check_tokens(metadata), *_check_merges(metadata)]
    if any(f.level == "refusal" for f in findings):
        return None, findings
    stored: list[str] = metadata[PREFIX + "tokens"]
    # llama.cpp gives empty tokens names too; they can then be met in text, however unlikely.
    tokens = stored if all(stored) else [t or f"[EMPTY_{i}]" for i, t in enumerate(stored)]
    ids = {text: i for i, text in enumerate(tokens)}
    merges = list(dict.fromkeys(map(_pair, metadata[PREFIX + "merges"])))
    unspelled = frozenset(p for a, b in merges for p in (a, b, a + b) if p not in ids)
    findings += _check_ids(metadata, len(tokens))
    findings += _check_sizes(metadata, len(tokens), unspelled)
    pre = KNOWN_PRE_TOKENIZERS[metadata[PREFIX + "pre"]]
    bos = _token_id(metadata, "bos", len(tokens))
    add_bos = metadata.get(PREFIX + "add_bos_token", pre.add_bos)
    stop_ids, kinds = _stops_and_kinds(metadata, ids)
    vocabulary = Vocabulary(
        tokens=tokens,
        kinds=kinds,
        merges=merges,
        unspelled=unspelled,
        ids=ids,
        pre=pre,
        bos=bos,
        eos=_token_id(metadata, "eos", len(tokens)),
        add_bos=add_bos is True and bos is not None,
        stop_ids=stop_ids,
    )
    return vocabulary, findings


def special_text(metadata: Mapping[str, Any], name: Literal["bos", "eos"]) -> str:
    """The text of the file's bos or eos token, "" if it has none; for chat templates."""
    tokens = metadata.get(PREFIX + "tokens")
    count = len(tokens) if isinstance(tokens, list) else 0
    token = _token_id(metadata, name, count)
    return str(tokens[token]) if tokens and token is not None else ""


def missing_finding() -> Finding:
    """Why text cannot be read or written with a file that has no tokenizer."""
    return _finding(
        "tokenizer-missing",
        "model",
        "the file holds no tokenizer, so it works on token ids only",
        "a tokenizer, to work on text",
        "Give token ids, or a conversion that includes the tokenizer.",
    )


def _absent() -> Finding:
    finding = missing_finding()
    return Finding(**{**vars(finding), "level": "warning"})


def _pair(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _token_id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    value = metadata.get(f"{PREFIX}{name}_token_id")
    return value if type(value) is int and 0 <= value < count else None


def _stops_and_kinds(
    metadata: Mapping[str, Any], ids: Mapping[str, int]
) -> tuple[frozenset[int], list[int]]:
    stored = metadata.get(PREFIX + "token_type")
    kinds = list(stored) if stored is not None else [int(Kind.NORMAL)] * len(ids)
    keyed = {_token_id(metadata, name, len(ids)) for name in _STOP_KEYS} - {None}
    named = {ids[text] for text in _STOP_TEXTS.split() if text in ids}
    stops = {token for token in keyed | named if token is not None}
    for token in named | {ids[text] for text in _CONTROL_TEXTS.split() if text in ids}:
        kinds[token] = Kind.CONTROL
    printed = {ids[text] for text in _HARMONY_PRINTED if text in ids}
    if all(text in ids for text in _HARMONY):
        stops.discard(ids["<|end|>"])
        printed.add(ids["<|end|>"])
    for token in printed:
        kinds[token] = Kind.USER_DEFINED
    return frozenset(stops), kinds


def _finding(
    code: str,
    key: str,
    found: str,
    expected: str,
    next_step: str = "Download or convert the file again.",
    level: Literal["refusal", "warning"] = "refusal",
) -> Finding:
    return Finding(
        level=level,
        code=code,
        where=key if "." in key else PREFIX + key,
        found=found,
        expected=expected,
        next_step=next_step,
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_names(metadata: Mapping[str, Any]) -> Iterator[Finding]:
    model, pre = metadata.get(PREFIX + "model"), metadata.get(PREFIX + "pre")
    if model != "gpt2":
        yield _finding(
            "tokenizer-model",
            "model",
            f"the tokenizer is of the kind {_shown(model)}",
            "'gpt2' (byte-level BPE)",
            "Use a model with a byte-level BPE vocabulary.",
        )
    elif not isinstance(pre, str) or pre not in KNOWN_PRE_TOKENIZERS:
        found = f"the pre-tokenizer is {_shown(pre)}" if pre is not None else "the key is missing"
        yield _finding(
            "pre-tokenizer",
            "pre",
            found,
            f"one of {', '.join(KNOWN_PRE_TOKENIZERS)}",
            "Use a conversion that names a known pre-tokenizer; a wrong one makes a worse model.",
        )


def _check_tokens(metadata: Mapping[str, Any]) -> Iterator[Finding]:
    tokens, kinds = metadata.get(PREFIX + "tokens"), metadata.get(PREFIX + "token_type")
    if not isinstance(tokens, list) or not tokens or not all(type(t) is str for t in tokens):
        yield _finding("tokenizer-tokens", "tokens", _shown(tokens), "the tokens as strings")
        return
    if kinds is not None and not _are_kinds(kinds, len(tokens)):
        count = f"{len(kinds):,} values" if isinstance(kinds, list) else _shown(kinds)
        expected = f"{len(tokens):,} whole numbers, one for each token"
        yield _finding("tokenizer-types", "token_type", count, expected)
    twice = [text for text, count in Counter(filter(None, tokens)).items() if count > 1]
    if twice:
        found = f"{len(twice):,} tokens are there twice, first {_shown(twice[0])}"
        yield _finding("tokenizer-duplicate", "tokens", found, "each token once")
    if not _encodable(tokens):
        yield _finding("tokenizer-utf8", "tokens", "a token is not valid UTF-8", "valid UTF-8")


def _are_kinds(kinds: Any, count: int) -> bool:
    return isinstance(kinds, list) and len(kinds) >= count and all(type(k) is int for k in kinds)


def _encodable(texts: Sequence[str]) -> bool:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_merges(metadata: Mapping[str, Any]) -> Iterator[Finding]:
    merges = metadata.get(PREFIX + "merges")
    if not isinstance(merges, list) or not all(type(m) is str for m in merges):
        found = "the key is missing" if merges is None else _shown(merges)
        yield _finding("tokenizer-merges", "merges", found, "the merges as strings")
        return
    bad = next((i for i, m in enumerate(merges) if not 0 < m.find(" ", 1) < len(m) - 1), None)
    if bad is not None:
        found = f"merge {bad:,} is {_shown(merges[bad])}"
        yield _finding("tokenizer-merges", "merges", found, "two parts with a space between")
    elif not _encodable(merges):
        yield _finding("tokenizer-utf8", "merges", "a merge is not valid UTF-8", "valid UTF-8")


def _check_ids(metadata: Mapping[str, Any], count: int) -> Iterator[Finding]:
    for name in ("bos", *_STOP_KEYS):
        value = metadata.get(f"{PREFIX}{name}_token_id")
        if value is not None and _token_id(metadata, name, count) is None:
            yield _finding(
                "tokenizer-special-id",
                f"{name}_token_id",
                f"{_shown(value)} is no token",
                f"a number below {count:,}",
                "It is ignored; an answer may not end where it should.",
                "warning",
            )
    if metadata.get(PREFIX + "add_bos_token") is True and _token_id(metadata, "bos", count) is None:
        yield _finding(
            "tokenizer-bos",
            "add_bos_token",
            "it is true, and there is no bos token",
            "bos_token_id",
            "No bos token is added; answers may be worse.",
            "warning",
        )


def _check_sizes(
    metadata: Mapping[str, Any], count: int, unspelled: frozenset[str]
) -> Iterator[Finding]:
    size = metadata.get(key := f"{metadata.get('general.architecture')}.vocab_size")
    if size is not None and size != count:
        yield _finding(
            "tokenizer-size",
            str(key),
            f"{_shown(size)}, and the tokenizer has {count:,} tokens",
            "the same number",
            "Token ids without a text are printed as nothing.",
            "warning",
        )
    if unspelled:
        yield _finding(
            "tokenizer-merges",
            "merges",
            f"{len(unspelled):,} pieces are no tokens, first {_shown(min(unspelled))}",
            "only pieces that are in the vocabulary",
            "Words with such pieces are spelled letter by letter; text may be read worse.",
            "warning",
        )
