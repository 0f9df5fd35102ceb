"""The events of a trace. A dataclass each: their fields are the list of what may be written.

A field that is not here is a TypeError where the event is made. None of them can hold prompt
text or token ids; paths lose their folders when an event is encoded. Times are readings of the
ledger's clock in ns; the header pairs one of them with the wall clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from slotwise.trace.ledger import CLOCK, CLOCK_NAME, Status
from slotwise.trace.record import RefillEnd, RequestRecord, Settings

TRACE_SCHEMA = "slotwise.trace/v1"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What ran, as far as timings depend on it. All 0 and empty about experts if it is dense."""

    file: str
    """Name of the first file, without its folder."""
    arch: str
    digest: str | None = None
    layers: int
    moe_layers: int = 0
    experts: int = 0
    """Experts per layer."""
    experts_used: int = 0
    """Experts a token is routed to in each layer (top-k)."""
    pool_slots: tuple[int, ...] = ()
    """Expert slots of the pool, per slot class."""
    slot_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """First line of a trace."""

    type: ClassVar[str] = "header"
    schema: str = TRACE_SCHEMA
    engine_version: str
    clock: str = CLOCK_NAME
    clock_ns: int = field(default_factory=CLOCK)
    unix_ns: int = field(default_factory=time.time_ns)
    """The wall clock, read together with `clock_ns`."""
    model: ModelShape
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestStart:
    """A request's ledger was opened; `start_ns` is when its last byte arrived."""

    type: ClassVar[str] = "request_start"
    request: str
    start_ns: int


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One entry and exit of a phase, the phases inside it included. Depth 1 is outermost."""

    type: ClassVar[str] = "phase"
    request: str
    name: str
    start_ns: int
    end_ns: int
    depth: int


@dataclass(frozen=True, slots=True)
class LaneWork:
    """One piece of overlapped work (`lanes.LaneSpan`)."""

    type: ClassVar[str] = "lane"
    lane: str
    name: str
    start_ns: int
    end_ns: int
    bytes: int = 0
    slots: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoanMade:
    """Expert slots were lent to a prompt read."""

    type: ClassVar[str] = "loan"
    request: str
    at_ns: int
    slots: int
    bytes: int
    extents: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RefillDone:
    """What the refill of a request's loan had done when that request ended."""

    type: ClassVar[str] = "refill"
    request: str
    policy: str
    start_ns: int
    end_ns: int
    slots: int
    bytes: int
    waited_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RefillTotal:
    """What became of a request's refill, also after the request ended: written once the next
    loan was made, or at the end of the trace. Takes the place of the numbers in its record."""

    type: ClassVar[str] = "refill_done"
    request: str
    at_ns: int
    """When the refill ended: nothing more to fill, or the next loan."""
    end: RefillEnd
    """`full`, `cut_short`, or `running` at the end of the trace."""
    slots: int
    failed: int
    bytes: int
    lane_ns: int
    waited_ns: int
    saved_misses: int


@dataclass(frozen=True, slots=True)
class WindowDone:
    """One decode window."""

    type: ClassVar[str] = "window"
    request: str
    start_ns: int
    end_ns: int
    tokens: int
    expert_wait_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolFill:
    """Where the expert slots are, summed over slot classes."""

    type: ClassVar[str] = "pool"
    at_ns: int
    resident: int
    loading: int
    lent: int
    free: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestEnd:
    """Last event of a request. `error` is the name of an error's class, never its text."""

    type: ClassVar[str] = "request_end"
    request: str
    at_ns: int
    status: Status
    record: RequestRecord | None
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Something a reader of the numbers has to know, for example that O_DIRECT was refused."""

    type: ClassVar[str] = "note"
    at_ns: int
    code: str
    """Short stable name, kebab-case."""
    text: str
    count: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceEnd:
    """Last line of a trace that was closed properly."""

    type: ClassVar[str] = "trace_end"
    at_ns: int
    events: int
    """Events written before this one, the header not counted."""


Event: TypeAlias = (
    RequestStart
    | PhaseSpan
    | LaneWork
    | LoanMade
    | RefillDone
    | RefillTotal
    | WindowDone
    | PoolFill
    | RequestEnd
    | Note
    | TraceEnd
)
EVENT_TYPES: tuple[type[Event], ...] = (
    RequestStart,
    PhaseSpan,
    LaneWork,
    LoanMade,
    RefillDone,
    RefillTotal,
    WindowDone,
    PoolFill,
    RequestEnd,
    Note,
    TraceEnd,
)
