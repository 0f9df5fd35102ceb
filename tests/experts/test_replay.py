"""A replay reads what the engine's own pool would read, and no policy reads less than Belady."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from experts.fakes import PAGE, Bench, ids, make_layout, slots_of
from hypothesis import given, settings
from hypothesis import strategies as st

from slotwise.errors import UsageError
from slotwise.experts import Routing, belady, replay
from slotwise.experts.policy import POLICIES
from slotwise.experts.routing import Call, Step

LAYOUT = make_layout(layers=3, experts=6, used=2, class_of=(0, 1, 0))
SMALL = make_layout(layers=1, experts=5, used=2)

WINDOW = st.lists(
    st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True), min_size=3, max_size=3
)
CHUNK = st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=3, max_size=3)


def window(*layers: list[int], resident: np.ndarray | None = None) -> Step:
    calls = tuple(Call(i, ids(*row), None) for i, row in enumerate(layers))
    return Step("decode", 1, calls, resident)


def chunk(*layers: set[int]) -> Step:
    calls = tuple(
        Call(i, ids(*sorted(row)), np.ones(len(row), np.int32)) for i, row in enumerate(layers)
    )
    return Step("read", 4, calls)


STEPS = st.lists(st.one_of(WINDOW.map(lambda w: window(*w)), CHUNK.map(lambda c: chunk(*c))))


def text(*windows: tuple[int, int]) -> Routing:
    """One layer of five experts."""
    return Routing(layout=SMALL, steps=tuple(window(list(pair)) for pair in windows))


@settings(deadline=None, max_examples=40)
@given(steps=st.lists(WINDOW, max_size=12), policy=st.sampled_from(sorted(POLICIES)))
def test_windows_miss_what_the_engine_misses(steps: list[list[list[int]]], policy: str) -> None:
    slots = (5, 4)
    routing = Routing(layout=LAYOUT, steps=tuple(window(*layers) for layers in steps))
    with Bench(LAYOUT, slots=slots, policy=policy) as b:
        for step in routing.steps:
            for call in step.calls:
                slots_of(b.experts, call.moe_index, call.experts)
            routed = np.stack([call.experts for call in step.calls])
            b.experts.window_done(routed, 1, looked_ahead=False)
        b.quiet()
        real = b.experts.snapshot().decode
    found = replay(routing, LAYOUT, slots, policy).decode
    assert (found.hits, found.misses, found.bytes) == (real.hits, real.misses, real.bytes_read)
    assert found.tokens == len(steps)


@settings(deadline=None, max_examples=40)
@given(STEPS, st.sampled_from(sorted(POLICIES)), st.booleans())
def test_no_policy_reads_less_than_belady(steps: list[Step], policy: str, per_layer: bool) -> None:
    routing = Routing(layout=LAYOUT, steps=tuple(steps))
    slots = (8, 4)
    best = belady(routing, LAYOUT, slots, per_layer=per_layer)
    found = replay(routing, LAYOUT, slots, policy, per_layer=per_layer)
    for step in routing.steps:
        assert best.stage(step).tokens == found.stage(step).tokens
    assert best.misses <= found.misses
    assert best.hits + best.misses == found.hits + found.misses
    assert belady(routing, LAYOUT, slots).misses <= best.misses


def fewest_misses(windows: list[tuple[int, int]], slots: int) -> int:
    """By trying everything: which sets can be resident after each window, at what cost."""
    states = {frozenset[int](): 0}
    for pair in windows:
        after: dict[frozenset[int], int] = {}
        for held, cost in states.items():
            everyone = held | set(pair)
            cost += len(set(pair) - held)
            others = everyone - set(pair)
            for n in range(min(len(others), slots - 2) + 1):
                for kept in combinations(sorted(others), n):
                    state = frozenset({*pair, *kept})
                    after[state] = min(cost, after.get(state, cost))
        states = after
    return min(states.values())


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(list(combinations(range(5), 2))), max_size=7))
def test_belady_is_the_fewest_of_all_ways(windows: list[tuple[int, int]]) -> None:
    assert belady(text(*windows), SMALL, [4]).misses == fewest_misses(windows, 4)


def test_a_chunk_may_be_larger_than_the_pool() -> None:
    layout = make_layout(layers=1, experts=12, used=2)
    everyone = set(range(12))
    routing = Routing(layout=layout, steps=(chunk(everyone), chunk(everyone)))
    assert belady(routing, layout, [4]).read.misses == 20
    assert replay(routing, layout, [4], "lfu").read.misses >= 20
    assert belady(routing, layout, [4]).read.bytes == 20 * PAGE


def test_slots_of_a_layer_of_its_own_are_not_lent_to_another() -> None:
    """All traffic is in layer 0; with a global pool it may use every slot."""
    layout = make_layout(layers=2, experts=6, used=2)
    steps = tuple(window([i % 6, (i + 1) % 6], [0, 1]) for i in range(12))
    routing = Routing(layout=layout, steps=steps)
    assert belady(routing, layout, [8]).misses == 8
    assert belady(routing, layout, [8], per_layer=True).misses > 8
    assert replay(routing, layout, [8], "lru", per_layer=True).per_layer


def test_from_snapshots_the_pool_starts_with_who_was_resident() -> None:
    resident = np.array([[True, True, True, False, False]])
    steps = (window([0, 1], resident=resident), window([3, 4]), window([0, 2], resident=resident))
    routing = Routing(layout=SMALL, steps=steps)
    for run in (belady, replay):
        assert run(routing, SMALL, [4], from_snapshots=True).decode.misses == 2
        assert run(routing, SMALL, [4]).decode.misses > 2
    everyone = make_layout(layers=1, experts=6, used=2)
    full = Routing(layout=everyone, steps=(window([0, 1], resident=np.ones((1, 6), bool)),))
    with pytest.raises(UsageError, match="6 experts were resident"):
        replay(full, everyone, [4], from_snapshots=True)


def test_too_few_slots_and_unknown_policies_are_refused() -> None:
    with pytest.raises(UsageError, match="3 expert slots, expected at least 4"):
        belady(text((0, 1)), SMALL, [3])
    with pytest.raises(UsageError, match="slots for 2 classes, expected 1"):
        replay(text((0, 1)), SMALL, [4, 4])
    with pytest.raises(UsageError, match="no policy named"):
        replay(text((0, 1)), SMALL, [4], "psychic")


def test_rates_are_none_where_nothing_happened() -> None:
    nothing = belady(text(), SMALL, [4]).read
    assert (nothing.hit_rate, nothing.bytes_per_token) == (None, None)
    some = belady(text((0, 1), (0, 1)), SMALL, [4]).decode
    assert (some.hit_rate, some.bytes_per_token) == (0.5, PAGE)
