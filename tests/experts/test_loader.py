"""Experts come into slots by demand, stream and refill; errors and closing leave the pool sound.

No test sleeps or depends on speed: the fake store holds reads until it is told to let them go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from experts.fakes import PAGE, Bench, FakeArena, FakeStore, ids, make_layout, slots_of, wait_until

from slotwise.errors import SlotwiseError, StoreError, UsageError
from slotwise.experts import Experts, PoolError, Profile, ProfileRecorder

LAYOUT = make_layout(layers=2, experts=8, used=2)
EVERY = np.arange(8, dtype=np.int32)


def bench(slots: int = 6, **settings: Any) -> Bench:
    return Bench(LAYOUT, slots=(slots,), **settings)


# -- require


def test_require_brings_experts_in_and_a_second_time_reads_nothing() -> None:
    with bench() as b:
        first = b.require(0, 3, 5, 1)
        assert len(set(first.tolist())) == 3
        b.release()
        assert b.require(0, 5, 3).tolist() == [first[1], first[0]]
        assert len(b.store.begun) == 3
        stats = b.experts.snapshot().decode
        assert (stats.hits, stats.misses, stats.bytes_read) == (2, 3, 3 * PAGE)
        assert stats.wait_ns > 0


def test_require_as_many_as_there_are_slots_and_one_more_is_the_callers_bug() -> None:
    with bench(5, io_lanes=2) as b:
        b.require(0, 0, 1, 2, 3, 4)
        b.release()
        b.require(1, 3, 4, 5, 6, 7)
        b.release()
        with pytest.raises(PoolError, match="needs 6 more experts at once, but 5 of the 5 slots"):
            slots_of(b.experts, 0, ids(0, 1, 2, 3, 4, 5))
        assert b.resident(1) == {3, 4, 5, 6, 7}
        b.experts.check_conservation()


def test_pinned_experts_stay_until_they_are_released() -> None:
    with bench(4) as b:
        held = b.require(0, 0, 1)
        for expert in range(2, 8):
            slots_of(b.experts, 0, ids(expert))
            b.check(0, ids(0, 1), held)
        with pytest.raises(PoolError, match="needs 3 more experts at once, but 2 of the 4"):
            slots_of(b.experts, 0, ids(2, 3, 4))
        b.release()
        b.require(0, 2, 3, 4)


def test_a_pinned_expert_asked_for_again_needs_no_slot() -> None:
    with bench(4) as b:
        b.require(0, 0, 1)
        b.require(0, 0, 1, 2, 3)
        b.release()
        assert not b.experts.pool.regions[0].pins.any()


def test_routed_experts_may_repeat_and_stay_unpinned() -> None:
    with bench() as b:
        routed = ids(2, 5, 2, 2, 5, 0)
        slots = slots_of(b.experts, 1, routed)
        b.check(1, routed, slots)
        assert slots_of(b.experts, 1, routed).tolist() == slots.tolist()
        assert not b.experts.pool.regions[0].pins.any()
        stats = b.experts.snapshot().decode
        assert (stats.misses, stats.hits) == (3, 3 + 6)


def test_layers_of_two_classes_do_not_share_slots() -> None:
    layout = make_layout(layers=3, experts=4, used=1, class_of=(0, 1, 0))
    with Bench(layout, slots=(3, 3)) as b:
        for _ in range(2):
            for moe_index in range(3):
                b.have(moe_index, 0, 1, 3)
        assert b.resident(1) == {0, 1, 3}
        assert b.resident(0) == set()


def test_waits_are_counted_for_the_stage_they_happen_in() -> None:
    with bench() as b:
        b.experts.stage = "read"
        b.have(0, 1)
        before = b.experts.snapshot()
        b.experts.stage = "decode"
        b.have(0, 1, 2)
        spent = b.experts.snapshot() - before
        assert (spent.read.misses, spent.read.hits, spent.read.wait_ns) == (0, 0, 0)
        assert (spent.decode.misses, spent.decode.hits) == (1, 1)
        assert before.to_dict()["read"]["misses"] == 1


# -- failures


def test_a_failed_read_reaches_the_caller_and_the_next_request_tries_again() -> None:
    with bench() as b:
        b.store.broken = {(0, 4)}
        with pytest.raises(StoreError, match=r"experts.bin at byte 16,384: short read"):
            slots_of(b.experts, 0, ids(1, 4, 2))
        b.quiet()
        assert 4 not in b.resident(0)
        assert not b.experts.pool.regions[0].pins.any()
        b.store.broken.clear()
        b.require(0, 1, 4, 2)
        assert b.experts.snapshot().failed_reads == 1


def test_after_a_failure_reads_nobody_waits_for_are_called_off() -> None:
    with bench(io_lanes=1) as b, b.store.held():
        b.store.broken = {(0, 0)}
        failed: list[BaseException] = []
        asked = threading.Thread(
            target=_swallow, args=(lambda: slots_of(b.experts, 0, ids(0, 1, 2, 3)), failed)
        )
        asked.start()
        b.store.wait_begun(1)
        b.store.let(1)
        asked.join()
        b.store.let_all()
        b.quiet()
        assert isinstance(failed[0], StoreError)
        # The lane may have begun one more before the caller heard of the failure.
        assert b.store.begun in ([(0, 0)], [(0, 0), (0, 1)])


def test_a_lane_that_dies_is_an_error_and_not_a_wait_without_end() -> None:
    def raises(*_: object, **__: object) -> None:
        raise ZeroDivisionError("in on_event")

    def ask(experts: Experts) -> None:
        for expert in range(3):
            slots_of(experts, 0, ids(expert))

    with bench(io_lanes=1, on_event=raises) as b:
        with pytest.raises(SlotwiseError, match="an I/O lane stopped: ZeroDivisionError"):
            ask(b.experts)
        b.experts.check_conservation()


def test_any_exception_of_a_store_reaches_the_caller() -> None:
    class Odd(FakeStore):
        def read(self, moe_index: int, expert: int, target: memoryview) -> int:
            raise MemoryError

    experts = Experts(Odd(LAYOUT), FakeArena(6 * PAGE), slots=(6,))
    for _ in range(8):
        with pytest.raises(MemoryError):
            slots_of(experts, 0, ids(0))
    experts.check_conservation()
    experts.close()


# -- stream


def streamed(b: Bench, moe_index: int, experts: np.ndarray) -> list[int]:
    """The experts in the order they came, each wave checked."""
    came: list[int] = []
    for wave, slots in b.experts.stream(moe_index, experts):
        b.check(moe_index, wave, slots)
        came += wave.tolist()
    return came


def test_a_stream_begins_with_what_is_resident_while_reads_go_on() -> None:
    with bench(io_lanes=2) as b:
        b.have(0, 2, 6)
        with b.store.held():
            stream = b.experts.stream(0, ids(0, 1, 2, 3, 6))
            wave, slots = next(stream)
            assert wave.tolist() == [2, 6]
            b.store.wait_begun(4)
            b.check(0, wave, slots)
            b.store.let_all()
            rest = [expert for wave, _ in stream for expert in wave.tolist()]
        assert sorted(rest) == [0, 1, 3]


@pytest.mark.parametrize("slots", [4, 5, 6, 16])
@pytest.mark.parametrize("policy", ["lru", "lfu", "two-rate"])
def test_a_stream_covers_every_expert_once_whatever_the_pool(slots: int, policy: str) -> None:
    with bench(slots, policy=policy) as b:
        for _ in range(3):
            for moe_index in (0, 1):
                b.experts.touch(moe_index, EVERY, np.full(8, 3))
                assert sorted(streamed(b, moe_index, EVERY)) == EVERY.tolist()
        assert not b.experts.pool.regions[0].pins.any()


def test_an_empty_stream_and_one_of_residents_only() -> None:
    with bench() as b:
        assert streamed(b, 0, ids()) == []
        b.have(0, 1)
        assert streamed(b, 0, ids(1)) == [1]


def test_a_stream_holds_no_more_than_the_ring_for_missing_experts() -> None:
    with bench(8, ring=4, io_lanes=4) as b:
        b.have(1, *range(4))
        stream = b.experts.stream(0, EVERY)
        most = 0
        for wave, _ in stream:
            assert len(wave) <= 2
            most = max(most, int((b.experts.pool.regions[0].pins > 0).sum()))
        assert most == 4


def test_a_wave_stays_while_the_rest_of_a_tight_pool_is_streamed() -> None:
    with bench(4, io_lanes=2) as b:
        b.have(0, 0, 1, 2, 3)
        stream = b.experts.stream(0, EVERY)
        wave, slots = next(stream)
        assert wave.tolist() == [0, 1, 2, 3]
        b.quiet()
        b.check(0, wave, slots)
        assert sorted(e for wave, _ in stream for e in wave.tolist()) == [4, 5, 6, 7]


def test_the_hot_set_survives_a_long_prompt_over_cold_experts() -> None:
    layout = make_layout(layers=2, experts=32, used=2)
    with Bench(layout, slots=(12,)) as b:
        hot = range(6)
        for _ in range(40):
            b.experts.touch(0, ids(*hot))
        b.have(0, *hot)
        every = np.arange(32, dtype=np.int32)
        b.experts.touch(1, every, np.ones(32, np.int64))
        assert sorted(streamed(b, 1, every)) == every.tolist()
        assert b.resident(0) == set(hot)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_stream_closed_early_lets_go_of_everything(after: int) -> None:
    with bench(io_lanes=1, ring=4) as b:
        b.have(0, 5)
        stream = b.experts.stream(0, EVERY)
        for _ in range(after):
            next(stream)
        stream.close()
        assert not b.experts.pool.regions[0].pins.any()
        b.quiet()
        begun = len(b.store.begun)
        b.require(1, 0, 1, 2, 3, 4, 5)
        assert len(b.store.begun) == begun + 6


def test_a_stream_inside_a_stream_may_be_closed_without_harm_to_the_outer_one() -> None:
    with bench(8, io_lanes=1) as b:
        b.have(0, 7)
        with b.store.held():
            outer = b.experts.stream(0, EVERY)
            assert next(outer)[0].tolist() == [7]
            inner = b.experts.stream(0, ids(7, 1))
            assert next(inner)[0].tolist() == [7]
            inner.close()
            b.store.let_all()
            rest = [expert for wave, _ in outer for expert in wave.tolist()]
        assert sorted(rest) == list(range(7))


def test_a_read_error_ends_the_stream_and_the_next_one_works() -> None:
    with bench() as b:
        b.store.broken = {(0, 6)}
        with pytest.raises(StoreError, match="short read"):
            streamed(b, 0, EVERY)
        b.quiet()
        assert not b.experts.pool.regions[0].pins.any()
        b.store.broken.clear()
        assert sorted(streamed(b, 0, EVERY)) == EVERY.tolist()


# -- refill and warm


def test_without_a_profile_the_pool_is_warmed_layer_by_layer_in_turn() -> None:
    with bench(6, io_lanes=1) as b:
        seen: list[tuple[int, int]] = []
        b.experts.warm(progress=lambda done, total: seen.append((done, total)))
        assert b.store.begun == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
        assert seen[-1] == (6 * PAGE, 6 * PAGE)
        b.check(0, ids(0, 1, 2), b.experts.pool.table[0, :3])
        stats = b.experts.snapshot()
        assert (stats.warm_slots, stats.warm_bytes, stats.refill_slots) == (6, 6 * PAGE, 0)


def test_a_profile_says_who_is_warmed_first() -> None:
    counts = np.zeros((2, 8), np.int64)
    counts[0, 6], counts[1, 3], counts[1, 1], counts[0, 2] = 900, 500, 450, 20
    profile = Profile(counts=counts, model_name="m", model_digest="d")
    with bench(4, io_lanes=1, profile=profile) as b:
        b.experts.warm()
        assert b.store.begun == [(0, 6), (1, 3), (1, 1), (0, 2)]


def test_warming_a_pool_with_room_for_all_stops_when_all_are_there() -> None:
    with bench(20) as b:
        b.store.broken = {(1, 7)}
        b.experts.warm()
        assert b.experts.pool.counts(0).resident == 15
        b.store.broken.clear()
        b.experts.warm()
        assert b.experts.pool.counts(0).resident == 16
        b.experts.warm()
        assert len(b.store.begun) == 17


def lend_and_return(b: Bench, slots: int = 2) -> None:
    b.experts.give_back(b.experts.lend(slots * PAGE))


def test_a_deferred_refill_is_not_waited_for_and_takes_the_hottest_first() -> None:
    with bench(8, io_lanes=2) as b:
        b.experts.touch(1, ids(4, 4, 4, 2, 2, 7))
        with b.store.held():
            assert b.experts.refill() == 0.0
            b.store.wait_begun(1)
            state = b.experts.refill_state()
            assert (state.active, state.queued, state.done) == (True, 8, 0)
            b.store.let_all()
        b.quiet()
        assert b.store.begun[:3] == [(1, 4), (1, 2), (1, 7)]
        state = b.experts.refill_state()
        assert (state.active, state.queued, state.done, state.bytes) == (False, 0, 8, 8 * PAGE)
        assert state.waited_ns == 0
        assert b.experts.snapshot().refill_slots == 8


def test_a_blocking_refill_returns_when_the_pool_is_full() -> None:
    with bench(refill="blocking") as b:
        waited = b.experts.refill()
        assert waited > 0
        assert b.experts.pool.counts(0).resident == 6
        assert b.experts.refill_state().waited_ns == pytest.approx(waited * 1e6)
        assert b.experts.snapshot().refill_waited_ns == b.experts.refill_state().waited_ns
        assert b.experts.refill() >= 0  # nothing to do is no reason to hang


def test_a_lazy_refill_does_nothing() -> None:
    with bench(refill="lazy") as b:
        assert b.experts.refill() == 0.0
        b.quiet()
        assert b.store.begun == []


def test_a_refill_never_evicts() -> None:
    with bench() as b:
        b.have(0, 0, 1, 2)
        for _ in range(3):
            b.experts.touch(1, EVERY)
        b.experts.refill()
        b.quiet()
        assert b.resident(0) == {0, 1, 2}
        assert len(b.resident(1)) == 3
        assert b.experts.snapshot().evictions == 0


def test_demand_overtakes_the_refill() -> None:
    with bench(6, io_lanes=1) as b:
        b.experts.touch(1, EVERY)
        with b.store.held():
            b.experts.refill()
            b.store.wait_begun(1)
            asked = threading.Thread(target=slots_of, args=(b.experts, 0, ids(3, 4)))
            asked.start()
            b.wait_queued(2)
            b.store.let_all()
            asked.join()
        assert b.store.begun[1:3] == [(0, 3), (0, 4)]
        b.release()
        b.quiet()
        assert b.experts.pool.counts(0).resident == 6


def test_demand_for_an_expert_the_refill_is_reading_waits_for_that_read() -> None:
    with bench(io_lanes=1) as b:
        b.experts.touch(1, ids(4))
        with b.store.held():
            b.experts.refill()
            b.store.wait_begun(1)
            b.store.let_all()
            b.require(1, 4)
        b.quiet()
        assert b.store.begun.count((1, 4)) == 1


def test_demand_for_an_expert_the_refill_has_planned_is_read_at_once() -> None:
    with bench(8, io_lanes=1) as b:
        b.experts.touch(1, np.arange(6, dtype=np.int32))
        with b.store.held():
            b.experts.refill()
            b.store.wait_begun(1)
            first = b.store.begun[0][1]
            last = next(e for e in (5, 4) if e != first)
            asked = threading.Thread(target=slots_of, args=(b.experts, 1, ids(last)))
            asked.start()
            b.wait_queued(1)
            b.store.let(1)
            b.store.wait_begun(2)
            assert b.store.begun[1] == (1, last)
            b.store.let_all()
            asked.join()
        b.quiet()
        assert b.store.begun.count((1, last)) == 1


def test_a_failing_expert_does_not_stop_the_refill_and_is_reported() -> None:
    events: list[dict[str, Any]] = []
    with bench(6, on_event=lambda name, **fields: events.append(fields)) as b:
        b.store.broken = {(1, 4)}
        b.experts.touch(1, ids(4, 4, 5))
        b.experts.refill()
        b.quiet()
        state = b.experts.refill_state()
        assert (state.done, state.failed) == (6, 1)
    failed = [event for event in events if event["error"]]
    assert [type(event["error"]) for event in failed] == [StoreError]
    assert failed[0]["purpose"] == "refill"
    assert all(event["end_ns"] >= event["start_ns"] for event in events)


def drop(b: Bench, moe_index: int, expert: int) -> None:
    pool = b.experts.pool
    pool.forget(pool.region(moe_index), int(pool.table[moe_index, expert]))


def test_the_next_loan_ends_the_refill() -> None:
    with bench(8, io_lanes=1) as b:
        with b.store.held():
            b.experts.refill()
            b.store.wait_begun(1)
            lending = threading.Thread(target=lend_and_return, args=(b,))
            lending.start()
            wait_until(lambda: not b.experts.refill_state().active)
            b.store.let_all()
            lending.join()
        b.quiet()
        assert len(b.store.begun) == 1
        b.experts.refill()
        b.quiet()
        assert b.experts.pool.counts(0).resident == 8


def test_a_deferred_refill_takes_one_lane_and_only_while_no_demand_is_read() -> None:
    with bench(8, io_lanes=2) as b, b.store.held():
        b.experts.refill()
        b.store.wait_begun(1)
        assert not b.spare_lane_has_work()
        asked = threading.Thread(target=slots_of, args=(b.experts, 0, ids(7)))
        asked.start()
        b.store.wait_begun(2)
        b.experts._refill._in_flight -= 1  # as if its read were done
        assert not b.spare_lane_has_work()
        b.experts._refill._in_flight += 1
        b.store.let_all()
        asked.join()
        b.release()


def test_a_blocking_refill_takes_all_lanes() -> None:
    with bench(8, io_lanes=3, refill="blocking") as b, b.store.held():
        waiting = threading.Thread(target=b.experts.refill)
        waiting.start()
        b.store.wait_begun(3)
        b.store.let_all()
        waiting.join()


def test_the_end_of_a_chunk_is_heard_of_after_the_rest() -> None:
    with bench(6) as b, bench(6) as parts:
        whole = b.experts.policy.heat[0].copy()
        b.experts.touch(0, ids(1, 2, 5), np.array([4, 9, 1]), (ids(2, 5), np.array([3, 1])))
        parts.experts.touch(0, ids(1, 2), np.array([4, 6]))
        parts.experts.touch(0, ids(2, 5), np.array([3, 1]))
        assert (b.experts.policy.heat[0] == parts.experts.policy.heat[0]).all()
        assert (b.experts.policy.heat[0] != whole).any()
        parts.experts.touch(0, ids(1), None)


def test_what_a_loan_cost_and_a_refill_saved_is_counted() -> None:
    with bench(6) as b:
        for expert in range(6):
            b.experts.touch(0, ids(*range(expert, 6)))
        b.have(0, *range(6))
        lend_and_return(b)
        assert b.resident(0) == {2, 3, 4, 5}
        for _ in range(2):
            b.have(0, 1)
            assert b.experts.snapshot().decode.loan_misses == 1
            drop(b, 0, 1)
        b.have(0, 1)
        b.experts.refill()
        b.quiet()
        assert b.resident(0) == {0, 1, 2, 3, 4, 5}
        before = b.experts.snapshot()
        b.experts.touch(0, ids(0, 0, 4))
        b.experts.touch(0, ids(0, 1))
        assert (b.experts.snapshot() - before).refill_hits == 1


def test_a_refilled_expert_that_left_before_its_use_saved_nothing() -> None:
    with bench(16) as b:
        b.experts.refill()
        b.quiet()
        drop(b, 0, 3)
        b.have(0, 3)
        b.experts.touch(0, ids(3))
        assert b.experts.snapshot().refill_hits == 0
        b.experts.touch(0, ids(4, 3))
        assert b.experts.snapshot().refill_hits == 1


def test_a_recorder_counts_routed_experts_and_chunks_alike() -> None:
    with bench() as b:
        recorder = ProfileRecorder(LAYOUT)
        b.experts.recorder = recorder
        b.experts.touch(0, ids(1, 1, 4))
        b.experts.touch(0, ids(1, 6), np.array([3, 2]))
        b.experts.recorder = None
        b.experts.touch(0, ids(1))
        counts = recorder.profile(model_name="m", model_digest="d").counts
        assert counts.tolist() == [[0, 5, 0, 0, 1, 0, 2, 0], [0] * 8]


# -- close


def test_close_drops_queued_reads() -> None:
    b = bench(6, io_lanes=1)
    with b.store.held():
        stream = b.experts.stream(0, np.arange(6, dtype=np.int32))
        failed: list[BaseException] = []
        asked = threading.Thread(target=_swallow, args=(lambda: list(stream), failed))
        asked.start()
        b.store.wait_begun(1)
        closing = threading.Thread(target=b.experts.close)
        closing.start()
        wait_until(lambda: b.experts._lanes._closing)
        b.store.let_all()
        closing.join()
    assert b.store.begun == [(0, 0)]
    assert b.store.closed
    assert not b.experts.pool.loading
    asked.join()
    b.experts.check_conservation()
    assert isinstance(failed[0], PoolError)


def test_close_frees_the_slots_of_reads_that_never_began() -> None:
    b = bench(io_lanes=1)
    b.have(0, 7)
    stream = b.experts.stream(0, EVERY)
    with b.store.held():
        next(stream)
        b.store.wait_begun(2)
        closing = threading.Thread(target=b.experts.close)
        closing.start()
        wait_until(lambda: b.experts._lanes._closing)
        b.store.let_all()
        closing.join()
    assert not b.experts.pool.loading
    b.experts.check_conservation()
    stream.close()
    assert not b.experts.pool.regions[0].pins.any()
    b.experts.check_conservation()


def _swallow(call: Callable[[], Any], failed: list[BaseException]) -> None:
    try:
        call()
    except (PoolError, StoreError) as error:
        failed.append(error)


def test_asking_after_close_is_an_error() -> None:
    b = bench()
    b.experts.close()
    with pytest.raises(PoolError, match="after close"):
        slots_of(b.experts, 0, ids(1))
    b.experts.check_conservation()


def test_wrong_settings_are_named() -> None:
    with pytest.raises(UsageError, match="sometimes"):
        bench(refill="sometimes")
    with pytest.raises(PoolError, match="arena"):
        Experts(FakeStore(LAYOUT), FakeArena(PAGE), slots=(6,))
    profile = Profile(counts=np.ones((1, 8), np.int64), model_name="m", model_digest="d")
    with pytest.raises(PoolError, match=r"profile of \(1, 8\), expected \(2, 8\)"):
        bench(profile=profile)
