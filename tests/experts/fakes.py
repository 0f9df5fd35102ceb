"""A store and an arena in memory. Every slot image says whose it is, so a mix-up shows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

import numpy as np

from slotwise.errors import StoreError
from slotwise.experts import Experts
from slotwise.experts.pool import region_offsets
from slotwise.weights.layout import ExpertLayout, SlotClass

PAGE = 4096


def make_layout(
    *, layers: int = 2, experts: int = 8, used: int = 2, class_of: tuple[int, ...] | None = None
) -> ExpertLayout:
    """Classes of one page, two pages ... a slot; projections play no role here."""
    class_of = class_of or (0,) * layers
    return ExpertLayout(
        n_experts=experts,
        n_used=used,
        layers=tuple(range(1, layers + 1)),
        classes=tuple(SlotClass(i, (), PAGE * (i + 1)) for i in range(max(class_of) + 1)),
        class_of=class_of,
    )


def ids(*experts: int) -> np.ndarray:
    return np.array(experts, np.int32)


def wait_until(condition: Callable[[], bool]) -> None:
    """For the few moments that nothing announces."""
    end = monotonic() + 20
    while not condition():
        assert monotonic() < end
        sleep(0.0005)


class FakeArena:
    def __init__(self, size: int) -> None:
        self.size = size
        self.bytes = np.full(size, 0xEE, np.uint8)

    def view(self, offset: int, nbytes: int) -> memoryview:
        assert offset % PAGE == 0
        assert offset + nbytes <= self.size
        return self.bytes.data[offset : offset + nbytes]


class FakeStore:
    """`broken` experts cannot be read. With `hold()` reads begin and stay until `let(n)`."""

    direct = False
    note = ""

    def __init__(self, layout: ExpertLayout) -> None:
        self.layout = layout
        self.broken: set[tuple[int, int]] = set()
        self.begun: list[tuple[int, int]] = []
        self.closed = False
        self._moment = threading.Condition()
        self._permits: int | None = None
        self._only: tuple[int, int] | None = None

    @staticmethod
    def image(moe_index: int, expert: int, nbytes: int) -> np.ndarray:
        return np.full(nbytes // 4, moe_index * 1000 + expert, np.int32).view(np.uint8)

    def read(self, moe_index: int, expert: int, target: memoryview) -> int:
        with self._moment:
            self.begun.append((moe_index, expert))
            self._moment.notify_all()
            self._moment.wait_for(lambda: self._may_go_on((moe_index, expert)))
            if self._permits:
                self._permits -= 1
            broken = (moe_index, expert) in self.broken
        target[: len(target) // 2] = b"\xdd" * (len(target) // 2)
        if broken:
            raise StoreError("experts.bin", expert * PAGE, "short read")
        target[:] = self.image(moe_index, expert, len(target)).data
        return len(target)

    def _may_go_on(self, expert: tuple[int, int]) -> bool:
        free = self._only is not None and self._only != expert
        return free or self._permits is None or self._permits > 0

    def where(self, moe_index: int, expert: int) -> tuple[str, int]:
        return "experts.bin", expert * PAGE

    def close(self) -> None:
        self.closed = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """No read ends inside, except as many as `let` allows."""
        with self._moment:
            self._permits = 0
        try:
            yield
        finally:
            self.let_all()

    def let(self, n: int) -> None:
        with self._moment:
            assert self._permits is not None
            self._permits += n
            self._moment.notify_all()

    def hold_only(self, expert: tuple[int, int]) -> None:
        """From now on only reads of this one are held."""
        with self._moment:
            self._only = expert
            self._moment.notify_all()

    def let_all(self) -> None:
        with self._moment:
            self._permits = None
            self._moment.notify_all()

    def wait_begun(self, n: int) -> None:
        """Until `n` reads in all have begun."""
        with self._moment:
            assert self._moment.wait_for(lambda: len(self.begun) >= n, timeout=20)


def slots_of(experts: Experts, moe_index: int, routed: np.ndarray) -> np.ndarray:
    """Has them all in slots, as a decode window does."""
    slots = np.empty(routed.size, np.int32)
    if not experts.place(moe_index, routed, slots):
        experts.complete()
    return slots


class Bench:
    """An `Experts` over the fakes, which checks what it hands out."""

    def __init__(self, layout: ExpertLayout, *, slots: tuple[int, ...], **settings: Any) -> None:
        self.layout, self.store = layout, FakeStore(layout)
        self.arena = FakeArena(region_offsets(layout, slots)[-1])
        self.experts = Experts(self.store, self.arena, slots=slots, **settings)
        self._held: list[tuple[int, np.ndarray]] = []

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.let_all()
        self.experts.close()
        self.experts.check_conservation()

    def holds(self, moe_index: int, expert: int, slot: int) -> bool:
        class_index = self.layout.class_of[moe_index]
        nbytes = self.layout.classes[class_index].slot_bytes
        at = self.experts.pool.slot_offset(class_index, slot)
        image = FakeStore.image(moe_index, expert, nbytes)
        return bool((self.arena.bytes[at : at + nbytes] == image).all())

    def check(self, moe_index: int, experts: np.ndarray, slots: np.ndarray) -> None:
        assert len(experts) == len(slots)
        for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
            assert self.holds(moe_index, expert, slot), (moe_index, expert, slot)
        self.experts.check_conservation()

    def require(self, moe_index: int, *experts: int) -> np.ndarray:
        """Has them in slots and pins them until `release`."""
        slots = slots_of(self.experts, moe_index, ids(*experts))
        self.check(moe_index, ids(*experts), slots)
        self.experts.pool.pin(self.experts.pool.region(moe_index), slots)
        self._held.append((moe_index, slots))
        return slots

    def release(self) -> None:
        for moe_index, slots in self._held:
            self.experts.pool.unpin(self.experts.pool.region(moe_index), slots)
        self._held.clear()

    def have(self, moe_index: int, *experts: int) -> None:
        """Makes them resident and lets go of them."""
        self.require(moe_index, *experts)
        self.release()

    def resident(self, moe_index: int) -> set[int]:
        return set(np.flatnonzero(self.experts.pool.table[moe_index] >= 0).tolist())

    def wait_queued(self, n: int) -> None:
        """Until `n` demand reads are queued behind those the lanes have begun."""
        wait_until(lambda: len(self.experts._lanes._queue) >= n)

    def spare_lane_has_work(self) -> bool:
        """Whether a lane with nothing to do would find something now."""
        lanes = self.experts._lanes
        with lanes.lock:
            return lanes._take_background() is not None

    def quiet(self) -> None:
        """Waits until no read and no refill is underway."""
        lanes = self.experts._lanes
        with lanes.lock:
            while not lanes.idle or self.experts._refill.active:
                lanes.wait()
        self.experts.check_conservation()
