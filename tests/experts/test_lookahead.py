"""Look-ahead: what is foreseen is read behind demand, adopted or called off, and counted."""

from __future__ import annotations

import numpy as np
import pytest
from experts.fakes import PAGE, Bench, ids, make_layout

from slotwise.errors import StoreError, UsageError
from slotwise.experts.lookahead import BEFORE_FIRST_TRIAL, BETWEEN_TRIALS, EPOCH, TRIAL, Switch
from slotwise.experts.stats import AheadStats

LAYOUT = make_layout(layers=3, experts=8, used=2)


def bench(slots: int = 8, **settings: object) -> Bench:
    return Bench(LAYOUT, slots=(slots,), **settings)


def place(b: Bench, layer: int, *routed: int, foreseen: tuple[int, ...] = ()) -> None:
    slots = np.empty(len(routed), np.int32)
    if not b.experts.place(layer, ids(*routed), slots, foreseen):
        b.experts.complete()
    b.check(layer, ids(*routed), slots)


def ahead(b: Bench) -> AheadStats:
    return b.experts.snapshot().ahead


def test_what_was_foreseen_is_there_without_a_wait() -> None:
    with bench() as b:
        place(b, 0, 0, 1, foreseen=(3, 4))
        b.quiet()
        waited = b.experts.decode_wait_ns
        place(b, 1, 4, 3)
        assert b.experts.decode_wait_ns == waited
        assert len(b.store.begun) == 4
        found = ahead(b)
        assert (found.predicted, found.used, found.late, found.wasted) == (2, 2, 0, 0)
        assert found.bytes == 2 * PAGE
        decode = b.experts.snapshot().decode
        assert (decode.misses, decode.hits, decode.bytes_read) == (2, 2, 4 * PAGE)


def test_a_wrong_guess_is_counted_and_harms_nobody() -> None:
    with bench() as b:
        place(b, 0, 0, 1, foreseen=(3, 4))
        b.quiet()
        place(b, 1, 3, 5)
        assert b.resident(1) == {3, 4, 5}
        found = ahead(b)
        assert (found.used, found.wasted) == (1, 1)
        place(b, 2, 3, 5)
        assert ahead(b) == found


def test_a_read_in_flight_is_adopted_and_one_in_the_queue_is_hurried_or_called_off() -> None:
    with bench(io_lanes=1) as b:
        b.have(0, 0, 1)
        with b.store.held():
            place(b, 0, 0, 1, foreseen=(3, 4, 5))
            b.store.wait_begun(3)  # expert 3 is being read, 4 and 5 are queued
            b.store.let_all()
            place(b, 1, 4, 3)
        begun = [expert for layer, expert in b.store.begun if layer == 1]
        assert begun[:2] == [3, 4]
        assert len(begun) == len(set(begun))
        found = ahead(b)
        assert found.predicted == 3
        assert found.used + found.wasted + found.called_off == 3
        assert found.used >= 1


def test_demand_comes_first() -> None:
    """One lane; look-ahead and demand are queued together."""
    with bench(io_lanes=1) as b:
        place(b, 0, 0, 1, foreseen=(6, 7))
        assert b.store.begun[:2] == [(0, 0), (0, 1)]
        b.quiet()
        assert b.store.begun[2:] == [(1, 6), (1, 7)]


def test_it_puts_out_nobody_that_this_layer_or_the_guess_needs() -> None:
    with bench(6) as b:
        b.have(0, 0, 1)
        b.have(1, 2)
        b.have(2, 0, 1, 2)
        b.experts.touch(2, ids(0, 1))
        b.experts.touch(2, ids(0, 1))
        place(b, 0, 0, 1, foreseen=(2, 5))
        b.quiet()
        assert b.resident(0) == {0, 1}
        assert b.resident(1) == {2, 5}
        assert b.resident(2) == {0, 1}


def test_a_look_ahead_that_fails_only_matters_if_its_expert_is_wanted() -> None:
    with bench() as b:
        b.store.broken = {(1, 3)}
        place(b, 0, 0, 1, foreseen=(3,))
        b.quiet()
        place(b, 1, 4, 5)
        with pytest.raises(StoreError, match="short read"):
            place(b, 1, 3, 4)
        b.store.broken.clear()
        place(b, 1, 3, 4)


def test_a_loan_calls_off_what_is_queued() -> None:
    with bench(io_lanes=1) as b:
        b.have(0, 0, 1)
        with b.store.held():
            place(b, 0, 0, 1, foreseen=(3, 4, 5))
            b.store.wait_begun(3)
            b.store.let_all()
            loan = b.experts.lend(PAGE)
        assert len(b.resident(1)) <= 3
        b.experts.give_back(loan)
        assert not b.experts._ahead.reads


def test_closing_drops_it() -> None:
    with bench(io_lanes=1) as b:
        b.have(0, 0, 1)
        with b.store.held():
            place(b, 0, 0, 1, foreseen=(3, 4, 5))
            b.store.wait_begun(3)


def test_a_full_pool_looks_no_further() -> None:
    layout = make_layout(layers=2, experts=3, used=2)
    with Bench(layout, slots=(6,), lookahead="on") as b:
        assert b.experts.looks_ahead()
        b.have(0, 0, 1, 2)
        b.have(1, 0, 1, 2)
        assert not b.experts.looks_ahead()
    with Bench(layout, slots=(6,), lookahead="off") as b:
        assert not b.experts.looks_ahead()


def windows(switch: Switch, n: int, *, on: int, off: int) -> list[bool]:
    """`n` windows that take `on` or `off`; what the switch said before each."""
    said = []
    for _ in range(n):
        said.append(switch.on)
        switch.window(on if switch.on else off)
    return said


TRIAL_WINDOWS = EPOCH * len(TRIAL)


def test_auto_tries_both_ways_and_keeps_the_faster() -> None:
    switch = Switch("auto")
    assert windows(switch, BEFORE_FIRST_TRIAL, on=100, off=80) == [True] * BEFORE_FIRST_TRIAL
    tried = windows(switch, TRIAL_WINDOWS, on=100, off=80)
    assert tried == [on for on in TRIAL for _ in range(EPOCH)]
    assert windows(switch, BETWEEN_TRIALS, on=100, off=80) == [False] * BETWEEN_TRIALS
    windows(switch, TRIAL_WINDOWS, on=80, off=100)
    assert switch.trials == 2
    assert switch.on


def test_auto_does_not_change_its_mind_over_a_trifle_or_one_slow_window() -> None:
    switch = Switch("auto")
    windows(switch, BEFORE_FIRST_TRIAL, on=100, off=99)
    windows(switch, TRIAL_WINDOWS, on=100, off=99)
    assert (switch.trials, switch.on) == (1, True)
    windows(switch, BETWEEN_TRIALS, on=100, off=100)
    windows(switch, 1, on=100_000, off=100)
    windows(switch, TRIAL_WINDOWS - 1, on=100, off=100)
    assert (switch.trials, switch.on) == (2, True)


def test_on_and_off_never_change() -> None:
    for mode, on in (("on", True), ("off", False)):
        switch = Switch(mode)
        assert set(windows(switch, 1000, on=100, off=10)) == {on}
        assert switch.trials == 0
    with pytest.raises(UsageError, match="maybe"):
        Switch("maybe")


def test_what_is_there_is_told_before_the_rest_has_been_read() -> None:
    slots = np.empty(2, np.int32)
    with bench() as b:
        b.have(0, 0)
        before = b.experts.snapshot()
        with b.store.held():
            assert not b.experts.place(0, ids(3, 0), slots)
            assert slots[0] == -1
            assert slots[1] >= 0
        b.experts.complete()
        b.check(0, ids(3, 0), slots)
        assert b.experts.place(0, ids(3, 0), slots)
        decode = (b.experts.snapshot() - before).decode
        assert (decode.misses, decode.hits) == (1, 3)


def test_a_read_that_fails_is_raised_where_the_rest_is_waited_for() -> None:
    slots = np.empty(2, np.int32)
    with bench() as b:
        b.have(0, 0)
        b.store.broken.add((0, 3))
        assert not b.experts.place(0, ids(3, 0), slots)
        with pytest.raises(StoreError):
            b.experts.complete()
        b.store.broken.clear()
        place(b, 0, 3, 0)


def stream(b: Bench, layer: int, *experts: int, foreseen: tuple[int, ...] = ()) -> None:
    for wave, slots in b.experts.stream(layer, ids(*experts), foreseen):
        b.check(layer, wave, slots)


def test_a_prompt_read_reads_ahead_beside_its_demand() -> None:
    with bench(slots=12, io_lanes=2) as b:
        b.experts.stage = "read"
        with b.store.held():
            b.store.hold_only((0, 1))
            waves = b.experts.stream(0, ids(0, 1), (3, 4))
            b.check(0, *next(waves))
            b.store.wait_begun(4)  # while expert 1 is still being read
        for wave, slots in waves:
            b.check(0, wave, slots)
        b.quiet()
        assert b.resident(1) == {3, 4}
        stream(b, 1, 3, 4, 5)
        found = b.experts.snapshot()
        assert (found.read_ahead.used, found.read_ahead.wasted) == (2, 0)
        assert found.read_ahead.bytes == 2 * PAGE
        assert found.read.bytes_read == 5 * PAGE
        assert (found.read.misses, found.read.hits) == (3, 2)
        assert found.ahead == AheadStats()


def test_what_a_read_foresaw_is_forgotten_when_decode_begins() -> None:
    with bench(io_lanes=1) as b:
        b.experts.stage = "read"
        with b.store.held():
            b.store.hold_only((1, 3))
            waves = b.experts.stream(0, ids(0), (3, 4))
            next(waves)
            b.store.wait_begun(2)  # expert 3 of the next layer; 4 is queued
            waves.close()
            b.experts.stage = "decode"
        b.quiet()
        found = b.experts.snapshot().read_ahead
        assert (found.predicted, found.called_off, found.wasted) == (2, 1, 1)
        b.experts.check_conservation()
