"""The exclusive clock of one request, up to its first token's first byte.

Entering a phase pauses the one around it. What no phase covers is measured as a phase of its
own, `other`. So the phases of a request add up to its wall time exactly, in integer
nanoseconds, and nothing is ever computed by subtraction.

It knows nothing of other threads and devices: their work overlaps a request and is recorded in
lanes (`lanes.py`), never added here. It stores no events: with tracing on, a hook receives them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import ClassVar, Literal, TypeAlias

from slotwise.trace.codec import Record, derived, measured

PHASES: tuple[str, ...] = (
    "queue",
    "template",
    "tokenize",
    "lookup",
    "restore",
    "lend",
    "read.embed",
    "read.ple",
    "read.attention",
    "read.recurrent",
    "read.router",
    "read.ffn",
    "read.expert_wait",
    "read.expert_compute",
    "read.expert_gemm",
    "read.combine",
    "draft",
    "checkpoint",
    "refill",
    "first_window",
    "sample",
    "emit",
    "other",
)
"""Every phase there is, in the order in which a request first meets them."""

Status = Literal["done", "cancelled", "failed"]
SpanHook: TypeAlias = Callable[[str, int, int, int], None]
"""Called with (phase, start_ns, end_ns, depth); the span includes the phases inside it."""

CLOCK = time.perf_counter_ns
CLOCK_NAME = time.get_clock_info("perf_counter").implementation


@dataclass(frozen=True, kw_only=True)
class PhaseRecord:
    """Time spent in one phase and in no other, and what was counted in it."""

    ns: int = field(metadata=measured())
    calls: int = field(metadata=measured())
    """Times the phase was entered. 1 for `other`, which is the rest of the request."""
    bytes: int | None = field(
        default=None, metadata=measured(null="this phase counted no bytes of the slow tier")
    )
    slots: int | None = field(
        default=None, metadata=measured(null="this phase counted no expert slots")
    )


@dataclass(frozen=True, kw_only=True)
class LedgerRecord(Record):
    """A closed ledger. `sum(phase ns) == wall_ns + counted_twice_ns`, and the latter is 0."""

    SCHEMA: ClassVar[str] = "slotwise.ledger/v1"

    status: Status
    """`done`: the first token's first byte was written, so `wall_ns` is the time to it."""
    clock: str
    start_ns: int = field(metadata=measured())
    wall_ns: int = field(metadata=measured())
    counted_twice_ns: int = field(metadata=derived())
    """Sum of the phases minus the union of the outermost spans; anything but 0 is a defect."""
    phases: Mapping[str, PhaseRecord]
    """In order of first use; `other` is always there, last."""

    def __post_init__(self) -> None:
        if "other" not in self.phases:
            raise ValueError("phases: found no `other`, expected it in every ledger")
        total = sum(phase.ns for phase in self.phases.values())
        if total != self.wall_ns + self.counted_twice_ns:
            raise ValueError(
                f"phases add up to {total} ns, expected wall_ns + counted_twice_ns = "
                f"{self.wall_ns} + {self.counted_twice_ns}"
            )

    @property
    def end_ns(self) -> int:
        """When the ledger was closed, on its clock."""
        return self.start_ns + self.wall_ns

    def ns(self, phase: str) -> int:
        """Time in `phase`; 0 if it was never entered (the ledger then covers it as not spent)."""
        return self.phases[phase].ns if phase in self.phases else 0


class Phase:
    """Reusable context manager of one phase of one ledger; made by `Ledger.phase`."""

    __slots__ = ("_ledger", "bytes", "calls", "name", "ns", "slots")

    def __init__(self, ledger: Ledger, name: str) -> None:
        self._ledger = ledger
        self.name = name
        self.ns = self.calls = 0
        self.bytes: int | None = None
        self.slots: int | None = None

    def __enter__(self) -> None:
        ledger = self._ledger
        now = ledger._clock()
        paused = ledger._current
        if paused is None:
            raise ledger._closed_error()
        paused.ns += now - ledger._mark
        ledger._mark = now
        stack = ledger._stack
        if not stack:
            ledger._outermost_ns = now
        stack.append(paused)
        ledger._current = self
        self.calls += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        ledger = self._ledger
        now = ledger._clock()
        if ledger._current is not self:
            return ledger._left_out_of_order(self, now, unwinding=kind is not None)
        self.ns += now - ledger._mark
        ledger._mark = now
        stack = ledger._stack
        ledger._current = stack.pop()
        if not stack:
            ledger._union_ns += now - ledger._outermost_ns
        return None

    def record(self) -> PhaseRecord:
        return PhaseRecord(ns=self.ns, calls=self.calls, bytes=self.bytes, slots=self.slots)


class TracedPhase(Phase):
    """A phase that also reports each of its spans; a class of its own keeps the other cheap."""

    __slots__ = ()

    def __enter__(self) -> None:
        super().__enter__()
        self._ledger._starts.append(self._ledger._mark)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        ledger = self._ledger
        starts, outer = ledger._starts, len(ledger._stack)
        if ledger._on_span and outer < len(starts):
            ledger._on_span(self.name, starts[outer], ledger._mark, outer + 1)
            del starts[outer:]


class Ledger:
    """Exclusive clock of one request.

    One thread uses it at a time; it may move from thread to thread (a server may run each step
    of a generator in another one). Use by two at once is not locked against: it shows as a phase
    left out of order, which raises.

    `start_ns` is when the request's last byte arrived, on the same clock; the time from there to
    this call is charged to `queue`. Without it the ledger starts now.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], int] = CLOCK,
        start_ns: int | None = None,
        on_span: SpanHook | None = None,
    ) -> None:
        self._clock = clock
        self._on_span = on_span
        self._phases: dict[str, Phase] = {}
        self._stack: list[Phase] = []
        self._starts: list[int] = []
        self._other = Phase(self, "other")
        self._other.calls = 1
        self._current: Phase | None = self._other
        self._status: Status | None = None
        self._mark = self._start_ns = clock()
        self._outermost_ns = self._union_ns = 0
        if start_ns is not None:
            self._charge_queue(start_ns)

    def phase(self, name: str) -> Phase:
        """Context manager that charges its time to `name`. ValueError for an unknown name."""
        try:
            return self._phases[name]
        except KeyError:
            return self._new_phase(name)

    def add(self, name: str, *, bytes: int | None = None, slots: int | None = None) -> None:
        """Count bytes read from the slow tier, or expert slots, in a phase (running or not)."""
        if self._current is None:
            raise self._closed_error()
        phase = self.phase(name)
        if bytes is not None:
            phase.bytes = (phase.bytes or 0) + int(bytes)
        if slots is not None:
            phase.slots = (phase.slots or 0) + int(slots)

    def so_far(self) -> dict[str, int]:
        """Nanoseconds of each phase until now, for showing; for the thread that uses the ledger."""
        shown = {name: phase.ns for name, phase in self._phases.items() if phase.calls}
        shown["other"] = self._other.ns
        if self._current is not None:
            shown[self._current.name] += self._clock() - self._mark
        return shown

    def close(self, status: Status) -> LedgerRecord:
        """End every open phase and the ledger. Call it once, when the first byte was written."""
        if self._current is None:
            raise self._closed_error()
        now = self._clock()
        self._current.ns += now - self._mark
        self._mark = now
        if self._stack:
            self._union_ns += now - self._outermost_ns
            self._report_open_spans()
        self._current, self._status = None, status
        self._stack.clear()
        self._starts.clear()
        return self._record(status)

    def _record(self, status: Status) -> LedgerRecord:
        used = {n: p.record() for n, p in self._phases.items() if p.calls or p.bytes or p.slots}
        return LedgerRecord(
            status=status,
            clock=CLOCK_NAME if self._clock is CLOCK else "injected",
            start_ns=self._start_ns,
            wall_ns=self._mark - self._start_ns,
            counted_twice_ns=sum(phase.ns for phase in used.values()) - self._union_ns,
            phases={**used, "other": self._other.record()},
        )

    def _charge_queue(self, start_ns: int) -> None:
        waited = self._mark - start_ns
        if waited < 0:
            raise ValueError(f"start_ns {start_ns} lies {-waited} ns in the future")
        queue = self.phase("queue")
        queue.ns, queue.calls = waited, 1
        self._start_ns, self._union_ns = start_ns, waited
        if self._on_span:
            self._on_span("queue", start_ns, self._mark, 1)

    def _new_phase(self, name: str) -> Phase:
        if name not in PHASES:
            raise ValueError(f"unknown phase {name!r}, expected one of {', '.join(PHASES)}")
        if name == "other":
            raise ValueError("`other` is the time in no phase; it cannot be entered or counted in")
        phase = (TracedPhase if self._on_span else Phase)(self, name)
        self._phases[name] = phase
        return phase

    def _report_open_spans(self) -> None:
        if not self._on_span:
            return
        open_phases = [*self._stack[1:], self._current]
        spans = zip(open_phases, self._starts, range(1, len(open_phases) + 1), strict=False)
        for phase, start_ns, depth in reversed(list(spans)):
            if phase is not None:
                self._on_span(phase.name, start_ns, self._mark, depth)

    def _left_out_of_order(self, phase: Phase, now: int, *, unwinding: bool) -> None:
        """Fine after `close`, which ended the phase. An exception may also have struck inside an
        inner `__enter__` (Ctrl-C does), which then has no `__exit__`: unwind to `phase`."""
        current = self._current
        if current is None:
            return
        if not unwinding or phase not in self._stack:
            raise RuntimeError(
                f"phase {phase.name!r} was left while {current.name!r} was running: "
                "phases must nest, and one thread at a time may use a ledger"
            )
        current.ns += now - self._mark
        self._mark = now
        while self._stack.pop() is not phase:
            pass
        self._current = self._stack.pop()
        if not self._stack:
            self._union_ns += now - self._outermost_ns

    def _closed_error(self) -> RuntimeError:
        return RuntimeError(
            f"this ledger was closed as {self._status!r}; what follows the first token belongs in "
            "a DecodeTally, a new request needs a new Ledger"
        )
