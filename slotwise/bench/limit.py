"""What no engine on this machine can do better than: the larger of computing and reading.

    limit = max(compute, bytes the best policy must read / disk speed)

Computing is measured with everything in memory. The bytes are Belady's on the recorded routing,
with the expert slots the engine had, a pool that is filled before the request with just what it
will need first, and no slot ever lent. So the limit is a bound, not a forecast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from slotwise.experts.replay import belady
from slotwise.experts.routing import Routing
from slotwise.weights.layout import ExpertLayout


@dataclass(frozen=True, kw_only=True)
class Best:
    """Bytes that the best policy reads for one request."""

    read: int
    decode_window: float
    """Mean of a decode window, the first one included."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Of one thing: a prompt read, or a decode window."""

    compute_ns: float
    best_bytes: float
    bytes_per_second: float

    @property
    def best_io_ns(self) -> float:
        return self.best_bytes * 1e9 / self.bytes_per_second

    @property
    def ns(self) -> float:
        return max(self.compute_ns, self.best_io_ns)

    def reached(self, ns: float) -> float:
        """1: as fast as it can be."""
        return self.ns / ns

    def overlap(self, ns: float, nbytes: float) -> float:
        """1: reading and computing happened at the same time, whatever was read."""
        return max(self.compute_ns, nbytes * 1e9 / self.bytes_per_second) / ns


def policy_quality(best_bytes: float, nbytes: float) -> float | None:
    """Belady's bytes against those read; 1 is best. None when neither reads anything."""
    if nbytes:
        return best_bytes / nbytes
    return None


def best_bytes(routing: Routing, slots: Sequence[int]) -> Best:
    """`slots` per class. Raises UsageError for fewer than the model needs."""
    found = belady(_well_filled(routing, slots), routing.layout, slots, from_snapshots=True)
    windows = max(1, found.decode.tokens)
    return Best(read=found.read.bytes, decode_window=found.decode.bytes / windows)


def _well_filled(routing: Routing, slots: Sequence[int]) -> Routing:
    """The same routing, begun with the experts resident that are needed first."""
    layout = routing.layout
    first, *rest = routing.steps
    resident = _needed_first(routing, layout, list(slots))
    return replace(
        routing,
        steps=(
            replace(first, resident=resident),
            *(replace(step, resident=None) for step in rest),
        ),
    )


def _needed_first(
    routing: Routing, layout: ExpertLayout, room: list[int]
) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    resident = np.zeros((layout.n_moe_layers, layout.n_experts), bool)
    for step in routing.steps:
        for call in step.calls:
            index, row = layout.class_of[call.moe_index], resident[call.moe_index]
            for expert in call.experts.tolist():
                if room[index] and not row[expert]:
                    row[expert] = True
                    room[index] -= 1
        if not any(room):
            break
    return resident
