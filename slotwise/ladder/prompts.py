"""Prompts of an exact number of tokens, of real prose and code, each with a fresh salt in front.

The text is what every Python brings along: the language reference (`pydoc_data.topics`) and the
source of standard modules, in turns. Repeated words would route to few experts and read too fast.
Sizes are found by trying: where the server has /tokenize against that, else by what it counted in
the answers so far. The served count is what is fitted, whatever was aimed at.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from random import Random

from slotwise.errors import SlotwiseError, UsageError

MODULES = (
    *("argparse", "ast", "dataclasses", "difflib", "fractions", "heapq", "inspect", "ipaddress"),
    *("json.decoder", "locale", "mailbox", "pathlib", "pickle", "statistics", "tarfile", "typing"),
)
PIECE = 1500
CHARS_PER_TOKEN = 3.6
MOST_TRIES = 40
LEAST_OWN_TEXT = 2_000
SALT_DIGITS = 12


@dataclass(frozen=True)
class Corpus:
    """The text prompts are cut from, and where it is from."""

    name: str
    licence: str
    text: str = field(repr=False)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def standard_corpus() -> Corpus:
    """Prose and code of this Python's standard library, in pieces that take turns."""
    name = f"standard library of Python {sys.version_info.major}.{sys.version_info.minor}"
    pieces = zip_longest(_pieces(_prose()), _pieces(_code()), fillvalue="")
    return Corpus(name, "PSF-2.0", "".join(p for pair in pieces for p in pair))


def own_corpus(path: Path) -> Corpus:
    """The user's own text; its name is not kept."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as UTF-8 text", next_step="") from error
    if len(text) < LEAST_OWN_TEXT:
        raise UsageError(
            f"{path} has {len(text):,} characters", next_step=f"Give {LEAST_OWN_TEXT:,} or more."
        )
    return Corpus("a text of the user", "not said", text)


@dataclass
class Sizer:
    """Finds how many characters make a prompt of so many tokens.

    `tokenize` counts the tokens of a text, or is None where the server cannot; `overhead` is what
    the chat template adds, learnt from served counts.
    """

    tokenize: Callable[[str], int | None] | None = None
    overhead: int | None = None
    chars_per_token: float = CHARS_PER_TOKEN
    learnt: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    """Target: (characters, tokens too few in the last answer), where there is no /tokenize."""

    def body_chars(self, size: int, salted: Callable[[int], str], *, most: int) -> int:
        """Characters of the passage for a prompt of `size` tokens; `salted(n)` is the prompt."""
        guess = max(1, min(most, round((size - (self.overhead or 20)) * self.chars_per_token)))
        if self.tokenize is not None:
            return self._by_trying(size, guess, salted, most)
        chars, missing = self.learnt.get(size, (guess, 0))
        return max(1, min(most, chars + _step(missing, self.chars_per_token)))

    def served(self, size: int, *, prompt: str, body: int, tokens: int) -> None:
        """What the server counted for a prompt: the next one of this size aims better."""
        if self.tokenize is not None:
            own = self.tokenize(prompt)
            self.overhead = tokens - own if own is not None else self.overhead
        else:
            self.chars_per_token = max(0.5, len(prompt) / max(1, tokens - (self.overhead or 0)))
        self.learnt[size] = (body, size - tokens)

    def _by_trying(self, size: int, chars: int, salted: Callable[[int], str], most: int) -> int:
        """Closes in from both sides; tokens grow with characters, but for a few at a cut."""
        low, high = 0, most + 1
        best, least = chars, sys.maxsize
        for _ in range(MOST_TRIES):
            text = salted(chars)
            count = self.tokenize(text) if self.tokenize else None
            if count is None:
                break
            self.chars_per_token = max(0.5, len(text) / max(1, count))
            missing = size - count - (self.overhead or 0)
            if abs(missing) < least:
                best, least = chars, abs(missing)
            low, high = (max(low, chars), high) if missing > 0 else (low, min(high, chars))
            if not missing or high - low <= 1:
                break
            chars += _step(missing, self.chars_per_token)
            if not low < chars < high:
                chars = (low + high) // 2
        return best


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt to send. Only its checksum, its length and its place in the text are recorded."""

    text: str = field(repr=False)
    passage: int
    body_chars: int

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


class PromptMaker:
    """Makes the prompts of one run."""

    def __init__(self, corpus: Corpus, *, seed: int) -> None:
        self.corpus, self._seed, self._salts = corpus, seed, Random()

    def make(self, size: int, *, round: int, sizer: Sizer) -> Prompt:
        """All arms get the same passage in a round, and each request a salt of its own.

        Where the server has no /tokenize all rounds get the same passage, so that the size can be
        found by trying.
        """
        passage = self._passage(size, 0 if sizer.tokenize is None else round)
        salt = "".join(self._salts.choices("0123456789", k=SALT_DIGITS))

        def salted(chars: int) -> str:
            return f"{salt} {self.corpus.text[passage : passage + chars]}"

        most = len(self.corpus.text) - passage
        chars = sizer.body_chars(size, salted, most=most)
        return Prompt(text=salted(chars), passage=passage, body_chars=chars)

    def _passage(self, size: int, round: int) -> int:
        room = len(self.corpus.text) - int(2 * size * CHARS_PER_TOKEN)
        if room < 0:
            raise SlotwiseError(
                f"{size:,} tokens are more than the text has ({len(self.corpus.text):,} "
                "characters)",
                next_step="Give a longer one with --text.",
            )
        start = Random(f"{self._seed} {size} {round}").randint(0, room)
        return self.corpus.text.find("\n", start) + 1


def _step(missing: int, chars_per_token: float) -> int:
    """Characters to add for so many missing tokens; carefully when it is nearly there."""
    return missing if abs(missing) <= 2 else round(missing * chars_per_token)


def _pieces(texts: Iterator[str]) -> Iterator[str]:
    """Whole lines of about `PIECE` characters."""
    lines, length = list[str](), 0
    for text in texts:
        for line in text.splitlines(keepends=True):
            lines.append(line)
            length += len(line)
            if length >= PIECE:
                yield "".join(lines)
                lines, length = [], 0
    yield "".join(lines)


def _prose() -> Iterator[str]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError:
        topics = {}
    yield from (topics[name] for name in sorted(topics))


def _code() -> Iterator[str]:
    for name in MODULES:
        found = importlib.util.find_spec(name)
        if found is not None and found.origin and Path(found.origin).is_file():
            yield Path(found.origin).read_text(encoding="utf-8")
