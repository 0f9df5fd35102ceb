"""`Experts`: the one thing the engine talks to about experts.

Owns the pool, the I/O lanes, the refill and the store. Experts are named (moe_index, expert),
slots by their id within the layer's class. All methods are for one thread, the engine's; the lanes
work beside it (see pool.py for the rules that make the unlocked fast paths safe).

Does not know the ledger: the engine wraps its calls in phases. Time spent waiting for reads is
counted for the current `stage`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from time import perf_counter_ns
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from slotwise.errors import UsageError
from slotwise.experts import lending
from slotwise.experts.demand import Demand
from slotwise.experts.foresight import Foresight
from slotwise.experts.iolanes import (
    DEMAND,
    READ_LIMIT_SECONDS,
    IoLanes,
    OnEvent,
    Read,
    ReadState,
)
from slotwise.experts.lending import Loan
from slotwise.experts.lookahead import LookAhead, Switch
from slotwise.experts.policy import DEFAULT_POLICY, Policy, make_policy
from slotwise.experts.pool import SMALL_RING, Arena, Pool, PoolError
from slotwise.experts.profile import Profile, ProfileRecorder
from slotwise.experts.refill import REFILL_MODES, Refill, RefillBooks, RefillState
from slotwise.experts.routing import RoutingRecorder
from slotwise.experts.stats import Stats
from slotwise.experts.store import ExpertStore
from slotwise.weights.layout import ExpertLayout

Slots = NDArray[np.int32]
Stage = Literal["read", "decode"]


class Experts:
    """The experts of one model in `slots` (per class) of fast memory.

    `ring` is how many slots at most a `stream` uses for experts that were not resident; half of
    them compute while the other half is being read. A read that takes longer than `read_limit`
    seconds fails. `on_event(name, **fields)` is called from the
    lanes for every read ("expert_read": lane, purpose, start_ns, end_ns, bytes, error).
    """

    def __init__(
        self,
        store: ExpertStore,
        arena: Arena,
        *,
        slots: Sequence[int],
        policy: str = DEFAULT_POLICY,
        io_lanes: int = 4,
        profile: Profile | None = None,
        refill: str = "deferred",
        lookahead: str = "auto",
        ring: int | None = None,
        read_limit: float = READ_LIMIT_SECONDS,
        on_event: OnEvent | None = None,
    ) -> None:
        self.layout = store.layout
        self.policy = _seeded_policy(policy, self.layout, profile)
        self.pool = Pool(self.layout, slots, policy=self.policy)
        if arena.size < self.pool.arena_bytes:
            raise PoolError(f"arena of {arena.size:,} bytes, expected {self.pool.arena_bytes:,}")
        self.refill_mode, self.ring = _refill_mode(refill), ring or max(4 * io_lanes, 16)
        self._stats = Stats()
        self.recorder: ProfileRecorder | None = None
        """Counts the router's choices while it is set."""
        self.routing: RoutingRecorder | None = None
        """Notes them one by one while it is set."""
        self._rows = list(self.pool.table)
        self._bases = np.arange(len(self._rows), dtype=np.int32)[:, None] * self.layout.n_experts
        self._incomplete: tuple[int, Slots, Slots, list[Read]]
        self._forgotten = np.zeros(self.pool.table.size, bool)
        self._refilled = np.zeros(self.pool.table.size, bool)
        self._refills_unused = False
        self._refill = Refill(self.pool)
        self._store, self._arena, self._io_lanes = store, arena, io_lanes
        self._lanes = IoLanes(
            store,
            arena=arena,
            pool=self.pool,
            count=io_lanes,
            background=self._refill,
            settled=self._settled,
            on_event=on_event or _ignore,
            limit=read_limit,
        )

        self.foresight = Foresight(
            self.layout.n_moe_layers, self.layout.n_experts, self.policy.n_used
        )
        """What names the experts to read ahead."""
        self._ahead, self._switch = LookAhead(self._lanes, self._stats.ahead), Switch(lookahead)
        self.stage = "decode"

    def watch(self, check: Callable[[], None] | None) -> None:
        """While anything waits for a read, `check` is called every tenth of a second; what it
        raises ends the wait. None: nobody wants to stop."""
        self._lanes.check = check or _nobody_stops

    @property
    def stage(self) -> Stage:
        """Which side of a request waits and misses are counted for."""
        return self._stage

    @stage.setter
    def stage(self, stage: Stage) -> None:
        with self._lanes.lock:
            self._ahead.drop()
        reads = stage == "read"
        self._stage: Stage = stage
        self._lanes.eager = reads
        self._counted = self._stats.read if reads else self._stats.decode
        self._ahead.stats = self._stats.read_ahead if reads else self._stats.ahead

    # -- having experts in slots

    def place(
        self, moe_index: int, routed: Slots, slots: Slots, foreseen: Sequence[int] = ()
    ) -> bool:
        """Writes the slot of each routed expert, which may repeat, to `slots`; -1 for one whose
        read has only begun. True if there is none: else call `complete` for the rest.

        `foreseen` are experts that the next layer will probably want, the likeliest first: what is
        missing of them is read meanwhile. Nothing is pinned: only this thread evicts, so the slots
        stay right until its next `place`, `stream` or `lend`.

        Raises PoolError when the class cannot hold them all at once, StoreError when one cannot be
        read (here or in `complete`).
        """
        self._rows[moe_index].take(routed, out=slots, mode="clip")
        absent = -1 in slots.tolist()
        ahead = bool(foreseen) and -1 in self._rows[moe_index + 1].take(foreseen).tolist()
        if not (absent or ahead or self._ahead.reads):
            self._counted.hits += slots.size
            return True
        with self._lanes.lock:
            reads = self._place(moe_index, routed, slots, foreseen if ahead else ())
        self._incomplete = moe_index, routed, slots, reads
        return not reads

    def complete(self) -> None:
        """Waits for the reads that the last `place` left, and writes their slots too."""
        moe_index, routed, slots, reads = self._incomplete
        with self._lanes.lock:
            self._wait_for(reads)
        self._rows[moe_index].take(routed, out=slots, mode="clip")

    def _place(
        self, moe_index: int, routed: Slots, slots: Slots, foreseen: Sequence[int]
    ) -> list[Read]:
        """`place` with the lock held, for what takes reads: those that are still to be waited
        for."""
        self._rows[moe_index].take(routed, out=slots, mode="clip")  # a refill may just have ended
        experts, where = routed.tolist(), slots.tolist()
        self._ahead.arrive(moe_index, experts, purpose=self._stage)
        missing = list({e: None for e, slot in zip(experts, where, strict=True) if slot < 0})
        self._count(moe_index, missing, routed=len(experts))
        region, kept = self.pool.region(moe_index), slots[slots >= 0]
        self.pool.pin_each(region, kept)
        try:
            reads = self._begin(moe_index, missing)
            if foreseen:
                self._look_ahead(moe_index + 1, foreseen)
        finally:
            self.pool.unpin_each(region, kept)
        if reads is None:
            self._gather(moe_index, np.unique(routed))
            self._rows[moe_index].take(routed, out=slots, mode="clip")
        return reads or []

    def _begin(self, moe_index: int, missing: list[int]) -> list[Read] | None:
        """The reads of the missing experts; None where not all get a slot at once."""
        lanes, pool, region = self._lanes, self.pool, self.pool.region(moe_index)
        if not pool.has_room(region, len(missing), pinned=self.layout.n_experts):
            return None
        reads = []
        for expert in missing:
            read = lanes.underway(moe_index, expert)
            if read is None:
                pool.make_room(region, 1)
                slot = pool.reserve(moe_index, expert)
                if slot is None:
                    return None
                read = lanes.demand(moe_index, expert, slot, purpose=self._stage)
            else:
                lanes.hurry(read, purpose=self._stage)
            reads.append(read)
        return reads

    def _wait_for(self, reads: list[Read]) -> None:
        start = perf_counter_ns()
        try:
            self._lanes.wait_for(reads)
        except BaseException:
            for read in reads:
                self._lanes.cancel(read)
            raise
        finally:
            self._counted.wait_ns += perf_counter_ns() - start

    def _gather(self, moe_index: int, experts: Slots) -> None:
        """Where slots are scarce or pinned: as `stream` does it, but all at once."""
        demand = Demand(self._lanes, moe_index, experts, purpose=self._stage, stats=self._counted)
        try:
            demand.check_fits()
            demand.gather(experts.size, everything=True)
        finally:
            demand.abandon()

    # -- looking ahead

    def looks_ahead(self) -> bool:
        """Whether the window that begins now is to name experts of the next layer. Not while all
        experts are resident: then there is nothing to read."""
        if self.routing is not None:
            self.routing.begin(self._stage, self.pool.table)
        return self._switch.on and -1 in self.pool.flat_table

    def reads_ahead(self) -> bool:
        """The same of the layer of a prompt read that begins now."""
        ahead = self._switch.mode != "off" and -1 in self.pool.flat_table
        self._ahead.stats.windows += ahead
        return ahead

    def window_done(self, routed: Slots, ns: int, *, looked_ahead: bool) -> None:
        """A decode window took `ns`; row i of `routed` [n_moe_layers, n] is what layer i chose."""
        self._stats.ahead.windows += looked_ahead
        self._switch.window(ns)
        self.policy.touch_window(routed)
        if self._refills_unused:
            self._note_refill_hits((routed + self._bases).reshape(-1))
        if self.recorder is not None or self.routing is not None:
            for moe_index, experts in enumerate(routed):
                self._note(moe_index, experts, None)

    def _look_ahead(self, moe_index: int, foreseen: Sequence[int]) -> None:
        region, slots = self.pool.region(moe_index), self._rows[moe_index].take(foreseen)
        here = slots[slots >= 0]
        self.pool.pin_each(region, here)
        try:
            self._ahead.foresee(moe_index, foreseen)
        finally:
            self.pool.unpin_each(region, here)

    def stream(
        self, moe_index: int, experts: Slots, foreseen: Sequence[int] = ()
    ) -> Generator[tuple[Slots, Slots]]:
        """Waves (experts, their slots) that cover the distinct `experts` once each.

        The first wave is what is resident, while reads of the others have begun; then whatever
        has become ready, at least one, at most half the ring. `foreseen` are experts that the
        next layer will want, the surest first: they are read when nothing of this layer is left to
        begin. A wave stays pinned until the next
        one is asked for or the generator is closed, which may happen at any time. What was read
        stays resident, as far as the policy finds nothing colder to put out. Errors as in `place`.
        """
        pool, region = self.pool, self.pool.region(moe_index)
        with self._lanes.lock:
            pool.sweep(moe_index)
            self._ahead.arrive(moe_index, experts.tolist(), purpose=self._stage)
            demand = self._demand(moe_index, experts)
        try:
            with self._lanes.lock:
                wave = demand.take_resident()
                demand.advance(self._ring(pool.usable(region)) + demand.held)
                foreseen = self._stream_ahead(moe_index + 1, foreseen, demand)
            if wave[0].size:
                yield wave
            while True:
                with self._lanes.lock:
                    demand.consume()
                    if demand.finished:
                        return
                    ring = self._ring(pool.usable(region) + demand.held)
                    demand.gather(ring, everything=False)
                    wave = demand.take_ready(ring // 2)
                    foreseen = self._stream_ahead(moe_index + 1, foreseen, demand)
                yield wave
        finally:
            with self._lanes.lock:
                demand.abandon()

    def _stream_ahead(
        self, moe_index: int, foreseen: Sequence[int], demand: Demand
    ) -> Sequence[int]:
        """Begins to read what `moe_index`, the layer after the demand's, will want, as soon as
        all of the demand is in slots or queued. Returns what is left to do of it."""
        if not foreseen or not demand.all_begun:
            return foreseen
        row, room = self._rows[moe_index], self._ring(self.pool.usable(self.pool.region(moe_index)))
        here = [expert for expert in foreseen if row[expert] >= 0]
        absent = [expert for expert in foreseen if row[expert] < 0]
        self._look_ahead(moe_index, here + absent[:room])
        return ()

    def _ring(self, usable: int) -> int:
        # Half of a small pool is left to the hot experts of other layers.
        return max(SMALL_RING, min(self.ring, usable // 2))

    def _demand(self, moe_index: int, experts: Slots) -> Demand:
        missing = experts[self._rows[moe_index].take(experts) < 0]
        self._count(moe_index, missing.tolist(), routed=experts.size)
        return Demand(self._lanes, moe_index, experts, purpose=self._stage, stats=self._counted)

    def _count(self, moe_index: int, missing: list[int], *, routed: int) -> None:
        self._counted.misses += len(missing)
        self._counted.hits += routed - len(missing)
        for expert in missing:
            flat = self.pool.flat(moe_index, expert)
            self._counted.loan_misses += bool(self._forgotten[flat])
            self._forgotten[flat] = self._refilled[flat] = False

    # -- heat

    def touch(
        self,
        moe_index: int,
        experts: Slots,
        counts: NDArray[np.integer] | None = None,
        recent: tuple[Slots, NDArray[np.integer]] | None = None,
    ) -> None:
        """Tells the policy what the router chose: `experts` of one layer, in a prompt chunk
        distinct and with `counts` (tokens each), in a decode window as routed.

        `recent` is what the chunk's last tokens chose, a part of `counts`: the policy hears of it
        after the rest, so that decode starts with what the end of the prompt wanted.
        """
        if counts is None or recent is None:
            self.policy.touch(moe_index, experts, counts)
        else:
            earlier = counts.copy()
            earlier[np.searchsorted(experts, recent[0])] -= recent[1]
            before = earlier > 0
            self.policy.touch(moe_index, experts[before], earlier[before])
            self.policy.touch(moe_index, *recent)
        self._note(moe_index, experts, counts)
        if self._refills_unused:
            self._note_refill_hits(experts + self._bases[moe_index])

    def _note(self, moe_index: int, experts: Slots, counts: NDArray[np.integer] | None) -> None:
        if self.recorder is not None:
            self.recorder.add(moe_index, experts if counts is None else np.repeat(experts, counts))
        if self.routing is not None:
            self.routing.begin(self._stage, self.pool.table)
            self.routing.add(moe_index, experts, counts)

    def _note_refill_hits(self, flat: NDArray[np.integer]) -> None:
        hits = int(self._refilled[np.unique(flat)].sum())
        self._stats.refill_hits += hits
        self._refill.books.saved_misses += hits
        self._refilled[flat] = False
        # In this order: a lane may add to them meanwhile.
        self._refills_unused = False
        self._refills_unused = bool(self._refilled.any())

    # -- filling the pool

    def warm(self, *, progress: Callable[[int, int], None] | None = None) -> None:
        """Fills the free slots, hottest experts first, on all lanes, and waits for it.

        `progress(done, total)` in bytes of slots. A read that fails is reported by `on_event`
        and leaves its slot empty. Interrupted, it leaves the rest empty.
        """
        start = perf_counter_ns()
        with self._lanes.lock:
            total = self._refill.start("warm", lanes=self._io_lanes)
            self._lanes.wake_lanes()
        try:
            while self._refill.active:
                with self._lanes.lock:
                    if self._refill.active:
                        self._lanes.wait()
                if progress is not None:
                    progress(self._refill.books.filled_bytes, total)
        finally:
            self._stop_refill()
            self._stats.warm_ns += perf_counter_ns() - start

    def refill(self) -> float:
        """Starts to fill the free slots as the refill policy says, hottest experts first.

        Returns the milliseconds waited: 0 unless the policy is `blocking`.
        """
        if self.refill_mode == "lazy":
            return 0.0
        blocking = self.refill_mode == "blocking"
        with self._lanes.lock:
            if not self._refill.active:
                self._refilled[:] = False
                self._refill.start("refill", lanes=self._io_lanes if blocking else 1)
            self._lanes.wake_lanes()
        return self._wait_for_refill() if blocking else 0.0

    def _wait_for_refill(self) -> float:
        start = perf_counter_ns()
        try:
            with self._lanes.lock:
                while self._refill.active:
                    self._lanes.wait()
        finally:
            waited = perf_counter_ns() - start
            self._stats.refill_waited_ns += waited
            self._refill.books.waited_ns += waited
        return waited / 1e6

    def refill_state(self) -> RefillState:
        """Where the latest refill (or `warm`) stands."""
        with self._lanes.lock:
            return self._refill.state()

    @property
    def refill_books(self) -> RefillBooks:
        """The latest refill's; kept up to date until the next loan."""
        return self._refill.books

    def _stop_refill(self) -> None:
        with self._lanes.lock:
            self._refill.stop()

    # -- lending

    def lendable_bytes(self) -> int:
        """How much `lend` can give."""
        with self._lanes.lock:
            return lending.lendable_bytes(self.pool)

    def loan_extents(self, nbytes: int) -> tuple[tuple[int, int], ...]:
        """The extents that `lend(nbytes)` would give, without lending: ask, then lend once."""
        with self._lanes.lock:
            return lending.extents(self.pool, nbytes)

    def lend(self, nbytes: int) -> Loan:
        """Lends at least `nbytes` of whole slots (see lending.py), one loan at a time.

        Ends the refill and waits for the reads in flight. Nothing may be pinned. Raises
        SlotwiseError when the pool cannot give that much, StoreError while a read hangs.
        """
        with self._lanes.lock:
            self._refill.stop()
            self._ahead.drop()
            while not self._lanes.idle:
                self._lanes.wait()
            self._lanes.check_answered()
            self._refill.books.superseded = True
            loan = lending.lend(self.pool, nbytes, arena=self._arena)
        self._forgotten[:] = False
        self._forgotten[loan.forgotten] = True
        self._stats.lent_slots += loan.price.slots_lent
        self._stats.forgotten_experts += loan.price.experts_forgotten
        self._stats.moved_slots += loan.price.experts_moved
        self._stats.moved_bytes += loan.price.bytes_moved
        return loan

    def give_back(self, loan: Loan) -> None:
        """The lent slots are free again, and empty."""
        with self._lanes.lock:
            lending.give_back(self.pool, loan)
            self.pool.sweep(None)

    # -- books

    def snapshot(self) -> Stats:
        """A copy of all counters so far; subtract two of them to get those in between."""
        with self._lanes.lock:
            self._stats.evictions = self.pool.evictions
            return self._stats.copy()

    @property
    def decode_wait_ns(self) -> int:
        """Time decode stood still for reads so far; cheap enough for every window."""
        return self._stats.decode.wait_ns

    def check_conservation(self) -> None:
        """Raises PoolError when free + loading + resident + lent is not all slots."""
        with self._lanes.lock:
            self.pool.check_conservation()

    def close(self) -> None:
        """Ends the lanes after the reads in flight, drops queued ones and closes the store."""
        self._lanes.close()
        self._store.close()

    def _settled(self, read: Read) -> None:
        """Called by a lane, with the lock held, for every read that is done or failed."""
        done = read.state is ReadState.DONE
        self._stats.failed_reads += not done
        if read.purpose == "ahead":
            self._counted.bytes_read += read.nbytes
            self._counted.mirror_hits += done and not read.nbytes
            self._ahead.stats.bytes += read.nbytes
            return
        if read.purpose in DEMAND:
            stage = self._stats.read if read.purpose == "read" else self._stats.decode
            stage.bytes_read += read.nbytes
            stage.mirror_hits += done and not read.nbytes
            return
        self._refill.settled(read)
        if read.purpose == "warm":
            self._stats.warm_slots += done
            self._stats.warm_bytes += read.nbytes
            return
        self._stats.refill_slots += done
        self._stats.refill_bytes += read.nbytes
        self._stats.refill_ns += read.ns
        if done:
            self._refilled[self.pool.flat(read.moe_index, read.expert)] = True
            self._refills_unused = True


def _seeded_policy(name: str, layout: ExpertLayout, profile: Profile | None) -> Policy:
    policy = make_policy(name, layout)
    if profile is not None:
        if profile.shape != policy.heat.shape:
            raise PoolError(f"profile of {profile.shape}, expected {policy.heat.shape}")
        policy.seed(profile.counts)
    return policy


def _refill_mode(name: str) -> str:
    if name not in REFILL_MODES:
        known = ", ".join(REFILL_MODES)
        raise UsageError(
            f"there is no refill policy named {name!r}", next_step=f"Use one of: {known}."
        )
    return name


def _ignore(name: str, **fields: object) -> None:
    pass


def _nobody_stops() -> None:
    pass
