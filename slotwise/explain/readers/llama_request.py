"""One request of a llama.cpp-family server while its lines come in, and what it amounts to.

`prompt eval time` ends when the first token is there and holds every batch of the prompt, the
checkpoints made between them and, with several request slots, the others' tokens in the same
batches. The update of the prompt cache lies before it, in the client's time to first token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from slotwise.explain.readers.common import read_planned, request, size_warnings
from slotwise.explain.readers.llama_lines import Clock, between_ms
from slotwise.explain.record import Phase, Request, Status, Value

MARKS_KEPT = 2000
INSIDE = "prompt eval"
_WHOLE_SECONDS = "from time stamps of whole seconds, so up to 1 s off"
_NO_TIMINGS = (
    "released without timings and without a cancel line: an embedding or a ranking, or cut off "
    "by a version that does not say so"
)
_CANNOT = (
    "where the time inside prompt eval went (expert copies, attention, waiting): no line says it",
    "time before the slot was picked (HTTP, template, tokenise, queue)",
)


@dataclass
class Open:
    """What is known of a request so far. Numbers only."""

    first: int
    last: int
    slot: int | None = None
    task: int | None = None
    style: str = "server"
    launched: bool = False
    prompt: int | None = None
    shared: int | None = None
    forced: bool = False
    marks: list[tuple[int, Clock | None]] = field(default_factory=list)
    """Where each batch began: position and clock."""
    batches: list[int] = field(default_factory=list)
    """Tokens of each batch, where they are printed."""
    timed: list[tuple[int, float, float]] = field(default_factory=list)
    """Progress: tokens read, milliseconds since the prompt began, share of the prompt."""
    begin: int | None = None
    """Where the first batch seen begins, from progress lines."""
    untimed_read: int = 0
    prompt_ms: float | None = None
    read: int | None = None
    cached: int | None = None
    gen_ms: float | None = None
    generated: int | None = None
    total_ms: float | None = None
    load_ms: float | None = None
    end: Clock | None = None
    cache: Value | None = None
    checkpoints: int = 0
    checkpoint_ms: float = 0.0
    checkpoints_timed: int = 0
    drafts: tuple[int, int] | None = None
    cancelled: bool = False
    failed: bool = False
    released: bool = False
    shared_batches: bool = False
    prompt_done: bool = False
    context_shifts: int = 0
    cut_from: int | None = None
    """The prompt's length before it was cut to fit the context."""

    @property
    def answered(self) -> bool:
        return self.total_ms is not None

    def timing(self, found: re.Match[str], line_no: int, clock: Clock | None) -> None:
        """One line of a timing block: kind, milliseconds, tokens."""
        kind, ms, count = found.groups()
        self.last = line_no
        if kind == "prompt eval":
            self.prompt_ms, self.end = float(ms), clock
            self.read = int(count) if count else None
        elif kind == "total":
            self.total_ms = float(ms)
        elif kind == "load":
            self.load_ms = float(ms)
        else:
            self.gen_ms = float(ms)
            self.generated = int(count) if count else None

    def take_timings(self, block: Open) -> None:
        """Make a block that names no request this request's."""
        self.prompt_ms, self.end, self.read = block.prompt_ms, block.end, block.read
        self.gen_ms, self.generated, self.total_ms = block.gen_ms, block.generated, block.total_ms

    def batch(self, position: int, tokens: int) -> None:
        """A progress line of older versions: the position after this batch, and its size."""
        self.batches.append(tokens)
        self.untimed_read += tokens
        if self.begin is None:
            self.begin = max(0, position - tokens)

    def closed(self, index: int) -> Request:
        """The request as it stands now; called again when more lines have come."""
        prompt, reused, read = self._prompt(), self._reused(), self._read()
        return request(
            index,
            (self.first, self.last),
            self._status(),
            prompt=prompt,
            reused=reused,
            read=read,
            read_planned=read_planned(prompt, reused),
            generated=_printed(self.generated, "no line with the answer's length"),
            prompt_ms=self._prompt_ms(),
            ttft_ms=self._ttft(),
            decode_ms=_printed(self.gen_ms, "no line with the answer's time"),
            phases=tuple(self._phases()),
            remainders=self._remainders(),
            cannot_tell=_CANNOT,
            warnings=tuple(self._warnings(read)),
            facts=self._facts(),
        )

    def _status(self) -> Status:
        if self.failed:
            return "failed"
        if self.prompt_ms is not None:
            return "cancelled" if self.cancelled else "done"
        if self.cancelled:
            return "cancelled"
        return "done" if self.released and self.prompt_done else "incomplete"

    def _prompt(self) -> Value:
        if self.prompt is not None:
            return Value.measured(self.prompt)
        reused = self._reused()
        if self.read is not None and reused.value is not None:
            return Value.derived(reused.value + self.read, "reused + read")
        low = self.read or self.untimed_read or (self.timed[-1][0] if self.timed else None)
        if low:
            return Value.bounded(low, None, "at least what was read; what was reused is unknown")
        return Value.missing("no line with the prompt's length")

    def _reused(self) -> Value:
        if self.cached is not None:
            return Value.measured(self.cached)
        if self.marks and self.launched:
            return Value.measured(self.marks[0][0])
        if self.forced:
            return Value.derived(0, "the log says that the whole prompt is read again")
        if self.style == "classic" and self.read == 1 and self.prompt:
            return Value.bounded(self.prompt - 1, self.prompt, "1 or no token was read")
        if self.prompt is not None and self.read is not None:
            return Value.derived(max(0, self.prompt - self.read), "prompt - read")
        begin = self.begin
        if begin is None and self.marks:
            begin = self.marks[0][0]
        if begin == 0:
            return Value.derived(0, "the first batch seen begins at 0")
        if begin is not None:
            why = "the log begins inside this request: at most where its first batch seen begins"
            return Value.bounded(0, begin, why)
        return Value.missing("no line says where reading began")

    def _read(self) -> Value:
        if self.read is not None:
            if self.style == "classic" and self.read == 1:
                why = "1 is printed for 0 too in these versions (a guard against dividing by zero)"
                return Value.bounded(0, 1, why)
            return Value.measured(self.read)
        low = max(self.untimed_read, self.timed[-1][0] if self.timed else 0)
        if self.timed and self.timed[-1][2] >= 1.0:
            return Value.derived(self.timed[-1][0], "the last progress line, at progress 1.00")
        if len(self.marks) > 1:
            low = max(low, self.marks[-1][0] - self.marks[0][0])
        if low > 0:
            return Value.bounded(low, None, "the log ends inside the prompt, or has no timings")
        return Value.missing("no timing line")

    def _prompt_ms(self) -> Value:
        if self.prompt_ms is not None:
            return Value.measured(self.prompt_ms)
        if not self.timed:
            return Value.missing("no `prompt eval time` line")
        if self.timed[-1][2] >= 1.0:
            return Value.derived(
                self.timed[-1][1], "the last progress line, at progress 1.00: a little less"
            )
        return Value.bounded(self.timed[-1][1], None, "until the last progress line")

    def _ttft(self) -> Value:
        prompt = self._prompt_ms()
        low = prompt.value if prompt.value is not None else prompt.low
        cache = self.cache.value or self.cache.low if self.cache else 0.0
        if low is None and not cache:
            return Value.missing("no client time in this log")
        why = "at least prompt cache update + prompt eval; HTTP and queue are not in the log"
        if self.style == "ollama":
            cache, why = self.load_ms or 0.0, "at least load + prompt eval; the queue is not told"
        return Value.bounded((low or 0.0) + (cache or 0.0), None, why)

    def _phases(self) -> list[Phase]:
        out: list[Phase] = []
        if self.cache is not None:
            out.append(Phase("prompt cache update", self.cache, contains="saving the old prompt"))
        if self.style == "ollama" and self.load_ms is not None:
            out.append(Phase("model load", Value.measured(self.load_ms)))
        known = self._prompt_ms()
        if known.how != "missing":
            contains = "all batches, checkpoints between them, the first token"
            if self.shared_batches:
                contains += ", tokens of other request slots in the same batches"
            out.append(Phase(INSIDE, known, contains=contains, tokens=self.read))
        out += self._batches()
        if self.checkpoints:
            ms = Value.missing("this version does not print how long they took")
            if self.checkpoints_timed:
                ms = Value.measured(round(self.checkpoint_ms, 3))
            out.append(Phase("checkpoint", ms, lane=INSIDE))
        return out

    def _batches(self) -> list[Phase]:
        if len(self.timed) > 1:
            return self._timed_batches()
        if any(clock is not None for _, clock in self.marks):
            return self._marked_batches()
        why = "the log has no clock"
        return [
            Phase("batch", Value.missing(why), lane=INSIDE, tokens=tokens)
            for tokens in self.batches
        ]

    def _timed_batches(self) -> list[Phase]:
        """Progress lines count from the prompt's start, so a batch is a difference of two."""
        out = [
            Phase(
                "batches before",
                Value.measured(self.timed[0][1]),
                lane=INSIDE,
                contains="everything until the first progress line",
                tokens=self.timed[0][0],
            )
        ]
        for (n0, t0, _), (n1, t1, _) in zip(self.timed, self.timed[1:], strict=False):
            ms = Value.derived(round(t1 - t0, 3), "difference of two progress lines, +/- 10 ms")
            out.append(Phase("batch", ms, lane=INSIDE, tokens=n1 - n0))
        return out

    def _marked_batches(self) -> list[Phase]:
        """`kv cache rm [p0, end)` marks the start of a batch; its removal costs nothing."""
        out: list[Phase] = []
        for (p0, start), (p1, end) in zip(self.marks, self.marks[1:], strict=False):
            ms = between_ms(start, end)
            if ms is not None and p1 > p0:
                out.append(Phase("batch", _clocked(ms, end), lane=INSIDE, tokens=p1 - p0))
        position, start = self.marks[-1]
        rest = between_ms(start, self.end)
        if len(self.marks) == 1 and self.launched:
            return out  # one batch: it is the prompt eval, without a coarse clock's error
        if rest is None or self.gen_ms is None or self.prompt_ms is None:
            return out
        rest = max(0.0, rest - self.gen_ms)
        before = self.prompt_ms - rest - sum(p.ms.value or 0.0 for p in out)
        if not self.launched and before > 1000.0:
            why = "prompt eval minus the batches seen"
            out.insert(0, Phase("batches before", Value.derived(before, why), lane=INSIDE))
        tokens = None
        if self.launched and self.read is not None:
            tokens = max(0, self.marks[0][0] + self.read - position)
        contains = "until the timings were printed, minus the answer's time"
        out.append(
            Phase("batch", _clocked(rest, start), lane=INSIDE, contains=contains, tokens=tokens)
        )
        return out

    def _remainders(self) -> tuple[Phase, ...]:
        if None in (self.total_ms, self.prompt_ms, self.gen_ms) or self.style == "ollama":
            return ()
        rest = (self.total_ms or 0.0) - (self.prompt_ms or 0.0) - (self.gen_ms or 0.0)
        if self.style == "server" and abs(rest) < 0.05:
            return ()  # a server prints their sum as the total
        why = "total time - prompt eval - eval"
        return (Phase(why, Value.derived(round(rest, 3), why)),)

    def _warnings(self, read: Value) -> list[str]:
        out = size_warnings(read)
        if self.forced:
            out.append("the whole prompt was read again: the engine had no usable cached state")
        if self.shared and (self.forced or (self.marks and self.marks[0][0] < self.shared)):
            start = self.marks[0][0] if self.marks else 0
            out.append(
                f"{self.shared} tokens were shared with the slot's last prompt, "
                f"reading began at {start}"
            )
        if self.shared_batches:
            out.append("other request slots were busy: their tokens are inside this prompt eval")
        if self.checkpoints:
            out.append("checkpoints were made inside prompt eval")
        if self.released and self.prompt_ms is None and not (self.cancelled or self.failed):
            out.append(_NO_TIMINGS)
        if self.context_shifts:
            out.append("the context was full: old tokens were dropped while answering")
        if self.cut_from is not None:
            out.append(f"the prompt of {self.cut_from} tokens was cut to fit the context")
        if self.style == "ollama":
            out.append("the count may be the whole prompt while the time is of uncached work only")
        return out

    def _facts(self) -> dict[str, Value]:
        facts: dict[str, Value] = {}
        if self.slot is not None:
            facts["request_slot"] = Value.measured(self.slot)
        if self.task is not None and self.task >= 0:
            facts["task"] = Value.measured(self.task)
        if self.shared is not None:
            facts["shared_tokens"] = Value.measured(self.shared)
        if self.checkpoints:
            facts["checkpoints"] = Value.measured(self.checkpoints)
        if self.context_shifts:
            facts["context_shifts"] = Value.measured(self.context_shifts)
        if self.drafts is not None:
            facts["drafts_accepted"] = Value.measured(self.drafts[0])
            facts["drafts"] = Value.measured(self.drafts[1])
        if self.timed:
            n, ms, _ = self.timed[-1]
            if ms > 0:
                facts["progress_tokens_per_s"] = Value.derived(n / ms * 1e3, "since prompt start")
        facts.update(self._speeds())
        return facts

    def _speeds(self) -> dict[str, Value]:
        facts: dict[str, Value] = {}
        if self.read is not None and self.read > 1 and self.prompt_ms:
            facts["read_tokens_per_s"] = Value.derived(
                self.read / self.prompt_ms * 1e3, "tokens read / prompt eval time"
            )
        if len(self.timed) > 1:
            (n0, t0, _), (n1, t1, _) = self.timed[0], self.timed[-1]
            if t1 > t0:
                facts["later_tokens_per_s"] = Value.derived(
                    (n1 - n0) / (t1 - t0) * 1e3, "between the first and last progress line"
                )
        elif len(self.marks) > 2:
            ms = between_ms(self.marks[0][1], self.marks[-1][1])
            if ms:
                facts["batch_tokens_per_s"] = Value.derived(
                    (self.marks[-1][0] - self.marks[0][0]) / ms * 1e3,
                    "between the starts of the first and the last batch",
                )
        return facts


def _printed(value: float | None, why: str) -> Value:
    return Value.missing(why) if value is None else Value.measured(value)


def _clocked(ms: float, clock: Clock | None) -> Value:
    coarse = clock is not None and clock.step_ms >= 1000.0
    return Value.derived(round(ms, 3), _WHOLE_SECONDS if coarse else "between two log lines")
