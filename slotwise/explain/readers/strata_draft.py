"""What the lines of one Strata request have said so far, before anything is made of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from slotwise.explain.readers.strata_prefill import Run
from slotwise.explain.record import Value


@dataclass(slots=True)
class Part:
    """One timed line of the trace. `tokens` of a read, `slots` of a lend or a refill."""

    kind: str
    ms: float
    tokens: int = 0
    slots: int = 0


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


@dataclass(slots=True)
class Draft:
    """What the lines of one request have said so far."""

    first: int = 0
    last: int = 0
    n: int | None = None
    images: bool = False
    parts: list[Part] = field(default_factory=list[Part])
    open_refill: list[int] = field(default_factory=list[int])
    slots_out: int = 0
    peak: int = 0
    hidden_slots: int = 0
    hidden_refills: int = 0
    stages: int = 0
    chunks: int = 0
    prompt_done: bool = False
    windows: int = 0
    window_tokens: int = 0
    first_window: tuple[int, int] | None = None
    summary: Summary | None = None
    done: Summary | None = None
    caches: list[Part] = field(default_factory=list[Part])
    runs: list[Run] = field(default_factory=list[Run])
    setup_ms: float | None = None
    interleaved: float = 0.0
    between_parts: float | None = None
    outside: list[Part] = field(default_factory=list[Part])
    decode: tuple[float, ...] | None = None
    last_pp: float | None = None
    failed: bool = False
    total_ms: float | None = None
    no_decode_clock: bool = False
    facts: dict[str, Value] = field(default_factory=dict[str, Value])
    warnings: list[str] = field(default_factory=list[str])

    @property
    def traced(self) -> bool:
        return self.n is not None or bool(self.parts)

    @property
    def is_request(self) -> bool:
        """Whether anything but lines that come before a request has been seen."""
        return bool(
            self.traced or self.summary or self.done or self.runs or self.decode or self.windows
        )

    def refill_start(self, slots: int) -> None:
        self.open_refill.append(slots)

    def lent(self, slots: int, ms: float) -> None:
        """`slots` is the running total; a refill still open was done inside this lend."""
        if self.open_refill:
            self.hidden_slots += sum(self.open_refill)
            self.hidden_refills += 1
            self.open_refill.clear()
        self.slots_out = slots
        self.peak = max(self.peak, slots)
        self.parts.append(Part("lend", ms, slots=slots))

    def refilled(self, slots: int, stages: int, ms: float) -> None:
        started = sum(self.open_refill)
        if self.open_refill and started != slots:
            self.warnings.append(f"refills of {started} slots began, {slots} slots were refilled")
        self.open_refill.clear()
        self.slots_out = 0
        self.stages = max(self.stages, stages)
        self.parts.append(Part("refill", ms, slots=slots))

    def read(self, tokens: int, mode: str, ms: float) -> None:
        self.parts.append(Part(f"read ({mode})", ms, tokens=tokens))
