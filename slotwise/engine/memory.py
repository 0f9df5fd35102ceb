"""How much memory there is, and what it is spent on.

`available` reads the machine and the control groups; `plan` divides a budget. Nothing is
allocated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from slotwise.experts.pool import experts_per_class, minimum_slots
from slotwise.weights.layout import ExpertLayout

HEADROOM_SHARE = 0.15
HEADROOM_BYTES = 256 << 20
"""What `auto` leaves free of the machine: this or that share, whichever is more, for the process
itself and its neighbours."""

GROUP_HEADROOM_SHARE = 0.03
GROUP_HEADROOM_BYTES = 24 << 20
TOKEN_BYTES = 700
"""The same of a control group's room, which has few neighbours: what this process still grows by
beside the plan, and its tokenizer for each token it knows (27 MiB were measured for 49,000)."""

_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True)
class Budget:
    """Bytes, and the sentence that says where the number comes from."""

    nbytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What a budget is spent on, all in bytes. `slots` counts expert slots per class."""

    budget: Budget
    dense: int
    state: int
    windows: int
    """Inputs, outputs and intermediates of decode windows."""
    work: int
    """What ggml allocates beside our buffers."""
    scratch: int
    """What a full chunk of the prompt read needs, lent from the slots (or kept, if dense)."""
    slots: tuple[int, ...] = ()
    arena: int = 0
    minimum: int = field(default=0)
    """The smallest budget that works with this context and chunk."""

    @property
    def total(self) -> int:
        return self.fixed + self.arena

    @property
    def fixed(self) -> int:
        """Everything but the expert slots."""
        return (
            self.dense + self.state + self.windows + self.work + (0 if self.slots else self.scratch)
        )

    def parts(self) -> dict[str, int]:
        """Bytes by name, for reports."""
        named = {
            "dense weights": self.dense,
            "keys and values": self.state,
            "windows": self.windows,
            "ggml work memory": self.work,
        }
        return named | ({"expert slots": self.arena} if self.slots else {"scratch": self.scratch})


def divide(
    needs: MemoryPlan, layout: ExpertLayout | None, *, slots: int | None = None
) -> MemoryPlan:
    """`needs` with expert slots for what its budget leaves; too little shows as total > budget.

    With `slots`, that many per class (and what a loan needs) whatever the budget.
    """
    if layout is None:
        return replace(needs, minimum=needs.fixed)
    fixed = needs.dense + needs.state + needs.windows + needs.work
    least = _enough(layout, minimum_slots(layout), needs.scratch)
    most = _enough(layout, experts_per_class(layout), needs.scratch)
    minimum = fixed + _arena(layout, least)
    if slots is None:
        chosen = _between(layout, least, most, needs.budget.nbytes - fixed)
    else:
        chosen = [max(low, min(slots, high)) for low, high in zip(least, most, strict=True)]
    return replace(needs, slots=tuple(chosen), arena=_arena(layout, chosen), minimum=minimum)


def _enough(layout: ExpertLayout, keep: Sequence[int], scratch: int) -> list[int]:
    """`keep` slots per class, and in the class with most experts enough more to lend `scratch`
    in one stretch."""
    slots = list(keep)
    per_class = experts_per_class(layout)
    largest = per_class.index(max(per_class))
    slots[largest] += -(-scratch // layout.classes[largest].slot_bytes)
    return slots


def _between(
    layout: ExpertLayout, least: Sequence[int], most: Sequence[int], nbytes: int
) -> list[int]:
    """Slots per class within `nbytes`, spread over the classes in proportion to their experts."""
    spare = nbytes - _arena(layout, least)
    wanted = _arena(layout, most) - _arena(layout, least)
    if spare <= 0 or wanted <= 0:
        return list(least)
    share = min(1.0, spare / wanted)
    return [low + int((high - low) * share) for low, high in zip(least, most, strict=True)]


def _arena(layout: ExpertLayout, slots: Sequence[int]) -> int:
    return sum(c.slot_bytes * n for c, n in zip(layout.classes, slots, strict=True))


def available(*, n_vocab: int = 0, root: Path = Path("/")) -> Budget:
    """What this process may use: free memory or the control group's room, less some headroom and
    a tokenizer of `n_vocab` tokens."""
    grows = GROUP_HEADROOM_BYTES + n_vocab * TOKEN_BYTES
    free = _meminfo_available(root)
    room = free - max(HEADROOM_BYTES, free * HEADROOM_SHARE)
    reason = f"memory that is free: {free / 2**20:,.0f} MiB, less headroom"
    for limit, usage, name in _cgroups(root):
        free = limit - usage
        left = free - max(grows, free * GROUP_HEADROOM_SHARE)
        if left < room:
            room = left
            reason = f"room in the control group ({name}): {free / 2**20:,.0f} MiB, less headroom"
    return Budget(max(0, int(room)), reason)


def _meminfo_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("no MemAvailable in /proc/meminfo")


def _cgroups(root: Path) -> list[tuple[int, int, str]]:
    """(limit, usage without reclaimable cache, name) of every group up to the root."""
    found = []
    try:
        membership = (root / "proc/self/cgroup").read_text()
    except OSError:  # a system without control groups
        return []
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            base, files = _CGROUP_V2, ("memory.max", "memory.current", "inactive_file", "v2")
        elif "memory" in controllers.split(","):
            base = _CGROUP_V1
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "v1")
        else:
            continue
        folder = root / str(base).lstrip("/") / path.lstrip("/")
        top = root / str(base).lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(top) and (entry := _read_group(group, *files)):
                found.append(entry)
    return found


def _read_group(
    group: Path, limit_file: str, usage_file: str, cache_key: str, version: str
) -> tuple[int, int, str] | None:
    """None where the group has no limit or cannot be read."""
    try:
        text = (group / limit_file).read_text().strip()
        limit = 1 << 63 if text == "max" else int(text)
        usage = int((group / usage_file).read_text())
        stat = (group / "memory.stat").read_text().split()
    except (OSError, ValueError):
        return None
    if limit >= 1 << 60:
        return None
    cache = int(stat[stat.index(cache_key) + 1]) if cache_key in stat else 0
    return limit, max(0, usage - cache), version
