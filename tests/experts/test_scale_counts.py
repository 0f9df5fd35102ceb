"""What a layer costs does not grow with the model: the same Python calls for 64 experts as for
24,576 of them. (bench/scale.py measures the time.)"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from experts.fakes import Bench, ids, make_layout, slots_of

from slotwise.experts.policy import make_policy
from slotwise.experts.pool import Pool

USED = 4
SMALL, LARGE = (8, 8), (48, 512)
"""(layers, experts)"""


@contextmanager
def counted() -> Iterator[list[int]]:
    """Python and C functions called by this thread inside."""
    calls = [0]

    def count(_frame: Any, event: str, _argument: Any) -> None:
        calls[0] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def pool(size: tuple[int, int], slots: int) -> Pool:
    layout = make_layout(layers=size[0], experts=size[1], used=USED)
    return Pool(layout, (slots,), policy=make_policy("two-rate", layout))


def fill(p: Pool, n: int) -> None:
    for flat in range(n):
        where = divmod(flat, p.layout.n_experts)
        p.reserve(*where)
        p.publish(*where)


def calls_of_evictions(size: tuple[int, int], *, share: float) -> float:
    """Calls for each expert that takes another's slot."""
    total = size[0] * size[1]
    p = pool(size, int(total * share))
    fill(p, int(total * share))
    newcomers = range(int(total * share), total)
    with counted() as calls:
        for flat in newcomers:
            where = divmod(flat, size[1])
            p.make_room(p.region(where[0]), 1)
            p.reserve(*where)
            p.publish(*where)
    return calls[0] / len(newcomers)


def test_an_eviction_takes_as_many_calls_in_a_large_pool() -> None:
    assert calls_of_evictions(LARGE, share=0.5) <= 1.05 * calls_of_evictions(SMALL, share=0.5)


def calls_of_resident_layers(size: tuple[int, int]) -> float:
    """Calls a layer, of a window all of whose experts are in slots."""
    layout = make_layout(layers=size[0], experts=size[1], used=USED)
    with Bench(layout, slots=(USED * size[0] + 8,)) as b:
        routed = np.tile(ids(*range(USED)), (size[0], 1))
        for layer in range(size[0]):
            slots_of(b.experts, layer, routed[layer])
            b.release()
        out = np.empty(USED, np.int32)
        with counted() as calls:
            for layer, chosen in enumerate(routed):
                if not b.experts.place(layer, chosen, out):
                    b.experts.complete()
            b.experts.window_done(routed, 1, looked_ahead=False)
        return calls[0] / size[0]


def test_a_resident_layer_takes_as_many_calls_in_a_large_model() -> None:
    small, large = calls_of_resident_layers(SMALL), calls_of_resident_layers(LARGE)
    assert large <= small
    assert large < 20


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_room_is_found_without_looking_at_every_slot(size: tuple[int, int]) -> None:
    p = pool(size, size[0] * size[1])
    fill(p, size[0] * size[1])
    region = p.region(0)
    looked: list[int] = []
    usable: Callable[..., int] = p.usable
    p.usable = lambda region: looked.append(1) or usable(region)  # type: ignore[method-assign]
    assert p.has_room(region, 4, pinned=8)
    assert not looked
    region.pins[:] = 1
    assert not p.has_room(region, 1, pinned=region.n_slots)
    assert looked
