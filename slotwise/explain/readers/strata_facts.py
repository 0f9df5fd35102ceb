"""Strata lines that are no part of a request's time: counters and averages, kept as facts.

KV streaming counts from the engine's start and is named so. The split stages' averages do too;
a request's share is a difference. A second card's line is of its request (old versions, which
print no "in this request": since the start). Decode stages are milliseconds a window.
"""

from __future__ import annotations

import re

from slotwise.explain.readers.strata_draft import Draft
from slotwise.explain.readers.strata_grammar import INT, NUM
from slotwise.explain.readers.strata_life import LifeState
from slotwise.explain.readers.strata_request import measured
from slotwise.explain.record import Value, safe_name

STAGES_LIMIT = 64

_KV = re.compile(rf"KV streaming: {NUM}% of {INT} block reads hit VRAM, {NUM} MiB read from RAM")
_STAGE = re.compile(
    rf"stage (\d{{1,2}}): {INT} windows; per window: wait for the GPU {NUM} ms, "
    rf"pool \+ plan {NUM} ms, host staging {NUM} ms, commit {NUM} ms"
)
_CARD = re.compile(
    rf"CUDA(\d{{1,2}}): {INT} expert entries, {INT} active layer launches, {NUM} MiB returned"
    rf".{{0,60}}?; host {NUM} ms staging\+launching, {NUM} ms waiting for it( in this request)?"
)
_ADAPTIVE = re.compile(
    rf"asynchronous adaptive tier: {INT} rounds, {INT} experts swapped in, {NUM} ms per round"
)
_BATCH = re.compile(
    rf"(?:\(.{{1,60}}?\): )?{INT} windows, avg {NUM} rows, {NUM} ms/window = run {NUM} "
)
_BATCH_RATE = re.compile(rf"{NUM} rows/s over {NUM} ms of wall time")
_GPU_TOTAL = re.compile(rf"total {NUM} ms/window over {INT} windows")
_GPU_LAYERS = re.compile(r"(GDN|QSA) layers:([^|]{0,2000})")
_GPU_STAGE = re.compile(rf"\s*([a-zA-Z(][a-zA-Z0-9 +/()_-]{{0,30}}?) {NUM}(?=\s|$)")
_POOL = re.compile(rf"{INT} windows; GU {NUM}, FF-quant {NUM}, Down {NUM} ms/window")
_STAGE_PARTS = ("wait for the GPU", "pool + plan", "host staging", "commit")


def serve_fact(text: str, draft: Draft, life: LifeState) -> bool:
    """A line of the block after a summary; whether it was one of these."""
    facts = draft.facts
    if kv := _KV.match(text):
        facts["KV reads in VRAM % (since start)"] = measured(float(kv[1]))
        facts["KV block reads (since start)"] = measured(int(kv[2]))
        facts["KV MiB from RAM (since start)"] = measured(float(kv[3]))
    elif stage := _STAGE.match(text):
        _stage_facts(stage, facts, life)
    elif card := _CARD.match(text):
        _card_facts(card, facts, life)
    elif adaptive := _ADAPTIVE.match(text):
        facts["adaptive rounds"] = life.tier("adaptive rounds", float(adaptive[1]))
        facts["experts swapped in"] = life.tier("experts swapped in", float(adaptive[2]))
    else:
        return False
    return True


def _stage_facts(stage: re.Match[str], facts: dict[str, Value], life: LifeState) -> None:
    """Averages over all windows since the start; times their number they are counters."""
    name, windows = f"stage {int(stage[1])}", float(stage[2])
    facts[f"{name}: windows"] = life.tier(f"{name}: windows", windows)
    for part, average in zip(_STAGE_PARTS, stage.groups()[2:], strict=True):
        key = f"{name}: {part} ms"
        total = life.tier(key, float(average) * windows)
        if total.how == "derived" and total.value is not None:
            why = "difference of average x windows, printed to 0.001 ms a window"
            total = Value.derived(round(total.value, 3), why)
        facts[key] = total


def _card_facts(card: re.Match[str], facts: dict[str, Value], life: LifeState) -> None:
    name = f"CUDA{int(card[1])}"
    facts[f"{name}: expert entries"] = measured(int(card[2]))
    facts[f"{name}: layer launches"] = measured(int(card[3]))
    facts[f"{name}: MiB returned"] = measured(float(card[4]))
    for part, ms in (("staging + launching", card[5]), ("waiting", card[6])):
        key = f"{name}: {part} ms"
        facts[key] = measured(float(ms)) if card[7] else life.tier(key, float(ms))


def batch_fact(text: str, life: LifeState) -> bool:
    """The averages of a stretch of batched windows: of all its slots, so of the life."""
    found = _BATCH.match(text)
    if found is None:
        return False
    for name, value in zip(
        ("windows", "rows a window", "ms a window", "run ms a window"), found.groups(), strict=True
    ):
        life.facts[f"batch {name} (last line)"] = measured(float(value))
    if rate := _BATCH_RATE.search(text):
        life.facts["batch rows/s (last line)"] = measured(float(rate[1]))
        life.facts["batch wall ms (last line)"] = measured(float(rate[2]))
    return True


def decode_stages(text: str, draft: Draft) -> bool:
    """`strata decode GPU stages (ms/window): GDN layers: ... | QSA layers: ... | total ...`."""
    total = _GPU_TOTAL.search(text)
    layers = _GPU_LAYERS.findall(text[:8192])
    if total is None and not layers:
        return False
    if total:
        draft.facts["decode GPU ms a window"] = measured(float(total[1]))
    kept = 0
    for kind, body in layers:
        for name, ms in _GPU_STAGE.findall(body):
            clean = safe_name(name)
            if clean is not None and kept < STAGES_LIMIT:
                draft.facts[f"decode {kind}: {clean} ms a window"] = measured(float(ms))
                kept += 1
    return True


def pool_phases(text: str, draft: Draft) -> bool:
    """`strata decode CPU pool phases: ...` of one fork."""
    found = _POOL.match(text)
    if found is None:
        return False
    for name, ms in zip(("gate/up", "quantise", "down"), found.groups()[1:], strict=True):
        draft.facts[f"CPU pool: {name} ms a window"] = measured(float(ms))
    return True
