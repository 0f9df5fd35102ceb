"""The whole of `slotwise bench MODEL`: prepare, take turns, reckon, make the record."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slotwise.bench.cgroup import NoGroup, memory_group
from slotwise.bench.disk import disk_speed
from slotwise.bench.limit import Best, best_bytes
from slotwise.bench.prose import cut, prose
from slotwise.bench.record import BenchRecord
from slotwise.bench.results import HOW, Line, lines
from slotwise.bench.stats import estimate
from slotwise.bench.turns import MOST_CROWDING, OURS, Plan, Runner, locked
from slotwise.engine.loading import blueprint
from slotwise.engine.memory import available
from slotwise.engine.settings import EngineSettings
from slotwise.errors import SlotwiseError
from slotwise.experts.routing import load_routing
from slotwise.experts.store import open_store
from slotwise.weights.layout import ExpertLayout
from slotwise.weights.pack import default_pack_path
from slotwise.weights.pack_index import EXPERTS
from slotwise.weights.shards import ModelFile, open_model
from slotwise.weights.tokenizer import Tokenizer

SMALL_GROUP = 64 << 20
DISK_ROUNDS = 4
MORE_THAN_ANY = 1 << 20
Say = Callable[[str], None]
Step = Callable[[str, int, int], None]
"""(what is measured next, turns done, turns in all)"""


class NothingMeasured(SlotwiseError):
    """No turn of our engine came to an end."""

    exit_code = 3


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The record to keep, and the lines of the table."""

    record: BenchRecord
    lines: list[Line]
    notes: list[str]
    """What was left out, and why."""


def run(plan: Plan, *, say: Say, step: Step) -> Outcome:
    """Measures `plan`. Raises Refused for a model that cannot be read, NothingMeasured."""
    model = open_model(plan.model)
    drawing = blueprint(model)
    notes: list[str] = []
    plan = _possible(plan, model, drawing.layout, notes)
    for note in notes:
        say(note)
    tokens = Tokenizer.from_metadata(model.metadata).encode(prose(), special=False, add_bos=False)
    record = BenchRecord(bench="beyond_memory", settings=_settings(plan), how=dict(HOW))
    speeds: list[float] = []
    with tempfile.TemporaryDirectory(prefix="slotwise-bench-") as scratch:
        runner = Runner(
            plan=plan,
            tokens=lambda n: cut(tokens, n, start=n),
            scratch=Path(scratch),
        )
        turns = list(plan.turns())
        number, begin = -1, time.monotonic()
        for done, turn in enumerate(turns):
            if turn.number != number:
                if plan.minutes and done and time.monotonic() - begin > plan.minutes * 60:
                    notes.append(f"{turn.number} of {plan.pairs} rounds: the time was over")
                    say(notes[-1])
                    break
                number = turn.number
                if drawing.layout is not None:
                    speeds += _disk(model, drawing.layout, plan, record)
            step(str(turn), done, len(turns))
            record.samples.extend(runner.run(turn))
        step("reckoning", len(turns), len(turns))
        record.workers = runner.workers
        bests = _Bests(runner.routings)
        found = lines(
            plan,
            record.samples,
            bests=bests,
            bytes_per_second=estimate(speeds).median if speeds else None,
        )
    if not any(s["arm"] == OURS and "failed" not in s for s in record.samples):
        why = next((s["failed"] for s in record.samples if "failed" in s), "no turns")
        raise NothingMeasured(f"nothing could be measured: {why}")
    _fill(record, found, speeds)
    _check(record)
    share, aside = crowding_of(record)
    if share > MOST_CROWDING:
        notes.append(
            f"others had the cores for up to {share:.0%} of a turn, {aside} turns taken again: "
            "these figures say more of them than of us."
        )
        say(f"warning: {notes[-1]}")
    return Outcome(record=record, lines=found, notes=notes)


def files_of(model: ModelFile) -> tuple[Path, ...]:
    """Everything an engine may read of a model."""
    pack = default_pack_path(model) / EXPERTS
    return (*(shard.path for shard in model.shards), *([pack] if pack.exists() else []))


def _possible(plan: Plan, model: ModelFile, layout: ExpertLayout | None, notes: list[str]) -> Plan:
    """The plan less what cannot be done here; says so in `notes`."""
    plan = replace(plan, files=files_of(model))
    if any(plan.limits):
        try:
            with memory_group(SMALL_GROUP):
                pass
        except NoGroup as error:
            notes.append(
                f"{error}. Our engine runs with the limit as its budget; nothing is compared "
                "with llama.cpp under a limit."
            )
            plan = replace(plan, grouped=False)
    everything = EngineSettings(
        slots=MORE_THAN_ANY if layout else None, threads=plan.threads, context=plan.context
    )
    needed, room = blueprint(model).plan(everything).total, available().nbytes
    if None in plan.limits and needed > room:
        notes.append(
            f"everything in memory takes {needed / 2**20:,.0f} MiB and {room / 2**20:,.0f} MiB are "
            "free: computing is not measured, so there is no limit to compare with."
        )
        plan = replace(plan, limits=tuple(n for n in plan.limits if n is not None))
    return plan


def _disk(
    model: ModelFile, layout: ExpertLayout, plan: Plan, record: BenchRecord
) -> Sequence[float]:
    store = open_store(model, layout)
    try:
        with locked(plan.lock):
            found = disk_speed(store, lanes=plan.io_lanes, rounds=DISK_ROUNDS)
    finally:
        store.close()
    record.samples.append(
        {
            "arm": "disk", "limit_bytes": None, "prompt_tokens": None,
            "bytes_per_second": list(found.rounds), "read_bytes": found.read_bytes,
            "lanes": found.lanes, "direct": found.direct, "store": store.note,
        }
    )  # fmt: skip
    return found.rounds


class _Bests:
    """Belady's bytes by prompt and slots; each reckoned once."""

    def __init__(self, routings: dict[int, Path]) -> None:
        self._routings = {n: load_routing(path) for n, path in routings.items()}
        self._known: dict[tuple[int, tuple[int, ...]], Best] = {}

    def __call__(self, prompt: int, slots: Sequence[int]) -> Best | None:
        routing = self._routings.get(prompt)
        if routing is None:
            return None
        key = prompt, tuple(slots)
        if key not in self._known:
            self._known[key] = best_bytes(routing, slots)
        return self._known[key]


def _settings(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.model.name,
        "limits": ["resident" if n is None else n for n in plan.limits],
        "prompts": list(plan.prompts),
        "decode_tokens": plan.decode,
        "decode_after": plan.decode_after,
        "decode_seconds": plan.decode_seconds,
        "pairs": plan.pairs,
        "threads": plan.threads,
        "context": plan.context,
        "io_lanes": plan.io_lanes,
        "in_a_group": plan.grouped,
        "against": plan.peer is not None,
    }


def _fill(record: BenchRecord, found: Sequence[Line], speeds: Sequence[float]) -> None:
    if speeds:
        record.results["disk, bytes/s"] = estimate(speeds)
        record.how["disk, bytes/s"] = "measured: the engine's own store, experts at random"
    for line in found:
        for name, value in line.figures.items():
            record.results[f"{line.where}, {line.what}, {name}"] = value
        for name, why in line.missing.items():
            record.missing[f"{line.where}, {line.what}, {name}"] = why


def crowding_of(record: BenchRecord) -> tuple[float, int]:
    """The largest share of a turn that counts in which a computing thread was kept from a core, and
    how many turns were taken again for that."""
    counted = [s.get("crowding", 0.0) for s in record.samples if "set_aside" not in s]
    return max(counted, default=0.0), len(record.samples) - len(counted)


def _check(record: BenchRecord) -> None:
    ours = [s for s in record.samples if s["arm"] == OURS]
    failed = [s for s in ours if "failed" in s]
    record.check(
        "our engine lives within every limit",
        wanted="no turn fails",
        found=failed[0]["failed"] if failed else f"{len(ours)} of {len(ours)} turns ended",
        passed=not failed,
    )
    matches = [s["tokens_match"] for s in ours if s.get("tokens_match") is not None]
    record.check(
        "the same tokens whatever the memory",
        wanted="all",
        found=f"{sum(matches)} of {len(matches)} answers alike",
        passed=all(matches),
    )
