"""What the readers of other engines' logs share: requests with gaps, numbers, durations.

It parses no dialect. Numbers are limited in length, so that no digits of a hostile log become
infinite or very long.
"""

from __future__ import annotations

import re
from typing import Any

from slotwise.explain.readers.base import OTHER_SHAPES, Unknown
from slotwise.explain.record import Request, Value

INT = r"\d{1,12}"
NUM = r"\d{1,12}(?:\.\d{1,18})?"

SMALL_READ = 64
"""Reads below this many tokens measure fixed cost. Our choice, not an engine's."""

SHAPED_LINES = 20_000
_NOT_PRINTED = "this log does not print it"
_NO_SLOTS = "no expert slots are lent in this engine"
_UNIT_MS = {"h": 3_600_000.0, "m": 60_000.0, "s": 1000.0, "ms": 1.0, "us": 1e-3, "ns": 1e-6}
_DURATION = re.compile(rf"({NUM})\d*(ms|us|µs|μs|ns|h|m|s)")

DEFAULTS: dict[str, Value] = {
    **dict.fromkeys(
        (
            "prompt",
            "reused",
            "read_planned",
            "read",
            "generated",
            "prompt_ms",
            "ttft_ms",
            "decode_ms",
        ),
        Value.missing(_NOT_PRINTED),
    ),
    "slots_lent": Value.missing(_NO_SLOTS),
    "slots_refilled": Value.missing(_NO_SLOTS),
}

VERSION = r"[bv]?\d{1,6}(?:[.+_-][0-9A-Za-z]{1,16}){0,6}"
"""What may leave a reader as a version: numbers with suffixes, not any word (it may be a key)."""


def request(index: int, lines: tuple[int, int], status: str, **known: Any) -> Request:
    """A request whose values not given in `known` are missing. The first is first of its life."""
    return Request(
        **{
            **DEFAULTS,
            "index": index,
            "lines": lines,
            "status": status,
            "first_of_life": index == 0,
            **known,
        }
    )


def duration_ms(text: str) -> float | None:
    """`1m3.5s`, `847ms`, `229.23s`, `35.5us` (as Go and Python programs print) in milliseconds."""
    parts = _DURATION.findall(text)
    if not parts:
        return None
    return sum(float(n) * _UNIT_MS[unit.replace("µ", "u").replace("μ", "u")] for n, unit in parts)


def to_ms(seconds: float) -> float:
    """Seconds in milliseconds, without the noise that floats add to printed decimals."""
    return round(seconds * 1000, 6)


def read_planned(prompt: Value, reused: Value) -> Value:
    """Prompt minus reused, where both are known."""
    if prompt.value is None or reused.value is None:
        return Value.missing("needs the prompt's length and what was reused")
    return Value.derived(prompt.value - reused.value, "prompt - reused")


def size_warnings(read: Value) -> list[str]:
    """Why a rate over this few tokens says nothing about reading speed."""
    if read.value is None or read.value >= SMALL_READ:
        return []
    if read.value <= 1:
        return ["1 token or none was read: its time is no prompt speed"]
    return [f"under {SMALL_READ} tokens were read: their time is mostly fixed cost, no speed"]


class Shapes(Unknown):
    """Counts lines not understood; after many of them without looking at their shape."""

    def __init__(self, vocabulary: str) -> None:
        super().__init__(vocabulary.split())
        self._left = SHAPED_LINES

    def see(self, line: str) -> None:
        if not line or line.isspace():
            return
        if self._left:
            self._left -= 1
            self.add(line)
        else:
            self.counts[OTHER_SHAPES] = self.counts.get(OTHER_SHAPES, 0) + 1
