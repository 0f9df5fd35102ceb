"""The refill: fills FREE slots with the hottest experts that are not resident, never evicting.

Refill is a policy, never a step of the prompt path: `deferred` fills on one background lane while
the model decodes, `blocking` fills on all lanes while the engine waits (to measure against) and
`lazy` does nothing. Filling the pool at start (`warm`) is the same work under another name.
All methods expect the lock of the I/O lanes to be held.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns
from typing import Literal, get_args

import numpy as np

from slotwise.experts.iolanes import Read, ReadState
from slotwise.experts.pool import Pool, experts_per_class

RefillMode = Literal["deferred", "blocking", "lazy"]
REFILL_MODES: tuple[str, ...] = get_args(RefillMode)

PLAN_READS = 64
"""A refill looks at the heat again after so many reads: decode goes on meanwhile."""


RefillEnd = Literal["running", "full", "cut_short"]


@dataclass(eq=False, kw_only=True)
class RefillBooks:
    """What one refill did. It belongs to the request whose loan it fills again, and goes on being
    written after that request has ended, until the next loan."""

    purpose: str
    done: int = 0
    failed: int = 0
    bytes: int = 0
    """Read from the slow tier."""
    filled_bytes: int = 0
    """Of the slots filled."""
    ns: int = 0
    """Sum of the durations of its reads; they ran beside the engine."""
    waited_ns: int = 0
    """Time the engine stood still for it."""
    saved_misses: int = 0
    """Experts it brought back that were then used."""
    end: RefillEnd = "running"
    """`full`: it found nothing more to fill; `cut_short`: the next loan came first."""
    end_ns: int | None = None
    superseded: bool = False
    """The next loan was made: nothing in these books changes any more."""


@dataclass(frozen=True, kw_only=True)
class RefillState:
    """The latest refill: `queued` slots are still to be filled, the rest is what it has done."""

    active: bool
    queued: int
    done: int
    failed: int
    bytes: int
    ns: int
    """Sum of the durations of its reads on the lane."""
    waited_ns: int
    """Time the engine stood still for it."""


class Refill:
    """What a lane with nothing better to do reads next."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        layers, experts = pool.table.shape
        # Without heat to tell them apart, expert 0 of every layer comes first, then expert 1 ...
        self._order = np.arange(layers * experts).reshape(layers, experts).T.reshape(-1)
        self._in_flight = 0
        self.active = False
        self._reset("refill", lanes=0)

    def _reset(self, purpose: str, *, lanes: int) -> None:
        self._lanes = lanes
        self._plan: list[int] = []
        self._failed: set[int] = set()
        self.books = RefillBooks(purpose=purpose)

    def start(self, purpose: str, *, lanes: int) -> int:
        """Begins to fill on so many lanes; returns the bytes of the slots it can fill."""
        self._reset(purpose, lanes=lanes)
        to_fill = self._to_fill()
        self.active = any(to_fill)
        if not self.active:
            self._end("full")
        per_class = zip(to_fill, self.pool.regions, strict=True)
        return sum(n * region.slot_bytes for n, region in per_class)

    def stop(self) -> None:
        """Starts no more reads; what is in flight ends by itself."""
        if self.active:
            self._end("cut_short")
        self.active = False
        self._plan.clear()

    def _end(self, how: RefillEnd) -> None:
        self.books.end, self.books.end_ns = how, perf_counter_ns()

    def next_read(self) -> Read | None:
        """The hottest expert that still lacks a slot, with a free slot reserved for it."""
        if not self.active or self._in_flight >= self._lanes:
            return None
        while self._plan or self._make_plan():
            moe_index, expert = divmod(self._plan.pop(), self.pool.layout.n_experts)
            slot = self._reserve(moe_index, expert)
            if slot is not None:
                self._in_flight += 1
                purpose = self.books.purpose
                return Read(moe_index=moe_index, expert=expert, slot=slot, purpose=purpose)
        if not self._in_flight:
            self.active = False
            self._end("full")
        return None

    def settled(self, read: Read) -> None:
        """One of its reads is done or has failed (a failed one is not tried again)."""
        books = self.books
        self._in_flight -= 1
        books.ns += read.ns
        if read.state is ReadState.DONE:
            books.done += 1
            books.bytes += read.nbytes
            books.filled_bytes += self.pool.region(read.moe_index).slot_bytes
        else:
            books.failed += 1
            self._failed.add(self.pool.flat(read.moe_index, read.expert))

    def state(self) -> RefillState:
        """Where the latest refill stands."""
        queued, books = sum(self._to_fill()) if self.active else 0, self.books
        return RefillState(
            active=self.active,
            queued=queued + self._in_flight,
            done=books.done,
            failed=books.failed,
            bytes=books.bytes,
            ns=books.ns,
            waited_ns=books.waited_ns,
        )

    def _to_fill(self) -> list[int]:
        """Per class, the free slots for which there is an expert that is not resident."""
        everyone = experts_per_class(self.pool.layout)
        counts = [self.pool.counts(region.index) for region in self.pool.regions]
        return [
            min(c.free, n - c.resident - c.loading) for c, n in zip(counts, everyone, strict=True)
        ]

    def _reserve(self, moe_index: int, expert: int) -> int | None:
        flat = self.pool.flat(moe_index, expert)
        if self.pool.flat_table[flat] >= 0 or flat in self.pool.loading:
            return None
        return self.pool.reserve(moe_index, expert)

    def _make_plan(self) -> bool:
        """Lists the next reads, hottest last; False if there are none. Each of them is wanted and
        its class has a free slot, as things are now."""
        pool, n = self.pool, sum(self._to_fill())
        absent = pool.table < 0
        has_room = np.array([bool(region.free) for region in pool.regions])
        absent &= has_room[list(pool.layout.class_of)][:, None]
        flat = absent.reshape(-1)
        flat[[*pool.loading, *self._failed]] = False
        candidates = self._order[flat[self._order]]
        look = min(n, PLAN_READS) if self.books.purpose == "refill" else candidates.size
        hottest = pool.policy.hottest(candidates, look)[:n]
        self._plan = candidates[hottest[::-1]].tolist()
        return bool(self._plan)
