"""The books of the pool: who owns which slot, who is evicted, and that nothing gets lost."""

from __future__ import annotations

import numpy as np
import pytest
from experts.fakes import PAGE, make_layout

from slotwise.errors import SlotwiseError
from slotwise.experts.policy import DecayedLfu
from slotwise.experts.pool import Pool, PoolError, SlotCounts, minimum_slots, region_offsets
from slotwise.weights.layout import ExpertLayout

TWO_CLASSES = make_layout(layers=3, class_of=(0, 1, 0))


def make_pool(layout: ExpertLayout, *slots: int) -> Pool:
    return Pool(layout, slots, policy=DecayedLfu(layout))


def fill(pool: Pool, moe_index: int, *experts: int) -> list[int]:
    slots = []
    for expert in experts:
        slot = pool.reserve(moe_index, expert)
        assert slot is not None
        pool.publish(moe_index, expert)
        slots.append(slot)
    return slots


def test_classes_lie_one_after_the_other_in_whole_pages() -> None:
    pool = make_pool(TWO_CLASSES, 5, 4)
    assert region_offsets(TWO_CLASSES, (5, 4)) == [0, 5 * PAGE, 5 * PAGE + 4 * 2 * PAGE]
    assert pool.slot_offset(0, 4) == 4 * PAGE
    assert pool.slot_offset(1, 3) == 5 * PAGE + 3 * 2 * PAGE
    assert pool.arena_bytes == 13 * PAGE


def test_a_slot_goes_from_free_through_loading_to_resident_and_back() -> None:
    pool = make_pool(TWO_CLASSES, 5, 4)
    slot = pool.reserve(1, 7)
    assert slot is not None
    assert pool.counts(1) == SlotCounts(free=3, loading=1, resident=0, lent=0)
    assert pool.table[1, 7] == -1
    pool.check_conservation()
    pool.publish(1, 7)
    assert pool.counts(1) == SlotCounts(free=3, loading=0, resident=1, lent=0)
    assert pool.table[1, 7] == slot
    pool.check_conservation()
    pool.forget(pool.regions[1], slot)
    assert pool.counts(1) == SlotCounts(free=4, loading=0, resident=0, lent=0)
    assert (pool.table == -1).all()
    pool.check_conservation()


def test_an_abandoned_read_frees_its_slot() -> None:
    pool = make_pool(TWO_CLASSES, 5, 4)
    pool.reserve(0, 1)
    pool.abandon(0, 1)
    assert pool.counts(0).free == 5
    assert not pool.loading
    pool.check_conservation()


def test_low_slots_are_filled_first() -> None:
    pool = make_pool(TWO_CLASSES, 5, 4)
    assert fill(pool, 0, 3, 4, 5) == [0, 1, 2]
    pool.forget(pool.regions[0], 1)
    assert fill(pool, 2, 0) == [1]


def test_layers_of_a_class_share_its_slots_and_a_full_class_has_none() -> None:
    pool = make_pool(TWO_CLASSES, 4, 4)
    fill(pool, 0, 0, 1)
    fill(pool, 2, 0, 1)
    assert pool.reserve(0, 5) is None
    assert pool.reserve(1, 5) == 0


def test_the_coldest_unpinned_experts_make_room() -> None:
    pool = make_pool(TWO_CLASSES, 5, 4)
    fill(pool, 0, 0, 1, 2)
    fill(pool, 2, 0, 1)
    pool.policy.heat[0, :3] = [5, 1, 2]
    pool.policy.heat[2, :2] = [0, 4]
    region = pool.regions[0]
    pool.pin(region, int(pool.table[2, 0]))
    pool.make_room(region, 2)
    assert np.flatnonzero(pool.table[0] >= 0).tolist() == [0]
    assert np.flatnonzero(pool.table[2] >= 0).tolist() == [0, 1]
    assert pool.evictions == 2
    pool.check_conservation()


def test_room_is_made_only_as_far_as_pins_allow() -> None:
    pool = make_pool(TWO_CLASSES, 4, 4)
    slots = fill(pool, 0, 0, 1, 2, 3)
    region = pool.regions[0]
    pool.pin(region, np.array(slots[:3], np.int32))
    pool.pin(region, slots[0])
    assert pool.usable(region) == 1
    pool.make_room(region, 4)
    assert len(region.free) == 1
    pool.unpin(region, np.array(slots[:3], np.int32))
    pool.make_room(region, 4)
    assert len(region.free) == 3
    pool.check_conservation()


def test_a_listed_victim_that_became_hot_or_moved_on_is_passed_over() -> None:
    layout = make_layout(layers=4, experts=64)
    pool = make_pool(layout, 192)
    for moe_index in range(3):
        fill(pool, moe_index, *range(64))
    pool.policy.heat[:3] = np.arange(192).reshape(3, 64) + 1.0
    region = pool.regions[0]
    pool.make_room(region, 1)  # lists expert 0 to 3 of layer 0, evicts 0
    assert len(region.victims) == 3
    pool.policy.heat[0, 1] = 500.0
    pool.pin(region, int(pool.table[0, 2]))
    pool.forget(region, int(pool.table[0, 3]))
    pool.make_room(region, 3)
    gone = set(np.flatnonzero(pool.table[0] < 0).tolist())
    assert gone == {0, 3, 4}
    pool.check_conservation()


def test_a_prompt_read_puts_out_what_it_has_passed() -> None:
    """Even hotter experts of the layers behind, before any of the layers to come."""
    layout = make_layout(layers=3, experts=4)
    pool = make_pool(layout, 8)
    fill(pool, 0, 0, 1)
    fill(pool, 1, 0, 1)
    fill(pool, 2, 0, 1, 2, 3)
    pool.policy.heat[:] = [[4, 3, 0, 0], [6, 5, 0, 0], [1, 1, 1, 2]]
    region = pool.regions[0]
    pool.sweep(1)
    pool.make_room(region, 3)
    assert np.flatnonzero(pool.table[0] >= 0).tolist() == []
    assert np.flatnonzero(pool.table[1] >= 0).tolist() == [0]
    pool.pin(region, int(pool.table[1, 0]))
    pool.make_room(region, 4)  # nothing else is behind: the coldest of what is to come
    assert len(region.free) == 4
    assert pool.table[2, 3] >= 0
    pool.unpin(region, int(pool.table[1, 0]))
    pool.sweep(None)
    pool.make_room(region, 5)  # the read is over, heat alone counts again
    assert pool.table[1, 0] >= 0
    pool.check_conservation()


def test_too_few_slots_are_refused_with_the_smallest_that_works() -> None:
    assert minimum_slots(TWO_CLASSES) == [4, 4]
    assert minimum_slots(make_layout(layers=1, experts=3, used=2)) == [3]
    with pytest.raises(SlotwiseError, match="class 1 gets 3 expert slots; expected at least 4"):
        make_pool(TWO_CLASSES, 4, 3)


def _lose_a_slot(pool: Pool) -> None:
    pool.regions[0].free.pop()


def _show_a_wrong_slot(pool: Pool) -> None:
    pool.table[0, 0] = 2


def _forget_the_owner(pool: Pool) -> None:
    pool.regions[0].owner[0] = -1


def _unpin_twice(pool: Pool) -> None:
    pool.unpin(pool.regions[0], 0)


def _show_in_two_places(pool: Pool) -> None:
    pool.table[0, 5] = pool.table[0, 0]


@pytest.mark.parametrize(
    "damage",
    [_lose_a_slot, _show_a_wrong_slot, _forget_the_owner, _unpin_twice, _show_in_two_places],
)
def test_books_that_do_not_balance_are_noticed(damage) -> None:
    pool = make_pool(TWO_CLASSES, 5, 4)
    fill(pool, 0, 0, 1)
    pool.check_conservation()
    damage(pool)
    with pytest.raises(PoolError, match=r"slot class 0: .*expected"):
        pool.check_conservation()
