"""Lending: the coldest expert slots become plain memory for the prompt read's buffers.

A loan is whole slots at the end of a class's region, so that it is one contiguous extent there.

    before   | A  b  C  .  d  E | f  G  H |     capitals: the hot ones, dots: free slots
    after    | A  H  C  G  d  E | lent    |     b and f are forgotten

Hot experts of the tail move in front: first into free slots, then in place of the coldest. Moves
into free slots save a read for sure. A move that only swaps who stays is made for the hotter half
of the class alone, because the prompt read waits for the copy and will need most experts anyway.

Knows no threads: `Experts.lend` calls this with the lock held and all lanes quiet.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slotwise.errors import SlotwiseError
from slotwise.experts.pool import LENT, RESIDENT, Arena, Pool, PoolError, Region, minimum_slots


@dataclass(frozen=True, kw_only=True)
class LoanPrice:
    """What taking the loan did to the pool."""

    slots_lent: int
    experts_forgotten: int
    experts_moved: int
    bytes_moved: int


@dataclass(frozen=True, kw_only=True)
class Loan:
    """Memory lent by the pool. `extents` are (offset, bytes) in the arena, the largest first."""

    extents: tuple[tuple[int, int], ...]
    price: LoanPrice
    lent: tuple[tuple[int, range], ...]
    """(class index, its lent slots), in the order of `extents`."""
    forgotten: NDArray[np.int64] = field(repr=False, compare=False)
    """Flat ids of the experts that lost their slot."""

    @property
    def slots(self) -> int:
        return self.price.slots_lent


def lendable_slots(pool: Pool) -> list[int]:
    """Per class, the slots beyond the minimum that no loan holds yet."""
    least = minimum_slots(pool.layout)
    return [
        region.n_slots - keep - pool.counts(region.index).lent
        for region, keep in zip(pool.regions, least, strict=True)
    ]


def lendable_bytes(pool: Pool) -> int:
    """How much `lend` can give."""
    per_class = zip(pool.regions, lendable_slots(pool), strict=True)
    return sum(region.slot_bytes * n for region, n in per_class)


def extents(pool: Pool, nbytes: int) -> tuple[tuple[int, int], ...]:
    """The extents (offset, bytes) that `lend` would give now, the largest first; lends nothing.

    Raises SlotwiseError when the pool cannot give that much.
    """
    return _extents(pool, _shares(pool, nbytes))


def lend(pool: Pool, nbytes: int, *, arena: Arena) -> Loan:
    """Lends whole slots that hold at least `nbytes`, from as few classes as possible.

    Raises SlotwiseError when the pool cannot give that much; PoolError when a slot is pinned or
    being read, or when another loan is out.
    """
    _check_quiet(pool)
    shares = _shares(pool, nbytes)
    lent = []
    forgotten: list[int] = []
    moved_slots = moved_bytes = 0
    for region, n in shares:
        slots = range(region.n_slots - n, region.n_slots)
        gone, moved = _vacate(pool, region, slots.start, arena=arena)
        pool.take_out(region, slots)
        forgotten += gone
        moved_slots += moved
        moved_bytes += moved * region.slot_bytes
        lent.append((region.index, slots))
    return Loan(
        extents=_extents(pool, shares),
        price=LoanPrice(
            slots_lent=sum(n for _, n in shares),
            experts_forgotten=len(forgotten),
            experts_moved=moved_slots,
            bytes_moved=moved_bytes,
        ),
        lent=tuple(lent),
        forgotten=np.asarray(forgotten, np.int64),
    )


def give_back(pool: Pool, loan: Loan) -> None:
    """The lent slots are free again, and empty."""
    for class_index, slots in loan.lent:
        region = pool.regions[class_index]
        if not (region.state[slots.start : slots.stop] == LENT).all():
            raise PoolError(f"slot class {class_index}: loan of {slots} was given back twice")
        pool.take_back(region, slots)


def _check_quiet(pool: Pool) -> None:
    for region in pool.regions:
        if region.pins.any() or (region.state == LENT).any() or pool.loading:
            raise PoolError(
                f"slot class {region.index}: {int((region.pins > 0).sum())} slots pinned, "
                f"{pool.counts(region.index).lent} lent, {len(pool.loading)} being read; "
                "expected none before a loan"
            )


def _shares(pool: Pool, nbytes: int) -> list[tuple[Region, int]]:
    """Which class lends how many slots: the class with most to give first."""
    most = zip(pool.regions, lendable_slots(pool), strict=True)
    largest_first = sorted(most, key=lambda pair: -pair[0].slot_bytes * pair[1])
    shares, left = [], nbytes
    for region, n in largest_first:
        n = min(n, -(-left // region.slot_bytes))
        if n > 0:
            shares.append((region, n))
            left -= n * region.slot_bytes
    if left > 0:
        raise SlotwiseError(
            f"the prompt read needs {nbytes:,} bytes of lent expert slots; "
            f"the pool can lend {nbytes - left:,}",
            next_step="Use a smaller --chunk or more --memory.",
        )
    return shares


def _extents(pool: Pool, shares: list[tuple[Region, int]]) -> tuple[tuple[int, int], ...]:
    return tuple(
        (pool.slot_offset(region.index, region.n_slots - n), n * region.slot_bytes)
        for region, n in shares
    )


def _vacate(pool: Pool, region: Region, first: int, *, arena: Arena) -> tuple[list[int], int]:
    """Empties the slots from `first`; returns the flat ids forgotten and how many experts moved."""
    held = np.flatnonzero(region.state == RESIDENT)
    policy = pool.policy
    tail, front = held[held >= first], held[held < first]
    tail = tail[policy.hottest(region.owner[tail], len(tail))]
    front = front[policy.coldest(region.owner[front], len(front))]
    free = np.array(sorted(slot for slot in region.free if slot < first), np.intp)

    heat = np.zeros(region.n_slots)
    heat[held] = policy.flat_heat[region.owner[held]]
    late = tail[len(free) :]
    pairs = min(len(late), len(front))
    swap = heat[late[:pairs]] > heat[front[:pairs]]
    if pairs:
        swap &= heat[late[:pairs]] >= np.median(heat[held])
    swaps = int(swap.sum())

    gone = np.concatenate([front[:swaps], late[swaps:]])
    forgotten = region.owner[gone].tolist()
    for slot in gone.tolist():
        pool.forget(region, slot)
    movers = tail[: len(free) + swaps]
    homes = np.concatenate([free, front[:swaps]])[: len(movers)]
    for source, target in zip(movers.tolist(), homes.tolist(), strict=True):
        _move(pool, region, source, target, arena=arena)
    return forgotten, len(movers)


def _move(pool: Pool, region: Region, source: int, target: int, *, arena: Arena) -> None:
    old = arena.view(pool.slot_offset(region.index, source), region.slot_bytes)
    new = arena.view(pool.slot_offset(region.index, target), region.slot_bytes)
    new[:] = old
    pool.relocate(region, source, target)
