"""Sizes come at random, arms take turns, every sample is planned once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from slotwise.ladder.schedule import schedule

SIZES = (75, 512, 2048)


@given(
    arms=st.integers(1, 4), samples=st.integers(1, 7), starts=st.integers(1, 4),
    seed=st.integers(), processes=st.booleans(),
)  # fmt: skip
def test_every_sample_is_planned_once(
    arms: int, samples: int, starts: int, seed: int, processes: bool
) -> None:
    blocks = schedule(
        arms=arms, sizes=SIZES, samples=samples, seed=seed, starts=starts, processes=processes
    )
    steps = [step for block in blocks for step in block.steps]
    warm = Counter((s.arm, s.round, s.size) for s in steps if s.round)
    assert warm == {(a, r, n): 1 for a in range(arms) for r in range(1, samples + 1) for n in SIZES}
    cold = Counter((s.arm, s.start, s.size) for s in steps if not s.round)
    assert set(cold.values()) == {1}
    begun = {(s.arm, s.start) for s in steps}
    assert {(a, k) for a, k, _ in cold} == begun  # every start begins with its cold round
    for block in blocks:
        assert {s.round for s in block.steps[: len(SIZES)]} == {0}


def test_arms_of_one_server_alternate_within_a_size() -> None:
    (block,) = schedule(arms=2, sizes=SIZES, samples=2, seed=1, starts=1, processes=False)
    for k in range(0, len(block.steps), 2):
        first, second = block.steps[k : k + 2]
        assert (first.round, first.size) == (second.round, second.size)
        assert [first.arm, second.arm] == ([0, 1] if first.round % 2 == 0 else [1, 0])


def test_arms_that_are_processes_alternate_in_blocks() -> None:
    blocks = schedule(arms=3, sizes=SIZES, samples=6, seed=1, starts=2, processes=True)
    assert [b.arm for b in blocks] == [0, 1, 2, 2, 1, 0]
    assert blocks[0].steps[3:] != blocks[-1].steps[3:]
    # within one turn all arms have the same order, so that they can be paired
    orders = {tuple((s.round, s.size) for s in b.steps) for b in blocks[:3]}
    assert len(orders) == 1


def test_sizes_are_shuffled_by_the_seed() -> None:
    def order(seed: int) -> list[int]:
        (block,) = schedule(arms=1, sizes=SIZES, samples=9, seed=seed, starts=1, processes=False)
        return [s.size for s in block.steps]

    assert order(1) == order(1)
    assert order(1) != order(2)
