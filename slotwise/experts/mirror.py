"""The second tier: copies of experts in host memory, between the expert slots and the disk.

For machines whose host has memory to spare beside the memory that the slots are in: a GPU's, or a
budget. A mirrored expert is copied into its slot instead of being read. The mirror is filled in the
background, once, by a thread of its own that reads only while nobody waits for the disk; who is in
it does not change after that. It is a store like the others, so nothing above it knows.

A copy is what the store delivered, checksum compared; what cannot be read is left out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from slotwise.errors import SlotwiseError
from slotwise.experts.pool import Arena
from slotwise.experts.store import ExpertStore
from slotwise.weights.layout import ExpertLayout

NOT_HERE = -1
LONGEST_CLOSE_SECONDS = 10.0


class MirrorStore:
    """`store` with copies of as many experts as `memory` holds. Closing it closes `store`."""

    def __init__(self, store: ExpertStore, memory: Arena) -> None:
        self.layout, self.store, self._memory = store.layout, store, memory
        shape = (self.layout.n_moe_layers, self.layout.n_experts)
        self._offsets = np.full(shape, NOT_HERE, np.int64)
        """Where an expert's copy is; set when it is complete."""
        self.bytes = self.failed = 0
        """Mirrored so far; experts that could not be read for it."""
        self._waited_for = 0
        self._closing = False
        self._moment = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def direct(self) -> bool:
        return self.store.direct

    @property
    def note(self) -> str:
        return self.store.note

    @property
    def size(self) -> int:
        """Bytes of memory for copies."""
        return self._memory.size

    @property
    def experts(self) -> int:
        """How many experts are mirrored by now."""
        return int((self._offsets != NOT_HERE).sum())

    def read(self, moe_index: int, expert: int, target: memoryview) -> int:
        """As any store's; 0 for an expert that came out of the mirror."""
        offset = int(self._offsets[moe_index, expert])
        if offset != NOT_HERE:
            # numpy lets other threads run meanwhile, a memoryview does not
            np.copyto(_bytes(target), _bytes(self._memory.view(offset, target.nbytes)))
            return 0
        with self._moment:
            self._waited_for += 1
        try:
            return self.store.read(moe_index, expert, target)
        finally:
            with self._moment:
                self._waited_for -= 1
                self._moment.notify_all()

    def where(self, moe_index: int, expert: int) -> tuple[str, int]:
        return self.store.where(moe_index, expert)

    def fill(self, order: Iterable[int]) -> None:
        """Begins to copy experts (flat ids), the first ones first, until the memory is full."""
        if self._thread is not None:
            raise RuntimeError("the mirror is being filled already")
        self._thread = threading.Thread(
            target=self._fill, args=(list(order),), name="mirror", daemon=True
        )
        self._thread.start()

    def wait(self, seconds: float | None = None) -> None:
        """Until the mirror is full, or for so long."""
        if self._thread is not None:
            self._thread.join(seconds)

    def close(self) -> None:
        """Ends the filling and closes the store below."""
        with self._moment:
            self._closing = True
            self._moment.notify_all()
        self.wait(LONGEST_CLOSE_SECONDS)  # a read that hangs is left behind
        self.store.close()

    def _fill(self, order: list[int]) -> None:
        for flat in order:
            moe_index, expert = divmod(flat, self.layout.n_experts)
            nbytes = self.layout.slot_class(moe_index).slot_bytes
            if self.bytes + nbytes > self._memory.size:
                continue  # an expert of a smaller class may still fit
            if not self._quiet():
                return
            try:
                self.store.read(moe_index, expert, self._memory.view(self.bytes, nbytes))
            except SlotwiseError:
                self.failed += 1  # whoever needs it will be told
                continue
            self._offsets[moe_index, expert] = self.bytes
            self.bytes += nbytes

    def _quiet(self) -> bool:
        """Waits until nobody waits for the store; False when it is closed."""
        with self._moment:
            self._moment.wait_for(lambda: self._closing or not self._waited_for)
            return not self._closing


def mirror_bytes(layout: ExpertLayout, wanted: int) -> int:
    """`wanted`, or what all experts take if that is less."""
    return min(wanted, layout.total_bytes)


def mirror_order(table: NDArray[np.int32], heat: NDArray[np.float64]) -> list[int]:
    """Flat ids of all experts: those without a slot first, among them the hottest first."""
    flat_table, flat_heat = table.reshape(-1), heat.reshape(-1)
    return np.lexsort((-flat_heat, flat_table >= 0)).tolist()


def _bytes(view: memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(view, np.uint8)
