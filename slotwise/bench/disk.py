"""How fast the slow tier is, asked as the engine asks it: whole experts at random, on all lanes."""

from __future__ import annotations

import mmap
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter_ns

from slotwise.experts.store import ExpertStore

ROUND_BYTES = 128 << 20
"""What one round reads; at 2 GB/s that is 64 ms."""


@dataclass(frozen=True, kw_only=True)
class DiskSpeed:
    """Bytes per second, one number a round."""

    rounds: tuple[float, ...]
    read_bytes: int
    """Of one read: an expert of the first class."""
    lanes: int
    direct: bool


def disk_speed(store: ExpertStore, *, lanes: int, rounds: int = 8, seed: int = 0) -> DiskSpeed:
    """Reads experts of `store` in random order, `lanes` at a time. Raises StoreError."""
    layout = store.layout
    size = layout.classes[0].slot_bytes
    each = max(lanes, min(layout.n_total, ROUND_BYTES // size))
    everything = [(m, e) for m in range(layout.n_moe_layers) for e in range(layout.n_experts)]
    choose = random.Random(seed)
    speeds = []
    with ThreadPoolExecutor(lanes) as pool:
        for _ in range(rounds):
            chosen = choose.choices(everything, k=each)
            parts = [chosen[lane::lanes] for lane in range(lanes)]
            begin = perf_counter_ns()
            nbytes = sum(pool.map(lambda part: _read_all(store, part), parts))
            speeds.append(nbytes * 1e9 / (perf_counter_ns() - begin))
    return DiskSpeed(rounds=tuple(speeds), read_bytes=size, lanes=lanes, direct=store.direct)


def _read_all(store: ExpertStore, experts: Sequence[tuple[int, int]]) -> int:
    largest = max(c.slot_bytes for c in store.layout.classes)
    read = 0
    with mmap.mmap(-1, largest) as buffer, memoryview(buffer) as memory:
        for moe_index, expert in experts:
            size = store.layout.slot_class(moe_index).slot_bytes
            with memory[:size] as target:
                read += store.read(moe_index, expert, target)
    return read
