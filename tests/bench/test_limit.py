"""The limit is the larger of computing and reading, and Belady begins with the best pool."""

from __future__ import annotations

import numpy as np
import pytest

from slotwise.bench.limit import Limit, best_bytes, policy_quality
from slotwise.experts.routing import Call, Routing, Step
from slotwise.weights.layout import ExpertLayout, SlotClass

SLOT = 4096
LAYOUT = ExpertLayout(
    n_experts=8, n_used=2, layers=(0,), classes=(SlotClass(0, (), SLOT),), class_of=(0,)
)
SLOTS = [6]
"""The fewest that a pool of this layout takes."""


def window(*experts: int, resident: list[int] | None = None) -> Step:
    here = None
    if resident is not None:
        here = np.zeros((1, 8), bool)
        here[0, resident] = True
    return Step("decode", 1, (Call(0, np.array(experts, np.int32), None),), here)


def chunk(*experts: int) -> Step:
    ids = np.array(experts, np.int32)
    return Step("read", 8, (Call(0, ids, np.ones_like(ids)),))


def test_reading_or_computing_whichever_is_longer() -> None:
    slow_disk = Limit(compute_ns=1e6, best_bytes=4e6, bytes_per_second=1e9)
    assert (slow_disk.best_io_ns, slow_disk.ns) == (4e6, 4e6)
    fast_disk = Limit(compute_ns=1e6, best_bytes=4e6, bytes_per_second=1e10)
    assert fast_disk.ns == 1e6
    assert slow_disk.reached(8e6) == 0.5


def test_policy_and_overlap_are_told_apart() -> None:
    limit = Limit(compute_ns=1e6, best_bytes=1e6, bytes_per_second=1e9)
    # Twice the bytes it needs, perfectly overlapped: only the policy is short.
    assert policy_quality(limit.best_bytes, 2e6) == 0.5
    assert limit.overlap(2e6, 2e6) == 1.0
    # Just the bytes it needs, read before computing: only the overlap is short.
    assert policy_quality(limit.best_bytes, 1e6) == 1.0
    assert limit.overlap(2e6, 1e6) == 0.5
    assert policy_quality(0.0, 0.0) is None


def test_the_pool_begins_with_what_is_needed_first() -> None:
    routing = Routing(layout=LAYOUT, steps=(window(0, 1), window(2, 3), window(4, 5)))
    assert best_bytes(routing, SLOTS).decode_window == 0
    more = Routing(layout=LAYOUT, steps=(*routing.steps, window(6, 7)))
    assert best_bytes(more, SLOTS).decode_window == 2 * SLOT / 4


def test_what_happened_to_be_resident_does_not_count() -> None:
    unlucky = Routing(layout=LAYOUT, steps=(window(0, 1, resident=[6, 7]), window(0, 1)))
    assert best_bytes(unlucky, SLOTS).decode_window == 0


def test_a_read_of_more_experts_than_slots_must_read_the_rest() -> None:
    routing = Routing(layout=LAYOUT, steps=(chunk(*range(8)), window(6, 7), window(0, 1)))
    found = best_bytes(routing, SLOTS)
    assert found.read == 2 * SLOT
    assert found.decode_window == 0  # the six kept can be the ones decode needs


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_every_further_chunk_reads_what_did_not_fit(chunks: int) -> None:
    routing = Routing(layout=LAYOUT, steps=(chunk(*range(8)),) * chunks)
    assert best_bytes(routing, SLOTS).read == 2 * SLOT * chunks
