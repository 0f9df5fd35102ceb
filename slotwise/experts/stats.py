"""What the pool did: counters since the start, subtracted to get those of one request."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields
from typing import Any, Self


@dataclass
class _Counters:
    def __sub__(self, earlier: Self) -> Self:
        names = [f.name for f in fields(self)]
        return type(self)(**{n: getattr(self, n) - getattr(earlier, n) for n in names})

    def copy(self) -> Self:
        return copy.deepcopy(self)


@dataclass
class StageStats(_Counters):
    """One side of a request, the wide read or decode."""

    hits: int = 0
    """Routed entries that no read was needed for."""
    misses: int = 0
    """Distinct experts that had to be waited for, if only for the rest of their read."""
    bytes_read: int = 0
    """From the slow tier, as the store counts them."""
    wait_ns: int = 0
    """Time the engine stood still until a read was done."""
    mirror_hits: int = 0
    """Experts that came into slots out of the mirror, without the slow tier."""
    loan_misses: int = 0
    """Misses on experts which the latest loan had forgotten: what the loan cost."""


@dataclass
class AheadStats(_Counters):
    """Look-ahead of one stage, in experts. Those begun are used, wasted, or still to be told."""

    windows: int = 0
    """Windows, or in the prompt read layers, that looked ahead: the proof that it was engaged."""
    predicted: int = 0
    """Absent experts that were named for the next layer."""
    called_off: int = 0
    """Of those, what no lane had begun when that layer's router had chosen."""
    used: int = 0
    late: int = 0
    """Used, but the engine had to wait for the rest of the read."""
    wasted: int = 0
    bytes: int = 0
    """From the slow tier; part of the stage's."""


@dataclass
class Stats(_Counters):
    """All counters only grow; `later - earlier` is what happened in between."""

    read: StageStats = field(default_factory=StageStats)
    decode: StageStats = field(default_factory=StageStats)
    ahead: AheadStats = field(default_factory=AheadStats)
    """In decode."""
    read_ahead: AheadStats = field(default_factory=AheadStats)
    warm_slots: int = 0
    warm_bytes: int = 0
    warm_ns: int = 0
    """Time it took to fill the pool at the start, all lanes reading."""
    refill_slots: int = 0
    refill_bytes: int = 0
    refill_ns: int = 0
    """Sum of the refill reads' own durations; not time anyone waited."""
    refill_waited_ns: int = 0
    """Time the engine waited for a refill (`blocking` only)."""
    refill_hits: int = 0
    """Refilled experts that were then used: the misses the refill saved."""
    lent_slots: int = 0
    forgotten_experts: int = 0
    moved_slots: int = 0
    moved_bytes: int = 0
    evictions: int = 0
    failed_reads: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Nested plain dict, nanoseconds and bytes as named."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        nested = ("read", "decode", "ahead", "read_ahead")
        return plain | {stage: dict(vars(plain[stage])) for stage in nested}
