"""What the lines of one Strata request have said so far, before anything is made of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from slotwise.explain.readers.strata_prefill import Run
from slotwise.explain.record import Value
from slotwise.explain.requests import kept

KINDS_LIMIT = 16
WARNINGS_LIMIT = 20


@kept
@dataclass(slots=True)
class Total:
    """What the timed lines of one kind add up to. `slots` of lends: the largest total."""

    ms: float = 0.0
    tokens: int = 0
    slots: int = 0
    count: int = 0


NOTHING = Total()


def add(totals: dict[str, Total], kind: str, ms: float) -> Total:
    """Count one more line of this kind; memory stays bounded whatever the log holds."""
    total = totals.get(kind)
    if total is None:
        if len(totals) >= KINDS_LIMIT:
            return add(totals, next(reversed(totals)), ms)
        total = totals[kind] = Total()
    total.ms += ms
    total.count += 1
    return total


@kept
@dataclass(slots=True)
class Summary:
    """The summary line or the DONE line: the engine's account of one request."""

    prompt: int
    reused: int
    read: int
    planned: int
    prompt_ms: float
    generated: int
    decode_ms: float
    accepted: int | None = None
    offered: int | None = None
    checkpoints: int | None = None
    rates: tuple[float, float] | None = None
    cancelled: bool = False


@kept
@dataclass(slots=True)
class Draft:
    """What the lines of one request have said so far.

    Its containers are made by the bare types: `dict[...]()` takes five times as long.
    """

    first: int = 0
    last: int = 0
    n: int | None = None
    images: bool = False
    parts: dict[str, Total] = field(default_factory=dict)
    """lend, read (batched), read (windows), refill, ..., in order of first use."""
    open_refill: int = 0
    """Slots of refills that began and have not ended."""
    hidden_slots: int = 0
    hidden_refills: int = 0
    prompt_done: bool = False
    windows: int = 0
    window_tokens: int = 0
    first_window: tuple[int, int] | None = None
    summary: Summary | None = None
    done: Summary | None = None
    caches: dict[str, Total] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    setup_ms: float | None = None
    interleaved: float = 0.0
    between_parts: float | None = None
    outside: dict[str, Total] = field(default_factory=dict)
    decode: tuple[float, ...] | None = None
    last_pp: float | None = None
    failed: bool = False
    total_ms: float | None = None
    no_decode_clock: bool = False
    facts: dict[str, Value] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def traced(self) -> bool:
        return self.n is not None or bool(self.parts)

    @property
    def is_request(self) -> bool:
        """Whether anything but lines that come before a request has been seen."""
        return bool(
            self.traced
            or self.summary
            or self.done
            or self.runs
            or self.decode
            or self.windows
            or self.failed
        )

    def lent(self, slots: int, ms: float) -> None:
        """`slots` is the running total; a refill still open was done inside this lend."""
        if self.open_refill:
            self.hidden_slots += self.open_refill
            self.hidden_refills += 1
            self.open_refill = 0
        total = add(self.parts, "lend", ms)
        total.slots = max(total.slots, slots)

    def refilled(self, slots: int, ms: float) -> None:
        started = self.open_refill
        if started and started != slots:
            self.warn(f"refills of {started} slots began, {slots} slots were refilled")
        self.open_refill = 0
        add(self.parts, "refill", ms).slots += slots

    def read(self, tokens: int, mode: str, ms: float) -> None:
        add(self.parts, f"read ({mode})", ms).tokens += tokens

    def warn(self, text: str) -> None:
        if len(self.warnings) < WARNINGS_LIMIT:
            self.warnings.append(text)

    def part(self, kind: str) -> Total:
        """The total of one kind of part; an empty one when there was none."""
        return self.parts.get(kind, NOTHING)

    @property
    def batched_tokens(self) -> int | None:
        """Tokens read in batches, where the lines tell."""
        if "read (batched)" in self.parts:
            return self.part("read (batched)").tokens
        total = self.summary or self.done
        return total.planned - 1 if total is not None else None

    @property
    def parts_ms(self) -> float:
        return sum([part.ms for part in self.parts.values()])

    @property
    def parts_tokens(self) -> int:
        return sum([part.tokens for part in self.parts.values()])
