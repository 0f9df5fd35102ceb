"""Whatever happens in whatever order, a slot that was handed out holds the right expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from experts.fakes import PAGE, Bench, make_layout, slots_of
from hypothesis import given, settings
from hypothesis import strategies as st

from slotwise.errors import StoreError
from slotwise.experts import Loan

LAYOUT = make_layout(layers=4, experts=6, used=2, class_of=(0, 1, 0, 0))
LAYER = st.integers(0, 3)
SOME = st.lists(st.integers(0, 5), min_size=1, max_size=6)
FEW = st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True)

STEPS = st.one_of(
    st.tuples(st.just("require"), LAYER, FEW),
    st.tuples(st.just("routed"), LAYER, st.lists(st.integers(0, 3), min_size=1, max_size=8)),
    st.tuples(st.just("stream"), LAYER, st.sets(st.integers(0, 5)), st.integers(0, 4)),
    st.tuples(st.just("touch"), LAYER, SOME),
    st.tuples(st.just("release")),
    st.tuples(st.just("lend"), st.integers(1, 12)),
    st.tuples(st.just("give_back")),
    st.tuples(st.just("refill")),
    st.tuples(st.just("break"), st.sets(st.tuples(LAYER, st.integers(0, 5)), max_size=6)),
)


class Play:
    """Carries the steps out on `b` and checks every answer."""

    def __init__(self, b: Bench) -> None:
        self.b, self.loan = b, None
        self.loan: Loan | None = None
        self.held: list[tuple[int, np.ndarray, np.ndarray]] = []

    def step(self, name: str, *args: Any) -> None:
        action: Callable[..., None] = getattr(self, f"_{name}")
        try:
            action(*args)
        except StoreError:
            assert self.b.store.broken
        for moe_index, experts, slots in self.held:
            self.b.check(moe_index, experts, slots)
        self.b.experts.check_conservation()

    def _require(self, moe_index: int, experts: list[int]) -> None:
        self._release()
        slots = self.b.require(moe_index, *experts)
        self.held.append((moe_index, np.array(experts, np.int32), slots))

    def _routed(self, moe_index: int, routed: list[int]) -> None:
        self._release()
        ids = np.array(routed, np.int32)
        self.b.check(moe_index, ids, slots_of(self.b.experts, moe_index, ids))

    def _stream(self, moe_index: int, experts: set[int], stop_after: int) -> None:
        self._release()
        left = set(experts)
        stream = self.b.experts.stream(moe_index, np.array(sorted(experts), np.int32))
        for i, (wave, slots) in enumerate(stream):
            self.b.check(moe_index, wave, slots)
            assert set(wave.tolist()) <= left
            left -= set(wave.tolist())
            if i == stop_after:
                stream.close()
                return
        assert not left

    def _touch(self, moe_index: int, experts: list[int]) -> None:
        self.b.experts.touch(moe_index, np.array(experts, np.int32))

    def _release(self) -> None:
        self.b.release()
        self.held.clear()

    def _lend(self, pages: int) -> None:
        self._release()
        if self.loan is None and pages * PAGE <= self.b.experts.lendable_bytes():
            self.loan = self.b.experts.lend(pages * PAGE)
            for offset, nbytes in self.loan.extents:
                self.b.arena.view(offset, nbytes)[:] = b"\x33" * nbytes

    def _give_back(self) -> None:
        if self.loan is not None:
            for offset, nbytes in self.loan.extents:
                assert (self.b.arena.bytes[offset : offset + nbytes] == 0x33).all()
            self.b.experts.give_back(self.loan)
            self.loan = None

    def _refill(self) -> None:
        self.b.experts.refill()

    def _break(self, broken: set[tuple[int, int]]) -> None:
        self.b.store.broken = broken


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(STEPS, max_size=25),
    slots=st.tuples(st.integers(4, 9), st.integers(4, 6)),
    policy=st.sampled_from(["lru", "lfu", "two-rate"]),
    refill=st.sampled_from(["deferred", "blocking", "lazy"]),
    io_lanes=st.integers(1, 3),
)
def test_any_sequence_hands_out_the_right_experts(
    steps: list[tuple[Any, ...]],
    slots: tuple[int, int],
    policy: str,
    refill: str,
    io_lanes: int,
) -> None:
    with Bench(LAYOUT, slots=slots, policy=policy, refill=refill, io_lanes=io_lanes) as b:
        play = Play(b)
        for step in steps:
            play.step(*step)
        play.step("release")
        play.step("give_back")
        b.quiet()
        for moe_index in range(4):
            for expert in b.resident(moe_index):
                assert b.holds(moe_index, expert, int(b.experts.pool.table[moe_index, expert]))
