"""A model far larger than this machine, as far as our own bookkeeping goes.

    python -m bench.scale [--layers 48] [--experts 512] [--used 10] [--slots-memory 16GiB]

Planning, residency, policy, look-ahead, loans, refill and replay run with the real numbers of a
model of 48 layers x 512 experts (Q4_K, 2.8 MB an expert, 68 GB in all); its weights do not exist.
The store delivers nothing, in decode after 1.5 ms; all slots share one piece of memory. So what is
left is what this project's own code costs the host: the processor time of the engine's thread, for
each layer and window. Nothing here says how fast such a model would be.

Routing is made up: every layer likes some experts more (Zipf), and a token keeps about a third of
the last token's experts, as recorded on a real model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Any

import click
import numpy as np

from bench.report import HERE, finish
from slotwise.bench.record import BenchRecord
from slotwise.bench.stats import estimate
from slotwise.engine.forecast import expected_bytes
from slotwise.engine.memory import Budget, MemoryPlan, divide
from slotwise.experts import Experts
from slotwise.experts.replay import belady, replay
from slotwise.experts.routing import Routing, RoutingRecorder
from slotwise.sizes import parse_size
from slotwise.weights.direct_io import aligned_buffer
from slotwise.weights.ggml_types import tensor_bytes
from slotwise.weights.layout import ExpertLayout, Projection, SlotClass

Q4_K = 12
N_EMBD, N_FF = 2560, 640
KEPT = 0.36
"""Share of a token's experts that the last token used too."""
WANTED_US = 100
MOST_GROWN = 1.5
SMALL = "a small model, the same part"
SECONDS = 0.0015
"""One read, about as long as a disk of 1.8 GB/s takes."""
HOW = {
    "us_per_layer": "measured: processor time of the engine's thread in one window (place for "
    "every layer, window_done), over its layers",
    "wall_us_per_layer": "measured: wall time of the same, the made-up reads waited for",
    "us_per_miss": "derived: processor time of a window over the experts it had to fetch",
    "results": "derived: median of the windows with a t interval",
}


def layout(*, layers: int, experts: int, used: int) -> ExpertLayout:
    """The experts of such a model, all of one class."""
    projections, offset = [], 0
    shapes = (("gate", N_EMBD, N_FF), ("up", N_EMBD, N_FF), ("down", N_FF, N_EMBD))
    for name, n_in, n_out in shapes:
        # 640 values are no whole number of Q4_K blocks; the sizes count, not the type
        nbytes = tensor_bytes(Q4_K, (n_in * n_out, 1))
        projections.append(Projection(name, Q4_K, n_in, n_out, offset, nbytes))  # pyright: ignore[reportArgumentType]
        offset += -(-nbytes // 64) * 64
    slot = SlotClass(0, tuple(projections), -(-offset // 4096) * 4096)
    return ExpertLayout(experts, used, tuple(range(layers)), (slot,), (0,) * layers)


class NoStore:
    """Delivers every expert at once, without its bytes."""

    direct, note = True, "nothing is read"

    def __init__(self, layout: ExpertLayout) -> None:
        self.layout, self.seconds = layout, 0.0

    def read(self, moe_index: int, expert: int, target: memoryview) -> int:
        if self.seconds:
            time.sleep(self.seconds)
        return target.nbytes

    def where(self, moe_index: int, expert: int) -> tuple[str, int]:
        return "nothing", 0

    def close(self) -> None: ...


class NoArena:
    """As large as one likes; every slot is the same piece of memory."""

    def __init__(self, size: int, slot_bytes: int) -> None:
        self.size, self._memory = size, aligned_buffer(slot_bytes)

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self._memory[:nbytes]


@dataclass(frozen=True)
class Router:
    """Made-up choices of experts."""

    layout: ExpertLayout
    seed: int = 0

    def windows(self, n: int) -> Iterator[np.ndarray]:
        """int32 [layers, used], one a token."""
        rng, shape = np.random.default_rng(self.seed), self.layout
        layers, experts, used = shape.n_moe_layers, shape.n_experts, shape.n_used
        liking = 1.0 / np.arange(1, experts + 1)
        order = np.stack([rng.permutation(experts) for _ in range(layers)])
        now = np.zeros((layers, used), np.int32)
        for step in range(n):
            for layer in range(layers):
                keep = now[layer][rng.random(used) < KEPT] if step else now[layer][:0]
                draws = rng.choice(experts, 4 * used, p=liking / liking.sum())
                fresh = [e for e in dict.fromkeys(order[layer][draws].tolist()) if e not in keep]
                fresh += [e for e in range(experts) if e not in keep and e not in fresh][:used]
                now[layer] = [*keep, *fresh[: used - len(keep)]]
            yield now.copy()


def open_experts(shape: ExpertLayout, nbytes: int, **settings: Any) -> tuple[Experts, MemoryPlan]:
    """Plans `nbytes` for expert slots, as the engine does, and fills them with nothing."""
    needs = MemoryPlan(
        budget=Budget(nbytes, "made up"), dense=0, state=0, windows=0, work=0, scratch=0
    )
    plan = divide(needs, shape)
    arena = NoArena(plan.arena, shape.classes[0].slot_bytes)
    return Experts(NoStore(shape), arena, slots=plan.slots, **settings), plan


def window(experts: Experts, routed: np.ndarray, out: np.ndarray, guess: np.ndarray | None) -> None:
    """What the decode path asks of `Experts` in one window; `guess` is the next token's routing."""
    ahead = experts.looks_ahead()
    for layer, chosen in enumerate(routed):
        foreseen: list[int] = []
        if ahead and guess is not None and layer + 1 < len(routed):
            foreseen = guess[layer + 1].tolist()
        if not experts.place(layer, chosen, out, foreseen):
            experts.complete()
    experts.window_done(routed, 1, looked_ahead=ahead)


@click.command()
@click.option("--layers", default=48, show_default=True)
@click.option("--experts", "n_experts", default=512, show_default=True)
@click.option("--used", default=10, show_default=True)
@click.option("--slots-memory", default="16GiB", show_default=True)
@click.option("--windows", "n_windows", default=200, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=HERE / "out")
@click.option("--json", "as_json", is_flag=True, help="Print the record, not the table.")
def main(
    layers: int,
    n_experts: int,
    used: int,
    slots_memory: str,
    n_windows: int,
    out: Path,
    as_json: bool,
) -> None:
    """Measure the bookkeeping of a model that is not here."""
    nbytes = parse_size(slots_memory)
    shape = layout(layers=layers, experts=n_experts, used=used)
    record = BenchRecord(
        bench="scale",
        settings={
            "layers": layers,
            "experts": n_experts,
            "used": used,
            "slot_bytes": shape.classes[0].slot_bytes,
            "all_experts_bytes": shape.total_bytes,
            "slots_bytes": nbytes,
            "windows": n_windows,
        },
        how=HOW,
    )
    routed = list(Router(shape).windows(n_windows + 1))
    rows = [*_decode(record, shape, nbytes, routed), *_rest(record, shape, nbytes, routed)]
    finish(record, columns=("", "median", "p99", "unit"), rows=rows, out=out, as_json=as_json)


def _decode(
    record: BenchRecord, shape: ExpertLayout, nbytes: int, routed: list[np.ndarray]
) -> list[list[str]]:
    """The arms; the last is a model of an eighth of the layers and experts, with as large a share
    of them in slots: what costs more in the large model for each missing expert has grown."""
    small = layout(layers=shape.n_moe_layers // 6, experts=shape.n_experts // 8, used=shape.n_used)
    part = small.total_bytes * nbytes // shape.total_bytes
    few = list(Router(small).windows(len(routed)))
    arms = (
        ("everything resident", shape, shape.total_bytes, "off", routed),
        ("slots for a part", shape, nbytes, "off", routed),
        ("slots for a part, looking ahead", shape, nbytes, "on", routed),
        (SMALL, small, part, "off", few),
    )
    for name, its_shape, budget, mode, windows in arms:
        record.samples.append(_arm(name, its_shape, budget, mode, windows))
    found = {sample["arm"]: sample for sample in record.samples}
    rows = [
        _row(f"decode, {name}: us a layer", s["us_per_layer"], "us") for name, s in found.items()
    ]
    for name, sample in found.items():
        record.results[f"{name}, us a layer and window"] = estimate(sample["us_per_layer"])
        if misses := sample["us_per_miss"]:
            record.results[f"{name}, us a missing expert"] = estimate(misses)
            rows.append(_row(f"decode, {name}: us a missing expert", misses, "us"))
    resident = float(np.median(found["everything resident"]["us_per_layer"]))
    record.check(
        "host time of a layer whose experts are resident",
        wanted=f"below {WANTED_US} us",
        found=f"{resident:.1f} us",
        passed=resident < WANTED_US,
    )
    grown = float(
        np.median(found["slots for a part"]["us_per_miss"]) / np.median(found[SMALL]["us_per_miss"])
    )
    record.check(
        "host time of a missing expert, against a small model",
        wanted=f"at most {MOST_GROWN} times",
        found=f"{grown:.2f} times",
        passed=grown <= MOST_GROWN,
    )
    return rows


def _arm(
    name: str, shape: ExpertLayout, nbytes: int, mode: str, routed: list[np.ndarray]
) -> dict[str, Any]:
    experts, plan = open_experts(shape, nbytes, lookahead=mode)
    experts.warm()
    experts._store.seconds = SECONDS  # pyright: ignore[reportAttributeAccessIssue]
    slots = np.empty(shape.n_used, np.int32)
    sample: dict[str, Any] = {"arm": name, "slots": sum(plan.slots)}
    cpu, wall, each = [], [], []
    begun = before = experts.snapshot().decode
    for chosen, following in pairwise(routed):
        begin, begin_cpu = perf_counter_ns(), thread_time_ns()
        window(experts, chosen, slots, following)
        took = (thread_time_ns() - begin_cpu) / 1e3
        wall.append((perf_counter_ns() - begin) / 1e3 / len(chosen))
        cpu.append(took / len(chosen))
        now = experts.snapshot().decode
        if missed := now.misses - before.misses:
            each.append(took / missed)
        before = now
    stats = before - begun
    experts.close()
    return sample | {
        "hit_rate": stats.hits / (stats.hits + stats.misses),
        "misses_per_layer": stats.misses / len(cpu) / shape.n_moe_layers,
        "us_per_layer": cpu,
        "wall_us_per_layer": wall,
        "us_per_miss": each,
    }


def _row(name: str, values: list[float], unit: str) -> list[str]:
    return [name, f"{np.median(values):,.1f}", f"{np.percentile(values, 99):,.1f}", unit]


def _rest(
    record: BenchRecord, shape: ExpertLayout, nbytes: int, routed: list[np.ndarray]
) -> list[list[str]]:
    """What happens once for each request, or less often: milliseconds, or microseconds each."""
    rows: list[list[str]] = []

    def timed(name: str, action: Callable[[], Any], *, times: int = 5, each: float = 0) -> None:
        values = []
        for _ in range(times):
            begin = perf_counter_ns()
            action()
            values.append((perf_counter_ns() - begin) / (1e3 * each if each else 1e6))
        record.results[name] = estimate(values)
        rows.append(_row(name, values, "us" if each else "ms"))

    experts, plan = open_experts(shape, nbytes)
    timed("plan the slots", lambda: open_experts(shape, nbytes)[0].close(), times=2)
    timed("warm, for each slot", experts.warm, times=1, each=sum(plan.slots))
    part = 256 << 20

    def refill() -> None:
        experts.give_back(experts.lend(part))
        experts.refill()
        while experts.refill_state().active:
            time.sleep(0.0005)

    def lend() -> None:
        experts.give_back(experts.lend(part))
        experts.warm()

    lent = -(-part // shape.classes[0].slot_bytes)
    timed("lend 256 MiB and warm again", lend)
    timed("lend and refill, for each slot", refill, each=lent)
    _read(experts, shape, timed)
    table = experts.pool.table >= 0
    sizes = np.full(shape.n_moe_layers, shape.classes[0].slot_bytes)
    chunks = [512] * 4
    heat = experts.policy.heat
    timed("forecast of a 2,048-token read", lambda: expected_bytes(chunks, heat, table, sizes, 10))
    experts.close()
    routing, calls = _recorded(shape, routed), len(routed) * shape.n_moe_layers
    timed("replay, for each call", lambda: replay(routing, shape, plan.slots), times=1, each=calls)
    timed("Belady, for each call", lambda: belady(routing, shape, plan.slots), times=1, each=calls)
    return rows


def _read(experts: Experts, shape: ExpertLayout, timed: Callable[..., None]) -> None:
    """A chunk of 512 tokens that wants every expert of every layer."""
    everyone = np.arange(shape.n_experts, dtype=np.int32)
    counts = np.full(shape.n_experts, 512 * shape.n_used // shape.n_experts, np.int64)

    def read() -> None:
        experts.stage = "read"
        for layer in range(shape.n_moe_layers):
            experts.touch(layer, everyone, counts)
            for _ in experts.stream(layer, everyone):
                pass
        experts.stage = "decode"

    timed("read a chunk, for each expert", read, times=3, each=shape.n_total)


def _recorded(shape: ExpertLayout, routed: list[np.ndarray]) -> Routing:
    recorder = RoutingRecorder(shape)
    nobody = np.full((shape.n_moe_layers, shape.n_experts), -1, np.int32)
    for chosen in routed:
        recorder.begin("decode", nobody)
        for layer, experts in enumerate(chosen):
            recorder.add(layer, experts, None)
    return recorder.routing()


if __name__ == "__main__":
    main()
