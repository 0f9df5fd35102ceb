"""A store that fails on purpose, for tests of whatever reads experts."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable

from slotwise.errors import StoreError
from slotwise.experts.store import ExpertStore

Expert = tuple[int, int]
"""(moe_index, expert)"""


class FaultyStore:
    """Wraps a store. Change the sets at any time; experts in none of them are read as always."""

    def __init__(
        self,
        store: ExpertStore,
        *,
        io_error: Iterable[Expert] = (),
        short: Iterable[Expert] = (),
        wrong: Iterable[Expert] = (),
        slow: Iterable[Expert] = (),
        held: Iterable[Expert] = (),
        seconds: float = 0.02,
    ) -> None:
        """`io_error` and `short` raise, `wrong` delivers the image inverted, `slow` takes `seconds`
        longer, `held` waits until `release` is called."""
        self.store, self.layout, self.seconds = store, store.layout, seconds
        self.io_error, self.short, self.wrong = set(io_error), set(short), set(wrong)
        self.slow, self.held = set(slow), set(held)
        self.reads: Counter[Expert] = Counter()
        """How often each expert was asked for, failures included."""
        self.waiting = threading.Semaphore(0)
        """Acquire it to be sure that one more read of a held expert has begun."""
        self._released = threading.Event()

    @property
    def direct(self) -> bool:
        return self.store.direct

    @property
    def note(self) -> str:
        return "faulty on purpose"

    def read(self, moe_index: int, expert: int, target: memoryview) -> int:
        key = (moe_index, expert)
        self.reads[key] += 1
        if key in self.held:
            self.waiting.release()
            self._released.wait()
        if key in self.slow:
            time.sleep(self.seconds)
        if key in self.io_error:
            cause = OSError(errno.EIO, os.strerror(errno.EIO))
            raise StoreError("faulty.bin", 4096 * expert, f"{cause.strerror}, EIO") from cause
        read = self.store.read(moe_index, expert, target)
        if key in self.short:
            target[target.nbytes // 2 :] = bytes(target.nbytes - target.nbytes // 2)
            raise StoreError("faulty.bin", 4096 * expert, "the file ends after half of the bytes")
        if key in self.wrong:
            target[:] = bytes(byte ^ 0xFF for byte in target)
        return read

    def where(self, moe_index: int, expert: int) -> tuple[str, int]:
        return self.store.where(moe_index, expert)

    def release(self) -> None:
        """Let every held read go on, now and later."""
        self._released.set()

    def heal(self) -> None:
        """From now on nothing fails any more."""
        for faults in (self.io_error, self.short, self.wrong, self.slow):
            faults.clear()
        self.release()

    def close(self) -> None:
        self.store.close()
