"""Tokens of one answer to pieces of text: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slotwise.engine.request import Step
from slotwise.weights.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenEntry:
    """One token with its logprob, and the most probable ones: (token, logprob)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class ToolCall:
    """A function that the model wants called; `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Piece:
    """Text that is certain now. `first` is the first token's, even if it is still empty."""

    text: str
    first: bool = False
    entries: tuple[TokenEntry, ...] = ()
    calls: tuple[ToolCall, ...] = ()


class AnswerText:
    """Collects an answer's tokens. `stopped` once a stop string has come, which is cut off."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._stream = tokenizer.stream()
        self._stops = tuple(stops)
        self._held = ""
        self._entries: list[TokenEntry] = []
        self.stopped = False

    def push(self, step: Step) -> Piece:
        if step.logprobs is not None:
            entry = TokenEntry(step.token, step.logprobs.chosen, step.logprobs.top)
            self._entries.append(entry)
        self._held += self._stream.push(step.token)
        return self._piece(first=step.first)

    def finish(self) -> Piece:
        """What was held back, when no more tokens come."""
        if not self.stopped:
            self._held += self._stream.finish()
        return self._piece(first=False, last=True)

    def _piece(self, *, first: bool, last: bool = False) -> Piece:
        if self.stopped:
            return Piece("")
        found = [at for at in map(self._held.find, self._stops) if at >= 0]
        if found:
            self.stopped = True
            text, self._held = self._held[: min(found)], ""
        else:
            keep = 0 if last else may_begin(self._held, self._stops)
            cut = len(self._held) - keep
            text, self._held = self._held[:cut], self._held[cut:]
        entries: tuple[TokenEntry, ...] = ()
        if not self._held and not (self.stopped and not text):
            entries = tuple(self._entries)
            self._entries.clear()
        return Piece(text, first, entries)


def may_begin(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that one of `marks` begins with."""
    lengths = (
        n
        for mark in marks
        for n in range(min(len(mark) - 1, len(text)), 0, -1)
        if text.endswith(mark[:n])
    )
    return max(lengths, default=0)
