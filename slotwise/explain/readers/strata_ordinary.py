"""Strata requests whose lines are all of the usual kinds: kept as they are, read when looked at.

A long log is mostly such requests. Two patterns tell them, one for the lines before the decode
windows and one for those after; only numbers vary in them, and none of these lines changes
anything but its request. Whatever does not match goes line by line, like everything else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from slotwise.explain.readers.lines import feed_lines
from slotwise.explain.readers.strata_draft import Draft
from slotwise.explain.requests import kept

if TYPE_CHECKING:
    from slotwise.explain.readers.strata import StrataReader

START = b"\nstrata trace: request "

_NOTHING = (
    "strata serial cache policy: # fresh prompt tokens, interval #",
    "strata serial cache barriers: # updates, % ms total",
    "strata accepted usage: # retained of # routed entries",
)
"""Lines with nothing to report."""
_READ = (
    "strata trace: lent # slots for # tokens in % ms",
    "strata trace: prompt chunk # of #",
    "strata trace: read # tokens (batched) in % ms",
    "strata trace: read # tokens (windows) in % ms",
    "strata trace: refill start # -1",
    "strata trace: refilled # slots on # stage(s) in % ms",
)
_DECODE = (
    "strata decode timing: # windows, avg T %, % tokens/window, % ms/window = verify % (GPU-reach "
    "wait % + per-layer host %< [plan % actq % jobs % CPU %]> + stage %< + tail %>) + commit/emit "
    "% + draft %<; per layer-window: CPU experts % (% entries), VRAM hits %, PCIe %>"
)
_SUMMARY = (
    " tokens = # reused + # read in % ms (% tok/s), # generated in % ms (% tok/s)"
    "<, drafts accepted # of #><, # checkpoints>"
)
_AFTER = (
    "strata serve: decode expert cache hit rate: %p (# hits / # lookups)"
    "<; # more read by the GPU over PCIe< or from another GPU>< (%p of all # routed)>>",
    "strata serve: suffix drafts: # windows, # of # drafts accepted",
    "strata serve: KV streaming: %p of # block reads hit VRAM, % MiB read from RAM",
    *_NOTHING,
)


def _pattern(text: str) -> str:
    """`#` is a whole number, `%` one with or without decimals, `%p` per cent, `<...>` optional."""
    number = r"\d{1,12}(?:\.\d{1,9})?"
    found = re.escape(text).replace(r"\#", r"\d{1,15}").replace("%p", number + "%%")
    found = re.sub("%(?!%)", number.replace("\\", r"\\"), found.replace("%%", "\0"))
    return found.replace("\0", "%").replace("<", "(?:").replace(">", ")?")


def _lines(*texts: str) -> str:
    """Any number of these lines in any order."""
    return f"(?:(?:{'|'.join(map(_pattern, texts))})\n)*"


def _more(*texts: str) -> str:
    """The same where the line before has no end yet."""
    return f"(?:\n(?:{'|'.join(map(_pattern, texts))}))*"


_HEAD = re.compile(
    r"strata trace: request (\d{1,15}) 0\nstrata trace: prompt start \d{1,15} -1\n"
    rf"{_lines(*_READ)}strata trace: prompt done \(slots refilled\) -1 -1"
    rf"{_more(*_NOTHING)}".encode()
)
_TAIL = re.compile(
    rf"{_lines(*_NOTHING)}(?:{_pattern(_DECODE)}\n)?{_lines(*_NOTHING)}"  # twice is two requests
    rf"strata serve: prompt (\d{{1,15}}){_pattern(_SUMMARY)}\n"
    rf"{_lines(*_AFTER)}".encode()
)


@kept
@dataclass(slots=True)
class Ordinary:
    """The lines of such a request. Its windows are counted, as those of a `Draft` are."""

    first: int
    head: bytes
    prompt: bytes
    windows: int = 0
    window_tokens: int = 0
    first_window: tuple[int, int] | None = None
    tail_at: int = 0
    """Number of the first line after the windows."""
    tail: bytes = b""

    def read(self) -> Draft:
        """What its lines say, found by the reader that takes every other line."""
        reader = _reader()
        feed_lines(reader, self.head, self.first)
        draft = reader.draft
        if self.windows:
            reader.touch(self.first + self.head.count(b"\n") + self.windows)
        draft.windows, draft.window_tokens = self.windows, self.window_tokens
        draft.first_window = self.first_window
        if self.tail:
            feed_lines(reader, self.tail[:-1], self.tail_at)
        reader.draft, reader.held = Draft(), None
        return draft


def ordinary_start(first: int, lines: bytes) -> Ordinary | None:
    """The request these lines begin, when they are all of the usual kinds."""
    match = _HEAD.fullmatch(lines)
    return Ordinary(first, lines, match[1]) if match else None


def ends(request: Ordinary, lines: bytes) -> bool:
    """Whether these lines, each with its end, end this request in the usual way."""
    match = _TAIL.fullmatch(lines)
    return match is not None and match[1] == request.prompt


@cache
def _reader() -> StrataReader:
    from slotwise.explain.readers.strata import StrataReader

    return StrataReader("")
