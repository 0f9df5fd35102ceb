"""I/O lanes: the threads that read experts from the store into slots.

A lane takes demand reads first. When no demand is queued or in flight it takes what was looked
ahead for, and then asks the refill what to read next. Lanes never evict: a read arrives with its
slot already reserved. A failed read frees its slot and is handed to whoever waits for it; the lane
goes on.

A read that does not return within the limit fails too, but its slot stays taken, because the system
may still write into it; another lane takes over. When it returns after all, its lane ends.

`lock` guards the pool and all state here; methods marked "locked" expect it to be held.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from time import perf_counter_ns
from typing import Protocol

from slotwise.errors import SlotwiseError, StoreError
from slotwise.experts.pool import Arena, Pool, PoolError
from slotwise.experts.store import ExpertStore

OnEvent = Callable[..., None]
"""`on_event(name, **fields)`, called from a lane or from the engine's thread; must not raise."""


DEMAND = ("read", "decode")
"""The purposes someone waits for; the others are done in the background."""

AHEAD_AT_ONCE = 1
"""Reads of the look-ahead in flight: what is wanted first shall also be there first."""

READ_LIMIT_SECONDS = 60.0
"""How long one read may take. A slow disk answers in well under a second."""

PULSE_SECONDS = 0.1
"""How often a wait looks whether a read hangs or its caller wants to stop."""


class ReadState(Enum):
    QUEUED = auto()
    READING = auto()
    DONE = auto()
    FAILED = auto()
    HUNG = auto()
    CANCELLED = auto()


@dataclass(eq=False, kw_only=True)
class Read:
    """One expert on its way into its slot. `purpose` is who asked: a stage ("read", "decode"), the
    look-ahead ("ahead") or a background filler ("refill", "warm")."""

    moe_index: int
    expert: int
    slot: int
    purpose: str
    state: ReadState = ReadState.QUEUED
    error: Exception | None = None
    nbytes: int = 0
    """Bytes read from the slow tier."""
    ns: int = 0
    begun_ns: int = 0
    awaited: bool = False
    """The engine stands still for it."""


class Background(Protocol):
    """The source of reads for a lane that no demand needs (refill.py)."""

    def next_read(self) -> Read | None:
        """Locked. A read with its slot reserved, or None."""
        ...


class IoLanes:
    """`count` threads over one store, arena and pool. `settled(read)` is called locked, once for
    every read that is done or has failed."""

    def __init__(
        self,
        store: ExpertStore,
        *,
        arena: Arena,
        pool: Pool,
        count: int,
        background: Background,
        settled: Callable[[Read], None],
        on_event: OnEvent,
        limit: float = READ_LIMIT_SECONDS,
    ) -> None:
        self.store, self.arena, self.pool = store, arena, pool
        self.lock = threading.Lock()
        self._background = background
        self._settled, self._on_event = settled, on_event
        self._work = threading.Condition(self.lock)
        self._progress = threading.Condition(self.lock)
        self._queue: deque[Read] = deque()
        self._ahead: deque[Read] = deque()
        self._ahead_in_flight = 0
        self.eager = False
        """Look-ahead reads may be made on every lane that has no demand to read, beside those of
        the other lanes; else one at a time, and only when nothing is demanded."""
        self._awaited = 0
        self._reads: dict[int, Read] = {}
        self._demand_in_flight = 0
        self._closing = False
        self._broken: BaseException | None = None
        self._limit, self._count = limit, count
        self._n_hung = 0
        self._look_ns = 0
        """When `wait` looks next at what it looks at from time to time."""
        self.check: Callable[[], None] = _nothing
        """Called while somebody waits; raises when the caller wants to stop."""
        self._threads: list[threading.Thread] = []
        for _ in range(count):
            self._start_lane()

    def _start_lane(self) -> None:
        i = len(self._threads)
        thread = threading.Thread(target=self._run, args=(i,), name=f"io-lane-{i}", daemon=True)
        self._threads.append(thread)
        thread.start()

    # -- the engine's side

    def demand(self, moe_index: int, expert: int, slot: int, *, purpose: str) -> Read:
        """Locked. Queues a read that someone will wait for."""
        read = Read(moe_index=moe_index, expert=expert, slot=slot, purpose=purpose)
        self._reads[self.pool.flat(moe_index, expert)] = read
        self._queue.append(read)
        self._work.notify()
        return read

    def look_ahead(self, moe_index: int, expert: int, slot: int) -> Read:
        """Locked. Queues a read that someone may want soon."""
        read = Read(moe_index=moe_index, expert=expert, slot=slot, purpose="ahead")
        self._reads[self.pool.flat(moe_index, expert)] = read
        self._ahead.append(read)
        if self.eager or not (self._queue or self._demand_in_flight):
            self._work.notify()
        return read

    def hurry(self, read: Read, *, purpose: str) -> None:
        """Locked. Somebody waits now for a read that may only have been looked ahead for."""
        if read.state is ReadState.QUEUED and read.purpose == "ahead":
            self._ahead.remove(read)
            read.purpose = purpose
            self._queue.append(read)
            self._work.notify()

    def underway(self, moe_index: int, expert: int) -> Read | None:
        """Locked. The queued or running read of an expert, whoever asked for it."""
        return self._reads.get(self.pool.flat(moe_index, expert))

    def cancel(self, read: Read) -> None:
        """Locked. Calls off a read that no lane has begun; its slot is free at once."""
        if read.state is ReadState.QUEUED:
            read.state = ReadState.CANCELLED
            (self._ahead if read.purpose == "ahead" else self._queue).remove(read)
            del self._reads[self.pool.flat(read.moe_index, read.expert)]
            self.pool.abandon(read.moe_index, read.expert)

    @property
    def idle(self) -> bool:
        """Locked. Nothing is queued and nothing is being read, but for reads that hang."""
        return len(self._reads) == self._n_hung

    def check_alive(self) -> None:
        """Locked. Raises when a lane has died, or all have ended by `close`."""
        if self._broken is not None:
            raise SlotwiseError(f"an I/O lane stopped: {self._broken!r}") from self._broken
        if self._closing:
            raise PoolError("the I/O lanes were asked for an expert after close()")

    def check_answered(self) -> None:
        """Locked. Raises StoreError while a read hangs: its slot cannot be moved or lent."""
        for read in self._hung():
            raise read.error or SlotwiseError("a read hangs")

    def wait(self) -> None:
        """Locked. Until some read is settled or the refill ends, or for a moment.

        Raises as `check_alive`, what `check` raises, and StoreError when every lane hangs.
        """
        self.check_alive()
        self._progress.wait(PULSE_SECONDS)
        if perf_counter_ns() >= self._look_ns:
            self._look()

    def _look(self) -> None:
        self._look_ns = perf_counter_ns() + int(PULSE_SECONDS * 1e9)
        self.check()
        self._give_up_overdue()
        if self._n_hung >= len(self._threads):
            self.check_answered()

    def wait_for(self, reads: Sequence[Read]) -> None:
        """Locked. Until all are done; raises as `wait`, and the error of the first that fails."""
        try:
            while left := [read for read in reads if read.state is not ReadState.DONE]:
                for read in left:
                    if read.error is not None:
                        raise read.error
                    read.awaited = True
                self._awaited = len(left)
                self.wait()
        finally:
            self._awaited = 0

    def wake_lanes(self) -> None:
        """Locked. There may be background work."""
        self._work.notify_all()

    def close(self) -> None:
        """Drops what is queued, waits for the reads in flight (within the limit) and ends the
        threads. A lane that hangs is left behind; it keeps its part of the arena alive."""
        with self.lock:
            self._closing = True
            for read in [*self._queue, *self._ahead]:
                self.cancel(read)
            self._work.notify_all()
            self._progress.notify_all()
            while not self.idle:
                self._progress.wait(PULSE_SECONDS)
                self._give_up_overdue()
            hang = bool(self._hung())
        for thread in self._threads:
            thread.join(PULSE_SECONDS if hang else None)

    # -- a lane's side

    def _run(self, lane: int) -> None:
        try:
            while (read := self._next()) is not None:
                self._perform(lane, read)
                if read.state is ReadState.HUNG:
                    return
        except BaseException as error:  # a bug: the engine must not wait for ever
            with self.lock:
                self._broken = error
                self._progress.notify_all()

    def _next(self) -> Read | None:
        with self.lock:
            while not self._closing:
                read = self._take_demand() or self._take_ahead() or self._take_background()
                if read is not None:
                    read.state, read.begun_ns = ReadState.READING, perf_counter_ns()
                    return read
                self._work.wait()
        return None

    def _take_demand(self) -> Read | None:
        if not self._queue:
            return None
        self._demand_in_flight += 1
        return self._queue.popleft()

    def _take_ahead(self) -> Read | None:
        if not self._ahead:
            return None
        busy = self._demand_in_flight or self._ahead_in_flight >= AHEAD_AT_ONCE
        if busy and not self.eager:
            return None
        self._ahead_in_flight += 1
        return self._ahead.popleft()

    def _take_background(self) -> Read | None:
        if self._demand_in_flight:
            return None
        read = self._background.next_read()
        if read is None:
            self._progress.notify_all()  # the background work may just have ended
        else:
            self._reads[self.pool.flat(read.moe_index, read.expert)] = read
        return read

    def _perform(self, lane: int, read: Read) -> None:
        region = self.pool.region(read.moe_index)
        target = self.arena.view(self.pool.slot_offset(region.index, read.slot), region.slot_bytes)
        nbytes, error, start = 0, None, perf_counter_ns()
        try:
            nbytes = self.store.read(read.moe_index, read.expert, target)
        except Exception as failed:  # whoever waits for this read raises it
            error = failed
        end = perf_counter_ns()
        with self.lock:
            read.nbytes, read.ns, read.error = nbytes, end - start, read.error or error
            self._settle(read)
        self._on_event(
            "expert_read",
            lane=lane,
            purpose=read.purpose,
            start_ns=start,
            end_ns=end,
            bytes=read.nbytes,
            error=read.error,
        )

    def _settle(self, read: Read) -> None:
        del self._reads[self.pool.flat(read.moe_index, read.expert)]
        if read.state is ReadState.HUNG:  # it was given up, and only its slot is still out
            self._n_hung -= 1
            self.pool.abandon(read.moe_index, read.expert)
            self._progress.notify_all()
            return
        self._left_flight(read)
        if read.error is None:
            read.state = ReadState.DONE
            self.pool.publish(read.moe_index, read.expert)
        else:
            read.state = ReadState.FAILED
            self.pool.abandon(read.moe_index, read.expert)
        self._settled(read)
        if self._awaited:
            # The engine waits for certain reads: it is woken once, by the last of them.
            self._awaited -= read.awaited
            if read.error is None and (self._awaited or not read.awaited):
                return
        self._progress.notify_all()

    def _left_flight(self, read: Read) -> None:
        if read.purpose in DEMAND:
            self._demand_in_flight -= 1
        elif read.purpose == "ahead":
            self._ahead_in_flight -= 1

    # -- reads that do not return

    def _hung(self) -> list[Read]:
        return [read for read in self._reads.values() if read.state is ReadState.HUNG]

    def _give_up_overdue(self) -> None:
        now = perf_counter_ns()
        for read in list(self._reads.values()):
            overdue = now - read.begun_ns > self._limit * 1e9
            if overdue and read.state is ReadState.READING:
                self._give_up(read)

    def _give_up(self, read: Read) -> None:
        path, offset = self.store.where(read.moe_index, read.expert)
        read.state, self._n_hung = ReadState.HUNG, self._n_hung + 1
        read.error = StoreError(
            path,
            offset,
            f"a read of one expert has not returned for {self._limit:g} s",
            next_step="Look at the disk and its cables or network; then start slotwise again.",
        )
        self._left_flight(read)
        if len(self._threads) < 2 * self._count:
            self._start_lane()
        self._settled(read)


def _nothing() -> None:
    pass
