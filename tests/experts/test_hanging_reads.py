"""Reads that do not return: somebody waits for a while, gets an error, and nothing else stops."""

from __future__ import annotations

import threading
from time import monotonic

import pytest
from experts.fakes import Bench, ids, make_layout, slots_of, wait_until

from slotwise.errors import StoreError

LIMIT = 0.15
HANGS = "experts.bin at byte .*: a read of one expert has not returned for 0.15 s"


def bench(*, slots: int = 10, lanes: int = 2, limit: float = LIMIT) -> Bench:
    return Bench(
        make_layout(layers=2, experts=16), slots=(slots,), io_lanes=lanes, read_limit=limit
    )


def relax(b: Bench) -> None:
    """On a busy machine a good read may take long, too."""
    b.experts._lanes._limit = 1000


def test_whoever_waits_for_it_gets_an_error() -> None:
    with bench() as b, b.store.held():
        with pytest.raises(StoreError, match=HANGS) as caught:
            slots_of(b.experts, 0, ids(3))
        assert caught.value.offset == 3 * 4096
        assert "disk" in caught.value.next_step
        assert b.experts.snapshot().failed_reads == 1
        b.experts.check_conservation()


def test_others_are_served_by_a_lane_that_takes_over() -> None:
    with bench(lanes=1) as b:
        b.have(1, 0)
        with b.store.held():
            with pytest.raises(StoreError):
                slots_of(b.experts, 0, ids(3))
            b.store.hold_only((0, 3))
            relax(b)
            b.have(0, 4)
            b.have(1, 0, 1, 2)


def test_asking_for_it_again_fails_at_once() -> None:
    with bench(limit=0.3) as b, b.store.held():
        with pytest.raises(StoreError):
            slots_of(b.experts, 0, ids(3))
        b.store.hold_only((0, 3))
        begun = len(b.store.begun)
        for _ in range(3):
            with pytest.raises(StoreError, match="has not returned"):
                slots_of(b.experts, 0, ids(3, 4))
        with pytest.raises(StoreError, match="has not returned"):
            list(b.experts.stream(0, ids(3, 5)))
        assert (0, 3) not in b.store.begun[begun:]
        relax(b)
        b.have(0, 4)


def test_its_slot_is_not_lent_while_the_system_may_write_into_it() -> None:
    with bench() as b:
        with b.store.held():
            with pytest.raises(StoreError):
                slots_of(b.experts, 0, ids(3))
            with pytest.raises(StoreError, match="has not returned"):
                b.experts.lend(4096)
        wait_until(lambda: not b.experts._lanes._reads)
        assert not b.resident(0)  # it came too late, and its slot is free again
        loan = b.experts.lend(4096)
        b.experts.give_back(loan)
        relax(b)
        b.have(0, 3)


def test_a_refill_that_hangs_ends_the_wait_for_a_loan() -> None:
    with bench() as b, b.store.held():
        b.experts.refill()
        b.store.wait_begun(1)
        with pytest.raises(StoreError, match="has not returned"):
            b.experts.lend(4096)
        assert b.experts.refill_state().failed == 1


def test_when_every_lane_hangs_nobody_waits_any_more() -> None:
    """One lane takes over for each that was there at the start, not more."""
    with bench(lanes=2, slots=16) as b, b.store.held():
        for expert in range(4):
            with pytest.raises(StoreError):
                slots_of(b.experts, 0, ids(expert))
        assert len(b.experts._lanes._threads) == 4
        begin = monotonic()
        with pytest.raises(StoreError, match="byte 0: a read"):
            slots_of(b.experts, 0, ids(9))
        assert monotonic() - begin < 10
        assert (0, 9) not in b.store.begun


def test_closing_does_not_wait_for_ever() -> None:
    b = bench(lanes=1)
    with b.store.held():
        b.experts.refill()
        b.store.wait_begun(1)
        begin = monotonic()
        b.experts.close()
        assert LIMIT < monotonic() - begin < 10
        assert b.store.closed
    for thread in b.experts._lanes._threads:
        thread.join(20)
        assert not thread.is_alive()
    b.experts.check_conservation()


class Stop(Exception):
    pass


def test_a_caller_that_gives_up_does_not_wait_for_the_read() -> None:
    with bench(limit=1000) as b, b.store.held():
        moments = iter([None, None, Stop()])

        def check() -> None:
            if stop := next(moments):
                raise stop

        b.experts.watch(check)
        with pytest.raises(Stop):
            slots_of(b.experts, 0, ids(3))
        b.experts.watch(None)
        b.store.let_all()
        b.have(0, 3)  # the read goes on, and is not begun again
        assert b.store.begun == [(0, 3)]


def test_a_slow_store_is_waited_for() -> None:
    with bench(limit=1000) as b, b.store.held():
        timer = threading.Timer(0.3, b.store.let_all)
        timer.start()
        b.have(0, 3)
        timer.join()


def test_an_expert_is_let_go_of_when_its_wait_was_given_up() -> None:
    with bench() as b, b.store.held():
        with pytest.raises(StoreError):
            slots_of(b.experts, 0, ids(3))
        assert not b.experts.pool.region(0).pins.any()
