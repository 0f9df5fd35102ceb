"""One process of a llama.cpp family server: its open requests, its finished ones, its notes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from slotwise.explain.readers.llama_lines import Clock
from slotwise.explain.readers.llama_request import Open
from slotwise.explain.record import Life, Request, Value

OPEN_LIMIT = 4096
RECENT = 64
"""Timings remembered to know a response's `timings` object for the same request."""

_GUARD = "whether 1 prompt token means 1 or 0: these programs print 1 for 0"
_CANNOT = (
    "phases inside prompt eval; a client's time to first token (HTTP, queue) is not printed",
)


@dataclass
class LifeState:
    """What is known so far. Numbers and requests only, no text of the log."""

    first_line: int
    done: list[Request] = field(default_factory=list)
    open: dict[int, Open] = field(default_factory=dict)
    current: Open | None = None
    """The request that lines without an id belong to."""
    blocks: deque[Open] = field(default_factory=lambda: deque(maxlen=OPEN_LIMIT))
    """Timing blocks without an id, printed before the line that says whose they are."""
    answer: Open | None = None
    """The last `timings` object of a response, while no other line tells of its request."""
    answer_key: tuple[float, int | None] | None = None
    recent: deque[tuple[float, int | None]] = field(default_factory=lambda: deque(maxlen=RECENT))
    pending_cache: Value | None = None
    cache_line: int = 0
    cache_start: Clock | None = None
    ik: bool = False
    classic: bool = False
    highest_task: int = -1
    ollama: dict[str, float] = field(default_factory=dict)
    json: dict[str, float] = field(default_factory=dict)
    totals: list[str] = field(default_factory=list)
    facts: dict[str, Value] = field(default_factory=dict)
    version: str = ""
    first_clock: Clock | None = None
    bench_columns: int = 0
    bench_rows: int = 0

    def used(self) -> bool:
        return bool(self.done or self.open or self.current or self.answer)

    def tells(self) -> bool:
        return self.used() or bool(self.facts or self.pending_cache or self.totals)

    def close(self, item: Open) -> None:
        self.done.append(item.closed(len(self.done)))

    def leave(self, slot: int) -> None:
        """The request of this slot is over: another has come."""
        item = self.open.pop(slot)
        self.close(item)
        if self.current is item:
            self.current = None

    def slot(self, number: int, task: int, line_no: int) -> Open | None:
        """The open request of a slot; another task there ends the one before."""
        item = self.open.get(number)
        if item is not None and task >= 0 and item.task not in (None, -1, task):
            self.leave(number)
            item = None
        if item is None:
            if len(self.open) >= OPEN_LIMIT:
                return None
            item = self.open[number] = Open(line_no, line_no, slot=number, task=task)
        item.last = line_no
        self.switch(item)
        return item

    def switch(self, item: Open) -> None:
        """Make `item` the one that lines without an id belong to."""
        old = self.current
        if old is not None and old is not item and old.slot is None:
            if old.style == "print":
                self.blocks.append(old)
            else:
                self.close(old)
        self.current = item

    def shared(self) -> None:
        """Several slots that read or answer at the same time share the engine's batches."""
        if len(self.open) < 2:
            return
        busy = [o for o in self.open.values() if o.launched and not o.released and not o.answered]
        if len(busy) > 1:
            for item in busy:
                item.shared_batches = item.shared_batches or item.prompt_ms is None

    def fact(self, name: str, value: float) -> None:
        self.facts[name] = Value.measured(value)

    def count(self, name: str) -> None:
        known = self.facts.get(name)
        self.fact(name, ((known.value or 0.0) if known else 0.0) + 1)

    def snapshot(self) -> list[Request]:
        """Finished and open requests in the order of their first lines."""
        still = {id(item): item for item in (*self.open.values(), *self.blocks)}
        for item in (self.current, self.answer):
            if item is not None:
                still[id(item)] = item
        items = sorted(still.values(), key=lambda item: item.first)
        if self.pending_cache is not None:
            items.append(Open(self.cache_line, self.cache_line, cache=self.pending_cache))
        out = list(self.done)
        out += [item.closed(len(out) + n) for n, item in enumerate(items)]
        return out

    def life(self, file: str) -> Life:
        requests = tuple(self.snapshot())
        return Life(
            dialect="ik_llama.cpp" if self.ik else "llama.cpp",
            version=self.version,
            file=file,
            first_line=self.first_line,
            capabilities={"phases": False, "request ids": any("task" in r.facts for r in requests)},
            facts=dict(self.facts),
            requests=requests,
            notes=tuple(self._notes(requests)),
            cannot_tell=_CANNOT if not self.classic else (*_CANNOT, _GUARD),
        )

    def _notes(self, requests: tuple[Request, ...]) -> list[str]:
        notes = list(self.totals)
        if self.bench_rows:
            notes.append(f"{self.bench_rows} rows are a benchmark's table, not served requests")
        reads = [r.read.value for r in requests if r.read.value and r.read.value > 1]
        if len(reads) > 1 and max(reads) >= 2 * min(reads):
            notes.append(
                f"reads range from {min(reads):.0f} to {max(reads):.0f} tokens: speeds at "
                "different lengths do not compare"
            )
        reused = [r.reused.value for r in requests if r.reused.how == "measured"]
        if len(reused) > 1 and not any(reused):
            notes.append(
                "no request reused anything: either prompts share no beginning or the client did "
                "not ask for it (cache_prompt); the log cannot tell which"
            )
        if self.ik:
            notes.append("llama.cpp before September 2024 printed the same lines as ik_llama.cpp")
        return notes
