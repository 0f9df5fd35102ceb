"""Replays a policy on a recorded routing trace, and the best that any policy could do on it.

    replay(routing, routing.layout, slots=[480], policy_name="two-rate").decode.bytes
    belady(routing, routing.layout, slots=[480]).decode.bytes

A replay drives the engine's own pool and policy, so it evicts as the engine does. It knows nothing
of time, loans, refills and look-ahead: every read is a demand read.

`belady` puts out whoever is needed again last (L. A. Belady, 1966): no policy reads less with
expert slots of one size. Both keep the rule of a window: all experts of one layer's call
are in slots together. A chunk's experts come in waves instead, so there may be more than slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

import numpy as np

from slotwise.errors import UsageError
from slotwise.experts.policy import DEFAULT_POLICY, Policy, make_policy
from slotwise.experts.pool import Pool, minimum_slots
from slotwise.experts.routing import Bools, Call, Routing, Step
from slotwise.weights.layout import ExpertLayout, SlotClass

WAVE = 8
"""Experts of a chunk that are read before the first of them may be put out again."""
NEVER = 1 << 62


@dataclass(kw_only=True)
class Traffic:
    """One stage. Counted as the engine does: misses are distinct experts that had to be read, hits
    all other entries (routed ones in a window, distinct ones in a chunk)."""

    tokens: int = 0
    hits: int = 0
    misses: int = 0
    bytes: int = 0

    @property
    def hit_rate(self) -> float | None:
        """None where nothing was routed."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else None

    @property
    def bytes_per_token(self) -> float | None:
        return self.bytes / self.tokens if self.tokens else None

    def count(self, call: Call, missing: int, slot_bytes: int) -> None:
        self.misses += missing
        self.hits += len(call.experts) - missing
        self.bytes += missing * slot_bytes


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What one policy reads on a trace. `slots` per class, in all layers of it together."""

    policy: str
    slots: tuple[int, ...]
    per_layer: bool
    read: Traffic = field(default_factory=Traffic)
    decode: Traffic = field(default_factory=Traffic)

    @property
    def hits(self) -> int:
        return self.read.hits + self.decode.hits

    @property
    def misses(self) -> int:
        return self.read.misses + self.decode.misses

    @property
    def bytes(self) -> int:
        return self.read.bytes + self.decode.bytes

    def stage(self, step: Step) -> Traffic:
        return self.read if step.stage == "read" else self.decode


def replay(
    routing: Routing,
    layout: ExpertLayout,
    slots: Sequence[int],
    policy_name: str | Policy = DEFAULT_POLICY,
    *,
    per_layer: bool = False,
    from_snapshots: bool = False,
) -> Replayed:
    """`policy_name` over the whole trace with `slots` per class.

    With `per_layer` every layer has slots of its own, an even share of its class's. The pool is
    empty at first; with `from_snapshots` it is filled, wherever the trace says who was resident,
    with just those, for nothing: then what loans and refills did between is left out. Raises
    UsageError for fewer slots than a pool needs, or than were resident, and for an unknown policy.
    """
    layout, parts = _divided(layout, slots, per_layer=per_layer)
    named = policy_name if isinstance(policy_name, str) else policy_name.name
    result = Replayed(policy=named, slots=tuple(slots), per_layer=per_layer)
    policy = make_policy(named, layout) if isinstance(policy_name, str) else policy_name
    for resident, steps in _segments(routing, parts, layout, from_snapshots=from_snapshots):
        pool = Pool(layout, parts, policy=policy)
        _fill(pool, resident)
        for step in steps:
            traffic = result.stage(step)
            traffic.tokens += step.tokens
            for call in step.calls:
                if call.counts is not None:
                    policy.touch(call.moe_index, call.experts, call.counts)
                missing = _bring_in(pool, call)
                traffic.count(call, missing, pool.region(call.moe_index).slot_bytes)
            if step.stage == "decode":
                policy.touch_window([call.experts for call in step.calls])
    return result


def belady(
    routing: Routing,
    layout: ExpertLayout,
    slots: Sequence[int],
    *,
    per_layer: bool = False,
    from_snapshots: bool = False,
) -> Replayed:
    """The fewest reads any policy can do with. Arguments and errors as in `replay`."""
    layout, parts = _divided(layout, slots, per_layer=per_layer)
    result = Replayed(policy="belady", slots=tuple(slots), per_layer=per_layer)
    for resident, steps in _segments(routing, parts, layout, from_snapshots=from_snapshots):
        classes = [_Foreseeing(n) for n in parts]
        uses = _next_uses(steps, layout, resident, classes)
        for step in steps:
            traffic = result.stage(step)
            traffic.tokens += step.tokens
            for call in step.calls:
                index = layout.class_of[call.moe_index]
                missing = classes[index].call(next(uses), together=call.counts is None)
                traffic.count(call, missing, layout.classes[index].slot_bytes)
    return result


def _divided(
    layout: ExpertLayout, slots: Sequence[int], *, per_layer: bool
) -> tuple[ExpertLayout, list[int]]:
    """The layout and slots to replay on: with `per_layer` a class of its own for every layer."""
    if len(slots) != len(layout.classes):
        raise UsageError(f"slots for {len(slots)} classes, expected {len(layout.classes)}")
    parts = list(slots)
    if per_layer:
        members = [[i for i, c in enumerate(layout.class_of) if c == k] for k in range(len(slots))]
        parts = [0] * layout.n_moe_layers
        for n, layers in zip(slots, members, strict=True):
            for place, layer in enumerate(layers):
                parts[layer] = n // len(layers) + (place < n % len(layers))
        sizes = [layout.slot_class(i).slot_bytes for i in range(layout.n_moe_layers)]
        layout = replace(
            layout,
            classes=tuple(SlotClass(i, (), n) for i, n in enumerate(sizes)),
            class_of=tuple(range(layout.n_moe_layers)),
        )
    least = minimum_slots(layout)
    if any(n < low for n, low in zip(parts, least, strict=True)):
        share = " a layer" if per_layer else ""
        raise UsageError(f"{min(parts)} expert slots{share}, expected at least {max(least)}")
    return layout, parts


def _segments(
    routing: Routing, slots: Sequence[int], layout: ExpertLayout, *, from_snapshots: bool
) -> Iterable[tuple[Bools | None, tuple[Step, ...]]]:
    if not from_snapshots:
        return [(None, routing.steps)]
    segments = list(routing.segments())
    for resident, _ in segments:
        if resident is None:
            continue
        held = np.bincount(layout.class_of, resident.sum(axis=1), len(slots))
        if (held > np.asarray(slots)).any():
            raise UsageError(
                f"{int(held.max())} experts were resident, more than {list(slots)} slots hold",
                next_step="Replay with the slots of the recording, or from an empty pool.",
            )
    return segments


# -- a policy


def _fill(pool: Pool, resident: Bools | None) -> None:
    if resident is not None:
        for moe_index, expert in np.argwhere(resident).tolist():
            pool.reserve(moe_index, expert)
            pool.publish(moe_index, expert)


def _bring_in(pool: Pool, call: Call) -> int:
    """Makes the call's experts resident, a chunk's in waves; returns how many had to be read."""
    region, row = pool.region(call.moe_index), pool.table[call.moe_index]
    pool.sweep(None if call.counts is None else call.moe_index)
    slots = row.take(call.experts)
    if -1 not in slots.tolist():
        return 0
    missing = list(dict.fromkeys(call.experts[slots < 0].tolist()))
    held = np.unique(slots[slots >= 0])
    wave = len(missing) if call.counts is None else WAVE
    done = 0
    while done < len(missing):
        pool.pin(region, held)  # a wave computes while the next is read
        batch = missing[done : done + min(wave, pool.usable(region))]
        for expert in batch:
            pool.make_room(region, 1)
            pool.reserve(call.moe_index, expert)
        for expert in batch:
            pool.publish(call.moe_index, expert)
        pool.unpin(region, held)
        held = row.take(batch)
        done += len(batch)
    return len(missing)


# -- the best that can be


class _Foreseeing:
    """One class of slots, managed by someone who knows every later call."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.resident: dict[int, int] = {}
        """Flat id -> number of the call that needs it next."""
        self._by_next: list[tuple[int, int]] = []

    def put(self, flat: int, next_use: int) -> None:
        self.resident[flat] = next_use
        heappush(self._by_next, (-next_use, flat))

    def call(self, uses: list[tuple[int, int]], *, together: bool) -> int:
        """`uses` are (flat id, next use) of distinct experts; returns how many must be read."""
        before = len(self.resident)
        now = {flat for flat, _ in uses}
        missing = sum(flat not in self.resident for flat in now)
        spared = []
        if together:
            for _ in range(max(0, before + missing - self.slots)):
                spared += self._put_out_last(now)
        for item in spared:
            heappush(self._by_next, item)
        for flat, next_use in uses:
            self.put(flat, next_use)
        while len(self.resident) > self.slots:
            self._put_out_last(set())
        return missing

    def _put_out_last(self, keep: set[int]) -> list[tuple[int, int]]:
        """Puts out who is needed last, but none of `keep`; returns the entries passed over."""
        passed = []
        while True:
            minus_next, flat = heappop(self._by_next)
            if self.resident.get(flat) != -minus_next:
                continue
            if flat not in keep:
                del self.resident[flat]
                return passed
            passed.append((minus_next, flat))


def _next_uses(
    steps: Sequence[Step],
    layout: ExpertLayout,
    resident: Bools | None,
    classes: Sequence[_Foreseeing],
) -> Iterator[list[tuple[int, int]]]:
    """For each call its distinct experts with the number of the call that needs them next; puts
    those resident at first into their classes."""
    calls = [call for step in steps for call in step.calls]
    coming: dict[int, int] = {}
    listed: list[list[tuple[int, int]]] = []
    for number in range(len(calls) - 1, -1, -1):
        base = calls[number].moe_index * layout.n_experts
        flats = {base + expert for expert in calls[number].experts.tolist()}
        listed.append([(flat, coming.get(flat, NEVER)) for flat in sorted(flats)])
        coming.update(dict.fromkeys(flats, number))
    if resident is not None:
        for flat in np.flatnonzero(resident).tolist():
            classes[layout.class_of[flat // layout.n_experts]].put(flat, coming.get(flat, NEVER))
    return iter(listed[::-1])
