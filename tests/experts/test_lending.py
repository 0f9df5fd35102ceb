"""A loan takes the tail of the pool, keeps the hot experts and says what it did."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from experts.fakes import PAGE, Bench, ids, make_layout
from hypothesis import given, settings
from hypothesis import strategies as st

from slotwise.errors import SlotwiseError
from slotwise.experts import LoanPrice, PoolError

LAYOUT = make_layout(layers=2, experts=8, used=2)


def bench(slots: int = 8, **settings: Any) -> Bench:
    return Bench(LAYOUT, slots=(slots,), refill="lazy", **settings)


def with_heat(b: Bench, heat: list[float]) -> None:
    """Expert i of layer 0 into slot i, with the heat given."""
    b.have(0, *range(len(heat)))
    b.experts.policy.heat[0, : len(heat)] = heat
    assert b.experts.pool.table[0, : len(heat)].tolist() == list(range(len(heat)))


def all_hold(b: Bench) -> None:
    for moe_index in range(b.layout.n_moe_layers):
        for expert in b.resident(moe_index):
            assert b.holds(moe_index, expert, int(b.experts.pool.table[moe_index, expert]))
    b.experts.check_conservation()


def test_the_loan_is_one_extent_at_the_end_and_rounded_up_to_slots() -> None:
    with bench() as b:
        loan = b.experts.lend(2 * PAGE + 1)
        assert loan.extents == ((5 * PAGE, 3 * PAGE),)
        assert loan.slots == 3
        b.experts.check_conservation()
        assert b.experts.pool.counts(0).lent == 3
        b.experts.give_back(loan)
        assert b.experts.pool.counts(0).free == 8
        b.experts.check_conservation()


def test_the_coldest_are_forgotten_and_the_hot_of_the_tail_move_in_front() -> None:
    with bench() as b:
        with_heat(b, [5, 1, 7, 2, 6, 3, 9, 8])
        loan = b.experts.lend(3 * PAGE)
        assert b.resident(0) == {0, 2, 4, 6, 7}
        assert loan.price == LoanPrice(
            slots_lent=3, experts_forgotten=3, experts_moved=2, bytes_moved=2 * PAGE
        )
        all_hold(b)
        stats = b.experts.snapshot()
        assert (stats.lent_slots, stats.forgotten_experts, stats.moved_slots) == (3, 3, 2)
        assert stats.moved_bytes == 2 * PAGE


def test_empty_slots_are_lent_before_any_expert_is_forgotten() -> None:
    with bench() as b:
        with_heat(b, [1, 2, 3])
        price = b.experts.lend(4 * PAGE).price
        assert (price.experts_forgotten, price.experts_moved) == (0, 0)
        assert b.resident(0) == {0, 1, 2}


def test_experts_of_the_tail_move_into_free_slots_even_when_cold() -> None:
    with bench() as b:
        with_heat(b, [9, 8, 7, 6, 5, 4, 0, 0])
        for slot in (1, 2):
            b.experts.pool.forget(b.experts.pool.regions[0], slot)
        price = b.experts.lend(2 * PAGE).price
        assert (price.experts_forgotten, price.experts_moved) == (0, 2)
        assert b.resident(0) == {0, 3, 4, 5, 6, 7}
        all_hold(b)


def test_the_colder_half_is_not_worth_a_copy() -> None:
    with bench() as b:
        with_heat(b, [1, 20, 21, 22, 23, 24, 25, 2])
        price = b.experts.lend(1 * PAGE).price
        assert (price.experts_forgotten, price.experts_moved) == (1, 0)
        assert b.resident(0) == set(range(7))


def test_streaming_and_requiring_work_while_a_loan_is_out() -> None:
    with bench() as b:
        with_heat(b, [float(i) for i in range(8)])
        loan = b.experts.lend(b.experts.lendable_bytes())
        assert loan.slots == 4
        offset, nbytes = loan.extents[0]
        b.arena.view(offset, nbytes)[:] = b"\x55" * nbytes
        for moe_index in (0, 1):
            seen: list[int] = []
            for wave, slots in b.experts.stream(moe_index, np.arange(8, dtype=np.int32)):
                b.check(moe_index, wave, slots)
                seen += wave.tolist()
            assert sorted(seen) == list(range(8))
        b.have(1, 0, 5, 6, 7)
        assert (b.arena.bytes[offset : offset + nbytes] == 0x55).all()
        b.experts.give_back(loan)
        b.experts.touch(0, ids(*range(8)))
        b.have(0, *range(8))
        all_hold(b)


def test_the_class_with_most_to_give_lends_first_and_the_largest_extent_leads() -> None:
    layout = make_layout(layers=3, experts=8, used=2, class_of=(0, 1, 0))
    with Bench(layout, slots=(10, 8), refill="lazy") as b:
        assert b.experts.lendable_bytes() == 6 * PAGE + 4 * 2 * PAGE
        start = 10 * PAGE
        loan = b.experts.lend(7 * PAGE)
        assert loan.extents == ((start + 4 * 2 * PAGE, 8 * PAGE),)
        b.experts.give_back(loan)
        loan = b.experts.lend(11 * PAGE)
        assert loan.extents == ((start + 8 * PAGE, 8 * PAGE), (7 * PAGE, 3 * PAGE))
        b.experts.check_conservation()
        b.experts.give_back(loan)
        b.experts.check_conservation()


def test_asking_for_the_extents_lends_nothing_and_tells_the_truth() -> None:
    layout = make_layout(layers=3, experts=8, used=2, class_of=(0, 1, 0))
    with Bench(layout, slots=(10, 8), refill="lazy") as b:
        b.have(0, *range(8))
        told = b.experts.loan_extents(11 * PAGE)
        assert b.resident(0) == set(range(8))
        assert b.experts.pool.counts(0).lent == 0
        assert b.experts.lend(11 * PAGE).extents == told
        with pytest.raises(SlotwiseError, match="can lend"):
            b.experts.loan_extents(15 * PAGE)


def test_more_than_the_pool_can_lend_is_an_error_that_changes_nothing() -> None:
    with bench() as b:
        with_heat(b, [1] * 8)
        with pytest.raises(SlotwiseError, match=r"needs 20,480 bytes .* can lend 16,384") as caught:
            b.experts.lend(5 * PAGE)
        assert "--chunk" in caught.value.next_step
        assert b.experts.pool.counts(0).resident == 8
        b.experts.check_conservation()


def test_pinned_slots_and_a_second_loan_are_the_callers_bug() -> None:
    with bench() as b:
        b.require(0, 1)
        with pytest.raises(PoolError, match="1 slots pinned"):
            b.experts.lend(PAGE)
        b.release()
        loan = b.experts.lend(PAGE)
        with pytest.raises(PoolError, match="1 lent"):
            b.experts.lend(PAGE)
        b.experts.give_back(loan)
        with pytest.raises(PoolError, match="given back twice"):
            b.experts.give_back(loan)
        b.experts.check_conservation()


def test_a_loan_waits_for_reads_in_flight() -> None:
    with bench(io_lanes=1) as b:
        stream = b.experts.stream(0, np.arange(8, dtype=np.int32))
        next(stream)
        stream.close()
        loan = b.experts.lend(PAGE)
        assert not b.experts.pool.loading
        b.experts.give_back(loan)


@settings(max_examples=60, deadline=None)
@given(
    heat=st.lists(st.integers(0, 9), min_size=16, max_size=16),
    holes=st.sets(st.integers(0, 11), max_size=8),
    n=st.integers(1, 8),
)
def test_any_loan_keeps_the_bytes_right_and_never_keeps_fewer_than_it_can(
    heat: list[int], holes: set[int], n: int
) -> None:
    with bench(12, io_lanes=1) as b:
        b.have(0, *range(8))
        b.have(1, *range(4))
        b.experts.policy.flat_heat[:] = heat
        region = b.experts.pool.regions[0]
        for slot in holes:
            b.experts.pool.forget(region, slot)
        loan = b.experts.lend(n * PAGE)
        assert loan.price.experts_forgotten == max(0, (12 - len(holes)) - (12 - n))
        assert len(loan.forgotten) == loan.price.experts_forgotten
        all_hold(b)
        b.experts.give_back(loan)
        all_hold(b)
