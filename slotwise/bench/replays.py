"""Every policy on one routing trace, with several numbers of expert slots, against Belady."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from slotwise.bench.show import Table
from slotwise.errors import UsageError
from slotwise.experts.policy import POLICIES
from slotwise.experts.pool import experts_per_class, minimum_slots
from slotwise.experts.replay import Replayed, belady, replay
from slotwise.experts.routing import Routing

SCHEMA = "slotwise.replay/v1"


def replay_all(routing: Routing, slots: str) -> list[Replayed]:
    """For each budget Belady, then every policy with a pool for all layers and with one a layer
    (where that leaves a layer enough). Raises UsageError for budgets that make no sense."""
    layout = routing.layout
    found = []
    for budget in slots.split(","):
        chosen = _slots(routing, budget)
        found.append(belady(routing, layout, chosen))
        for per_layer in (False, True):
            try:
                found += [
                    replay(routing, layout, chosen, name, per_layer=per_layer) for name in POLICIES
                ]
            except UsageError:
                if not per_layer:
                    raise
    return found


def _slots(routing: Routing, text: str) -> list[int]:
    """Per class, out of a share ("25%") or a number of all classes together."""
    everything = experts_per_class(routing.layout)
    text = text.strip()
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else int(text) / sum(everything)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UsageError(
            f"--slots {text!r}, expected a share up to 100% or 1 to {sum(everything)} slots",
            next_step="Write for example 25%,50% or 240,480.",
        )
    least = minimum_slots(routing.layout)
    return [max(low, round(n * share)) for low, n in zip(least, everything, strict=True)]


def replay_table(found: list[Replayed]) -> Table:
    """One row a policy and budget. `quality` is Belady's bytes over the policy's."""
    best: Replayed | None = None
    rows = []
    for one in found:
        if one.policy == "belady":
            best = one
        rows.append(_row(one, best))
    columns = ("slots", "policy", "pool", "read hits", "read MiB", "decode hits",
               "decode MiB/token", "quality")  # fmt: skip
    return Table(columns=columns, rows=rows)


def _row(one: Replayed, best: Replayed | None) -> list[str]:
    decode = one.decode.bytes_per_token
    return [
        str(sum(one.slots)),
        one.policy,
        "a layer" if one.per_layer else "all layers",
        _share(one.read.hit_rate),
        f"{one.read.bytes / 2**20:,.0f}",
        _share(one.decode.hit_rate),
        "-" if decode is None else f"{decode / 2**20:.2f}",
        "-" if best is None or not one.bytes else f"{best.bytes / one.bytes:.2f}",
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def replay_document(routing: Routing, found: list[Replayed]) -> dict[str, Any]:
    """For --json. All numbers are derived from the trace: nothing is timed."""
    return {
        "schema": SCHEMA,
        "model": routing.model_name,
        "tokens": {stage: routing.tokens(stage) for stage in ("read", "decode")},
        "how": "derived: replayed on the trace, from an empty pool",
        "replays": [asdict(one) for one in found],
    }
