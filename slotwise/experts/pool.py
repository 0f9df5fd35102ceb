"""Expert slots and the residency table: who is in which slot, and who may be put out.

No I/O and no lock of its own: `Experts` (loader.py) holds one lock around every method that the
I/O lanes use too. The rules that make reading `table` without the lock safe:

* only the engine's thread evicts, moves, lends and pins;
* the I/O lanes only take FREE slots and turn LOADING into RESIDENT (or back into FREE).

So an expert that the engine's thread sees in `table` stays there until that same thread asks for
something else. In numbers, per slot class, always: free + loading + resident + lent = all.

           reserve          publish           lend (emptied first)
    FREE ----------> LOADING ----------> RESIDENT        FREE ------> LENT
     ^ <--- abandon ---'                    |             ^ <- give back -'
     '------------------ forget ------------'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slotwise.errors import SlotwiseError
from slotwise.experts.policy import Policy
from slotwise.weights.layout import ExpertLayout

FREE, LOADING, RESIDENT, LENT = range(4)

SMALL_RING = 2
"""Slots a class needs beyond top-k, so that a read can run while another expert computes."""

VICTIMS_SHARE = 64
"""A search for victims lists 1/64 of the class at once, so that its cost is spread."""


class PoolError(AssertionError):
    """An invariant of the pool is broken: a bug in slotwise, never the user's fault."""


class Arena(Protocol):
    """Fast memory that holds all slots (kernels/backend.py)."""

    @property
    def size(self) -> int: ...

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes, page aligned when `offset` is."""
        ...


@dataclass(frozen=True, kw_only=True)
class SlotCounts:
    """The slots of one class by state; they add up to all slots."""

    free: int
    loading: int
    resident: int
    lent: int


@dataclass(kw_only=True)
class Region:
    """The slots of one class. `owner` is the flat expert id (moe_index * n_experts + expert) of
    a LOADING or RESIDENT slot, else -1. `free` is a heap: low slot ids are filled first, so the
    tail, which is lent, holds the later and colder ones."""

    index: int
    offset: int
    slot_bytes: int
    n_slots: int
    owner: NDArray[np.int32] = field(init=False)
    state: NDArray[np.int8] = field(init=False)
    pins: NDArray[np.int32] = field(init=False)
    free: list[int] = field(init=False)
    victims: list[tuple[int, int, float]] = field(default_factory=list)
    n_lent: int = 0

    def __post_init__(self) -> None:
        self.owner = np.full(self.n_slots, -1, np.int32)
        self.state = np.full(self.n_slots, FREE, np.int8)
        self.pins = np.zeros(self.n_slots, np.int32)
        self.free = list(range(self.n_slots))

    def evictable(self) -> NDArray[np.intp]:
        """Slots whose expert may be forgotten now."""
        return np.flatnonzero((self.state == RESIDENT) & (self.pins == 0))


def experts_per_class(layout: ExpertLayout) -> list[int]:
    """How many experts share the slots of each class."""
    layers = np.bincount(np.asarray(layout.class_of), minlength=len(layout.classes))
    return [int(n) * layout.n_experts for n in layers]


def minimum_slots(layout: ExpertLayout) -> list[int]:
    """The fewest slots per class that work: top-k and a small ring, or all its experts."""
    least = layout.n_used + SMALL_RING
    return [min(least, n) for n in experts_per_class(layout)]


def region_offsets(layout: ExpertLayout, slots: Sequence[int]) -> list[int]:
    """Byte offset in the arena of each class's first slot, and last the bytes of all of them.

    Slots are whole pages, so every class starts page aligned.
    """
    offsets = [0]
    for slot_class, n in zip(layout.classes, slots, strict=True):
        offsets.append(offsets[-1] + n * slot_class.slot_bytes)
    return offsets


class Pool:
    """`slots` per class, all empty. `table` [n_moe_layers, n_experts] is the slot id within the
    layer's class, or -1. Raises SlotwiseError when a class has fewer than `minimum_slots`."""

    def __init__(self, layout: ExpertLayout, slots: Sequence[int], *, policy: Policy) -> None:
        self.layout, self.policy = layout, policy
        for index, (n, least) in enumerate(zip(slots, minimum_slots(layout), strict=True)):
            if n < least:
                raise SlotwiseError(
                    f"slot class {index} gets {n} expert slots; expected at least {least}",
                    next_step="Give more memory with --memory.",
                )
        *offsets, self.arena_bytes = region_offsets(layout, slots)
        self.regions = [
            Region(index=c.index, offset=at, slot_bytes=c.slot_bytes, n_slots=n)
            for c, at, n in zip(layout.classes, offsets, slots, strict=True)
        ]
        self.table = np.full((layout.n_moe_layers, layout.n_experts), -1, np.int32)
        self.flat_table = self.table.reshape(-1)
        self.loading: dict[int, int] = {}
        """Flat id -> slot of every expert being read."""
        self.evictions = 0
        self._swept: int | None = None

    def region(self, moe_index: int) -> Region:
        """The region that holds the experts of a layer."""
        return self.regions[self.layout.class_of[moe_index]]

    def flat(self, moe_index: int, expert: int) -> int:
        """moe_index * n_experts + expert."""
        return moe_index * self.layout.n_experts + expert

    def slot_offset(self, class_index: int, slot: int) -> int:
        """Byte offset of a slot in the arena."""
        region = self.regions[class_index]
        return region.offset + slot * region.slot_bytes

    # -- the way of a slot

    def reserve(self, moe_index: int, expert: int) -> int | None:
        """Takes a free slot for an expert that is about to be read; None when there is none."""
        region, flat = self.region(moe_index), self.flat(moe_index, expert)
        if not region.free:
            return None
        slot = heappop(region.free)
        region.state[slot], region.owner[slot] = LOADING, flat
        self.loading[flat] = slot
        return slot

    def publish(self, moe_index: int, expert: int) -> None:
        """The expert's bytes are complete: from here on `table` shows it."""
        slot = self.loading.pop(self.flat(moe_index, expert))
        self.region(moe_index).state[slot] = RESIDENT
        self.table[moe_index, expert] = slot

    def abandon(self, moe_index: int, expert: int) -> None:
        """The read failed or was called off: the slot is free again."""
        slot = self.loading.pop(self.flat(moe_index, expert))
        self._empty(self.region(moe_index), slot)

    def forget(self, region: Region, slot: int) -> None:
        """A resident expert leaves the pool."""
        self.flat_table[region.owner[slot]] = -1
        self._empty(region, slot)

    def _empty(self, region: Region, slot: int) -> None:
        region.state[slot], region.owner[slot] = FREE, -1
        heappush(region.free, slot)

    # -- who may be put out

    def pin(self, region: Region, slots: NDArray[np.int32] | int) -> None:
        """Distinct slots that must keep their expert until `unpin`. Pins are counted."""
        region.pins[slots] += 1

    def unpin(self, region: Region, slots: NDArray[np.int32] | int) -> None:
        region.pins[slots] -= 1

    def pin_each(self, region: Region, slots: NDArray[np.int32]) -> None:
        """Pins slots that may repeat: a window's few, one by one, which is far faster."""
        pins = region.pins
        for slot in slots.tolist():
            pins[slot] += 1

    def unpin_each(self, region: Region, slots: NDArray[np.int32]) -> None:
        pins = region.pins
        for slot in slots.tolist():
            pins[slot] -= 1

    def make_room(self, region: Region, n: int) -> None:
        """Evicts the coldest unpinned experts until `n` slots are free, or as near as it gets."""
        while len(region.free) < n:
            slot = self._next_victim(region)
            if slot is None:
                return
            self.forget(region, slot)
            self.evictions += 1

    def _next_victim(self, region: Region) -> int | None:
        while region.victims:
            slot, owner, heat = region.victims.pop()
            still_there = region.state[slot] == RESIDENT and region.owner[slot] == owner
            if still_there and not region.pins[slot] and self.policy.flat_heat[owner] <= heat:
                return slot
        slots, n = self._candidates(region)
        if not len(slots):
            return None
        owners = region.owner.take(slots)
        coldest = self.policy.coldest(owners, n)[::-1]
        owners = owners[coldest]
        heat = self.policy.flat_heat[owners]
        listed = zip(slots[coldest].tolist(), owners.tolist(), heat.tolist(), strict=True)
        region.victims.extend(listed)
        return region.victims.pop()[0]

    def sweep(self, moe_index: int | None) -> None:
        """A prompt read has come to this layer; None when it has ended.

        It wants experts of the layers to come once more before it ends, those of the layers behind
        it not until the next token: they are put out first.
        """
        before, self._swept = self._swept, moe_index
        if before != moe_index and (before is None or moe_index is None or moe_index < before):
            for region in self.regions:
                region.victims.clear()

    def _candidates(self, region: Region) -> tuple[NDArray[np.intp], int]:
        """Slots whose experts may be put out, and how many of the coldest to list at once."""
        slots, n = region.evictable(), 1 + region.n_slots // VICTIMS_SHARE
        if self._swept is None:
            return slots, n
        behind = region.owner.take(slots) < (self._swept + 1) * self.layout.n_experts
        return (slots[behind], n) if behind.any() else (slots, 1)

    def has_room(self, region: Region, n: int, *, pinned: int) -> bool:
        """Whether `n` reads could be given slots now, with at most `pinned` slots pinned.

        Looks at the slots one by one only where it could matter.
        """
        taken = len(self.loading) + region.n_lent + pinned
        return region.n_slots - taken >= n or self.usable(region) >= n

    def usable(self, region: Region) -> int:
        """Slots that a read could be given now, evicting where needed."""
        return len(region.free) + len(region.evictable())

    # -- lending (lending.py decides, these keep the books)

    def relocate(self, region: Region, source: int, target: int) -> None:
        """A resident expert whose bytes were copied to a free slot. Leaves `free` to `take_out`."""
        flat = region.owner[source]
        region.state[target], region.owner[target] = RESIDENT, flat
        region.state[source], region.owner[source] = FREE, -1
        self.flat_table[flat] = target

    def take_out(self, region: Region, slots: range) -> None:
        """FREE slots at the end of the region become LENT."""
        region.state[slots.start : slots.stop] = LENT
        region.n_lent += len(slots)
        region.free = np.flatnonzero(region.state == FREE).tolist()

    def take_back(self, region: Region, slots: range) -> None:
        """LENT slots become FREE. They come after all free ones, so the heap stays one."""
        region.state[slots.start : slots.stop] = FREE
        region.n_lent -= len(slots)
        region.free.extend(slots)

    # -- the conservation law

    def counts(self, class_index: int) -> SlotCounts:
        """The slots of one class by state."""
        free, loading, resident, lent = np.bincount(
            self.regions[class_index].state, minlength=4
        ).tolist()
        return SlotCounts(free=free, loading=loading, resident=resident, lent=lent)

    def check_conservation(self) -> None:
        """Raises PoolError with both numbers when the books of any class do not balance."""
        for region in self.regions:
            self._check_region(region)

    def _check_region(self, region: Region) -> None:
        def equal(what: str, found: object, expected: object) -> None:
            if found != expected:
                raise PoolError(f"slot class {region.index}: {what} {found}, expected {expected}")

        counts = self.counts(region.index)
        mine = np.asarray(self.layout.class_of) == region.index
        table = np.where(mine[:, None], self.table, -1).reshape(-1)
        shown = np.flatnonzero(table >= 0)
        loading = {f: s for f, s in self.loading.items() if mine[f // self.layout.n_experts]}
        owned = {**dict(zip(shown.tolist(), table[shown].tolist(), strict=True)), **loading}
        books = len(region.free) + len(loading) + len(shown) + counts.lent
        equal("free + loading + resident + lent =", books, region.n_slots)
        equal("free slots", sorted(region.free), np.flatnonzero(region.state == FREE).tolist())
        equal("loading slots", len(loading), counts.loading)
        equal("resident slots", len(shown), counts.resident)
        for flat, slot in owned.items():
            equal(f"owner of slot {slot}", int(region.owner[slot]), flat)
        ownerless = int((region.owner < 0).sum())
        equal("slots without an owner", ownerless, counts.free + counts.lent)
        equal("slots lent", region.n_lent, counts.lent)
        equal("slots pinned below zero", int((region.pins < 0).sum()), 0)
