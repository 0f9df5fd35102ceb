"""What a log reader has to offer, and how a line it does not know is counted.

A reader is a state machine fed line by line. It keeps what a `Request` needs and nothing
of the text. Lines it does not know are counted by their shape, with everything that could
be somebody's words replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from slotwise.explain.record import Life

SHAPE_LIMIT = 96
SHAPES_LIMIT = 500
SEEN_LIMIT = 4096
OTHER_SHAPES = "(other shapes)"

_PIECES = re.compile(r"\d+(?:[.,]\d+)*|[A-Za-z_]+|[^\sA-Za-z_\d]+|\s+")
_ONE_DIGIT = str.maketrans("123456789", "0" * 9)
_PUNCTUATION = frozenset("=:,.;()[]{}|%+-/<>#*\"'")


class Reader(Protocol):
    """One log dialect."""

    name: str

    def sniff(self, lines: Sequence[str]) -> float:
        """How sure (0..1) this reader is that these first lines are its dialect."""
        ...

    def feed(self, line_no: int, line: str) -> None:
        """Take the next line (without its end). Never raises on what a line holds."""
        ...

    def finish(self) -> list[Life]:
        """The lives read so far. A request still open comes out as ``incomplete``."""
        ...


class Unknown:
    """Counts lines not understood by their redacted shape; memory is bounded."""

    def __init__(self, vocabulary: Iterable[str]) -> None:
        self._words = frozenset(word.lower() for word in vocabulary)
        self.counts: dict[str, int] = {}

        self._seen: dict[str, str] = {}

    def add(self, line: str, *, count: int = 1) -> None:
        key = line[: 4 * SHAPE_LIMIT].translate(_ONE_DIGIT)
        shape = self._seen.get(key)
        if shape is None:
            if len(self._seen) >= SEEN_LIMIT:
                self._seen.clear()
            shape = self._seen[key] = self.shape(line)
        if shape not in self.counts and len(self.counts) >= SHAPES_LIMIT:
            shape = OTHER_SHAPES
        self.counts[shape] = self.counts.get(shape, 0) + count

    def shape(self, line: str) -> str:
        """Digits become N, words outside the dialect's vocabulary become one ``…``."""
        out: list[str] = []
        for piece in _PIECES.findall(line[: 4 * SHAPE_LIMIT]):
            first = piece[0]
            if first.isspace():
                token = " "
            elif first.isdigit():
                token = "N"
            elif piece.lower() in self._words:
                token = piece
            elif all(c in _PUNCTUATION for c in piece):
                token = piece[:3]
            else:
                token = "…"
            if token in ("…", " ") and out[-1:] == [token]:
                continue
            if token == "…" and out[-2:] == ["…", " "]:
                out.pop()
                continue
            out.append(token)
        return "".join(out).strip()[:SHAPE_LIMIT] or "(blank)"
