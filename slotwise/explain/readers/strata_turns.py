"""Derived per-turn records of Strata runs: JSON with a list ``turns``, one object per turn.

Two forms: sums of the engine's trace per turn (``batched_ms``, ``refill_ms``, ...), and
prompt time with the client's time to first token (``ttft_s``). Medians that a document also
holds are left out: they are not requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slotwise.explain.readers.base import Unknown
from slotwise.explain.readers.strata_draft import Draft, Summary
from slotwise.explain.readers.strata_life import LifeState
from slotwise.explain.readers.strata_prefill import number
from slotwise.explain.record import Life, Request, Value

SIZE_LIMIT = 16 << 20
TURNS_LIMIT = 100_000
_MARKS = ('"batched_ms"', '"refill_ms"', '"reused_tokens"', '"ttft_s"')
_NOT_IN_ROW = Value.missing("not in this record of turns")
_DERIVED = "a record derived from a log: what its author left out cannot be seen"
_BOTH = "cached tokens are not in this record: prompt and reused are unknown"


class StrataTurnsReader:
    """Reader of the dialect ``strata turns``. Keeps the document until `finish`."""

    name = "strata turns"

    def __init__(self, file: str) -> None:
        self.file = file
        self.unknown = Unknown(())
        self.parts: list[str] = []
        self.size = 0
        self.first = 0

    def sniff(self, lines: Sequence[str]) -> float:
        text = "\n".join(lines)
        marks = sum(mark in text for mark in _MARKS)
        return 1.0 if text.lstrip().startswith("{") and marks >= 2 else 0.0

    def feed(self, line_no: int, line: str) -> None:
        self.first = self.first or line_no
        self.size += len(line) + 1
        if self.size <= SIZE_LIMIT:
            self.parts.append(line)

    def finish(self) -> list[Life]:
        """One life per list of turns; none while the document is not whole."""
        try:
            data = json.loads("\n".join(self.parts))
        except (ValueError, RecursionError):
            return []
        return [self._life(turns) for turns in _turns(data, 0)]

    def _life(self, turns: Sequence[Mapping[str, Any]]) -> Life:
        life = LifeState(self.file, self.first)
        for turn in turns[:TURNS_LIMIT]:
            if (draft := _draft(turn)) is not None:
                draft.first = draft.last = self.first
                life.add(draft)
        built = life.build()
        kept = [_as_recorded(r) for r in built.requests]
        missing = tuple(t for t in built.cannot_tell if "STRATA_TRACE" not in t)
        return replace(
            built,
            dialect=self.name,
            requests=tuple(kept),
            notes=(_DERIVED,),
            cannot_tell=(*missing, _BOTH) if any(not r.reused.known for r in kept) else missing,
        )


def _turns(node: Any, depth: int) -> Iterator[list[Any]]:
    if depth > 6:
        return
    if isinstance(node, dict):
        found = node.get("turns")
        if isinstance(found, list):
            yield [turn for turn in found if isinstance(turn, dict)]
        for key, value in node.items():
            if key != "turns":
                yield from _turns(value, depth + 1)
    elif isinstance(node, list):
        for value in node:
            yield from _turns(value, depth + 1)


def _draft(turn: Mapping[str, Any]) -> Draft | None:
    read, prompt_ms = number(turn, "read_tokens"), number(turn, "prompt_ms")
    if read is None or prompt_ms is None:
        return None
    reused = number(turn, "reused_tokens")
    prompt = int(reused + read) if reused is not None else -1
    draft = Draft(prompt_done=True)
    draft.summary = Summary(prompt, int(reused or 0), int(read), int(read), prompt_ms, 0, 0.0)
    draft.no_decode_clock = True
    lend, slots = number(turn, "lend_ms"), number(turn, "lent_slots")
    if slots and lend is not None:
        draft.lent(int(slots), lend)
    for mode, key in (("batched", "batched"), ("windows", "window")):
        tokens, ms = number(turn, f"{key}_tokens"), number(turn, f"{key}_ms")
        if tokens and ms is not None:
            draft.read(int(tokens), mode, ms)
    refill, slots = number(turn, "refill_ms"), number(turn, "refilled_slots")
    if slots and refill is not None:
        draft.refilled(int(slots), refill)
    seconds = number(turn, "ttft_s")
    if seconds is not None:
        draft.facts["ttft_ms"] = Value.measured(seconds * 1e3)
    return draft


def _as_recorded(request: Request) -> Request:
    """Without the numbers that only the summary line of a log would have had."""
    facts = {
        k: v for k, v in request.facts.items() if k not in ("ttft_ms", "windows", "window tokens")
    }
    unknown = (request.prompt.value or 0) < 0
    ttft = request.facts.get("ttft_ms", request.ttft_ms)
    if ttft.value is not None and request.prompt_ms.value is not None:
        why = "client time to first token - prompt_ms"
        facts["outside prompt_ms"] = Value.derived(ttft.value - request.prompt_ms.value, why)
    return replace(
        request,
        prompt=_NOT_IN_ROW if unknown else request.prompt,
        reused=_NOT_IN_ROW if unknown else request.reused,
        generated=_NOT_IN_ROW,
        ttft_ms=ttft,
        facts=facts,
    )
