"""Strata's prefill timing: runs of the prompt path, their stages, and their counters.

A run is one line pair of STRATA_PREFILL_TIMING. `place` says which runs are stages that
overlap; `Counters` turns counters that only grow into differences inside one engine life.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from slotwise.explain.readers import strata_grammar as g
from slotwise.explain.record import Phase, Value, safe_name
from slotwise.explain.requests import kept

JSON_LIMIT = 32 << 10
PHASE_LIMIT = 64
LIST_LIMIT = 4096


@kept
@dataclass(slots=True)
class Run:
    """One prefill timing line and the host line after it. All in ms."""

    tokens: int
    gpu: float
    wall: float | None
    staging: float | None
    phases: dict[str, float]
    kind: str = "run"
    """run, [chunk] (SYCL), or prompt and chunk (a fork that prints no wall)."""
    hidden_names: int = 0
    setup: float | None = None
    waiting: float = 0.0
    after: float = 0.0
    ple: float | None = None
    has_host: bool = False
    line: int = 0
    exact: bool = False
    peer: dict[str, float] = field(default_factory=dict[str, float])


def parse_phases(text: str, *, peer: bool = False) -> tuple[dict[str, float], int]:
    """Names and ms of a phase list, and how many names were not fit to be kept."""
    found: dict[str, float] = {}
    refused = end = 0
    for match in (g.PEER_PHASE if peer else g.PHASE).finditer(text[:LIST_LIMIT]):
        # half a name is none: what a name cannot begin with was skipped before this one
        skipped, end = text[end : match.start()].strip(" ,.…"), match.end()
        name = None if skipped else safe_name(match[1].lstrip(" ,.…"))
        if name is None or len(found) >= PHASE_LIMIT:
            refused += 1
        else:
            found[name] = found.get(name, 0.0) + float(match[2])
    return found, refused


def parse_run(text: str) -> Run | None:
    """A line after ``strata prefill timing: `` that describes a run, else None."""
    if match := g.RUN.match(text):
        phases, refused = parse_phases(match[6])
        kind = "chunk" if match[1] else "run"
        return Run(
            int(match[2]), float(match[3]), float(match[4]), float(match[5]), phases, kind, refused
        )
    if match := g.FRENCH_PROMPT.match(text):
        phases, refused = parse_phases(match[2])
        return Run(0, float(match[1]), None, None, phases, "prompt", refused)
    if match := g.FRENCH_CHUNK.match(text):
        phases, refused = parse_phases(match[5])
        tokens = max(0, int(match[3]) - int(match[2]))
        return Run(tokens, float(match[4]), None, None, phases, "fork chunk", refused)
    return None


def add_host(run: Run, text: str) -> bool:
    match = g.HOST.match(text)
    if match is None:
        return False
    run.setup, run.waiting, run.after = float(match[1]), float(match[2]), float(match[3])
    run.ple = float(match[4]) if match[4] else None
    run.has_host = True
    return True


def parse_json(text: str) -> dict[str, Any] | None:
    """The object of a ``strata prefill phases:`` or ``transfer:`` line, if it is one."""
    if len(text) > JSON_LIMIT:
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def number(data: Mapping[str, Any], key: str) -> float | None:
    value = data.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value < 1e15 else None


def run_of_json(data: Mapping[str, Any]) -> Run | None:
    """The Xe fork's exact phase times as a run of their own."""
    phases, gpu = data.get("phase_ms"), number(data, "gpu_timeline_ms")
    if not isinstance(phases, dict) or gpu is None:
        return None
    run = Run(0, gpu, number(data, "wall_ms"), None, {})
    for key in list(phases)[:PHASE_LIMIT]:
        name, ms = safe_name(key), number(phases, key)
        if name is None:
            run.hidden_names += 1
        elif ms:
            run.phases[name] = ms
    run.setup = number(data, "host_setup_ms")
    run.waiting = number(data, "host_chunk_wait_ms") or 0.0
    run.after = number(data, "host_after_chunk_ms") or 0.0
    run.has_host, run.exact = run.setup is not None, True
    return run


def merge_json(runs: list[Run], data: Mapping[str, Any]) -> bool:
    """Make the last run exact; a run with no text line before it is one of its own."""
    found = run_of_json(data)
    if found is None:
        return False
    last = runs[-1] if runs else None
    if last is None or last.exact or abs(last.gpu - found.gpu) > 1:
        runs.append(found)
    else:
        last.phases, last.gpu, last.exact = found.phases, found.gpu, True
        last.hidden_names += found.hidden_names
    return True


@dataclass(slots=True)
class Placed:
    """Runs of one request by stage. More than one stage: they overlapped."""

    lanes: dict[str, list[Run]]
    split: bool


def place(runs: Sequence[Run], total: int | None, *, split: bool = False) -> Placed:
    """Sort a request's runs into lanes. `total`: tokens read in batches, where known.

    In a layer split an earlier stage prints one run for the whole part and the last stage
    one per chunk, so a run as long as all the others together is the first stage's. `split`
    says that this engine is known to be split.
    """
    lanes: dict[str, list[Run]] = {}
    plain = [run for run in runs if run.kind == "run"]
    for run in runs:
        if run.kind != "run":
            lanes.setdefault("gpu timeline (chunks)" if "chunk" in run.kind else "run", []).append(
                run
            )
    whole = first_stage(plain, total)
    if not whole and split and plain:
        whole = [run for run in plain if run.has_host and not run.waiting and not run.after]
    elif not whole:
        if plain:
            lanes["run"] = [*lanes.get("run", []), *plain]
        return Placed(lanes, False)
    rest = [run for run in plain if all(run is not w for w in whole)]
    last = [run for run in rest if run.waiting or run.after or not run.has_host] or rest
    middle = [run for run in rest if all(run is not r for r in last)]
    if whole:
        lanes["stage 0"] = whole
    between = _middle_stages(middle, len(last))
    for number, runs_of_one in enumerate(between, 1):
        lanes[f"stage {number}"] = runs_of_one
    if last:
        lanes[f"stage {len(between) + 1}"] = last
    return Placed(lanes, True)


def _middle_stages(runs: Sequence[Run], chunks: int) -> list[list[Run]]:
    """Every stage between the first and the last prints one run per chunk, the earlier first.

    Which run is whose: `host staging` never falls within a stage, no stage is ahead of the one
    before it, and of those that fit the one that is behind. One list where none fits.
    """
    if not runs:
        return []
    count, left = divmod(len(runs), chunks) if chunks else (1, 0)
    if left or count < 2:
        return [list(runs)]
    stages: list[list[Run]] = [[] for _ in range(count)]
    for run in runs:
        fits = [
            stage
            for number, stage in enumerate(stages)
            if len(stage) < chunks
            and (not number or len(stage) < len(stages[number - 1]))
            and (not stage or (stage[-1].staging or 0.0) <= (run.staging or 0.0))
        ]
        if not fits:
            return [list(runs)]
        min(fits, key=len).append(run)
    return stages


def first_stage(plain: Sequence[Run], total: int | None) -> list[Run]:
    """The runs of the first stage of a layer split, or nothing when it is not one."""
    if len(plain) < 2:
        return []
    everything = sum(run.tokens for run in plain)
    quiet = [run for run in plain if run.has_host and not run.waiting and not run.after]
    for run in reversed(quiet or plain):
        others = everything - run.tokens
        known = total is None or abs(total - run.tokens) <= 64
        enough = total is not None or (len(plain) > 2 and others == run.tokens)
        if known and enough and run.tokens > 0 and others % run.tokens == 0 and others:
            return [run]
    if total and everything >= 2 * total - 64 and quiet and len(quiet) < len(plain):
        covered = sum(run.tokens for run in quiet)
        if abs(covered - total) <= 64:
            return quiet
    return []


def separate(runs: Sequence[Run]) -> list[list[Run]]:
    """Cut runs without any request line around them after each first-stage run."""
    groups: list[list[Run]] = []
    current: list[Run] = []
    for run in runs:
        others = sum(r.tokens for r in current)
        current.append(run)
        if len(current) > 2 and run.tokens == others:
            groups.append(current)
            current = []
    return [*groups, current] if current else groups


class Counters:
    """Counters that grow for as long as an engine lives, as differences."""

    def __init__(self, last: Mapping[str, float] | None = None) -> None:
        self.last = dict(last or {})

    def copy(self) -> Counters:
        return Counters(self.last)

    def skip(self, placed: Placed) -> None:
        """Take the readings of these runs without a difference."""
        for lane, runs in placed.lanes.items():
            for name, values in _counted(runs):
                self.last[f"{name}/{lane}"] = values[-1]

    def fell(self, key: str, value: float) -> bool:
        return value < self.last.get(key, value)

    def delta(self, key: str, values: Sequence[float], *, whole: bool = True) -> Value:
        """What the counter grew by over `values`, the readings of one request in order.

        Not `whole`: lines of this request, or requests before it, may not be in the log.
        """
        before = self.last.get(key)
        self.last[key] = values[-1]
        steps = list(values) if before is None else [before, *values]
        if any(later < earlier for earlier, later in pairwise(steps)):
            return Value.missing("this counter fell inside one engine life, so no difference holds")
        if before is None:
            why = "counts up since the engine started; this is its first value in the log"
            return Value.bounded(values[-1] - values[0], values[-1], why)
        if not whole:
            why = "counts up; what lies between it and the value before is not in the log"
            return Value.bounded(values[-1] - values[0], values[-1] - before, why)
        return Value.derived(values[-1] - before, "difference of a counter that only grows")


def gpu_phases(lane: str, runs: Iterable[Run], *, host_clock: bool = False) -> list[Phase]:
    """Phases of the GPU timeline, summed over the runs of one lane."""
    sums: dict[str, float] = {}
    for run in runs:
        for name, ms in run.phases.items():
            sums[name] = sums.get(name, 0.0) + ms
    also = "; this port attributes a host clock, not GPU events" if host_clock else ""
    return [
        Phase(f"gpu: {name}", Value.measured(ms), lane, g.CONTAINS.get(name, g.IDLE) + also)
        for name, ms in sums.items()
    ]


def lane_phases(
    lane: str, runs: Sequence[Run], counters: Counters, *, host_clock: bool, whole: bool
) -> tuple[list[Phase], list[Phase]]:
    """(phases, remainders) of one lane of runs. None of them is part of the request's sum."""
    gpu_lane = "gpu timeline" if lane == "run" else lane
    host_lane = "host" if lane == "run" else lane
    tokens = sum(run.tokens for run in runs) or None
    gpu = sum(run.gpu for run in runs)
    phases = [Phase("GPU timeline", Value.measured(gpu), gpu_lane, g.IDLE, tokens=tokens)]
    phases += gpu_phases(gpu_lane, runs, host_clock=host_clock)
    named = sum(sum(run.phases.values()) for run in runs)
    why = "GPU timeline minus its named phases; each is printed rounded"
    rest = [Phase("GPU timeline - named phases", Value.derived(gpu - named, why), gpu_lane)]
    walls = [run.wall for run in runs if run.wall is not None]
    if walls:
        phases.append(Phase("prefill wall", Value.measured(sum(walls)), host_lane, tokens=tokens))
        holds = "work before the first mark, the last chunk's sync and callback, the final sync"
        value = Value.derived(sum(walls) - gpu, "wall minus GPU timeline")
        rest.append(Phase("wall - GPU timeline", value, host_lane, holds))
    phases += _host(host_lane, runs)
    for name, values in _counted(runs):
        delta = counters.delta(f"{name}/{lane}", values, whole=whole)
        holds = "a thread of its own, beside the GPU; may exceed the wall time"
        phases.append(Phase(f"host: {name}", delta, host_lane, holds))
    for run in runs:
        phases += [
            Phase(f"peer: {n}", Value.measured(ms), "peer gpu") for n, ms in run.peer.items()
        ]
    return phases, rest


def _counted(runs: Sequence[Run]) -> list[tuple[str, list[float]]]:
    """The counters that these runs printed, with their readings in order."""
    readings = (
        ("host staging", [run.staging for run in runs if run.staging is not None]),
        ("PLE", [run.ple for run in runs if run.ple is not None]),
    )
    return [(name, values) for name, values in readings if values]


def _host(lane: str, runs: Sequence[Run]) -> list[Phase]:
    timed = [run for run in runs if run.has_host]
    if not timed:
        return []
    sums = {
        "chunk setup": sum(run.setup or 0.0 for run in timed),
        "waiting for each chunk": sum(run.waiting for run in timed),
        "after each chunk": sum(run.after for run in timed),
    }
    holds = {"after each chunk": "the draft layer, progress and periodic checkpoints"}
    return [
        Phase(f"host: {name}", Value.measured(ms), lane, holds.get(name, ""))
        for name, ms in sums.items()
    ]
