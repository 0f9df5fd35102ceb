"""The mirror in host memory: the right bytes, filled beside everything else, within its budget."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from experts.fakes import PAGE, FakeArena, FakeStore, ids, make_layout, slots_of, wait_until

from slotwise.errors import StoreError
from slotwise.experts import Experts
from slotwise.experts.mirror import MirrorStore, mirror_bytes, mirror_order
from slotwise.experts.pool import region_offsets

LAYOUT = make_layout(layers=3, experts=8, class_of=(0, 1, 0))
TOTAL = 16 * PAGE + 8 * 2 * PAGE


def mirror(nbytes: int) -> tuple[MirrorStore, FakeStore]:
    store = FakeStore(LAYOUT)
    return MirrorStore(store, FakeArena(nbytes)), store


def image(store: MirrorStore, moe_index: int, expert: int) -> tuple[bytes, int]:
    """What a read delivers, and the bytes it says came from the disk."""
    target = bytearray(LAYOUT.slot_class(moe_index).slot_bytes)
    read = store.read(moe_index, expert, memoryview(target))
    return bytes(target), read


def right(moe_index: int, expert: int) -> bytes:
    nbytes = LAYOUT.slot_class(moe_index).slot_bytes
    return FakeStore.image(moe_index, expert, nbytes).tobytes()


def test_a_mirrored_expert_needs_no_disk() -> None:
    store, below = mirror(TOTAL)
    store.fill(range(24))
    store.wait()
    assert (store.experts, store.bytes) == (24, TOTAL)
    begun = len(below.begun)
    for moe_index in range(3):
        for expert in range(8):
            assert image(store, moe_index, expert) == (right(moe_index, expert), 0)
    assert len(below.begun) == begun == 24
    store.close()
    assert below.closed


def test_what_is_not_mirrored_comes_from_below() -> None:
    store, below = mirror(TOTAL)
    assert image(store, 1, 3) == (right(1, 3), 2 * PAGE)
    assert below.begun == [(1, 3)]
    store.close()


@pytest.mark.parametrize("pages", [0, 1, 5, 9])
def test_it_keeps_to_its_budget(pages: int) -> None:
    store, _ = mirror(pages * PAGE)
    store.fill([8, 9, 0, 10, 1, 2])  # two pages each but for 0, 1 and 2
    store.wait()
    assert store.bytes <= pages * PAGE
    here = [flat for flat in range(24) if store._offsets.reshape(-1)[flat] >= 0]
    assert here == {0: [], 1: [0], 5: [0, 8, 9], 9: [0, 1, 2, 8, 9, 10]}[pages]
    for flat in here:
        assert image(store, *divmod(flat, 8)) == (right(*divmod(flat, 8)), 0)
    store.close()


def test_filling_waits_while_somebody_waits_for_the_disk() -> None:
    store, below = mirror(TOTAL)
    with below.held():
        waiting = threading.Thread(target=image, args=(store, 0, 5))
        waiting.start()
        below.wait_begun(1)
        store.fill(range(24))
        below.let(1)  # the one that somebody waits for
        waiting.join()
        below.wait_begun(2)
        assert below.begun == [(0, 5), (0, 0)]
    store.wait()
    assert store.experts == 24
    store.close()


def test_an_expert_that_cannot_be_read_is_left_out() -> None:
    store, below = mirror(TOTAL)
    below.broken.add((0, 1))
    store.fill(range(24))
    store.wait()
    assert (store.experts, store.failed) == (23, 1)
    with pytest.raises(StoreError):
        image(store, 0, 1)
    below.broken.clear()
    assert image(store, 0, 1) == (right(0, 1), PAGE)
    assert image(store, 0, 2) == (right(0, 2), 0)  # its room was given to the next
    store.close()


def test_closing_ends_the_filling() -> None:
    store, below = mirror(TOTAL)
    with below.held():
        store.fill(range(24))
        below.wait_begun(1)
        closing = threading.Thread(target=store.close)
        closing.start()
        wait_until(lambda: store._closing)
        below.let(1)
        closing.join()
    assert len(below.begun) == 1
    assert below.closed


def test_who_is_mirrored_first() -> None:
    table = np.array([[3, -1, -1, 0]], np.int32)
    heat = np.array([[9.0, 1.0, 2.0, 8.0]])
    assert mirror_order(table, heat) == [2, 1, 0, 3]
    assert mirror_bytes(LAYOUT, 1 << 40) == TOTAL
    assert mirror_bytes(LAYOUT, PAGE) == PAGE


def test_experts_over_a_mirror() -> None:
    """Slots are filled from it, and the books say so."""
    store, below = mirror(TOTAL)
    slots = (5, 5)
    with_arena = FakeArena(region_offsets(LAYOUT, slots)[-1])
    experts = Experts(store, with_arena, slots=slots)
    store.fill(mirror_order(experts.pool.table, experts.policy.heat))
    store.wait()
    begun = len(below.begun)
    for moe_index in range(3):
        for expert in range(8):
            (slot,) = slots_of(experts, moe_index, ids(expert)).tolist()
            at = experts.pool.slot_offset(LAYOUT.class_of[moe_index], slot)
            nbytes = LAYOUT.slot_class(moe_index).slot_bytes
            assert with_arena.bytes[at : at + nbytes].tobytes() == right(moe_index, expert)
    stats = experts.snapshot().decode
    assert (stats.misses, stats.mirror_hits, stats.bytes_read) == (24, 24, 0)
    assert len(below.begun) == begun
    experts.close()
    experts.check_conservation()
