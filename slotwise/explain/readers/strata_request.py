"""The `Request` made of what one Strata request's lines said (`Draft`).

The identities between the lines are checked here and become warnings when they fail. No
phase is invented: what a line does not say is bounded or missing, with the switch or the
version that would have said it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from slotwise.explain.readers import strata_prefill as prefill
from slotwise.explain.readers.strata_draft import NOTHING, Draft
from slotwise.explain.record import Phase, Request, Status, Value

REST = "prompt_ms - (lent + read + refilled)"
REST_HOLDS = (
    "reuse lookup, checkpoint restore and saves, parking, adaptive swaps, zeroing and trace "
    "output: no line tells them apart"
)
NO_TRACE = "the parts of prompt_ms (lend, read, refill): STRATA_TRACE was off"
NO_PREFILL = "what the read was made of: STRATA_PREFILL_TIMING was off"
NO_DECODE = "what a decode window was made of: STRATA_DECODE_TIMING was off"
OLD_VERSION = "lend and refill times: this version does not print them (0.1.32 and later do)"
NO_SUMMARY = "the prompt and decode clocks: the log has no summary line for this request"
NO_CLIENT = "queueing, templating and tokenising: they come before the engine's clock"

_needs_trace = Value.missing("needs STRATA_TRACE=1")
_no_summary = Value.missing("no summary line")
_nothing_lent = Value.derived(0.0, "no part was read in a batch, so nothing was lent")
_own_buffers = Value.derived(0.0, "the prompt path owns its buffers: nothing is lent")
_not_printed = Value.missing("this version prints no loans")
_no_refill_line = Value.derived(0.0, "the trace has no refill line")
_TTFT_WHY = "more than prompt_ms: the first window, and all before the engine's clock, come on top"
_open_end = Value.bounded(0.0, None, "began, and its end is not in the log")

measured = lru_cache(maxsize=1 << 14, typed=True)(Value.measured)


class LifeView(NamedTuple):
    """What a request's reading depends on beyond its own lines."""

    prints_loans: bool
    """Whether this version has lent and refilled lines, as far as the log tells."""
    own_buffers: bool
    prefill_lines: bool
    decode_lines: bool
    host_clock: bool
    split: bool


def build(draft: Draft, view: LifeView, *, index: int, counters: prefill.Counters) -> Request:
    """`counters`: how they stood before this request."""
    return _Builder(draft, view, counters).request(index)


class _Builder:
    def __init__(self, draft: Draft, view: LifeView, counters: prefill.Counters) -> None:
        self.d, self.view, self.counters = draft, view, counters
        self.phases: list[Phase] = []
        self.rest: list[Phase] = []
        self.warnings = list(draft.warnings)
        self.facts = dict(draft.facts)
        self.sum = draft.summary or draft.done
        self.tokens = draft.parts_tokens
        self.status: Status = self._status()
        self.unprinted = (
            "read (batched)" in draft.parts
            and "lend" not in draft.parts
            and not (view.prints_loans or view.own_buffers)
        )
        self.prompt_ms = self._prompt_ms()

    def request(self, index: int) -> Request:
        d, total = self.d, self.sum
        self._trace_phases()
        self._cache_phases()
        self._batch_phases()
        if d.runs:
            self._prefill_phases()
        self._rest()
        if d.decode is not None:
            self._decode_phases(d.decode)
        self._check()
        self._facts()
        prompt, reused, planned, read = self._tokens()
        lent, refilled = self._slots()
        return Request(
            index=index,
            lines=(d.first, d.last),
            status=self.status,
            prompt=prompt,
            reused=reused,
            read_planned=planned,
            read=read,
            generated=measured(total.generated) if total else _no_summary,
            prompt_ms=self.prompt_ms,
            ttft_ms=self._ttft(),
            decode_ms=self._decode_ms(),
            phases=tuple(self.phases),
            remainders=tuple(self.rest),
            slots_lent=lent,
            slots_refilled=refilled,
            cannot_tell=self._cannot_tell(),
            warnings=tuple(self.warnings),
            first_of_life=index == 0,
            facts=self.facts,
        )

    # --- clocks and counts

    def _status(self) -> Status:
        if self.d.failed:
            return "failed"
        if self.sum is None:
            return "incomplete"
        done = self.d.done
        return "cancelled" if self.sum.cancelled or (done and done.cancelled) else "done"

    def _prompt_ms(self) -> Value:
        if self.d.done is not None:
            return measured(self.d.done.prompt_ms)
        if self.sum is not None:
            return measured(self.sum.prompt_ms)
        low = max(self.d.parts_ms, self.d.last_pp or 0.0)
        if low > 0:
            return Value.bounded(low, None, "no summary line: at least what its parts took")
        return _no_summary

    def _decode_ms(self) -> Value:
        if self.sum is None:
            return _no_summary
        if self.d.no_decode_clock:
            return Value.missing("the server's request line has no decode clock")
        return measured((self.d.done or self.sum).decode_ms)

    def _ttft(self) -> Value:
        low = self.prompt_ms.value if self.prompt_ms.known else self.prompt_ms.low
        if low is None:
            return Value.missing("a client's clock: not in an engine log")
        return Value.bounded(low, self.d.total_ms, _TTFT_WHY)

    def _tokens(self) -> tuple[Value, Value, Value, Value]:
        d, total = self.d, self.sum
        tokens = self.tokens
        if total is None:
            prompt = measured(d.n) if d.n is not None else _no_summary
            read = measured(tokens) if tokens else _no_summary
            return prompt, _no_summary, _no_summary, read
        planned = _planned(max(0, total.planned - 1))
        if self.status == "cancelled" or d.failed:
            read = measured(total.read)
        elif tokens:
            read = measured(tokens)
        else:
            read = planned
        return measured(total.prompt), measured(total.reused), planned, read

    def _slots(self) -> tuple[Value, Value]:
        d = self.d
        if not d.traced:
            both = _own_buffers if self.view.own_buffers else _needs_trace
            return both, both
        refilled = d.part("refill").slots
        if "lend" in d.parts:
            lent = measured(d.part("lend").slots)
        elif d.open_refill:
            lent = Value.derived(d.open_refill, "what its refill starts with")
        elif "read (batched)" not in d.parts:
            lent = _nothing_lent
        elif self.unprinted:
            return _not_printed, _not_printed
        else:
            lent = _own_buffers if self.view.own_buffers else _no_refill_line
        if d.open_refill and self.status in ("incomplete", "failed"):
            top = refilled + d.open_refill
            return lent, Value.bounded(refilled, top, "a refill did not end")
        if refilled:
            return lent, measured(refilled)
        if d.open_refill:
            return lent, Value.derived(d.open_refill, "slots its refills started with")
        return lent, _no_refill_line if lent.value else lent

    # --- phases

    def _trace_phases(self) -> None:
        d = self.d
        cancelled = self.status == "cancelled"
        for kind, part in d.parts.items():
            holds = ""
            if kind == "lend" and d.hidden_refills:
                holds = (
                    f"the refill of an older loan of {d.hidden_slots} slots: no line splits them"
                )
            elif cancelled and kind.startswith("read"):
                holds = "cancelled: its tokens are the planned length of its parts"
            tokens, slots = part.tokens or None, part.slots or None
            self.phases.append(Phase(kind, measured(part.ms), "request", holds, tokens, slots))
        if d.hidden_refills:
            why = "inside lend: a larger loan gave the old one back"
            value = Value.bounded(0.0, d.part("lend").ms, why)
            self.phases.append(
                Phase("refill (inside lend)", value, "inside lend", slots=d.hidden_slots)
            )
        if d.open_refill or self.unprinted:
            self._untimed_phases()

    def _untimed_phases(self) -> None:
        """Loans that old versions do not time, and a refill the log was cut in."""
        d, ended, slots = self.d, self.prompt_ms.value, self.d.open_refill or None
        if "refill" in d.parts:
            self.phases.append(Phase("refill (unfinished)", _open_end, slots=slots))
        elif ended is not None:
            self.phases.append(Phase("refill", self._outside_bound(ended), slots=slots))
        elif slots:
            self.phases.append(Phase("refill", _open_end, slots=slots))
        if self.unprinted and ended is not None:
            self.phases.insert(0, Phase("lend", self._outside_bound(ended)))

    def _outside_bound(self, prompt_ms: float) -> Value:
        left = max(0.0, prompt_ms - self.d.parts_ms)
        return Value.bounded(0.0, left, "not timed by this version: within prompt_ms - reads")

    def _cache_phases(self) -> None:
        limit = self.prompt_ms.value
        for kind, part in self.d.caches.items():
            lane = "request" if limit is None or part.ms <= limit + 1 else "unplaced"
            if lane == "unplaced":
                self.warnings.append(f"{kind} took longer than prompt_ms: not counted in it")
            self.phases.append(Phase(kind, measured(part.ms), lane))

    def _batch_phases(self) -> None:
        d = self.d
        ms = d.between_parts if d.between_parts is not None else d.interleaved
        if ms:
            for i, phase in enumerate(self.phases):
                value = phase.ms.value
                if phase.name == "read (batched)" and value is not None and value >= ms:
                    own = Value.derived(value - ms, "printed read minus the other slots' decode")
                    self.phases[i] = Phase(phase.name, own, tokens=phase.tokens)
                    break
            self.phases.append(
                Phase("other slots' decode", measured(ms), contains="runs inside this one's read")
            )
            if self.sum is not None and self.prompt_ms.value and self.prompt_ms.value > ms:
                rate = self.sum.read / (self.prompt_ms.value - ms) * 1e3
                why = "read tokens / (prompt_ms - other slots' decode): at least this"
                self.facts["own read tok/s"] = Value.derived(rate, why)
        for kind, part in d.outside.items():
            holds = "printed before the summary; a client sees it, prompt_ms does not hold it"
            self.phases.append(Phase(kind, measured(part.ms), "outside prompt_ms", holds))

    def _prefill_phases(self) -> None:
        d = self.d
        placed = prefill.place(d.runs, d.batched_tokens, split=self.view.split)
        whole = d.traced or self.sum is not None
        for lane, runs in placed.lanes.items():
            phases, rest = prefill.lane_phases(
                lane, runs, self.counters, host_clock=self.view.host_clock, whole=whole
            )
            self.phases += phases
            self.rest += rest
        if d.setup_ms is not None:
            self.phases.append(Phase("host: setup steps", measured(d.setup_ms), "host"))
        hidden = sum(run.hidden_names for run in d.runs)
        if hidden:
            self.warnings.append(f"{hidden} phases have names not fit to be shown")
        if not placed.split:
            self._walls(placed.lanes)

    def _walls(self, lanes: dict[str, list[prefill.Run]]) -> None:
        """Relate the walls of an unsplit request to what is around them."""
        run_wall = _wall(lanes.get("run", []))
        chunk_wall = _wall(lanes.get("gpu timeline (chunks)", []))
        if run_wall and chunk_wall:
            value = Value.derived(run_wall - chunk_wall, "the request line minus its chunks")
            holds = "between the chunks: the draft layer and other host work"
            self.rest.append(Phase("prefill wall - chunk walls", value, "host", holds))
        wall = run_wall or chunk_wall
        if not wall:
            return
        if "read (batched)" in self.d.parts:
            ms = self.d.part("read (batched)").ms
            value = Value.derived(ms - wall, "read (batched) minus the prefill wall")
            self.rest.append(Phase("read (batched) - prefill wall", value, "read"))
            if wall > ms + 1:
                self.warnings.append("the prefill wall is longer than its read")
        elif not self.d.traced:
            tokens = sum(run.tokens for run in lanes.get("run", [])) or None
            holds = "the batched parts; lend, refill, windows and checkpoints are outside it"
            self.phases.append(
                Phase("read (prefill wall)", measured(wall), contains=holds, tokens=tokens)
            )

    def _rest(self) -> None:
        total = self.prompt_ms.value
        if total is None:
            return
        left, names, inside = total, [], False
        for phase in self.phases:
            if phase.lane == "request":
                inside = True
                if phase.ms.value is not None:
                    left -= phase.ms.value
                    names.append(phase.name)
        if not inside:
            return
        traced = self.d.traced
        name = REST if traced else "prompt_ms - named phases"
        holds = REST_HOLDS if traced else "everything STRATA_TRACE would have told apart"
        value = Value.derived(left, _difference(tuple(names)))
        self.rest.insert(0, Phase(name, value, "request", holds))
        if left < -1.0:
            self.warnings.append(f"the phases are {-left:.1f} ms longer than prompt_ms")

    def _decode_phases(self, printed: tuple[float, ...]) -> None:
        windows, _, per_window, window, verify, wait, host, stage, tail, commit, draft = printed
        lane = "per decode window"
        for name, ms in (("verify", verify), ("commit/emit", commit), ("draft", draft)):
            self.phases.append(Phase(f"decode: {name}", measured(ms), lane))
        left = Value.derived(window - verify - commit - draft, "ms/window minus its printed parts")
        self.rest.append(Phase("window - (verify + commit + draft)", left, lane))
        inner = Value.derived(verify - wait - host - stage - tail, "verify minus its printed parts")
        holds = "on a split, the waits of later stages are in none of the printed parts"
        self.rest.append(Phase("verify - (wait + host + stage)", inner, lane, holds))
        self.facts["decode windows"] = measured(windows)
        self.facts["tokens/window"] = measured(per_window)
        self.facts["window_ms"] = measured(window)
        if self.prompt_ms.value is not None:
            why = "prompt_ms + one average window: an estimate, the first window is shorter"
            self.facts["first token estimate_ms"] = Value.derived(
                self.prompt_ms.value + window, why
            )

    # --- checks and the rest

    def _check(self) -> None:
        d, total = self.d, self.sum
        if total is not None and 0 < total.prompt < total.reused:
            self.warnings.append("more tokens are reused than the prompt has")
        if total is not None and self.status == "done" and d.traced:
            read, expected = self.tokens, total.planned - 1
            if d.parts and read != expected:
                self.warnings.append(
                    f"the parts read {read} tokens, prompt - reused - 1 is {expected}"
                )
        if d.n is not None and d.first_window not in (None, (d.n - 1, 1)):
            self.warnings.append("the first window in the log is not that of the last prompt token")
        if d.windows and total is not None and total.offered is not None:
            expected = total.offered + d.windows
            if d.window_tokens != expected:
                self.warnings.append(
                    f"{d.windows} windows hold {d.window_tokens} tokens, drafts offered + windows "
                    f"is {expected}: window lines are missing"
                )
        if d.traced and self.status == "done" and not d.prompt_done:
            self.warnings.append("the trace has no 'prompt done'")
        for run in d.runs:
            if run.wall is not None and run.kind == "run" and run.gpu > run.wall + 1:
                self.warnings.append("a GPU timeline is longer than its wall")
        if total is not None and 0 < total.read <= 16:
            self.warnings.append(f"{total.read} tokens read: its rate is no speed to compare")

    def _facts(self) -> None:
        d, total, facts = self.d, self.sum, self.facts
        if total is not None:
            facts["read as printed"] = measured(total.read)
            if total.accepted is not None and total.offered is not None:
                facts["drafts accepted"] = measured(total.accepted)
                facts["drafts offered"] = measured(total.offered)
            if total.rates is not None:
                facts["read tok/s as printed"] = measured(total.rates[0])
                facts["decode tok/s as printed"] = measured(total.rates[1])
            if total.checkpoints is not None:
                facts["checkpoints"] = measured(total.checkpoints)
        if d.traced:
            part = d.parts.get
            facts["batched parts"] = measured(part("read (batched)", NOTHING).count)
            facts["windows parts"] = measured(part("read (windows)", NOTHING).count)
            facts["windows"] = measured(d.windows)
            facts["window tokens"] = measured(d.window_tokens)
            facts["loans"] = measured(part("lend", NOTHING).count)
        if d.hidden_refills:
            facts["slots refilled inside lend"] = measured(d.hidden_slots)
        if d.images:
            facts["with images"] = measured(1)

    def _cannot_tell(self) -> tuple[str, ...]:
        d, view = self.d, self.view
        batched = "read (batched)" in d.parts
        return _reasons(
            not d.traced,
            self.unprinted,
            not d.runs and (batched or not (d.traced or view.prefill_lines)),
            d.decode is None and not view.decode_lines,
            self.sum is None,
        )


@lru_cache(maxsize=1 << 12)
def _planned(tokens: int) -> Value:
    return Value.derived(tokens, "prompt - reused - 1: the first window reads the last token")


@lru_cache(maxsize=256)
def _difference(names: tuple[str, ...]) -> str:
    if not names:
        return "prompt_ms: no phase inside it is timed"
    return f"prompt_ms - ({' + '.join(names)})"


@lru_cache(maxsize=64)
def _reasons(*flags: bool) -> tuple[str, ...]:
    texts = (NO_TRACE, OLD_VERSION, NO_PREFILL, NO_DECODE, NO_SUMMARY)
    return (*(t for t, flag in zip(texts, flags, strict=True) if flag), NO_CLIENT)


def _wall(runs: list[prefill.Run]) -> float | None:
    walls = [run.wall for run in runs if run.wall is not None]
    return sum(walls) if walls else None
