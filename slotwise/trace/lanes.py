"""Work that overlaps a request: the I/O lanes, the refill lane, a device's own timeline.

A lane is one worker that does one thing at a time. What it did is kept beside the ledger and
never added to it: four lanes busy for 10 ms each may have cost the request 10 ms, or nothing.

The log keeps the newest spans of each lane and is always on. A span that had to make room is
never lost in silence: `take` counts those that nobody took, `window` says when one may be missing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile

from slotwise.trace.codec import measured


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """One piece of work of one lane. Counts are 0 where there was nothing to count."""

    lane: str
    name: str
    start_ns: int
    end_ns: int
    bytes: int = 0
    slots: int = 0


@dataclass(frozen=True, kw_only=True)
class LaneTotal:
    """What one lane did inside a window of time."""

    busy_ns: int = field(metadata=measured())
    """Time at work, cut at the edges of the window."""
    calls: int = field(metadata=measured())
    """Spans that touch the window; their bytes and slots are counted whole."""
    bytes: int = field(metadata=measured())
    slots: int = field(metadata=measured())


@dataclass(frozen=True, kw_only=True)
class LaneWindow:
    """All lanes between two clock readings."""

    lanes: Mapping[str, LaneTotal]
    complete: bool
    """False when spans that lay in the window had already made room: totals are lower bounds."""


class _Lane:
    """The newest spans of one lane, in the order of their ends."""

    def __init__(self) -> None:
        self.spans: deque[LaneSpan] = deque()
        self.recorded = self.taken = 0
        self.lost_until_ns: int | None = None

    def touching(self, start_ns: int, end_ns: int) -> list[LaneSpan]:
        newest_first = takewhile(lambda span: span.end_ns > start_ns, reversed(self.spans))
        return [span for span in newest_first if span.start_ns < end_ns]

    def take(self) -> tuple[list[LaneSpan], int]:
        new = self.recorded - self.taken
        self.taken = self.recorded
        spans = list(islice(reversed(self.spans), new))
        return spans, new - len(spans)


class LaneLog:
    """Thread-safe, bounded log of lane spans. A lane must have one writer at a time."""

    def __init__(self, *, capacity: int = 16384) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}

    def record(
        self, lane: str, name: str, start_ns: int, end_ns: int, *, bytes: int = 0, slots: int = 0
    ) -> None:
        """Add one span; call it when the span ends, with readings of the ledger's clock."""
        span = LaneSpan(lane, name, start_ns, end_ns, int(bytes), int(slots))
        with self._lock:
            log = self._lanes.get(lane) or self._lanes.setdefault(lane, _Lane())
            if len(log.spans) >= self._capacity:
                log.lost_until_ns = log.spans.popleft().end_ns
            log.spans.append(span)
            log.recorded += 1

    def window(self, start_ns: int, end_ns: int) -> LaneWindow:
        """Totals per lane between two clock readings; lanes that did nothing are left out."""
        with self._lock:
            touching = {n: log.touching(start_ns, end_ns) for n, log in self._lanes.items()}
            lost = [log.lost_until_ns for log in self._lanes.values()]
        complete = all(until is None or until <= start_ns for until in lost)
        lanes = {n: _total(touching[n], start_ns, end_ns) for n in sorted(touching) if touching[n]}
        return LaneWindow(lanes=lanes, complete=complete)

    def take(self) -> tuple[list[LaneSpan], int]:
        """Spans recorded since the last call, in order of start, and how many of them are lost."""
        with self._lock:
            taken = [log.take() for log in self._lanes.values()]
        spans = [span for new, _ in taken for span in new]
        return sorted(spans, key=lambda span: span.start_ns), sum(lost for _, lost in taken)


def _total(spans: list[LaneSpan], start_ns: int, end_ns: int) -> LaneTotal:
    return LaneTotal(
        busy_ns=sum(min(s.end_ns, end_ns) - max(s.start_ns, start_ns) for s in spans),
        calls=len(spans),
        bytes=sum(s.bytes for s in spans),
        slots=sum(s.slots for s in spans),
    )
