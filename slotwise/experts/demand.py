"""One call's experts on their way into slots: what waits for a slot, is being read, is ready.

Every expert the demand has got hold of, being read or ready, is pinned until it is consumed or the
demand is abandoned. All methods expect the lock of the I/O lanes to be held.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from slotwise.experts.iolanes import IoLanes, Read, ReadState
from slotwise.experts.pool import LENT, PoolError
from slotwise.experts.stats import StageStats

Ids = NDArray[np.int32]


class Demand:
    """Distinct `experts` of one layer. `purpose` is the stage the reads are made for."""

    def __init__(
        self, lanes: IoLanes, moe_index: int, experts: Ids, *, purpose: str, stats: StageStats
    ) -> None:
        self._lanes, self._pool, self._stats = lanes, lanes.pool, stats
        self._moe_index, self._purpose = moe_index, purpose
        self._region = self._pool.region(moe_index)
        self._row = self._pool.table[moe_index]
        self._waiting = deque(experts.tolist())
        self._reading: dict[int, Read] = {}
        self._ready: dict[int, int] = {}
        self._wave = np.empty(0, np.int32)

    @property
    def held(self) -> int:
        """Slots this demand keeps pinned."""
        return len(self._reading) + len(self._ready) + len(self._wave)

    @property
    def all_begun(self) -> bool:
        """Every read that is missing has a lane or a place in the queue."""
        return not self._waiting

    @property
    def finished(self) -> bool:
        """Every expert has been in a wave."""
        return not (self._waiting or self._reading or self._ready)

    def check_fits(self) -> None:
        """Raises PoolError unless all experts can be resident at once."""
        region = self._region
        slots = self._row.take(list(self._waiting))
        new = len(slots) - int((region.pins[slots[slots >= 0]] > 0).sum())
        room = int(((region.pins == 0) & (region.state != LENT)).sum())
        if new > room:
            raise PoolError(
                f"moe layer {self._moe_index} needs {new} more experts at once, but "
                f"{room} of the {region.n_slots} slots of class {region.index} can take one"
            )

    def take_resident(self) -> tuple[Ids, Ids]:
        """The first wave: the experts that are resident already, and their slots."""
        experts = np.asarray(self._waiting, np.int32)
        slots = self._row.take(experts)
        here = slots >= 0
        self._waiting = deque(experts[~here].tolist())
        self._wave = slots[here]
        self._pool.pin(self._region, self._wave)
        return experts[here], self._wave

    def take_ready(self, n: int) -> tuple[Ids, Ids]:
        """The next wave: at most `n` experts that are ready, and their slots."""
        experts = list(self._ready)[:n]
        self._wave = np.asarray([self._ready.pop(expert) for expert in experts], np.int32)
        return np.asarray(experts, np.int32), self._wave

    def consume(self) -> None:
        """The wave taken last has been computed: its slots may be given to others."""
        self._pool.unpin(self._region, self._wave)
        self._wave = self._wave[:0]

    def advance(self, limit: int) -> None:
        """Notes which reads are done and begins new ones, holding at most `limit` slots.

        Raises the error of a read that failed.
        """
        self._lanes.check_alive()
        self._collect()
        n = max(0, min(len(self._waiting), limit - self.held))
        batch = [self._waiting.popleft() for _ in range(n)]
        absent = deque(expert for expert in batch if not self._adopt(expert))
        self._pool.make_room(self._region, len(absent))
        while absent:
            slot = self._pool.reserve(self._moe_index, absent[0])
            if slot is None:
                break
            self._begin(absent.popleft(), slot)
        self._waiting.extendleft(reversed(absent))

    def gather(self, limit: int, *, everything: bool) -> None:
        """Advances until something is ready, or `everything` is; counts the time waited."""
        self.advance(limit)
        if self._satisfied(everything):
            return
        start = perf_counter_ns()
        try:
            while not self._satisfied(everything):
                if self._lanes.idle:
                    raise PoolError(
                        f"moe layer {self._moe_index}: all slots of class {self._region.index} "
                        f"are pinned, {len(self._waiting)} experts still need one"
                    )
                self._lanes.wait()
                self.advance(limit)
        finally:
            self._stats.wait_ns += perf_counter_ns() - start

    def abandon(self) -> None:
        """Lets go of everything held; reads that no lane has begun are called off."""
        self.consume()
        for slot in self._ready.values():
            self._pool.unpin(self._region, slot)
        for read in self._reading.values():
            self._pool.unpin(self._region, read.slot)
            if not self._region.pins[read.slot]:
                self._lanes.cancel(read)
        self._ready.clear()
        self._reading.clear()
        self._waiting.clear()

    def _satisfied(self, everything: bool) -> bool:
        if everything:
            return not (self._waiting or self._reading)
        return bool(self._ready)

    def _adopt(self, expert: int) -> bool:
        """Holds on to an expert that is resident or being read already."""
        slot = int(self._row[expert])
        if slot >= 0:
            self._ready[expert] = slot
        elif read := self._lanes.underway(self._moe_index, expert):
            if read.error is not None:  # it hangs
                raise read.error
            self._lanes.hurry(read, purpose=self._purpose)
            self._reading[expert] = read
            slot = read.slot
        else:
            return False
        self._pool.pin(self._region, slot)
        return True

    def _begin(self, expert: int, slot: int) -> None:
        self._pool.pin(self._region, slot)
        self._reading[expert] = self._lanes.demand(
            self._moe_index, expert, slot, purpose=self._purpose
        )

    def _collect(self) -> None:
        for expert, read in list(self._reading.items()):
            if read.error is not None:
                raise read.error
            if read.state is ReadState.DONE:
                self._ready[expert] = self._reading.pop(expert).slot
