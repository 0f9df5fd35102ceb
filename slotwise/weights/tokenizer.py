"""Text to token ids and back, by a GGUF's own byte-level BPE vocabulary, as llama.cpp does it.

The merging is done by the `tokenizers` library. Special tokens are cut out of the text here,
because llama.cpp's order (the longest token first, over the whole text) is not that library's.
Chat templates are in chat.py; what the metadata has to hold is in vocabulary.py.

Known differences from llama.cpp: characters that Unicode 16 added have their category here (there
they have none); `add_eos_token` is ignored, because a prompt is there to be continued; bytes that
encode a surrogate or an overlong form count as invalid.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from slotwise.errors import Finding, Refused, UsageError
from slotwise.weights.vocabulary import (
    KNOWN_PRE_TOKENIZERS,
    Kind,
    Vocabulary,
    has_tokenizer,
    missing_finding,
    read_vocabulary,
)

if TYPE_CHECKING:
    import tokenizers

__all__ = ["KNOWN_PRE_TOKENIZERS", "TokenStream", "Tokenizer", "tokenizer_findings"]

_CONTROL = (Kind.CONTROL, Kind.UNKNOWN)
_SPECIAL = frozenset([*_CONTROL, Kind.USER_DEFINED])
_UNDECODED = {0xDC00 + byte: "\ufffd" for byte in range(0x80, 0x100)}


def tokenizer_findings(metadata: Mapping[str, Any]) -> list[Finding]:
    """Everything wrong with the tokenizer in a GGUF's metadata; never raises on its values."""
    return read_vocabulary(metadata)[1]


class Tokenizer:
    """A model's tokenizer. Build it with `from_metadata`, or `none` for a model without text."""

    def __init__(self, vocabulary: Vocabulary | None, *, n_vocab: int) -> None:
        self.n_vocab = n_vocab
        """How many token ids there are."""
        self.bos = vocabulary.bos if vocabulary else None
        self.eos = vocabulary.eos if vocabulary else None
        self.add_bos = vocabulary.add_bos if vocabulary else False
        """Whether the model wants a bos token before plain text (not before a chat template's)."""
        self.stop_ids = vocabulary.stop_ids if vocabulary else frozenset()
        """The tokens that end an answer: eos, end of turn, and the like."""
        self._tokens = vocabulary.tokens if vocabulary else []
        self._kinds = vocabulary.kinds if vocabulary else []
        self._bpe, self._spelled = _bpe(vocabulary) if vocabulary else (None, {})
        self._special = sorted(
            (i for i, kind in enumerate(self._kinds[: len(self._tokens)]) if kind in _SPECIAL),
            key=lambda i: -len(self._tokens[i].encode()),
        )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], *, n_vocab: int = 0) -> Tokenizer:
        """The tokenizer of a GGUF by its metadata; Refused with all findings if it is unsound.

        `n_vocab` is the model's number of logits, where that is known; more than the file has
        tokens is sound. A file without a tokenizer gives `none`.
        """
        vocabulary, findings = read_vocabulary(metadata)
        if vocabulary is not None:
            return cls(vocabulary, n_vocab=max(n_vocab, len(vocabulary.tokens)))
        if has_tokenizer(metadata):
            raise Refused(findings)
        size = metadata.get(f"{metadata.get('general.architecture')}.vocab_size")
        return cls.none(n_vocab or (size if type(size) is int else 0))

    @classmethod
    def none(cls, n_vocab: int) -> Tokenizer:
        """For a model that works on token ids only: no text, no bos, nothing that ends an answer.

        `encode` of text raises Refused; every token decodes to nothing.
        """
        return cls(None, n_vocab=n_vocab)

    @property
    def has_text(self) -> bool:
        return self._bpe is not None

    def encode(self, text: str | bytes, *, special: bool, add_bos: bool | None = None) -> list[int]:
        """The token ids of `text`.

        `special` lets control tokens written in the text (``<|im_end|>``) stand for themselves: for
        templates, never for what a user typed. User-defined tokens always do. `add_bos` None is
        what the model wants. Invalid UTF-8 becomes U+FFFD, one for each byte.
        """
        if self._bpe is None:
            raise Refused([missing_finding()])
        bos = self.bos if (self.add_bos if add_bos is None else add_bos) else None
        ids = [] if bos is None else [bos]
        for part in self._parts(_valid(text), special):
            ids += self._bpe.encode(part).ids if isinstance(part, str) else (part,)
        if not self._spelled:
            return ids
        return [i for token in ids for i in self._spelled.get(token, (token,))]

    def least_tokens(self, text: str) -> int:
        """No fewer tokens than this stand for `text`; takes no time."""
        return len(text) // self._longest if self._tokens else 0

    @cached_property
    def _longest(self) -> int:
        """Bytes of the longest token, or more: a letter of a byte-level token counts as UTF-8."""
        return max((len(token.encode()) for token in self._tokens), default=0) or 1

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """The text of `tokens`, all at once; `special` prints control tokens too."""
        stream = self.stream(special=special)
        return "".join([*map(stream.push, tokens), stream.finish()])

    def stream(self, *, special: bool = False) -> TokenStream:
        """A decoder for tokens that arrive one by one; `special` prints control tokens too."""
        return TokenStream(self, special=special)

    def token_bytes(self, token: int, *, special: bool = True) -> bytes:
        """What `token` stands for; b"" for one without text, or a control token if not `special`.

        The bytes of one token need not be valid UTF-8. UsageError if there is no such token.
        """
        if not 0 <= token < self.n_vocab:
            raise UsageError(f"token {token} is not among the model's {self.n_vocab:,} tokens")
        if token >= len(self._tokens):
            return b""
        text, kind = self._tokens[token], self._kinds[token]
        if kind == Kind.USER_DEFINED or (special and kind in _CONTROL):
            return text.encode()
        if kind != Kind.NORMAL:
            return b""
        try:
            return text.translate(_bytes_of_letters()).encode("latin-1")
        except UnicodeEncodeError:
            return text.encode()

    def _parts(self, text: str, special: bool) -> Iterable[str | int]:
        parts: Iterable[str | int] = [text] if text else []
        for token in self._special:
            literal = self._tokens[token]
            if literal in text and (special or self._kinds[token] == Kind.USER_DEFINED):
                parts = list(_cut_out(parts, literal, token))
        return parts


class TokenStream:
    """Decodes tokens one by one and gives text only up to the last whole character.

    Bytes that cannot become a character are given as U+FFFD as soon as that is certain.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is certain now that `token` has come; often "" inside a character."""
        return self._decoder.decode(self._tokenizer.token_bytes(token, special=self._special))

    def finish(self) -> str:
        """What is left: U+FFFD if the last character is incomplete. The stream can be reused."""
        return self._decoder.decode(b"", final=True)


def _valid(text: str | bytes) -> str:
    """Text in which each byte that is not UTF-8 has become U+FFFD; a lone surrogate is three."""
    try:
        return text.decode() if isinstance(text, bytes) else text.encode().decode()
    except UnicodeError:
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        return raw.decode("utf-8", "surrogateescape").translate(_UNDECODED)


def _cut_out(parts: Iterable[str | int], literal: str, token: int) -> Iterator[str | int]:
    for part in parts:
        if isinstance(part, int):
            yield part
            continue
        for i, piece in enumerate(part.split(literal)):
            if i:
                yield token
            if piece:
                yield piece


@cache
def _bytes_of_letters() -> dict[int, int]:
    """The byte of each letter that byte-level BPE writes bytes with (GPT-2's bytes_to_unicode).

    Printable Latin-1 stands for itself, 256, 257, ... for the other bytes in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {256 + i: byte for i, byte in enumerate(others)}


def _bpe(vocabulary: Vocabulary) -> tuple[tokenizers.Tokenizer, dict[int, tuple[int, ...]]]:
    """The merging machine, and how to spell the tokens it knows that the vocabulary lacks.

    A byte or a merge without a token must still keep its neighbours apart, as in llama.cpp, so it
    gets an id above the vocabulary. Spelled, it is its ASCII letters that are tokens: none for a
    single byte.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    ids = vocabulary.ids
    absent = vocabulary.unspelled.union(pre_tokenizers.ByteLevel.alphabet()).difference(ids)
    extra = {piece: len(ids) + i for i, piece in enumerate(sorted(absent))}
    spelled = {
        token: tuple(ids[c] for c in piece if c.isascii() and c in ids)
        for piece, token in extra.items()
    }
    model = models.BPE(
        vocab=ids | extra if extra else ids,
        merges=vocabulary.merges,
        ignore_merges=vocabulary.pre.ignore_merges,
    )
    bpe = Tokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in vocabulary.pre.patterns]
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_letters])
    return bpe, spelled
