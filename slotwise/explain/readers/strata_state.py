"""How Strata's lines become requests and lives.

A request is everything from the lines before its `request` up to its summary; the lines
after a summary still belong to it. Without the trace only the summary delimits requests.
One life is one engine: its start line, or its counters falling, begins the next.
"""

from __future__ import annotations

import copy
from dataclasses import replace

from slotwise.explain.readers import strata_prefill as prefill
from slotwise.explain.readers.strata_draft import Draft
from slotwise.explain.readers.strata_life import LifeState
from slotwise.explain.readers.strata_ordinary import Ordinary
from slotwise.explain.record import Life


class StrataState:
    """The request being read, the one before it, and the lives so far."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.done_lives: list[Life] = []
        self.life = LifeState(file, 0)
        self.draft = Draft()
        self.held: Draft | None = None
        """The last request with a summary: lines after the summary still belong to it."""
        self.ordinary: Ordinary | None = None
        self.ended: Ordinary | None = None
        """In place of `draft` and of `held` while every line was of the usual kinds."""
        self.no = 0

    def finish(self) -> list[Life]:
        """The lives so far; feeding may go on afterwards."""
        end = copy.copy(self)
        end.done_lives, end.life = list(self.done_lives), self.life.copy()
        end.read_ordinary()
        for draft in end.unsettled(end.held, end.draft):
            end.add(draft)
        if end.life.seen_anything or not end.done_lives:
            end.done_lives.append(end.life.build())
        return end.done_lives

    def touch(self, last: int | None = None, first: int | None = None) -> Draft:
        draft = self.draft
        draft.last = last or self.no
        if not draft.first:
            draft.first = first or self.no
        return draft

    def unsettled(self, held: Draft | None, draft: Draft) -> list[Draft]:
        """Requests to build when the log ends here, in order."""
        out: list[Draft] = []
        if held is not None:
            if draft.runs and not draft.traced and not draft.done and _fits(draft, held):
                held = _joined(held, draft)
                draft = Draft()
            out.append(held)
        if draft.is_request:
            out += _cut_runs(draft)
        elif draft.caches or draft.outside or draft.facts:
            note = "lines that come before a request were not followed by one"
            if note not in self.life.notes:
                self.life.notes.append(note)
        return out

    def flush(self) -> None:
        for draft in self.unsettled(self.held, self.draft):
            self.add(draft)
        self.held, self.draft = None, Draft()

    def add(self, draft: Draft) -> None:
        if self.life.counter_fell(draft):
            self.close_life(draft.first, note="host staging fell: the engine had restarted")
        self.life.add(draft)

    def keep_ordinary(self, request: Ordinary, tail_at: int, tail: bytes) -> None:
        """These lines end it: the one before is final."""
        if self.held is not None:
            self.add(self.held)
            self.held = None
        if self.ended is not None:
            self.life.add_ordinary(self.ended)
        request.tail_at, request.tail = tail_at, tail
        self.ended, self.ordinary = request, None

    def read_ordinary(self) -> None:
        """Go on line by line: what was kept as text becomes the drafts it stands for."""
        if self.ended is not None:
            self.life.note_tail(self.ended)
            self.held, self.ended = self.ended.read(), None
        if self.ordinary is not None:
            self.draft, self.ordinary = self.ordinary.read(), None

    def close_life(self, first_line: int, note: str = "") -> None:
        if self.life.seen_anything:
            self.done_lives.append(self.life.build())
        self.life = LifeState(self.file, first_line)
        if note:
            self.life.notes.append(note)

    def new_life(self) -> None:
        self.flush()
        self.close_life(self.no)

    def summarised(self) -> None:
        """The draft has its summary: it waits for trailing lines, the one before is final."""
        draft, held = self.draft, self.held
        if held is not None:
            if _fits(draft, held) and not draft.traced and not _fits_own(draft):
                held = _joined(held, draft)
                draft.runs, draft.setup_ms = [], None
            self.add(held)
        self.held, self.draft = draft, Draft()

    def tail(self) -> Draft:
        """The request that lines after a summary belong to; one cut off the log has none."""
        if self.held is None:
            note = "lines that come after a summary were not preceded by one"
            if note not in self.life.notes:
                self.life.notes.append(note)
            return Draft()
        self.held.last = max(self.held.last, self.no)
        return self.held


def _run_tokens(draft: Draft) -> int:
    return max(
        (sum(r.tokens for r in draft.runs if r.kind == kind) for kind in ("run", "chunk")),
        default=0,
    )


def _fits(draft: Draft, held: Draft) -> bool:
    """Whether the draft's prefill lines are those of the request before it."""
    if not draft.runs or held.runs or held.summary is None:
        return False
    return 0 <= held.summary.planned - 1 - _run_tokens(draft) <= 64


def _fits_own(draft: Draft) -> bool:
    summary = draft.summary
    return summary is not None and _run_tokens(draft) <= summary.planned


def _joined(held: Draft, draft: Draft) -> Draft:
    late = "its prefill timing lines come after its summary line"
    return replace(
        held,
        runs=draft.runs,
        setup_ms=draft.setup_ms,
        last=max(held.last, draft.last),
        warnings=[*held.warnings, late],
    )


def _cut_runs(draft: Draft) -> list[Draft]:
    """Several requests' prefill lines with no line between them that tells of a request."""
    if draft.traced or draft.summary or draft.done or len(draft.runs) < 4:
        return [draft]
    groups = prefill.separate(draft.runs)
    if len(groups) < 2:
        return [draft]
    out: list[Draft] = []
    for runs in groups:
        last = min(draft.last, runs[-1].line + 1)
        part = Draft(first=runs[0].line, last=last, runs=runs)
        part.warnings.append("no request line: cut where a first stage's line ends a read")
        out.append(part)
    return out
