"""A prompt-ladder runner's log: medians per prompt size, as printed, and nothing else.

Lines such as ``17:48:51     4096: prefill 550 (543-555) decode 47.0 (43.2-48.4) ttft 7.5s``.
One "request" is one size: the median of several runs. There are no phases in such a log.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from slotwise.explain.readers.base import Unknown
from slotwise.explain.record import Life, Phase, Request, Value

_NUM = r"(\d{1,9}(?:\.\d{1,6})?)"
_RANGE = rf"(?: \({_NUM}-{_NUM}\))?"
_SIZE = re.compile(
    rf"\d\d:\d\d:\d\d +(\d{{1,9}}): prefill {_NUM}{_RANGE} decode {_NUM}{_RANGE} ttft {_NUM}s\s*$"
)
_BLOCK = re.compile(r"\d\d:\d\d:\d\d block \d+-")
_TARGETS = re.compile(r"\d\d:\d\d:\d\d +harness targets [\d,]+ x(\d{1,4})\s*$")
_KNOWN = re.compile(r"\d\d:\d\d:\d\d +(?:loaded in |needle|restoring |done)")

_NONE = Value.missing("a ladder of medians: not in this log")
_NO_PHASES = "phases: this log has medians of whole prompts only; join the engine's own log"


class StrataLadderReader:
    """Reader of the dialect ``strata ladder``."""

    name = "strata ladder"

    def __init__(self, file: str) -> None:
        self.file = file
        self.unknown = Unknown(
            ["block", "harness", "targets", "prefill", "decode", "ttft", "loaded", "in"]
        )
        self.lives: list[Life] = []
        self.requests: list[Request] = []
        self.first = 0
        self.runs: int | None = None

    def sniff(self, lines: Sequence[str]) -> float:
        return 0.9 if any(_SIZE.match(line) for line in lines) else 0.0

    def feed(self, line_no: int, line: str) -> None:
        self.first = self.first or line_no
        if match := _SIZE.match(line):
            self._size(line_no, match)
        elif _BLOCK.match(line):
            self._close(line_no)
        elif match := _TARGETS.match(line):
            self.runs = int(match[1])
        elif line.strip() and not _KNOWN.match(line):
            self.unknown.add(line)

    def finish(self) -> list[Life]:
        return [*self.lives, self._life()] if self.requests else list(self.lives)

    def _close(self, line_no: int) -> None:
        if self.requests:
            self.lives.append(self._life())
        self.requests, self.first = [], line_no

    def _life(self) -> Life:
        return Life(
            dialect=self.name,
            file=self.file,
            first_line=self.first,
            requests=tuple(self.requests),
            notes=("each entry is the median of several runs of one prompt size",),
            cannot_tell=(_NO_PHASES,),
        )

    def _size(self, line_no: int, match: re.Match[str]) -> None:
        tokens, rate, ttft = int(match[1]), float(match[2]), float(match[8]) * 1e3
        facts = {
            "read tok/s as printed": Value.measured(rate),
            "decode tok/s as printed": Value.measured(float(match[5])),
        }
        rest: tuple[Phase, ...] = ()
        if self.runs is not None:
            facts["runs"] = Value.measured(self.runs)
        if rate > 0:
            why = "ttft - target / prefill rate, of medians printed to 0.1 s"
            rest = (Phase("ttft - target/prefill", Value.derived(ttft - tokens / rate * 1e3, why)),)
        self.requests.append(
            Request(
                index=len(self.requests),
                lines=(line_no, line_no),
                status="done",
                prompt=Value.measured(tokens),
                reused=_NONE,
                read_planned=_NONE,
                read=_NONE,
                generated=_NONE,
                prompt_ms=_NONE,
                ttft_ms=Value.measured(ttft),
                decode_ms=_NONE,
                remainders=rest,
                slots_lent=_NONE,
                slots_refilled=_NONE,
                cannot_tell=(_NO_PHASES,),
                facts=facts,
            )
        )
